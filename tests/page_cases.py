"""Small arrays, caches and batches over pages drawn without order."""

import jax
import jax.numpy as jnp
import numpy as np
from transform_cases import numbers

from fattn import dense, paged
from fattn.plan import batch as plan
from fattn.types import Batch, Pages


def single(*shape, seed=0):
    return jnp.asarray(numbers(*shape, seed=seed), jnp.float32)


def close(found, expected, tolerance=2e-5):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


BLOCKS = 40

# jitted: the tests of transforms say that nothing else changes
dense_attend = jax.jit(dense.attend, static_argnames=("mask", "scale", "softcap"))
paged_attend = jax.jit(paged.attend, static_argnames=("mask", "scale", "softcap", "lse"))


def cached(block_size, layout="hpbd", dtype=jnp.float32, kv_heads=2, size=8, value_size=6):
    k, v = (single(kv_heads, BLOCKS, block_size, n, seed=n).astype(dtype) for n in (size, value_size))
    return paged.convert(Pages(k, v, layout="hpbd", block_size=block_size), layout=layout)


def built(query_lens, seq_lens, block_size=16, **options) -> Batch:
    """Sequences on blocks drawn without order."""
    order = np.random.default_rng(len(seq_lens)).permutation(BLOCKS).tolist()
    tables = [[order.pop() for _ in range(-(-n // block_size))] for n in seq_lens]
    return plan.build(query_lens, seq_lens, tables, block_size=block_size, num_blocks=BLOCKS, **options)
