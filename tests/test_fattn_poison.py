"""Places that no query may read hold anything, NaN and infinity included: not one bit of a result or gradient changes. Reports B10, B11."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transform_cases import (
    BLOCK_SIZE,
    CONFIG,
    HEADS,
    KV_HEADS,
    SIZE,
    VALUE_SIZE,
    arrays,
    batch,
    cache,
    new_keys,
    numbers,
    square_cache,
    weights,
)

from fattn import dense, merge, paged, standard
from fattn.types import LAYOUTS, Partial, Range, causal, window

POISONS = [np.nan, np.inf, -np.inf, 3e38]


def single(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def total(tree):
    return sum(jnp.sum(jnp.where(jnp.isneginf(x), 0, x) ** 2) for x in jax.tree.leaves(tree))


def assert_same_bits(call, clean, spoil):
    """Values and gradients of `call` do not change by one bit with any poison, and JAX sees no NaN. Returns the values."""
    every = tuple(range(len(clean)))
    both = jax.jit(lambda *arguments: (call(*arguments), jax.grad(lambda *a: total(call(*a)), every)(*arguments)))
    poisoned = [spoil(poison) for poison in POISONS]
    with jax.debug_nans(True):
        expected, *found = (both(*arguments) for arguments in (clean, *poisoned))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected[1]))
    for result in found:
        jax.tree.map(np.testing.assert_array_equal, result, expected)
    return expected[0]


def spoiled(array, places, poison):
    return jnp.where(jnp.asarray(places).reshape(-1, *[1] * (array.ndim - 1)), poison, array)


def test_b10_a_row_that_sees_nothing_leaves_every_gradient_right():
    """Two rows of four keys, a band of two and padded keys, so that one row is empty: gradients as if it were not there."""
    q, k, v = single((numbers(4, HEADS, SIZE), numbers(4, KV_HEADS, SIZE), numbers(4, KV_HEADS, VALUE_SIZE)))
    bias, sink = single((numbers(HEADS, 4, 4), numbers(HEADS)))
    k_pos = jnp.asarray([-1, -1, 2, 3])

    def call(rows):
        def loss(q, k, v, bias, sink):
            partial = dense.attend(q[rows], k, v, jnp.arange(4)[rows], k_pos, bias[:, rows], mask=causal() & window(1, 0), scale=0.5)
            out = merge.finish(partial, sink, dtype=jnp.float32)
            return jnp.sum(out[-2:] ** 2) + jnp.sum(partial.lse[-2:])

        return loss

    arguments, every = (q, k, v, bias, sink), (0, 1, 2, 3, 4)
    with jax.debug_nans(True):
        found = jax.jit(jax.grad(call(np.arange(4)), every))(*arguments)
        expected = jax.jit(jax.grad(call(np.arange(2, 4)), every))(*arguments)
        second = jax.jit(lambda x: jax.jvp(jax.grad(call(np.arange(4)), every), x, x))(arguments)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert not found[0][:2].any() and all(np.isfinite(x).all() for x in jax.tree.leaves(second))


def test_b11_dense_attention():
    """Keys outside every query's mask, padded keys and padded queries."""
    q, k, v = single((numbers(4, HEADS, SIZE), numbers(9, KV_HEADS, SIZE), numbers(9, KV_HEADS, VALUE_SIZE)))
    q_pos, k_pos = jnp.asarray([5, -1, 6, -3]), jnp.asarray([0, 1, -1, 3, 4, 5, 6, 7, -2])
    hidden = (k_pos < 3) | (k_pos > 6)

    def call(q, k, v):
        return dense.attend(q, k, v, q_pos, k_pos, mask=window(2, 0), scale=0.5, softcap=4.0)

    assert_same_bits(call, (q, k, v), lambda bad: (spoiled(q, q_pos < 0, bad), spoiled(k, hidden, bad), spoiled(v, hidden, bad)))


def test_b11_a_bias_where_the_mask_hides():
    q, k, v, bias = single((numbers(4, HEADS, SIZE), numbers(4, KV_HEADS, SIZE), numbers(4, KV_HEADS, VALUE_SIZE), numbers(HEADS, 4, 4)))
    hidden = np.triu(np.ones((4, 4), bool), 1)

    def call(q, k, v, bias):
        return dense.attend(q, k, v, Range(0, 4), Range(0, 4), bias, mask=causal(), scale=0.5)

    assert_same_bits(call, (q, k, v, bias), lambda bad: (q, k, v, jnp.where(hidden, bad, bias)))


def test_b11_merge_and_finish():
    lse = jnp.asarray([[1.0, -jnp.inf], [-jnp.inf, -jnp.inf], [0.5, 2.0]])
    a, b, sink = *single((numbers(3, 2, 4), numbers(3, 2, 4, seed=1))), jnp.asarray([0.3, -0.2])
    unseen = [jnp.isneginf(x)[..., None] for x in (lse, jnp.flip(lse, 1))]

    def call(a, b):
        both = merge.merge(Partial(a, lse), Partial(b, jnp.flip(lse, 1)))
        return both, merge.finish(Partial(a, lse), sink, dtype=jnp.float32)

    assert_same_bits(call, (a, b), lambda bad: (jnp.where(unseen[0], bad, a), jnp.where(unseen[1], bad, b)))


def unread(layout):
    """Which slots no query of transform_cases.batch reads, in the shape of a cache's axes."""
    of = batch()
    read = np.zeros((8, BLOCK_SIZE), bool)
    for length, table in zip(of.seq_lens, of.block_table, strict=True):
        for position in range(length):
            read[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    place = {"hpbd": (None, slice(None), slice(None), None), "pbhd": (slice(None), slice(None), None, None)}
    return ~read[place.get(layout, (slice(None), None, slice(None), None))]


def stale(cache, bad):
    """The cache with every slot spoiled that no query reads."""
    return replace(cache, **{name: jnp.where(unread(cache.layout), bad, getattr(cache, name)) for name in ("k", "v")})


# a row before its sequence's first key, and the batch's padding
PADDING = np.asarray([0, 0, 0, 1, 0, 0, 1, 1], bool)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b11_pages(layout):
    """Tails of last pages, unused blocks and padded queries."""
    q, pages = single((numbers(8, HEADS, SIZE), cache(layout)))

    def call(q, cache):
        return paged.attend(q, cache, arrays(batch()), mask=causal(), scale=0.5)

    found = assert_same_bits(call, (q, pages), lambda bad: (spoiled(q, PADDING, bad), stale(pages, bad)))
    assert not found.out[PADDING].any() and np.isneginf(found.lse[PADDING]).all()


def test_whatever_a_block_table_holds_beyond_a_length():
    q, pages = single((numbers(8, HEADS, SIZE), cache()))
    of = arrays(batch())
    followed = np.arange(3) < -(-np.asarray(of.seq_lens)[:, None] // BLOCK_SIZE)
    attend = jax.jit(lambda table: paged.attend(q, pages, replace(of, block_table=table), mask=causal(), scale=0.5))
    for wild in (-1, -(2**31), 8, 2**31 - 1):
        jax.tree.map(np.testing.assert_array_equal, attend(jnp.where(followed, of.block_table, wild)), attend(of.block_table))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_b11_new_keys_that_are_not_written(dtype):
    k, v = (jnp.asarray(x, dtype) for x in new_keys())
    pages, slots = jax.tree.map(lambda x: jnp.asarray(x, dtype), cache()), jnp.asarray([5, -1, 0, 31, 32, 7, 99, -9])
    dropped = (slots < 0) | (slots > 31)

    def call(cache, k, v):
        return paged.write(cache, k, v, slots)

    assert_same_bits(call, (pages, k, v), lambda bad: (pages, spoiled(k, dropped, bad), spoiled(v, dropped, bad)))


def test_b11_the_layer_s_padding():
    """Hidden states of padding and of rows without a position, and stale pages: values and the weights' gradients."""
    x, w, pages = single((numbers(8, CONFIG.hidden_size), weights(), square_cache()))

    def call(x, w, cache):
        prepared = standard.prepare(w, config=CONFIG)
        return standard.forward(x, prepared, cache, arrays(batch()), config=CONFIG)[0]

    assert_same_bits(call, (x, w, pages), lambda bad: (spoiled(x, PADDING, bad), w, stale(pages, bad)))
