"""The oracle's merge and finish: against attention over all keys at once, an attention with an extra logit, and float32 kernels."""

import numpy as np
import pytest
import torch
from reference_cases import GENERATORS, KINDS, inputs, online, worst

from fattn.types import Partial, Range, causal, full
from reference import dense, masks, merge
from reference.bounded import ROUNDOFF, Bounded, Precision

EXACT = dict(rtol=0, atol=1e-12)
CALL = dict(mask=causal(), scale=0.3)


def random(seed=0, *, queries=7, keys=12):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s) for s in ((queries, 4, 8), (keys, 2, 8), (keys, 2, 5))]


def parts(q, k, v, edges):
    """Attention over each run of keys between two edges; the queries stand at the last positions."""
    queries = Range(len(k) - len(q), len(q))
    return [dense.attend(q, k[a:b], v[a:b], queries, Range(a, b - a), **CALL) for a, b in zip(edges, edges[1:], strict=False)]


def test_any_split_of_the_keys_merges_to_the_whole():
    q, k, v = random()
    whole = dense.attend(q, k, v, Range(5, 7), Range(0, 12), **CALL)
    for cut in range(13):
        for a, b in (parts(q, k, v, (0, cut, 12)), parts(q, k, v, (0, cut, 12))[::-1]):
            merged = merge.merge(a, b)
            np.testing.assert_allclose(merged.value.out, whole.value.out, **EXACT)
            np.testing.assert_allclose(merged.value.lse, whole.value.lse, **EXACT)


def test_a_monoid():
    a, b, c = parts(*random(), (0, 3, 7, 12))
    left, right = merge.merge(merge.merge(a, b), c), merge.merge(a, merge.merge(b, c))
    np.testing.assert_allclose(left.value.out, right.value.out, **EXACT)
    nothing = merge.empty(7, 4, 5, dtype="float32")
    for merged in (merge.merge(a, nothing), merge.merge(nothing, a)):
        for field, wanted in zip((*merged.value, *merged.bound), (*a.value, *a.bound), strict=True):
            np.testing.assert_array_equal(field, wanted)
    both = merge.merge(nothing, nothing)
    assert (both.value.out == 0).all() and (both.value.lse == -np.inf).all() and (both.bound.out == 0).all()


@pytest.mark.parametrize("garbage", (np.nan, np.inf, 1e30))
def test_the_out_of_an_empty_row_is_never_read(garbage):
    valid = Partial(np.ones((2, 1, 3)), np.full((2, 1), 0.3))
    unread = Partial(np.full((2, 1, 3), garbage), np.full((2, 1), -np.inf))
    for merged in (merge.merge(valid, unread), merge.merge(unread, valid)):
        np.testing.assert_array_equal(merged.value.out, valid.out)
        np.testing.assert_array_equal(merged.value.lse, valid.lse)
    assert (merge.finish(unread, np.zeros(1), dtype="float32").value == 0).all()


def test_plain_partials_in_any_dtype_are_read_exactly():
    a = Partial(np.array([[[1.0, 2.0]]], np.float16), np.array([[0.0]], np.float32))
    b = Partial(np.array([[[3.0, 6.0]]], np.float16), np.array([[np.log(3)]]))
    merged = merge.merge(a, b)
    np.testing.assert_allclose(merged.value.out, [[[2.5, 5.0]]], **EXACT)
    np.testing.assert_allclose(merged.value.lse, [[np.log(4)]], **EXACT)


def test_a_partial_that_cannot_be_merged_is_refused_by_name():
    a = Partial(np.ones((2, 1, 3)), np.zeros((2, 1)))
    bad = [
        (Partial(a.out, None), "b.lse is None"),
        (Partial(a.out, np.array([[0.0], [np.inf]])), r"b.lse\[1, 0\] is inf"),
        (Partial(a.out, np.array([[np.nan], [0.0]])), r"b.lse\[0, 0\] is nan"),
        (Partial(a.out[:, :, :2], a.lse), "disagree in shape"),
    ]
    for b, message in bad:
        with pytest.raises(ValueError, match=message):
            merge.merge(a, b)
    with pytest.raises(ValueError, match="partial.lse is None"):
        merge.finish(Partial(a.out, None), np.zeros(1), dtype="float32")
    with pytest.raises(ValueError, match="1 query heads"):
        merge.finish(a, np.zeros(2), dtype="float32")
    with pytest.raises(ValueError, match="int32"):
        merge.finish(a, dtype="int32")
    assert merge.finish(Partial(a.out, None), dtype="float16").value.shape == (2, 1, 3)


def test_a_sink_is_one_more_key_of_value_zero():
    q, k, v = random()
    sink = np.array([0.5, -3.0, 7.0, 0.0])
    got = merge.finish(dense.attend(q, k, v, Range(5, 7), Range(0, 12), **CALL), sink, dtype="float64")
    seen = torch.from_numpy(masks.visible(Range(5, 7), Range(0, 12), mask=causal()))
    for h in range(4):
        z = torch.from_numpy(q[:, h] @ k[:, h // 2].T * 0.3).masked_fill(~seen, -torch.inf)
        p = torch.softmax(torch.cat([z, torch.full((7, 1), sink[h], dtype=torch.float64)], 1), 1)[:, :-1]
        np.testing.assert_allclose(got.value[:, h], (p @ torch.from_numpy(v[:, h // 2])).numpy(), **EXACT)


def test_sinks_equal_those_of_transformers():
    """Values from transformers 5.24.0, models.gpt_oss.modeling_gpt_oss.eager_attention_forward, in float64 on the inputs below."""
    q = np.cos(np.arange(48.0)).reshape(4, 3, 4).transpose(1, 0, 2)
    k = np.sin(0.7 * np.arange(40.0)).reshape(2, 5, 4).transpose(1, 0, 2)
    v = np.cos(0.3 * np.arange(40.0)).reshape(2, 5, 4).transpose(1, 0, 2)
    partial = dense.attend(q, k, v, Range(2, 3), Range(0, 5), mask=causal(), scale=0.5)
    got = merge.finish(partial, np.array([0.5, -1.0, 2.0, 0.0]), dtype="float64")
    first_head = [0.2312960833502026, 0.08348490481012627, -0.07178373163761957, -0.22064014112816283]
    last_head = [0.09993688458614639, 0.09203068946194033, 0.07590366693861138, 0.05299639590784446]
    np.testing.assert_allclose(got.value[0, 0], first_head, **EXACT)
    np.testing.assert_allclose(got.value[2, 3], last_head, **EXACT)


def test_sinks_at_their_ends():
    q, k, v = np.zeros((1, 4, 8)), np.zeros((16, 2, 8)), np.ones((16, 2, 3))
    partial = dense.attend(q, k, v, Range(0, 1), Range(0, 16), mask=full(), scale=1.0)
    got = merge.finish(partial, np.array([0.0, -np.inf, np.inf, 1e4]), dtype="float32")
    np.testing.assert_allclose(got.value[0, :, 0], [16 / 17, 1, 0, 0], rtol=1e-12)
    assert got.bound[0, 2, 0] == 0 and got.bound.max() < 1e-5
    for sink in (80.0, 300.0, 720.0, 1e30, -80.0, -720.0, -1e30):
        share = merge.finish(partial, np.full(4, sink), dtype="float32")
        assert (share.value >= 0).all() and (share.value <= 1).all() and np.isfinite(share.bound).all() and (share.bound < 1e-4).all()


@pytest.mark.parametrize("dtype", KINDS)
def test_float32_sinks_stay_within(dtype):
    rng = np.random.default_rng(4)
    low = 0.0 if dtype == "float32" else ROUNDOFF[dtype]
    sink = np.array([0.3, -5.0, 4.0, 30.0], np.float32)
    for generator in GENERATORS:
        q, k, v, scale = inputs(generator, rng, dtype=dtype)
        sides = Range(58, 7), Range(0, 65)
        want = dense.attend(q, k, v, *sides, mask=causal(), scale=scale, precision=Precision(probabilities=low))
        want = merge.finish(want, sink, dtype=dtype)
        seen = masks.visible(*sides, mask=causal())
        out, lse = online(q, k, v, seen, scale, block=16, probabilities=KINDS[dtype])
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(sink - lse))
        assert worst((out * share[..., None]).astype(KINDS[dtype]), want.value, want.bound) <= 0.9
        top = np.maximum(lse, sink)
        share = np.exp(lse - top) / (np.exp(lse - top) + np.exp(sink - top))
        assert worst((out * share[..., None]).astype(KINDS[dtype]), want.value, want.bound) <= 0.9


def test_an_uncertain_sink_and_lse_are_carried_through():
    out, lse, sink = np.ones((1, 3, 2)), np.array([[0.0, 5.0, -5.0]]), np.zeros(3)
    off = 0.2
    want = merge.finish(
        Bounded(Partial(out, lse), Partial(0 * out, np.full(lse.shape, off))), Bounded(sink, np.full(3, off)), dtype="float64"
    )
    for sign in (1, -1):
        moved = merge.finish(Partial(out, lse + sign * off), sink - sign * off, dtype="float64")
        assert 0.2 < worst(moved.value, want.value, want.bound) <= 1
