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
from fattn.types import LAYOUTS, Pages, Partial, Range, causal, window

POISONS = [np.nan, np.inf, -np.inf, 3e38]


def single(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def total(tree):
    return sum(jnp.sum(jnp.where(jnp.isneginf(x), 0, x) ** 2) for x in jax.tree.leaves(tree))


def values_and_gradients(call, arguments):
    """Both, jitted, while JAX watches for NaN."""
    every = tuple(range(len(arguments)))
    both = jax.jit(lambda *arguments: (call(*arguments), jax.grad(lambda *a: total(call(*a)), every)(*arguments)))
    with jax.debug_nans(True):
        return both(*arguments)


def assert_same_bits(call, clean, poisoned, kept=lambda result: result):
    expected, found = (values_and_gradients(call, arguments) for arguments in (clean, poisoned))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected[1]))
    jax.tree.map(np.testing.assert_array_equal, kept(found[0]), kept(expected[0]))
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


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


@pytest.mark.parametrize("poison", POISONS)
def test_b11_dense_attention(poison):
    """Keys outside every query's mask, padded keys and padded queries."""
    q, k, v = single((numbers(4, HEADS, SIZE), numbers(9, KV_HEADS, SIZE), numbers(9, KV_HEADS, VALUE_SIZE)))
    q_pos, k_pos = jnp.asarray([5, -1, 6, -3]), jnp.asarray([0, 1, -1, 3, 4, 5, 6, 7, -2])
    hidden = (k_pos < 3) | (k_pos > 6)

    def call(q, k, v):
        return dense.attend(q, k, v, q_pos, k_pos, mask=window(2, 0), scale=0.5, softcap=4.0)

    assert_same_bits(call, (q, k, v), (spoiled(q, q_pos < 0, poison), spoiled(k, hidden, poison), spoiled(v, hidden, poison)))


@pytest.mark.parametrize("poison", POISONS)
def test_b11_a_bias_where_the_mask_hides(poison):
    q, k, v, bias = single((numbers(4, HEADS, SIZE), numbers(4, KV_HEADS, SIZE), numbers(4, KV_HEADS, VALUE_SIZE), numbers(HEADS, 4, 4)))
    hidden = np.triu(np.ones((4, 4), bool), 1)

    def call(q, k, v, bias):
        return dense.attend(q, k, v, Range(0, 4), Range(0, 4), bias, mask=causal(), scale=0.5)

    assert_same_bits(call, (q, k, v, bias), (q, k, v, jnp.where(hidden, poison, bias)))


@pytest.mark.parametrize("poison", POISONS)
def test_b11_merge_and_finish(poison):
    lse = jnp.asarray([[1.0, -jnp.inf], [-jnp.inf, -jnp.inf], [0.5, 2.0]])
    a, sink = Partial(*single((numbers(3, 2, 4), lse))), jnp.asarray([0.3, -0.2])
    b = Partial(numbers(3, 2, 4, seed=1).astype(np.float32), jnp.flip(lse, 1))
    bad = Partial(jnp.where(jnp.isneginf(lse)[..., None], poison, a.out), lse)

    def merged(out, b_out):
        both = merge.merge(Partial(out, lse), Partial(b_out, b.lse))
        return both, merge.finish(Partial(out, lse), sink, dtype=jnp.float32)

    assert_same_bits(merged, (a.out, b.out), (bad.out, jnp.where(jnp.isneginf(b.lse)[..., None], poison, b.out)))


def unread(layout):
    """Which slots no query of transform_cases.batch reads, in the shape of a cache's axes."""
    of = batch()
    read = np.zeros((8, BLOCK_SIZE), bool)
    for length, table in zip(of.seq_lens, of.block_table, strict=True):
        for position in range(length):
            read[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    place = {"hpbd": (None, slice(None), slice(None), None), "pbhd": (slice(None), slice(None), None, None)}
    return ~read[place.get(layout, (slice(None), None, slice(None), None))]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b11_pages(layout, poison):
    """Tails of last pages, unused blocks, padded queries, and whatever a block table holds beyond a length."""
    q, clean = single((numbers(8, HEADS, SIZE), cache(layout)))
    of = arrays(batch())
    used = np.arange(3) < -(-np.asarray(of.seq_lens)[:, None] // BLOCK_SIZE)
    wild = replace(of, block_table=jnp.where(used, of.block_table, 2**31 - 1))

    def call(q, cache, table):
        return paged.attend(q, cache, replace(of, block_table=table.astype(jnp.int32)), mask=causal(), scale=0.5)

    bad = Pages(*(jnp.where(unread(layout), poison, x) for x in (clean.k, clean.v)), layout=layout, block_size=BLOCK_SIZE)
    padding = np.asarray([0, 0, 0, 1, 0, 0, 1, 1], bool)  # the row before a sequence's first key, and the batch's padding
    expected = values_and_gradients(lambda q, cache: call(q, cache, of.block_table), (q, clean))
    found = values_and_gradients(lambda q, cache: call(q, cache, wild.block_table), (spoiled(q, padding, poison), bad))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not found[0].out[padding].any() and np.isneginf(found[0].lse[padding]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_b11_new_keys_that_are_not_written(dtype, poison):
    k, v = (jnp.asarray(x, dtype) for x in new_keys())
    clean, slots = jax.tree.map(lambda x: jnp.asarray(x, dtype), cache()), jnp.asarray([5, -1, 0, 31, 32, 7, 99, -9])
    dropped = (slots < 0) | (slots > 31)

    def call(cache, k, v):
        return paged.write(cache, k, v, slots)

    assert_same_bits(call, (clean, k, v), (clean, spoiled(k, dropped, poison), spoiled(v, dropped, poison)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_b11_the_layer_s_padding(poison):
    """Hidden states of padding and of rows without a position, and stale pages: values and the weights' gradients."""
    x, w = single((numbers(8, CONFIG.hidden_size), weights()))
    pages = single(square_cache())
    stale = unread("hpbd")
    padding = np.asarray([0, 0, 0, 1, 0, 0, 1, 1], bool)

    def call(x, w, cache):
        prepared = standard.prepare(w, config=CONFIG)
        return standard.forward(x, prepared, cache, arrays(batch()), config=CONFIG)[0]

    bad = replace(pages, k=jnp.where(stale, poison, pages.k), v=jnp.where(stale, poison, pages.v))
    assert_same_bits(call, (x, w, pages), (spoiled(x, padding, poison), w, bad))
