"""Which keys a query sees: the rule as an array, and the compressed forms that fused operators take."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool

from fattn._checks import positions
from fattn.types import And, Causal, Chunk, Compressed, Full, Mask, Or, Same, Tokens, Tree, Unsupported, Window, band

INT32_MAX = 2**31 - 1
COMPRESSED_SIZE = 2048


def visible(queries, keys, *, mask: Mask) -> Bool[Array, "t s"]:
    """The rule of `mask` as an array: entry (i, j) says whether query i sees key j. Padding (negative positions) sees and shows nothing.

    `queries` and `keys` are a Range, Int32[n] positions, or Tokens where the mask reads labels. Raises ValueError for a missing label.
    """
    p, j = positions(queries)[:, None], positions(keys)[None, :]
    return (p >= 0) & (j >= 0) & _rule(mask, p, j, queries, keys)


def compressed(*, mask: Mask) -> Compressed:
    """The mask as operators take it whatever the length: sparse_mode 0 (no mask), 3 (causal, bottom-right) or 4 (band, bottom-right).

    `atten_mask` is Bool[2048 2048], True above the diagonal (True = hidden). Raises Unsupported for a mask that is not one band.
    Source: the documents of npu_fused_infer_attention_score.
    """
    one = band(mask)
    if one is None:
        raise Unsupported("mask", mask, "operators compress only causal and window masks", "pass masks.visible as an explicit mask")
    left, right = (INT32_MAX if side is None else side for side in one)
    if one == (None, None):
        return Compressed(0, left, right, None)
    triangle = jnp.triu(jnp.ones((COMPRESSED_SIZE, COMPRESSED_SIZE), bool), 1)
    return Compressed(3 if one == (None, 0) else 4, left, right, triangle)


def expand(compressed: Compressed, *, query_len: int, kv_len: int) -> Bool[Array, "t s"]:
    """What a compressed mask lets `query_len` last queries of `kv_len` keys see: visible of the mask that it was made from."""
    p, j = (kv_len - query_len + jnp.arange(query_len))[:, None], jnp.arange(kv_len)[None, :]
    if compressed.sparse_mode == 0:
        return jnp.broadcast_to(p >= 0, (query_len, kv_len))
    if compressed.sparse_mode == 3:
        return j <= p
    # differences, not sums: p + INT32_MAX would wrap
    return (p - j <= compressed.pre_tokens) & (j - p <= compressed.next_tokens) & (p >= 0)


def _rule(mask, p, j, queries, keys):
    match mask:
        case Full():
            return jnp.ones(jnp.broadcast_shapes(p.shape, j.shape), bool)
        case Causal():
            return j <= p
        case Window(left, right):
            inside = jnp.ones(jnp.broadcast_shapes(p.shape, j.shape), bool)
            if left is not None:
                inside &= p - j <= left
            return inside if right is None else inside & (j - p <= right)
        case Chunk(size):
            return p // size == j // size
        case Same(label):
            return _label(queries, label, "queries")[:, None] == _label(keys, label, "keys")[None, :]
        case Tree(enter, exit):
            entered = _label(queries, enter, "queries")[:, None]
            return (_label(keys, enter, "keys")[None, :] <= entered) & (entered < _label(keys, exit, "keys")[None, :])
        case And(first, second):
            return _rule(first, p, j, queries, keys) & _rule(second, p, j, queries, keys)
        case Or(first, second):
            return _rule(first, p, j, queries, keys) | _rule(second, p, j, queries, keys)
    raise TypeError(f"mask must be made by fattn.types (causal(), window(...), ...), got {mask!r}")


def _label(tokens, name, side):
    if not isinstance(tokens, Tokens) or name not in tokens.labels:
        raise ValueError(f"the mask reads label {name!r}: pass {side} as Tokens(pos, labels={{{name!r}: ...}})")
    labels = jnp.asarray(tokens.labels[name])
    count = positions(tokens).shape[0]
    if labels.shape != (count,):
        raise ValueError(f"{side} label {name!r} has shape {list(labels.shape)}, but there are {count} positions")
    return labels
