"""Which keys a query sees: the rule as an array, and the compressed forms that fused operators take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool
from torch import Tensor

from fattn.types import And, Causal, Chunk, Compressed, Full, Mask, Or, Range, Same, Tokens, Tree, Unsupported, Window, band
from npu._checks import count, positions, side

INT32_MAX = 2**31 - 1
COMPRESSED_SIZE = 2048


def visible(queries, keys, *, mask: Mask) -> Bool[Tensor, "t s"]:
    """The rule of `mask` as an array: entry (i, j) says whether query i sees key j. Padding (negative positions) sees and shows nothing.

    `queries` and `keys` are a Range, Int32[n] positions, or Tokens where the mask reads labels. On the device of the tensors among them,
    torch's default device where both are ranges. Raises ValueError for a missing label.
    """
    return visible_on(queries, keys, mask=mask, device=_device(queries, keys))


def compressed(*, mask: Mask) -> Compressed:
    """The mask as operators take it whatever the length: sparse_mode 0 (no mask), 3 (causal, bottom-right) or 4 (band, bottom-right).

    `atten_mask` is Bool[2048 2048], True above the diagonal (True = hidden). Raises Unsupported for a mask that is not one band.
    Source: the documents of npu_fused_infer_attention_score.
    """
    mode, left, right = sparse_mode(mask)
    return Compressed(mode, left, right, triangle(None) if mode else None)


def expand(compressed: Compressed, *, query_len: int, kv_len: int) -> Bool[Tensor, "t s"]:
    """What a compressed mask lets `query_len` last queries of `kv_len` keys see: visible of the mask that it was made from."""
    p = (kv_len - query_len + torch.arange(query_len, dtype=torch.int32))[:, None]
    j = torch.arange(kv_len, dtype=torch.int32)[None, :]
    if compressed.sparse_mode == 0:
        return (p >= 0).expand(query_len, kv_len)
    if compressed.sparse_mode == 3:
        return j <= p
    # differences, not sums: p + INT32_MAX would wrap
    return (p - j <= compressed.pre_tokens) & (j - p <= compressed.next_tokens) & (p >= 0)


def visible_on(queries, keys, *, mask: Mask, device) -> Bool[Tensor, "t s"]:
    """`visible` with ranges counted out on `device`."""
    p, j = positions(queries, device)[:, None], positions(keys, device)[None, :]
    return (p >= 0) & (j >= 0) & rule(mask, p, j, _labels(mask, queries, "queries"), _labels(mask, keys, "keys"))


def sparse_mode(mask: Mask) -> tuple[int, int, int]:
    """(sparse_mode, pre_tokens, next_tokens) of a mask that is one band. Raises Unsupported for any other."""
    one = band(mask)
    if one is None:
        raise Unsupported("mask", mask, "operators compress only causal and window masks", "pass masks.visible as an explicit mask")
    left, right = (INT32_MAX if bound is None else bound for bound in one)
    return (0 if one == (None, None) else 3 if one == (None, 0) else 4), left, right


def triangle(device) -> Bool[Tensor, "2048 2048"]:
    """What sparse modes 3 and 4 take as the mask, whatever the length: True (hidden) above the diagonal."""
    return torch.ones((COMPRESSED_SIZE, COMPRESSED_SIZE), dtype=torch.bool, device=device).triu(1)


def rule(mask: Mask, p: Tensor, j: Tensor, query_labels: Mapping[str, Tensor], key_labels: Mapping[str, Tensor]) -> Tensor:
    """Whether a query at p[..., t, 1] sees the key at j[..., 1, s], padding apart: Bool[... t s]. Labels are [... t] and [... s]."""
    match mask:
        case Full():
            return torch.ones(torch.broadcast_shapes(p.shape, j.shape), dtype=torch.bool, device=p.device)
        case Causal():
            return j <= p
        case Window(left, right):
            inside = torch.ones(torch.broadcast_shapes(p.shape, j.shape), dtype=torch.bool, device=p.device)
            if left is not None:
                inside = inside & (p - j <= left)
            return inside if right is None else inside & (j - p <= right)
        case Chunk(size):
            return torch.div(p, size, rounding_mode="floor") == torch.div(j, size, rounding_mode="floor")
        case Same(label):
            return query_labels[label][..., :, None] == key_labels[label][..., None, :]
        case Tree(enter, exit):
            entered = query_labels[enter][..., :, None]
            return (key_labels[enter][..., None, :] <= entered) & (entered < key_labels[exit][..., None, :])
        case And(first, second):
            return rule(first, p, j, query_labels, key_labels) & rule(second, p, j, query_labels, key_labels)
        case Or(first, second):
            return rule(first, p, j, query_labels, key_labels) | rule(second, p, j, query_labels, key_labels)
    raise TypeError(f"mask must be made by fattn.types (causal(), window(...), ...), got {mask!r}")


def _labels(mask, tokens, side_name):
    read = mask.labels() if isinstance(mask, Mask) else ()
    return {name: _label(tokens, name, side_name) for name in read}


def _label(tokens, name, side_name):
    if not isinstance(tokens, Tokens) or name not in tokens.labels:
        raise ValueError(f"the mask reads label {name!r}: pass {side_name} as Tokens(pos, labels={{{name!r}: ...}})")
    labels = tokens.labels[name]
    if tuple(labels.shape) != (count(tokens),):
        raise ValueError(f"{side_name} label {name!r} has shape {list(labels.shape)}, but there are {count(tokens)} positions")
    return labels


def _device(*sides):
    for tokens in sides:
        labels = list(tokens.labels.values()) if isinstance(tokens, Tokens) else []
        arrays = labels if isinstance(side(tokens), Range) else [side(tokens), *labels]
        for array in arrays:
            if isinstance(array, Tensor):
                return array.device
    return None
