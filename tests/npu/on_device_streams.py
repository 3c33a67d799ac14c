"""Run by test_hostdev.py in a process of its own: work on a side stream takes effect where something waits for it, and nowhere before.

The pattern is the one that a cache in host memory needs: pages come in on a copy stream while the default stream computes.
"""

import pytest
import torch
from device_cases import paged
from layer_cases import normal

import npu
from fattn.types import Pages, causal
from npu.emulator import hostdev

MASK = causal()


@pytest.fixture
def side():
    stream = torch.npu.Stream()
    yield stream
    torch.npu.synchronize()
    assert hostdev.library().waiting() == 0


@pytest.fixture
def host():
    """Pinned host memory: the only kind that copies asynchronously."""
    return torch.arange(1.0, 9.0).pin_memory()


def fetch(side, host, device, wait):
    """A page copied in on a side stream, then read by the default stream; `wait` is what ought to order them."""
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        device.copy_(host, non_blocking=True)
        copied = torch.npu.Event()
        copied.record()
    wait(side, copied)
    return (device * 2).cpu()


WAITS = {
    "the stream for the event": lambda side, copied: torch.npu.current_stream().wait_event(copied),
    "the stream for the stream": lambda side, copied: torch.npu.current_stream().wait_stream(side),
    "the host for the event": lambda side, copied: copied.synchronize(),
    "the host for the stream": lambda side, copied: side.synchronize(),
    "the host for the device": lambda side, copied: torch.npu.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_shows_the_new_bytes(side, host, wait):
    assert torch.equal(fetch(side, host, torch.zeros(8, device="npu"), wait), host * 2)


def test_without_a_wait_the_old_bytes_show(side, host):
    assert torch.equal(fetch(side, host, torch.zeros(8, device="npu"), lambda side, copied: None), torch.zeros(8))
    assert hostdev.library().waiting() > 0


def test_an_event_covers_what_was_issued_before_it(side, host):
    first, second = torch.zeros(8, device="npu"), torch.zeros(8, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        first.copy_(host, non_blocking=True)
        between = torch.npu.Event()
        between.record()
        second.copy_(host, non_blocking=True)
    torch.npu.current_stream().wait_event(between)
    assert torch.equal(first.cpu(), host) and torch.equal(second.cpu(), torch.zeros(8))


def test_waits_pass_from_stream_to_stream(side, host):
    """`later` waits for `side`, which waited for the default stream; and the default stream for `later`: that orders all three."""
    later = torch.npu.Stream()
    page, copy = torch.zeros(8, device="npu"), torch.zeros(8, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        page.copy_(host, non_blocking=True)
    later.wait_stream(side)
    with torch.npu.stream(later):
        copy.copy_(page, non_blocking=True)
    assert torch.equal(copy.cpu(), torch.zeros(8))
    torch.npu.current_stream().wait_stream(later)
    assert torch.equal(copy.cpu(), host)


def test_copies_out_are_late_too(side, host):
    device, out = host.npu(), torch.zeros(8).pin_memory()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        out.copy_(device, non_blocking=True)
    assert torch.equal(out, torch.zeros(8))
    side.synchronize()
    assert torch.equal(out, host)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.copy_(x.T.clone()), lambda x: x.fill_(3)], ids=["add", "copy", "fill"])
def test_a_side_stream_must_wait_for_what_it_reads(side, change):
    """The other direction: the default stream writes, and a side stream copies out without waiting for it."""
    device, out = torch.zeros(4, 4, device="npu"), torch.zeros(4, 4).pin_memory()
    torch.npu.synchronize()
    change(device)
    with torch.npu.stream(side), pytest.raises(RuntimeError, match="meets bytes that the default stream wrote"):
        out.copy_(device, non_blocking=True)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        out.copy_(device, non_blocking=True)
    side.synchronize()
    assert torch.equal(out, device.cpu())


def test_a_side_stream_must_wait_for_what_it_overwrites(side, host):
    """A page that the default stream still fills is no place for another's copy."""
    page = torch.ones(8, device="npu") * 2
    with torch.npu.stream(side), pytest.raises(RuntimeError, match="wait"):
        page.copy_(host, non_blocking=True)


def test_memory_that_is_not_pinned_copies_at_once(side):
    device = torch.zeros(8, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        device.copy_(torch.ones(8), non_blocking=True)
    assert torch.equal(device.cpu(), torch.ones(8))


def test_a_loop_that_polls_ends(side, host):
    device, copied, polls = torch.zeros(8, device="npu"), torch.npu.Event(), 0
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        device.copy_(host, non_blocking=True)
        copied.record()
    while not copied.query():
        polls += 1
    assert 0 < polls < 1000 and torch.equal(device.cpu(), host)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "forgets to wait"])
def test_attention_over_pages_that_come_in_on_a_copy_stream(side, waits):
    batch, resident = paged("npu", [2, 3], [50, 130], MASK, 64)
    stored = [array.cpu().pin_memory() for array in (resident.k, resident.v)]
    q = normal(5, 4, 64, seed=3).npu()
    expected = npu.paged.attend(q, resident, batch, mask=MASK, scale=0.1).out.cpu()
    fetched = Pages(torch.zeros_like(resident.k), torch.zeros_like(resident.v), resident.layout, resident.block_size)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        for page, bytes_ in zip((fetched.k, fetched.v), stored, strict=True):
            page.copy_(bytes_, non_blocking=True)
    if waits:
        torch.npu.current_stream().wait_stream(side)
    found = npu.paged.attend(q, fetched, batch, mask=MASK, scale=0.1).out.cpu()
    assert torch.equal(found, expected) == waits


def test_an_operator_on_a_side_stream_is_late_too(side):
    batch, cache = paged("npu", [2, 3], [50, 130], MASK, 64)
    rows = torch.ones(5, 2, 64, dtype=torch.float16, device="npu")
    slots, before = batch.slot_mapping.cpu().long(), cache.k.cpu()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        npu.paged.write(cache, rows, rows, batch.slot_mapping)
    torch.testing.assert_close(cache.k.cpu(), before, rtol=0, atol=0, equal_nan=True)
    torch.npu.current_stream().wait_stream(side)
    assert torch.equal(cache.k.cpu().view(-1, 2, 64)[slots], rows.cpu())


def test_an_operator_on_a_side_stream_must_wait_for_its_arguments(side):
    batch, cache = paged("npu", [2, 3], [50, 130], MASK, 64)
    torch.npu.synchronize()
    rows = torch.ones(5, 2, 64, dtype=torch.float16, device="npu") * 2
    with torch.npu.stream(side), pytest.raises(RuntimeError, match="meets bytes that the default stream wrote"):
        npu.paged.write(cache, rows, rows, batch.slot_mapping)
