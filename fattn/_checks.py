"""What the functions demand of their arguments, said once: errors name the argument, the value and what would work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fattn import _pytree  # noqa: F401  (Tokens, Range, Pages and Batch become JAX values)
from fattn._placement import check_alike, check_placed
from fattn.types import LAYOUTS, Mask, Range, Tokens

DTYPES = ("float64", "float32", "bfloat16", "float16")


def as_arrays(values):
    """The values with every leaf a JAX array: a NumPy leaf would index and promote by NumPy's rules."""
    return jax.tree.map(jnp.asarray, values)


def positions(tokens) -> Array:
    """The positions of a query or key side given as a Range, an int32 array or Tokens: Int32[n]."""
    pos = tokens.pos if isinstance(tokens, Tokens) else tokens
    if isinstance(pos, Range):
        return pos.start + jnp.arange(pos.size, dtype=jnp.int32)
    pos = jnp.asarray(pos)
    if pos.ndim != 1 or not jnp.issubdtype(pos.dtype, jnp.integer):
        raise ValueError(f"positions must be a Range or one-dimensional integers, got {pos.dtype}{list(pos.shape)}")
    return pos.astype(jnp.int32)  # differences of unsigned integers would wrap


def check_attend(q, k, v, q_pos, k_pos, *, softcap):
    """Raises where shapes, dtypes, positions or shards do not fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_rows(name, array)
    check_heads(q, "k", k.shape[1], k.shape[2], k.dtype)
    check_keys_and_values(k, v)
    for name, tokens, rows in (("q_pos", q_pos, q.shape[0]), ("k_pos", k_pos, k.shape[0])):
        count = positions(tokens).shape[0]
        if count != rows:
            raise ValueError(f"{name} has {count} positions for {rows} rows of {name[0]}; layout is [rows, heads, size]")
    check_softcap(softcap)
    check_placed("q", q, heads=1, free=(0,) if q.shape[1] == k.shape[1] else ())  # grouped heads and rows share an axis in the product
    for name, array in (("k", k), ("v", v)):
        check_placed(name, array, heads=1)
        check_alike(name, array, 1, "q", q, 1)


def check_rows(name, array):
    """Raises ValueError where an array is not [rows, heads, size] of a floating dtype."""
    if array.ndim != 3:
        raise ValueError(f"{name} must be [rows, heads, size], got shape {list(array.shape)}")
    if str(array.dtype) not in DTYPES:
        raise ValueError(f"{name} has dtype {array.dtype}; one of {', '.join(DTYPES)} would work")


def check_heads(q, other, kv_heads, head_size, dtype):
    """Raises ValueError where q [t h d] does not fit keys of `kv_heads` heads, `head_size` and `dtype`, held by the argument `other`."""
    if q.dtype != dtype:
        raise ValueError(f"q and {other} must share one dtype, got {q.dtype} and {dtype}")
    if q.shape[2] != head_size:
        raise ValueError(f"q and {other} disagree in head size: q {list(q.shape)}, {other}'s is {head_size}")
    if kv_heads == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads, which is not a multiple of {other}'s {kv_heads}; layout is [rows, heads, size]")


def check_keys_and_values(k, v):
    """Raises ValueError where k [s hk d] and v [s hk dv] disagree in rows, heads or dtype."""
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v disagree in rows or heads: k {list(k.shape)}, v {list(v.shape)}")
    if k.dtype != v.dtype:
        raise ValueError(f"k and v must share one dtype, got {k.dtype} and {v.dtype}")


def check_softcap(softcap):
    """Raises ValueError for a cap that is not positive."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap!r}")


def check_layout(layout):
    """Raises ValueError for a layout that types.LAYOUTS does not list."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")


def check_cache(cache):
    """Raises ValueError where a cache's arrays do not fit its layout and block size, or each other."""
    check_layout(cache.layout)
    for name, pages in (("k", cache.k), ("v", cache.v)):
        if pages.ndim != 4 or pages.shape[cache.layout.index("b")] != cache.block_size:
            raise ValueError(f"cache.{name} has shape {list(pages.shape)}, which is not {cache.layout} with block_size={cache.block_size}")
        if str(pages.dtype) not in DTYPES:
            raise ValueError(f"cache.{name} has dtype {pages.dtype}; one of {', '.join(DTYPES)} would work")
    if cache.k.shape[:3] != cache.v.shape[:3] or cache.k.dtype != cache.v.dtype:
        k, v = (f"{pages.dtype}{list(pages.shape)}" for pages in (cache.k, cache.v))
        raise ValueError(f"cache.k and cache.v disagree in blocks, heads or dtype: k {k}, v {v}")


def check_new_keys(cache, k, v, slots):
    """Raises where new keys and values [t hk d] do not fit the cache that they are written to, or their slots."""
    check_cache(cache)
    heads = cache.layout.index("h")
    for name, rows, pages in (("k", k, cache.k), ("v", v, cache.v)):
        check_rows(name, rows)
        held = (pages.shape[heads], pages.shape[3])
        if rows.shape[1:] != held:
            raise ValueError(f"{name} has shape {list(rows.shape)}, but cache.{name} holds [rows, heads, size] = {['rows', *held]}")
        if rows.dtype != pages.dtype:
            raise ValueError(f"{name} has dtype {rows.dtype}, but the cache holds {pages.dtype}; cast it first")
        check_placed(f"cache.{name}", pages, heads=heads)
        check_placed(name, rows, heads=1)
        check_alike(name, rows, 1, f"cache.{name}", pages, heads)
    check_keys_and_values(k, v)
    if slots.shape != k.shape[:1] or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots must be {k.shape[0]} integers, one a row of k, got {slots.dtype}{list(slots.shape)}")


def check_table(block_table):
    """Raises ValueError where a block table is not [sequences, blocks] of integers."""
    if block_table.ndim != 2 or not jnp.issubdtype(block_table.dtype, jnp.integer):
        raise ValueError(f"block_table must be integers [sequences, blocks], got {block_table.dtype}{list(block_table.shape)}")


def check_paged(q, cache, batch, slopes, *, mask, softcap):
    """Raises where queries, cache, batch, slopes and the labels that the mask reads do not fit together."""
    check_rows("q", q)
    check_cache(cache)
    heads = cache.layout.index("h")
    check_heads(q, "cache", cache.k.shape[heads], cache.k.shape[3], cache.k.dtype)
    check_softcap(softcap)
    check_batch(batch, q.shape[0], cache)
    check_labels(batch, mask)
    if slopes is not None and slopes.shape != q.shape[1:2]:
        raise ValueError(f"slopes has shape {list(slopes.shape)}, but q has {q.shape[1]} heads")
    check_placed("q", q, heads=1)
    for name, pages in (("cache.k", cache.k), ("cache.v", cache.v)):
        check_placed(name, pages, heads=heads)
        check_alike(name, pages, heads, "q", q, 1)


def check_batch(batch, rows, cache):
    """Raises ValueError where a batch's static parts and shapes do not fit `rows` packed rows and the cache."""
    if batch.block_size != cache.block_size:
        raise ValueError(f"batch.block_size={batch.block_size}, but the cache's block_size={cache.block_size}")
    check_table(batch.block_table)
    sequences = batch.block_table.shape[0]
    for name, array, shape in (
        ("query_start_loc", batch.query_start_loc, (sequences + 1,)),
        ("seq_lens", batch.seq_lens, (sequences,)),
        ("slot_mapping", batch.slot_mapping, (rows,)),
        ("positions", batch.positions, (rows,)),
    ):
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
            found = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"batch.{name} must be integers {list(shape)} for {sequences} sequences and {rows} rows, got {found}")


def check_labels(batch, mask):
    """Raises ValueError for a label that the mask reads and the batch lacks, or that has the wrong shape."""
    sequences, blocks = batch.block_table.shape
    rows = batch.slot_mapping.shape[0]
    for side, labels, shape in (
        ("query_labels", batch.query_labels, (rows,)),
        ("key_labels", batch.key_labels, (sequences, blocks * batch.block_size)),
    ):
        for name in mask.labels() if isinstance(mask, Mask) else ():  # what is no mask is refused where it is read
            if name not in labels:
                raise ValueError(f"the mask reads label {name!r}, which batch.{side} lacks; it holds {sorted(labels)}")
            if labels[name].shape != shape:
                raise ValueError(f"batch.{side}[{name!r}] has shape {list(labels[name].shape)}, expected {list(shape)}")
