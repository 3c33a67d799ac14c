"""Pages: write, gather, and attention one sequence at a time."""

from __future__ import annotations

import numpy as np

from fattn.conformance.plain import dense
from fattn.types import Batch, Mask, Pages, Partial, Range, Tokens


def allocate(num_blocks: int, kv_heads: int, head_size: int, value_size: int, *, block_size: int, layout: str, dtype) -> Pages:
    """A cache of zeros."""
    sizes = {"h": kv_heads, "p": num_blocks, "b": block_size}
    k, v = (np.zeros([sizes.get(axis, size) for axis in layout], dtype) for size in (head_size, value_size))
    return Pages(k, v, layout, block_size)


def convert(cache: Pages, *, layout: str) -> Pages:
    """The same cache with its axes in another order."""
    k, v = (array.transpose([cache.layout.index(axis) for axis in layout]).copy() for array in (cache.k, cache.v))
    return Pages(k, v, layout, cache.block_size)


def write(cache: Pages, k, v, slots) -> Pages:
    """A new cache with row i at slots[i]; a slot below 0 or past the end writes nothing."""
    pages = convert(cache, layout="pbhd")
    real = (slots >= 0) & (slots < pages.k.shape[0] * cache.block_size)
    for array, rows in ((pages.k, k), (pages.v, v)):
        array.reshape(-1, *array.shape[2:])[slots[real]] = rows[real]
    return convert(pages, layout=cache.layout)


def gather(cache: Pages, block_table):
    """Keys and values of every sequence in order, s = p * block_size; unknown blocks give zeros."""
    known = (block_table >= 0) & (block_table < cache.k.shape[cache.layout.index("p")])
    safe, found = np.where(known, block_table, 0), []
    for array in (cache.k, cache.v):
        pages = array.transpose([cache.layout.index(axis) for axis in "pbhd"])
        rows = np.where(known[..., None, None, None], pages[safe], array.dtype.type(0))
        found.append(rows.reshape(block_table.shape[0], -1, *pages.shape[2:]))
    return tuple(found)


def attend(
    q, cache: Pages, batch: Batch, slopes=None, *, mask: Mask, scale: float, softcap: float | None = None, lse: bool = True
) -> Partial:
    """Attention of every sequence's queries over its own pages."""
    kind = dense.accumulation(q.dtype)
    result = Partial(np.zeros((*q.shape[:2], cache.v.shape[-1]), kind), np.full(q.shape[:2], -np.inf, kind))
    for row in range(len(batch.seq_lens)):
        rows, queries, keys, table = sequence(batch, row)
        if rows.start == rows.stop or not keys.pos.size:
            continue
        k, v = (x[0, : keys.pos.size] for x in gather(cache, table))
        bias = None if slopes is None else dense.alibi(slopes.astype(kind), queries, keys)
        part = dense.attend(q[rows], k, v, queries, keys, bias, mask=mask, scale=scale, softcap=softcap)
        result.out[rows], result.lse[rows] = part
    return result if lse else Partial(result.out, None)


def sequence(batch: Batch, row: int):
    """(its packed rows, its queries as Tokens, its keys as Tokens, its followed blocks [1 pages])."""
    length = int(batch.seq_lens[row])
    rows = slice(int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1]))
    count = rows.stop - rows.start
    queries = Tokens(Range(length - count, count), {name: labels[rows] for name, labels in batch.query_labels.items()})
    keys = Tokens(Range(0, length), {name: labels[row, :length] for name, labels in batch.key_labels.items()})
    return rows, queries, keys, batch.block_table[row : row + 1, : -(-length // batch.block_size)]
