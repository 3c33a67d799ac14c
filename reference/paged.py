"""Pages: write, gather, and attention over a block table, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int32

from fattn.types import Batch, Mask, Pages, Partial, Range, Tokens
from reference import dense, merge
from reference._checks import check_batch, check_cache, check_dtypes, check_heads, check_layout, check_rows, check_softcap, pages_of, shape
from reference.bounded import FLOAT32, Bounded, Precision, bounded, dtype_name, stored

Array = np.ndarray


def allocate(num_blocks: int, kv_heads: int, head_size: int, value_size: int, *, block_size: int, layout: str, dtype) -> Pages:
    """A cache of zeros: k of `head_size` and v of `value_size` numbers for every head of num_blocks x block_size tokens."""
    check_layout(layout)
    length = {"h": kv_heads, "p": num_blocks, "b": block_size}
    kind = np.dtype(dtype_name(dtype))
    k, v = (np.zeros([length.get(axis, size) for axis in layout], kind) for size in (head_size, value_size))
    return Pages(k, v, layout, block_size)


def convert(cache: Pages, *, layout: str) -> Pages:
    """The same cache with its axes in another order, copied. Raises ValueError for an unknown layout."""
    check_layout(layout)
    if isinstance(cache, Bounded):
        return Bounded(*(convert(part, layout=layout) for part in cache))
    check_cache(cache)
    axes = [cache.layout.index(axis) for axis in layout]
    return Pages(np.transpose(cache.k, axes).copy(), np.transpose(cache.v, axes).copy(), layout, cache.block_size)


def write(cache: Pages, k: Float[Array, "t hk d"], v: Float[Array, "t hk dv"], slots: Int32[Array, "t"]) -> Pages:
    """A new cache with row i of k and v at token slots[i] = block * block_size + offset. A slot below 0 or past the end writes nothing.

    A Bounded cache, k or v gives a Bounded cache. Raises ValueError for a slot used twice, and for shapes or dtypes that do not fit.
    """
    pages = pages_of(cache)
    check_cache(pages)
    slots = _check_write(pages, k, v, slots)
    if not any(isinstance(argument, Bounded) for argument in (cache, k, v)):
        return _written(cache, k, v, slots)
    k, v = (stored(bounded(rows), array.dtype) for rows, array in ((k, pages.k), (v, pages.v)))
    exact = isinstance(cache, Pages)
    bounds = replace(cache, k=np.zeros(cache.k.shape), v=np.zeros(cache.v.shape)) if exact else cache.bound
    return Bounded(_written(pages, k.value, v.value, slots), _written(bounds, k.bound, v.bound, slots))


def gather(cache: Pages, block_table: Int32[Array, "b p"]) -> tuple[Float[Array, "b s hk d"], Float[Array, "b s hk dv"]]:
    """The keys and values of every sequence in order, s = p * block_size. A block id that the cache does not have gives zeros.

    Raises ValueError for a table that is not two-dimensional integers.
    """
    if isinstance(cache, Bounded):
        return tuple(Bounded(*pair) for pair in zip(*(gather(part, block_table) for part in cache), strict=True))
    cache, table = convert(cache, layout="pbhd"), np.asarray(block_table)
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"block_table must be integers [sequences, blocks], got {table.dtype}{list(table.shape)}")
    gathered = []
    for blocks in (cache.k, cache.v):
        found = np.zeros((*table.shape, *blocks.shape[1:]), blocks.dtype)
        for row, page in np.ndindex(table.shape):
            if 0 <= table[row, page] < blocks.shape[0]:
                found[row, page] = blocks[table[row, page]]
        gathered.append(found.reshape(table.shape[0], -1, *blocks.shape[2:]))
    return tuple(gathered)


def attend(
    q: Float[Array, "t h d"],
    cache: Pages,
    batch: Batch,
    slopes: Float[Array, "h"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    lse: bool = True,
    precision: Precision = FLOAT32,
) -> Bounded:
    """Attention of every sequence's queries over its own pages: query i at seq_len - query_len + i, keys 0..seq_len - 1.

    dense.attend says the rest. `slopes` adds ALiBi's bias. Without `lse` the Partial's lse is None. Raises ValueError naming field, row
    and value where the batch, the cache and q do not fit together.
    """
    pages = pages_of(cache)
    _check_attend(q, pages, batch, slopes, softcap)
    result = merge.empty(*shape(q)[:2], pages.v.shape[-1], dtype="float64")
    starts = np.asarray(batch.query_start_loc)
    for row, length in enumerate(int(n) for n in np.asarray(batch.seq_lens)):
        rows = slice(int(starts[row]), int(starts[row + 1]))
        count = rows.stop - rows.start
        if not count * length:
            continue
        k, v = _sequence(cache, np.asarray(batch.block_table)[row, : -(-length // pages.block_size)], length)
        queries = Tokens(Range(length - count, count), {name: np.asarray(x)[rows] for name, x in batch.query_labels.items()})
        keys = Tokens(Range(0, length), {name: np.asarray(x)[row, :length] for name, x in batch.key_labels.items()})
        bias = None if slopes is None else dense.alibi(slopes, queries, keys, precision=precision)
        own = Bounded(*(part[rows] for part in q)) if isinstance(q, Bounded) else np.asarray(q)[rows]
        part = dense.attend(own, k, v, queries, keys, bias, mask=mask, scale=scale, softcap=softcap, precision=precision)
        for whole, piece in zip((*result.value, *result.bound), (*part.value, *part.bound), strict=True):
            whole[rows] = piece
    return result if lse else Bounded(*(Partial(part.out, None) for part in result))


def _sequence(cache, blocks, length):
    """k and v of the `length` tokens that lie in `blocks`: gather of the followed blocks alone."""
    if isinstance(cache, Bounded):
        return tuple(Bounded(*pair) for pair in zip(*(_sequence(part, blocks, length) for part in cache), strict=True))
    found = []
    for array in (cache.k, cache.v):
        taken = np.take(array, blocks, axis=cache.layout.index("p"))
        rows = np.transpose(taken, [cache.layout.index(axis) for axis in "pbhd"])
        found.append(rows.reshape(-1, *rows.shape[2:])[:length])
    return tuple(found)


def _written(cache, k, v, slots):
    """A copy of plain pages with row i at slots[i], where that is a slot."""
    new = Pages(cache.k.copy(), cache.v.copy(), cache.layout, cache.block_size)
    capacity = new.k.shape[new.layout.index("p")] * new.block_size
    for i, slot in enumerate(slots):
        if 0 <= slot < capacity:
            place = {"p": slot // new.block_size, "b": slot % new.block_size}
            at = tuple(place.get(axis, slice(None)) for axis in new.layout)
            new.k[at], new.v[at] = k[i], v[i]
    return new


def _check_write(cache, k, v, slots):
    for name, rows, array in (("k", k, cache.k), ("v", v, cache.v)):
        check_rows(name, rows)
        expected = (array.shape[cache.layout.index("h")], array.shape[-1])
        if shape(rows)[1:] != expected:
            found = f"{name} has shape {list(shape(rows))}, but the cache holds {expected[0]} heads of {expected[1]}"
            raise ValueError(f"{found}; layout is [rows, heads, size]")
    check_dtypes(k=k, v=v, cache=cache)
    slots = np.asarray(slots)
    if not np.issubdtype(slots.dtype, np.integer) or not slots.shape == shape(k)[:1] == shape(v)[:1]:
        found = f"{slots.dtype}{list(slots.shape)}"
        raise ValueError(f"slots must be one integer a row of k {list(shape(k))} and v {list(shape(v))}, got {found}")
    used = {}
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and used.setdefault(slot, row) != row:
            raise ValueError(f"slots[{row}]={slot} is already written by row {used[slot]}; every row needs a slot of its own, or -1")
    return slots


def _check_attend(q, cache, batch, slopes, softcap):
    check_cache(cache)
    check_rows("q", q)
    check_dtypes(q=q, k=cache.k, v=cache.v)
    tokens, heads, size = shape(q)
    num_blocks, kv_heads = (cache.k.shape[cache.layout.index(axis)] for axis in "ph")
    if size != cache.k.shape[-1]:
        raise ValueError(f"q has head size {size}, the cache {cache.k.shape[-1]}")
    check_heads(heads, kv_heads)
    check_softcap(softcap)
    check_batch(batch, tokens=tokens, block_size=cache.block_size, num_blocks=num_blocks)
    if slopes is not None and shape(slopes) != (heads,):
        raise ValueError(f"slopes has shape {list(shape(slopes))}, but there are {heads} query heads")
