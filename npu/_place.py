"""Puts a planned batch on a device, with the masks and indices that operators need: once per step, not once per layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fattn.types import Batch, Host, Mask, band
from npu._forms import batch_form, first_key, reach
from npu._rules import rule, triangle


def place(batch: Batch, device, mask: Mask) -> Batch:
    """The batch as tensors on `device`, with host.constants for attention under `mask`. Reads host arrays only: the batch as planned.

    Table entries that no length reaches become block 0, so that no id which the plan left open reaches an operator. slot_mapping becomes
    host.slots, where padding has rows of the null blocks. Raises ValueError where lengths and rows disagree or a label is missing.
    """
    host = batch.host or _host(batch)
    query_lens, seq_lens = (np.asarray(lens, np.int64) for lens in (host.query_lens, host.seq_lens))
    table = np.asarray(batch.block_table)
    slots = np.asarray(host.slots)
    _check(query_lens, seq_lens, table, slots, batch.block_size)
    followed = np.arange(table.shape[1])[None] < -(-seq_lens // batch.block_size)[:, None]
    table = np.where(followed, table, 0)

    def put(array):
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device, non_blocking=True)

    query_labels = {name: put(batch.query_labels[name]) for name in batch.query_labels}
    key_labels = {name: put(batch.key_labels[name]) for name in batch.key_labels}
    shape = batch_form(host.query_lens, host.seq_lens, mask)
    constants = {"mask": mask, "form": shape, "query_ends": tuple(np.cumsum(query_lens).tolist())}
    constants["extremes"] = _extremes(table, slots)
    constants |= _indices(query_lens, shape, put)
    kv_lens, first = seq_lens, first_key(mask, seq_lens - 1)
    if shape.queries == 1 and shape.explicit and first is not None:
        table, kv_lens, hidden = _window(np.maximum(first, 0), reach(mask), seq_lens, table, batch.block_size)
        constants["hidden"] = torch.from_numpy(hidden).to(device, non_blocking=True)
    constants["kv_lens"] = tuple(kv_lens.tolist())
    constants["block_table"] = put(table)
    constants["kv_lens_array"] = put(kv_lens)
    if shape.explicit and "hidden" not in constants:
        constants |= _hidden(mask, query_lens, seq_lens, table.shape[1] * batch.block_size, query_labels, key_labels, constants, put)
    elif (empty := _empty_rows(query_lens, seq_lens)).any():
        constants["empty"] = torch.from_numpy(empty).to(device, non_blocking=True)[:, None]
    if not shape.explicit and shape.queries > 1 and band(mask) != (None, None):
        constants["compressed"] = triangle(device)
    return replace(
        batch,
        query_start_loc=put(batch.query_start_loc),
        seq_lens=put(batch.seq_lens),
        block_table=put(batch.block_table),
        slot_mapping=put(slots),
        positions=put(batch.positions),
        query_labels=query_labels,
        key_labels=key_labels,
        host=replace(host, constants=constants),
    )


def _extremes(table, slots):
    """The least and the greatest block id and slot, with their places: what must lie inside a cache."""
    found = {}
    for field, array in (("block_table", table), ("slot_mapping", slots)):
        places = (array.argmin(), array.argmax()) if array.size else ()
        found[field] = [(list(map(int, np.unravel_index(at, array.shape))), int(array.flat[at])) for at in places]
    return found


def _host(batch):
    starts, seq_lens = np.asarray(batch.query_start_loc), np.asarray(batch.seq_lens)
    slots = np.asarray(batch.slot_mapping, np.int64)
    return Host(tuple(np.diff(starts).tolist()), tuple(seq_lens.tolist()), slots)


def _check(query_lens, seq_lens, table, slots, block_size):
    for name, lens in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if lens.shape != (table.shape[0],):
            raise ValueError(f"batch.host.{name} has {lens.size} sequences, but block_table has {table.shape[0]} rows")
        if (lens < 0).any():
            row = int(np.flatnonzero(lens < 0)[0])
            raise ValueError(f"batch.host.{name}[{row}]={lens[row]} must not be negative")
    if slots.shape != (query_lens.sum(),):
        raise ValueError(f"batch.host.slots has {slots.size} rows, but query lengths add up to {query_lens.sum()}")
    _, first, counts = np.unique(slots, return_index=True, return_counts=True)
    if (twice := first[(counts > 1) & (slots[first] >= 0)]).size:
        rows = np.flatnonzero(slots == slots[twice[0]])
        raise ValueError(
            f"batch.slot_mapping[{rows[1]}]={slots[rows[1]]} is already written by row {rows[0]}; every row needs its own slot"
        )
    if (long := np.flatnonzero(seq_lens > table.shape[1] * block_size)).size:
        row = int(long[0])
        raise ValueError(f"batch.seq_lens[{row}]={seq_lens[row]} is longer than {table.shape[1]} blocks of {block_size} tokens")


def _window(first, reach, seq_lens, table, block_size):
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


def _indices(query_lens, shape, put):
    """Where a batch is not uniform: the packed row of every row of [b queries], and the place there of every packed row."""
    if shape.uniform:
        return {}
    total, starts = int(query_lens.sum()), np.cumsum(query_lens) - query_lens
    rows = np.minimum(starts[:, None] + np.arange(shape.queries), max(total - 1, 0))
    sequence, index = _packed(query_lens)
    return {
        "padded_rows": put(rows.reshape(-1)),
        "packed_rows": put(sequence * shape.queries + np.minimum(index, max(shape.queries - 1, 0))),
    }


def _packed(query_lens):
    """The sequence of every packed row, and its index among that sequence's queries."""
    sequence = np.repeat(np.arange(query_lens.size), query_lens)
    return sequence, np.arange(sequence.size) - (np.cumsum(query_lens) - query_lens)[sequence]


def _empty_rows(query_lens, seq_lens):
    """Rows that see no key under a mask that lets every query see the key at its own position: those at negative positions."""
    sequence, index = _packed(query_lens)
    return index < (query_lens - seq_lens)[sequence]


def _hidden(mask, query_lens, seq_lens, keys, query_labels, key_labels, constants, put):
    """The mask as an array, True = hidden: Bool[b 1 queries keys], and the packed rows that see nothing: Bool[t 1]."""
    for name in mask.labels():
        for side, labels in (("query_labels", query_labels), ("key_labels", key_labels)):
            if name not in labels:
                raise ValueError(f"the mask reads label {name!r}: batch.{side} has {sorted(labels)}")
    shape = constants["form"]
    index = np.arange(shape.queries)[None]
    p = put(np.where(index < query_lens[:, None], (seq_lens - query_lens)[:, None] + index, -1))[..., None]
    j, length = put(np.arange(keys)[None, None]), put(seq_lens[:, None, None])
    padded = {
        name: (labels if shape.uniform else labels.index_select(0, constants["padded_rows"])).view(query_lens.size, shape.queries)
        for name, labels in query_labels.items()
    }
    seen = (p >= 0) & (j < length) & rule(mask, p, j, padded, key_labels)
    some = seen.any(-1).view(-1)
    if not shape.uniform:
        # a padding sequence longer than `queries` borrows the places of its own rows: it has no key, so none of them sees one
        some = some.index_select(0, constants["packed_rows"])
    return {"hidden": ~seen[:, None], "empty": ~some[:, None]}
