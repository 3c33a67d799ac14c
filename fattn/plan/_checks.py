"""What a batch must fulfil, said once. Every error names the field, the row, the value, and what would work."""

from __future__ import annotations

from itertools import chain
from numbers import Integral

import numpy as np

INT32_MAX = 2**31 - 1


def count(name: str, value, *, least: int) -> int:
    """A static count as a Python int. Raises ValueError where it is no integer or below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value <= INT32_MAX:
        raise ValueError(f"{name} must be an integer from {least} to {INT32_MAX}, got {value!r}")
    return int(value)


def integers(field: str, values, *, rank: int = 1) -> np.ndarray:
    """The values as an int64 array of `rank` axes. Raises ValueError for anything that is not an int32 number."""
    array = np.asarray(values)
    if array.ndim != rank:
        raise ValueError(f"{field} has shape {list(array.shape)}; {rank} {'axis' if rank == 1 else 'axes'} would work")
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        # a list is read anew: as an array its integers have become what its one float is
        for index, value in np.ndenumerate(np.array(array if hasattr(values, "dtype") else values, object)):
            if isinstance(value, bool) or not isinstance(value, Integral) or abs(value) > INT32_MAX:
                raise ValueError(f"{_at(field, index)} = {value!r}: int32 integers would work")
    elif array.dtype.itemsize > 4 and not (-INT32_MAX <= array.min() and array.max() <= INT32_MAX):
        index = np.unravel_index(np.argmax(np.abs(array.astype(np.float64))), array.shape)
        raise ValueError(f"{_at(field, index)} = {array[index]}: int32 integers would work")
    return array.astype(np.int64)


def lengths(field: str, values) -> np.ndarray:
    """Counts of tokens, int64. Raises ValueError for a negative one."""
    array = integers(field, values)
    if array.size and array.min() < 0:
        row = int(np.argmax(array < 0))
        raise ValueError(f"{field}[{row}] = {array[row]}: a length counts tokens, 0 or more would work")
    return array


def tables(field: str, values) -> tuple[np.ndarray, np.ndarray]:
    """Block tables as one int64 array [b p], padded with -1, and the number of entries of each row."""
    if getattr(values, "ndim", None) == 2:
        table = integers(field, values, rank=2)
        widths = np.full(table.shape[0], table.shape[1])
        return (table if table.shape[1] else np.full((table.shape[0], 1), -1)), widths
    for row, entries in enumerate(values):
        if not hasattr(entries, "__len__"):
            raise ValueError(f"{field}[{row}] = {entries!r}: a list of block ids for each sequence would work")
    widths = np.array([len(entries) for entries in values], np.int64)
    table = np.full((len(widths), max(1, widths.max(initial=0))), -1, np.int64)
    flat = np.array(list(chain.from_iterable(values)))
    if flat.size and flat.dtype.kind not in "iu":
        for row, entries in enumerate(values):
            integers(f"{field}[{row}]", entries)
    table[np.arange(table.shape[1]) < widths[:, None]] = flat
    return table, widths


def pages(query_lens, seq_lens, table, widths, *, block_size: int, num_blocks: int, null_blocks=()) -> np.ndarray:
    """How many table entries each sequence follows. Raises ValueError where they are too few, out of range, or not the sequence's own.

    Blocks may be shared by sequences that read them (a common prefix), also in the step in which one of them writes them; no block is
    written by two sequences, or stands twice in the table of the sequence that writes it.
    """
    needed = -(-seq_lens // block_size)
    if (needed > widths).any():
        row = int(np.argmax(needed > widths))
        raise ValueError(
            f"block_table[{row}] has {widths[row]} entries, room for {widths[row] * block_size} tokens, but seq_lens[{row}] = "
            f"{seq_lens[row]} needs {needed[row]} blocks of {block_size}"
        )
    page, rows = np.arange(table.shape[1]), np.arange(len(table))[:, None]
    followed = page < needed[:, None]
    ids = np.where(followed, table, 0)
    if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
        row, entry = (int(i) for i in np.argwhere((ids < 0) | (ids >= num_blocks))[0])
        raise ValueError(f"block_table[{row}, {entry}] = {table[row, entry]}: block ids from 0 to {num_blocks - 1} would work")
    first = np.maximum(seq_lens - query_lens, 0) // block_size
    writers, entries = np.nonzero(followed & (page >= first[:, None]) & (query_lens > 0)[:, None])
    written, places = table[writers, entries], writers * len(page) + entries + 1
    # the place in the table from which a block is written, counted from 1; memory that is never touched costs nothing
    place_of = np.zeros(num_blocks, np.int64)
    place_of[written] = places
    owner = (place_of[ids] - 1) // len(page)
    if (place_of[written] != places).any() or np.count_nonzero(followed & (owner == rows)) != len(written):
        _block_written_twice(table, followed, written, writers, entries)
    for block in null_blocks:
        if place_of[block]:
            raise ValueError(
                f"block_table[{(place_of[block] - 1) // len(page)}] writes block {block}, which null_blocks reserves for padding"
            )
    return needed


def _block_written_twice(table, followed, written, writers, entries):
    """Raises the ValueError for a block that two sequences write, or that stands twice in the table of the sequence that writes it."""
    for block in written:
        rows = writers[written == block]
        if (rows != rows[-1]).any():
            at = int(np.argmax((written == block) & (writers != rows[-1])))
            raise ValueError(
                f"block_table[{writers[at]}, {entries[at]}] = {block}: block {block} is written by sequences {writers[at]} and "
                f"{rows[-1]} in one step; a block of its own for each sequence that writes would work"
            )
    for block, row in zip(written, writers, strict=True):
        times = np.count_nonzero(followed[row] & (table[row] == block))
        if times > 1:
            raise ValueError(
                f"block_table[{row}] names block {block} {times} times and writes it: one slot for two tokens; distinct blocks would work"
            )


def null_rows(null_blocks, *, block_size: int, num_blocks: int) -> np.ndarray:
    """The cache rows of the blocks that are reserved for padding, int64."""
    if len(null_blocks) == 0:
        return np.zeros(0, np.int64)
    blocks = integers("null_blocks", tuple(null_blocks))
    for row, block in enumerate(blocks):
        if not 0 <= block < num_blocks:
            raise ValueError(f"null_blocks[{row}] = {block}: block ids from 0 to {num_blocks - 1} would work")
    if len(np.unique(blocks)) != len(blocks):
        raise ValueError(f"null_blocks = {blocks.tolist()} names a block twice; distinct blocks would work")
    return (blocks[:, None] * block_size + np.arange(block_size)).ravel()


def same_slot_twice(slots: np.ndarray):
    """Raises ValueError where two tokens would be written to one slot."""
    kept = np.flatnonzero(slots >= 0)
    order = kept[np.argsort(slots[kept], kind="stable")]
    twice = slots[order[1:]] == slots[order[:-1]]
    if twice.any():
        at = int(np.argmax(twice))
        raise ValueError(
            f"slot_mapping[{order[at]}] and slot_mapping[{order[at + 1]}] are both {slots[order[at]]}: one slot for each token, or -1 for "
            "a token that is not written, would work"
        )


def _at(field, index):
    return f"{field}[{', '.join(str(int(i)) for i in index)}]"
