"""Puts a planned batch on a device, with the masks and indices that operators need: once per step, not once per layer."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import torch

from fattn.types import Batch, Host, Mask
from npu._forms import Form, batch_form, first_key, reach
from npu._placed import check_batch, packed_places, window_table
from npu._rules import INT32_MAX, rule, sparse_mode, triangle

_ALIGNED = 128  # integers: every array begins at a multiple of 512 bytes, as an allocation of its own would


def place(batch: Batch, device, mask: Mask, *, bucketed: bool = False) -> Batch:
    """The batch as tensors on `device`, with host.constants for attention under `mask`. Reads host arrays only: the batch as planned.

    Integers go over in one transfer. Table entries that no length reaches become block 0, so that no id which the plan left open reaches
    an operator. slot_mapping becomes host.slots, where padding has rows of the null blocks. `bucketed` makes what is launched, and every
    tensor's shape, depend on the batch's sizes and max_query_len alone, not on its lengths, as a captured graph needs.
    Raises ValueError where lengths and rows disagree or a label is missing, TypeError for what is no mask.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be made by fattn.types (causal(), window(...), ...), got {mask!r}")
    host = batch.host or _host(batch)
    query_lens, seq_lens = np.array(host.query_lens, np.int64), np.array(host.seq_lens, np.int64)
    table, slots = np.asarray(batch.block_table), np.asarray(host.slots)
    check_batch(query_lens, seq_lens, table, slots, batch.block_size)
    form = _bucket_form(batch, query_lens, seq_lens, mask) if bucketed else batch_form(query_lens, seq_lens, mask)
    followed = np.arange(table.shape[1]) * batch.block_size < seq_lens[:, None]
    table = np.where(followed, table, 0)
    arrays = {
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "own block_table": table,
        "slot_mapping": slots,
        "positions": batch.positions,
    }
    arrays |= {f"query {name}": label for name, label in batch.query_labels.items()}
    arrays |= {f"key {name}": label for name, label in batch.key_labels.items()}
    kv_lens, hidden = seq_lens, None
    if form.explicit and form.queries == 1 and (first := first_key(mask, seq_lens - 1)) is not None:
        table, kv_lens, hidden = window_table(np.maximum(first, 0), reach(mask), seq_lens, table, batch.block_size)
        arrays |= {"block_table": table, "kv_lens": kv_lens}
    if not form.uniform:
        arrays["packed_rows"] = packed_places(query_lens, form.queries)
    moved, flat = _moved(arrays, device)
    query_labels = {name: moved[f"query {name}"] for name in batch.query_labels}
    key_labels = {name: moved[f"key {name}"] for name in batch.key_labels}
    constants = {
        "mask": mask,
        "form": form,
        "mode": sparse_mode(mask) if form.queries > 1 and not form.explicit else (0, INT32_MAX, INT32_MAX),
        "query_ends": tuple(np.cumsum(query_lens).tolist()),
        "query_rows": host.query_lens if form.uniform else tuple(np.minimum(query_lens, form.queries).tolist()),
        "kv_lens": host.seq_lens if kv_lens is seq_lens else tuple(kv_lens.tolist()),
        "context_lens": kv_lens.astype(np.int32),  # for an operator that takes a tensor of the host
        "tokens": len(slots),
        "longest": int(kv_lens.max(initial=0)),
        "host_table": table,
        "checked": {},  # what the step's first layer was checked for (`_admit.once_a_step`)
        "extremes": (*_extremes(table), *_extremes(slots)),
        "integers": flat,
        "block_table": moved.get("block_table", moved["own block_table"]),
        "kv_lens_array": moved.get("kv_lens", moved["seq_lens"]),
    }
    if not form.uniform:
        constants["packed_rows"] = moved["packed_rows"]
        constants["padded_rows"] = _padded_rows(moved["query_start_loc"], form.queries, len(slots))
    if hidden is not None:
        constants["hidden"] = torch.from_numpy(hidden).to(device, non_blocking=True)
    elif form.explicit:
        constants |= _hidden(mask, query_lens, seq_lens, table.shape[1] * batch.block_size, query_labels, key_labels, constants, device)
    if "empty" not in constants and (bucketed or (query_lens > seq_lens).any()):
        constants["empty"] = torch.from_numpy(_empty_rows(query_lens, seq_lens)).to(device, non_blocking=True)[:, None]
    if constants["mode"][0]:
        constants["compressed"] = _triangle(torch.device(device))
    return replace(
        batch,
        query_start_loc=moved["query_start_loc"],
        seq_lens=moved["seq_lens"],
        block_table=moved["own block_table"],
        slot_mapping=moved["slot_mapping"],
        positions=moved["positions"],
        query_labels=query_labels,
        key_labels=key_labels,
        host=replace(host, constants=constants),
    )


def _bucket_form(batch, query_lens, seq_lens, mask):
    """How a batch goes to the operator by its sizes: as its longest query, max_query_len, would."""
    queries, sizes = max(1, batch.max_query_len), len(query_lens)
    longest = int(query_lens.max(where=seq_lens > 0, initial=0))
    if longest > queries:
        raise ValueError(f"batch.max_query_len={batch.max_query_len}, but a sequence has {longest} queries")
    # several queries may be spread over the sequences in any way, and one query too where there are empty sequences
    uniform = queries == 1 and int(query_lens.sum()) == sizes
    if uniform and (query_lens != 1).any():
        row = int(np.argmax(query_lens != 1))
        raise ValueError(f"batch.host.query_lens[{row}]={query_lens[row]}: in a bucket of {sizes} tokens and sequences each has one query")
    form = batch_form([queries], [queries], mask)
    return Form(queries, uniform, form.explicit)


def _padded_rows(query_start_loc, queries, tokens):
    """The packed row of every row of [b queries], made on the device; a place past a sequence's own rows borrows a later row."""
    index = torch.arange(queries, dtype=torch.int32, device=query_start_loc.device)
    return (query_start_loc[:-1, None] + index).clamp_(max=max(tokens - 1, 0)).view(-1)


def _moved(arrays, device):
    """The arrays as int32 views, by name, of one tensor on the device; and that tensor."""
    sources = {name: np.asarray(array) for name, array in arrays.items()}
    starts, end = {}, 0
    for name, source in sources.items():
        starts[name], end = end, end + -(-source.size // _ALIGNED) * _ALIGNED
    flat = np.zeros(end, np.int32)
    for name, source in sources.items():
        flat[starts[name] : starts[name] + source.size] = source.ravel()
    moved = torch.from_numpy(flat).to(device, non_blocking=True)
    views = {name: moved.as_strided(source.shape, _strides(source.shape), starts[name]) for name, source in sources.items()}
    return views, moved


def _strides(shape):
    """Of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _extremes(array):
    return (int(array.min()), int(array.max())) if array.size else (0, 0)


def _host(batch):
    starts, seq_lens = np.asarray(batch.query_start_loc), np.asarray(batch.seq_lens)
    slots = np.asarray(batch.slot_mapping, np.int64)
    return Host(tuple(np.diff(starts).tolist()), tuple(seq_lens.tolist()), slots)


def _empty_rows(query_lens, seq_lens):
    """Rows that see no key under a mask that lets every query see the key at its own position: those at negative positions."""
    starts = np.cumsum(query_lens) - query_lens
    return np.arange(int(query_lens.sum())) < np.repeat(starts + query_lens - seq_lens, query_lens)


def _hidden(mask, query_lens, seq_lens, keys, query_labels, key_labels, constants, device):
    """The mask as an array, True = hidden: Bool[b 1 queries keys], and the packed rows that see nothing: Bool[t 1]."""
    for name in mask.labels():
        for side, labels in (("query_labels", query_labels), ("key_labels", key_labels)):
            if name not in labels:
                raise ValueError(f"the mask reads label {name!r}: batch.{side} has {sorted(labels)}")
    form = constants["form"]
    index = np.arange(form.queries)[None]
    own, _ = _moved(
        {
            "p": np.where(index < query_lens[:, None], (seq_lens - query_lens)[:, None] + index, -1)[..., None],
            "length": seq_lens[:, None, None],
        },
        device,
    )
    p, j = own["p"], torch.arange(keys, dtype=torch.int32, device=device)
    padded = {
        name: (labels if form.uniform else labels.index_select(0, constants["padded_rows"])).view(query_lens.size, form.queries)
        for name, labels in query_labels.items()
    }
    seen = (p >= 0) & (j < own["length"]) & rule(mask, p, j, padded, key_labels)
    some = seen.any(-1).view(-1)
    if not form.uniform:
        # a padding sequence longer than `queries` borrows the places of its own rows: it has no key, so none of them sees one
        some = some.index_select(0, constants["packed_rows"])
    return {"hidden": ~seen[:, None], "empty": ~some[:, None]}


@functools.cache
def _triangle(device):
    return triangle(device)
