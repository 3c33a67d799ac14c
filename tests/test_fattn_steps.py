"""What an engine does with the functions: steps in a loop on one cache, compiled once a bucket, the cache updated in place."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transform_cases import CONFIG, arrays, numbers, weights

from fattn import paged, standard
from fattn.plan import batch as plan
from fattn.types import LAYOUTS, Batch

BLOCK_SIZE, BLOCKS = 4, 8
TABLES = np.asarray([[6, 1, 3], [5, 2, 0]])


def prepared(dtype=jnp.float32):
    return standard.prepare(jax.tree.map(lambda w: jnp.asarray(w, dtype), weights()), config=CONFIG)


def empty(layout="hpbd", dtype=jnp.float32, blocks=BLOCKS):
    size = CONFIG.head_size
    return paged.allocate(blocks, CONFIG.kv_heads, size, size, block_size=BLOCK_SIZE, layout=layout, dtype=dtype)


def step(lengths) -> Batch:
    """A decode step that takes sequences to these lengths, without the host's part."""
    return arrays(plan.build([1, 1], lengths, TABLES, block_size=BLOCK_SIZE, num_blocks=BLOCKS))


@pytest.mark.parametrize("layout", ["hpbd", "pbhd"])
def test_a_cache_in_the_carry_of_a_scan_is_a_loop(layout):
    """Values and gradients through six decode steps."""
    batches = [step([n, n + 4]) for n in range(1, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    x, w = jnp.asarray(numbers(6, 2, CONFIG.hidden_size), jnp.float32), prepared()

    def forward(cache, x, batch):
        return standard.forward(x, w, cache, batch, config=CONFIG)[::-1]

    def scanned(x, cache):
        return jax.lax.scan(lambda cache, of: forward(cache, *of), cache, (x, stacked))

    def looped(x, cache):
        rows, step_forward = [], jax.jit(forward)
        for of in zip(x, batches, strict=True):
            cache, y = step_forward(cache, *of)
            rows.append(y)
        return cache, jnp.stack(rows)

    expected, found = looped(x, empty(layout)), jax.jit(scanned)(x, empty(layout))
    assert float(jnp.abs(found[1]).max()) > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    if layout == "hpbd":
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(scanned(x, empty(layout))[1] ** 2)))(x)
        direction = jnp.asarray(numbers(*x.shape, seed=1), jnp.float32)
        ahead, behind = (float(jnp.sum(jax.jit(scanned)(x + side * direction, empty(layout))[1] ** 2)) for side in (0.01, -0.01))
        np.testing.assert_allclose(jnp.vdot(gradient, direction), (ahead - behind) / 0.02, rtol=0.01)


def test_random_decode_steps_compile_once_a_bucket():
    random, blocks = np.random.default_rng(0), 64
    forward = jax.jit(lambda x, w, cache, batch: standard.forward(x, w, cache, batch, config=CONFIG), donate_argnums=2)
    cache, w, buckets = empty(blocks=blocks), prepared(), set()
    for _ in range(200):
        count = int(random.integers(1, 9))
        lengths = random.integers(1, 33, count)
        table = random.permutation(blocks)[: count * 8].reshape(count, 8)
        used = [row[: -(-n // BLOCK_SIZE)] for row, n in zip(table.tolist(), lengths, strict=True)]
        built = plan.build([1] * count, lengths.tolist(), used, block_size=BLOCK_SIZE, num_blocks=blocks)
        batch = plan.bucket(built, tokens=[4, 8], sequences=[4, 8], pages=[4, 8])
        buckets.add((len(batch.slot_mapping), batch.block_table.shape))
        x = jnp.asarray(random.standard_normal((len(batch.slot_mapping), CONFIG.hidden_size)), jnp.float32)
        y, cache = forward(x, w, cache, batch)
    assert forward._cache_size() == len(buckets) == 4
    assert bool(jnp.isfinite(y).all())


def memory(function, blocks, layout, dtype, queries):
    cache, w = empty(layout, dtype, blocks), prepared(dtype)
    batch = arrays(plan.build([queries, 1], [9, 4], TABLES, block_size=BLOCK_SIZE, num_blocks=blocks))
    rows = queries + 1
    x = jnp.ones((rows, CONFIG.hidden_size), dtype)
    k = jnp.ones((rows, CONFIG.kv_heads, CONFIG.head_size), dtype)
    call = {
        "write": lambda cache: paged.write(cache, k, k, batch.slot_mapping),
        "forward": lambda cache: standard.forward(x, w, cache, batch, config=CONFIG),
    }[function]
    analysis = jax.jit(call, donate_argnums=0).lower(cache).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes
    return analysis.temp_size_in_bytes


F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.mark.parametrize(
    "function, layout, dtype",
    [("write", layout, dtype) for layout in LAYOUTS for dtype in (F32, BF16, F16)]
    + [("forward", "hpbd", BF16), ("forward", "pbhd", BF16), ("forward", "pbhd", F32), ("forward", "phbd", F16)],
)
def test_a_donated_cache_is_updated_in_place(function, layout, dtype):
    """Results alias the cache, and what is needed beside it does not grow with its capacity, attention's reading included."""
    small, large = (memory(function, blocks, layout, dtype, queries=5) for blocks in (64, 4096))
    # on a CPU bfloat16 is written by a pass over the cache, which holds one int32 a slot
    assert large - small <= (4 * BLOCK_SIZE * (4096 - 64) + 64 if dtype == BF16 else 64)


def test_the_host_s_part_of_a_batch_compiles_nothing_anew():
    call = jax.jit(lambda batch: batch.seq_lens + 1)
    built = plan.build([1, 1], [3, 4], TABLES, block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    later = plan.build([1, 1], [4, 5], TABLES, block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    assert built.host.seq_lens != later.host.seq_lens
    call(built), call(later), call(replace(later, host=None))
    assert call._cache_size() == 1
