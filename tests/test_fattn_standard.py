"""The standard layer: its equations, chunks and decoding, dtypes, and what it refuses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_cases import BLOCKS, built, cached, close, single
from transform_cases import CONFIG, numbers, weights

from fattn import merge, paged, rope, standard
from fattn.plan import batch as plan
from fattn.types import StandardConfig, causal

forward_jitted = jax.jit(standard.forward, static_argnames=("config",))


@pytest.mark.parametrize("rotary", ["half", "interleaved"])
def test_chunks_and_decoding_are_one_prefill(rotary):
    config = replace(CONFIG, rotary=rotary, mask=causal())
    w = standard.prepare(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights()), config=config)
    x = single(12, config.hidden_size)

    def run(chunks):
        cache, done, rows = paged.allocate(BLOCKS, 2, 6, 6, block_size=4, layout="hpbd", dtype=jnp.float32), 0, []
        for n in chunks:
            batch = plan.build([n], [done + n], [[9, 2, 30]], block_size=4, num_blocks=BLOCKS)
            y, cache = forward_jitted(x[done : done + n], w, cache, batch, config=config)
            rows, done = [*rows, y], done + n
        return jnp.concatenate(rows), cache

    whole, cache = run([12])
    found, other = run([5, 5, 1, 1])
    close(found, whole)
    close(other.k, cache.k)


def test_the_layer_is_what_its_equations_say():
    """One sequence, no cache before it: projections with biases, half rotation, grouped causal softmax with sinks, projection."""
    config = StandardConfig(8, 4, 2, 6, 0.4, causal(), rotary_size=4)
    w = jax.tree.map(lambda x: x.astype(np.float32), weights())._replace(bk=None, slopes=None)
    x = numbers(5, 8).astype(np.float32)
    batch = plan.build([5], [5], [[3, 1]], block_size=4, num_blocks=BLOCKS)
    cache = paged.allocate(BLOCKS, 2, 6, 6, block_size=4, layout="pbhd", dtype=jnp.float32)
    y, cache = forward_jitted(x, standard.prepare(w, config=config), cache, batch, config=config)
    cos, sin = rope.table(jnp.arange(5), rope.frequencies(4, theta=10000.0), dtype=jnp.float32)
    q = rope.half((x @ w.wq + w.bq).reshape(5, 4, 6), cos, sin)
    k, v = rope.half((x @ w.wk).reshape(5, 2, 6), cos, sin), (x @ w.wv + w.bv).reshape(5, 2, 6)
    z = 0.4 * np.einsum("thd,shd->hts", q, np.repeat(k, 2, 1)) + np.where(np.tri(5), 0, -np.inf)
    p = np.exp(z)
    p = p / (p.sum(-1, keepdims=True) + np.exp(w.sinks)[:, None, None])
    close(y, np.einsum("hts,shd->thd", p, np.repeat(v, 2, 1)).reshape(5, 24) @ w.wo + w.bo)
    close(cache.k[3], k[:4])
    close(cache.k[1, 0], k[4])


def test_a_layer_takes_another_attend():
    """It is asked for an lse only where a sink needs it, and everything else goes through by name."""
    asked = []

    def attend(q, cache, batch, slopes, **options):
        asked.append((slopes, options))
        return merge.empty(2, 4, 8, dtype=jnp.float32)

    batch, cache = built([2], [2]), cached(16, value_size=8)
    q, k = single(2, 4, 8), single(2, 2, 8)
    for sinks, lse in ((None, False), (jnp.zeros(4), True)):
        out, _ = standard.attend_and_write(q, k, k, cache, batch, sinks, mask=causal(), scale=0.3, softcap=2.0, attend=attend)
        assert asked.pop() == (None, dict(mask=causal(), scale=0.3, softcap=2.0, lse=lse)) and not out.any()


def test_a_cache_of_another_dtype():
    """The attention runs in the cache's dtype, the rest in the hidden states'."""
    w = standard.prepare(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights()), config=CONFIG)
    batch, x = built([3], [3]), single(3, 8)
    cache = paged.allocate(BLOCKS, 2, 6, 6, block_size=16, layout="hpbd", dtype=jnp.float16)
    y, cache = forward_jitted(x, w, cache, batch, config=CONFIG)
    exact, _ = forward_jitted(x, w, jax.tree.map(lambda c: jnp.zeros_like(c, jnp.float32), cache), batch, config=CONFIG)
    assert y.dtype == jnp.float32 and cache.k.dtype == jnp.float16
    assert 0 < float(jnp.abs(y - exact).max()) < 5e-3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda w: standard.prepare(w._replace(wo=w.wo.T), config=CONFIG), r"wo has shape \[8, 24\]; the config asks for \[24, 8\]"),
        (lambda w: forward(w, single(3, 9)), r"x has shape \[3, 9\], config.hidden_size is 8"),
        (lambda w: forward(w, single(4, 8)), r"batch.slot_mapping must be integers \[4\] for 1 sequences and 4 rows, got int32\[3\]"),
        (lambda w: forward(w, single(3, 8), rotary=None), "config.rotary=None, but the weights were prepared for another"),
        (lambda w: forward(w, single(3, 8), block_size=8), "batch.block_size=16, but the cache's block_size=8"),
    ],
)
def test_layers_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights()))


def forward(w, x, block_size=16, **changes):
    cache = paged.allocate(BLOCKS, 2, 6, 6, block_size=block_size, layout="hpbd", dtype=jnp.float32)
    return standard.forward(x, standard.prepare(w, config=CONFIG), cache, built([3], [3]), config=replace(CONFIG, **changes))
