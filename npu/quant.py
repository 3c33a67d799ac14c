"""KV caches in int8: one definition of what a stored number means, and attention over it.

A number x is stored as x8 = round(x / scale + offset), half to even, held to -128..127, and read as (x8 - offset) scale, wherever it is
read. A static scale is one number for each channel of each head, each head, or all; a scale of its own for each token and head is stored
beside the token.

On an NPU attention goes by the same operator as over float pages: a step's blocks are gathered and dequantised first, in every phase.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from fattn.types import Batch, Mask, Pages, Partial
from npu import limits, paged
from npu._admit import check_reach, contiguous
from npu._checks import cache_sizes, check_devices, check_key_values, check_rows, name_of
from npu._paged import store


class Scales(NamedTuple):
    """Scales of a cache's keys and values, and their offsets (None: 0).

    Static: broadcast against [hk d]. For each token: [p b hk], as the tokens lie in the blocks; `write` fills them in, and they have no
    offset.
    """

    k: Float[Tensor, "..."]
    v: Float[Tensor, "..."]
    k_offset: Float[Tensor, "#hk #d"] | None = None
    v_offset: Float[Tensor, "#hk #d"] | None = None


def quantise(x: Float[Tensor, "t hk d"], scale: Float[Tensor, "..."], offset: Float[Tensor, "..."] | None = None) -> Int8[Tensor, "t hk d"]:
    """round(x / scale + offset), half to even, held to -128..127, in float32. `scale` and `offset` broadcast against x."""
    scaled = x.float() / scale
    scaled = scaled if offset is None else scaled + offset
    return scaled.round().clamp(-128, 127).to(torch.int8)


def dequantise(
    x: Int8[Tensor, "t hk d"], scale: Float[Tensor, "..."], offset: Float[Tensor, "..."] | None = None, *, dtype
) -> Float[Tensor, "t hk d"]:
    """(x - offset) scale, in float32, then in `dtype`. `scale` and `offset` broadcast against x."""
    centred = x.float() if offset is None else x.float() - offset
    return (centred * scale).to(dtype)


def token_scales(x: Float[Tensor, "t hk d"]) -> Float[Tensor, "t hk"]:
    """The scale at which the greatest number of a token's head becomes 127, that number times float32(1 / 127); 1 where all are 0."""
    greatest = x.float().abs().amax(-1)
    return torch.where(greatest > 0, greatest * float(np.float32(1 / 127)), 1)


def allocate(num_blocks: int, kv_heads: int, head_size: int, value_size: int, *, block_size: int, layout: str) -> Pages:
    """A cache of zeros in int8. Raises ValueError for a layout outside types.LAYOUTS."""
    return paged.allocate(num_blocks, kv_heads, head_size, value_size, block_size=block_size, layout=layout, dtype=torch.int8)


def write(
    cache: Pages, scales: Scales, k: Float[Tensor, "t hk d"], v: Float[Tensor, "t hk dv"], slots: Int32[Tensor, "t"]
) -> tuple[Pages, Scales]:
    """The cache with token i's keys and values, quantised, at slots[i], and the scales: as they were, or with the tokens' own.

    In place, the storage is the arguments'. Slots are distinct and inside the cache, as paged.write takes them. Raises ValueError where
    k, v, slots or scales do not fit the cache, and Unsupported for what `limits` lists of paged.write.
    """
    blocks, heads = _check(cache, scales)
    check_devices({"cache.k": cache.k, "k": k, "v": v, "slots": slots, "scales.k": scales.k, "scales.v": scales.v})
    check_key_values(k, v)
    for name, rows, pages in (("k", k, cache.k), ("v", v, cache.v)):
        check_rows(name, rows)
        if tuple(rows.shape[1:]) != (heads, pages.shape[3]):
            raise ValueError(f"{name} has rows of {list(rows.shape[1:])}, the cache's are {[heads, pages.shape[3]]} (heads, size)")
    if tuple(slots.shape) != (k.shape[0],):
        raise ValueError(f"slots has shape {list(slots.shape)} for {k.shape[0]} rows of k")
    # the operator takes int8 rows as it takes others: what limits the layout limits them alike
    limits.check(limits.Facts("paged.write", "float16", kv_heads=heads, layout=cache.layout, contiguous=contiguous(cache)))
    stored = []
    for rows, scale, offset in ((k, scales.k, scales.k_offset), (v, scales.v, scales.v_offset)):
        if scale.ndim == 3:
            own = token_scales(rows)
            scale.view(-1, heads).index_copy_(0, slots.long(), own.to(scale.dtype))
            scale = own[..., None]
        stored.append(quantise(rows, scale, offset))
    return store(cache, *stored, slots), scales


def gather(
    cache: Pages, scales: Scales, block_table: Int32[Tensor, "b p"], *, dtype
) -> tuple[Float[Tensor, "b s hk d"], Float[Tensor, "b s hk dv"]]:
    """Keys and values of the blocks that each row of the table names, dequantised, s = p * block_size. An id out of range gives zeros."""
    blocks, _ = _check(cache, scales)
    k, v = paged.gather(cache, block_table)
    known = (block_table >= 0) & (block_table < blocks)
    ids = block_table.clamp(0, blocks - 1).reshape(-1)
    found = []
    for rows, scale, offset in ((k, scales.k, scales.k_offset), (v, scales.v, scales.v_offset)):
        if scale.ndim == 3:
            scale = scale.index_select(0, ids).view(*rows.shape[:3], 1)
        rows = dequantise(rows, scale, offset, dtype=dtype)
        seen = known[..., None].expand(*known.shape, cache.block_size).reshape(*rows.shape[:2], 1, 1)
        found.append(rows.masked_fill(~seen, 0))
    return tuple(found)


def attend(
    q: Float[Tensor, "t h d"],
    cache: Pages,
    scales: Scales,
    batch: Batch,
    slopes: Float[Tensor, "h"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    lse: bool = True,
) -> Partial:
    """paged.attend over the numbers that the cache means: those of the batch's blocks, dequantised in q's dtype. Raises as it."""
    blocks, _ = _check(cache, scales)
    check_devices({"q": q, "cache.k": cache.k, "scales.k": scales.k, "scales.v": scales.v, "batch.block_table": batch.block_table})
    batch, table = _over_gathered(batch, blocks)
    held = (rows.view(-1, cache.block_size, *rows.shape[2:]) for rows in gather(cache, scales, table, dtype=q.dtype))
    return paged.attend(
        q,
        Pages(*held, layout="pbhd", block_size=cache.block_size),
        batch,
        slopes,
        mask=mask,
        scale=scale,
        softcap=softcap,
        lse=lse,
    )


def _over_gathered(batch, blocks):
    """The placed batch over its own blocks laid end to end, and the table of those blocks in the cache."""
    check_reach(batch, num_blocks=blocks, writes=False)
    constants = batch.host.constants
    table = constants["block_table"]
    count = table.numel()
    own = torch.arange(count, dtype=torch.int32, device=table.device).view(table.shape)
    host_table = np.arange(count).reshape(constants["host_table"].shape)
    changed = {"block_table": own, "host_table": host_table, "extremes": (0, max(count - 1, 0), *constants["extremes"][2:]), "checked": {}}
    return replace(batch, block_table=own, host=replace(batch.host, constants=constants | changed)), table


def _check(cache, scales):
    """cache_sizes of an int8 cache that the scales fit."""
    blocks, heads = cache_sizes(cache)
    for name, pages in (("k", cache.k), ("v", cache.v)):
        if pages.dtype != torch.int8:
            raise ValueError(f"cache.{name} has dtype {name_of(pages.dtype)}; quant.allocate makes one of int8")
        scale, offset = getattr(scales, name), getattr(scales, f"{name}_offset")
        if scale.ndim == 3 and (tuple(scale.shape) != (blocks, cache.block_size, heads) or offset is not None):
            raise ValueError(
                f"scales.{name} has shape {list(scale.shape)}: one for each token is {[blocks, cache.block_size, heads]}, without an offset"
            )
        for field, array in ((name, scale), (f"{name}_offset", offset)):
            if array is None or field == name and array.ndim == 3:
                continue
            if array.ndim > 2 or any(n not in (1, m) for n, m in zip(array.shape[::-1], (pages.shape[3], heads), strict=False)):
                raise ValueError(f"scales.{field} has shape {list(array.shape)}, which does not broadcast to {[heads, pages.shape[3]]}")
    return blocks, heads
