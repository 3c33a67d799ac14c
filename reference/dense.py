"""Attention over keys held whole, one query of one head at a time."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from fattn.types import Mask, Partial
from reference._checks import check_attend, dtype, positions, shape
from reference.bounded import (
    FLOAT32,
    KAPPA,
    LARGEST_EXPONENT,
    ROUNDOFF,
    SLACK,
    Bounded,
    Precision,
    accumulator,
    bounded,
    constant,
    finite,
    growth,
    underflow,
)
from reference.masks import visible

Array = np.ndarray


def attend(
    q: Float[Array, "t h d"],
    k: Float[Array, "s hk d"],
    v: Float[Array, "s hk dv"],
    q_pos,
    k_pos,
    bias: Float[Array, "#h #t #s"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    precision: Precision = FLOAT32,
) -> Bounded:
    """Softmax attention of every query over the keys that `mask` lets it see: out = sum_j e^(z_j - lse) v_j, lse = ln sum_j e^(z_j).

    z = scale q.k, then softcap tanh(z / softcap) where given, then + bias (broadcast against [h t s]; -inf hides a key).
    Query head h reads key head h // (h_q / h_k). Positions are a Range, Int32[n], or Tokens where the mask reads labels.
    The result is Bounded(Partial, Partial). Raises ValueError for shapes, dtypes or positions that do not fit together, and where a
    place that some query reads is not finite.
    """
    check_attend(q, k, v, q_pos, k_pos, softcap=softcap)
    bias = None if bias is None else _bias(bias, (shape(q)[1], shape(q)[0], shape(k)[0]))
    q, k, v = bounded(q), bounded(k), bounded(v)
    (queries, heads, _), (_, kv_heads, value_size) = q.value.shape, v.value.shape
    seen = visible(q_pos, k_pos, mask=mask)
    out, lse = np.zeros((queries, heads, value_size)), np.full((queries, heads), -np.inf)
    out_bound, lse_bound = np.zeros(out.shape), np.zeros(lse.shape)
    # Query heads of one key head see the same keys, unless a bias hides some from one of them.
    together = heads // kv_heads if bias is None else 1
    for i in range(queries):
        for first in range(0, heads, together):
            rows = np.flatnonzero(seen[i] if bias is None else seen[i] & (bias.value[first, i] != -np.inf))
            if rows.size == 0:
                continue
            head, group = first * kv_heads // heads, slice(first, first + together)
            keys, values = (Bounded(x.value[rows, head], x.bound[rows, head]) for x in (k, v))
            added = None if bias is None else Bounded(bias.value[group, i, rows], bias.bound[group, i, rows])
            z = _scores(Bounded(q.value[i, group], q.bound[i, group]), keys, added, scale=scale, softcap=softcap, precision=precision)
            value, bound = _softmax(z, values, precision=precision)
            out[i, group], lse[i, group] = value
            out_bound[i, group], lse_bound[i, group] = bound
    finite("out", out)
    return Bounded(Partial(out, lse), Partial(out_bound, lse_bound))


def alibi(slopes: Float[Array, "h"], q_pos, k_pos, *, precision: Precision = FLOAT32) -> Bounded:
    """ALiBi's bias, -slope |p - j|, for `attend`: Bounded [h t s]. Positions as in `attend`."""
    slopes = bounded(slopes)
    distance = np.abs(positions(q_pos)[:, None] - positions(k_pos)[None, :])
    value = -slopes.value[:, None, None] * distance
    rounding = (constant(precision) + precision.bias) * np.abs(value)
    return Bounded(value, slopes.bound[:, None, None] * distance + rounding)


def alibi_slopes(heads: int, *, precision: Precision = FLOAT32) -> Bounded:
    """ALiBi's geometric slopes, 2^(-8 i / n) for i = 1..n with n the power of two at or below `heads`, then every second of 2n's.

    Raises ValueError for no heads. Source: Press et al. 2022, "Train Short, Test Long".
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads!r}")
    n = 1
    while 2 * n <= heads:
        n *= 2
    slopes = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    of_twice_as_many = [2.0 ** (-8.0 * i / (2 * n)) for i in range(1, 2 * n + 1)]
    value = np.array(slopes + of_twice_as_many[0::2][: heads - n])
    return Bounded(value, KAPPA * constant(precision) * value)


def _scores(q, k, bias, *, scale, softcap, precision) -> Bounded:
    """Scores of one query of some heads [g d] over its visible keys [n d], and dz: by how much an implementation's may differ. [g n].

    The product: u A(D) |scale| sum |q||k|, which also covers a scale multiplied into q in the accumulator; a q rounded to a lower type
    after that adds its roundoff. The cap is a tanh, which passes an error on times its slope 1 - tanh^2, taken where it is largest within
    the error. Everything after, the subtraction of a running maximum and its later corrections included: KAPPA u (3|z| + 3 max|z| + 2).
    """
    u = accumulator(precision)
    z = scale * (q.value @ k.value.T)
    magnitude = np.abs(scale) * (np.abs(q.value) @ np.abs(k.value).T)
    inherited = np.abs(scale) * (q.bound @ (np.abs(k.value) + k.bound).T + np.abs(q.value) @ k.bound.T)
    error = (u * growth(q.value.shape[-1]) + precision.query) * magnitude + inherited
    if softcap is not None:
        nearest_zero = np.maximum(np.abs(z) - error, 0) / softcap
        z = softcap * np.tanh(z / softcap)
        error = error * (1 - np.tanh(nearest_zero) ** 2)
    sizes = np.abs(z)
    if bias is not None:
        z = z + bias.value
        sizes = sizes + np.abs(bias.value)
        error = error + bias.bound + precision.bias * np.abs(bias.value)
    finite("scores", z)
    return Bounded(z, error + KAPPA * u * (3 * sizes + 3 * np.abs(z).max(axis=1, keepdims=True) + 2))


def _softmax(z, v, *, precision):
    """((out, lse), (their bounds)) of scores [g n] over values [n dv].

    If scores are off by e_j, |e_j| <= dz_j, the output moves by sum p_j (exp(e_j) - 1)(v_j - out) / sum p_j exp(e_j), to first order
    sum p dz |v - out|; and it stays a mean of the v_j. Casting P errs by u_P sum p|v| (and where P underflows), summing by u A(n) sum p|v|,
    casting and rescaling the output by (u_out + KAPPA u |lse|)|out|. The log-sum-exp moves by at most max dz, plus its own rounding.
    """
    u, n = accumulator(precision), z.value.shape[1]
    top = z.value.max(axis=1, keepdims=True)
    weights = np.exp(z.value - top)
    total = weights.sum(axis=1, keepdims=True)
    p, lse = weights / total, (top + np.log(total))[:, 0]
    out, size = p @ v.value, p @ np.abs(v.value)
    off = np.minimum(z.bound, LARGEST_EXPONENT)
    deviation = np.abs(v.value[None] - out[:, None])
    least = (p * np.exp(-off)).sum(axis=1, keepdims=True)
    moved = (np.expm1(off)[:, None] * p[:, None] @ deviation)[:, 0] / least
    moved = np.minimum(moved, deviation.max(axis=1))
    vanished = np.minimum(p, max(underflow(u), underflow(precision.probabilities))) @ np.abs(v.value)
    rescaled = (precision.output + KAPPA * u * np.abs(lse)[:, None]) * np.abs(out) + underflow(precision.output) + n * underflow(u)
    inherited = np.minimum(np.exp(off) * p @ v.bound / least, v.bound.max(axis=0))
    out_bound = SLACK * (moved + (precision.probabilities + u * growth(n)) * size + vanished + rescaled) + inherited
    lse_bound = SLACK * (z.bound.max(axis=1) + u * growth(n) + KAPPA * u * np.abs(lse))
    return (out, lse), (out_bound, lse_bound)


def _bias(bias, full) -> Bounded:
    """`bias` broadcast to [heads, queries, keys]."""
    given = shape(bias)
    if str(dtype(bias)) not in ROUNDOFF:
        raise ValueError(f"bias has dtype {dtype(bias)}; a float bias is added to scores, and `mask`, or a bias of -inf, hides keys")
    if len(given) > 3 or any(n not in (1, m) for n, m in zip(given[::-1], full[::-1], strict=False)):
        raise ValueError(f"bias has shape {list(given)}, which does not broadcast to [heads, queries, keys] = {list(full)}")
    return Bounded(*(np.broadcast_to(part, full) for part in bounded(bias)))
