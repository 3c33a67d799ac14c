"""Faults that no result of a valid call shows: arguments that do not fit are computed with. The reports alone look for them."""

from __future__ import annotations

from fattn.conformance.faults import Fault
from fattn.conformance.plain import dense, paged
from fattn.types import Pages


def guesses_the_axis_order(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    rows = dense.positions(q_pos).size
    if q.shape[0] != rows and q.shape[1] == rows:
        q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))
    return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def cuts_to_the_slots(cache, k, v, slots):
    rows = min(len(k), len(slots))
    return paged.write(cache, k[:rows], v[:rows], slots[:rows])


def block_size_of_the_batch(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    pages = paged.convert(cache, layout="pbhd")
    k, v = (x.reshape(-1, batch.block_size, *x.shape[2:]) for x in (pages.k, pages.v))
    viewed = Pages(k, v, "pbhd", batch.block_size)
    return paged.attend(q, viewed, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


FAULTS = (
    Fault("guesses_the_axis_order", "bad input", "dense.attend", guesses_the_axis_order, "heads and rows change places where rows fit"),
    Fault("cuts_slots_to_their_number", "bad input", "paged.write", cuts_to_the_slots, "rows without a slot are dropped"),
    Fault("block_size_of_the_batch", "bad input", "paged.attend", block_size_of_the_batch, "the cache is viewed with another block size"),
)
