"""The monoid of Partials: attention over some keys, merged with attention over others. A sink enters in `finish`, once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fattn.types import Partial


def empty(tokens: int, heads: int, value_size: int, *, dtype) -> Partial:
    """Attention over no keys, the identity of merge: out = 0 [t h dv], lse = -inf [t h]."""
    return Partial(jnp.zeros((tokens, heads, value_size), dtype), jnp.full((tokens, heads), -jnp.inf, dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both: lse = ln(e^lse_a + e^lse_b), out = sum of e^(lse_i - lse) out_i.

    The `out` of a row whose lse is -inf is never read, in values or in gradients.
    Raises ValueError where an lse is missing or shapes differ.
    """
    _check(a, b)
    a, b = _cleaned(a), _cleaned(b)
    top = jnp.maximum(a.lse, b.lse)
    some = top != -jnp.inf
    top = jnp.where(some, top, 0)
    wa, wb = _weight(a.lse, top), _weight(b.lse, top)
    total = jnp.where(some, wa + wb, 1)
    out = (wa / total)[..., None] * a.out + (wb / total)[..., None] * b.out
    return Partial(out, jnp.where(some, top + jnp.log(total), -jnp.inf))


def finish(partial: Partial, sink: Float[Array, "h"] | None = None, *, dtype) -> Float[Array, "t h dv"]:
    """The output in `dtype`, with one extra logit per query head of value 0 where a sink is given: out / (1 + e^(sink - lse)).

    The sink is neither scaled nor capped; -inf is no sink, +inf gives 0. Raises ValueError where a sink meets a Partial without lse.
    """
    if sink is None:
        return jnp.asarray(partial.out).astype(dtype)
    if partial.lse is None:
        raise ValueError("partial.lse is None: a sink needs the log-sum-exp; ask for it with lse=True")
    sink = jnp.asarray(sink)
    if sink.shape != partial.lse.shape[-1:]:
        raise ValueError(f"sink has shape {list(sink.shape)}, but there are {partial.lse.shape[-1]} query heads")
    partial = _cleaned(partial)
    sink = sink.astype(partial.lse.dtype)
    some = (partial.lse != -jnp.inf) & (sink != jnp.inf)
    share = jax.nn.sigmoid(jnp.where(some, partial.lse, 0) - jnp.where(some, sink, 0))  # of a difference that is never inf - inf
    return (jnp.where(some, share, 0)[..., None] * partial.out).astype(dtype)


def _cleaned(partial):
    """Zero where no key was seen: a weight of 0 times NaN would be NaN. (A NaN lse is no -inf, and stays NaN in the result.)"""
    return Partial(jnp.where((partial.lse != -jnp.inf)[..., None], partial.out, 0), partial.lse)


def _weight(lse, top):
    seen = lse != -jnp.inf
    return jnp.where(seen, jnp.exp(jnp.where(seen, lse, 0) - top), 0)


def _check(a, b):
    for name, partial in (("a", a), ("b", b)):
        if partial.lse is None:
            raise ValueError(f"{name}.lse is None: merging needs the log-sum-exp; ask for it with lse=True")
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape:
        raise ValueError(f"partials disagree in shape: out {a.out.shape} and {b.out.shape}, lse {a.lse.shape} and {b.lse.shape}")
