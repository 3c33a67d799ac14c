"""The standard layer: hidden states -> output, cache. Prefill, prefix hits, chunks, decoding and draft tokens are one code path."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fattn import _tiling, merge, paged, rope
from fattn._checks import as_arrays, check_batch, check_cache
from fattn._placement import gathered, heads_like
from fattn.types import Batch, Mask, Pages, StandardConfig

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


def prepare(weights: Weights, *, config: Config) -> Prepared:
    """Fuses the three projections (a missing bias among present ones is zero) and makes the rotary frequencies, float32.

    Raises ValueError for a weight whose shape does not follow from the config.
    """
    weights = as_arrays(weights)
    _check_weights(weights, config)
    biases = None
    if any(bias is not None for bias in (weights.bq, weights.bk, weights.bv)):
        pairs = ((weights.bq, weights.wq), (weights.bk, weights.wk), (weights.bv, weights.wv))
        biases = jnp.concatenate([jnp.zeros(w.shape[1], w.dtype) if bias is None else bias for bias, w in pairs])
    turning = None if config.rotary is None else rope.frequencies(config.rotary_size or config.head_size, theta=config.rotary_theta)
    fused = jnp.concatenate([weights.wq, weights.wk, weights.wv], axis=1)
    return Prepared(fused, weights.wo, biases, weights.bo, weights.sinks, weights.slopes, turning)


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
) -> tuple[Float[Array, "t h dv"], Pages]:
    """Writes k and v at the batch's slots, attends over the new cache, and finishes with the sinks: (out [t h dv] in q's dtype, cache).

    Raises ValueError where the arguments do not fit together.
    """
    cache = paged.write(cache, k, v, batch.slot_mapping)
    partial = attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=sinks is not None)
    return merge.finish(partial, sinks, dtype=q.dtype), cache


def forward(
    x: Float[Array, "t d"],
    weights: Prepared,
    cache: Pages,
    batch: Batch,
    *,
    config: Config,
    attend=paged.attend,
) -> tuple[Float[Array, "t d"], Pages]:
    """The layer: project, turn q and k at the batch's positions, write and attend, project back: (y [t d] in x's dtype, cache).

    Rounded to x's dtype after each projection, bias and turn, and to the cache's dtype around the attention. Under an Explicit mesh the
    attention is sharded as the cache's heads are. Raises ValueError where the arguments do not fit together.
    """
    x, weights, cache, batch = as_arrays((x, weights, cache, batch))
    _check_forward(x, weights, cache, batch, config)
    x = jnp.where((_tiling.standing(batch, x.shape[0]).position >= 0)[:, None], x, 0)  # padding may hold anything, also in gradients
    heads = (config.heads, config.kv_heads, config.kv_heads)
    projected = _project(x, weights.wqkv, weights.bqkv).reshape(x.shape[0], sum(heads), config.head_size)
    q, k, v = jnp.split(projected, (heads[0], heads[0] + heads[1]), axis=1)
    if config.rotary is not None:
        turn = rope.half if config.rotary == "half" else rope.interleaved
        cos, sin = rope.table(batch.positions, weights.frequencies, dtype=jnp.promote_types(x.dtype, jnp.float32))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
    q, k, v = (heads_like(rows.astype(cache.k.dtype), cache) for rows in (q, k, v))
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
    out = gathered(out).astype(x.dtype).reshape(x.shape[0], -1)
    return _project(out, weights.wo, weights.bo), cache


def _project(x, w, bias):
    """x @ w + bias, rounded to x's dtype after each."""
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.matmul(x, w, precision="highest", preferred_element_type=accumulator).astype(x.dtype)
    return y if bias is None else (y + bias).astype(x.dtype)


def _check_weights(weights, config):
    inner, kv_inner = config.heads * config.head_size, config.kv_heads * config.head_size
    expected = Weights(
        wq=(config.hidden_size, inner),
        wk=(config.hidden_size, kv_inner),
        wv=(config.hidden_size, kv_inner),
        wo=(inner, config.hidden_size),
        bq=(inner,),
        bk=(kv_inner,),
        bv=(kv_inner,),
        bo=(config.hidden_size,),
        sinks=(config.heads,),
        slopes=(config.heads,),
    )
    for name, array, shape in zip(Weights._fields, weights, expected, strict=True):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {list(array.shape)}; the config asks for {list(shape)}")


def _check_forward(x, weights, cache, batch, config):
    if x.ndim != 2 or x.shape[1] != config.hidden_size:
        raise ValueError(f"x has shape {list(x.shape)}, config.hidden_size is {config.hidden_size}; layout is [rows, hidden size]")
    fused = (config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_size)
    if weights.wqkv.shape != fused:
        raise ValueError(f"weights.wqkv has shape {list(weights.wqkv.shape)}; the config asks for {list(fused)}")
    if (weights.frequencies is None) != (config.rotary is None):
        raise ValueError(f"config.rotary={config.rotary!r}, but the weights were prepared for another: prepare them with this config")
    check_cache(cache)
    check_batch(batch, x.shape[0], cache)
