"""Heads sharded over a mesh, Explicit and Auto: the same numbers, results sharded as their inputs, and other placements refused."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transform_cases import CASES, arrays, batch, cache, numbers, q

from fattn import dense, paged
from fattn.types import Pages, Range, Unsupported, causal

# where the heads lie in each argument; None: no heads, held whole in every place
HEADS = {
    "dense.attend": (1, 1, 1, 0),
    "dense.alibi": (0,),
    "merge.merge": (1, 1),
    "merge.finish": (1, 0),
    "rope.half": (1, None),
    "rope.interleaved": (1, None),
    "paged.convert": (0,),
    "paged.gather": (0,),
    "paged.attend tree": (1, 0),
    "paged.write hpbd": (0, 1, 1),
    "paged.write pbhd": (2, 1, 1),
    "paged.write phbd": (1, 1, 1),
    "paged.attend hpbd": (1, 0, 0),
    "paged.attend pbhd": (1, 2, 0),
    "paged.attend phbd": (1, 1, 0),
    "standard.attend_and_write": (1, 1, 1, 2, 0, 0),
    "standard.forward": (None, None, 0),
}


def mesh(kind, name="tp"):
    return jax.make_mesh((2,), (name,), axis_types=(kind,), devices=jax.devices()[:2])


def placed(tree, over, axis):
    """float32 copies on the mesh, `axis` sharded."""

    def put(x):
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, over.axis_names[0])
        return jax.device_put(np.asarray(x, np.float32), NamedSharding(over, spec))

    return jax.tree.map(put, tree)


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def loss(call):
    return lambda *arguments: sum(jnp.sum(jnp.where(jnp.isneginf(x), 0, x) ** 2) for x in jax.tree.leaves(call(*arguments)))


@lru_cache
def both(name):
    """Values and gradients of a case, jitted, and what they are without a mesh."""
    call, arguments = CASES[name]
    every = tuple(range(len(arguments)))
    function = jax.jit(lambda *arguments: (call(*arguments), jax.grad(loss(call), every)(*arguments)))
    return function, function(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arguments))


def sharded(name, kind):
    return [placed(argument, mesh(kind), axis) for argument, axis in zip(CASES[name].arguments, HEADS[name], strict=True)]


# a layout of the cache or a mask moves no head: for these it is enough that their types are inferred
TRACED = ("paged.attend pbhd", "paged.attend phbd", "paged.attend tree")


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("name", [name for name in HEADS if name not in TRACED])
def test_values_and_gradients_with_sharded_heads(name, kind):
    function, expected = both(name)
    arguments = sharded(name, kind)
    with jax.set_mesh(mesh(kind)):
        found = function(*arguments)
    assert_close(found, expected)
    if kind is AxisType.Auto:
        return  # there the compiler may place results as it likes
    for gradient, argument in zip(jax.tree.leaves(found[1]), jax.tree.leaves(arguments), strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, gradient.ndim)


@pytest.mark.parametrize("name", TRACED)
def test_types_of_values_and_gradients_with_sharded_heads(name):
    call, _ = CASES[name]
    arguments = sharded(name, AxisType.Explicit)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        gradients = jax.eval_shape(jax.grad(loss(call), tuple(range(len(arguments)))), *arguments)
    for gradient, argument in zip(jax.tree.leaves(gradients), jax.tree.leaves(arguments), strict=True):
        assert gradient.sharding.spec == jax.typeof(argument).sharding.spec


@pytest.mark.parametrize("name", ["dense.attend", "paged.attend hpbd", "standard.attend_and_write"])
def test_outputs_stay_sharded(name):
    out = jax.tree.leaves(jax.eval_shape(CASES[name].call, *sharded(name, AxisType.Explicit)))[0]
    assert out.sharding.spec == PartitionSpec(None, "tp", None)


def on(axis, array, kind=AxisType.Explicit):
    return placed(array, mesh(kind), axis)


def attended(q_axis, k_axis, v_axis):
    whole = numbers(4, 2, 6), numbers(8, 2, 6), numbers(8, 2, 4)
    q, k, v = (on(axis, array) for axis, array in zip((q_axis, k_axis, v_axis), whole, strict=True))
    return dense.attend(q, k, v, Range(4, 4), Range(0, 8), mask=causal(), scale=0.5)


def paged_attended(q_axis, cache_axis, layout="hpbd"):
    return paged.attend(on(q_axis, q), on(cache_axis, cache(layout)), arrays(batch()), mask=causal(), scale=0.5)


def written(k_axis, cache_axis):
    k, v = (on(k_axis, numbers(8, 2, size)) for size in (6, 4))
    return paged.write(on(cache_axis, cache()), k, v, jnp.arange(8))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: attended(1, 0, 0), "k=.*axis 0 is sharded over 'tp', and only heads .* Instead: .*merge.merge"),
        (lambda: attended(1, 1, 0), "v=.*axis 0 is sharded over 'tp'"),
        (lambda: attended(2, 1, 1), "q=.*axis 2 is sharded over 'tp'"),
        (lambda: attended(None, 1, 1), "k=.*heads are sharded over 'tp', but those of q over None.* Instead: place both alike"),
        (lambda: attended(1, 1, None), "v=.*heads are sharded over None, but those of q over 'tp'"),
        (lambda: paged_attended(0, None), "q=.*axis 0 is sharded over 'tp'"),
        (lambda: paged_attended(None, 1), "cache.k=.*axis 1 is sharded over 'tp', and only heads"),
        (lambda: paged_attended(1, 0, "pbhd"), "cache.k=.*axis 0 is sharded over 'tp', and only heads"),
        (lambda: paged_attended(None, 0), "cache.k=.*heads are sharded over 'tp', but those of q over None"),
        (lambda: written(0, 0), "k=.*axis 0 is sharded over 'tp'"),
        (lambda: written(None, 0), "k=.*heads are sharded over None, but those of cache.k over 'tp'"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda call: call, jax.jit], ids=["eager", "jit"])
def test_other_placements_are_refused_with_what_to_use(call, message, wrap):
    with pytest.raises(Unsupported, match=message):
        wrap(call)()


def test_rows_of_queries_may_be_sharded_in_dense_attention():
    q, k, v = numbers(4, 2, 6), numbers(8, 2, 6), numbers(8, 2, 4)
    expected = dense.attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), Range(4, 4), Range(0, 8), mask=causal(), scale=0.5)
    found = dense.attend(on(0, q), on(None, k), on(None, v), Range(4, 4), Range(0, 8), mask=causal(), scale=0.5)
    assert_close(found, expected)


def test_rows_of_queries_with_grouped_heads_are_refused():
    q, k, v = on(0, numbers(4, 2, 6)), on(None, numbers(8, 1, 6)), on(None, numbers(8, 1, 4))
    with pytest.raises(Unsupported, match="q=.*axis 0 is sharded over 'tp'"):
        dense.attend(q, k, v, Range(4, 4), Range(0, 8), mask=causal(), scale=0.5)


def test_an_auto_mesh_takes_any_placement():
    q, k, v = numbers(4, 2, 6), numbers(8, 2, 6), numbers(8, 2, 4)
    expected = dense.attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), Range(4, 4), Range(0, 8), mask=causal(), scale=0.5)
    q, k, v = (on(axis, x, AxisType.Auto) for axis, x in ((None, q), (0, k), (0, v)))
    found = jax.jit(lambda q, k, v: dense.attend(q, k, v, Range(4, 4), Range(0, 8), mask=causal(), scale=0.5))(q, k, v)
    assert_close(found, expected)


def test_a_cache_sharded_by_heads_is_written_in_place():
    over = mesh(AxisType.Explicit)
    pages = placed(Pages(*(numbers(2, 64, 16, 8),) * 2, layout="hpbd", block_size=16), over, 0)
    k = placed(numbers(3, 2, 8), over, 1)
    step = jax.jit(paged.write, donate_argnums=0).lower(pages, k, k, jnp.arange(3)).compile().memory_analysis()
    per_device = (pages.k.nbytes + pages.v.nbytes) // 2
    assert step.alias_size_in_bytes >= per_device and step.temp_size_in_bytes < per_device / 8
