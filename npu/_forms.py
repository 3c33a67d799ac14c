"""How masks and lengths go to the attention operator, decided on the host: what `place`, `limits` and the functions agree on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fattn.types import And, Causal, Chunk, Full, Mask, Range, Window, band
from npu._checks import side
from npu._rules import INT32_MAX


class Form(NamedTuple):
    """How a batch goes to the attention operator.

    `queries` is the longest query among sequences that have keys, `uniform` says that all have that length, `explicit` that the mask goes
    as an array.
    """

    queries: int
    uniform: bool
    explicit: bool


def dense_form(q_pos, k_pos, mask: Mask, *, biased: bool) -> str:
    """How positions and mask go to the operator: "whole" (no mask), "compressed" (sparse modes 3 and 4) or "explicit" (an array).

    Compressed masks are aligned bottom-right, and the operator ignores them for one query.
    """
    queries, keys, one = side(q_pos), side(k_pos), band(mask)
    ranges = isinstance(queries, Range) and isinstance(keys, Range)
    if biased or not ranges or one is None or queries.start < 0 or keys.start < 0 or not queries.size or not keys.size:
        return "explicit"
    first, last = queries.start, queries.start + queries.size - 1
    first_key, last_key = keys.start, keys.start + keys.size - 1
    left, right = (INT32_MAX if bound is None else bound for bound in one)
    if last - left <= first_key and last_key <= first + right:
        return "whole"
    every_row_sees = last - left <= last_key and first_key <= first + right
    return "compressed" if every_row_sees and last == last_key and queries.size > 1 else "explicit"


def batch_form(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], mask: Mask) -> Form:
    """How a batch of these lengths goes to the operator under `mask`.

    Several queries: one band goes as a compressed mask, anything else explicitly. One query: the operator ignores bands, and needs none
    where the query sees all keys; keys before a window are cut off in whole blocks, and an explicit mask hides the rest.
    """
    query_lens, seq_lens = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    queries = int(query_lens.max(where=seq_lens > 0, initial=0))
    uniform = bool((query_lens == queries).all())
    if queries > 1:
        return Form(queries, uniform, band(mask) is None)
    sees_all = first_key(mask, seq_lens) is not None and reach(mask) is None
    return Form(queries, uniform, queries > 0 and not sees_all)


def first_key(mask, last):
    """The first key that the query at position `last` of each sequence sees, where that is a matter of position alone; else None."""
    match mask:
        case Full() | Causal() | Window(None, _):
            return np.zeros_like(last)
        case Window(left, _):
            return last - left
        case Chunk(size):
            return last // size * size
        case And(first, second):
            a, b = first_key(first, last), first_key(second, last)
            return None if a is None or b is None else np.maximum(a, b)
    return None


def reach(mask):
    """How many keys the last query of a sequence sees at most, where position alone decides; None: all of them."""
    match mask:
        case Window(int(left), _):
            return left + 1
        case Chunk(size):
            return size
        case And(first, second):
            return min((n for n in (reach(first), reach(second)) if n is not None), default=None)
    return None
