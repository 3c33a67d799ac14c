"""Builds, validates, pads and buckets a Batch: lengths and block tables of one step of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int32

from fattn.plan import _checks
from fattn.plan.tree import tree_labels
from fattn.types import Batch, Host

INT32_MAX = 2**31 - 1


def build(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables,
    *,
    block_size: int,
    num_blocks: int,
    query_labels: Mapping[str, Int32[np.ndarray, "t"]] | None = None,
    key_labels: Mapping[str, Sequence] | None = None,
    parents: Sequence[Sequence[int] | None] | None = None,
    null_blocks: Sequence[int] = (),
    exact: bool = True,
) -> Batch:
    """A validated Batch of sequences packed end to end. Lengths are counts of tokens; `seq_lens` includes this step's.

    `block_tables` holds for each sequence at least ceil(seq_len / block_size) block ids below `num_blocks`; further entries are never
    followed. The token at position p goes to slot table[p // block_size] * block_size + p % block_size. `key_labels` holds for each
    sequence one label per key. `parents` makes a draft tree of a sequence's queries: the index of each query's parent among them, -1 for
    the context; it sets the labels "enter" and "exit" for `tree("enter", "exit")` and rotary positions of context + depth.
    `null_blocks` are reserved: padding that must not reach a live slot is written there by `npu`.
    Raises ValueError naming the field, the row and the value, for anything that does not fit together.
    """
    _checks.at_least("block_size", block_size, 1)
    _checks.at_least("num_blocks", num_blocks, 0)
    query_lens, seq_lens = _checks.lengths(query_lens, seq_lens)
    table = _checks.table(block_tables, query_lens.size)
    _checks.followed(table, seq_lens, block_size, num_blocks)
    sequence, index = packed(query_lens)
    positions = (seq_lens - query_lens)[sequence] + index
    slots = _slots(table, sequence, positions, block_size)
    _checks.distinct(slots, sequence)
    query_labels = {name: _checks.label("query_labels", name, rows, index.size) for name, rows in (query_labels or {}).items()}
    key_labels = {name: _key_label(name, rows, seq_lens, table.shape[1] * block_size) for name, rows in (key_labels or {}).items()}
    rotary = positions
    if parents is not None:
        rotary = _add_tree(parents, query_lens, seq_lens, positions, query_labels, key_labels, table.shape[1] * block_size)
    null_blocks = _checks.null_blocks(null_blocks, table, seq_lens, block_size, num_blocks)
    host = Host(
        tuple(query_lens.tolist()),
        tuple(seq_lens.tolist()),
        _padding_to_null(slots, null_blocks, block_size),
        exact=exact,
        null_blocks=null_blocks,
    )
    return Batch(
        _starts(query_lens),
        seq_lens.astype(np.int32),
        table,
        slots.astype(np.int32),
        rotary.astype(np.int32),
        query_labels,
        key_labels,
        block_size=block_size,
        max_query_len=power_of_two(int(query_lens.max(initial=1))),
        host=host,
    )


def pad(batch: Batch, *, tokens: int, sequences: int, pages: int) -> Batch:
    """The batch with `tokens` rows, `sequences` sequences and block tables of `pages` entries, so that it shares a compilation.

    Padding has seq_len 0, so its positions are negative and it sees nothing: one query per added sequence where every sequence has one
    query and tokens == sequences (decode), else one sequence that holds all added tokens. Raises ValueError where a size is too small, or
    where the null blocks have too few rows for the added tokens.
    """
    host, (b, p), t = batch.host, batch.block_table.shape, batch.slot_mapping.size
    for name, size, least in (("tokens", tokens, t), ("sequences", sequences, b), ("pages", pages, p)):
        _checks.at_least(name, size, least)
    more, rows = sequences - b, tokens - t
    if t == b and tokens == sequences and all(n == 1 for n in host.query_lens):
        added = (1,) * more
    elif rows and not more:
        raise ValueError(f"sequences={sequences} leaves none for {rows} padding tokens; sequences={b + 1} would work")
    else:
        added = (rows,) * min(more, 1) + (0,) * (more - 1)
    query_lens, seq_lens = host.query_lens + added, host.seq_lens + (0,) * more
    positions = np.concatenate([np.arange(-n, 0, dtype=np.int32) for n in added] or [np.zeros(0, np.int32)])
    slots = np.pad(batch.slot_mapping, (0, rows), constant_values=-1)
    widths = (0, more), (0, (pages - p) * batch.block_size)
    return Batch(
        _starts(np.asarray(query_lens, np.int64)),
        np.asarray(seq_lens, np.int32),
        np.pad(batch.block_table, ((0, more), (0, pages - p)), constant_values=-1),
        slots,
        np.concatenate([batch.positions, positions]),
        {name: np.pad(label, (0, rows)) for name, label in batch.query_labels.items()},
        {name: np.pad(label, widths) for name, label in batch.key_labels.items()},
        block_size=batch.block_size,
        max_query_len=batch.max_query_len,
        host=replace(
            host,
            query_lens=query_lens,
            seq_lens=seq_lens,
            slots=_padding_to_null(slots.astype(np.int64), host.null_blocks, batch.block_size),
        ),
    )


def bucket(
    batch: Batch,
    *,
    tokens: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    pages: Sequence[int] | None = None,
) -> Batch:
    """The batch padded to the smallest sizes on offer, powers of two by default: one compilation a bucket, not one a step.

    Raises ValueError where the largest size on offer is too small.
    """
    b, p = batch.block_table.shape
    t = batch.slot_mapping.size
    decode = t == b and all(n == 1 for n in batch.host.query_lens)
    many_tokens = _smallest("tokens", tokens, t)
    many = many_tokens if decode else _smallest("sequences", sequences, b + (many_tokens > t))
    return pad(batch, tokens=many_tokens, sequences=many, pages=_smallest("pages", pages, p))


def check(batch: Batch, *, num_blocks: int) -> None:
    """Raises ValueError, naming the field, the row and the value, unless a Batch made by hand or by an engine fits together.

    Rows end where `query_start_loc` does, tables reach their lengths, block ids lie below `num_blocks`, and every slot that is written is
    the one that the block table gives that position, once.
    """
    starts = _checks.starts(batch.query_start_loc, np.asarray(batch.slot_mapping).size)
    query_lens, seq_lens = _checks.lengths(np.diff(starts), batch.seq_lens)
    table = _checks.table(batch.block_table, query_lens.size)
    _checks.followed(table, seq_lens, batch.block_size, num_blocks)
    sequence, index = packed(query_lens)
    slots = np.asarray(batch.slot_mapping)
    _checks.distinct(slots, sequence)
    expected = _slots(table, sequence, (seq_lens - query_lens)[sequence] + index, batch.block_size)
    if (wrong := np.flatnonzero((slots >= 0) & (slots != expected))).size:
        row = int(wrong[0])
        raise ValueError(
            f"slot_mapping[{row}]={slots[row]}, but block_table and block_size={batch.block_size} give that token "
            f"{'no slot' if expected[row] < 0 else f'slot {expected[row]}'}"
        )
    for name, rows in batch.query_labels.items():
        _checks.label("query_labels", name, rows, slots.size)
    for name, rows in batch.key_labels.items():
        if np.shape(rows) != (shape := (table.shape[0], table.shape[1] * batch.block_size)):
            raise ValueError(f"key_labels[{name!r}] has shape {list(np.shape(rows))}, but sequences x table rows are {list(shape)}")


def packed(query_lens) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of every packed row, and its index among that sequence's queries."""
    sequence = np.repeat(np.arange(query_lens.size), query_lens)
    return sequence, np.arange(sequence.size) - (np.cumsum(query_lens) - query_lens)[sequence]


def power_of_two(n: int) -> int:
    """The smallest power of two at or above n, 1 at least."""
    return 1 << max(n - 1, 0).bit_length()


def _smallest(name, sizes, least):
    if sizes is None:
        return power_of_two(least)
    fitting = [size for size in sizes if size >= least]
    if not fitting:
        raise ValueError(f"{name} buckets {tuple(sizes)} are too small for {least}")
    return min(fitting)


def _starts(query_lens):
    starts = np.zeros(query_lens.size + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    return starts


def _slots(table, sequence, positions, block_size):
    if not positions.size or not table.shape[1]:
        return np.full(positions.size, -1, np.int64)
    at = np.maximum(positions, 0)
    blocks = table[sequence, np.minimum(at // block_size, table.shape[1] - 1)].astype(np.int64)
    return np.where(positions >= 0, blocks * block_size + at % block_size, -1)


def _padding_to_null(slots, null_blocks, block_size):
    padding = slots < 0
    count = int(padding.sum())
    if not count or not null_blocks:
        return slots
    rows = (np.asarray(null_blocks, np.int64)[:, None] * block_size + np.arange(block_size)).reshape(-1)
    if rows.size < count:
        raise ValueError(
            f"null_blocks={null_blocks} have {rows.size} rows for {count} padding tokens; "
            f"reserve {-(-count // block_size)} blocks, or use finer token buckets"
        )
    return np.where(padding, rows[np.minimum(np.cumsum(padding) - 1, rows.size - 1)], slots)


def _key_label(name, rows, seq_lens, width):
    if len(rows) != seq_lens.size:
        raise ValueError(f"key_labels[{name!r}] has {len(rows)} rows for {seq_lens.size} sequences")
    out = np.zeros((seq_lens.size, width), np.int32)
    for row, (labels, length) in enumerate(zip(rows, seq_lens, strict=True)):
        labels = np.asarray(labels)
        if labels.shape not in ((length,), (width,)):
            raise ValueError(f"key_labels[{name!r}][{row}] has shape {list(labels.shape)}, but the sequence has {length} keys")
        out[row, : labels.size] = labels
    return out


def _add_tree(parents, query_lens, seq_lens, positions, query_labels, key_labels, width):
    """Sets the labels of draft trees, and returns rotary positions: those of the context, then one more per generation."""
    if len(parents) != query_lens.size:
        raise ValueError(f"parents has {len(parents)} rows for {query_lens.size} sequences; None stands for a plain sequence")
    for labels in (query_labels, key_labels):
        if taken := {"enter", "exit"} & labels.keys():
            raise ValueError(f"label {sorted(taken)[0]!r} is given and also made from parents; rename it")
    enter, exit, rotary = np.zeros(positions.size, np.int32), np.zeros(positions.size, np.int32), positions.copy()
    keys_enter, keys_exit = np.zeros((2, query_lens.size, width), np.int32)
    keys_exit[:] = INT32_MAX
    start = 0
    for row, (count, length, tree) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), parents, strict=True)):
        tree = range(-1, count - 1) if tree is None else tree
        if len(tree) != count:
            raise ValueError(f"parents[{row}] has {len(tree)} entries, but the sequence has {count} queries")
        if count > length and length:
            raise ValueError(f"parents[{row}]: {count} queries but seq_lens[{row}]={length}; a tree's queries are all keys too")
        try:
            own = slice(start, start + count)
            enter[own], exit[own] = tree_labels(tree)
        except ValueError as error:
            raise ValueError(f"parents[{row}]: {error}") from None
        if length:
            context = length - count
            depth = np.zeros(count, np.int64)
            for i in np.argsort(enter[own], kind="stable"):  # a parent comes before its children
                depth[i] = 0 if tree[i] < 0 else depth[tree[i]] + 1
            rotary[own] = context + depth
            keys_enter[row, context:length], keys_exit[row, context:length] = enter[own], exit[own]
        start += count
    query_labels |= {"enter": enter, "exit": exit}
    key_labels |= {"enter": keys_enter, "exit": keys_exit}
    return rotary
