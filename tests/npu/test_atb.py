"""ATB's paged attention: the decode that npu gives it, what its emulation refuses, and hosts and releases that lack it."""

import json
from dataclasses import replace

import pytest
import torch
from layer_cases import assert_within, batch_of, cache_of, launched, normal, numpy_of, pages_of, precision

import npu
import npu.emulator
import reference.paged
import reference.standard
from fattn.types import Partial, Unsupported, causal, full, window
from npu import _operators, limits
from npu.emulator import schemas

PAGED = torch.ops.atb._npu_paged_attention.default
STEPS = {"decode": [300, 1, 128], "padded decode": [300, 0, 7, 0]}


def step(lens=(300, 1, 128), *, heads=130, kv_heads=2, d=128, dv=None, dtype="float16", block_size=128, mask=None, layout="pbhd"):
    """(q, cache, batch, placed) of a decode step with 65 query heads on each key head."""
    batch = batch_of([1] * len(lens), list(lens), block_size=block_size)
    cache = cache_of(batch, kv_heads, d, value_size=dv, dtype=dtype, layout=layout)
    return normal(len(lens), heads, d, dtype=dtype, seed=7), cache, batch, npu.place(batch, "cpu", mask or causal())


def expected(q, cache, batch, mask, dtype="float16"):
    found = reference.paged.attend(numpy_of(q), pages_of(cache), batch, None, mask=mask, scale=0.1, precision=precision(dtype))
    return type(found)(found.value.out, found.bound.out)


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("mask", [causal(), full()], ids=str)
@pytest.mark.parametrize(
    ("d", "dv", "dtype", "block_size"), [(128, 128, "float16", 128), (40, 24, "bfloat16", 16), (256, 256, "float16", 64)]
)
def test_decode_is_the_oracles(lens, mask, d, dv, dtype, block_size):
    q, cache, batch, placed = step(lens, d=d, dv=dv, dtype=dtype, block_size=block_size, mask=mask)
    found, launches = launched(npu.paged.attend, q, cache, placed, mask=mask, scale=0.1, lse=False)
    assert found.lse is None and found.out.dtype == q.dtype
    assert_within(found.out, expected(q, cache, batch, mask, dtype))
    empty = {"aten::masked_fill_.Scalar": 1} if 0 in lens else {}
    assert launches == {"aten::new_empty": 1, "atb::_npu_paged_attention": 1} | empty


def test_the_callers_memory_takes_the_result():
    q, cache, batch, placed = step()
    out = Partial(torch.full_like(q, torch.nan), None)
    found, launches = launched(npu.paged.attend, q, cache, placed, mask=causal(), scale=0.1, lse=False, out=out)
    assert found.out is out.out and launches == {"atb::_npu_paged_attention": 1}
    assert_within(out.out, expected(q, cache, batch, causal()))


def test_a_decode_step_is_two_launches():
    q, cache, batch, placed = step()
    k, v = (normal(3, 2, 128, seed=seed) for seed in (21, 22))
    right, _ = reference.standard.attend_and_write(
        *(numpy_of(x) for x in (q, k, v)),
        pages_of(replace(cache, k=cache.k.clone(), v=cache.v.clone())),
        batch,
        mask=causal(),
        scale=0.1,
        precision=precision("float16"),
    )
    (found, _), launches = launched(npu.standard.attend_and_write, q, k, v, cache, placed, mask=causal(), scale=0.1)
    assert_within(found, right)
    assert launches.pop("aten::new_empty") == 1, "memory for the result, which is no launch"
    assert launches == {"npu::npu_scatter_pa_kv_cache": 1, "atb::_npu_paged_attention": 1}


def test_what_neither_operator_takes_is_refused():
    calls = {
        "an LSE": (step(), {"lse": True}, "at most 64 query heads"),
        "slopes": (step(), {"slopes": torch.ones(130)}, "at most 64 query heads"),
        "a window": (step(mask=window(20, 0)), {"mask": window(20, 0)}, "at most 64 query heads"),
        "a phbd cache": (step(layout="phbd"), {}, "at most 64 query heads"),
        "blocks of 256": (step(block_size=256), {}, "at most 128 tokens"),
        "288 dims": (step(d=288), {}, "at most 256 dims"),
        "softcap": (step(), {"softcap": 30.0}, "no cap on scores"),
        "scratch memory of the caller's": (step(), {"workspace": torch.empty(8)}, "at most 64 query heads"),
    }
    for name, ((q, cache, _, placed), given, says) in calls.items():
        with pytest.raises(Unsupported, match=says):
            npu.paged.attend(q, cache, placed, **({"mask": causal(), "scale": 0.1, "lse": False} | given))
            raise AssertionError(f"{name} was taken")
    q, cache, _, placed = step()
    before, rows = cache.k.clone(), normal(3, 2, 128)
    with pytest.raises(Unsupported, match="at most 64 query heads"):
        npu.standard.attend_and_write(q, rows, rows, cache, placed, torch.zeros(130), mask=causal(), scale=0.1)
    assert torch.equal(cache.k.nan_to_num(), before.nan_to_num())


def test_a_host_without_atb_is_told_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(_operators, "has_paged_attention", lambda: False)
    q, cache, _, placed = step()
    before, rows = cache.k.clone(), normal(3, 2, 128)
    for call in (
        lambda: npu.paged.attend(q, cache, placed, mask=causal(), scale=0.1, lse=False),
        lambda: npu.standard.attend_and_write(q, rows, rows, cache, placed, mask=causal(), scale=0.1),
    ):
        with pytest.raises(Unsupported, match="this host does not have it. Instead: install the NNAL package"):
            call()
    assert torch.equal(cache.k.nan_to_num(), before.nan_to_num())
    small = normal(3, 128, 128)
    assert npu.paged.attend(small, cache, placed, mask=causal(), scale=0.1, lse=False).out.shape == small.shape


@pytest.mark.parametrize("version", [*schemas.VERSIONS, "2.5.1", "2.6.0"])
def test_the_call_fits_the_schemas_of_releases(version, monkeypatch):
    bound = []

    def operator(space, name, device):
        def call(**named):
            schemas.bind(version, f"{space}::{name}", (), named)
            bound.append(name)
            return PAGED(**named)

        return call

    monkeypatch.setattr(_operators, "_operator", operator)
    q, cache, _, placed = step()
    npu.paged.attend(q, cache, placed, mask=causal(), scale=0.1, lse=False)
    assert bound == ["_npu_paged_attention"]


def arguments(**changes):
    cache = torch.randn(4, 16, 2, 64, generator=torch.Generator().manual_seed(0)).half()
    named = {"query": torch.ones(2, 4, 64).half(), "key_cache": cache, "value_cache": cache.clone(), "num_kv_heads": 2, "num_heads": 4}
    named |= {"scale_value": 0.1, "block_table": torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)}
    named |= {"context_lens": torch.tensor([20, 16], dtype=torch.int32), "out": torch.zeros(2, 4, 64).half()}
    return named | changes


BROKEN = {
    "query is float16": {"query": torch.ones(2, 4, 64)},
    "out has query's dtype": {"out": torch.zeros(2, 4, 64)},
    "key_cache is contiguous": {"key_cache": torch.zeros(4, 2, 16, 64).half().transpose(1, 2)},
    "caches 4": {"query": torch.ones(2, 1, 4, 64).half()},
    "headNum is": {"num_heads": 0},
    "kvHeadNum": {"num_kv_heads": 0},
    "headNum % kvHeadNum": {"query": torch.ones(2, 3, 64).half(), "num_heads": 3, "out": torch.zeros(2, 3, 64).half()},
    "keyCache fits": {"key_cache": torch.zeros(4, 16, 2, 32).half()},
    "head_size is in": {"value_cache": torch.zeros(4, 16, 2, 272).half(), "out": torch.zeros(2, 4, 272).half()},
    "block_size % 16": {name: torch.zeros(4, 24, 2, 64).half() for name in ("key_cache", "value_cache")},
    "at most 128": {name: torch.zeros(4, 144, 2, 64).half() for name in ("key_cache", "value_cache")},
    "output is": {"out": torch.zeros(2, 4, 32).half()},
    "blockTables is int32": {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
    "contextLens is int32": {"context_lens": torch.ones(3, dtype=torch.int32)},
    "not negative": {"context_lens": torch.tensor([3, -1], dtype=torch.int32)},
    "max_num_blocks_per_seq": {"context_lens": torch.tensor([33, 1], dtype=torch.int32)},
    "blockTables are in": {"block_table": torch.tensor([[3, 1], [2, -1]], dtype=torch.int32)},
    "scratch memory": {"workspace": torch.zeros(8)},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_emulated_operator_refuses_what_its_documents_do_not_allow(rule):
    given = arguments(**BROKEN[rule])
    with pytest.raises(RuntimeError, match=f"Rule\\] [^\\[]*{rule}"):
        PAGED(**given)
    assert not given["out"].any()


def test_a_sequence_without_keys_gets_junk_and_tails_are_read_where_assumed():
    given = arguments(context_lens=torch.tensor([20, 0], dtype=torch.int32))
    assert PAGED(**given) is None
    assert given["out"][0].isfinite().all() and given["out"][1].isnan().any()
    given["value_cache"][1, 4:] = torch.nan  # past the 20 keys of the first sequence
    PAGED(**given)
    assert given["out"][0].isfinite().all()
    with npu.emulator.variant("page-tail-arithmetic:multiplied"):
        PAGED(**given)
    assert given["out"][0].isnan().all()


def test_the_choice_is_listed_and_decided_from_facts():
    assert any("_npu_paged_attention" in choice.how for choice in limits.CHOICES)
    facts = limits.Facts("paged.attend", "float16", heads=65, layout="pbhd", block_size=128, output_alone=True)
    assert facts.by_atb and limits.refusal(facts) is None
    for other in ({"heads": 64}, {"output_alone": False}, {"layout": "phbd"}, {"explicit": True}, {"additive": "float16"}):
        assert not replace(facts, **other).by_atb, json.dumps(other)
