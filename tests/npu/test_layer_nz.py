"""The two forms of a cache by their names: ND and NZ hold the same, and are written alike."""

import pytest
import torch
from layer_cases import launched, normal

import npu
import npu.nz
from fattn.types import Pages
from npu import _operators

HEADS, SIZE, VALUE_SIZE, BLOCK, BLOCKS = 2, 64, 32, 16, 5


def caches(dtype):
    draw = lambda *shape, seed: (normal(*shape, seed=seed) * 30).to(dtype)
    k, v = (draw(BLOCKS, BLOCK, HEADS, size, seed=seed) for size, seed in ((SIZE, 1), (VALUE_SIZE, 2)))
    rows = tuple(draw(4, HEADS, size, seed=seed) for size, seed in ((SIZE, 3), (VALUE_SIZE, 4)))
    return Pages(k, v, "pbhd", BLOCK), rows


def assert_written(dtype):
    """Rows written to an NZ cache stand where ND says, and every other number is what it was."""
    cache, (k, v) = caches(dtype)
    slots = torch.tensor([3, 40, 17, 79], dtype=torch.int32)
    tiled = npu.nz.from_nd(cache)
    found, launches = launched(npu.nz.write, tiled, k, v, slots)
    assert found is tiled and launches == {"npu::npu_scatter_pa_kv_cache": 1}
    expected = Pages(cache.k.clone(), cache.v.clone(), "pbhd", BLOCK)
    for pages, rows in ((expected.k, k), (expected.v, v)):
        for slot, row in zip(slots.tolist(), rows, strict=True):
            pages[slot // BLOCK, slot % BLOCK] = row
    for layout in ("pbhd", "phbd", "hpbd"):
        back, right = npu.nz.to_nd(tiled, layout=layout), npu.paged.convert(expected, layout=layout)
        assert torch.equal(back.k, right.k) and torch.equal(back.v, right.v) and back.layout == layout


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_written(dtype):
    assert_written(dtype)


def test_where_numbers_lie():
    """Number 32 of a token is the first of its third tile of float16; tiles of int8 are twice as long."""
    cache, _ = caches(torch.float16)
    tiled = npu.nz.from_nd(cache)
    assert tiled.k.shape == (BLOCKS, 8, BLOCK, 16) and tiled.k[2, 2, 5, 0] == cache.k[2, 5, 0, 32]
    assert tiled.k[2, 7, 5, 15] == cache.k[2, 5, 1, 63]
    assert npu.nz.from_nd(caches(torch.int8)[0]).v.shape == (BLOCKS, 2, BLOCK, 32)


def test_bad_input():
    cache, (k, v) = caches(torch.float16)
    tiled, slots = npu.nz.from_nd(cache), torch.arange(4, dtype=torch.int32)
    before = tiled.k.clone()
    for change, message in (
        ((k[:, :1], v[:, :1], slots), r"k is float16\[4, 1, 64\].*\[2, 64\]"),
        ((k.bfloat16(), v.bfloat16(), slots), "k is bfloat16"),
        ((k, v, slots[:3]), r"slots has shape \[3\] for 4 rows"),
        ((k, v[:3], slots), "disagree in rows"),
    ):
        with pytest.raises(ValueError, match=message):
            npu.nz.write(tiled, *change)
    with pytest.raises(ValueError, match="which is not NZ"):
        npu.nz.write(npu.nz.NzPages(cache.k, cache.v, HEADS, BLOCK), k, v, slots)
    with pytest.raises(ValueError, match="24 numbers a token, which tiles of 16 do not divide"):
        npu.nz.from_nd(Pages(cache.k[:, :, :1, :24], cache.v[:, :, :1, :24], "pbhd", BLOCK))
    assert torch.equal(tiled.k, before)


FAULTS = {
    "the other form is named": lambda patch: patch.setattr(_operators, "CACHE_MODES", {"ND": "PA_NZ", "NZ": "Norm"}),
    "tiles have 16 numbers whatever the dtype": lambda patch: patch.setattr(npu.nz, "_tiled", _of_16),
    "tiles are not reordered": lambda patch: patch.setattr(npu.nz, "_tiled", lambda name, array: _of_16(name, array, order=(0, 1, 2, 3))),
}


def _of_16(name, array, order=(0, 2, 1, 3)):
    return array.flatten(2).unflatten(2, (-1, 16)).permute(order).contiguous()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError, RuntimeError, NotImplementedError)):
        assert_written(torch.float16)
        assert_written(torch.int8)
