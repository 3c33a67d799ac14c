"""Int8 caches in the oracle and in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quant_cases import FORMS, STATIC, assert_attends, assert_writes, plain_numbers, step

import reference.dense
import reference.paged
from fattn import paged, quant
from fattn.types import LAYOUTS, Pages, Range, causal
from reference import quant as oracle

JAX = (jnp.asarray, np.asarray, lambda batch, mask: batch)


@pytest.mark.parametrize("form", FORMS)
def test_b45_the_oracle_reads_scales_in_every_path(form):
    """out = attention over the numbers that the integers mean: dense, gathered and paged, and so the LSE."""
    s = step(form)
    k, v = plain_numbers(s)
    found = oracle.attend(s.q.astype(np.float64), s.cache, s.scales, s.batch, mask=s.mask, scale=0.2)
    gathered = oracle.gather(s.cache, s.scales, s.batch.block_table, dtype="float64")
    starts = np.asarray(s.batch.query_start_loc)
    for row, length in enumerate((21, 37)):
        blocks = s.batch.block_table[row, : -(-length // 16)]
        keys, values = (pages[blocks].reshape(-1, 2, 64)[:length] for pages in (k, v))
        for part, right in zip(gathered, (keys, values), strict=True):
            np.testing.assert_allclose(part.value[row, :length], right, rtol=1e-12)
        rows = slice(starts[row], starts[row + 1])
        count = rows.stop - rows.start
        queries, places = s.q[rows].astype(np.float64), Range(length - count, count)
        right = reference.dense.attend(queries, keys, values, places, Range(0, length), mask=s.mask, scale=0.2)
        np.testing.assert_allclose(found.value.out[rows], right.value.out, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.value.lse[rows], right.value.lse, rtol=1e-9)


def test_b45_a_scale_that_is_ignored_would_be_far_off():
    """The case tells: without its scale of 0.25 or 0.5 the result is many bounds away."""
    s = step("one")
    right = oracle.attend(s.q, s.cache, s.scales, s.batch, mask=s.mask, scale=0.2)
    for name, tells in (("k", "lse"), ("v", "out")):
        wrong = oracle.attend(s.q, s.cache, s.scales._replace(**{name: np.float32(1)}), s.batch, mask=s.mask, scale=0.2)
        found, expected, bound = (getattr(part, tells) for part in (wrong.value, right.value, right.bound))
        assert (np.abs(found - expected) > 100 * bound).mean() > 0.9


@pytest.mark.parametrize(
    "form, decode",
    [("one", True), ("a head", False), ("a channel", True), ("a channel, offset", False), ("a token", False), ("a token", True)],
)
def test_b45_jax_attends_within_the_bound(form, decode):
    assert_attends(quant, *JAX, step(form, decode=decode))


def assert_gathers(form):
    """What is gathered is within the oracle's bound, and zeros for blocks that the cache has not."""
    s = step(form)
    table = np.array([[5, -1, 8], [9, 1, 0]], np.int32)
    found = quant.gather(s.cache, s.scales, table, dtype=jnp.bfloat16)
    for ours, right in zip(found, oracle.gather(s.cache, s.scales, table, dtype="bfloat16"), strict=True):
        assert ours.dtype == jnp.bfloat16 and (np.abs(np.asarray(ours, np.float64) - right.value) <= right.bound).all()
        assert not right.value[0, 16:32].any() and not right.value[1, :16].any()


@pytest.mark.parametrize("form", FORMS)
def test_jax_gathers_within_the_bound(form):
    assert_gathers(form)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["a channel, offset", "a token"])
def test_layouts(form, layout):
    s = step(form, layout=layout, size=16)
    if layout != "pbhd":
        assert_attends(quant, *JAX, s)
    assert_writes(quant, *JAX[:2], s, np.arange(3, 11, dtype=np.int32) * 7)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_has_the_oracles_bytes(form):
    assert_writes(quant, *JAX[:2], step(form), np.array([3, -1, 140, 17, 16, 143, 144, 9], np.int32))


@pytest.mark.parametrize("form", STATIC)
def test_what_is_written_reads_back_within_half_a_step(form):
    s = step(form, seed=3)
    slots = np.arange(8, dtype=np.int32) * 5
    small = [rows * 0.1 for rows in (s.k, s.v)]
    cache, scales = quant.write(s.cache, s.scales, *small, slots)
    k, v = quant.gather(cache, scales, np.arange(9, dtype=np.int32)[None], dtype=jnp.float32)
    for found, rows, scale, offset in zip((k, v), small, scales[:2], scales[2:], strict=True):
        offset = 0 if offset is None else offset
        within = np.broadcast_to(np.abs(rows / scale + offset) <= 127, rows.shape)
        off = np.abs(np.asarray(found)[0, slots] - rows)
        assert within.mean() > 0.3 and (off <= 0.501 * np.broadcast_to(scale, rows.shape) + 1e-6)[within].all()


def test_rounding_is_half_to_even_and_saturates():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 400, -127.5, -128.5, -400], np.float32).reshape(-1, 1, 1)
    expected = [0, 2, 2, 0, -2, 126, 127, 127, -128, -128, -128]
    for module in (quant, oracle):
        assert np.asarray(module.quantise(x, np.float32(1)))[:, 0, 0].tolist() == expected
        assert np.asarray(module.quantise(x / 4, np.float32(0.25), np.float32(10)))[:4, 0, 0].tolist() == [10, 12, 12, 10]


def test_a_token_of_zeros_has_scale_one():
    x = np.zeros((2, 2, 8), np.float32)
    x[1, 1, 3] = -254
    for module in (quant, oracle):
        scales = module.token_scales(x)
        np.testing.assert_allclose(np.asarray(getattr(scales, "value", scales)), [[1, 1], [1, 2]], rtol=1e-7)


def test_unread_rows_may_hold_anything():
    """Scales of tokens that were never written may be NaN."""
    s = step("a token")
    read = np.zeros((9, 16), bool)
    for table, length in (([5, 2], 21), ([1, 7, 4], 37)):
        for page, block in enumerate(table):
            read[block, : length - 16 * page] = True
    spoiled = [np.where(read[..., None], part, np.nan) for part in s.scales[:2]]
    assert_attends(quant, *JAX, s._replace(scales=s.scales._replace(k=spoiled[0], v=spoiled[1])))


def test_prefill_then_decode_is_one_cache():
    """Tokens written in one chunk or one by one leave the same bytes, and read the same."""
    s = step("a token")
    empty = quant.allocate(9, 2, 64, 64, block_size=16, layout="hpbd")
    none = oracle.Scales(*(np.ones((9, 16, 2), np.float32) for _ in range(2)))
    slots = np.arange(20, 28, dtype=np.int32)
    whole, whole_scales = quant.write(empty, none, s.k, s.v, slots)
    cache, scales = empty, none
    for row in range(8):
        cache, scales = quant.write(cache, scales, s.k[row : row + 1], s.v[row : row + 1], slots[row : row + 1])
    for a, b in zip((whole.k, whole.v, *whole_scales[:2]), (cache.k, cache.v, *scales[:2]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_compiles_and_differentiates():
    s = step("a channel, offset", size=16)
    run = jax.jit(lambda scales: quant.attend(s.q, s.cache, scales, s.batch, mask=causal(), scale=0.2).out)
    right = oracle.attend(s.q, s.cache, s.scales, s.batch, mask=causal(), scale=0.2)
    assert (np.abs(run(s.scales) - right.value.out) <= right.bound.out).all()
    gradient = jax.grad(lambda scales: run(scales).sum())(jax.tree.map(jnp.asarray, s.scales))
    by = 1e-2 * s.scales.v
    moved = [run(s.scales._replace(v=s.scales.v + sign * by)).sum() for sign in (1, -1)]
    np.testing.assert_allclose((gradient.v * by).sum(), (moved[0] - moved[1]) / 2, rtol=2e-2, atol=1e-3)


BAD = {
    "a float cache": (lambda s: s._replace(cache=Pages(s.cache.k.astype(np.float32), s.cache.v, "pbhd", 16)), "cache.k .*int8"),
    "another block size": (lambda s: s._replace(cache=Pages(s.cache.k, s.cache.v, "pbhd", 8)), "cache.k"),
    "scales of other heads": (
        lambda s: s._replace(scales=s.scales._replace(k=np.ones((3, 1), np.float32))),
        r"scales.k has shape \[3, 1\]",
    ),
    "scales of other channels": (
        lambda s: s._replace(scales=s.scales._replace(v_offset=np.ones(7, np.float32))),
        r"scales.v_offset has shape \[7\]",
    ),
    "scales of other tokens": (
        lambda s: s._replace(scales=s.scales._replace(k=np.ones((9, 8, 2), np.float32), k_offset=None)),
        r"scales.k .*\[9, 16, 2\]",
    ),
    "a token's offset": (
        lambda s: s._replace(scales=s.scales._replace(k=np.ones((9, 16, 2), np.float32))),
        "scales.k .*without an offset",
    ),
}


@pytest.mark.parametrize("module", [quant, oracle], ids=["fattn", "reference"])
@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_input(change, message, module):
    s = change(step("a channel, offset"))
    with pytest.raises(ValueError, match=message):
        module.attend(s.q, s.cache, s.scales, s.batch, mask=causal(), scale=0.2)
    with pytest.raises(ValueError, match=message):
        module.write(s.cache, s.scales, s.k, s.v, np.arange(8, dtype=np.int32))


def attribute(name, change):
    return lambda patch: patch.setattr(quant, name, change(getattr(quant, name)))


def without(argument):
    """`dequantise` that leaves one argument out."""

    def change(real):
        def dequantise(x, scale, offset=None, *, dtype):
            return real(x, 1.0 if argument == "scale" else scale, None if argument == "offset" else offset, dtype=dtype)

        return dequantise

    return change


FAULTS = {
    "the offset is left out where it is read": attribute("dequantise", without("offset")),
    "the scale is left out where it is read": attribute("dequantise", without("scale")),
    "the scale is that of the first head": attribute(
        "dequantise", lambda real: lambda x, scale, offset=None, *, dtype: real(x, jnp.ravel(scale)[0], offset, dtype=dtype)
    ),
    "the offset's sign is turned": attribute("quantise", lambda real: lambda x, s, o=None: real(x, s, None if o is None else -o)),
    "rounding is half up": attribute(
        "quantise", lambda real: lambda x, s, o=None: jnp.clip(jnp.floor(x / s + (0 if o is None else o) + 0.5), -128, 127).astype(jnp.int8)
    ),
    "it wraps instead of saturating": attribute(
        "quantise", lambda real: lambda x, s, o=None: jnp.round(x / s + (0 if o is None else o)).astype(jnp.int32).astype(jnp.int8)
    ),
    "the token's scale is divided by 128": attribute("token_scales", lambda real: lambda x: real(x) * 127 / 128),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    ties = step("one")
    ties = ties._replace(k=np.round(ties.k * 4) / 8 + np.float32(0.125))
    slots = np.arange(8, dtype=np.int32)
    for check in (
        *(lambda form=form: assert_gathers(form) for form in FORMS),
        *(lambda form=form: assert_writes(quant, *JAX[:2], step(form), slots) for form in FORMS),
        lambda: assert_writes(quant, *JAX[:2], ties, slots),
    ):
        try:
            check()
        except AssertionError:
            return
    pytest.fail("no check saw it")


def test_paged_attend_over_the_same_numbers_is_the_same():
    s = step("a channel, offset")
    k, v = plain_numbers(s)
    found = quant.attend(s.q, s.cache, s.scales, s.batch, mask=s.mask, scale=0.2)
    cache = Pages(*(pages.astype(np.float32) for pages in (k, v)), "pbhd", 16)
    expected = paged.attend(s.q, cache, s.batch, mask=s.mask, scale=0.2)
    np.testing.assert_allclose(found.out, expected.out, rtol=1e-5, atol=1e-5)
