"""Attention over keys held whole: one matrix product, one softmax, one matrix product."""

from __future__ import annotations

import numpy as np

from fattn.conformance.plain.masks import positions, visible
from fattn.types import Mask, Partial


def attend(q, k, v, q_pos, k_pos, bias=None, *, mask: Mask, scale: float, softcap: float | None = None) -> Partial:
    """Softmax attention in float32 (float64 for float64); P is cast to v's dtype for its product with v."""
    seen = np.broadcast_to(visible(q_pos, k_pos, mask=mask), (q.shape[1], q.shape[0], k.shape[0]))
    if bias is not None:
        bias = np.broadcast_to(bias, seen.shape)
        seen = seen & (bias > -np.inf)
    q, k, v = cleaned(q, k, v, seen)
    z = scores(q, k, scale=scale, softcap=softcap)
    if bias is not None:
        z = z + np.where(seen, bias, 0).astype(z.dtype)
    return softmax(z, seen, v)


def cleaned(q, k, v, seen):
    """q, k and v with zeros where nothing is read: 0 * NaN would be NaN. `seen` is Bool[h t s]."""
    keys, queries = seen.any((0, 1))[:, None, None], seen.any((0, 2))[:, None, None]
    zero = k.dtype.type(0)
    return np.where(queries, q, zero), np.where(keys, k, zero), np.where(keys, v, zero)


def scores(q, k, *, scale, softcap):
    """scale q.k, capped: [h t s] in the accumulation dtype."""
    kind = accumulation(q.dtype)
    q, k = q.astype(kind).transpose(1, 0, 2), repeated(k.astype(kind), q.shape[1]).transpose(1, 2, 0)
    z = kind(scale) * (q @ k)
    return z if softcap is None else kind(softcap) * np.tanh(z / kind(softcap))


def softmax(z, seen, v) -> Partial:
    """Softmax of scores [h t s] over the seen keys, times values [s hk dv]."""
    kind = z.dtype.type
    z = np.where(seen, z, kind(-np.inf))
    some = seen.any(-1)
    top = np.where(some, z.max(-1, initial=-np.inf), 0).astype(kind)
    p = np.exp(z - top[..., None])
    total = np.where(some, p.sum(-1), 1).astype(kind)
    values = repeated(v, z.shape[0]).transpose(1, 0, 2).astype(kind)
    out = (p.astype(v.dtype).astype(kind) @ values) / total[..., None]
    lse = np.where(some, top + np.log(total), kind(-np.inf))
    return Partial(np.ascontiguousarray(out.transpose(1, 0, 2)), np.ascontiguousarray(lse.T))


def alibi(slopes, q_pos, k_pos):
    """-slope |p - j|, [h t s] in the accumulation dtype."""
    kind = accumulation(slopes.dtype)
    distance = np.abs(positions(q_pos)[:, None] - positions(k_pos)[None, :])
    return -slopes.astype(kind)[:, None, None] * distance.astype(kind)


def alibi_slopes(heads: int):
    """ALiBi's geometric slopes, Float32[heads]."""
    n = 2 ** int(np.floor(np.log2(heads)))
    whole, twice = (2.0 ** (-8.0 * np.arange(1, m + 1) / m) for m in (n, 2 * n))
    return np.concatenate([whole, twice[::2]])[:heads].astype(np.float32)


def repeated(rows, heads):
    """[s hk d] as [s heads d]: query head h reads key head h // (heads / hk)."""
    return np.repeat(rows, heads // rows.shape[1], axis=1)


def accumulation(dtype):
    """The type that products of `dtype` accumulate in."""
    return np.float64 if dtype == np.float64 else np.float32
