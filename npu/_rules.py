"""Mask rules as tensors that broadcast, and the modes in which an operator takes a mask."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool
from torch import Tensor

from fattn.types import And, Causal, Chunk, Full, Mask, Or, Same, Tokens, Tree, Unsupported, Window, band
from npu._checks import count, positions

INT32_MAX = 2**31 - 1
COMPRESSED_SIZE = 2048


def visible_on(queries, keys, *, mask: Mask, device) -> Bool[Tensor, "t s"]:
    """masks.visible, with ranges counted out on `device`."""
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
