"""Which keys a query sees, all queries at once."""

from __future__ import annotations

from functools import cache

import numpy as np

from fattn.types import And, Causal, Chunk, Compressed, Full, Mask, Or, Range, Same, Tokens, Tree, Unsupported, Window, band

INT32_MAX = 2**31 - 1


def visible(queries, keys, *, mask: Mask):
    """Bool[t s]: whether query i sees key j."""
    p, j = positions(queries)[:, None], positions(keys)[None, :]
    return (p >= 0) & (j >= 0) & _rule(mask, p, j, labels(queries), labels(keys))


def compressed(*, mask: Mask) -> Compressed:
    """The mask as operators take it: a mode, a band and one triangle of 2048 (True = hidden)."""
    limits = band(mask)
    if limits is None:
        raise Unsupported("mask", mask, "operators compress only causal and window masks", "pass masks.visible as an explicit mask")
    left, right = (INT32_MAX if side is None else side for side in limits)
    if limits == (None, None):
        return Compressed(0, left, right, None)
    return Compressed(3 if limits == (None, 0) else 4, left, right, _triangle())


def expand(compressed: Compressed, *, query_len: int, kv_len: int):
    """Bool[t s]: what a compressed mask lets the last `query_len` of `kv_len` positions see."""
    p, j = np.arange(kv_len - query_len, kv_len)[:, None], np.arange(kv_len)[None, :]
    if compressed.sparse_mode == 0:
        return np.broadcast_to(p >= 0, (query_len, kv_len)).copy()
    if compressed.sparse_mode == 3:
        return (j <= p) & (p >= 0)
    return (j >= p - compressed.pre_tokens) & (j <= p + compressed.next_tokens) & (p >= 0)


@cache
def _triangle():
    return ~np.tri(2048, dtype=bool)


def positions(side):
    """Int64[n] of a Range, an array, or Tokens."""
    side = side.pos if isinstance(side, Tokens) else side
    return np.arange(side.start, side.start + side.size) if isinstance(side, Range) else np.asarray(side, np.int64)


def labels(side):
    """The labels of a query or key side, none unless it is Tokens."""
    return side.labels if isinstance(side, Tokens) else {}


def _rule(mask, p, j, of_queries, of_keys):
    match mask:
        case Full():
            return np.full(np.broadcast_shapes(p.shape, j.shape), True)
        case Causal():
            return j <= p
        case Window(left, right):
            return (j >= (-INT32_MAX if left is None else p - left)) & (j <= (INT32_MAX if right is None else p + right))
        case Chunk(size):
            return j // size == p // size
        case Same(label):
            return of_queries[label][:, None] == of_keys[label][None, :]
        case Tree(enter, exit):
            entered = of_queries[enter][:, None]
            return (of_keys[enter][None, :] <= entered) & (entered < of_keys[exit][None, :])
        case And(first, second):
            return _rule(first, p, j, of_queries, of_keys) & _rule(second, p, j, of_queries, of_keys)
        case Or(first, second):
            return _rule(first, p, j, of_queries, of_keys) | _rule(second, p, j, of_queries, of_keys)
    raise TypeError(f"unknown mask {mask!r}")
