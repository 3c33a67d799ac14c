"""What the functions demand of their arguments, said once: errors name the argument, the value and what would work."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from fattn import _pytree  # noqa: F401  (Tokens, Range, Pages and Batch become JAX values)
from fattn.types import Range, Tokens

DTYPES = ("float64", "float32", "bfloat16", "float16")


def positions(tokens) -> Array:
    """The positions of a query or key side given as a Range, an int32 array or Tokens: Int32[n]."""
    pos = tokens.pos if isinstance(tokens, Tokens) else tokens
    if isinstance(pos, Range):
        return pos.start + jnp.arange(pos.size, dtype=jnp.int32)
    pos = jnp.asarray(pos)
    if pos.ndim != 1 or not jnp.issubdtype(pos.dtype, jnp.integer):
        raise ValueError(f"positions must be a Range or one-dimensional integers, got {pos.dtype}{list(pos.shape)}")
    return pos


def check_attend(q, k, v, q_pos, k_pos, *, softcap):
    """Raises ValueError that names the argument and the value where shapes, dtypes or positions do not fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 3:
            raise ValueError(f"{name} must be [rows, heads, size], got shape {list(array.shape)}")
        if str(array.dtype) not in DTYPES:
            raise ValueError(f"{name} has dtype {array.dtype}; one of {', '.join(DTYPES)} would work")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v disagree in rows or heads: k {list(k.shape)}, v {list(v.shape)}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k disagree in head size: q {list(q.shape)}, k {list(k.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is not a multiple of k's {k.shape[1]}; layout is [rows, heads, size]")
    for name, tokens, rows in (("q_pos", q_pos, q.shape[0]), ("k_pos", k_pos, k.shape[0])):
        count = positions(tokens).shape[0]
        if count != rows:
            raise ValueError(f"{name} has {count} positions for {rows} rows of {name[0]}; layout is [rows, heads, size]")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap!r}")
