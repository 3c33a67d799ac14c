"""Faults in rotary embedding and in ALiBi."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fattn.conformance.faults.fault import Fault
from fattn.conformance.plain import dense, rope
from fattn.types import Range


def backwards(x, cos, sin):
    return rope.half(x, cos, -sin)


def across_the_head(x, cos, sin):
    """Pairs (i, i + d / 2) of the whole head, also where only its leading dims turn."""
    r, d = cos.shape[-1], x.shape[-1]
    if 2 * r == d:
        return rope.half(x, cos, sin)
    order = np.concatenate([np.arange(r), d // 2 + np.arange(r)])
    out = x.copy()
    out[..., order] = rope.half(np.ascontiguousarray(x[..., order]), cos, sin)
    return out


def last_dims_turn(x, cos, sin):
    """The turned dims are taken from the end of the head."""
    r = 2 * cos.shape[-1]
    out = x.copy()
    out[..., x.shape[-1] - r :] = rope.half(np.ascontiguousarray(x[..., x.shape[-1] - r :]), cos, sin)
    return out


def in_the_input_type(x, cos, sin):
    kind = x.dtype
    r = cos.shape[-1]
    cos, sin = cos[:, None].astype(kind), sin[:, None].astype(kind)
    a, b = x[..., :r], x[..., r : 2 * r]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * r :]], axis=-1).astype(kind)


def first_row_of_a_tile(x, cos, sin):
    """Every 64th row turns like the row before it."""
    rows = np.arange(x.shape[0])
    rows = np.where((rows % 64 == 0) & (rows > 0), rows - 1, rows)
    return rope.half(x, cos[rows], sin[rows])


def halves_come_out(x, cos, sin):
    """Neighbours are turned, but come back as two halves."""
    out, r = rope.interleaved(x, cos, sin), 2 * cos.shape[-1]
    out[..., :r] = np.concatenate([out[..., 0:r:2], out[..., 1:r:2]], axis=-1)
    return out


def rest_is_zero(x, cos, sin):
    out = rope.interleaved(x, cos, sin)
    out[..., 2 * cos.shape[-1] :] = 0
    return out


def one_table_for_each_element(x, cos, sin):
    """Tables repeated for halves, where neighbours share an angle."""
    r = cos.shape[-1]
    both = [np.concatenate([wave, wave], axis=-1)[:, None].astype(np.float32) for wave in (cos, sin)]
    turned = x[..., : 2 * r].astype(np.float32)
    partner = np.stack([-turned[..., 1::2], turned[..., 0::2]], axis=-1).reshape(turned.shape)
    return np.concatenate([(turned * both[0] + partner * both[1]).astype(x.dtype), x[..., 2 * r :]], axis=-1)


def positions_from_one(positions, frequencies, *, dtype):
    return rope.table(positions + 1, frequencies, dtype=dtype)


def angles_in_bfloat16(positions, frequencies, *, dtype):
    rounded = positions.astype(ml_dtypes.bfloat16).astype(frequencies.dtype)
    return rope.table(rounded, frequencies, dtype=dtype)


def table_ends_at_4096(positions, frequencies, *, dtype):
    """A table made for 4096 positions, read modulo its length."""
    return rope.table(positions % 4096, frequencies, dtype=dtype)


def cosine_for_sine(positions, frequencies, *, dtype):
    cos, sin = rope.table(positions, frequencies, dtype=dtype)
    return (cos, np.sqrt(1 - cos.astype(np.float32) ** 2).astype(dtype)) if positions.size else (cos, sin)


def exponent_of_pairs(rotary_size, *, theta):
    """theta^(-i / rotary_size): the exponent counts pairs, not dims."""
    return (theta ** -(np.arange(rotary_size // 2) / rotary_size)).astype(np.float32)


def exponent_over_size_less_two(rotary_size, *, theta):
    """The last frequency is 1 / theta itself."""
    return (theta ** -(np.arange(rotary_size // 2) / max(rotary_size // 2 - 1, 1))).astype(np.float32)


def frequencies_in_bfloat16(rotary_size, *, theta):
    return rope.frequencies(rotary_size, theta=theta).astype(ml_dtypes.bfloat16).astype(np.float32)


def yarn_divides_all(rotary_size, *, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    return rope.frequencies(rotary_size, theta=theta) / np.float32(factor)


def yarn_ramp_backwards(rotary_size, *, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    plain = rope.frequencies(rotary_size, theta=theta)
    right = rope.yarn(rotary_size, theta=theta, factor=factor, original_length=original_length, beta_fast=beta_fast, beta_slow=beta_slow)
    return (plain + plain / np.float32(factor) - right).astype(np.float32)


def yarn_ignores_betas(rotary_size, *, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    return rope.yarn(rotary_size, theta=theta, factor=factor, original_length=original_length)


def distance_without_sign(slopes, q_pos, k_pos):
    """-slope (p - j): right for keys of the past alone."""
    p, j = (dense.positions(side) for side in (q_pos, k_pos))
    return -slopes[:, None, None] * (p[:, None] - j[None]).astype(slopes.dtype)


def distance_of_rows(slopes, q_pos, k_pos):
    """The distance of rows where positions start later."""
    return dense.alibi(slopes, Range(0, dense.positions(q_pos).size), Range(0, dense.positions(k_pos).size))


def distance_in_the_slopes_type(slopes, q_pos, k_pos):
    p, j = (dense.positions(side) for side in (q_pos, k_pos))
    return (-slopes[:, None, None] * np.abs(p[:, None] - j[None]).astype(slopes.dtype)).astype(np.float32)


def slopes_of_a_power_of_two(heads):
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)


def extra_slopes_follow(heads):
    """The slopes beyond a power of two are the next of 2n's, not every second."""
    n = 2 ** int(np.floor(np.log2(heads)))
    twice = 2.0 ** (-4.0 * np.arange(1, 2 * n + 1) / n)
    return np.concatenate([dense.alibi_slopes(n), twice[: heads - n].astype(np.float32)])


def _half(name, kind, function, why):
    return Fault(name, kind, "rope.half", function, why)


FAULTS = (
    _half("turns_backwards", "rotary", backwards, "the sign of the sine"),
    _half("pairs_neighbours_for_halves", "rotary pairing", rope.interleaved, "one helper for two conventions"),
    _half("pairs_across_the_head", "rotary pairing", across_the_head, "d / 2 where half of the rotary size was meant"),
    _half("turns_the_last_dims", "rotary pairing", last_dims_turn, "the turned part is last in another model"),
    _half("turns_in_the_input_type", "low precision", in_the_input_type, "no cast to float32"),
    _half("first_row_of_a_tile_turns_like_the_last", "block edge", first_row_of_a_tile, "a table read one row early"),
    Fault("pairs_halves_for_neighbours", "rotary pairing", "rope.interleaved", rope.half, "one helper for two conventions"),
    Fault("turned_neighbours_come_out_in_halves", "layout", "rope.interleaved", halves_come_out, "no permutation back"),
    Fault("untouched_dims_are_zero", "rotary pairing", "rope.interleaved", rest_is_zero, "only what turns is stored"),
    Fault("tables_repeated_for_halves", "rotary pairing", "rope.interleaved", one_table_for_each_element, "cat where repeat was meant"),
    Fault("table_from_one", "rotary", "rope.table", positions_from_one, "positions count from 1"),
    Fault("table_positions_in_bfloat16", "low precision", "rope.table", angles_in_bfloat16, "positions beyond 256 are rounded"),
    Fault("table_ends_at_4096", "overflow", "rope.table", table_ends_at_4096, "a cached table is too short"),
    Fault("sine_without_sign", "rotary", "rope.table", cosine_for_sine, "sine made from cosine"),
    Fault("frequencies_of_pairs", "scale", "rope.frequencies", exponent_of_pairs, "2i / d written as i / d"),
    Fault("frequencies_reach_theta", "scale", "rope.frequencies", exponent_over_size_less_two, "linspace with its end"),
    Fault("frequencies_in_bfloat16", "low precision", "rope.frequencies", frequencies_in_bfloat16, "made in the model's type"),
    Fault("yarn_divides_all", "ignored argument", "rope.yarn", yarn_divides_all, "linear interpolation"),
    Fault("yarn_ramp_backwards", "rotary", "rope.yarn", yarn_ramp_backwards, "the blend's two ends swapped"),
    Fault("yarn_ignores_betas", "ignored argument", "rope.yarn", yarn_ignores_betas, "the defaults, whatever was asked for"),
    Fault("alibi_of_the_future_is_positive", "alibi", "dense.alibi", distance_without_sign, "no absolute value"),
    Fault("alibi_of_rows", "causal alignment", "dense.alibi", distance_of_rows, "rows are numbered from 0 on both sides"),
    Fault("alibi_in_the_slopes_type", "low precision", "dense.alibi", distance_in_the_slopes_type, "distances past 256 are rounded"),
    Fault("slopes_of_a_power_of_two", "alibi", "dense.alibi_slopes", slopes_of_a_power_of_two, "one formula for every head count"),
    Fault("extra_slopes_follow", "alibi", "dense.alibi_slopes", extra_slopes_follow, "the next, not every second"),
)
