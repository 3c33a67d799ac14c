"""Faults in which keys a query sees: alignment, edges, labels, compressed forms."""

from __future__ import annotations

import numpy as np

from fattn.conformance.faults.fault import Fault, Steps, attention, moved, rewritten
from fattn.conformance.plain import masks
from fattn.types import And, Causal, Chunk, Compressed, Or, Range, Same, Tree, Window, band, window


def top_left(queries, keys, *, mask):
    t, s = (masks.positions(side).size for side in (queries, keys))
    return masks.visible(moved(queries, Range(0, t)), moved(keys, Range(0, s)), mask=mask)


def window_sees_one_more(queries, keys, *, mask):
    wider = lambda m: Window(m.left + 1, m.right) if isinstance(m, Window) and m.left is not None else m
    return masks.visible(queries, keys, mask=rewritten(mask, wider))


def window_is_symmetric(queries, keys, *, mask):
    mirrored = lambda m: Window(m.left, m.left) if isinstance(m, Window) and m.left is not None else m
    return masks.visible(queries, keys, mask=rewritten(mask, mirrored))


def window_stops_before_its_right_edge(queries, keys, *, mask):
    narrower = lambda m: Window(m.left, m.right - 1) if isinstance(m, Window) and m.right else m
    return masks.visible(queries, keys, mask=rewritten(mask, narrower))


def open_side_is_zero(queries, keys, *, mask):
    closed = lambda m: Window(m.left, m.right or 0) if isinstance(m, Window) else m
    return masks.visible(queries, keys, mask=rewritten(mask, closed))


def chunk_of_the_past(queries, keys, *, mask):
    """Chunks as a distance: the last `size` keys instead of those of the same chunk."""
    distance = lambda m: Window(m.size - 1, m.size - 1) if isinstance(m, Chunk) else m
    return masks.visible(queries, keys, mask=rewritten(mask, distance))


def label_zero_sees_all(queries, keys, *, mask):
    seen = masks.visible(queries, keys, mask=mask)
    for name in (m.label for m in parts(mask) if isinstance(m, Same)):
        wild = masks.labels(queries)[name] == 0
        rest = masks.visible(queries, keys, mask=rewritten(mask, lambda m: Causal() if isinstance(m, Same) else m))
        seen = np.where(wild[:, None], rest, seen)
    return seen


def tree_includes_its_exit(queries, keys, *, mask):
    for name in (m.exit for m in parts(mask) if isinstance(m, Tree)):
        later = {**masks.labels(keys), name: np.minimum(masks.labels(keys)[name], 2**31 - 2) + 1}
        keys = type(keys)(keys.pos, later)
    return masks.visible(queries, keys, mask=mask)


def either_is_both(queries, keys, *, mask):
    both = lambda m: And(m.first, m.second) if isinstance(m, Or) else m
    return masks.visible(queries, keys, mask=rewritten(mask, both))


def second_operand_is_dropped_in_nested_masks(queries, keys, *, mask):
    flat = lambda m: And(m.first.first, m.second) if isinstance(m, And) and isinstance(m.first, And) else m
    return masks.visible(queries, keys, mask=rewritten(mask, flat))


def padding_keys_are_seen(queries, keys, *, mask):
    """Negative key positions taken for early ones."""
    p, j = masks.positions(queries), masks.positions(keys)
    return masks.visible(queries, moved(keys, np.where(j < 0, np.minimum(0, p.max(initial=0)), j)), mask=mask)


def first_position_sees_nothing(queries, keys, *, mask):
    return masks.visible(queries, keys, mask=mask) & (masks.positions(queries) != 0)[:, None]


def first_position_is_padding(queries, keys, *, mask):
    return masks.visible(queries, keys, mask=mask) & (masks.positions(keys) != 0)[None, :]


def positions_from_the_first(queries, keys, *, mask):
    """An array of positions taken for a run that starts at its first entry."""
    starts = [masks.positions(side) for side in (queries, keys)]
    runs = [moved(side, x[0] + np.arange(x.size)) if x.size else side for side, x in zip((queries, keys), starts, strict=True)]
    return masks.visible(*runs, mask=mask)


def all_keys_past_512(queries, keys, *, mask):
    seen = masks.visible(queries, keys, mask=mask).copy()
    seen[:, 512:] = (masks.positions(queries) >= 0)[:, None] & (masks.positions(keys) >= 0)[None, 512:]
    return seen


def expand_top_left(compressed: Compressed, *, query_len, kv_len):
    seen = masks.expand(compressed, query_len=query_len, kv_len=kv_len)
    i, j = np.arange(query_len)[:, None], np.arange(kv_len)[None]
    return j <= i if compressed.sparse_mode == 3 else seen


def expand_wraps_open_sides(compressed: Compressed, *, query_len, kv_len):
    """The edge as p + next_tokens in int32: an open side wraps to a negative number."""
    p, j = np.arange(kv_len - query_len, kv_len, dtype=np.int32)[:, None], np.arange(kv_len, dtype=np.int32)[None]
    if compressed.sparse_mode != 4:
        return masks.expand(compressed, query_len=query_len, kv_len=kv_len)
    with np.errstate(over="ignore"):
        return (j >= p - np.int32(compressed.pre_tokens)) & (j <= p + np.int32(compressed.next_tokens)) & (p >= 0)


def compressed_keeps_the_wider_window(*, mask):
    """A conjunction of windows takes the wider left edge."""
    lefts = [m.left for m in parts(mask) if isinstance(m, Window)]
    if band(mask) is None or None in lefts or len(lefts) < 2:
        return masks.compressed(mask=mask)
    return masks.compressed(mask=window(max(lefts), band(mask).right))


def compressed_window_is_causal(*, mask):
    form = masks.compressed(mask=mask)
    return form._replace(sparse_mode=3) if form.sparse_mode == 4 and form.next_tokens == 0 else form


def compressed_triangle_includes_the_diagonal(*, mask):
    form = masks.compressed(mask=mask)
    return form if form.atten_mask is None else form._replace(atten_mask=~np.tri(2048, k=-1, dtype=bool))


def parts(mask):
    return [*parts(mask.first), *parts(mask.second)] if hasattr(mask, "first") else [mask]


def _dense(see):
    return attention(Steps(see=see))


FAULTS = (
    Fault("causal_is_top_left", "causal alignment", "dense.attend", _dense(top_left), "rows are numbered from 0 on both sides"),
    Fault("ignores_positions", "ignored argument", "dense.attend", _dense(positions_from_the_first), "an array is taken for a run"),
    Fault("ignores_left_padding", "padding leak", "dense.attend", _dense(padding_keys_are_seen), "negative positions count as early ones"),
    Fault("mask_ignored_past_512", "block edge", "dense.attend", _dense(all_keys_past_512), "the mask of later blocks is not read"),
    Fault("first_query_sees_nothing", "causal edge", "masks.visible", first_position_sees_nothing, "position 0 is taken for padding"),
    Fault("first_key_is_unseen", "causal edge", "dense.attend", _dense(first_position_is_padding), "position 0 is taken for padding"),
    Fault("window_sees_one_more", "window edge", "masks.visible", window_sees_one_more, "a width is taken for a distance"),
    Fault("window_is_symmetric", "window edge", "masks.visible", window_is_symmetric, "left is used on both sides"),
    Fault("window_right_edge", "window edge", "masks.visible", window_stops_before_its_right_edge, "j < p + right"),
    Fault("window_open_side_is_zero", "window edge", "masks.visible", open_side_is_zero, "None is falsy, like 0"),
    Fault("dense_window_sees_one_more", "window edge", "dense.attend", _dense(window_sees_one_more), "a width is taken for a distance"),
    Fault("chunk_is_a_distance", "chunk", "masks.visible", chunk_of_the_past, "chunks are taken for windows"),
    Fault("label_zero_sees_all", "labels", "masks.visible", label_zero_sees_all, "0 is taken for no label"),
    Fault("tree_includes_its_exit", "labels", "masks.visible", tree_includes_its_exit, "entered <= exit"),
    Fault("either_is_both", "mask algebra", "masks.visible", either_is_both, "| is evaluated as &"),
    Fault("nested_operand_dropped", "mask algebra", "masks.visible", second_operand_is_dropped_in_nested_masks, "a fold skips an operand"),
    Fault("compressed_causal_is_top_left", "causal alignment", "masks.expand", expand_top_left, "the triangle starts at row 0"),
    Fault("expand_wraps_open_sides", "overflow", "masks.expand", expand_wraps_open_sides, "int32 wraps at p + INT32_MAX"),
    Fault("compressed_wider_window", "window edge", "masks.compressed", compressed_keeps_the_wider_window, "max where min was meant"),
    Fault("compressed_window_is_causal", "window edge", "masks.compressed", compressed_window_is_causal, "right = 0 is taken for causal"),
    Fault("compressed_hides_the_diagonal", "causal edge", "masks.compressed", compressed_triangle_includes_the_diagonal, "triu from 0"),
)
