"""npu refuses what the other layers refuse, before an operator is launched or a cache row written."""

import numpy as np
import pytest
import torch
from bad_input_cases import NUMBERS, SHAPES, Layer, batch, spoiled

import npu
import npu.emulator
from fattn.plan import batch as plan
from fattn.types import causal, window

NPU = Layer(npu, torch.from_numpy, lambda tensor: tensor.numpy(), lambda batch, mask: npu.place(batch, "cpu", mask))


@pytest.fixture(scope="module", autouse=True)
def operators():
    torch.set_num_threads(1)
    npu.emulator.install()


@pytest.mark.parametrize("function", ["dense.attend", "paged.attend"])
def test_good_input_is_taken(function):
    NPU.call(function, {})


@pytest.mark.parametrize("function, changes, message", SHAPES.values(), ids=SHAPES)
def test_arguments_that_do_not_fit_together(function, changes, message):
    with pytest.raises(ValueError, match=message):
        NPU.call(function, changes)


@pytest.mark.parametrize("function", ["paged.attend", "standard.attend_and_write"])
@pytest.mark.parametrize("change, message", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_a_batch(function, change, message):
    with pytest.raises(ValueError, match=message):
        NPU.call(function, {"batch": change})


@pytest.mark.parametrize(
    "index, value, message",
    [
        (1, 9999, r"slot_mapping\[1\]\s*=\s*9999"),
        (1, -1, r"slot_mapping\[1\]\s*=\s*-1.*null_blocks"),
        (1, int(batch().slot_mapping[0]), "slot_mapping"),
    ],
    ids=["past the end", "below 0", "twice"],
)
def test_slots_of_a_batch(index, value, message):
    with pytest.raises(ValueError, match=message):
        NPU.call("standard.attend_and_write", {"batch": spoiled("slot_mapping", index, value)})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: npu.dense.alibi_slopes(0), "heads must be at least 1, got 0"),
        (lambda: npu.rope.yarn(64, theta=1e4, factor=0.5, original_length=4096), "factor must be at least 1, got 0.5"),
        (lambda: npu.rope.table(torch.ones(3), torch.ones(2), dtype=torch.float32), r"positions must be .*float32\[3\]"),
        (lambda: npu.paged.gather(npu_cache(), torch.zeros(1, 2)), r"block_table must be int32 or int64 .*float32\[1, 2\]"),
        (lambda: npu.rope.half(*(torch.ones(n, dtype=torch.int32) for n in ((3, 1, 4), (3, 2), (3, 2)))), "x has dtype int32"),
    ],
)
def test_small_functions(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def npu_cache():
    return npu.paged.allocate(2, 1, 16, 16, block_size=16, layout="pbhd", dtype=torch.float16)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int64])
def test_positions_of_any_integer_type_mean_the_same(kind):
    p, j = torch.tensor([0, 3], dtype=kind), torch.tensor([0, 2, 5], dtype=kind)
    expected = npu.masks.visible(p.int(), j.int(), mask=window(4, 3))
    assert torch.equal(npu.masks.visible(p, j, mask=window(4, 3)), expected)


def test_a_batch_is_placed_first():
    raw = Layer(npu, torch.from_numpy, lambda tensor: tensor.numpy(), lambda batch, mask: batch)
    with pytest.raises(ValueError, match="npu.place"):
        raw.call("paged.attend", {})
    wrong = Layer(npu, torch.from_numpy, lambda tensor: tensor.numpy(), lambda batch, mask: npu.place(batch, "cpu", causal()))
    with pytest.raises(ValueError, match="placed for mask"):
        wrong.call("paged.attend", {"mask": causal() & causal()})


def test_a_batch_is_placed_for_a_mask():
    with pytest.raises(TypeError, match="mask must be made by fattn.types .* got 'causal'"):
        npu.place(plan.build([1], [1], [[0]], block_size=16, num_blocks=1), "cpu", "causal")


def test_cache_bytes_are_compared():
    """The check that nothing was written would see a write."""
    with pytest.raises(AssertionError, match="something was written"):
        NPU.call("paged.write", {"slots": np.arange(5, dtype=np.int32)})
