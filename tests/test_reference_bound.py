"""The oracle's bound: wide enough for every correct kernel, narrow enough to see every wrong decision."""

import numpy as np
import pytest
from reference_cases import GENERATORS, KERNELS, KINDS, inputs, join, online, worst

from fattn.types import Range, causal, full, window
from reference import dense, masks, merge
from reference.bounded import ROUNDOFF, Bounded, Precision


def precision_of(dtype, *, output=True):
    """What a kernel with inputs of `dtype` declares when it casts P, and the output, to it."""
    low = 0.0 if dtype == "float32" else ROUNDOFF[dtype]
    return Precision(probabilities=low, output=low if output else 0.0)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("generator", GENERATORS)
def test_correct_kernels_stay_within(generator, dtype):
    rng = np.random.default_rng(len(generator))
    for queries, keys in ((7, 65), (3, 1), (2, 257)):
        q, k, v, scale = inputs(generator, rng, queries=queries, keys=keys, dtype=dtype)
        mask, sides = causal() & window(200, None), (Range(keys - queries, queries), Range(0, keys))
        seen = masks.visible(*sides, mask=mask)
        want = dense.attend(q, k, v, *sides, mask=mask, scale=scale, precision=precision_of(dtype))
        for name, kernel in KERNELS.items():
            out, lse = kernel(q, k, v, seen, scale, p=KINDS[dtype])
            ratios = worst(out.astype(KINDS[dtype]), want.value.out, want.bound.out), worst(lse, want.value.lse, want.bound.lse)
            assert max(ratios) <= 0.9, (name, queries, keys, ratios)


@pytest.mark.parametrize("softcap", (2.0, 50.0))
def test_a_cap_and_a_bias_stay_within(softcap):
    rng = np.random.default_rng(3)
    for generator in ("gaussian", "huge", "offset"):
        q, k, v, scale = inputs(generator, rng)
        bias = 30 * rng.standard_normal((4, 7, 65)).astype(np.float32)
        sides = Range(58, 7), Range(0, 65)
        want = dense.attend(q, k, v, *sides, bias, mask=causal(), scale=scale, softcap=softcap)
        seen = masks.visible(*sides, mask=causal())
        for block, reverse in ((65, False), (16, True), (1, False)):
            out, lse = online(q, k, v, seen, scale, block=block, reverse=reverse, softcap=softcap, bias=bias)
            assert max(worst(out, want.value.out, want.bound.out), worst(lse, want.value.lse, want.bound.lse)) <= 0.9


def test_sequential_sums_of_tied_keys_stay_within_and_a_bound_by_the_square_root_would_not_hold_them():
    keys = 16384
    q, k, v, scale = inputs("tied", np.random.default_rng(0), queries=1, keys=keys, heads=1, kv_heads=1)
    q, v = 0 * q, np.full_like(v, 0.1)
    want = dense.attend(q, k, v, Range(0, 1), Range(0, keys), mask=full(), scale=scale)
    summed = np.cumsum(np.full(keys, np.float32(0.1)), dtype=np.float32)[-1] / np.float32(keys)
    error = abs(summed - np.float64(np.float32(0.1)))
    assert error <= 0.9 * want.bound.out.min()
    assert error > 4 * keys**0.5 * 2.0**-24 * 0.1


def test_the_bound_is_an_error_bar_and_not_a_tolerance():
    q, k, v, scale = inputs("gaussian", np.random.default_rng(0), queries=16, keys=256, size=64)
    want = dense.attend(q, k, v, Range(240, 16), Range(0, 256), mask=causal(), scale=scale)
    assert want.bound.out.max() < 2e-4 and want.bound.lse.max() < 2e-4


def test_merging_many_parts_stays_within_and_the_bound_does_not_run_away():
    rng = np.random.default_rng(5)
    for generator in ("gaussian", "peaked", "huge"):
        q, k, v, scale = inputs(generator, rng, keys=256)
        whole = dense.attend(q, k, v, Range(249, 7), Range(0, 256), mask=causal(), scale=scale)
        oracle, kernel = None, None
        for start in range(0, 256, 8):
            keys, sides = slice(start, start + 8), (Range(249, 7), Range(start, 8))
            part = dense.attend(q, k[keys], v[keys], *sides, mask=causal(), scale=scale)
            piece = online(q, k[keys], v[keys], masks.visible(*sides, mask=causal()), scale, block=8)
            oracle = part if oracle is None else merge.merge(oracle, part)
            kernel = piece if kernel is None else join(kernel, piece)
        np.testing.assert_allclose(oracle.value.out, whole.value.out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(oracle.value.lse, whole.value.lse, rtol=1e-14)
        assert worst(kernel[0], oracle.value.out, oracle.bound.out) <= 0.9
        assert worst(kernel[1], oracle.value.lse, oracle.bound.lse) <= 0.9
        assert oracle.bound.out.max() < 16 * whole.bound.out.max()


def test_uncertain_inputs_are_carried_through():
    rng = np.random.default_rng(7)
    for size in (1e-4, 1e-2, 0.3):
        q, k, v, scale = inputs("gaussian", rng)
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        offsets = [np.full(x.shape, size) for x in (q, k, v)]
        sides = dict(mask=causal(), scale=scale)
        want = dense.attend(*map(Bounded, (q, k, v), offsets), Range(58, 7), Range(0, 65), **sides)
        for _ in range(4):
            moved = [x + size * rng.choice([-1, 1], x.shape) for x in (q, k, v)]
            other = dense.attend(*moved, Range(58, 7), Range(0, 65), **sides)
            assert worst(other.value.out, want.value.out, want.bound.out) <= 1
            assert worst(other.value.lse, want.value.lse, want.bound.lse) <= 1
        assert want.bound.out.max() < 60 * size + 2e-4


def spotlights(rng, *, keys=40, heads=4, kv_heads=2, size=16):
    """q, k, v, scale with mild scores, so that every visible key matters, and a code in v that tells keys and heads apart."""
    k = rng.standard_normal((keys, kv_heads, size)) / 4
    v = rng.permuted(np.linspace(-1, 1, keys * kv_heads)).reshape(keys, kv_heads, 1) * np.ones(8)
    q = np.broadcast_to(rng.standard_normal(size) / 4, (keys, heads, size)).copy()
    return q, k, v, size**-0.5


@pytest.mark.parametrize("dtype", KINDS)
def test_every_flipped_decision_is_far_outside(dtype):
    """Each decision of the definition, taken wrongly on inputs that turn on it, misses by at least 8 bounds, in the output alone."""
    rng = np.random.default_rng(11)
    q, k, v, scale = (x.astype(KINDS[dtype]) if isinstance(x, np.ndarray) else x for x in spotlights(rng))
    sides, precision = (Range(0, 40), Range(0, 40)), precision_of(dtype)
    mask = causal() & window(2, None)
    sink, slopes = np.array([0.5, 1.5, 0.0, 2.5]), np.array([0.7, 0.3, 1.0, 2.0])
    bias = dense.alibi(slopes, *sides)

    def output(*, mask=mask, scale=4 * scale, softcap=None, sink=sink, bias=bias, k=k, v=v, q_pos=sides[0]):
        partial = dense.attend(q, k, v, q_pos, sides[1], bias, mask=mask, scale=scale, softcap=softcap, precision=precision)
        return merge.finish(partial, sink, dtype=dtype, precision=precision)

    right = output()
    flips = {
        "left edge one wider": output(mask=causal() & window(3, None)),
        "left edge one narrower": output(mask=causal() & window(1, None)),
        "right edge one wider": output(mask=window(2, 1)),
        "causal strict": output(q_pos=Range(-1, 40)),
        "scale": output(scale=scale),
        "sink dropped": output(sink=None),
        "sink of another head": output(sink=np.roll(sink, 1)),
        "softcap": output(softcap=0.25),
        "bias dropped": output(bias=None),
        "bias sign": output(bias=dense.alibi(-slopes, *sides)),
        "key heads swapped": output(k=k[:, ::-1], v=v[:, ::-1]),
        "values one key off": output(v=np.roll(v, 1, axis=0)),
    }
    for name, wrong in flips.items():
        ratio = (np.abs(wrong.value - right.value) / np.maximum(right.bound, 1e-300)).max()
        assert ratio >= 8, (name, ratio)
