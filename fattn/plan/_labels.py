"""Labels that travel with a batch's tokens: given ones, and those of a draft tree, whose ancestry becomes a comparison of two numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from fattn.plan import _checks
from fattn.plan._checks import INT32_MAX
from fattn.types import Array


def tree_labels(parents: Sequence[int]) -> tuple[Int32[Array, "n"], Int32[Array, "n"]]:
    """Labels (enter, exit) of a forest: j is an ancestor of i, or i itself, iff enter[j] <= enter[i] < exit[j].

    parents[i] is the index of i's parent, below i, or -1 where the parent is the context. Raises ValueError for any other parent.
    """
    above = _parents("parents", parents).tolist()
    sizes = [1] * len(above)
    for node in range(len(above) - 1, -1, -1):
        if above[node] >= 0:
            sizes[above[node]] += sizes[node]
    enter, free, free_root = [], [], 0
    for node, parent in enumerate(above):
        enter.append(free_root if parent < 0 else free[parent])
        if parent < 0:
            free_root += sizes[node]
        else:
            free[parent] += sizes[node]
        free.append(enter[node] + 1)
    enter = np.array(enter, np.int32)
    return enter, enter + np.array(sizes, np.int32)


def add_tree(query_labels, key_labels, parents, queries, keys, starts, standing, width):
    """Puts the labels "enter" and "exit" into both mappings and returns rotary positions, context + depth."""
    if len(parents) != len(queries):
        raise ValueError(f"parents has {len(parents)} rows for {len(queries)} sequences; one for each sequence, or None, would work")
    for name in ("enter", "exit"):
        if name in query_labels or name in key_labels:
            raise ValueError(f"parents makes the label {name!r}, which is given too; one of the two would work")
    # a sequence without a tree is a chain
    depth = np.arange(len(standing)) - np.repeat(starts[:-1], queries)
    enter, exit = depth.astype(np.int32), np.repeat(queries, queries).astype(np.int32)
    for row, above in enumerate(parents):
        if above is None:
            continue
        if len(above) != queries[row]:
            raise ValueError(f"parents[{row}] has {len(above)} entries, but query_lens[{row}] = {queries[row]}; as many would work")
        if queries[row] > keys[row]:
            raise ValueError(f"parents[{row}]: query_lens[{row}] = {queries[row]}, but seq_lens[{row}] = {keys[row]}; a tree is all keys")
        above = _parents(f"parents[{row}]", above)
        own = slice(starts[row], starts[row + 1])
        enter[own], exit[own] = tree_labels(above)
        for node, parent in enumerate(above.tolist()):
            depth[starts[row] + node] = 0 if parent < 0 else depth[starts[row] + parent] + 1
    query_labels.update(enter=enter, exit=exit)
    rows, kept = np.repeat(np.arange(len(queries)), queries), standing >= 0
    for name, label, context in (("enter", enter, 0), ("exit", exit, INT32_MAX)):
        key_labels[name] = np.full((len(queries), width), context, np.int32)
        key_labels[name][rows[kept], standing[kept]] = label[kept]
    return np.repeat(keys - queries, queries) + depth


def query_label(name, values, tokens):
    """Int32[tokens] of a label's values. Raises ValueError that names the row for what is no integer, and for another count."""
    label = _checks.integers(f"query_labels[{name!r}]", values)
    if len(label) != tokens:
        raise ValueError(f"query_labels[{name!r}] has {len(label)} values for {tokens} tokens; one for each token would work")
    return label.astype(np.int32)


def key_label(name, values, keys, width):
    """Int32[b width] of a label's values, given so, or as a list of keys[row] for each sequence. Raises as `query_label`."""
    field = f"key_labels[{name!r}]"
    if getattr(values, "ndim", None) == 2:
        label = _checks.integers(field, values, rank=2)
        if label.shape != (len(keys), width):
            raise ValueError(f"{field} has shape {list(label.shape)}; [{len(keys)}, {width}], a value for each table row, would work")
        return label.astype(np.int32)
    if len(values) != len(keys):
        raise ValueError(f"{field} has {len(values)} rows for {len(keys)} sequences; one for each sequence would work")
    label = np.zeros((len(keys), width), np.int32)
    for row, (own, size) in enumerate(zip(values, keys, strict=True)):
        own = _checks.integers(f"{field}[{row}]", own)
        if len(own) != size:
            raise ValueError(f"{field}[{row}] has {len(own)} values, but seq_lens[{row}] = {size}; one for each key would work")
        label[row, :size] = own
    return label


def _parents(field, parents):
    above = _checks.integers(field, parents)
    bad = (above < -1) | (above >= np.arange(len(above)))
    if bad.any():
        node = int(np.argmax(bad))
        raise ValueError(f"{field}[{node}] = {above[node]}: -1 for the context, or the index of an earlier token, would work")
    return above
