"""Rotary embedding: half and interleaved pairing, YaRN."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int32

from reference._checks import dtype, shape
from reference._checks import positions as positions_of
from reference.bounded import FLOAT32, KAPPA, SLACK, Bounded, Precision, accumulator, bounded, cast, constant, finite

Array = np.ndarray


def frequencies(rotary_size: int, *, theta: float, precision: Precision = FLOAT32) -> Bounded:
    """Angles that each pair turns per position, theta^(-2i / rotary_size) radians for i = 0..rotary_size/2 - 1: Bounded [rotary_size/2].

    theta^e for an exponent rounded by u: off by u |e| ln(theta), and KAPPA u of the power itself. Raises ValueError for an odd size.
    Source: Su et al. 2021, "RoFormer".
    """
    _check_size(rotary_size)
    exponents = [-2.0 * i / rotary_size for i in range(rotary_size // 2)]
    value = np.array([theta**e for e in exponents])
    relative = KAPPA * constant(precision) * (np.abs(exponents) * abs(math.log(theta)) + 2)
    return Bounded(value, relative * value)


def yarn(
    rotary_size: int,
    *,
    theta: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    precision: Precision = FLOAT32,
) -> Bounded:
    """YaRN's frequencies: over beta_fast turns within original_length they stay, under beta_slow turns they are divided by factor.

    Between the two a linear ramp over the index blends them. Radians per position, Bounded [rotary_size/2]. cos and sin are not scaled:
    the softmax scale is where a model applies its mscale. Raises ValueError for an odd size or a factor below 1.
    Source: Peng et al. 2023, "YaRN"; DeepSeek-V3's inference code.
    """
    if not factor >= 1:
        raise ValueError(f"factor must be at least 1, got {factor!r}")
    plain = frequencies(rotary_size, theta=theta, precision=precision)
    low = max(math.floor(_turning(beta_fast, rotary_size, theta, original_length)), 0)
    high = min(math.ceil(_turning(beta_slow, rotary_size, theta, original_length)), rotary_size - 1)
    width = high - low if high != low else 0.001
    value, bound = np.zeros(rotary_size // 2), np.zeros(rotary_size // 2)
    for i in range(rotary_size // 2):
        slowed = min(max((i - low) / width, 0.0), 1.0)
        kept, divided = plain.value[i], plain.value[i] / factor
        value[i] = kept * (1 - slowed) + divided * slowed
        blending = KAPPA * constant(precision) * max(kept, divided) * (slowed > 0)
        bound[i] = plain.bound[i] / kept * value[i] + blending
    return Bounded(value, bound)


def table(
    positions: Int32[Array, "t"], frequencies: Float[Array, "rotary_size/2"], *, dtype, precision: Precision = FLOAT32
) -> tuple[Bounded, Bounded]:
    """(cos, sin) of position times frequency, each Bounded [t rotary_size/2], in `dtype`.

    The angle is off by |position| times the frequency's bound and by KAPPA u of itself (the product, and reducing it to one turn);
    neither cosine nor sine is steeper than 1.
    """
    frequencies = bounded(frequencies)
    at = positions_of(positions)[:, None]
    angle = at * frequencies.value
    off = np.abs(at) * frequencies.bound + KAPPA * accumulator(precision) * (np.abs(angle) + 1)
    return tuple(cast(Bounded(wave(angle), np.minimum(off, 2.0)), dtype) for wave in (np.cos, np.sin))


def half(
    x: Float[Array, "t h d"],
    cos: Float[Array, "t rotary_size/2"],
    sin: Float[Array, "t rotary_size/2"],
    *,
    precision: Precision = FLOAT32,
) -> Bounded:
    """`x` with its leading rotary_size dims turned, pairs (i, i + rotary_size/2): Bounded, of x's shape. Other dims pass unchanged.

    A plain x comes back rounded to its own dtype; a Bounded one is left unrounded.
    """
    return _turned(x, cos, sin, lambda i, r: (i, i + r), precision)


def interleaved(
    x: Float[Array, "t h d"],
    cos: Float[Array, "t rotary_size/2"],
    sin: Float[Array, "t rotary_size/2"],
    *,
    precision: Precision = FLOAT32,
) -> Bounded:
    """`x` with its leading rotary_size dims turned, pairs (2i, 2i + 1), same layout: Bounded, of x's shape. Other dims pass unchanged.

    A plain x comes back rounded to its own dtype; a Bounded one is left unrounded.
    """
    return _turned(x, cos, sin, lambda i, r: (2 * i, 2 * i + 1), precision)


def _turned(x, cos, sin, pair, precision):
    """(a, b) -> (a cos - b sin, b cos + a sin) for every pair: two products and a sum, each rounded by u of its size."""
    _check(x, cos, sin)
    kind = None if isinstance(x, Bounded) else dtype(x)
    x, cos, sin = bounded(x), bounded(cos), bounded(sin)
    value, bound = x.value.copy(), x.bound.copy()
    r = cos.value.shape[1]
    for i in range(r):
        first, second = pair(i, r)
        a, b = (Bounded(x.value[..., d], x.bound[..., d]) for d in (first, second))
        c, s = (Bounded(wave.value[:, i, None], wave.bound[:, i, None]) for wave in (cos, sin))
        for d, terms in ((first, ((a, c, 1), (b, s, -1))), (second, ((b, c, 1), (a, s, 1)))):
            value[..., d] = sum(sign * m.value * w.value for m, w, sign in terms)
            size = sum(np.abs(m.value * w.value) for m, w, _ in terms)
            inherited = sum((np.abs(m.value) + m.bound) * w.bound + m.bound * np.abs(w.value) for m, w, _ in terms)
            bound[..., d] = SLACK * 2 * accumulator(precision) * size + inherited
    finite("x", value)
    turned = Bounded(value, bound)
    if kind is None:
        return turned
    rounded = cast(turned, kind)
    rounded.bound[..., 2 * r :] = bound[..., 2 * r :]
    return rounded


def _turning(times: float, rotary_size: int, theta: float, length: int) -> float:
    """The index (a real number) of the pair that turns `times` times within `length` positions."""
    return rotary_size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))


def _check_size(rotary_size):
    if rotary_size < 2 or rotary_size % 2:
        raise ValueError(f"rotary_size must be even and at least 2, since dims turn in pairs; got {rotary_size}")


def _check(x, cos, sin):
    if len(shape(x)) != 3:
        raise ValueError(f"x must be [rows, heads, size], got shape {list(shape(x))}")
    if shape(cos) != shape(sin) or len(shape(cos)) != 2 or shape(cos)[0] != shape(x)[0] or 2 * shape(cos)[1] > shape(x)[2]:
        raise ValueError(
            f"cos {list(shape(cos))} and sin {list(shape(sin))} must both be [rows, turned pairs] for x {list(shape(x))}; "
            "layout of x is [rows, heads, size]"
        )
