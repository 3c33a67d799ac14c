"""The paged KV cache: a pool of blocks, and a table that says which blocks hold a sequence's keys, in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from fattn import _tiling, dense, merge
from fattn._checks import as_arrays, check_cache, check_layout, check_new_keys, check_paged, check_table
from fattn.types import Batch, Mask, Pages, Partial, Tokens


def allocate(num_blocks: int, kv_heads: int, head_size: int, value_size: int, *, block_size: int, layout: str, dtype) -> Pages:
    """A cache of zeros; "hpbd" is the layout to choose in JAX. Raises ValueError for a layout outside types.LAYOUTS."""
    k, v = (jnp.zeros((num_blocks, block_size, kv_heads, size), dtype) for size in (head_size, value_size))
    return convert(Pages(k, v, layout="pbhd", block_size=block_size), layout=layout)


def convert(cache: Pages, *, layout: str) -> Pages:
    """The same cache in another axis order. Raises ValueError for a layout outside types.LAYOUTS."""
    cache = as_arrays(cache)
    check_cache(cache)
    check_layout(layout)
    k, v = (_reordered(pages, cache.layout, layout) for pages in (cache.k, cache.v))
    return Pages(k, v, layout=layout, block_size=cache.block_size)


def write(cache: Pages, k: Float[Array, "t hk d"], v: Float[Array, "t hk dv"], slots: Int32[Array, "t"]) -> Pages:
    """The cache with the keys and values of token i at slot slots[i] = block * block_size + offset.

    A slot below 0 or past the end writes nothing; slots that are written must be distinct. In place where the cache is donated.
    Raises ValueError where k, v or slots do not fit the cache, and for a dtype other than the cache's (cast first).
    """
    if isinstance(slots, np.ndarray):
        slots = np.clip(slots, -1, np.iinfo(np.int32).max)  # wide integers that JAX would wrap into valid slots
    cache, k, v, slots = as_arrays((cache, k, v, slots))
    check_new_keys(cache, k, v, slots)
    total = _num_blocks(cache) * cache.block_size
    # what is not written goes past the end, where nothing comes twice: JAX counts negative indices from the end
    slots = jnp.where((slots < 0) | (slots >= total), total + jnp.arange(slots.shape[0]), slots)
    if slots.shape[0] == 1:  # XLA on a CPU copies the cache to scatter one row, not to scatter two: a second one, which is dropped
        k, v, slots = jnp.concatenate([k, k]), jnp.concatenate([v, v]), jnp.append(slots, total)
    write_pages = _written if cache.k.dtype == jnp.bfloat16 else _scattered
    k, v = (write_pages(pages, new, slots, cache.layout, cache.block_size) for pages, new in ((cache.k, k), (cache.v, v)))
    return Pages(k, v, layout=cache.layout, block_size=cache.block_size)


def gather(cache: Pages, block_table: Int32[Array, "b p"]) -> tuple[Float[Array, "b s hk d"], Float[Array, "b s hk dv"]]:
    """Keys and values of the blocks that each row of the table names, in order, s = p * block_size.

    A block id below 0 or past the end gives zeros. Raises ValueError for a table that is not two-dimensional integers.
    """
    cache, block_table = as_arrays((cache, block_table))
    check_cache(cache)
    check_table(block_table)
    ids = jnp.where(block_table < 0, _num_blocks(cache), block_table)
    k, v = (_found(pages, ids.reshape(-1), cache.layout) for pages in (cache.k, cache.v))
    return tuple(rows.reshape(ids.shape[0], ids.shape[1] * cache.block_size, *rows.shape[1:]) for rows in (k, v))


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
) -> Partial:
    """dense.attend of every query over the cached keys of its own sequence; query i of a sequence stands at seq_len - query_len + i.

    `slopes` are ALiBi's, one a query head. Rows that belong to no sequence, or to one without keys, see nothing. Differentiable in q, the
    cache and slopes. `lse=False` gives Partial(out, None). Raises ValueError where q, cache, batch, slopes or the mask's labels do not fit.
    """
    q, cache, batch, slopes = as_arrays((q, cache, batch, slopes))
    check_paged(q, cache, batch, slopes, mask=mask, softcap=softcap)
    if 0 in (q.shape[0], *batch.block_table.shape):
        partial = merge.empty(*q.shape[:2], cache.v.shape[3], dtype=jnp.promote_types(q.dtype, jnp.float32))
        return partial if lse else Partial(partial.out, None)
    tiles = _tiling.tiles(batch, q.shape[0])

    def one(tile):
        sequence, part = tile
        rows, q_pos = _tiling.queries(tiles, sequence, part)
        length = batch.seq_lens[sequence]
        ids, k_pos = _followed(batch, cache, sequence, length)
        # Tied to the loop's own ids, the pages are no loop invariant: XLA on a CPU would otherwise widen a whole bfloat16 cache beforehand.
        pages_k, pages_v, ids = jax.lax.optimization_barrier((cache.k, cache.v, ids))
        k, v = (_found(pages, ids, cache.layout) for pages in (pages_k, pages_v))
        queries = Tokens(q_pos, {name: label[rows] for name, label in batch.query_labels.items()})
        keys = Tokens(k_pos, {name: label[sequence] for name, label in batch.key_labels.items()})
        bias = None if slopes is None else dense.alibi(slopes, queries, keys)
        return dense.attend(q[rows], k, v, queries, keys, bias, mask=mask, scale=scale, softcap=softcap)

    partial = _tiling.unpacked(jax.lax.map(one, (tiles.sequence, tiles.part)), tiles)
    return partial if lse else Partial(partial.out, None)


def _num_blocks(cache):
    return cache.k.shape[cache.layout.index("p")]


def _followed(batch, cache, sequence, length):
    """A sequence's block ids, those that hold no key replaced by 0, and the positions of the rows that they name: -1 past the length."""
    blocks = batch.block_table.shape[1]
    ids = jnp.where(jnp.arange(blocks) < -(-length // cache.block_size), batch.block_table[sequence], 0)
    rows = jnp.arange(blocks * cache.block_size, dtype=jnp.int32)
    return ids, jnp.where(rows < length, rows, -1)


def _reordered(pages, layout, to):
    return jnp.transpose(pages, [layout.index(axis) for axis in to])


def _found(pages, ids, layout):
    """The rows of the blocks that `ids` name, [n * block_size, heads, size]; zeros for an id past the end."""
    found = _reordered(jnp.take(pages, ids, axis=layout.index("p"), mode="fill", fill_value=0), layout, "pbhd")
    return found.reshape(-1, *found.shape[2:])


def _scattered(pages, new, slots, layout, block_size):
    if layout == "phbd":
        return pages.at[slots // block_size, :, slots % block_size].set(new, mode="drop", unique_indices=True)
    if layout == "pbhd":
        return pages.reshape(-1, *pages.shape[2:]).at[slots].set(new, mode="drop", unique_indices=True).reshape(pages.shape)
    rows = pages.reshape(pages.shape[0], -1, pages.shape[3])
    return rows.at[:, slots].set(new.swapaxes(0, 1), mode="drop", unique_indices=True).reshape(pages.shape)


def _written(pages, new, slots, layout, block_size):
    """XLA on a CPU scatters bfloat16 by way of a float32 copy of the whole cache. One pass that selects is in place there."""
    return jax.lax.platform_dependent(
        pages,
        new,
        slots,
        cpu=lambda *arrays: _selected(*arrays, layout, block_size),
        default=lambda *arrays: _scattered(*arrays, layout, block_size),
    )


def _selected(pages, new, slots, layout, block_size):
    sizes = dict(zip(layout, pages.shape, strict=True))
    token = jnp.full(sizes["p"] * block_size, -1, jnp.int32)
    token = token.at[slots].set(jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop", unique_indices=True)
    rows = _reordered(new[token].reshape(sizes["p"], block_size, *new.shape[1:]), "pbhd", layout)
    written = _reordered((token >= 0).reshape(sizes["p"], block_size, 1, 1), "pbhd", layout)
    return jnp.where(written, rows, pages)
