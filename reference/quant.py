"""KV caches in int8: one definition of what a stored number means, and attention over it.

A number x is stored as x8 = round(x / scale + offset), half to even, held to -128..127, and read as (x8 - offset) scale, wherever it is
read. A static scale is one number for each channel of each head, each head, or all; a scale of its own for each token and head is stored
beside the token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int8, Int32

from fattn.types import Batch, Mask, Pages
from reference import paged
from reference._checks import check_layout, check_rows, dtype, shape
from reference.bounded import FLOAT32, Bounded, Precision, accumulator, bounded, cast

Array = np.ndarray


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
    """round(x / scale + offset), half to even, held to -128..127, in float32. `scale` and `offset` broadcast against x.

    Each step is one that IEEE rounds correctly, so that implementations agree in every bit.
    """
    scaled = np.asarray(x).astype(np.float32) / np.asarray(scale, np.float32)
    scaled = scaled if offset is None else scaled + np.asarray(offset, np.float32)
    return np.clip(np.rint(scaled), -128, 127).astype(np.int8)


def dequantise(
    x: Int8[Array, "t hk d"],
    scale: Float[Array, "..."],
    offset: Float[Array, "..."] | None = None,
    *,
    dtype,
    precision: Precision = FLOAT32,
) -> Bounded:
    """(x - offset) scale, in float32, then in `dtype`. `scale` and `offset` broadcast against x. Two roundings, and that to `dtype`."""
    centred = np.asarray(x).astype(np.float64)
    factor = np.asarray(scale).astype(np.float64)
    centred = centred if offset is None else centred - np.asarray(offset).astype(np.float64)
    value = centred * factor
    return cast(Bounded(value, 2 * accumulator(precision) * np.abs(value)), dtype)


def token_scales(x: Float[Array, "t hk d"], *, precision: Precision = FLOAT32) -> Bounded:
    """The scale at which the greatest number of a token's head becomes 127, that number times float32(1 / 127); 1 where all are 0."""
    greatest = np.abs(np.asarray(x).astype(np.float64)).max(-1)
    value = np.where(greatest > 0, greatest * np.float32(1 / 127), 1.0)
    return Bounded(value, np.where(greatest > 0, accumulator(precision) * value, 0))


def allocate(num_blocks: int, kv_heads: int, head_size: int, value_size: int, *, block_size: int, layout: str) -> Pages:
    """A cache of zeros in int8. Raises ValueError for a layout outside types.LAYOUTS."""
    check_layout(layout)
    lengths = {"h": kv_heads, "p": num_blocks, "b": block_size}
    k, v = (np.zeros([lengths.get(axis, size) for axis in layout], np.int8) for size in (head_size, value_size))
    return Pages(k, v, layout=layout, block_size=block_size)


def write(
    cache: Pages, scales: Scales, k: Float[Array, "t hk d"], v: Float[Array, "t hk dv"], slots: Int32[Array, "t"]
) -> tuple[Pages, Scales]:
    """The cache with token i's keys and values, quantised, at slots[i], and the scales: as they were, or with the tokens' own.

    A slot below 0 or past the end writes nothing. Raises ValueError where k, v, slots or scales do not fit the cache, and for a slot used
    twice.
    """
    _check(cache, scales)
    slots = np.asarray(slots)
    written = slots[(slots >= 0) & (slots < cache.k.shape[cache.layout.index("p")] * cache.block_size)]
    if len(np.unique(written)) != len(written):
        raise ValueError(f"slots {slots.tolist()} name a slot twice; a slot of its own for each token, or -1, would work")
    own, stored = {}, {}
    for name, rows in (("k", k), ("v", v)):
        check_rows(name, rows)
        pages, scale, offset = getattr(cache, name), getattr(scales, name), getattr(scales, f"{name}_offset")
        if shape(rows) != (len(slots), pages.shape[cache.layout.index("h")], pages.shape[-1]):
            raise ValueError(f"{name} has shape {list(shape(rows))} for {len(slots)} slots of cache.{name} {list(pages.shape)}")
        if np.ndim(scale) == 3:
            # as float32 arithmetic makes it, so that what is stored agrees in every bit
            scale = np.abs(np.asarray(rows).astype(np.float32)).max(-1) * np.float32(1 / 127)
            scale = np.where(scale > 0, scale, np.float32(1))
            own[name] = _stored(getattr(scales, name), scale, slots)
            scale = scale[..., None]
        stored[name] = quantise(rows, scale, offset)
    return paged._written(cache, stored["k"], stored["v"], slots), scales._replace(**own)


def gather(
    cache: Pages, scales: Scales, block_table: Int32[Array, "b p"], *, dtype, precision: Precision = FLOAT32
) -> tuple[Bounded, Bounded]:
    """Keys and values of the blocks that each row of the table names, dequantised, s = p * block_size. An id out of range gives zeros."""
    _check(cache, scales)
    table = np.asarray(block_table)
    blocks = cache.k.shape[cache.layout.index("p")]
    meant = _meant(cache, scales, dtype, precision)
    found = []
    for value, bound in zip((meant.value.k, meant.value.v), (meant.bound.k, meant.bound.v), strict=True):
        parts = []
        for part in (value, bound):
            rows = np.zeros((*table.shape, *part.shape[1:]))
            for row, page in np.ndindex(table.shape):
                if 0 <= table[row, page] < blocks:
                    rows[row, page] = part[table[row, page]]
            parts.append(rows.reshape(table.shape[0], -1, *part.shape[2:]))
        found.append(Bounded(*parts))
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
    precision: Precision = FLOAT32,
) -> Bounded:
    """paged.attend over the numbers that the cache means: those of the batch's blocks, dequantised in q's dtype. Raises as it."""
    _check(cache, scales)
    meant = _meant(cache, scales, "float64" if isinstance(q, Bounded) else dtype(q), precision)
    return paged.attend(bounded(q), meant, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse, precision=precision)


def _meant(cache, scales, dtype, precision) -> Bounded:
    """The cache as the numbers that it means: Bounded Pages in layout pbhd."""
    cache = replace(cache, k=_reordered(cache.k, cache.layout), v=_reordered(cache.v, cache.layout), layout="pbhd")
    found = {}
    for name in ("k", "v"):
        scale = np.asarray(getattr(scales, name))
        scale = scale[..., None] if scale.ndim == 3 else scale
        with np.errstate(invalid="ignore"):  # scales of tokens that were never written may be NaN
            found[name] = dequantise(getattr(cache, name), scale, getattr(scales, f"{name}_offset"), dtype=dtype, precision=precision)
    return Bounded(*(replace(cache, k=k, v=v) for k, v in zip(found["k"], found["v"], strict=True)))


def _reordered(pages, layout):
    return np.transpose(pages, [layout.index(axis) for axis in "pbhd"])


def _stored(held, rows, slots):
    """A copy of scales [p b hk] with row i at slots[i], where that is a slot."""
    new = np.array(held)
    flat = new.reshape(-1, new.shape[-1])
    for i, slot in enumerate(slots):
        if 0 <= slot < len(flat):
            flat[slot] = rows[i]
    return new


def _check(cache, scales):
    check_layout(cache.layout)
    heads, blocks = (cache.k.shape[cache.layout.index(axis)] for axis in "hp")
    for name, pages in (("k", cache.k), ("v", cache.v)):
        if pages.dtype != np.int8 or pages.ndim != 4 or pages.shape[cache.layout.index("b")] != cache.block_size:
            raise ValueError(
                f"cache.{name} is {pages.dtype}{list(pages.shape)}, which is not int8 {cache.layout} with block_size={cache.block_size}"
            )
        scale, offset = getattr(scales, name), getattr(scales, f"{name}_offset")
        if np.ndim(scale) == 3 and (np.shape(scale) != (blocks, cache.block_size, heads) or offset is not None):
            wanted = [blocks, cache.block_size, heads]
            raise ValueError(f"scales.{name} has shape {list(np.shape(scale))}: one for each token is {wanted}, without an offset")
        for field, array in ((name, scale), (f"{name}_offset", offset)):
            given = () if array is None else np.shape(array)
            if field == name and len(given) == 3:
                continue
            if len(given) > 2 or any(n not in (1, m) for n, m in zip(given[::-1], (pages.shape[3], heads), strict=False)):
                raise ValueError(f"scales.{field} has shape {list(given)}, which does not broadcast to {[heads, pages.shape[3]]}")
