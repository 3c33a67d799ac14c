"""The standard layer: hidden states -> output, cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fattn.types import Batch, Mask, Pages, StandardConfig
from reference import merge, paged, rope
from reference._checks import check_batch, check_cache, dtype, pages_of, shape, standing
from reference.bounded import FLOAT32, Bounded, Precision, add, bounded, cast, matmul

Array = np.ndarray
Config = StandardConfig


class Weights(NamedTuple):
    """A layer's weights as checkpoints hold them, transposed so that they multiply from the right."""

    wq: Float[Array, "d h*dh"]
    wk: Float[Array, "d hk*dh"]
    wv: Float[Array, "d hk*dh"]
    wo: Float[Array, "h*dh d"]
    bq: Float[Array, "h*dh"] | None = None
    bk: Float[Array, "hk*dh"] | None = None
    bv: Float[Array, "hk*dh"] | None = None
    bo: Float[Array, "d"] | None = None
    sinks: Float[Array, "h"] | None = None
    slopes: Float[Array, "h"] | None = None


class Prepared(NamedTuple):
    """Weights in the form that `forward` takes: one projection to q, k and v, and the rotary frequencies."""

    wqkv: Float[Array, "d (h+2*hk)*dh"]
    wo: Float[Array, "h*dh d"]
    bqkv: Float[Array, "(h+2*hk)*dh"] | None = None
    bo: Float[Array, "d"] | None = None
    sinks: Float[Array, "h"] | None = None
    slopes: Float[Array, "h"] | None = None
    frequencies: Float[Array, "rotary_size/2"] | None = None


def prepare(weights: Weights, *, config: Config, precision: Precision = FLOAT32) -> Prepared:
    """Fuses the three projections (a missing bias among present ones is zero) and makes the rotary frequencies, which are Bounded.

    Raises ValueError for a weight whose shape does not follow from the config.
    """
    _check_weights(weights, config)
    biases = None
    if any(bias is not None for bias in (weights.bq, weights.bk, weights.bv)):
        pairs = ((weights.bq, weights.wq), (weights.bk, weights.wk), (weights.bv, weights.wv))
        biases = np.concatenate([np.zeros(w.shape[1], w.dtype) if bias is None else bias for bias, w in pairs])
    turning = None
    if config.rotary is not None:
        turning = rope.frequencies(config.rotary_size or config.head_size, theta=config.rotary_theta, precision=precision)
    fused = np.concatenate([weights.wq, weights.wk, weights.wv], axis=1)
    return Prepared(fused, np.asarray(weights.wo), biases, weights.bo, weights.sinks, weights.slopes, turning)


def attend_and_write(
    q: Float[Array, "t h d"],
    k: Float[Array, "t hk d"],
    v: Float[Array, "t hk dv"],
    cache: Pages,
    batch: Batch,
    sinks: Float[Array, "h"] | None = None,
    slopes: Float[Array, "h"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    attend=paged.attend,
    precision: Precision = FLOAT32,
) -> tuple[Bounded, Pages]:
    """Writes k and v at the batch's slots, attends over the new cache, and finishes with the sinks: (Bounded out [t h dv], cache).

    The cache is Bounded where it, k or v is. Raises ValueError where the arguments do not fit together.
    """
    cache = paged.write(cache, k, v, batch.slot_mapping)
    partial = attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=sinks is not None, precision=precision)
    return merge.finish(partial, sinks, dtype=pages_of(cache).k.dtype, precision=precision), cache


def forward(
    x: Float[Array, "t d"],
    weights: Prepared,
    cache: Pages,
    batch: Batch,
    *,
    config: Config,
    attend=paged.attend,
    precision: Precision = FLOAT32,
) -> tuple[Bounded, Pages]:
    """The layer: project, turn q and k at the batch's positions, write and attend, project back: (Bounded y [t d], Bounded cache).

    Rounded to x's dtype after each projection, bias and turn, and to the cache's dtype around the attention. The cache is Bounded because
    its new rows are computed. Raises ValueError where the arguments do not fit together.
    """
    _check_forward(x, weights, config)
    pages, kind = pages_of(cache), dtype(x)
    check_cache(pages)
    check_batch(batch, tokens=shape(x)[0], block_size=pages.block_size, num_blocks=pages.k.shape[pages.layout.index("p")])
    cached, padding = pages.k.dtype, standing(batch)[:, None] < 0
    x = Bounded(*(np.where(padding, 0, part) for part in bounded(x)))  # padding may hold anything
    projected = _project(x, weights.wqkv, weights.bqkv, kind, precision)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    q, k, v = (_heads(projected, sum(heads[:i]), count, config.head_size) for i, count in enumerate(heads))
    if config.rotary is not None:
        cos, sin = rope.table(batch.positions, weights.frequencies, dtype="float32", precision=precision)
        turn = rope.half if config.rotary == "half" else rope.interleaved
        q, k = (cast(turn(rows, cos, sin, precision=precision), kind) for rows in (q, k))
    if cached != kind:
        q, k, v = (cast(rows, cached) for rows in (q, k, v))
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
        precision=precision,
    )
    flat = Bounded(*(part.reshape(part.shape[0], -1) for part in out))
    return _project(flat if cached == kind else cast(flat, kind), weights.wo, weights.bo, kind, precision), cache


def _project(x, w, bias, kind, precision):
    """x @ w + bias, rounded to `kind` after each."""
    y = cast(matmul(x, bounded(w), precision=precision), kind)
    return y if bias is None else cast(add(y, bounded(bias), precision=precision), kind)


def _heads(projected, first, count, size):
    """Heads first to first + count of the fused projection: [t count size]."""
    columns = slice(first * size, (first + count) * size)
    return Bounded(*(part[:, columns].reshape(-1, count, size) for part in projected))


def _check_forward(x, weights, config):
    if shape(x)[1:] != (config.hidden_size,):
        raise ValueError(f"x has shape {list(shape(x))}, config.hidden_size is {config.hidden_size}; layout is [rows, hidden size]")
    fused = (config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_size)
    if shape(weights.wqkv) != fused:
        raise ValueError(f"weights.wqkv has shape {list(shape(weights.wqkv))}; the config asks for {list(fused)}")
    if (weights.frequencies is None) != (config.rotary is None):
        raise ValueError(f"config.rotary={config.rotary!r}, but the weights were prepared for another: prepare them with this config")


def _check_weights(weights, config):
    inner, kv_inner = config.heads * config.head_size, config.kv_heads * config.head_size
    expected = Weights(
        (config.hidden_size, inner),
        (config.hidden_size, kv_inner),
        (config.hidden_size, kv_inner),
        (inner, config.hidden_size),
        (inner,),
        (kv_inner,),
        (kv_inner,),
        (config.hidden_size,),
        (config.heads,),
        (config.heads,),
    )
    for name, array, wanted in zip(Weights._fields, weights, expected, strict=True):
        if array is not None and shape(array) != wanted:
            raise ValueError(f"{name} has shape {list(shape(array))}; the config asks for {list(wanted)}")
