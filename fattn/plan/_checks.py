"""What a batch must be: every error names the field, the row, the value, and what would work."""

from __future__ import annotations

import numpy as np


def at_least(name, value, least):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def lengths(query_lens, seq_lens):
    query_lens, seq_lens = _integers("query_lens", query_lens), _integers("seq_lens", seq_lens)
    if query_lens.size != seq_lens.size:
        raise ValueError(f"query_lens has {query_lens.size} sequences, seq_lens has {seq_lens.size}; one entry each per sequence")
    return query_lens, seq_lens


def _integers(name, values):
    values = np.asarray(values)
    if values.ndim != 1 or not (values.size == 0 or np.issubdtype(values.dtype, np.integer)):
        raise ValueError(f"{name} must be a list of integers, got {values.dtype}{list(values.shape)}")
    values = values.astype(np.int64)
    if values.size and values.min() < 0:
        row = int(values.argmin())
        raise ValueError(f"{name}[{row}]={values[row]} must not be negative: lengths are counts of tokens")
    return values


def starts(query_start_loc, tokens):
    starts = np.asarray(query_start_loc)
    if starts.ndim != 1 or starts.size < 1 or not np.issubdtype(starts.dtype, np.integer):
        raise ValueError(f"query_start_loc must hold b + 1 integers, got {starts.dtype}{list(starts.shape)}")
    if starts[0] != 0:
        raise ValueError(f"query_start_loc[0]={starts[0]}; it must start at 0")
    if (falling := np.flatnonzero(np.diff(starts) < 0)).size:
        row = int(falling[0]) + 1
        raise ValueError(f"query_start_loc[{row}]={starts[row]} is below query_start_loc[{row - 1}]={starts[row - 1]}")
    if starts[-1] != tokens:
        raise ValueError(f"query_start_loc[{starts.size - 1}]={starts[-1]}, but slot_mapping has {tokens} rows; it must end there")
    return starts


def table(block_tables, sequences):
    """Block tables as int32 [b, p]; rows of unequal length are filled with -1."""
    if len(block_tables) != sequences:
        raise ValueError(f"block_tables has {len(block_tables)} rows for {sequences} sequences")
    if not isinstance(block_tables, np.ndarray):
        width = max(map(len, block_tables), default=0)
        filled = np.full((sequences, width), -1, np.int64)
        for row, ids in enumerate(block_tables):
            ids = np.asarray(ids)
            if ids.ndim != 1 or not (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)):
                raise ValueError(f"block_tables[{row}] must be a list of block ids, got {ids.dtype}{list(ids.shape)}")
            filled[row, : ids.size] = ids
        block_tables = filled
    if block_tables.ndim != 2 or not np.issubdtype(block_tables.dtype, np.integer):
        raise ValueError(f"block_tables must be integers [sequences, blocks], got {block_tables.dtype}{list(block_tables.shape)}")
    return block_tables.astype(np.int32)


def followed(table, seq_lens, block_size, num_blocks):
    """Every table reaches its length, and the entries that it needs are blocks of the cache."""
    pages = -(-seq_lens // block_size)
    if (short := np.flatnonzero(pages > table.shape[1])).size:
        row = int(short[0])
        raise ValueError(
            f"seq_lens[{row}]={seq_lens[row]} needs {pages[row]} blocks of {block_size} tokens; block_tables[{row}] has {table.shape[1]}"
        )
    wrong = (np.arange(table.shape[1]) < pages[:, None]) & ((table < 0) | (table >= num_blocks))
    if wrong.any():
        row, column = (int(i[0]) for i in np.nonzero(wrong))
        raise ValueError(
            f"block_tables[{row}][{column}]={table[row, column]} is not a block of the cache (0 to {num_blocks - 1}), "
            f"and seq_lens[{row}]={seq_lens[row]} reaches it"
        )


def distinct(slots, sequence):
    written = np.flatnonzero(slots >= 0)
    values, first, counts = np.unique(slots[written], return_index=True, return_counts=True)
    if (twice := np.flatnonzero(counts > 1)).size:
        slot = values[twice[0]]
        rows = np.flatnonzero(slots == slot)[:2].tolist()
        raise ValueError(
            f"slot_mapping: slot {slot} is written by rows {rows[0]} and {rows[1]} (sequences {sequence[rows[0]]}, {sequence[rows[1]]}); "
            "each token of a step needs a slot of its own"
        )


def label(field, name, rows, count):
    rows = np.asarray(rows)
    if rows.shape != (count,) or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"{field}[{name!r}] must hold {count} integers, one a token; got {rows.dtype}{list(rows.shape)}")
    return rows.astype(np.int32)


def null_blocks(null_blocks, table, seq_lens, block_size, num_blocks):
    """The reserved blocks as a tuple: blocks of the cache, each once, that no sequence follows."""
    null_blocks = tuple(int(block) for block in null_blocks)
    for block in null_blocks:
        if not 0 <= block < num_blocks:
            raise ValueError(f"null_blocks={null_blocks}: {block} is not a block of the cache (0 to {num_blocks - 1})")
    if len(set(null_blocks)) != len(null_blocks):
        raise ValueError(f"null_blocks={null_blocks} names a block twice")
    if null_blocks:
        reached = np.arange(table.shape[1]) < -(-seq_lens // block_size)[:, None]
        used = reached & np.isin(table, null_blocks)
        if used.any():
            row, column = (int(i[0]) for i in np.nonzero(used))
            raise ValueError(f"block_tables[{row}][{column}]={table[row, column]} is one of null_blocks={null_blocks}, which are reserved")
    return null_blocks
