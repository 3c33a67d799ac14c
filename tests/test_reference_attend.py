"""The oracle's masks and attention against implementations that nobody here wrote: ONNX's reference operator, torch SDPA, jax.nn."""

import jax
import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from reference_cases import inputs, worst

from fattn.types import Compressed, Partial, Range, Tokens, Unsupported, causal, chunk, full, same, tree, window
from reference import dense, masks
from reference.bounded import ROUNDOFF, Bounded, Precision, cast

EXACT = dict(rtol=0, atol=1e-12)


def random(*, heads=6, kv_heads=2, queries=5, keys=9, size=8, value_size=8, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s) for s in ((queries, heads, size), (keys, kv_heads, size), (keys, kv_heads, value_size))]


def onnx_attention(q, k, v, *, opset, past=0, bias=None, lengths=None, **attributes):
    """ONNX's Attention on one sequence [rows, heads, size]; the first `past` keys go in as the cache."""
    names = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"][: 6 if opset == 23 else 7]
    first, rest = ([x[part].transpose(1, 0, 2)[None] for x in (k, v)] for part in (slice(past), slice(past, None)))
    given = [q.transpose(1, 0, 2)[None], *rest, bias, *(first if past else (None, None)), lengths][: len(names)]
    feed = {name: array for name, array in zip(names, given, strict=True) if array is not None}
    used = [name if name in feed else "" for name in names]
    while not used[-1]:
        used.pop()
    node = onnx.helper.make_node("Attention", used, ["Y"], **attributes)
    infos = [onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()]
    result = onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.DOUBLE, None)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "attention", infos, [result]), opset_imports=[onnx.helper.make_opsetid("", opset)]
    )
    return onnx.reference.ReferenceEvaluator(model).run(None, feed)[0][0].transpose(1, 0, 2)


@pytest.mark.parametrize("opset", (23, 24, 25))
@pytest.mark.parametrize("heads, kv_heads", ((4, 4), (6, 2), (5, 1), (8, 2)))
def test_onnx_bottom_right_causal_with_a_past(opset, heads, kv_heads):
    q, k, v = random(heads=heads, kv_heads=kv_heads, value_size=5)
    got = dense.attend(q, k, v, Range(4, 5), Range(0, 9), mask=causal(), scale=0.25)
    np.testing.assert_allclose(got.value.out, onnx_attention(q, k, v, opset=opset, past=4, is_causal=1, scale=0.25), **EXACT)


@pytest.mark.parametrize("opset", (23, 24, 25))
@pytest.mark.parametrize("shape", ((6, 5, 9), (1, 5, 9), (6, 1, 9), (1, 1, 9), (5, 9)))
def test_onnx_cap_before_bias_and_every_broadcast(opset, shape):
    q, k, v = random()
    bias = 3 * np.random.default_rng(1).standard_normal(shape)
    bias[..., 2] = -np.inf
    got = dense.attend(q, k, v, Range(4, 5), Range(0, 9), bias, mask=full(), scale=0.25, softcap=1.5)
    want = onnx_attention(q, k, v, opset=opset, bias=bias, softcap=1.5, scale=0.25)
    np.testing.assert_allclose(got.value.out, want, **EXACT)


@pytest.mark.parametrize("left, right", ((0, 0), (2, 0), (1, 3), (None, 1), (3, None)))
def test_onnx_windows_are_inclusive_on_both_sides(left, right):
    q, k, v = random()
    sides = {name: -1 if side is None else side for name, side in (("left_window_size", left), ("right_window_size", right))}
    got = dense.attend(q, k, v, Range(4, 5), Range(0, 9), mask=window(left, right), scale=0.25)
    np.testing.assert_allclose(got.value.out, onnx_attention(q, k, v, opset=25, past=4, scale=0.25, **sides), **EXACT)


def test_onnx_more_queries_than_keys_gives_empty_rows():
    q, k, v = random(queries=9, keys=5)
    got = dense.attend(q, k, v, Range(-4, 9), Range(0, 5), mask=causal(), scale=0.25)
    want = onnx_attention(q, k, v, opset=24, is_causal=1, scale=0.25, lengths=np.array([5]))
    np.testing.assert_allclose(got.value.out, want, **EXACT)
    assert (got.value.out[:4] == 0).all() and (got.value.lse[:4] == -np.inf).all()
    assert (got.bound.out[:4] == 0).all() and (got.bound.lse[:4] == 0).all()


@pytest.mark.parametrize("heads, kv_heads", ((4, 4), (6, 2), (9, 3), (5, 1)))
@pytest.mark.parametrize("mask", (causal() & window(3, None), chunk(4) & causal(), window(1, 2) | chunk(3), same("user"), full()))
def test_torch_sdpa_under_every_mask(heads, kv_heads, mask):
    q, k, v = random(heads=heads, kv_heads=kv_heads)
    users = np.array([0, 0, 1, 1, 2, 2, 0, 1, 1])
    queries, keys = Tokens(Range(4, 5), {"user": users[4:]}), Tokens(Range(0, 9), {"user": users})
    got = dense.attend(q, k, v, queries, keys, mask=mask, scale=0.4)
    seen = np.array([[rule(mask, p, j, users[p] == users[j]) for j in range(9)] for p in range(4, 9)])
    assert (masks.visible(queries, keys, mask=mask) == seen).all()
    tq, tk, tv = (torch.from_numpy(x.transpose(1, 0, 2))[None] for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, torch.from_numpy(seen), scale=0.4, enable_gqa=True)
    np.testing.assert_allclose(got.value.out, want[0].numpy().transpose(1, 0, 2), **EXACT)


def rule(mask, p, j, together):
    """The masks of the test above in Python's own words."""
    return {
        causal() & window(3, None): p - 3 <= j <= p,
        chunk(4) & causal(): j <= p and p // 4 == j // 4,
        window(1, 2) | chunk(3): p - 1 <= j <= p + 2 or p // 3 == j // 3,
        same("user"): together,
        full(): True,
    }[mask]


def test_trees_see_ancestors():
    parents = [-1, 0, 1, 1, 0, 4]
    enter, exit = np.array([0, 1, 2, 3, 4, 5]), np.array([6, 4, 3, 4, 6, 6])
    tokens = Tokens(Range(0, 6), {"enter": enter, "exit": exit})
    seen = masks.visible(tokens, tokens, mask=tree("enter", "exit"))
    for i in range(6):
        line, node = set(), i
        while node >= 0:
            line.add(node)
            node = parents[node]
        assert set(np.flatnonzero(seen[i])) == line
    context = Tokens(Range(0, 2), {"enter": np.zeros(2, np.int32), "exit": np.full(2, 2**31 - 1)})
    assert masks.visible(tokens, context, mask=tree("enter", "exit")).all()
    only_enter = Tokens(Range(0, 6), {"enter": enter})
    assert (masks.visible(only_enter, tokens, mask=tree("enter", "exit")) == seen).all()


def test_torch_flash_attention_agrees_about_the_log_sum_exp():
    q, k, v = random(heads=4, kv_heads=4, queries=9)
    tq, tk, tv = (torch.from_numpy(x.transpose(1, 0, 2))[None] for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(tq, tk, tv, is_causal=True, scale=0.3)
    got = dense.attend(q, k, v, Range(0, 9), Range(0, 9), mask=causal(), scale=0.3)
    np.testing.assert_allclose(got.value.out, out[0].numpy().transpose(1, 0, 2), **EXACT)
    np.testing.assert_allclose(got.value.lse, lse[0].numpy().T, **EXACT)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_jax_nn_stays_within_the_bound(dtype):
    q, k, v, scale = inputs("gaussian", np.random.default_rng(2), queries=40, keys=40, value_size=32, dtype=dtype)
    low = 0.0 if dtype == "float32" else ROUNDOFF[dtype]
    declared = Precision(probabilities=low, output=low)
    got = dense.attend(q, k, v, Range(0, 40), Range(0, 40), mask=causal() & window(7, None), scale=scale, precision=declared)
    out, lse = jax.nn.dot_product_attention(
        *(x[None] for x in (q, k, v)), scale=scale, is_causal=True, local_window_size=(7, 0), return_residual=True
    )
    assert worst(out[0], got.value.out, got.bound.out) <= 1
    assert worst(lse[0], *cast(Bounded(got.value.lse, got.bound.lse), dtype)) <= 1  # jax.nn returns the lse in the inputs' dtype


def test_alibi_is_the_published_one():
    np.testing.assert_allclose(dense.alibi_slopes(8).value, [2.0**-i for i in range(1, 9)], rtol=0)
    twelve = [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    np.testing.assert_allclose(dense.alibi_slopes(12).value, twelve, rtol=1e-15)
    bias = dense.alibi(np.array([0.5, 2.0]), Range(3, 2), np.array([0, 4, 9]))
    np.testing.assert_array_equal(bias.value, [[[-1.5, -0.5, -3.0], [-2.0, 0.0, -2.5]], [[-6.0, -2.0, -12.0], [-8.0, 0.0, -10.0]]])
    assert bias.bound.shape == (2, 2, 3) and bias.bound.max() < 1e-5


@pytest.mark.parametrize("mask", (full(), causal(), window(5, 0), window(7, 3), causal() & window(20, 9), window(None, 2), window(0, None)))
def test_compressed_masks_expand_to_what_they_were_made_from(mask):
    form = masks.compressed(mask=mask)
    assert form.sparse_mode == (0 if mask == full() else 3 if mask == causal() else 4)
    if form.atten_mask is not None:
        assert form.atten_mask.shape == (2048, 2048) and (form.atten_mask == np.triu(np.ones((2048, 2048), bool), 1)).all()
    for query_len, kv_len in ((30, 30), (4, 50), (1, 9), (9, 4), (3, 0)):
        want = masks.visible(Range(kv_len - query_len, query_len), Range(0, kv_len), mask=mask)
        assert (masks.expand(form, query_len=query_len, kv_len=kv_len) == want).all()


def test_masks_that_are_no_band_have_no_compressed_form():
    with pytest.raises(Unsupported, match="mask"):
        masks.compressed(mask=chunk(4))
    assert isinstance(masks.compressed(mask=causal()), Compressed)


def test_what_no_query_reads_may_hold_anything():
    q, k, v = random(keys=12)
    want = dense.attend(q, k, v, Range(4, 5), Range(0, 12), mask=window(3, 1), scale=0.3)
    for poison in (np.nan, np.inf):
        for x in (k, v):
            x[0], x[10:] = poison, poison
        padded = np.concatenate([q, np.full_like(q[:2], poison)])
        positions = np.array([4, 5, 6, 7, 8, -1, -7])
        got = dense.attend(padded, k, v, positions, Range(0, 12), mask=window(3, 1), scale=0.3)
        for field, wanted in zip((*got.value, *got.bound), (*want.value, *want.bound), strict=True):
            np.testing.assert_array_equal(field[:5], wanted)
        assert (got.value.out[5:] == 0).all() and (got.value.lse[5:] == -np.inf).all()


def test_a_bias_hides_by_head():
    q, k, v = random()
    bias = np.zeros((6, 5, 9))
    bias[3, :, :] = -np.inf
    bias[4, 2, 1] = -np.inf
    bias[5, 2, 1] = np.nan
    with pytest.raises(ValueError, match="scores"):
        dense.attend(q, k, v, Range(4, 5), Range(0, 9), bias, mask=full(), scale=0.3)
    bias[5, 2, 1] = -np.inf
    got = dense.attend(q, k, v, Range(4, 5), Range(0, 9), bias, mask=full(), scale=0.3)
    assert (got.value.out[:, 3] == 0).all() and (got.value.lse[:, 3] == -np.inf).all()
    without = dense.attend(q[2:3], np.delete(k, 1, 0), np.delete(v, 1, 0), Range(6, 1), Range(0, 8), mask=full(), scale=0.3)
    np.testing.assert_allclose(got.value.out[2, 4], without.value.out[0, 4], **EXACT)


def test_a_place_that_is_read_and_not_finite_is_an_error_that_names_it():
    q, k, v = random()
    v[2, 1, 3] = np.nan
    with pytest.raises(ValueError, match=r"out\[0, 3, 3\] is nan"):
        dense.attend(q, k, v, Range(4, 5), Range(0, 9), mask=causal(), scale=0.3)


def test_bad_input_is_named():
    q, k, v = random()
    call = dict(mask=causal(), scale=0.3)
    sides = Range(4, 5), Range(0, 9)
    cases = [
        ((q[:, :5], k, v, *sides), {}, "5 heads"),
        ((q, k, v[:8], *sides), {}, "k and v disagree"),
        ((q[..., :4], k, v, *sides), {}, "head size"),
        ((q.transpose(1, 0, 2), k, v, *sides), {}, "layout"),
        ((q, k, v, Range(4, 4), sides[1]), {}, "q_pos has 4 positions for 5 rows"),
        ((q, k.astype(np.float32), v, *sides), {}, "float32"),
        ((q.astype(np.int32), k, v, *sides), {}, "int32"),
        ((q, k, v, *sides, np.zeros((2, 5, 9))), {}, "bias"),
        ((q, k, v, *sides), {"softcap": 0.0}, "softcap"),
        ((q, k, v, *sides), {"mask": same("user")}, "user"),
        ((q, k, v, np.arange(5.0), sides[1]), {}, "float64"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            dense.attend(*arguments, **{**call, **options})


def test_bfloat16_and_bounded_inputs_are_read_as_their_values():
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in random())
    call = dict(mask=causal(), scale=0.3)
    plain = dense.attend(q, k, v, Range(4, 5), Range(0, 9), **call)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    np.testing.assert_array_equal(dense.attend(*wide, Range(4, 5), Range(0, 9), **call).value.out, plain.value.out)
    exact = [Bounded(x, np.zeros(x.shape)) for x in wide]
    same_again = dense.attend(*exact, Range(4, 5), Range(0, 9), **call)
    assert isinstance(plain.value, Partial) and isinstance(plain.bound, Partial)
    np.testing.assert_array_equal(same_again.bound.out, plain.bound.out)
