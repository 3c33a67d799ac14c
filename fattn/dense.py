"""Attention over keys held whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fattn._checks import DTYPES, as_arrays, check_attend, positions
from fattn.masks import visible
from fattn.types import Mask, Partial


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
) -> Partial:
    """Softmax attention of every query over the keys that `mask` lets it see: out = sum_j e^(z_j - lse) v_j, lse = ln sum_j e^(z_j).

    z = scale q.k, then softcap tanh(z / softcap) where given, then + bias (broadcast against [h t s]; -inf hides a key).
    Query head h reads key head h // (h_q / h_k). Positions are a Range, Int32[n], or Tokens where the mask reads labels.
    The result is float32 (float64 for float64). Raises ValueError for shapes, dtypes or positions that do not fit together.
    """
    q, k, v = as_arrays((q, k, v))
    check_attend(q, k, v, q_pos, k_pos, softcap=softcap)
    bias = None if bias is None else _bias(bias, q.shape, k.shape)
    t, h, d = q.shape
    s, hk, dv = v.shape
    accumulator = jnp.promote_types(q.dtype, jnp.float32)
    seen = visible(q_pos, k_pos, mask=mask)[None]
    if bias is not None:
        seen = seen & (bias != -jnp.inf)
    # What no query reads may hold anything, NaN included: zero it first, since 0 * NaN is NaN in values and in gradients.
    used_keys, used_queries = seen.any((0, 1)), seen.any((0, 2))
    k = jnp.where(used_keys[:, None, None], k, 0)
    v = jnp.where(used_keys[:, None, None], v, 0)
    q = jnp.where(used_queries[:, None, None], q, 0)
    # All query heads of a key head in one matrix: [hk, g t, d]. (In other forms XLA on a CPU has no bfloat16 product inside a loop.)
    g = h // hk
    q = q.reshape(t, hk, g, d).transpose(1, 2, 0, 3).reshape(hk, g * t, d)
    z = jnp.einsum("krd,skd->krs", q, k, precision="highest", preferred_element_type=accumulator)
    z = z.reshape(hk, g, t, s).reshape(h, t, s) * jnp.asarray(scale, accumulator)
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    if bias is not None:
        z = z + jnp.where(seen, bias, 0).astype(accumulator)
    some = seen.any(-1)
    top = jax.lax.stop_gradient(jnp.where(some, jnp.max(z, -1, where=seen, initial=-jnp.inf), 0))
    p = jnp.where(seen, jnp.exp(jnp.where(seen, z - top[..., None], 0)), 0)
    total = jnp.where(some, p.sum(-1), 1)
    p = p.astype(v.dtype).reshape(hk, g, t, s).reshape(hk, g * t, s)
    out = jnp.einsum("krs,skd->krd", p, v, precision="highest", preferred_element_type=accumulator)
    out = out.reshape(hk, g, t, dv).reshape(h, t, dv).swapaxes(0, 1) / total.T[..., None]
    return Partial(out, jnp.where(some, top + jnp.log(total), -jnp.inf).T)


def alibi(slopes: Float[Array, "h"], q_pos, k_pos) -> Float[Array, "h t s"]:
    """ALiBi's bias, -slope |p - j|, for `attend`, in float32 (float64 for float64). Positions as in `attend`."""
    slopes = jnp.asarray(slopes)
    distance = jnp.abs(positions(q_pos)[:, None] - positions(k_pos)[None, :])
    # low-precision slopes would round distances past 256
    return -slopes.astype(jnp.promote_types(slopes.dtype, jnp.float32))[:, None, None] * distance


def alibi_slopes(heads: int) -> Float[Array, "h"]:
    """ALiBi's geometric slopes, 2^(-8 i / n) for i = 1..n with n the power of two at or below `heads`, then every second of 2n's.

    Raises ValueError for no heads. Source: Press et al. 2022, "Train Short, Test Long".
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads!r}")
    n = 1 << (heads.bit_length() - 1)
    exponents = [-8 * i / n for i in range(1, n + 1)] + [-4 * i / n for i in range(1, 2 * (heads - n), 2)]
    return jnp.asarray([2.0**e for e in exponents], jnp.float32)


def _bias(bias, q_shape, k_shape):
    bias, full = jnp.asarray(bias), (q_shape[1], q_shape[0], k_shape[0])
    if str(bias.dtype) not in DTYPES:
        raise ValueError(f"bias has dtype {bias.dtype}; a float bias is added to scores, and `mask`, or a bias of -inf, hides keys")
    if bias.ndim > 3 or any(n not in (1, m) for n, m in zip(bias.shape[::-1], full[::-1], strict=False)):
        raise ValueError(f"bias has shape {list(bias.shape)}, which does not broadcast to [heads, queries, keys] = {list(full)}")
    return bias.reshape((1,) * (3 - bias.ndim) + bias.shape)
