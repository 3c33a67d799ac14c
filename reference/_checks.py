"""What the functions demand of their arguments, said once, and how they read them.

Errors name the argument, the row and value, and what would work.
"""

from __future__ import annotations

import numpy as np

from fattn.types import LAYOUTS, Batch, Pages, Range, Tokens
from reference.bounded import ROUNDOFF, Bounded


def positions(tokens) -> np.ndarray:
    """The positions of a query or key side given as a Range, an int32 array or Tokens: int64[n], so that no difference wraps."""
    pos = tokens.pos if isinstance(tokens, Tokens) else tokens
    if isinstance(pos, Range):
        return np.arange(pos.start, pos.start + pos.size, dtype=np.int64)
    pos = np.asarray(pos)
    if pos.ndim != 1 or not np.issubdtype(pos.dtype, np.integer):
        raise ValueError(f"positions must be a Range or one-dimensional integers, got {pos.dtype}{list(pos.shape)}")
    return pos.astype(np.int64)


def check_attend(q, k, v, q_pos, k_pos, *, softcap):
    """Raises ValueError that names the argument and the value where shapes, dtypes or positions do not fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_rows(name, array)
    check_dtypes(q=q, k=k, v=v)
    (_, heads, size), (keys, kv_heads, key_size), value_shape = shape(q), shape(k), shape(v)
    if value_shape[:2] != (keys, kv_heads):
        raise ValueError(f"k and v disagree in rows or heads: k {list(shape(k))}, v {list(value_shape)}")
    if size != key_size:
        raise ValueError(f"q and k disagree in head size: q {list(shape(q))}, k {list(shape(k))}")
    check_heads(heads, kv_heads)
    for name, tokens, rows in (("q_pos", q_pos, shape(q)[0]), ("k_pos", k_pos, keys)):
        count = positions(tokens).shape[0]
        if count != rows:
            raise ValueError(f"{name} has {count} positions for {rows} rows of {name[0]}; layout is [rows, heads, size]")
    check_softcap(softcap)


def check_rows(name: str, array):
    """Raises ValueError unless `array` is [rows, heads, size] of a float dtype."""
    if len(shape(array)) != 3:
        raise ValueError(f"{name} must be [rows, heads, size], got shape {list(shape(array))}")
    if str(dtype(array)) not in ROUNDOFF:
        raise ValueError(f"{name} has dtype {dtype(array)}; one of {', '.join(ROUNDOFF)} would work")


def check_dtypes(*, q=None, k, v, cache=None):
    """Raises ValueError where plain arrays differ in dtype. A Bounded argument stands for any dtype."""
    named = {"q": q, "k": k, "v": v, "cache.k": None if cache is None else cache.k, "cache.v": None if cache is None else cache.v}
    found = {name: str(dtype(a)) for name, a in named.items() if a is not None and not isinstance(a, Bounded)}
    if len(set(found.values())) > 1:
        raise ValueError(f"dtypes must be one, got {', '.join(f'{name} {kind}' for name, kind in found.items())}; cast before the call")


def check_heads(heads: int, kv_heads: int):
    """Raises ValueError unless every key head serves the same number of query heads."""
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is not a multiple of k's {kv_heads}; layout is [rows, heads, size]")


def check_softcap(softcap):
    """Raises ValueError for a cap that is not positive."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap!r}")


def check_layout(layout: str):
    """Raises ValueError for an order of a cache's axes that is not one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def check_cache(cache: Pages):
    """Raises ValueError where a cache's arrays, layout and block size do not fit together."""
    check_layout(cache.layout)
    for name, array in (("cache.k", cache.k), ("cache.v", cache.v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have the four axes {cache.layout}, got shape {list(array.shape)}")
        held = array.shape[cache.layout.index("b")]
        if held != cache.block_size:
            found = f"{name} {list(array.shape)} holds {held} tokens a block in layout {cache.layout}"
            raise ValueError(f"{found}, but block_size is {cache.block_size}")
    if cache.k.shape[:3] != cache.v.shape[:3]:
        raise ValueError(f"cache.k and cache.v disagree: {list(cache.k.shape)} and {list(cache.v.shape)} in layout {cache.layout}")
    check_dtypes(k=cache.k, v=cache.v)


def check_batch(batch: Batch, *, tokens: int, block_size: int, num_blocks: int):
    """Raises ValueError naming field, row and value where a batch does not describe `tokens` rows over `num_blocks` blocks."""
    starts, lengths, table = (np.asarray(a) for a in (batch.query_start_loc, batch.seq_lens, batch.block_table))
    if batch.block_size != block_size:
        raise ValueError(f"batch.block_size={batch.block_size} but the cache's block_size is {block_size}")
    if starts.shape != (lengths.shape[0] + 1,) or table.ndim != 2 or table.shape[0] != lengths.shape[0]:
        raise ValueError(
            f"batch disagrees about its sequences: query_start_loc {list(starts.shape)}, seq_lens {list(lengths.shape)}, "
            f"block_table {list(table.shape)}; expected [b+1], [b] and [b, p]"
        )
    if starts[0] != 0 or starts[-1] != tokens:
        found = f"batch.query_start_loc runs from {starts[0]} to {starts[-1]}"
        raise ValueError(f"{found}, but there are {tokens} rows; layout is [rows, heads, size]")
    for row, (length, query_len) in enumerate(zip(lengths, np.diff(starts), strict=True)):
        if query_len < 0 or (length > 0 and query_len > batch.max_query_len):
            found = f"batch.query_start_loc[{row + 1}]={starts[row + 1]} gives sequence {row} {query_len} queries"
            raise ValueError(f"{found}; 0 to max_query_len={batch.max_query_len} would work")
        if not 0 <= length <= table.shape[1] * block_size:
            raise ValueError(f"batch.seq_lens[{row}]={length}; 0 to {table.shape[1]} blocks of {block_size} tokens would work")
        followed = table[row, : -(-int(length) // block_size)]
        for page in np.flatnonzero((followed < 0) | (followed >= num_blocks)):
            raise ValueError(f"batch.block_table[{row}, {page}]={followed[page]} is not one of the cache's {num_blocks} blocks")


def shape(array) -> tuple[int, ...]:
    """The shape of a plain or Bounded array."""
    return np.shape(array.value if isinstance(array, Bounded) else array)


def dtype(array) -> np.dtype:
    """The dtype of a plain array, or of a Bounded array's value."""
    return np.asarray(array.value if isinstance(array, Bounded) else array).dtype


def standing(batch: Batch) -> np.ndarray:
    """The position of every query among its sequence's keys, seq_len - query_len + i; negative for padding."""
    starts, lengths = np.asarray(batch.query_start_loc), np.asarray(batch.seq_lens)
    ranges = [np.arange(length - count, length) for count, length in zip(np.diff(starts), lengths, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *ranges])


def pages_of(cache) -> Pages:
    """The Pages themselves of a plain or Bounded cache."""
    return cache.value if isinstance(cache, Bounded) else cache
