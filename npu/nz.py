"""Caches in the fractal form NZ, beside the plain form ND that `paged` and `quant` hold: converted, and written by the same operator.

In NZ the numbers of a token, heads end to end, are cut into tiles of 32 bytes, and a block holds tile after tile of all its tokens:
[p, hk*d/tile, b, tile]. Engines keep int8 caches so. `paged.attend` reads ND: convert with `to_nd`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from fattn.types import Pages
from npu import _operators, paged
from npu._checks import cache_sizes, check_devices, check_key_values, name_of

TILE_BYTES = 32


@dataclass(frozen=True)
class NzPages:
    """A paged cache in NZ: k [p, hk*d/tile, b, tile] and v [p, hk*dv/tile, b, tile], tiles of 32 bytes, for `kv_heads` heads."""

    k: Tensor
    v: Tensor
    kv_heads: int
    block_size: int


def from_nd(cache: Pages) -> NzPages:
    """The same cache in NZ, copied. Raises ValueError where a token's numbers do not fill whole tiles."""
    _, kv_heads = cache_sizes(cache)
    cache = paged.convert(cache, layout="pbhd")
    k, v = (_tiled(name, array) for name, array in (("k", cache.k), ("v", cache.v)))
    return NzPages(k, v, kv_heads, cache.block_size)


def to_nd(cache: NzPages, *, layout: str = "pbhd") -> Pages:
    """The same cache in ND, copied, in a layout of `Pages`. Raises ValueError for an unknown layout."""
    _check(cache)
    k, v = (
        array.transpose(1, 2).reshape(array.shape[0], cache.block_size, cache.kv_heads, -1).contiguous() for array in (cache.k, cache.v)
    )
    return paged.convert(Pages(k, v, layout="pbhd", block_size=cache.block_size), layout=layout)


def write(cache: NzPages, k: Float[Tensor, "t hk d"], v: Float[Tensor, "t hk dv"], slots: Int32[Tensor, "t"]) -> NzPages:
    """The cache with row i of k and v at slots[i], in place, as paged.write: slots are distinct and inside the cache.

    Raises ValueError for shapes, dtypes or devices that do not fit, and RuntimeError where torch_npu's operator cannot write NZ.
    Source: the documents of npu_scatter_pa_kv_cache.
    """
    _check(cache)
    check_devices({"cache.k": cache.k, "cache.v": cache.v, "k": k, "v": v, "slots": slots})
    check_key_values(k, v)
    for name, rows, array in (("k", k, cache.k), ("v", v, cache.v)):
        held = array.shape[1] * array.shape[3] // cache.kv_heads
        if rows.ndim != 3 or rows.dtype != array.dtype or tuple(rows.shape[1:]) != (cache.kv_heads, held):
            wanted = f"{name_of(array.dtype)} rows of {[cache.kv_heads, held]} (heads, size)"
            raise ValueError(f"{name} is {name_of(rows.dtype)}{list(rows.shape)}, but cache.{name} holds {wanted}")
    if tuple(slots.shape) != (k.shape[0],):
        raise ValueError(f"slots has shape {list(slots.shape)} for {k.shape[0]} rows of k")
    if k.shape[0]:
        _operators.scatter(k.device.type, form="NZ")(k.contiguous(), v.contiguous(), cache.k, cache.v, slots.contiguous())
    return cache


def _tiled(name, array):
    tile = TILE_BYTES // array.dtype.itemsize
    rows = array.flatten(2)
    if rows.shape[2] % tile:
        raise ValueError(f"cache.{name} has {rows.shape[2]} numbers a token, which tiles of {tile} do not divide")
    return rows.unflatten(2, (-1, tile)).transpose(1, 2).contiguous()


def _check(cache):
    for name, array in (("k", cache.k), ("v", cache.v)):
        tile = TILE_BYTES // array.dtype.itemsize
        fits = array.ndim == 4 and array.shape[2:] == (cache.block_size, tile) and array.shape[1] * tile % cache.kv_heads == 0
        if not fits or array.dtype not in (torch.float16, torch.bfloat16, torch.int8):
            raise ValueError(
                f"cache.{name} is {name_of(array.dtype)}{list(array.shape)}, which is not NZ: [blocks, heads * size / {tile}, "
                f"{cache.block_size}, {tile}] of float16, bfloat16 or int8 for {cache.kv_heads} heads"
            )
