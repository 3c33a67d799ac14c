"""The standard attention layer: hidden states and a paged cache in, hidden states and the cache out."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fattn.types import Batch, Mask, Pages, StandardConfig
from npu import _operators, paged, rope
from npu._admit import admit, admit_write, check_reach, once_a_step
from npu._checks import cache_sizes, check_devices, check_rows
from npu._paged import attend_by, store
from npu._training import refuse_gradient
from npu.merge import finish

Config = StandardConfig


class Weights(NamedTuple):
    """A layer's weights as checkpoints have them, each applied as x @ w: d hidden, h query heads, hk key heads, dh dims a head."""

    wq: Float[Tensor, "d h*dh"]
    wk: Float[Tensor, "d hk*dh"]
    wv: Float[Tensor, "d hk*dh"]
    wo: Float[Tensor, "h*dh d"]
    bq: Float[Tensor, "h*dh"] | None = None
    bk: Float[Tensor, "hk*dh"] | None = None
    bv: Float[Tensor, "hk*dh"] | None = None
    bo: Float[Tensor, "d"] | None = None
    sinks: Float[Tensor, "h"] | None = None
    slopes: Float[Tensor, "h"] | None = None


class Prepared(NamedTuple):
    """Weights as `forward` takes them: one fused projection, and the rotary frequencies."""

    wqkv: Float[Tensor, "d (h+2*hk)*dh"]
    wo: Float[Tensor, "h*dh d"]
    bqkv: Float[Tensor, "(h+2*hk)*dh"] | None = None
    bo: Float[Tensor, "d"] | None = None
    sinks: Float[Tensor, "h"] | None = None
    slopes: Float[Tensor, "h"] | None = None
    frequencies: Float[Tensor, "rotary_size/2"] | None = None


def prepare(weights: Weights, *, config: Config) -> Prepared:
    """Fuses the three projections and makes the rotary frequencies (float32), once. A missing bias beside a given one counts as zeros.

    Raises ValueError for a weight whose shape does not fit the configuration.
    """
    _check_weights(weights, config)
    biases = [(weights.bq, weights.wq), (weights.bk, weights.wk), (weights.bv, weights.wv)]
    fused = None
    if any(bias is not None for bias, _ in biases):
        fused = torch.cat([bias if bias is not None else w.new_zeros(w.shape[1]) for bias, w in biases])
    size = config.head_size if config.rotary_size is None else config.rotary_size
    return Prepared(
        torch.cat([weights.wq, weights.wk, weights.wv], 1),
        weights.wo,
        fused,
        weights.bo,
        weights.sinks,
        weights.slopes,
        None if config.rotary is None else rope.frequencies(size, theta=config.rotary_theta).to(weights.wq.device),
    )


def attend_and_write(
    q: Float[Tensor, "t h d"],
    k: Float[Tensor, "t hk d"],
    v: Float[Tensor, "t hk dv"],
    cache: Pages,
    batch: Batch,
    sinks: Float[Tensor, "h"] | None = None,
    slopes: Float[Tensor, "h"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    attend=paged.attend,
) -> tuple[Float[Tensor, "t h dv"], Pages]:
    """Writes a step's keys and values to the cache at the batch's slots, then attends over it: the output in q's dtype, and the cache.

    The batch comes from npu.place, and the cache is written in place. Before anything is written this raises ValueError where arguments do
    not fit together or a row has no slot (the plan gives padding rows of null blocks), and what paged.attend refuses.
    """
    if torch.is_grad_enabled():
        refuse_gradient("a layer over pages", q=q, k=k, v=v)
    check = functools.partial(_checked, q, k, v, cache, batch, sinks, slopes, mask=mask, softcap=softcap, own=attend is paged.attend)
    tensors = (q, k, v, cache.k, cache.v, batch.block_table, batch.slot_mapping, sinks, slopes)
    facts = once_a_step(batch, tensors, (cache.layout, cache.block_size, batch.block_size, mask, softcap, attend), check)
    cache = store(cache, k, v, batch.slot_mapping)
    if facts is None:
        partial = attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=sinks is not None)
        return finish(partial, sinks, dtype=q.dtype), cache
    # what paged.attend does once it has checked
    launch = _operators.attention_call(q.device.type, None)
    partial = attend_by(launch, facts, q, cache, batch, slopes, scale=scale, lse=sinks is not None)
    return (partial.out if sinks is None else finish(partial, sinks, dtype=q.dtype)), cache


def forward(
    x: Float[Tensor, "t d"], weights: Prepared, cache: Pages, batch: Batch, *, config: Config, attend=paged.attend
) -> tuple[Float[Tensor, "t d"], Pages]:
    """The layer over a step's hidden states: fused projection, rotation at batch.positions, attention in the cache's dtype, projection.

    Returns [t d] in x's dtype, and the cache. q and k turn in one launch. Raises ValueError for shapes that do not fit the configuration,
    and for weights that were prepared for another.
    """
    _check_forward(x, weights, config)
    check_devices({"x": x, "weights.wqkv": weights.wqkv, "weights.wo": weights.wo, "cache.k": cache.k})
    h, hk, d = config.heads, config.kv_heads, config.head_size
    qkv = _projected(x, weights.wqkv, weights.bqkv).view(-1, h + 2 * hk, d)
    qk, v = qkv[:, : h + hk], qkv[:, h + hk :]
    if config.rotary is not None:
        cos, sin = rope.table(batch.positions, weights.frequencies, dtype=torch.float32)
        turn = rope.half if config.rotary == "half" else rope.interleaved
        qk = turn(qk, cos, sin)
    q, k, v = (rows.to(cache.k.dtype).contiguous() for rows in (qk[:, :h], qk[:, h:], v))
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
    return _projected(out.to(x.dtype).flatten(1), weights.wo, weights.bo), cache


def _projected(x, weight, bias):
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _check_forward(x, weights, config):
    if x.ndim != 2 or x.shape[1] != config.hidden_size:
        raise ValueError(f"x has shape {list(x.shape)}, config.hidden_size is {config.hidden_size}; layout is [rows, hidden size]")
    fused = (config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_size)
    if tuple(weights.wqkv.shape) != fused:
        raise ValueError(f"weights.wqkv has shape {list(weights.wqkv.shape)}, but the configuration makes it {list(fused)}")
    if (weights.frequencies is None) != (config.rotary is None):
        raise ValueError(f"config.rotary={config.rotary!r}, but the weights were prepared for another: prepare them with this config")


def _checked(q, k, v, cache, batch, sinks, slopes, *, mask, softcap, own):
    """What attend_and_write checks; the facts of the call where it is `own`, paged.attend's, else None."""
    others = {"k": k, "v": v, "batch.slot_mapping": batch.slot_mapping, "sinks": sinks}
    sizes, facts = cache_sizes(cache), None
    if own:
        facts = admit(q, cache, sizes, batch, slopes, mask=mask, softcap=softcap, lse=sinks is not None, others=others)
    else:
        check_rows("q", q)
        check_devices({"q": q, "cache.k": cache.k, "cache.v": cache.v} | others)
    admit_write(cache, sizes, k, v, batch.slot_mapping)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows, but k has {k.shape[0]}")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks has shape {list(sinks.shape)}, but q has {q.shape[1]} heads")
    check_reach(batch, num_blocks=sizes[0], writes=True)
    return facts


def _check_weights(weights, config):
    d, q, kv = config.hidden_size, config.heads * config.head_size, config.kv_heads * config.head_size
    expected = {"wq": (d, q), "wk": (d, kv), "wv": (d, kv), "wo": (q, d), "bq": (q,), "bk": (kv,), "bv": (kv,), "bo": (d,)}
    expected |= {"sinks": (config.heads,), "slopes": (config.heads,)}
    for name, shape in expected.items():
        weight = getattr(weights, name)
        if weight is not None and tuple(weight.shape) != shape:
            raise ValueError(f"weights.{name} has shape {list(weight.shape)}, but the configuration makes it {list(shape)}")
