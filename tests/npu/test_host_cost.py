"""What a layer does on the host: once a step what concerns the step, and as much for many sequences as for one."""

import sys

import pytest
import torch
from layer_cases import batch_of, cache_of, normal

import npu
import npu._operators
import npu._paged
import npu.standard
from fattn.types import Pages, causal


def decode(sequences):
    batch = batch_of([1] * sequences, [7] * sequences, block_size=16)
    return npu.place(batch, "cpu", causal()), cache_of(batch, 2, 128), normal(sequences, 4, 128), normal(sequences, 2, 128)


@pytest.fixture
def launched(monkeypatch):
    """The arguments of every attention call; nothing is computed."""
    seen = []

    def launch(arguments, out):
        seen.append(arguments)
        return torch.zeros_like(arguments["query"]), torch.empty(0)

    monkeypatch.setattr(npu._operators, "attention_call", lambda device, workspace: launch)
    monkeypatch.setattr(npu._operators, "scatter", lambda device: lambda *rows: None)
    return seen


def layer(placed, cache, q, k):
    npu.standard.attend_and_write(q, k, k, cache, placed, mask=causal(), scale=0.1)


def python_calls(*arguments):
    """How many functions a layer calls, of Python and of C."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        layer(*arguments)
    finally:
        sys.setprofile(None)
    return calls


def calls_of_three_layers(sequences):
    arguments = decode(sequences)
    return [python_calls(*arguments) for _ in range(3)]


def assert_once_a_step(launched):
    """Each layer is handed the same lists, made once, and layers after the first check nothing again."""
    few, many = calls_of_three_layers(2), calls_of_three_layers(64)
    assert few[1:] == many[1:] and few[1] == few[2] < few[0] * 0.6
    for at in (0, 3):
        for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
            assert all(call[name] is launched[at][name] for call in launched[at : at + 3])
            assert isinstance(launched[at][name], tuple)


def test_what_concerns_the_step_is_done_once(launched):
    assert_once_a_step(launched)


def lists_are_made_in_each_layer(patch):
    real = npu._paged.lengths
    patch.setattr(npu._paged, "lengths", lambda *given: {name: (*map(int, values),) for name, values in real(*given).items()})


def each_layer_checks(patch):
    patch.setattr(npu.standard, "once_a_step", lambda batch, tensors, statics, check: check())


def lengths_are_added_up_in_each_layer(patch):
    real = npu.standard.store
    patch.setattr(npu.standard, "store", lambda cache, *rest: [abs(n) for n in range(len(rest[2]))] and real(cache, *rest))


@pytest.mark.parametrize("fault", [lists_are_made_in_each_layer, each_layer_checks, lengths_are_added_up_in_each_layer])
def test_a_fault_is_seen(fault, launched, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_once_a_step(launched)


def test_another_kind_of_call_in_the_same_step_is_checked(launched):
    """A layer that differs from the first is not taken for it: each change below is refused after a good layer."""
    placed, cache, q, k = decode(2)
    layer(placed, cache, q, k)
    half = Pages(cache.k[..., :64].contiguous(), cache.v[..., :64].contiguous(), cache.layout, cache.block_size)
    strided = Pages(cache.k.flip(0).transpose(1, 2), cache.v.flip(0).transpose(1, 2), "phbd", cache.block_size)
    for change in (
        (placed, cache, q[:1], k),
        (placed, cache, q, k[:1]),
        (placed, half, q, k),
        (placed, cache, q.float(), k),
        (placed, cache, q[:, :3].contiguous(), k),
        (placed, cache, q, k.to("meta")),
        (placed, strided, q, k),
    ):
        with pytest.raises((ValueError, NotImplementedError)):
            layer(*change)
    assert len(launched) == 1


def test_integers_go_to_the_device_in_one_transfer(monkeypatch):
    batch, transfers = batch_of([1, 1, 1], [7, 7, 7], block_size=16), []
    real = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: transfers.append(array.dtype.name) or real(array))
    placed = npu.place(batch, "cpu", causal())
    assert transfers == ["int32"]
    tensors = (placed.query_start_loc, placed.seq_lens, placed.block_table, placed.slot_mapping, placed.positions)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.is_contiguous() and tensor.storage_offset() * 4 % 512 == 0 for tensor in tensors)
