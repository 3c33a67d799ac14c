"""Rotary position embedding: frequencies (YaRN included), a table of cosines and sines, and the two ways of pairing dimensions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from fattn import _checks


def frequencies(rotary_size: int, *, theta: float) -> Float[Array, "rotary_size/2"]:
    """The turn of each pair per position, f_i = theta^(-2i / rotary_size), in radians, float32. Raises ValueError for an odd size.

    Source: Su et al. 2021, "RoFormer".
    """
    return jnp.asarray(_frequencies(rotary_size, theta), jnp.float32)


def yarn(
    rotary_size: int, *, theta: float, factor: float, original_length: int, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> Float[Array, "rotary_size/2"]:
    """Frequencies stretched for contexts `factor` times longer than `original_length`, in radians per position, float32.

    A pair that turns more than `beta_fast` times within original_length keeps its frequency, one that turns less than `beta_slow` times
    has it divided by `factor`, and a linear ramp over the pair's index joins the two. The softmax scale is the caller's. Raises
    ValueError for an odd size or a factor below 1. Source: Peng et al. 2023, "YaRN"; the index range is rounded as in DeepSeek-V3's code.
    """
    if not factor >= 1:
        raise ValueError(f"factor must be at least 1, got {factor!r}")
    plain = _frequencies(rotary_size, theta)

    def index_of(turns):
        return rotary_size * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index_of(beta_fast)), 0), min(math.ceil(index_of(beta_slow)), rotary_size - 1)
    ramp = np.clip((np.arange(rotary_size // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return jnp.asarray(plain / factor * ramp + plain * (1 - ramp), jnp.float32)


def table(
    positions: Int32[Array, "t"], frequencies: Float[Array, "rotary_size/2"], *, dtype
) -> tuple[Float[Array, "t rotary_size/2"], Float[Array, "t rotary_size/2"]]:
    """Cosine and sine of position times frequency, in `dtype`; the angle itself is made in float32 (float64 for float64)."""
    accumulator = jnp.promote_types(dtype, jnp.float32)
    angle = _checks.positions(positions).astype(accumulator)[:, None] * jnp.asarray(frequencies).astype(accumulator)
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def half(x: Float[Array, "t h d"], cos: Float[Array, "t rotary_size/2"], sin: Float[Array, "t rotary_size/2"]) -> Float[Array, "t h d"]:
    """x with its leading rotary_size dims turned, pairs (i, i + rotary_size/2); the other dims pass unchanged (GPT-NeoX's pairing).

    Arithmetic in float32 (float64 for float64), result in x's dtype. Raises ValueError where x and the table do not fit together.
    """
    x, cos, sin, size = _operands(x, cos, sin)
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    turned = _turn(first, second, cos, sin)
    return jnp.concatenate([*turned, x[..., size:]], -1)


def interleaved(
    x: Float[Array, "t h d"], cos: Float[Array, "t rotary_size/2"], sin: Float[Array, "t rotary_size/2"]
) -> Float[Array, "t h d"]:
    """x with its leading rotary_size dims turned, pairs (2i, 2i + 1), same layout out; the other dims pass unchanged (GPT-J's pairing).

    Arithmetic in float32 (float64 for float64), result in x's dtype. Raises ValueError where x and the table do not fit together.
    """
    x, cos, sin, size = _operands(x, cos, sin)
    turned = jnp.stack(_turn(x[..., 0:size:2], x[..., 1:size:2], cos, sin), -1)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], size), x[..., size:]], -1)


def _frequencies(rotary_size, theta):
    if rotary_size < 2 or rotary_size % 2:
        raise ValueError(f"rotary_size must be even and positive, got {rotary_size}")
    return theta ** (-2.0 * np.arange(rotary_size // 2) / rotary_size)


def _operands(x, cos, sin):
    x, cos, sin = jnp.asarray(x), jnp.asarray(cos), jnp.asarray(sin)
    _checks.check_rows("x", x)
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != x.shape[0]:
        raise ValueError(f"cos and sin must be [tokens, pairs] for {x.shape[0]} tokens, got {list(cos.shape)} and {list(sin.shape)}")
    size = 2 * cos.shape[1]
    if size > x.shape[2]:
        raise ValueError(f"cos holds {cos.shape[1]} pairs, but x has only {x.shape[2]} dims a head")
    return x, cos[:, None, :], sin[:, None, :], size


def _turn(first, second, cos, sin):
    accumulator = jnp.promote_types(first.dtype, jnp.float32)
    a, b, cos, sin = (y.astype(accumulator) for y in (first, second, cos, sin))
    return (a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(first.dtype)
