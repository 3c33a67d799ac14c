"""Law *transforms*: every function means the same under jit, vmap and scan, and its derivatives of both modes and orders are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from transform_cases import CASES, VISIBLE

# paged.attend gathers from every layout as paged.gather does: one layout's derivatives are enough
DIFFERENTIATED = [name for name in CASES if name not in ("paged.attend pbhd", "paged.attend phbd")]

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def assert_close(found, expected, tolerance=1e-11):
    """Same trees, same places of -inf, and values that agree to rounding."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def finite(call):
    """The function with its exact -inf (the lse of rows that see nothing) as 0: differences of infinities are no numbers."""

    def replaced(*arguments):
        return jax.tree.map(lambda x: jnp.where(jnp.isneginf(x), 0, x), jax.tree.leaves(call(*arguments)))

    return jax.jit(replaced)


def weighed(call):
    """One number that every result moves, each by its own amount."""

    def total(*arguments):
        return sum(jnp.sum(jnp.sin(jnp.arange(x.size) + 1.0).reshape(x.shape) * x) for x in finite(call)(*arguments))

    return total


def changed(tree, seed):
    """Another tree of the same kind; what is -inf stays so."""
    leaves, structure = jax.tree.flatten(tree)
    random = np.random.default_rng(seed)
    return structure.unflatten([x + 0.3 * random.standard_normal(x.shape) for x in leaves])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_jit_is_eager(case):
    arguments = jax.tree.map(jnp.asarray, case.arguments)
    assert_close(jax.jit(case.call)(*arguments), case.call(*arguments))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vmap_is_a_loop(case):
    several = [changed(case.arguments, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    one = jax.jit(case.call)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one(*arguments) for arguments in several))
    assert_close(jax.jit(jax.vmap(case.call))(*stacked), expected)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives_of_both_modes_are_those_of_differences(name):
    call, arguments = CASES[name]
    check_grads(finite(call), arguments, order=1, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIATED if name != "paged.attend tree"])
def test_forward_over_reverse_is_the_difference_of_gradients(name):
    call, arguments = CASES[name]
    gradient = jax.jit(jax.grad(weighed(call), tuple(range(len(arguments)))))
    direction = changed(jax.tree.map(np.zeros_like, arguments), 1)
    step = 1e-5
    ahead = gradient(*jax.tree.map(lambda x, d: x + step * d, arguments, direction))
    behind = gradient(*jax.tree.map(lambda x, d: x - step * d, arguments, direction))
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    _, found = jax.jit(lambda x, d: jax.jvp(gradient, x, d))(arguments, direction)
    assert_close(found, expected, tolerance=1e-6)


@pytest.mark.parametrize("visible", VISIBLE)
def test_visible_under_jit_and_vmap(visible):
    queries, keys = jnp.asarray([[0, 3, -1, 7], [5, 5, 2, -4]]), jnp.asarray([[0, 1, 2, 3, -1], [9, 4, 5, 6, 7]])
    expected = np.stack([visible(p, j) for p, j in zip(queries, keys, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(visible))(queries, keys), expected)
