"""Faults in the paged cache itself: slots, tables, layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fattn.conformance.faults import softmax
from fattn.conformance.faults.fault import Fault
from fattn.conformance.plain import paged
from fattn.types import Pages


def _capacity(cache):
    return cache.k.shape[cache.layout.index("p")] * cache.block_size


def negative_slots_wrap(cache, k, v, slots):
    return paged.write(cache, k, v, np.where(slots < 0, slots + _capacity(cache), slots))


def jax_slots_wrap(cache, k, v, slots):
    """JAX's scatter with mode="drop", which wraps negative indices before it drops."""
    import jax.numpy as jnp

    pages = paged.convert(cache, layout="pbhd")
    new = []
    for array, rows in ((pages.k, k), (pages.v, v)):
        flat = jnp.asarray(array.reshape(-1, *array.shape[2:]))
        # the kit's slots may lie past the end of int32's sums, not of int32
        written = flat.at[jnp.asarray(slots.astype(np.int32))].set(jnp.asarray(rows), mode="drop")
        new.append(np.asarray(written).reshape(array.shape))
    return paged.convert(Pages(*new, "pbhd", cache.block_size), layout=cache.layout)


def minus_one_alone(cache, k, v, slots):
    """-1 is skipped; every other negative slot counts from the end."""
    return paged.write(cache, k, v, np.where(slots < -1, slots + _capacity(cache), slots))


def past_the_end_is_clipped(cache, k, v, slots):
    past = slots >= _capacity(cache)
    return paged.write(cache, k, v, np.where(past, _capacity(cache) - 1, slots)) if past.any() else paged.write(cache, k, v, slots)


def int64_read_as_int32(cache, k, v, slots):
    read = slots.view(np.int32)[: slots.size] if slots.dtype == np.int64 else slots
    return paged.write(cache, k, v, read)


def slots_of_another_block_size(cache, k, v, slots):
    """Slots made with blocks half as large: block slot // (b / 2)."""
    half = max(cache.block_size // 2, 1)
    other = slots // half * cache.block_size + slots % half
    return paged.write(cache, k, v, np.where(slots < 0, slots, other))


def last_row_is_not_written(cache, k, v, slots):
    """Rows are copied four at a time: a single row left over stays behind."""
    rows = len(slots) - 1 if len(slots) % 4 == 1 and len(slots) > 1 else len(slots)
    return paged.write(cache, k[:rows], v[:rows], slots[:rows])


def next_row_is_cleared(cache, k, v, slots):
    """The store is wider than a row: what follows in the block is set to 0 where it is not written itself."""
    pages = paged.convert(cache, layout="pbhd")
    real = slots[(slots >= 0) & (slots < _capacity(cache))]
    beyond = real[real % cache.block_size != cache.block_size - 1] + 1
    for array in (pages.k, pages.v):
        array.reshape(-1, *array.shape[2:])[beyond] = 0
    return paged.write(paged.convert(pages, layout=cache.layout), k, v, slots)


def strided_values(cache, k, v, slots):
    """k and v as halves of one buffer: v is read as if it lay end to end."""
    return paged.write(cache, k, softmax.contiguous_view(v), slots)


def unknown_blocks_wrap(cache, block_table):
    return paged.gather(cache, np.where(block_table < 0, block_table + cache.k.shape[cache.layout.index("p")], block_table))


def jax_take_fills_with_nan(cache, block_table):
    """jnp.take, which fills with NaN past the end."""
    import jax.numpy as jnp

    pages = paged.convert(cache, layout="pbhd")
    known = np.where(block_table < 0, len(pages.k), block_table)
    found = (np.asarray(jnp.take(jnp.asarray(array), jnp.asarray(known), axis=0)) for array in (pages.k, pages.v))
    return tuple(rows.reshape(len(block_table), -1, *rows.shape[3:]) for rows in found)


def unknown_blocks_are_clipped(cache, block_table):
    last = cache.k.shape[cache.layout.index("p")] - 1
    return paged.gather(cache, np.where(block_table > last, last, block_table))


def values_of_the_first_layout(cache, block_table):
    """v is read with k's strides: wrong where their sizes differ."""
    k, v = paged.gather(cache, block_table)
    size, narrow = v.shape[-1], min(k.shape[-1], v.shape[-1])
    v = v.copy()
    v[..., narrow:size] = 0
    return k, v


def swapped_heads_and_rows(cache, *, layout):
    """Heads and rows change places where their counts are equal, which no shape shows."""
    right = paged.convert(cache, layout=layout)
    h, b = layout.index("h"), layout.index("b")
    if layout == cache.layout or right.k.shape[h] != right.k.shape[b]:
        return right
    return replace(right, k=np.swapaxes(right.k, h, b).copy(), v=np.swapaxes(right.v, h, b).copy())


def layout_by_name_alone(cache, *, layout):
    """v keeps its axes where k's and v's shapes agree in both orders."""
    right = paged.convert(cache, layout=layout)
    return replace(right, v=cache.v.copy()) if right.v.shape == cache.v.shape else right


def last_block_not_cleared(num_blocks, kv_heads, head_size, value_size, *, block_size, layout, dtype):
    cache = paged.allocate(num_blocks, kv_heads, head_size, value_size, block_size=block_size, layout=layout, dtype=dtype)
    cache.v[(*(slice(None) if axis != "p" else -1 for axis in layout),)] = 1
    return cache


def _write(name, kind, function, why):
    return Fault(name, kind, "paged.write", function, why)


FAULTS = (
    _write("negative_slots_wrap", "slots", negative_slots_wrap, "indices count from the end"),
    _write("jax_negative_slots_wrap", "slots", jax_slots_wrap, 'mode="drop" drops only after wrapping'),
    _write("minus_one_alone_is_skipped", "slots", minus_one_alone, "-1 is the one padding id that was thought of"),
    _write("last_slot_takes_what_is_past_the_end", "slots", past_the_end_is_clipped, "indices are clipped"),
    _write("reads_int64_slots_as_int32", "dtype", int64_read_as_int32, "the buffer's type is assumed"),
    _write("slots_of_another_block_size", "block size", slots_of_another_block_size, "two block sizes under one name"),
    _write("last_row_is_not_written", "block edge", last_row_is_not_written, "a copy loop without its tail"),
    _write("next_row_is_cleared", "slots", next_row_is_cleared, "a store wider than a row"),
    _write("write_swaps_halves_of_a_buffer", "strides", strided_values, "v's strides are not read"),
    Fault("unknown_blocks_wrap", "table tail", "paged.gather", unknown_blocks_wrap, "indices count from the end"),
    Fault("jax_take_fills_with_nan", "table tail", "paged.gather", jax_take_fills_with_nan, 'take\'s mode is "fill"'),
    Fault("unknown_blocks_are_clipped", "table tail", "paged.gather", unknown_blocks_are_clipped, "indices are clipped"),
    Fault("gathers_values_of_k_size", "layout", "paged.gather", values_of_the_first_layout, "one size for k and v"),
    Fault("convert_swaps_heads_and_rows", "layout", "paged.convert", swapped_heads_and_rows, "equal counts hide it"),
    Fault("convert_leaves_v", "layout", "paged.convert", layout_by_name_alone, "a view where shapes agree"),
    Fault("allocates_without_clearing", "poison", "paged.allocate", last_block_not_cleared, "the last block holds what was there"),
)
