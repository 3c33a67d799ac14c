"""Values of fattn's functions that somebody can check by hand, and the edges of their domains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_cases import close, dense_attend, single
from transform_cases import numbers

from fattn import dense, masks, merge, rope
from fattn.types import Range, Tokens, causal, same, window

# --- rope ------------------------------------------------------------------------------------------------------------------


def test_frequencies_and_both_pairings():
    f = rope.frequencies(4, theta=10000.0)
    close(f, [1.0, 0.01])
    x = jnp.asarray([[[1.0, 2.0, 3.0, 4.0, 9.0]]])
    cos, sin = rope.table(jnp.asarray([2]), f, dtype=jnp.float32)
    c, s = np.cos([2.0, 0.02]), np.sin([2.0, 0.02])
    half = [1 * c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + 1 * s[0], 4 * c[1] + 2 * s[1], 9]
    interleaved = [1 * c[0] - 2 * s[0], 2 * c[0] + 1 * s[0], 3 * c[1] - 4 * s[1], 4 * c[1] + 3 * s[1], 9]
    close(rope.half(x, cos, sin)[0, 0], half)
    close(rope.interleaved(x, cos, sin)[0, 0], interleaved)


def test_yarn_of_deepseek_v3():
    """Pairs below 10 keep their frequency, pairs from 23 on turn 40 times slower."""
    plain = rope.frequencies(64, theta=1e4)
    slow = rope.yarn(64, theta=1e4, factor=40.0, original_length=4096)
    np.testing.assert_array_equal(slow[:11], plain[:11])
    close(slow[23:] * 40, plain[23:], 1e-6)
    share = (16 - 10) / (23 - 10)
    close(slow[16], plain[16] * (1 - share) + plain[16] / 40 * share, 1e-6)
    np.testing.assert_array_equal(rope.yarn(64, theta=1e4, factor=1.0, original_length=4096), plain)


@pytest.mark.parametrize("turn", [rope.half, rope.interleaved])
def test_rotation_turns_in_float32_and_keeps_the_dtype(turn):
    x = single(7, 2, 8).astype(jnp.bfloat16)
    cos, sin = rope.table(jnp.arange(7) * 1000, rope.frequencies(6, theta=1e4), dtype=jnp.float32)
    found = turn(x, cos, sin)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, turn(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rope.frequencies(5, theta=1e4), "rotary_size must be even and positive, got 5"),
        (lambda: rope.yarn(4, theta=1e4, factor=0.5, original_length=9), "factor must be at least 1, got 0.5"),
        (lambda: rope.half(single(3, 2, 4), single(2, 2), single(2, 2)), r"cos and sin must be \[tokens, pairs\] for 3 tokens"),
        (lambda: rope.half(single(3, 2, 4), single(3, 3), single(3, 3)), "cos holds 3 pairs, but x has only 4 dims a head"),
        (lambda: rope.interleaved(single(3, 4), single(3, 2), single(3, 2)), r"x must be \[rows, heads, size\], got shape \[3, 4\]"),
    ],
)
def test_rotary_arguments_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- masks and merge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [causal(), window(127, 0), window(5, 9), window(None, 0), causal() & window(30, 700), window(0, None)])
@pytest.mark.parametrize("query_len, kv_len", [(2048, 2048), (5, 2048), (9, 4)])
def test_compressed_masks_mean_what_visible_says(mask, query_len, kv_len):
    expected = masks.visible(Range(kv_len - query_len, query_len), Range(0, kv_len), mask=mask)
    np.testing.assert_array_equal(masks.expand(masks.compressed(mask=mask), query_len=query_len, kv_len=kv_len), expected)


def test_merged_halves_are_the_whole():
    q, k, v = single(5, 4, 8), single(12, 2, 8), single(12, 2, 6)

    def over(first, last):
        return dense_attend(q, k[first:last], v[first:last], Range(3, 5), Range(first, last - first), mask=causal(), scale=0.3)

    merged = merge.merge(merge.merge(merge.empty(5, 4, 6, dtype=jnp.float32), over(7, 12)), over(0, 7))
    jax.tree.map(close, merged, over(0, 12))


def test_a_broken_log_sum_exp_is_no_empty_row():
    """NaN compares with nothing: once it was taken for -inf, and the rows of the other side came out as if they were all."""
    broken, other = (merge.empty(1, 1, 2, dtype=jnp.float32)._replace(lse=jnp.full((1, 1), lse)) for lse in (jnp.nan, 0.0))
    for found in (*merge.merge(broken, other), *merge.merge(other, broken), merge.finish(broken, jnp.zeros(1), dtype=jnp.float32)):
        assert jnp.isnan(found).all()
    bias = jnp.asarray([0.0, jnp.nan, 0.0])
    q, k = single(1, 1, 4), single(3, 1, 4)
    assert jnp.isnan(dense.attend(q, k, k, Range(2, 1), Range(0, 3), bias, mask=causal(), scale=1.0).lse).all()


@pytest.mark.parametrize("sink", [-jnp.inf, -1e4, 0.0, 1e4, jnp.inf])
def test_a_sink_of_any_size_has_finite_values_and_gradients(sink):
    seen = dense_attend(single(3, 2, 4), single(4, 2, 4), single(4, 2, 4), Range(-1, 3), Range(0, 4), mask=causal(), scale=1.0)

    def finished(sink):
        return merge.finish(seen, jnp.full(2, sink), dtype=jnp.float32)

    expected = np.asarray(seen.out) / (1 + np.exp(np.minimum(sink - np.maximum(seen.lse, -1e30), 80)))[..., None]
    close(finished(sink), np.where(sink > 80, 0, expected))
    assert jnp.isfinite(jax.grad(lambda s: finished(s).sum())(sink))


# --- dense -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads, kv_heads, dtype", [(4, 4, jnp.bfloat16), (8, 2, jnp.bfloat16), (3, 1, jnp.bfloat16), (8, 2, jnp.float16), (8, 2, jnp.float32)]
)
def test_attention_inside_a_loop_is_attention_outside(heads, kv_heads, dtype):
    """Head-major keys in a loop once met a bfloat16 product that XLA on a CPU does not have."""
    q = single(2, 1, heads, 64).astype(dtype)
    k, v = (single(2, kv_heads, 256, 64, seed=seed).astype(dtype) for seed in (1, 2))

    def one(of):
        q, k, v = of
        return dense.attend(q, k.swapaxes(0, 1), v.swapaxes(0, 1), jnp.asarray([255]), jnp.arange(256), mask=causal(), scale=0.1)

    looped = jax.jit(lambda *of: jax.lax.map(one, of))(q, k, v)
    jax.tree.map(lambda a, b: close(a[1], b, 1e-2), looped, jax.jit(one)((q[1], k[1], v[1])))


def test_numpy_arguments_are_taken():
    q, k = numbers(2, 2, 4).astype(np.float32), numbers(5, 2, 4).astype(np.float32)
    found = dense.attend(q, k, k, np.asarray([3, 4]), np.arange(5), mask=causal(), scale=0.5)
    jax.tree.map(
        np.testing.assert_array_equal, found, dense.attend(*map(jnp.asarray, (q, k, k)), Range(3, 2), Range(0, 5), mask=causal(), scale=0.5)
    )


@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.int8, np.int64])
def test_positions_of_any_integer_type_mean_the_same(kind):
    """Differences of unsigned integers wrap: a key after its query was once outside every window."""
    p, j = np.array([0, 3], kind), np.array([0, 2, 5], kind)
    expected = masks.visible(p.astype(np.int32), j.astype(np.int32), mask=window(4, 3))
    np.testing.assert_array_equal(masks.visible(p, j, mask=window(4, 3)), expected)


def test_alibi_of_low_precision_slopes_has_whole_distances():
    slopes = jnp.asarray([0.5], jnp.bfloat16)
    np.testing.assert_array_equal(dense.alibi(slopes, Range(1001, 1), Range(0, 3)), [[[-500.5, -500.0, -499.5]]])


def test_tokens_need_the_labels_that_a_mask_reads():
    with pytest.raises(ValueError, match="the mask reads label 'user': pass keys as Tokens"):
        masks.visible(Tokens(Range(0, 2), {"user": jnp.zeros(2)}), Range(0, 3), mask=same("user"))
