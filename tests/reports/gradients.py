"""The reports about gradients, for the definitions in JAX: B10, B19, B28, B30. A fault is another dense.attend in JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fattn import dense, merge
from fattn.types import Partial, Range, Tokens, causal, same, window
from reports.layers import Report, exact

DEFINITION = dense.attend


def b10_gradients_beside_an_empty_row(attend):
    """One padded row made every gradient NaN, though its output is in no loss: 0 * NaN in the softmax's backward.

    Right: all gradients (q, k, v, bias, sink) are finite, those of the batch without that row, and dq of the row is exactly 0. With
    jax.debug_nans, and to second order.
    """
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((8, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    bias, sink = jnp.asarray(rng.standard_normal((4, 8, 8)), jnp.float32), jnp.asarray([0.1, -0.2, 0.3, 0.0], jnp.float32)
    request, pos = np.repeat([0, 1], 4), np.tile(np.arange(4), 2)
    keys = np.where(np.isin(np.arange(8), (4, 5)), -1, pos)  # the second request's first two keys are padding: its query 0 sees nothing
    mask = causal() & window(1, 0) & same("request")
    valid = np.array([i for i in range(8) if i not in (4, 5)])

    def loss(rows, q, k, v, bias, sink):
        queries = Tokens(jnp.asarray(pos[rows]), {"request": jnp.asarray(request[rows])})
        sides = queries, Tokens(jnp.asarray(keys), {"request": jnp.asarray(request)})
        part = attend(q[rows], k, v, *sides, bias[:, rows], mask=mask, scale=0.5)
        out = merge.finish(part, sink, dtype=jnp.float32)
        return (jnp.sin(out) * jnp.isin(rows, valid)[:, None, None]).sum()

    gradients = lambda rows: jax.jit(jax.grad(partial(loss, rows), argnums=(0, 1, 2, 3, 4)))(q, k, v, bias, sink)
    every, some = gradients(np.arange(8)), gradients(valid)
    for whole, without in zip(every, some, strict=True):
        assert np.isfinite(whole).all(), "a gradient is not finite"
        np.testing.assert_allclose(whole, without, rtol=2e-5, atol=1e-6)
    exact(every[0][4:5], np.zeros((1, 4, 4)))
    squared = lambda q: (jax.grad(partial(loss, np.arange(8)))(q, k, v, bias, sink) ** 2).sum()
    assert np.isfinite(jax.jit(jax.grad(squared))(q)).all()
    with jax.debug_nans(True):
        gradients(np.arange(8))


def b19_softcap_gradients_at_odd_sizes(attend):
    """The gradient of a cap was incomplete where a size was no multiple of 64.

    Right: dq, dk and dv at 63, 64 and 65 rows, every element, beside finite differences in float64.
    """
    with jax.enable_x64(True):
        for size in (63, 64, 65):
            arrays, direction = ([x.standard_normal((size, 1, 24)) for _ in range(3)] for x in map(np.random.default_rng, (1, 2)))
            weight = np.random.default_rng(3).standard_normal((size, 1, 24))

            def loss(q, k, v, weight=weight, size=size):
                return (attend(q, k, v, Range(0, size), Range(0, size), mask=causal(), scale=1.0, softcap=5.0).out * weight).sum()

            loss = jax.jit(loss)
            gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, arrays))
            for i, gradient in enumerate(gradients):
                for rows in (slice(0, size), slice(size - 1, size), slice(0, 1), slice(size // 2, None)):
                    moved = [x.copy() for x in arrays], [x.copy() for x in arrays]
                    for sign, x in zip((1e-5, -1e-5), moved, strict=True):
                        x[i][rows] += sign * direction[i][rows]
                    wanted = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
                    got = (np.asarray(gradient)[rows] * direction[i][rows]).sum()
                    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7, err_msg=f"d{'qkv'[i]} of rows {rows} of {size}")


def b28_bias_gradients(attend):
    """A float32 bias beside bf16 q, k and v gave NaN gradients; another backend gave none, or for batch 1 alone.

    Right: finite, in the bias's dtype and shape (summed over broadcast axes), and p (w.v - w.out) within a few roundings to bf16.
    """
    rng = np.random.default_rng(5)
    t = s = 6
    q, k, v = (rng.standard_normal((n, heads, 8)).astype(jnp.bfloat16) for n, heads in ((t, 4), (s, 2), (s, 2)))
    weight = rng.standard_normal((t, 4, 8)).astype(np.float32)
    for shape in ((4, t, s), (1, t, s), (1, 1, s), (4, 1, s), (s,)):
        bias = rng.standard_normal(shape).astype(np.float32)

        def loss(bias):
            part = attend(*map(jnp.asarray, (q, k, v)), Range(0, t), Range(0, s), bias, mask=causal(), scale=0.35)
            return (part.out * weight).sum()

        got = jax.grad(loss)(jnp.asarray(bias))
        assert got.dtype == jnp.float32 and got.shape == shape
        keys, values = (np.repeat(x.astype(np.float64), 2, axis=1) for x in (k, v))
        z = np.where(np.tri(t, s) > 0, 0.35 * np.einsum("thd,shd->hts", q.astype(np.float64), keys) + bias, -np.inf)
        p = np.exp(z - z.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", p, values)
        of_values, of_out = (lambda w, x: np.einsum("thd,shd->hts", w, x)), (lambda w, x: np.einsum("thd,thd->ht", w, x)[..., None])
        wanted = p * (of_values(weight, values) - of_out(weight, out))
        size = p * (of_values(abs(weight), abs(values)) + of_out(abs(weight), abs(out)))
        axes = tuple(i for i, n in enumerate((1,) * (3 - len(shape)) + shape) if n == 1)
        wanted, size = (x.sum(axes, keepdims=True).reshape(shape) for x in (wanted, size))
        assert (np.abs(got - wanted) <= 4 * 2.0**-8 * size).all(), f"the gradient of a bias of {shape} is off"


def b30_gradients_where_rows_and_heads_are_as_many(attend):
    """Saved tensors had another axis order than the backward expected, which only S = H hides from the shapes.

    Right: all three gradients match float64 finite differences at S = H = 16.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        arrays, direction = ([rng.standard_normal((16, 16, 8)) for _ in range(3)] for _ in range(2))
        weight = rng.standard_normal((16, 16, 8))
        loss = jax.jit(lambda *x: (attend(*x, Range(0, 16), Range(0, 16), mask=causal(), scale=0.35).out * weight).sum())
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, arrays))
        for i, gradient in enumerate(gradients):
            for row, head in ((0, 0), (3, 12), (12, 3), (15, 15)):
                up, down = ([x.copy() for x in arrays] for _ in range(2))
                up[i][row, head] += 1e-5 * direction[i][row, head]
                down[i][row, head] -= 1e-5 * direction[i][row, head]
                wanted = (loss(*up) - loss(*down)) / 2e-5
                np.testing.assert_allclose((np.asarray(gradient)[row, head] * direction[i][row, head]).sum(), wanted, rtol=1e-6, atol=1e-7)


# --- faults ----------------------------------------------------------------------------------------------------------------------


def _softmax_over_minus_infinity(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    """-inf is added to what is masked and NaN repaired afterwards: values are right, gradients of an empty row are 0 * NaN."""
    seen = dense.visible(q_pos, k_pos, mask=mask)[None]
    ratio = q.shape[1] // k.shape[1]
    z = scale * jnp.einsum("thd,shd->hts", q, jnp.repeat(k, ratio, 1), precision="highest")
    z = (z if bias is None else z + bias) + jnp.where(seen, 0, -jnp.inf)
    p = jax.nn.softmax(z, axis=-1)
    p = jnp.where(jnp.isnan(p), 0, p)
    out = jnp.einsum("hts,shd->thd", p, jnp.repeat(v, ratio, 1), precision="highest")
    return Partial(out, jax.nn.logsumexp(z, axis=-1).T)


def _backward(change):
    """dense.attend with a backward of its own, which `change` spoils: change(gradients of q, k, v) -> the same three."""

    def attend(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
        @jax.custom_vjp
        def core(q, k, v):
            return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)

        right = lambda *arrays: dense.attend(*arrays, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
        core.defvjp(lambda *arrays: jax.vjp(right, *arrays), lambda back, cotangent: change(back(cotangent)))
        return core(q, k, v)

    return attend


def _without_the_tail(gradients):
    """Rows beyond the last multiple of 64 get no gradient."""
    return tuple(x.at[x.shape[0] // 64 * 64 :].set(0) if x.shape[0] > 64 else x for x in gradients)


def _keys_transposed(gradients):
    dq, dk, dv = gradients
    return dq, dk.swapaxes(0, 1), dv


def _without_bias_gradient(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    bias = None if bias is None else jax.lax.stop_gradient(bias)
    return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def _bias_of_the_first_head(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    """The gradient of a bias that all heads share is that of the first head alone."""
    if bias is not None and bias.ndim == 3 and bias.shape[0] == 1 and q.shape[1] > 1:
        bias = jnp.concatenate([bias, jax.lax.stop_gradient(jnp.repeat(bias, q.shape[1] - 1, 0))])
    return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


FAULTS = {
    "softmax_over_minus_infinity": _softmax_over_minus_infinity,
    "backward_drops_the_tail": _backward(_without_the_tail),
    "backward_transposes_keys": _backward(_keys_transposed),
    "no_gradient_of_a_bias": _without_bias_gradient,
    "bias_gradient_of_the_first_head": _bias_of_the_first_head,
}

REPORTS = (
    Report("B10", b10_gradients_beside_an_empty_row, ("softmax_over_minus_infinity",)),
    Report("B19", b19_softcap_gradients_at_odd_sizes, ("backward_drops_the_tail",)),
    Report("B28", b28_bias_gradients, ("no_gradient_of_a_bias", "bias_gradient_of_the_first_head")),
    Report("B30", b30_gradients_where_rows_and_heads_are_as_many, ("backward_transposes_keys",)),
)
