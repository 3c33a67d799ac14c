"""Faults in scores and biases of dense.attend: order, scale, ignored arguments, heads, low precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fattn.conformance.faults.fault import Fault, Steps, attention
from fattn.conformance.plain import dense


def cap_after_the_bias(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    if softcap is None:
        return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale)
    capped = lambda z, added, seen: softcap * np.tanh((z + np.where(seen, added, 0)) / softcap).astype(z.dtype)
    if bias is None:
        return dense.attend(q, k, v, q_pos, k_pos, mask=mask, scale=scale, softcap=softcap)
    return attention(Steps(add=capped))(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale)


def cap_after_the_mask(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    if softcap is None:
        return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale)

    def leaking(z, seen, values):
        everywhere = np.broadcast_to(seen.any(-1, keepdims=True), seen.shape)
        return dense.softmax(np.where(seen, z, -softcap).astype(z.dtype), everywhere, values)

    return attention(Steps(softmax=leaking))(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def cap_before_the_scale(q, k, *, scale, softcap):
    if softcap is None:
        return dense.scores(q, k, scale=scale, softcap=None)
    return (scale * dense.scores(q, k, scale=1.0, softcap=softcap)).astype(dense.accumulation(q.dtype))


def scale_of_the_head_size(q, k, *, scale, softcap):
    return dense.scores(q, k, scale=q.shape[-1] ** -0.5, softcap=softcap)


def scale_in_bfloat16(q, k, *, scale, softcap):
    return dense.scores(q, k, scale=float(ml_dtypes.bfloat16(scale)), softcap=softcap)


def scores_in_bfloat16(q, k, *, scale, softcap):
    return dense.scores(q, k, scale=scale, softcap=softcap).astype(ml_dtypes.bfloat16).astype(dense.accumulation(q.dtype))


def last_dim_dropped(q, k, *, scale, softcap):
    """Sixteen dims at a time: what is left over is not multiplied."""
    whole = max(q.shape[-1] // 16 * 16, 1)
    return dense.scores(q[..., :whole], k[..., :whole], scale=scale, softcap=softcap)


def tiled(rows, heads):
    return np.tile(rows, (1, heads // rows.shape[1], 1))


def first_key_head_for_odd_ratios(rows, heads):
    ratio = heads // rows.shape[1]
    return dense.repeated(rows[:, :1] if ratio > 1 and ratio % 2 else rows, heads)


def heads_past_sixteen_repeat(rows, heads):
    whole = dense.repeated(rows, heads)
    return whole[:, np.arange(heads) % 16]


def last_group_of_one_head(rows, heads):
    """With one key head for all, the last query head is left out of the group, and reads zeros."""
    whole = dense.repeated(rows, heads).copy()
    if rows.shape[1] == 1 and heads > 1:
        whole[:, -1] = 0
    return whole


def bias_of_the_key_head(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    if bias is not None and bias.ndim == 3 and bias.shape[0] > 1:
        ratio = q.shape[1] // k.shape[1]
        bias = bias[np.arange(q.shape[1]) // ratio]
    return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def bias_hides_for_every_head(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    if bias is not None and bias.ndim == 3 and np.isneginf(bias).any():
        bias = np.where(np.isneginf(bias).any(0), -np.inf, bias).astype(bias.dtype)
    return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def bias_of_one_column_dropped(bias, shape):
    return np.broadcast_to(0 * bias if bias.shape[-1] == 1 and shape[-1] > 1 else bias, shape)


def bias_of_one_row_for_the_first_query(bias, shape):
    """A bias without a query axis is added to the first query alone."""
    whole = np.broadcast_to(bias, shape).copy()
    if bias.ndim == 1 or bias.shape[-2] == 1:
        whole[:, 1:] = np.where(np.isneginf(whole[:, 1:]), whole[:, 1:], 0)
    return whole


def bias_is_scaled(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    scaled = lambda z, added, seen: z + (scale * np.where(seen, added, 0)).astype(z.dtype)
    return attention(Steps(add=scaled))(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def without_bias(z, bias, seen):
    return z


def bias_in_bfloat16(z, bias, seen):
    return z + np.where(seen, bias, 0).astype(ml_dtypes.bfloat16).astype(z.dtype)


def _fault(name, kind, function, why):
    return Fault(name, kind, "dense.attend", function, why)


FAULTS = (
    _fault("softcap_after_the_mask", "softcap order", cap_after_the_mask, "tanh turns -inf into -cap"),
    _fault("softcap_after_the_bias", "softcap order", cap_after_the_bias, "the cap comes last"),
    _fault("softcap_before_the_scale", "softcap order", attention(Steps(score=cap_before_the_scale)), "the scale comes last"),
    _fault("scale_ignored", "scale", attention(Steps(score=scale_of_the_head_size)), "1 / sqrt(d), whatever was asked for"),
    _fault("scale_in_bfloat16", "low precision", attention(Steps(score=scale_in_bfloat16)), "the scale is a tensor of the input's type"),
    _fault("scores_in_bfloat16", "low precision", attention(Steps(score=scores_in_bfloat16)), "no preferred_element_type"),
    _fault("last_dims_dropped", "block edge", attention(Steps(score=last_dim_dropped)), "a vector loop without its tail"),
    _fault("heads_are_tiled", "head map", attention(Steps(expand=tiled)), "h mod Hkv"),
    _fault("first_key_head_for_odd_ratios", "head map", attention(Steps(expand=first_key_head_for_odd_ratios)), "groups by shifts"),
    _fault("heads_past_sixteen_repeat", "head map", attention(Steps(expand=heads_past_sixteen_repeat)), "a table of 16 heads"),
    _fault("last_head_of_one_group", "head map", attention(Steps(expand=last_group_of_one_head)), "a loop over heads - 1"),
    _fault("bias_of_the_key_head", "bias broadcast", bias_of_the_key_head, "the head axis is taken for the key heads'"),
    _fault("bias_hides_for_every_head", "bias broadcast", bias_hides_for_every_head, "hidden keys are read from one head"),
    _fault("bias_of_one_column_dropped", "bias broadcast", attention(Steps(broadcast=bias_of_one_column_dropped)), "seen in lse alone"),
    _fault("bias_of_one_row", "bias broadcast", attention(Steps(broadcast=bias_of_one_row_for_the_first_query)), "a row is not broadcast"),
    _fault("bias_is_scaled", "scale", bias_is_scaled, "the scale is multiplied in last"),
    _fault("ignores_bias", "ignored argument", attention(Steps(add=without_bias)), "the bias hides keys but is not added"),
    _fault("bias_in_bfloat16", "low precision", attention(Steps(add=bias_in_bfloat16)), "the bias is cast to a kernel's type"),
)
