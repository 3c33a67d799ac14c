"""The standard layer: hidden states -> output, cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fattn.conformance.plain import dense, merge, paged, rope
from fattn.types import Batch, Mask, Pages, StandardConfig

Config = StandardConfig


class Weights(NamedTuple):
    """A layer's weights, which multiply from the right."""

    wq: Any
    wk: Any
    wv: Any
    wo: Any
    bq: Any = None
    bk: Any = None
    bv: Any = None
    bo: Any = None
    sinks: Any = None
    slopes: Any = None


class Prepared(NamedTuple):
    """Weights with one projection to q, k and v, and the rotary frequencies."""

    wqkv: Any
    wo: Any
    bqkv: Any = None
    bo: Any = None
    sinks: Any = None
    slopes: Any = None
    frequencies: Any = None


def prepare(weights: Weights, *, config: Config) -> Prepared:
    """Fuses the projections and makes the frequencies."""
    parts = ((weights.wq, weights.bq), (weights.wk, weights.bk), (weights.wv, weights.bv))
    bias = None
    if any(b is not None for _, b in parts):
        bias = np.concatenate([np.zeros(w.shape[1], w.dtype) if b is None else b for w, b in parts])
    turning = None if config.rotary is None else rope.frequencies(config.rotary_size or config.head_size, theta=config.rotary_theta)
    fused = np.concatenate([w for w, _ in parts], axis=1)
    return Prepared(fused, weights.wo, bias, weights.bo, weights.sinks, weights.slopes, turning)


def attend_and_write(
    q,
    k,
    v,
    cache: Pages,
    batch: Batch,
    sinks=None,
    slopes=None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    attend=paged.attend,
):
    """Write, attend over the new cache, finish with the sinks: (out, cache)."""
    cache = paged.write(cache, k, v, batch.slot_mapping)
    partial = attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=sinks is not None)
    return merge.finish(partial, sinks, dtype=q.dtype), cache


def forward(x, weights: Prepared, cache: Pages, batch: Batch, *, config: Config, attend=paged.attend):
    """Project, turn, write and attend, project back: (y, cache)."""
    counts = np.array([config.heads, config.kv_heads, config.kv_heads]) * config.head_size
    split = np.split(_project(x, weights.wqkv, weights.bqkv), np.cumsum(counts)[:-1], axis=1)
    q, k, v = (part.reshape(len(x), -1, config.head_size) for part in split)
    if config.rotary is not None:
        cos, sin = rope.table(batch.positions, weights.frequencies, dtype=dense.accumulation(x.dtype))
        turn = rope.half if config.rotary == "half" else rope.interleaved
        q, k = turn(q, cos, sin), turn(k, cos, sin)
    q, k, v = (part.astype(cache.k.dtype) for part in (q, k, v))
    out, cache = attend_and_write(
        q,
        k,
        v,
        cache,
        batch,
        weights.sinks,
        weights.slopes,
        mask=config.mask,
        scale=config.scale,
        softcap=config.softcap,
        attend=attend,
    )
    return _project(out.reshape(len(x), -1).astype(x.dtype), weights.wo, weights.bo), cache


def _project(x, w, bias):
    kind = dense.accumulation(x.dtype)
    y = (x.astype(kind) @ w.astype(kind)).astype(x.dtype)
    return y if bias is None else (y.astype(kind) + bias.astype(kind)).astype(x.dtype)
