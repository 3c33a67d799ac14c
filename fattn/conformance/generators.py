"""Queries, keys and values that find faults: each generator aims at something that ordinary random numbers miss."""

from __future__ import annotations

import numpy as np

from fattn.conformance.plain import dense
from fattn.conformance.plain.masks import visible

GENERATORS = ("gaussian", "peaked", "flat", "tied", "one-hot", "huge", "offset", "position-coded")


def rows(generator: str, rng: np.random.Generator, queries, keys, sizes, dtype):
    """(q [t h d], k [s hk d], v [s hk dv]) in `dtype` for t queries, s keys and sizes (h, hk, d, dv).

    gaussian; peaked (few keys take all), flat (every key alike), tied (keys repeat exactly), one-hot, huge (scores in the hundreds),
    offset (a large common part in every key), position-coded (values spell where they stand), integers (small ones, for reading).
    """
    h, hk, d, dv = sizes
    q, k, v = (rng.standard_normal(shape) for shape in ((queries, h, d), (keys, hk, d), (keys, hk, dv)))
    match generator:
        case "peaked":
            q *= 4
        case "flat":
            q *= 1e-3
        case "tied":
            k = k[rng.integers(0, min(3, keys), keys)] if keys else k
        case "one-hot":
            q, k = (np.eye(d)[rng.integers(0, min(d, 8), x.shape[:2])] * 3 for x in (q, k))
        case "huge":
            q, k = q * 8, k * 8
        case "offset":
            k = k * 0.25 + 3 * np.sign(rng.standard_normal((1, hk, d)))
            q = q * 0.5
        case "position-coded":
            v = code(np.arange(keys), hk, dv)
        case "integers":
            q, k, v = (np.clip(np.rint(x), -2, 2) for x in (q, k, v))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def code(tokens, heads: int, size: int):
    """A pattern of [n heads size] in -2..2 that tells tokens, heads and dims apart."""
    n, h, d = (np.asarray(tokens)[:, None, None], np.arange(heads)[None, :, None], np.arange(size)[None, None, :])
    return ((n * 37 + h * 11 + d * (5 + n % 7)) % 17 - 8) / 4.0


def spotlight(q, k, v, i: int, j: int, q_pos, k_pos, bias=None, *, mask, scale, softcap):
    """Plants a key: query i gives key j about half of its probability if it sees it, and value j has a code of its own. In place.

    In every key head the first query head that reads it is aimed at.
    """
    group = q.shape[1] // k.shape[1]
    seen = np.broadcast_to(visible(q_pos, k_pos, mask=mask), (q.shape[1], q.shape[0], k.shape[0]))
    shift = np.zeros(seen.shape) if bias is None else np.broadcast_to(np.asarray(bias, np.float64), seen.shape)
    seen = seen & (shift > -np.inf)
    for head in range(k.shape[1]):
        reader = head * group
        query = q[i, reader].astype(np.float64)
        if query @ query < 1e-2 * query.size:
            query = np.sign(code([i], 1, query.size)[0, 0] + 0.1)
            q[i, reader] = query
        one_query, one_head = q[i : i + 1, reader : reader + 1].astype(np.float64), k[:, head : head + 1].astype(np.float64)
        z = dense.scores(one_query, one_head, scale=scale, softcap=softcap)
        others = (z[0, 0] + shift[reader, i])[seen[reader, i] & (np.arange(len(k)) != j)]
        aim = _log_sum_exp(others) if others.size else 0.0
        aim -= shift[reader, i, j] if np.isfinite(shift[reader, i, j]) else 0.0
        if softcap is not None:
            aim = softcap * np.arctanh(np.clip(aim / softcap, -0.99, 0.99))
        k[j, head] = np.clip(query * (aim / (scale * (query @ query))), -1e3, 1e3)
    v[j] = 2 * code([j], *v.shape[1:])[0] + 0.25


def _log_sum_exp(z):
    top = z.max()
    return top + np.log(np.exp(z - top).sum())
