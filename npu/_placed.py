"""Arithmetic of `place` on the host's arrays: checks, windows of a block table, and where rows of padded sequences lie."""

from __future__ import annotations

import numpy as np


def check_batch(query_lens, seq_lens, table, slots, block_size):
    """Raises ValueError naming field, row and value where a batch's host arrays do not fit together."""
    for name, lens in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if lens.shape != (table.shape[0],):
            raise ValueError(f"batch.host.{name} has {lens.size} sequences, but block_table has {table.shape[0]} rows")
        if lens.min(initial=0) < 0:
            row = int(np.argmax(lens < 0))
            raise ValueError(f"batch.host.{name}[{row}]={lens[row]} must not be negative")
    if slots.shape != (query_lens.sum(),):
        raise ValueError(f"batch.host.slots has {slots.size} rows, but query lengths add up to {query_lens.sum()}")
    ordered = np.sort(slots)
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if twice.any():
        slot = ordered[1:][twice][0]
        rows = np.flatnonzero(slots == slot)
        raise ValueError(f"batch.slot_mapping[{rows[1]}]={slot} is already written by row {rows[0]}; every row needs its own slot")
    if seq_lens.max(initial=0) > table.shape[1] * block_size:
        row = int(np.argmax(seq_lens))
        raise ValueError(f"batch.seq_lens[{row}]={seq_lens[row]} is longer than {table.shape[1]} blocks of {block_size} tokens")


def window_table(first, reach, seq_lens, table, block_size):
    """At most `reach` keys from `first` on: the block table from the block of `first`, the keys that remain, what of them to hide.

    Shapes depend on the mask and the table, not on lengths.
    """
    block = first // block_size
    lens = np.maximum(seq_lens - block * block_size, 0)
    columns = np.arange(min(table.shape[1], (reach + block_size - 2) // block_size + 1))[None]
    ids = np.take_along_axis(table, np.minimum(block[:, None] + columns, table.shape[1] - 1), 1)
    ids = np.where(columns * block_size < lens[:, None], ids, 0)
    keys = np.arange(columns.size * block_size)[None]
    hidden = (keys < (first - block * block_size)[:, None]) | (keys >= lens[:, None])
    return ids, lens, hidden[:, None, None, :]


def packed_places(query_lens, queries):
    """The place among rows of [b queries] of every packed row; rows past `queries` take the place of the last."""
    sequence = np.repeat(np.arange(query_lens.size), query_lens)
    index = np.arange(sequence.size) - (np.cumsum(query_lens) - query_lens)[sequence]
    return sequence * queries + np.minimum(index, max(queries - 1, 0))
