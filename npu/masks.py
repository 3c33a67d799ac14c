"""Which keys a query sees: the rule as an array, and the compressed forms that fused operators take."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from fattn.types import Compressed, Mask, Range, Tokens
from npu._checks import check_devices, side
from npu._rules import sparse_mode, triangle, visible_on


def visible(queries, keys, *, mask: Mask) -> Bool[Tensor, "t s"]:
    """The rule of `mask` as an array: entry (i, j) says whether query i sees key j. Padding (negative positions) sees and shows nothing.

    `queries` and `keys` are a Range, Int32[n] positions, or Tokens where the mask reads labels. On the device of the tensors among them,
    torch's default device where both are ranges. Raises ValueError for a missing label.
    """
    check_devices({"queries": queries, "keys": keys})
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


def _device(*sides):
    for tokens in sides:
        labels = list(tokens.labels.values()) if isinstance(tokens, Tokens) else []
        arrays = labels if isinstance(side(tokens), Range) else [side(tokens), *labels]
        for array in arrays:
            if isinstance(array, Tensor):
                return array.device
    return None
