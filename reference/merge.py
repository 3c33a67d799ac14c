"""The monoid of Partials: attention over some keys, merged with attention over others. A sink enters in `finish`, once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fattn.types import Partial
from reference._checks import shape
from reference.bounded import (
    FLOAT32,
    KAPPA,
    LARGEST_EXPONENT,
    SLACK,
    Bounded,
    Precision,
    accumulator,
    bounded,
    cast,
    dtype_name,
    finite,
    underflow,
)

Array = np.ndarray


class _Row(NamedTuple):
    """One query of one head of a Bounded Partial."""

    out: Float[Array, "dv"]
    lse: float
    out_bound: Float[Array, "dv"]
    lse_bound: float


def empty(tokens: int, heads: int, value_size: int, *, dtype) -> Bounded:
    """Attention over no keys, the identity of merge: out = 0 [t h dv], lse = -inf [t h], exactly."""
    dtype_name(dtype)
    out, lse = np.zeros((tokens, heads, value_size)), np.full((tokens, heads), -np.inf)
    return Bounded(Partial(out, lse), Partial(np.zeros(out.shape), np.zeros(lse.shape)))


def merge(a: Partial, b: Partial, *, precision: Precision = FLOAT32) -> Bounded:
    """Attention over the keys of both: lse = ln(e^lse_a + e^lse_b), out = sum of e^(lse_i - lse) out_i.

    The `out` of a row whose lse is -inf is never read; a row that one side alone sees is that side's, exactly.
    Raises ValueError where an lse is missing, NaN or +inf, or shapes differ.
    """
    a, b = _partial("a", a), _partial("b", b)
    if a.value.out.shape != b.value.out.shape or a.value.lse.shape != b.value.lse.shape:
        shapes = f"out {a.value.out.shape} and {b.value.out.shape}, lse {a.value.lse.shape} and {b.value.lse.shape}"
        raise ValueError(f"partials disagree in shape: {shapes}")
    merged = empty(*a.value.out.shape, dtype="float64")
    for i, h in np.ndindex(a.value.lse.shape):
        sides = [_Row(*(field[i, h] for part in x for field in part)) for x in (a, b) if x.value.lse[i, h] > -np.inf]
        if sides:
            row = sides[0] if len(sides) == 1 else _merge_rows(*sides, accumulator(precision))
            merged.value.out[i, h], merged.value.lse[i, h], merged.bound.out[i, h], merged.bound.lse[i, h] = row
    finite("out", merged.value.out)
    return merged


def finish(partial: Partial, sink: Float[Array, "h"] | None = None, *, dtype, precision: Precision = FLOAT32) -> Bounded:
    """The output in `dtype`, with one extra logit per query head of value 0 where a sink is given: out / (1 + e^(sink - lse)).

    The sink is neither scaled nor capped; -inf is no sink, +inf gives 0. Raises ValueError where a sink meets a Partial without lse.

    With x = lse - sink off by e <= its bound + KAPPA u (|lse| + |sink| + 2) and the share s = 1 / (1 + e^-x), the share's relative
    change is at most (1 - s)(exp(e) - 1), and never makes it exceed 1.
    """
    if sink is None:
        partial = partial if isinstance(partial, Bounded) else Bounded(partial, Partial(0.0, None))
        value = bounded(partial.value.out).value
        return cast(Bounded(value, np.broadcast_to(partial.bound.out, value.shape)), dtype)
    partial, sink = _partial("partial", partial), bounded(sink)
    out, heads = empty(*partial.value.out.shape, dtype=dtype), partial.value.lse.shape[1]
    if sink.value.shape != (heads,):
        raise ValueError(f"sink has shape {list(sink.value.shape)}, but there are {heads} query heads")
    u = accumulator(precision)
    for i, h in np.ndindex(partial.value.lse.shape):
        lse, logit = partial.value.lse[i, h], sink.value[h]
        if lse == -np.inf or logit == np.inf:
            continue
        value, bound = partial.value.out[i, h], partial.bound.out[i, h]
        if logit > -np.inf:
            rest = np.exp(-np.logaddexp(0, lse - logit))  # 1 - s
            share = np.exp(-np.logaddexp(0, logit - lse))
            off = min(partial.bound.lse[i, h] + sink.bound[h] + KAPPA * u * (abs(lse) + abs(logit) + 2), LARGEST_EXPONENT)
            to_one = np.exp(min(logit - lse, 2 * LARGEST_EXPONENT))  # (1 - s) / s: no change makes a share more than 1
            change = min(rest * np.expm1(off), to_one) + KAPPA * u
            bound = share * (1 + change) * bound + (share * change + underflow(u)) * np.abs(value)
            value = share * value
        out.value.out[i, h], out.bound.out[i, h] = value, bound
    return cast(Bounded(finite("out", out.value.out), out.bound.out), dtype)


def _merge_rows(a: _Row, b: _Row, u: float) -> _Row:
    """Two rows that both see keys.

    Uncertain lse, by e_i <= their bounds, move the mean of the outs by at most sum w_i (exp(e_i) - 1)|out_i - out| / sum w_i exp(-e_i),
    and it stays between the outs; their own bounds are averaged alike, and lse moves by at most ln sum w_i exp(e_i).
    A weight exp(lse_i - lse) is rounded by 2u |lse| of itself (lse is rounded, perhaps converted from another base) and by
    KAPPA u (|lse_i - lse| + 2) (the difference and the exponential).
    """
    lses, outs = np.array([a.lse, b.lse]), np.stack([a.out, b.out])
    lse = np.logaddexp(a.lse, b.lse)
    weights = np.exp(lses - lse)
    out = weights @ outs
    off = np.minimum([a.lse_bound, b.lse_bound], LARGEST_EXPONENT)
    least, deviation, bounds = weights @ np.exp(-off), np.abs(outs - out), np.stack([a.out_bound, b.out_bound])
    moved = np.minimum((weights * np.expm1(off)) @ deviation / least, deviation.max(axis=0))
    inherited = np.minimum((weights * np.exp(off)) @ bounds / least, bounds.max(axis=0))
    rounding = 2 * u * abs(lse) + KAPPA * u * (np.abs(lses - lse) + 2)
    fresh = SLACK * ((weights * rounding + underflow(u)) @ np.abs(outs))
    lse_bound = np.log(weights @ np.exp(off)) + SLACK * KAPPA * u * (abs(lse) + 2)
    return _Row(out, lse, moved + inherited + fresh, lse_bound)


def _partial(name: str, partial) -> Bounded:
    """A plain or Bounded Partial as a Bounded one, after a check that its lse can be read."""
    if not isinstance(partial, Bounded):
        zeros = Partial(*(None if field is None else np.zeros(shape(field)) for field in partial))
        partial = Bounded(Partial(*(None if field is None else bounded(field).value for field in partial)), zeros)
    if partial.value.lse is None:
        raise ValueError(f"{name}.lse is None: merging and sinks need the log-sum-exp; ask for it with lse=True")
    for row in np.argwhere(np.isnan(partial.value.lse) | (partial.value.lse == np.inf)):
        raise ValueError(f"{name}.lse{row.tolist()} is {partial.value.lse[tuple(row)]}; a row that sees no key has lse -inf")
    return partial
