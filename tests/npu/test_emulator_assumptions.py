"""`npu` under every answer to what the documents leave open: the same results, a refusal, or listed as depending on the belief."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_cases import batch_of, cache_of, normal

import npu
from fattn.types import Range, Unsupported, causal, window
from npu import emulator
from npu.emulator import assumptions

PHASES = {
    "chunked": ([5, 9, 1], [200, 9, 301]),
    "decode": ([1, 1, 1], [300, 1, 128]),
    "padded decode": ([1, 1, 1, 1], [7, 0, 3, 0]),
    "padded prefill": ([4, 0, 6], [133, 0, 0]),
    "more queries than keys": ([5, 3], [2, 3]),
    "one decode": ([1], [1000]),
}
WINDOW = window(140, 0)


def attend(phase, mask, d, *, share=False):
    query_lens, seq_lens = PHASES[phase]
    batch = batch_of(query_lens, seq_lens, block_size=128)
    cache = cache_of(batch, 2, d)
    if share:  # all read the same pages
        batch = replace(batch, block_table=np.tile(np.arange(3, dtype=np.int32), (len(seq_lens), 1)))
        cache = replace(cache, k=cache.k[:3].nan_to_num(), v=cache.v[:3].nan_to_num())
    q = normal(sum(query_lens), 4, d, seed=7)
    return npu.paged.attend(q, cache, npu.place(batch, "cpu", mask), mask=mask, scale=d**-0.5)


def dense(mask, *positions):
    q, k, v = (normal(n, h, 64, seed=n) for n, h in ((5, 4), (9, 2), (9, 2)))
    return npu.dense.attend(q, k, v, *positions, mask=mask, scale=0.125)


def write():
    batch = batch_of([1, 1], [7, 3], block_size=16)
    cache = npu.paged.allocate(8, 2, 64, 64, block_size=16, layout="pbhd", dtype=torch.float16)
    rows = normal(2, 2, 64)
    cache = npu.paged.write(cache, rows, rows, npu.place(batch, "cpu", causal()).slot_mapping)
    return cache.k, cache.v


def rotate():
    cos, sin = npu.rope.table(torch.arange(6, dtype=torch.int32), npu.rope.frequencies(64, theta=1e4), dtype=torch.float32)
    return npu.rope.half(normal(6, 4, 64), cos, sin), npu.rope.interleaved(normal(6, 4, 64), cos, sin)


CALLS = {f"{phase} {mask} {d}": (attend, phase, mask, d) for phase in PHASES for mask in (causal(), WINDOW) for d in (64, 128)}
CALLS |= {
    "wide window": (attend, "one decode", window(900, 0), 64),
    "shared pages": (lambda: attend("decode", causal(), 128, share=True),),
    "dense causal": (dense, causal(), Range(4, 5), Range(0, 9)),
    "dense padded": (dense, causal(), torch.tensor([3, -1, 8, 0, 5]), torch.tensor([0, 1, 2, 3, -1, -1, 6, 7, 8])),
    "write": (write,),
    "rotate": (rotate,),
}
VARIANTS = [f"{assumption.id}:{name}" for assumption in assumptions.TABLE for name in assumption.variants]


def results():
    """Every call's tensors, or the error that refused it."""
    found = {}
    for name, (function, *arguments) in CALLS.items():
        try:
            found[name] = function(*arguments)
        except (Unsupported, RuntimeError) as error:
            found[name] = error
    return found


@pytest.fixture(scope="module")
def believed():
    found = results()
    assert not [error for error in found.values() if isinstance(error, Exception)]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_npu_agrees_or_is_listed(variant, believed):
    with emulator.variant(variant):
        found = results()
    differ = [name for name, result in found.items() if not same(result, believed[name])]
    if variant in assumptions.DEPENDED_ON:
        assert differ, f"npu is listed as depending on {variant!r} not being so, but no call shows it"
    else:
        assert not differ, f"under {variant!r} npu gives other results; make it agree, or list it in assumptions.DEPENDED_ON"


def same(result, expected):
    if isinstance(result, Exception):
        return False
    return all(torch.allclose(a.float(), b.float(), atol=1e-2, rtol=1e-2) for a, b in zip(result, expected, strict=True))


def test_what_is_depended_on_exists():
    assert set(assumptions.DEPENDED_ON) <= set(VARIANTS) and all(map(str.strip, assumptions.DEPENDED_ON.values()))
