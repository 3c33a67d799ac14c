"""Rotary embedding: half and interleaved pairing, YaRN."""

from __future__ import annotations

import math

import numpy as np


def frequencies(rotary_size: int, *, theta: float):
    """theta^(-2i / rotary_size), Float32[rotary_size/2]."""
    return (theta ** -(np.arange(0, rotary_size, 2) / rotary_size)).astype(np.float32)


def yarn(rotary_size: int, *, theta: float, factor: float, original_length: int, beta_fast: float = 32.0, beta_slow: float = 1.0):
    """Frequencies that turn often kept, those that turn seldom divided by factor, a ramp between: Float32[rotary_size/2]."""
    low, high = (rotary_size * math.log(original_length / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (beta_fast, beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), rotary_size - 1)
    ramp = np.clip((np.arange(rotary_size // 2) - low) / max(high - low, 0.001), 0, 1)
    plain = theta ** -(np.arange(0, rotary_size, 2) / rotary_size)
    return (plain * (1 - ramp) + plain / factor * ramp).astype(np.float32)


def table(positions, frequencies, *, dtype):
    """(cos, sin), each [t rotary_size/2]."""
    angle = positions.astype(frequencies.dtype)[:, None] * frequencies
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def half(x, cos, sin):
    """Pairs (i, i + r) of the leading 2r dims turned."""
    r = cos.shape[-1]
    return _turned(x, cos, sin, slice(0, r), slice(r, 2 * r))


def interleaved(x, cos, sin):
    """Pairs (2i, 2i + 1) of the leading 2r dims turned."""
    end = 2 * cos.shape[-1]
    return _turned(x, cos, sin, slice(0, end, 2), slice(1, end, 2))


def _turned(x, cos, sin, first, second):
    kind = np.float64 if x.dtype == np.float64 else np.float32
    out = x.astype(kind)
    a, b, cos, sin = out[..., first].copy(), out[..., second].copy(), cos[:, None].astype(kind), sin[:, None].astype(kind)
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out.astype(x.dtype)
