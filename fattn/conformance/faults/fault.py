"""What a fault is, and attention taken apart into steps, of which a fault replaces one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fattn.conformance.plain import dense, masks, paged
from fattn.types import Partial, Tokens


class Fault(NamedTuple):
    """An implementation of one operation that is wrong in one known way. `why` says how it happens; `kind` is what it is an instance of."""

    name: str
    kind: str
    operation: str
    function: Callable
    why: str


def _add(z, bias, seen):
    return z + np.where(seen, bias, 0).astype(z.dtype)


class Steps(NamedTuple):
    """dense.attend step by step, on NumPy arrays: each as `fattn.conformance.plain.dense` does it."""

    see: Callable = masks.visible  # (queries, keys, mask=) -> Bool[t s]
    broadcast: Callable = np.broadcast_to  # (bias, (h, t, s)) -> [h t s]
    clean: Callable = dense.cleaned  # (q, k, v, seen) -> q, k, v
    expand: Callable = dense.repeated  # (rows [s hk d], heads) -> [s h d]
    score: Callable = dense.scores  # (q, k, scale=, softcap=) -> [h t s]
    add: Callable = _add  # (scores, bias, seen) -> [h t s]
    softmax: Callable = dense.softmax  # (scores, seen, v [s h dv]) -> Partial


def attention(steps: Steps) -> Callable:
    """dense.attend made of these steps."""

    def attend(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None) -> Partial:
        shape = (q.shape[1], q.shape[0], k.shape[0])
        seen = np.broadcast_to(steps.see(q_pos, k_pos, mask=mask), shape)
        if bias is not None:
            bias = steps.broadcast(bias, shape)
            seen = seen & (bias > -np.inf)
        q, k, v = steps.clean(q, k, v, seen)
        k, v = steps.expand(k, shape[0]), steps.expand(v, shape[0])
        z = steps.score(q, k, scale=scale, softcap=softcap)
        if bias is not None:
            z = steps.add(z, bias, seen)
        return steps.softmax(z, seen, v)

    return attend


def _read(cache, table, length):
    return tuple(rows[0, :length] for rows in paged.gather(cache, table))


class PagedSteps(NamedTuple):
    """paged.attend step by step: each as `fattn.conformance.plain.paged` does it."""

    sequence: Callable = paged.sequence  # (batch, row) -> packed rows, queries, keys, followed blocks [1 pages]
    read: Callable = _read  # (cache, blocks, length) -> k [length hk d], v
    alibi: Callable = dense.alibi  # (slopes, queries, keys) -> [h t s]
    attend: Callable = dense.attend
    last: Callable = lambda result, batch: result  # (Partial of the batch, batch) -> Partial


def paged_attention(steps: PagedSteps) -> Callable:
    """paged.attend made of these steps."""

    def attend(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True) -> Partial:
        kind = dense.accumulation(q.dtype)
        result = Partial(np.zeros((*q.shape[:2], cache.v.shape[-1]), kind), np.full(q.shape[:2], -np.inf, kind))
        for row in range(len(batch.seq_lens)):
            rows, queries, keys, table = steps.sequence(batch, row)
            if rows.start == rows.stop or not keys.pos.size:
                continue
            k, v = steps.read(cache, table, keys.pos.size)
            bias = None if slopes is None else steps.alibi(slopes.astype(kind), queries, keys)
            result.out[rows], result.lse[rows] = steps.attend(q[rows], k, v, queries, keys, bias, mask=mask, scale=scale, softcap=softcap)
        result = steps.last(result, batch)
        return result if lse else Partial(result.out, None)

    return attend


def moved(side, pos) -> Tokens:
    """The labels of a query or key side at other positions."""
    return Tokens(pos, masks.labels(side))


def rewritten(mask, change: Callable):
    """The mask with change(m) in the place of every m in it, innermost first."""
    if hasattr(mask, "first"):
        mask = type(mask)(rewritten(mask.first, change), rewritten(mask.second, change))
    return change(mask)
