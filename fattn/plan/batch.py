"""Builds, validates, pads and buckets a Batch: one step of an engine. Host side, NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fattn.plan import _checks
from fattn.plan._checks import INT32_MAX
from fattn.plan._labels import add_tree, key_label, query_label
from fattn.plan._labels import tree_labels as tree_labels
from fattn.types import Batch, Host


def build(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_blocks: int,
    query_labels: Mapping[str, Sequence[int]] | None = None,
    key_labels: Mapping[str, Sequence[Sequence[int]]] | None = None,
    parents: Sequence[Sequence[int] | None] | None = None,
    null_blocks: Sequence[int] = (),
    exact: bool = True,
) -> Batch:
    """The batch of `b` sequences, of which sequence i brings query_lens[i] tokens and has seq_lens[i] keys, these tokens included.

    `block_tables` holds a list of block ids for each sequence, or is an integer array [b p]; entries at or beyond
    ceil(seq_len / block_size) are never followed. A token at position p goes to slot table[p // block_size] * block_size + p % block_size.
    Where a query_len exceeds its seq_len, the first tokens stand at negative positions: they see nothing and are not written.
    `query_labels` are [t] for each name; `key_labels` one [seq_len] list for each sequence, or [b, p * block_size].
    `parents` makes a tree of the tokens of a sequence (see `tree_labels`; None: a chain): labels "enter" and "exit", and rotary positions
    context + depth. `null_blocks` are reserved for padding: `host.slots` sends tokens that are not written to distinct rows of them.
    `exact=False` says that the lengths are upper bounds. Raises ValueError that names the field, the row and the value.
    """
    block_size, num_blocks = _sizes(block_size, num_blocks)
    queries, keys = _checks.lengths("query_lens", query_lens), _checks.lengths("seq_lens", seq_lens)
    table, widths = _checks.tables("block_table", block_tables)
    if not len(queries) == len(keys) == len(table):
        raise ValueError(
            f"query_lens has {len(queries)} sequences, seq_lens {len(keys)}, block_tables {len(table)}; one entry of each for each "
            "sequence would work"
        )
    rows = _checks.null_rows(null_blocks, block_size=block_size, num_blocks=num_blocks)
    needed = _checks.pages(
        queries, keys, table, widths, block_size=block_size, num_blocks=num_blocks, null_blocks=(rows[::block_size] // block_size).tolist()
    )
    table = np.where(np.arange(table.shape[1]) < needed[:, None], table, -1)
    starts = np.zeros(len(queries) + 1, np.int64)
    np.cumsum(queries, out=starts[1:])
    tokens = int(starts[-1])
    if tokens > INT32_MAX:
        raise ValueError(f"query_lens sum to {tokens} tokens; up to {INT32_MAX} would work")
    # the query that stands at position 0 may lie before the sequence's first row, or after it
    standing = np.arange(tokens) + np.repeat(keys - queries - starts[:-1], queries)
    slots = _slots(table, queries, standing, block_size)
    positions = standing
    query_labels, key_labels = dict(query_labels or {}), dict(key_labels or {})
    if parents is not None:
        positions = add_tree(query_labels, key_labels, parents, queries, keys, starts, standing, table.shape[1] * block_size)
    return Batch(
        starts.astype(np.int32),
        keys.astype(np.int32),
        table.astype(np.int32),
        slots.astype(np.int32),
        positions.astype(np.int32),
        {name: query_label(name, values, tokens) for name, values in query_labels.items()},
        {name: key_label(name, values, keys, table.shape[1] * block_size) for name, values in key_labels.items()},
        block_size=block_size,
        max_query_len=int(queries.max(where=keys > 0, initial=1)),
        host=Host(tuple(queries.tolist()), tuple(keys.tolist()), _to_null_rows(slots, rows), exact),
    )


def pad(batch: Batch, *, tokens: int, sequences: int, pages: int, null_blocks: Sequence[int] = ()) -> Batch:
    """The batch with `tokens` tokens, `sequences` sequences and `pages` table entries a sequence, of which the surplus is padding.

    Padding tokens belong to sequences of seq_len 0, so they stand at negative positions: one such sequence holds them all, or, in a decode
    batch (no sequence has two queries), each holds one. Further surplus sequences are empty. Lengths still end at T.
    `null_blocks` as in `build`. Raises ValueError for a size that is too small.
    """
    starts, table, slots = (np.asarray(a) for a in (batch.query_start_loc, batch.block_table, batch.slot_mapping))
    surplus, spare = tokens - len(slots), sequences - len(table)
    one_each = _one_each(starts)
    for name, size, least in (("tokens", tokens, len(slots)), ("sequences", sequences, len(table)), ("pages", pages, table.shape[1])):
        if _checks.count(name, size, least=0) < least:
            raise ValueError(f"{name} = {size}: the batch has {least} already; {least} or more would work")
    holders = surplus if one_each else min(surplus, 1)
    if spare < holders:
        raise ValueError(
            f"sequences = {sequences}: {surplus} padding tokens need {holders} sequences of seq_len 0 beside the batch's {len(table)}; "
            f"{len(table) + holders} or more would work"
        )
    if surplus == spare == pages - table.shape[1] == 0:
        return batch
    added = np.zeros(spare, np.int64)
    added[:holders] = 1 if one_each else surplus
    standing = np.full(surplus, -1) if one_each else np.arange(-surplus, 0)
    slots = _extended(slots, surplus, -1)
    return replace(
        batch,
        query_start_loc=np.concatenate([starts, starts[-1] + np.cumsum(added)]).astype(np.int32),
        seq_lens=_extended(batch.seq_lens, spare, 0),
        block_table=_grown(table, sequences, pages, -1),
        slot_mapping=slots,
        positions=np.concatenate([np.asarray(batch.positions), standing]).astype(np.int32),
        query_labels={name: _extended(label, surplus, 0) for name, label in batch.query_labels.items()},
        key_labels={name: _grown(np.asarray(label), sequences, pages * batch.block_size, 0) for name, label in batch.key_labels.items()},
        host=_padded_host(batch, added, slots, null_blocks),
    )


def bucket(
    batch: Batch,
    *,
    tokens: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    pages: Sequence[int] | None = None,
    null_blocks: Sequence[int] = (),
) -> Batch:
    """The batch padded to the smallest bucket that holds it, so that a compilation serves a bucket and not a step.

    `tokens`, `sequences` and `pages` list the sizes to choose from; None means the powers of two. `max_query_len` goes up to a power of
    two. `null_blocks` as in `build`. Raises ValueError where no bucket is large enough.
    """
    count, rows = len(np.asarray(batch.slot_mapping)), len(np.asarray(batch.seq_lens))
    size = _bucket("tokens", count, tokens)
    holders = size - count if _one_each(np.asarray(batch.query_start_loc)) else min(size - count, 1)
    padded = pad(
        batch,
        tokens=size,
        sequences=_bucket("sequences", rows + holders, sequences),
        pages=_bucket("pages", np.asarray(batch.block_table).shape[1], pages),
        null_blocks=null_blocks,
    )
    return replace(padded, max_query_len=_bucket("max_query_len", padded.max_query_len, None))


def check(batch: Batch, *, num_blocks: int) -> None:
    """Raises ValueError that names the field, the row and the value where a batch, built here or by hand, does not hold together.

    Reads every array on the host. A slot is below 0 or where the block table will look for its token; padding sequences have seq_len 0.
    """
    block_size, num_blocks = _sizes(batch.block_size, num_blocks)
    starts = _checks.integers("query_start_loc", batch.query_start_loc)
    keys = _checks.lengths("seq_lens", batch.seq_lens)
    table, widths = _checks.tables("block_table", np.asarray(batch.block_table))
    slots = _checks.integers("slot_mapping", batch.slot_mapping)
    positions = _checks.integers("positions", batch.positions)
    if not len(starts) - 1 == len(keys) == len(table):
        raise ValueError(
            f"query_start_loc has {len(starts)} entries, seq_lens {len(keys)}, block_table {len(table)} rows; b + 1, b and b would work"
        )
    queries = np.diff(starts)
    if starts[0] != 0 or (queries < 0).any():
        row = 0 if starts[0] != 0 else int(np.argmax(queries < 0)) + 1
        raise ValueError(f"query_start_loc[{row}] = {starts[row]}: it starts at 0 and never falls")
    for field, array in (("slot_mapping", slots), ("positions", positions)):
        if len(array) != starts[-1]:
            raise ValueError(f"query_start_loc[{len(keys)}] = {starts[-1]}, but {field} has {len(array)} tokens; lengths end at T")
    if queries.max(where=keys > 0, initial=0) > _checks.count("max_query_len", batch.max_query_len, least=0):
        row = int(np.argmax(np.where(keys > 0, queries, 0)))
        raise ValueError(f"max_query_len = {batch.max_query_len}, but sequence {row} has {queries[row]} queries; an upper bound would work")
    _checks.pages(queries, keys, table, widths, block_size=block_size, num_blocks=num_blocks)
    _checks.same_slot_twice(slots)
    standing = np.arange(len(slots)) + np.repeat(keys - queries - starts[:-1], queries)
    wrong = (slots >= 0) & (slots != _slots(table, queries, standing, block_size))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"slot_mapping[{row}] = {slots[row]}: the block table looks for this token in slot "
            f"{_slots(table, queries, standing, block_size)[row]}; that, or -1, would work"
        )
    for name, label in batch.query_labels.items():
        query_label(name, label, len(slots))
    for name, label in batch.key_labels.items():
        key_label(name, np.asarray(label), keys, table.shape[1] * block_size)
    _check_host(batch.host, queries, keys, slots)


def _sizes(block_size, num_blocks):
    block_size, num_blocks = _checks.count("block_size", block_size, least=1), _checks.count("num_blocks", num_blocks, least=1)
    if block_size * num_blocks > INT32_MAX:
        raise ValueError(f"num_blocks = {num_blocks}: blocks of {block_size} give more slots than int32 counts")
    return block_size, num_blocks


def _one_each(starts):
    """Whether a batch is a decode step: no sequence has two queries."""
    return bool((np.diff(starts) <= 1).all())


def _slots(table, queries, standing, block_size):
    rows = np.repeat(np.arange(len(queries)), queries)
    kept = np.maximum(standing, 0)
    return np.where(standing < 0, -1, table[rows, np.minimum(kept // block_size, table.shape[1] - 1)] * block_size + kept % block_size)


def _to_null_rows(slots, rows):
    """Slots with the k-th token that is not written sent to the k-th null row; left at -1 where there are no null rows."""
    slots = slots.astype(np.int64)
    if len(rows) == 0:
        return slots
    unwritten = np.flatnonzero(slots < 0)
    if len(unwritten) > len(rows):
        raise ValueError(
            f"null_blocks has {len(rows)} rows for {len(unwritten)} tokens that are not written; as many rows as such tokens would work"
        )
    slots[unwritten] = rows[: len(unwritten)]
    return slots


def _bucket(name, least, sizes):
    if sizes is None:
        return 1 << max(0, least - 1).bit_length()
    fitting = [_checks.count(name, size, least=0) for size in sizes if size >= least]
    if not fitting:
        raise ValueError(f"{name} = {least} exceeds every bucket of {list(sizes)}; a bucket of {least} or more would work")
    return min(fitting)


def _extended(array, by, fill):
    return np.concatenate([np.asarray(array), np.full(by, fill)]).astype(np.int32)


def _grown(array, rows, columns, fill):
    grown = np.full((rows, columns), fill, np.int32)
    grown[: array.shape[0], : array.shape[1]] = array
    return grown


def _padded_host(batch, added, slots, null_blocks):
    if batch.host is None:
        return None
    queries, keys = batch.host.query_lens + tuple(added.tolist()), batch.host.seq_lens + (0,) * len(added)
    if len(null_blocks) == 0:
        known = np.asarray(batch.host.slots)
        return Host(queries, keys, np.concatenate([known, np.full(len(slots) - len(known), -1)]).astype(np.int64), batch.host.exact)
    rows = _checks.null_rows(null_blocks, block_size=batch.block_size, num_blocks=INT32_MAX // batch.block_size)
    return Host(queries, keys, _to_null_rows(slots, rows), batch.host.exact)


def _check_host(host, queries, keys, slots):
    if host is None:
        return
    for field, own, device in (("query_lens", host.query_lens, queries), ("seq_lens", host.seq_lens, keys)):
        own = _checks.lengths(f"host.{field}", own)
        if len(own) != len(device):
            raise ValueError(f"host.{field} has {len(own)} sequences, the arrays {len(device)}; the same would work")
        wrong = own != device if host.exact else own < device
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(f"host.{field}[{row}] = {own[row]}, but the arrays say {device[row]}")
    own = _checks.integers("host.slots", host.slots)
    if len(own) != len(slots) or (own != slots)[slots >= 0].any():
        raise ValueError("host.slots differs from slot_mapping where slot_mapping writes")
    _checks.same_slot_twice(own)
