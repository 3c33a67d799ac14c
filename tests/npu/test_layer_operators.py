"""What npu asks of torch_npu: every call fits the schemas of three releases, and which results depend on the emulator's beliefs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_cases import assert_within, batch_of, cache_of, normal, numpy_of, pages_of, precision

import npu
import reference.dense
import reference.paged
from fattn.types import Range, causal, chunk, window
from npu import _operators, limits
from npu.emulator import assumptions, schemas


@pytest.fixture(params=schemas.VERSIONS)
def release(request, monkeypatch):
    """npu's operators with the schemas of a release of torch_npu: every call is checked against them, then runs. The calls by name."""
    calls = {}

    class Operator:
        def __init__(self, real, name):
            self.real, self.name = real, name
            self._schema = torch._C.parse_schema(schemas.load(request.param)[name])

        def __call__(self, *args, **kwargs):
            schemas.bind(request.param, self.name, args, kwargs)
            calls[self.name] = calls.get(self.name, 0) + 1
            return self.real(*args, **kwargs)

    real = _operators._operator
    monkeypatch.setattr(_operators, "_operator", lambda space, name, device: Operator(real(space, name, device), f"{space}::{name}"))
    return request.param, calls


def test_every_call_fits_the_schemas_of_three_releases(release):
    version, calls = release
    for case in CASES.values():
        case()
    for turn in (npu.rope.half, npu.rope.interleaved):
        turn(torch.zeros(2, 3, 8), torch.ones(2, 4), torch.zeros(2, 4))
    batch = batch_of([1, 1], [5, 3], block_size=128)
    cache, rows = cache_of(batch, 2, 64), normal(2, 2, 64, seed=4)
    npu.paged.write(cache, rows, rows, torch.from_numpy(batch.slot_mapping))
    expected = reference.paged.write(pages_of(cache), numpy_of(rows), numpy_of(rows), batch.slot_mapping)
    found = cache.k.view(-1, 2, 64)[torch.from_numpy(batch.slot_mapping).long()]
    assert (numpy_of(found) == expected.k.reshape(-1, 2, 64)[batch.slot_mapping]).all()
    write = "atb::_npu_reshape_and_cache" if version == "2.8.0" else "npu::npu_scatter_pa_kv_cache"
    assert calls.keys() == {"npu::npu_fused_infer_attention_score", "npu::npu_rotary_mul", write}


def paged(query_lens, seq_lens, mask, d, layout="pbhd", slopes=None, poisoned=False, table=None):
    batch = batch_of(query_lens, seq_lens, block_size=128)
    batch = batch if table is None else replace(batch, block_table=np.asarray(table, np.int32))
    cache = cache_of(batch, 2, d, layout=layout)
    if not poisoned:
        cache.k.nan_to_num_(0.0), cache.v.nan_to_num_(0.0)
    q = normal(sum(query_lens), 4, d, seed=7)
    found = npu.paged.attend(q, cache, npu.place(batch, "cpu", mask), slopes, mask=mask, scale=0.1)
    expected = reference.paged.attend(
        numpy_of(q), pages_of(cache), batch, numpy_of(slopes), mask=mask, scale=0.1, precision=precision("float16")
    )
    assert_within(found, expected)


def dense(q_pos, k_pos, mask):
    q, k, v = normal(5, 4, 64, seed=1), normal(9, 2, 64, seed=2), normal(9, 2, 64, seed=3)
    found = npu.dense.attend(q, k, v, q_pos, k_pos, mask=mask, scale=0.1)
    right = [numpy_of(x) for x in (q, k, v, q_pos, k_pos)]
    assert_within(found, reference.dense.attend(*right, mask=mask, scale=0.1, precision=precision("float16")))


CASES = {
    "dense": lambda: dense(Range(4, 5), Range(0, 9), causal()),
    "dense window": lambda: dense(Range(4, 5), Range(0, 9), window(2, 0)),
    "dense arrays": lambda: dense(torch.tensor([8, -1, 0, 3, 4]), torch.arange(9), causal()),
    "dense empty rows": lambda: dense(Range(-2, 5), Range(0, 9), causal()),
    "decode": lambda: paged([1, 1, 1], [300, 0, 7], causal(), 128),
    "decode 64": lambda: paged([1, 1, 1], [300, 0, 7], causal(), 64),
    "decode window": lambda: paged([1, 1], [300, 7], window(20, 0), 128),
    "decode slopes": lambda: paged([1, 1], [300, 7], causal(), 64, slopes=npu.dense.alibi_slopes(4)),
    "chunked": lambda: paged([5, 1, 3], [300, 7, 2], causal(), 128, layout="phbd"),
    "chunked window": lambda: paged([5, 3], [300, 7], window(20, 0), 128),
    "chunked window with decode": lambda: paged([5, 1], [300, 200], window(20, 0), 128),
    "drafts 64": lambda: paged([3, 3], [300, 7], causal(), 64),
    "chunked 64": lambda: paged([5, 1, 3], [300, 7, 2], causal(), 64),
    "chunked 64 phbd": lambda: paged([5, 1, 3], [300, 7, 2], window(20, 0), 64, layout="phbd"),
    "decode wide window": lambda: paged([1], [1000], window(900, 0), 64),
    "chunks": lambda: paged([5, 2], [300, 7], chunk(64), 64),
    "shared prefix": lambda: paged([1] * 4, [384] * 4, causal(), 128, table=[[1, 2, 3]] * 4),
    "poisoned tails": lambda: paged([1, 1], [300, 7], causal(), 64, poisoned=True),
}
# Beliefs whose other answer changes a result, and the cases that it changes: what a device must confirm (limits.CHOICES names the beliefs).
DEPENDS = {
    "padded-query-alignment": {"drafts 64", "chunked 64", "chunked 64 phbd"},
    "page-tail-arithmetic": {"poisoned tails"},
    "tnd-one-query-band": {"chunked window with decode"},
    "one-query-mask": {"decode wide window"},
    "shared-pages": {"shared prefix"},
}


def test_results_agree_under_every_variant_of_every_belief_but_the_listed():
    found = {}
    for assumption in assumptions.TABLE:
        for name in assumption.variants:
            with assumptions.variant(f"{assumption.id}:{name}"):
                for case, run in CASES.items():
                    try:
                        run()
                    except (AssertionError, RuntimeError):
                        found.setdefault(assumption.id, set()).add(case)
    assert found == DEPENDS
    assert DEPENDS.keys() == {id for choice in limits.CHOICES for id in choice.assumptions}
