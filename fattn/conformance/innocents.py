"""Implementations that are right and differ in everything that they may differ in: what the kit must not accuse.

Blocks, order, splits, bases of exponentials, the place of the scale, casts that are declared, other libraries and layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fattn.conformance.faults.fault import PagedSteps, Steps, attention, paged_attention
from fattn.conformance.plain import dense, masks, merge, paged, rope, standard
from fattn.types import Pages, Partial, Tokens, same
from reference.bounded import FLOAT32, ROUNDOFF, Precision


class Innocent(NamedTuple):
    """A correct implementation of one operation. `freedom` is what it makes use of; `precision` what it declares, by dtype."""

    name: str
    operation: str
    function: Callable
    freedom: str
    precision: Callable[[str], Precision]


def float32_throughout(dtype: str) -> Precision:
    """Declares that P is not cast, whatever the inputs."""
    return FLOAT32


def cast_probabilities(dtype: str) -> Precision:
    """Declares that P is cast to V's dtype, the convention."""
    return Precision(probabilities=0.0 if dtype == "float32" else ROUNDOFF[dtype])


def bfloat16_probabilities(dtype: str) -> Precision:
    """Declares that P is cast to bfloat16."""
    return Precision(probabilities=ROUNDOFF["bfloat16"])


def operator_casts(dtype: str) -> Precision:
    """Declares what fused operators do: P and the output are cast to the inputs' dtype."""
    return (
        Precision(probabilities=0.0, output=0.0) if dtype == "float32" else Precision(probabilities=ROUNDOFF[dtype], output=ROUNDOFF[dtype])
    )


# --- dense.attend ------------------------------------------------------------------------------------------------------------------


def _online(order: Callable[[int], list[slice]]) -> Callable:
    """Online softmax over the keys in blocks, as slices in some order, in float32 (no cast of P)."""

    def softmax(z, seen, v) -> Partial:
        kind, (h, t, _) = z.dtype.type, z.shape
        out, total, top = np.zeros((h, t, v.shape[-1]), kind), np.zeros((h, t), kind), np.full((h, t), -np.inf, kind)
        values = v.transpose(1, 0, 2).astype(kind)
        for cut in order(z.shape[-1]):
            block = np.where(seen[..., cut], z[..., cut], kind(-np.inf))
            new = np.maximum(top, block.max(-1, initial=-np.inf))
            safe = np.where(np.isneginf(new), kind(0), new)
            kept, p = np.exp(top - safe), np.exp(block - safe[..., None])
            total = total * kept + p.sum(-1)
            out, top = out * kept[..., None] + p @ values[:, cut], new
        some = total > 0
        lse = np.where(some, top + np.log(np.where(some, total, 1)), kind(-np.inf)).T
        return Partial(np.ascontiguousarray((out / np.where(some, total, 1)[..., None]).transpose(1, 0, 2)), lse.copy())

    return softmax


def blocks(size: int) -> Callable[[int], list[slice]]:
    """Blocks of `size` keys, in order."""
    return lambda keys: [slice(first, first + size) for first in range(0, keys, size)]


def backwards(keys: int) -> list[slice]:
    """Blocks of 37 keys, the last ones first."""
    return blocks(37)(keys)[::-1]


def base_two(z, seen, v) -> Partial:
    """Exponentials and logarithms in base 2, converted once."""
    kind = z.dtype.type
    scaled = np.where(seen, z * kind(np.log2(np.e)), kind(-np.inf))
    some = seen.any(-1)
    top = np.where(some, scaled.max(-1, initial=-np.inf), kind(0))
    p = np.exp2(scaled - top[..., None])
    total = np.where(some, p.sum(-1), kind(1))
    out = (p / total[..., None]) @ v.transpose(1, 0, 2).astype(kind)
    lse = np.where(some, (top + np.log2(total)) * kind(np.log(2)), kind(-np.inf))
    return Partial(np.ascontiguousarray(out.transpose(1, 0, 2)), lse.T.copy())


def probabilities_in_bfloat16(z, seen, v) -> Partial:
    """P is cast to bfloat16 for its product with V, normalised after it."""
    kind, some = z.dtype.type, seen.any(-1)
    z = np.where(seen, z, kind(-np.inf))
    top = np.where(some, z.max(-1, initial=-np.inf), kind(0))
    p = np.exp(z - top[..., None])
    total = np.where(some, p.sum(-1), kind(1))
    out = (p.astype(ml_dtypes.bfloat16).astype(kind) @ v.transpose(1, 0, 2).astype(kind)) / total[..., None]
    return Partial(np.ascontiguousarray(out.transpose(1, 0, 2)), np.where(some, top + np.log(total), kind(-np.inf)).T.copy())


def scaled_query(q, k, *, scale, softcap):
    """The scale is multiplied into q before the product, in float32."""
    kind = dense.accumulation(q.dtype)
    return dense.scores(q.astype(kind) * kind(scale), k.astype(kind), scale=1.0, softcap=softcap)


def summed_dim_by_dim(q, k, *, scale, softcap):
    """One dim of the head at a time, in order: the longest chain of roundings."""
    kind = dense.accumulation(q.dtype)
    z = np.zeros((q.shape[1], q.shape[0], k.shape[0]), kind)
    for dim in range(q.shape[-1]):
        z += q[..., dim].astype(kind).T[:, :, None] * k[..., dim].astype(kind).T[:, None, :]
    z *= kind(scale)
    return z if softcap is None else kind(softcap) * np.tanh(z / kind(softcap))


def split_and_merged(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None) -> Partial:
    """Three parts of the keys, attended separately and merged, the last two first."""
    keys = len(k)
    cuts = (slice(0, keys // 5), slice(keys // 5, keys // 2), slice(keys // 2, keys))
    parts = []
    for cut in cuts:
        side = Tokens(masks.positions(k_pos)[cut], {name: label[cut] for name, label in masks.labels(k_pos).items()})
        own = bias if bias is None or bias.shape[-1] == 1 else bias[..., cut]
        parts.append(attention(Steps(softmax=base_two))(q, k[cut], v[cut], q_pos, side, own, mask=mask, scale=scale, softcap=softcap))
    return merge.merge(merge.merge(parts[2], parts[1]), parts[0])


def torch_attention(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None) -> Partial:
    """torch's scaled_dot_product_attention, where it has what is asked for; the log-sum-exp beside it."""
    import torch

    if softcap is not None:
        return attention(Steps(softmax=base_two))(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    shape = (q.shape[1], q.shape[0], k.shape[0])
    seen = np.broadcast_to(masks.visible(q_pos, k_pos, mask=mask), shape)
    added = np.zeros(shape, np.float32) if bias is None else np.broadcast_to(bias, shape).astype(np.float32)
    seen = seen & (added > -np.inf)
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x.astype(np.float32).transpose(1, 0, 2))) for x in dense.cleaned(q, k, v, seen))
    shift = torch.from_numpy(np.where(seen, added, np.float32(-np.inf)))
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=shift[None], scale=scale, enable_gqa=True)[
        0
    ]
    lse = torch.logsumexp(scale * (q @ k.repeat_interleave(shape[0] // k.shape[0], 0).transpose(1, 2)) + shift, -1)
    some = torch.from_numpy(np.ascontiguousarray(seen.any(-1)))
    out = torch.where(some[..., None], out, 0)
    return Partial(out.transpose(0, 1).contiguous().numpy(), torch.where(some, lse, -torch.inf).T.contiguous().numpy())


def cast_like_an_operator(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None) -> Partial:
    """P and the output are cast to the inputs' dtype, the output with it."""
    part = dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    return Partial(part.out.astype(q.dtype), part.lse)


# --- merge -------------------------------------------------------------------------------------------------------------------------


def merged_by_sigmoids(a: Partial, b: Partial) -> Partial:
    """Both shares as sigmoids of the difference of the log-sum-exps, in base 2."""
    both = (a.lse > -np.inf) & (b.lse > -np.inf)
    away = (np.where(both, b.lse, 0) - np.where(both, a.lse, 0)) * a.lse.dtype.type(np.log2(np.e))
    with np.errstate(over="ignore"):
        shares = [np.where(both, 1 / (1 + np.exp2(x)), part.lse > -np.inf) for x, part in ((away, a), (-away, b))]
    outs = [np.where((part.lse > -np.inf)[..., None], part.out, 0) for part in (a, b)]
    out = shares[0][..., None] * outs[0] + shares[1][..., None] * outs[1]
    return Partial(out.astype(a.out.dtype), np.logaddexp(a.lse, b.lse))


def sink_as_a_partial(partial: Partial, sink=None, *, dtype):
    """The sink as a partial of its own, of value 0, merged in."""
    if sink is None:
        return merge.finish(partial, dtype=dtype)
    lse = np.broadcast_to(sink.astype(partial.lse.dtype), partial.lse.shape)
    seen = partial.lse > -np.inf
    ruled = np.isposinf(lse) | ~seen
    part = Partial(np.where(ruled[..., None], 0, partial.out), np.where(ruled, 0, partial.lse))
    other = Partial(np.zeros_like(part.out), np.where(ruled, 0, lse))
    return np.where(ruled[..., None], 0, merged_by_sigmoids(part, other).out).astype(dtype)


# --- pages -------------------------------------------------------------------------------------------------------------------------


def page_by_page(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None) -> Partial:
    return attention(Steps(softmax=_online(blocks(16))))(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def whole_cache_at_once(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True) -> Partial:
    """One attention over every key of every sequence, which a label keeps apart."""
    starts, rows = np.asarray(batch.query_start_loc), range(len(batch.seq_lens))
    spans = [paged.sequence(batch, row) for row in rows]
    k, v = (np.concatenate(parts) for parts in zip(*(_owned(cache, span) for span in spans), strict=True))
    queries, keys = (_joined([span[side] for span in spans]) for side in (1, 2))
    unowned = len(q) - int(starts[-1])
    bias = None if slopes is None else dense.alibi(slopes.astype(dense.accumulation(q.dtype)), queries, keys)
    rule = mask & same("owner")
    part = dense.attend(q[: len(q) - unowned], k, v, queries, keys, bias, mask=rule, scale=scale, softcap=softcap)
    return part if lse else Partial(part.out, None)


def _owned(cache, span):
    length = span[2].pos.size
    return tuple(rows[0, :length] for rows in paged.gather(cache, span[3]))


def _joined(sides):
    positions = [masks.positions(side) for side in sides]
    owner = np.repeat(np.arange(len(sides)), [p.size for p in positions])
    labels = {name: np.concatenate([side.labels[name] for side in sides]) for name in sides[0].labels}
    return Tokens(np.concatenate(positions).astype(np.int32), {**labels, "owner": owner})


def written_last_first(cache, k, v, slots):
    """Row by row, the last one first, straight into the cache's own layout."""
    new = Pages(cache.k.copy(), cache.v.copy(), cache.layout, cache.block_size)
    capacity = new.k.shape[new.layout.index("p")] * new.block_size
    for row in range(len(slots) - 1, -1, -1):
        slot = int(slots[row])
        if 0 <= slot < capacity:
            at = {"p": slot // new.block_size, "b": slot % new.block_size}
            place = tuple(at.get(axis, slice(None)) for axis in new.layout)
            new.k[place], new.v[place] = k[row], v[row]
    return new


# --- rotary, the layer -------------------------------------------------------------------------------------------------------------


def complex_turn(x, cos, sin):
    """Neighbours as complex numbers, multiplied by e^(i angle)."""
    r = 2 * cos.shape[-1]
    pairs = x[..., 0:r:2].astype(np.complex64) + 1j * x[..., 1:r:2].astype(np.complex64)
    turned = pairs * (cos.astype(np.complex64) + 1j * sin.astype(np.complex64))[:, None]
    out = x.astype(np.float32)
    out[..., 0:r:2], out[..., 1:r:2] = turned.real, turned.imag
    return out.astype(x.dtype)


def rotate_half(x, cos, sin):
    """x cos + rotate_half(x) sin with tables written out twice."""
    r = cos.shape[-1]
    c, s = (np.concatenate([wave, wave], -1)[:, None].astype(np.float32) for wave in (cos, sin))
    turning = x[..., : 2 * r].astype(np.float32)
    partner = np.concatenate([-turning[..., r:], turning[..., :r]], -1)
    return np.concatenate([(turning * c + partner * s).astype(x.dtype), x[..., 2 * r :]], -1)


def double_precision_angles(positions, frequencies, *, dtype):
    """Angles in float64."""
    return rope.table(positions.astype(np.float64), frequencies.astype(np.float64), dtype=dtype)


def unfused(x, weights, cache, batch, *, config, attend=paged.attend):
    """Three projections, each on its own, and pages read one at a time."""
    kind = dense.accumulation(x.dtype)
    sizes = np.array([config.heads, config.kv_heads, config.kv_heads]) * config.head_size
    columns = [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    parts = []
    for cut in columns:
        y = np.einsum("td,dn->tn", x.astype(kind), weights.wqkv[:, cut].astype(kind)).astype(x.dtype)
        if weights.bqkv is not None:
            y = (y.astype(kind) + weights.bqkv[cut].astype(kind)).astype(x.dtype)
        parts.append(y)
    joined = np.concatenate(parts, -1)
    identity = np.eye(joined.shape[1], dtype=x.dtype)
    return standard.forward(joined, weights._replace(wqkv=identity, bqkv=None), cache, batch, config=config, attend=attend)


def _steps(name, steps, freedom, precision=float32_throughout):
    return Innocent(name, "dense.attend", attention(steps), freedom, precision)


INNOCENTS = (
    _steps("online_blocks_of_48", Steps(softmax=_online(blocks(48))), "block size, order of sums"),
    _steps("online_last_block_first", Steps(softmax=_online(backwards)), "order of keys"),
    _steps("one_key_at_a_time", Steps(softmax=_online(blocks(1))), "sequential sums"),
    _steps("exponentials_in_base_two", Steps(softmax=base_two), "base of exponentials"),
    _steps("scale_in_the_query", Steps(score=scaled_query), "where the scale is multiplied", cast_probabilities),
    _steps("dim_by_dim", Steps(score=summed_dim_by_dim), "sequential products", cast_probabilities),
    _steps("probabilities_in_declared_bfloat16", Steps(softmax=probabilities_in_bfloat16), "a declared cast", bfloat16_probabilities),
    Innocent("keys_split_and_merged", "dense.attend", split_and_merged, "splits", float32_throughout),
    Innocent("torch_attention", "dense.attend", torch_attention, "another library", float32_throughout),
    Innocent("casts_like_an_operator", "dense.attend", cast_like_an_operator, "declared casts of P and output", operator_casts),
    Innocent("merged_by_sigmoids", "merge.merge", merged_by_sigmoids, "formula, base", float32_throughout),
    Innocent("sink_as_a_partial", "merge.finish", sink_as_a_partial, "formula", float32_throughout),
    Innocent("page_by_page", "paged.attend", paged_attention(PagedSteps(attend=page_by_page)), "order of pages", cast_probabilities),
    Innocent("split_pages", "paged.attend", paged_attention(PagedSteps(attend=split_and_merged)), "split keys", cast_probabilities),
    Innocent("whole_cache_at_once", "paged.attend", whole_cache_at_once, "one call for all sequences", cast_probabilities),
    Innocent("written_last_first", "paged.write", written_last_first, "order of writes", cast_probabilities),
    Innocent("complex_turn", "rope.interleaved", complex_turn, "complex arithmetic", float32_throughout),
    Innocent("rotate_half", "rope.half", rotate_half, "formula", float32_throughout),
    Innocent("double_precision_angles", "rope.table", double_precision_angles, "more precision", float32_throughout),
    Innocent("unfused_projections", "standard.forward", unfused, "order of sums", cast_probabilities),
)
