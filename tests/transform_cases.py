"""Every differentiable function of fattn on small arguments, as a function of nothing but a tree of floating arrays."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fattn import dense, masks, merge, paged, rope, standard
from fattn.plan import batch as plan
from fattn.types import Pages, Partial, Range, StandardConfig, Tokens, causal, same, tree, window

HEADS, KV_HEADS, SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 6, 4, 4, 8
CONFIG = StandardConfig(8, HEADS, KV_HEADS, SIZE, 0.4, window(5, 0), softcap=3.0, rotary="interleaved", rotary_size=4)


class Case(NamedTuple):
    """`call(*arguments)`; the arguments are trees of float64 NumPy arrays."""

    call: Any
    arguments: tuple


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def batch():
    """A prefix hit, a sequence with more queries than keys (an empty row), a decode step, and padding."""
    built = plan.build([3, 2, 1], [9, 1, 6], [[6, 1, 3], [0], [5, 2]], block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    return plan.pad(built, tokens=8, sequences=4, pages=3)


def arrays(batch):
    """Without the host's part, the way it stands inside jit."""
    return jax.tree.map(jnp.asarray, replace(batch, host=None))


def cache(layout="hpbd"):
    sizes = {"h": KV_HEADS, "p": BLOCKS, "b": BLOCK_SIZE}
    k, v = (numbers(*[{**sizes, "d": size}[axis] for axis in layout], seed=size) for size in (SIZE, VALUE_SIZE))
    return Pages(k, v, layout=layout, block_size=BLOCK_SIZE)


def weights(config=CONFIG):
    inner, kv_inner = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes = [(config.hidden_size, inner), (config.hidden_size, kv_inner), (config.hidden_size, kv_inner), (inner, config.hidden_size)]
    shapes += [(inner,), (kv_inner,), (kv_inner,), (config.hidden_size,), (config.heads,), (config.heads,)]
    return standard.Weights(*(0.4 * numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)))


def square_cache(layout="hpbd"):
    """A cache whose values are as wide as its keys, as a layer's are."""
    pages = cache(layout)
    return replace(pages, v=numbers(*pages.k.shape, seed=9))


def partial(seed):
    """Four rows of which one saw nothing."""
    lse = numbers(4, HEADS, seed=seed)
    lse[seed % 4] = -np.inf
    return Partial(numbers(4, HEADS, VALUE_SIZE, seed=seed), lse)


def new_keys(size=VALUE_SIZE):
    return numbers(8, KV_HEADS, SIZE, seed=3), numbers(8, KV_HEADS, size, seed=4)


def _dense(q, k, v, bias):
    documents = {"document": jnp.asarray([0, 0, 1, 1, 1, 1, 0], jnp.int32)}
    queries = Tokens(jnp.asarray([3, 4, -1, 6]), {"document": jnp.asarray([1, 1, 0, 7], jnp.int32)})
    return dense.attend(
        q, k, v, queries, Tokens(Range(0, 7), documents), bias, mask=window(2, 1) & same("document"), scale=0.5, softcap=2.0
    )


def _paged(q, cache, slopes):
    return paged.attend(q, cache, arrays(batch()), slopes, mask=causal(), scale=0.5, softcap=2.0)


def _tree(q, cache):
    built = plan.build([3], [9], [[6, 1, 3]], block_size=BLOCK_SIZE, num_blocks=BLOCKS, parents=[[-1, 0, 0]])
    return paged.attend(q, cache, arrays(built), mask=tree("enter", "exit"), scale=0.5).out


def _forward(x, weights, cache):
    prepared = standard.prepare(weights, config=CONFIG)
    return standard.forward(x, prepared, cache, arrays(batch()), config=CONFIG)


def _attend_and_write(q, k, v, cache, sinks, slopes):
    return standard.attend_and_write(q, k, v, cache, arrays(batch()), sinks, slopes, mask=causal(), scale=0.5)


def _turned(turn):
    def call(x, frequencies):
        return turn(x, *rope.table(jnp.arange(5), frequencies, dtype=x.dtype))

    return Case(call, (numbers(5, HEADS, SIZE), 0.3 + numbers(2) ** 2))


q = numbers(8, HEADS, SIZE, seed=2)
bias, slopes, sinks = numbers(HEADS, 1, 7, seed=5), numbers(HEADS, seed=6), numbers(HEADS, seed=7)

CASES = {
    "dense.attend": Case(_dense, (q[:4], numbers(7, KV_HEADS, SIZE), numbers(7, KV_HEADS, VALUE_SIZE), bias)),
    "dense.alibi": Case(lambda slopes: dense.alibi(slopes, Range(3, 2), jnp.arange(5)), (slopes,)),
    "merge.merge": Case(merge.merge, (partial(1), partial(2))),
    "merge.finish": Case(lambda partial, sink: merge.finish(partial, sink, dtype=partial.out.dtype), (partial(1), sinks)),
    "rope.table": Case(lambda frequencies: rope.table(jnp.arange(5), frequencies, dtype=frequencies.dtype), (0.3 + numbers(2) ** 2,)),
    "rope.half": _turned(rope.half),
    "rope.interleaved": _turned(rope.interleaved),
    "paged.convert": Case(lambda cache: paged.convert(cache, layout="pbhd"), (cache(),)),
    "paged.gather": Case(lambda cache: paged.gather(cache, jnp.asarray([[6, -1, 3], [0, 0, BLOCKS]])), (cache(),)),
    "paged.attend tree": Case(_tree, (q[:3], cache())),
    "standard.prepare": Case(lambda weights: standard.prepare(weights, config=CONFIG)[:4], (weights(),)),
    "standard.forward": Case(_forward, (numbers(8, CONFIG.hidden_size), weights(), square_cache())),
}
for _layout in ("hpbd", "pbhd", "phbd"):
    CASES[f"paged.write {_layout}"] = Case(
        lambda cache, k, v: paged.write(cache, k, v, jnp.asarray([5, -1, 0, 31, 32, 7, 6, -9])), (cache(_layout), *new_keys())
    )
    CASES[f"paged.attend {_layout}"] = Case(_paged, (q, cache(_layout), slopes))
CASES["standard.attend_and_write"] = Case(_attend_and_write, (q, *new_keys(), cache("pbhd"), sinks, slopes))

VISIBLE = [
    lambda p, j: masks.visible(p, j, mask=causal() & window(3, None)),
    lambda p, j: masks.visible(Tokens(p, {"user": p % 2}), Tokens(j, {"user": j % 3}), mask=same("user") | window(0, 1)),
    lambda p, j: masks.visible(Tokens(p, {"enter": p, "exit": p + 4}), Tokens(j, {"enter": j, "exit": j + 4}), mask=tree("enter", "exit")),
]
