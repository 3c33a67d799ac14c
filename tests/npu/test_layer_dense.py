"""npu.dense, npu.masks and npu.merge against the oracle."""

import numpy as np
import pytest
import torch
from layer_cases import FLOATS, assert_within, launched, normal, numpy_of, precision, tree_labels

import npu
import reference
import reference.dense
import reference.masks
import reference.merge
from fattn.types import Partial, Range, Tokens, Unsupported, causal, chunk, full, same, tree, window


def check(q, k, v, q_pos, k_pos, bias=None, *, mask, scale=0.125, dtype="float16"):
    """One call of npu.dense.attend against the oracle; returns the result."""
    found, _ = launched(npu.dense.attend, q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale)
    assert found.out.dtype == FLOATS[dtype] and found.lse.dtype == torch.float32
    arrays = [numpy_of(x) for x in (q, k, v)]
    expected = reference.dense.attend(*arrays, host(q_pos), host(k_pos), numpy_of(bias), mask=mask, scale=scale, precision=precision(dtype))
    assert_within(found, expected)
    return found


def host(tokens):
    if isinstance(tokens, Tokens):
        return Tokens(host(tokens.pos), {name: numpy_of(x) for name, x in tokens.labels.items()})
    return numpy_of(tokens)


def qkv(t, s, h, hk, d, dtype="float16", dv=None):
    return (
        normal(t, h, d, dtype=dtype, seed=1),
        normal(s, hk, d, dtype=dtype, seed=2),
        normal(s, hk, dv or d, dtype=dtype, seed=3),
    )


MASKS = [full(), causal(), window(5, 0), window(3, 2), window(None, 4), chunk(8), causal() & window(7, 9), window(2, 0) | chunk(4)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("dtype", "h", "hk", "d"), [("float16", 4, 2, 64), ("bfloat16", 6, 1, 128)])
def test_every_mask_over_ranges_and_over_arrays(mask, dtype, h, hk, d):
    q, k, v = qkv(20, 33, h, hk, d, dtype)
    ranges = check(q, k, v, Range(13, 20), Range(0, 33), mask=mask, dtype=dtype)
    arrays = check(q, k, v, torch.arange(13, 33), torch.arange(33), mask=mask, dtype=dtype)
    tolerance = 4 * 2.0 ** (-11 if dtype == "float16" else -8)
    torch.testing.assert_close(ranges.out, arrays.out, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mask", [full(), causal(), window(5, 0), chunk(8)], ids=str)
@pytest.mark.parametrize("start", [32, 20, 3])
def test_one_query_though_the_operator_ignores_bands_for_it(mask, start):
    q, k, v = qkv(1, 33, 4, 2, 64)
    check(q, k, v, Range(start, 1), Range(0, 33), mask=mask)


@pytest.mark.parametrize(("q_start", "k_start"), [(0, 20), (20, 0), (5, 0), (0, 0), (0, 5), (-3, 0), (0, -3)])
@pytest.mark.parametrize("mask", [causal(), window(6, 1)], ids=str)
def test_ranges_that_do_not_end_together(q_start, k_start, mask):
    q, k, v = qkv(9, 12, 2, 2, 32)
    check(q, k, v, Range(q_start, 9), Range(k_start, 12), mask=mask)


def test_rows_that_see_nothing_are_exactly_empty():
    q, k, v = qkv(5, 2, 2, 1, 64)  # B04: five queries on two keys, the first three stand before them
    found = check(q, k, v, Range(-3, 5), Range(0, 2), mask=causal())
    assert (found.out[:3] == 0).all() and (found.lse[:3] == -torch.inf).all()
    other = Partial(normal(5, 2, 64, seed=9).float(), torch.zeros(5, 2))
    merged = npu.merge.merge(found, other)
    assert torch.equal(merged.out[:3], other.out[:3]) and torch.equal(merged.lse[:3], other.lse[:3])


@pytest.mark.parametrize(("t", "s"), [(0, 4), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(t, s):
    found = check(*qkv(t, s, 2, 2, 64), Range(0, t), Range(0, s), mask=full())
    assert found.out.shape == (t, 2, 64)


def test_padding_may_hold_anything():
    q, k, v = qkv(4, 6, 2, 2, 64)
    q_pos, k_pos = torch.tensor([2, -1, 3, 5]), torch.tensor([0, -1, 2, 3, -7, 5])
    clean = npu.dense.attend(q, k, v, q_pos, k_pos, mask=causal(), scale=0.125)
    q[1], k[1], v[1], k[4], v[4] = torch.nan, torch.nan, torch.inf, torch.inf, torch.nan
    dirty = npu.dense.attend(q, k, v, q_pos, k_pos, mask=causal(), scale=0.125)
    torch.testing.assert_close(clean, dirty, atol=2e-3, rtol=2e-3)
    assert (dirty.out[1] == 0).all() and (dirty.lse[1] == -torch.inf).all()


def test_labels():
    parents = [-1, 0, 1, 0, -1]
    own, keys = tree_labels(parents, context=7)
    q, k, v = qkv(5, 12, 4, 4, 32)
    positions = torch.tensor([7, 8, 9, 8, 7])
    key_positions = torch.cat([torch.arange(7), positions])
    own, keys = ({name: torch.from_numpy(x) for name, x in labels.items()} for labels in (own, keys))
    check(q, k, v, Tokens(positions, own), Tokens(key_positions, keys), mask=tree("enter", "exit"))
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2])
    check(
        q,
        k,
        v,
        Tokens(Range(7, 5), {"document": torch.tensor([2, 2, 2, 9, 1])}),
        Tokens(Range(0, 12), {"document": documents}),
        mask=causal() & same("document"),
    )
    with pytest.raises(ValueError, match="'document'"):
        npu.dense.attend(q, k, v, Range(7, 5), Range(0, 12), mask=same("document"), scale=1.0)


@pytest.mark.parametrize("shape", [(4, 9, 12), (1, 9, 12), (4, 1, 12), (9, 12), (12,), (4, 1, 1)])
def test_bias_of_every_broadcast_shape(shape):
    q, k, v = qkv(9, 12, 4, 2, 64)
    check(q, k, v, Range(3, 9), Range(0, 12), normal(*shape, seed=5, size=3.0), mask=causal())


def test_bias_that_hides_a_key_from_one_head_or_a_whole_row():
    q, k, v = qkv(9, 12, 4, 2, 64)
    bias = normal(4, 9, 12, seed=5)
    bias[1, 2, 3] = bias[0, 4, :] = bias[:, 5, :] = bias[:, :, 0] = -torch.inf
    found = check(q, k, v, Range(3, 9), Range(0, 12), bias, mask=causal())
    assert (found.lse[4, 0] == -torch.inf) and (found.lse[5] == -torch.inf).all() and torch.isfinite(found.lse[4, 1:]).all()


def test_alibi():
    slopes = npu.dense.alibi_slopes(12)
    expected = reference.dense.alibi_slopes(12)
    np.testing.assert_allclose(slopes.numpy(), expected.value, rtol=1e-6)
    q, k, v = qkv(9, 12, 12, 3, 64)
    bias = npu.dense.alibi(slopes, Range(3, 9), Range(0, 12))
    np.testing.assert_allclose(bias.numpy(), reference.dense.alibi(slopes.numpy(), Range(3, 9), Range(0, 12)).value, rtol=1e-6)
    check(q, k, v, Range(3, 9), Range(0, 12), bias.half(), mask=causal())
    low = npu.dense.alibi(torch.tensor([0.5], dtype=torch.bfloat16), Range(1001, 1), Range(0, 3))
    assert low.tolist() == [[[-500.5, -500.0, -499.5]]]  # distances past 256 are no bfloat16 numbers


@pytest.mark.parametrize("mask", [full(), causal(), window(3, 0)], ids=str)
def test_strided_inputs_give_the_contiguous_result(mask):
    q, k, v = qkv(9, 12, 4, 2, 64)
    right = check(q, k, v, Range(3, 9), Range(0, 12), mask=mask)
    both = torch.cat([k, v], -1)
    strided_q = q.transpose(0, 1).contiguous().transpose(0, 1)
    spread = torch.empty(24, 2, 64, dtype=q.dtype)
    spread[::2] = k
    for keys, values in ((both[..., :64], both[..., 64:]), (spread[::2], v)):
        assert not keys.is_contiguous()
        for _ in range(2):
            found = npu.dense.attend(strided_q, keys, values, Range(3, 9), Range(0, 12), mask=mask, scale=0.125)
            torch.testing.assert_close(found, right, atol=2e-3, rtol=2e-3)


def test_sizes_192_and_128_of_latent_attention():
    q, k, v = qkv(9, 12, 4, 2, 192, dv=128)
    check(q, k, v, Range(3, 9), Range(0, 12), mask=causal())
    with pytest.raises(Unsupported, match="value_size"):
        npu.dense.attend(q, k, v, torch.arange(3, 12), torch.arange(12), mask=causal(), scale=1.0)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"dtype": torch.float32}, "q.dtype"),
        ({"softcap": 30.0}, "softcap"),
        ({"d": 72}, "head_size"),
        ({"d": 528}, "head_size"),
        ({"h": 130, "hk": 2}, "heads / kv_heads"),
        ({"bias": torch.zeros(4)}, "bias.dtype"),
    ],
)
def test_refusals_name_the_argument(change, argument):
    h, hk, d, dtype = change.get("h", 4), change.get("hk", 2), change.get("d", 64), change.get("dtype", torch.float16)
    q, k, v = torch.zeros(3, h, d, dtype=dtype), torch.zeros(4, hk, d, dtype=dtype), torch.zeros(4, hk, d, dtype=dtype)
    with pytest.raises(Unsupported) as error:
        npu.dense.attend(q, k, v, Range(1, 3), Range(0, 4), change.get("bias"), mask=causal(), scale=1.0, softcap=change.get("softcap"))
    assert error.value.argument == argument and error.value.limit and error.value.instead


def test_masks_equal_the_oracles():
    for mask in MASKS:
        q_pos, k_pos = np.array([5, -1, 0, 11], np.int32), np.array([0, 3, -2, 5, 11, 12], np.int32)
        expected = reference.masks.visible(q_pos, k_pos, mask=mask)
        assert (npu.masks.visible(torch.from_numpy(q_pos), torch.from_numpy(k_pos), mask=mask).numpy() == expected).all()
    for mask in (full(), causal(), window(700, 3), window(None, 0), window(5, None)):
        form = npu.masks.compressed(mask=mask)
        assert (form.atten_mask is None) == (form.sparse_mode == 0)
        for query_len, kv_len in ((2048, 2048), (5, 2), (1, 9)):
            seen = npu.masks.expand(form, query_len=query_len, kv_len=kv_len)
            right = npu.masks.visible(Range(kv_len - query_len, query_len), Range(0, kv_len), mask=mask)
            assert torch.equal(seen, right)
    with pytest.raises(Unsupported, match="mask"):
        npu.masks.compressed(mask=chunk(4))


def test_merge_and_sinks():
    q, k, v = qkv(9, 12, 4, 2, 64)
    whole = check(q, k, v, Range(3, 9), Range(0, 12), mask=causal())
    parts = [npu.dense.attend(q, k[i:j], v[i:j], Range(3, 9), Range(i, j - i), mask=causal(), scale=0.125) for i, j in ((0, 5), (5, 12))]
    merged = npu.merge.merge(*parts)
    torch.testing.assert_close(merged.out, whole.out.float(), atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-5, rtol=1e-5)
    nothing = npu.merge.empty(9, 4, 64, dtype=torch.float32)
    again = npu.merge.merge(nothing._replace(out=torch.full_like(nothing.out, torch.nan)), merged)
    assert torch.equal(again.out, merged.out) and torch.equal(again.lse, merged.lse)
    sink = torch.tensor([0.5, -torch.inf, torch.inf, -2.0])
    finite = torch.tensor([0.5, 1.0, 3.0, -2.0])
    partial = Partial(merged.out.numpy().astype(np.float64), merged.lse.numpy().astype(np.float64))
    assert_within(npu.merge.finish(merged, finite, dtype=torch.float32), reference.merge.finish(partial, finite.numpy(), dtype="float32"))
    out = npu.merge.finish(merged, sink, dtype=torch.float16)
    assert (out[:, 2] == 0).all() and torch.equal(out[:, 1], merged.out[:, 1].half())
    with pytest.raises(ValueError, match="lse"):
        npu.merge.finish(merged._replace(lse=None), sink, dtype=torch.float16)
