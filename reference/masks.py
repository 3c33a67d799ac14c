"""Which keys a query sees, one query at a time, and the compressed forms that fused operators take."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from fattn.types import And, Causal, Chunk, Compressed, Full, Mask, Or, Same, Tokens, Tree, Unsupported, Window, band
from reference._checks import positions

Array = np.ndarray
INT32_MAX = 2**31 - 1
COMPRESSED_SIZE = 2048


def visible(queries, keys, *, mask: Mask) -> Bool[Array, "t s"]:
    """The rule of `mask` as an array: entry (i, j) says whether query i sees key j. Padding (negative positions) sees and shows nothing.

    `queries` and `keys` are a Range, Int32[n] positions, or Tokens where the mask reads labels. Raises ValueError for a missing label.
    """
    p, j = positions(queries), positions(keys)
    seen = np.zeros((len(p), len(j)), bool)
    for i, position in enumerate(p):
        if position >= 0:
            seen[i] = (j >= 0) & _rule(mask, i, position, j, queries, keys)
    return seen


def compressed(*, mask: Mask) -> Compressed:
    """The mask as operators take it whatever the length: sparse_mode 0 (no mask), 3 (causal, bottom-right) or 4 (band, bottom-right).

    `atten_mask` is Bool[2048 2048], True above the diagonal (True = hidden). Raises Unsupported for a mask that is not one band.
    Source: the documents of npu_fused_infer_attention_score.
    """
    limits = band(mask)
    if limits is None:
        raise Unsupported("mask", mask, "operators compress only causal and window masks", "pass masks.visible as an explicit mask")
    pre_tokens = INT32_MAX if limits.left is None else limits.left
    next_tokens = INT32_MAX if limits.right is None else limits.right
    if limits.left is None and limits.right is None:
        return Compressed(0, pre_tokens, next_tokens, None)
    columns = np.arange(COMPRESSED_SIZE)
    hidden = np.stack([columns > row for row in range(COMPRESSED_SIZE)])
    return Compressed(3 if limits.left is None and limits.right == 0 else 4, pre_tokens, next_tokens, hidden)


def expand(compressed: Compressed, *, query_len: int, kv_len: int) -> Bool[Array, "t s"]:
    """What a compressed mask lets `query_len` last queries of `kv_len` keys see: visible of the mask that it was made from."""
    seen, keys = np.zeros((query_len, kv_len), bool), np.arange(kv_len)
    for i in range(query_len):
        position = kv_len - query_len + i
        if position < 0:
            continue
        if compressed.sparse_mode == 0:
            seen[i] = True
        elif compressed.sparse_mode == 3:
            seen[i] = keys <= position
        else:
            seen[i] = (keys >= position - compressed.pre_tokens) & (keys <= position + compressed.next_tokens)
    return seen


def _rule(mask, i, p, j, queries, keys):
    """Which of the keys at positions j query i, which stands at position p, sees; padding apart."""
    match mask:
        case Full():
            return np.ones(j.shape, bool)
        case Causal():
            return j <= p
        case Window(left, right):
            first, last = -np.inf if left is None else p - left, np.inf if right is None else p + right
            return (first <= j) & (j <= last)
        case Chunk(size):
            return j // size == p // size
        case Same(label):
            return _label(keys, label, "keys") == _label(queries, label, "queries")[i]
        case Tree(enter, exit):
            entered = _label(queries, enter, "queries")[i]
            return (_label(keys, enter, "keys") <= entered) & (entered < _label(keys, exit, "keys"))
        case And(first, second):
            return _rule(first, i, p, j, queries, keys) & _rule(second, i, p, j, queries, keys)
        case Or(first, second):
            return _rule(first, i, p, j, queries, keys) | _rule(second, i, p, j, queries, keys)
    raise TypeError(f"mask must be made by fattn.types (causal(), window(...), ...), got {mask!r}")


def _label(tokens, name, side):
    """The label `name` of one side, one value a position."""
    if not isinstance(tokens, Tokens) or name not in tokens.labels:
        raise ValueError(f"the mask reads label {name!r}: pass {side} as Tokens(pos, labels={{{name!r}: ...}})")
    label, count = np.asarray(tokens.labels[name]), positions(tokens).shape[0]
    if label.shape != (count,):
        raise ValueError(f"{side} label {name!r} has shape {list(label.shape)}, but there are {count} positions")
    return label
