"""Law *transforms*: every function means the same under jit, vmap and scan, and its derivatives of both modes and orders are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transform_cases import CASES, VISIBLE

# paged.attend gathers from every layout as paged.gather does: one layout's derivatives are enough
DIFFERENTIATED = [name for name in CASES if name not in ("paged.attend pbhd", "paged.attend phbd")]
STEP = 1e-5

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


def finite(tree):
    """The leaves, with their exact -inf (the lse of rows that see nothing) as 0: differences of infinities are no numbers."""
    return [jnp.where(jnp.isneginf(x), 0, x) for x in jax.tree.leaves(tree)]


def weighed(leaves):
    """One number that every entry moves, each by its own amount."""
    return sum(jnp.vdot(jnp.sin(jnp.arange(x.size) + 1.0), x.reshape(-1)) for x in leaves)


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
def test_derivatives_are_those_of_differences(name):
    """Forward mode against values, reverse mode against forward mode, forward over reverse against gradients."""
    call, arguments = CASES[name]
    gradient = jax.grad(lambda arguments: weighed(finite(call(*arguments))))

    @jax.jit
    def derivatives(arguments, direction):
        tangents = jax.jvp(lambda arguments: finite(call(*arguments)), (arguments,), (direction,))[1]
        return tangents, *jax.jvp(gradient, (arguments,), (direction,))

    direction = changed(jax.tree.map(np.zeros_like, arguments), 1)
    ahead, behind = (jax.tree.map(lambda x, d, h=h: x + h * d, arguments, direction) for h in (STEP, -STEP))
    tangents, slope, curvature = derivatives(arguments, direction)

    def difference(function):
        return jax.tree.map(lambda a, b: (a - b) / (2 * STEP), function(ahead), function(behind))

    assert_close(tangents, difference(lambda arguments: finite(jax.jit(call)(*arguments))), 1e-6)
    assert_close(curvature, difference(lambda arguments: derivatives(arguments, direction)[1]), 1e-6)
    for seed in range(2, 6):
        other = changed(jax.tree.map(np.zeros_like, arguments), seed)
        along = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(slope), jax.tree.leaves(other), strict=True))
        assert_close(along, weighed(derivatives(arguments, other)[0]))


@pytest.mark.parametrize("visible", VISIBLE)
def test_visible_under_jit_and_vmap(visible):
    queries, keys = jnp.asarray([[0, 3, -1, 7], [5, 5, 2, -4]]), jnp.asarray([[0, 1, 2, 3, -1], [9, 4, 5, 6, 7]])
    expected = np.stack([visible(p, j) for p, j in zip(queries, keys, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(visible))(queries, keys), expected)
