"""The monoid of Partials, and its end."""

from __future__ import annotations

import numpy as np

from fattn.types import Partial


def empty(tokens: int, heads: int, value_size: int, *, dtype) -> Partial:
    """out = 0 [t h dv], lse = -inf [t h]."""
    return Partial(np.zeros((tokens, heads, value_size), dtype), np.full((tokens, heads), -np.inf, dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both."""
    some = (a.lse > -np.inf) | (b.lse > -np.inf)
    top = np.where(some, np.maximum(a.lse, b.lse), 0)
    wa, wb = np.exp(a.lse - top), np.exp(b.lse - top)
    total = np.where(some, wa + wb, 1)
    # a part that saw nothing is never read: its out may be NaN
    outs = (np.where((part.lse > -np.inf)[..., None], part.out, 0) for part in (a, b))
    out = sum((w / total)[..., None] * part for w, part in zip((wa, wb), outs, strict=True))
    return Partial(out.astype(a.out.dtype), np.where(some, top + np.log(total), -np.inf).astype(a.lse.dtype))


def finish(partial: Partial, sink=None, *, dtype):
    """out in `dtype`, times 1 / (1 + e^(sink - lse)) where a sink is given."""
    if sink is None:
        return partial.out.astype(dtype)
    if partial.lse is None:
        raise ValueError("partial.lse is None: a sink needs the log-sum-exp; ask for it with lse=True")
    some = (partial.lse > -np.inf) & (sink < np.inf)
    away = np.where(some, sink, 0).astype(partial.lse.dtype) - np.where(some, partial.lse, 0)
    with np.errstate(over="ignore"):
        share = np.where(some, 1 / (1 + np.exp(away)), 0)[..., None]
    return (share * np.where(some[..., None], partial.out, 0)).astype(dtype)
