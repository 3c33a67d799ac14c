"""KV caches in int8: one definition of what a stored number means, and attention over it.

A number x is stored as x8 = round(x / scale + offset), half to even, held to -128..127, and read as (x8 - offset) scale, wherever it is
read. A static scale is one number for each channel of each head, each head, or all; a scale of its own for each token and head is stored
beside the token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from fattn import paged
from fattn._checks import as_arrays, check_keys_and_values, check_layout, check_rows, check_table
from fattn.types import Batch, Mask, Pages, Partial


class Scales(NamedTuple):
    """Scales of a cache's keys and values, and their offsets (None: 0).

    Static: broadcast against [hk d]. For each token: [p b hk], as the tokens lie in the blocks; `write` fills them in, and they have no
    offset.
    """

    k: Float[Array, "..."]
    v: Float[Array, "..."]
    k_offset: Float[Array, "#hk #d"] | None = None
    v_offset: Float[Array, "#hk #d"] | None = None


def quantise(x: Float[Array, "t hk d"], scale: Float[Array, "..."], offset: Float[Array, "..."] | None = None) -> Int8[Array, "t hk d"]:
    """round(x / scale + offset), half to even, held to -128..127, in float32. `scale` and `offset` broadcast against x."""
    scaled = jnp.asarray(x).astype(jnp.float32) / jnp.asarray(scale, jnp.float32)
    scaled = scaled if offset is None else scaled + jnp.asarray(offset, jnp.float32)
    return jnp.clip(jnp.round(scaled), -128, 127).astype(jnp.int8)


def dequantise(
    x: Int8[Array, "t hk d"], scale: Float[Array, "..."], offset: Float[Array, "..."] | None = None, *, dtype
) -> Float[Array, "t hk d"]:
    """(x - offset) scale, in float32, then in `dtype`. `scale` and `offset` broadcast against x."""
    centred = jnp.asarray(x).astype(jnp.float32)
    centred = centred if offset is None else centred - jnp.asarray(offset, jnp.float32)
    return (centred * jnp.asarray(scale, jnp.float32)).astype(dtype)


def token_scales(x: Float[Array, "t hk d"]) -> Float[Array, "t hk"]:
    """The scale at which the greatest number of a token's head becomes 127, that number times float32(1 / 127); 1 where all are 0."""
    greatest = jnp.abs(jnp.asarray(x).astype(jnp.float32)).max(-1)
    return jnp.where(greatest > 0, greatest * np.float32(1 / 127), 1)


def allocate(num_blocks: int, kv_heads: int, head_size: int, value_size: int, *, block_size: int, layout: str) -> Pages:
    """A cache of zeros in int8. Raises ValueError for a layout outside types.LAYOUTS."""
    check_layout(layout)
    lengths = {"h": kv_heads, "p": num_blocks, "b": block_size}
    k, v = (jnp.zeros([lengths.get(axis, size) for axis in layout], jnp.int8) for size in (head_size, value_size))
    return Pages(k, v, layout=layout, block_size=block_size)


def write(
    cache: Pages, scales: Scales, k: Float[Array, "t hk d"], v: Float[Array, "t hk dv"], slots: Int32[Array, "t"]
) -> tuple[Pages, Scales]:
    """The cache with token i's keys and values, quantised, at slots[i], and the scales: as they were, or with the tokens' own.

    A slot below 0 or past the end writes nothing. Raises ValueError where k, v, slots or scales do not fit the cache.
    """
    cache, scales, k, v, slots = as_arrays((cache, scales, k, v, slots))
    _check(cache, scales)
    check_keys_and_values(k, v)
    for name, rows, pages in (("k", k, cache.k), ("v", v, cache.v)):
        check_rows(name, rows)
        if rows.shape[1:] != (pages.shape[cache.layout.index("h")], pages.shape[3]):
            raise ValueError(f"{name} has rows of {list(rows.shape[1:])}, which cache.{name} {list(pages.shape)} does not hold")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"slots has shape {list(slots.shape)} for {k.shape[0]} rows of k")
    total = cache.k.shape[cache.layout.index("p")] * cache.block_size
    slots = jnp.where((slots < 0) | (slots >= total), total + jnp.arange(slots.shape[0]), slots)
    pages, own = {}, {}
    for name, rows in (("k", k), ("v", v)):
        scale, offset = getattr(scales, name), getattr(scales, f"{name}_offset")
        if scale.ndim == 3:
            at_rows = token_scales(rows)
            stored = scale.reshape(-1, scale.shape[2]).at[slots].set(at_rows.astype(scale.dtype), mode="drop", unique_indices=True)
            own[name], scale = stored.reshape(scale.shape), at_rows[..., None]
        pages[name] = paged._scattered(getattr(cache, name), quantise(rows, scale, offset), slots, cache.layout, cache.block_size)
    return replace(cache, **pages), scales._replace(**own)


def gather(
    cache: Pages, scales: Scales, block_table: Int32[Array, "b p"], *, dtype
) -> tuple[Float[Array, "b s hk d"], Float[Array, "b s hk dv"]]:
    """Keys and values of the blocks that each row of the table names, dequantised, s = p * block_size. An id out of range gives zeros."""
    cache, scales, block_table = as_arrays((cache, scales, block_table))
    _check(cache, scales)
    check_table(block_table)
    blocks = cache.k.shape[cache.layout.index("p")]
    known = (block_table >= 0) & (block_table < blocks)
    ids = jnp.where(known, block_table, 0).reshape(-1)
    found = []
    for name in ("k", "v"):
        rows = paged._found(getattr(cache, name), ids, cache.layout)
        scale = getattr(scales, name)
        scale = scale[ids].reshape(*rows.shape[:2], 1) if scale.ndim == 3 else scale
        rows = dequantise(rows, scale, getattr(scales, f"{name}_offset"), dtype=dtype).reshape(
            *known.shape, cache.block_size, *rows.shape[1:]
        )
        rows = jnp.where(known[..., None, None, None], rows, 0)
        found.append(rows.reshape(known.shape[0], -1, *rows.shape[3:]))
    return tuple(found)


def attend(
    q: Float[Array, "t h d"],
    cache: Pages,
    scales: Scales,
    batch: Batch,
    slopes: Float[Array, "h"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    lse: bool = True,
) -> Partial:
    """paged.attend over the numbers that the cache means: those of the batch's blocks, dequantised in q's dtype. Raises as it."""
    q, cache, scales, batch = as_arrays((q, cache, scales, batch))
    k, v = gather(cache, scales, batch.block_table, dtype=q.dtype)
    sequences, pages = batch.block_table.shape
    k, v = (rows.reshape(sequences * pages, cache.block_size, *rows.shape[2:]) for rows in (k, v))
    own = jnp.arange(sequences * pages, dtype=jnp.int32).reshape(sequences, pages)
    held = Pages(k, v, layout="pbhd", block_size=cache.block_size)
    return paged.attend(q, held, replace(batch, block_table=own), slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


def _check(cache, scales):
    check_layout(cache.layout)
    heads = cache.k.shape[cache.layout.index("h")] if cache.k.ndim == 4 else 0
    blocks = cache.k.shape[cache.layout.index("p")] if cache.k.ndim == 4 else 0
    for name, pages in (("k", cache.k), ("v", cache.v)):
        if pages.dtype != jnp.int8 or pages.ndim != 4 or pages.shape[cache.layout.index("b")] != cache.block_size:
            raise ValueError(
                f"cache.{name} is {pages.dtype}{list(pages.shape)}, which is not int8 {cache.layout} with block_size={cache.block_size}"
            )
        scale, offset = getattr(scales, name), getattr(scales, f"{name}_offset")
        if scale.ndim == 3 and (scale.shape != (blocks, cache.block_size, heads) or offset is not None):
            raise ValueError(
                f"scales.{name} has shape {list(scale.shape)}: one for each token is {[blocks, cache.block_size, heads]}, without an offset"
            )
        for field, array in ((name, scale), (f"{name}_offset", offset)):
            if array is None or field == name and array.ndim == 3:
                continue
            if array.ndim > 2 or any(n not in (1, m) for n, m in zip(array.shape[::-1], (pages.shape[3], heads), strict=False)):
                raise ValueError(f"scales.{field} has shape {list(array.shape)}, which does not broadcast to {[heads, pages.shape[3]]}")
