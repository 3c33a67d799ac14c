"""The oracle's rotary embedding: against values of transformers, complex multiplication, and float32 arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from reference_cases import KINDS, worst

from reference import rope
from reference.bounded import Bounded

# From transformers 5.24.0 in float64 with float32 tables, on x = [[[1..8], [9..16]], [[17..24], [25..32]]] / 8 at positions 3 and 1000,
# theta 10000: models.llama apply_rotary_pos_emb (halves) and models.gptj apply_rotary_pos_emb (neighbours), second row, first head.
HALVES = [-0.9755033403635025, 3.332723021507263, -0.42873409390449524, -1.1736570298671722]
HALVES += [3.2333641052246094, 1.2320541739463806, -3.7043807804584503, 3.724584400653839]
NEIGHBOURS = [-0.6654235050082207, 3.022471956908703, 3.3139214664697647, 0.9531787484884262]
NEIGHBOURS += [-0.706504613161087, -3.7355021238327026, -0.9710436537861824, 4.040136009454727]

# inv_freq of transformers 5.24.0, float32: DeepseekV3RotaryEmbedding (theta 1e4, factor 40, original length 4096), indices 0, 9 to 24, 31;
# and LlamaRotaryEmbedding with rope_type yarn, head 16, theta 1.6e5, factor 16, original length 65536.
YARN_V3 = {0: 1.0, 9: 0.07498941570520401, 10: 0.05623412877321243, 11: 0.039006926119327545, 12: 0.026879360899329185}
YARN_V3 |= {15: 0.0083345090970397, 18: 0.002249365206807852, 22: 0.00017782794020604342, 23: 3.333803397254087e-05}
YARN_V3 |= {24: 2.499999936844688e-05, 31: 3.3338035336782923e-06}
YARN_16 = [1.0, 0.22360679507255554, 0.05000000074505806, 0.011180340312421322]
YARN_16 += [0.0019140624208375812, 0.0002969777851831168, 3.710937744472176e-05, 1.746928205648146e-06]


def tables(positions, size, *, theta=10000.0, dtype="float64"):
    return rope.table(np.array(positions, np.int32), rope.frequencies(size, theta=theta), dtype=dtype)


@pytest.mark.parametrize("turn, want", ((rope.half, HALVES), (rope.interleaved, NEIGHBOURS)))
def test_transformers_values(turn, want):
    x = np.arange(1, 33).reshape(2, 2, 8) / 8
    got = turn(x, *tables([3, 1000], 8))
    assert worst(want, got.value[1, 0], got.bound[1, 0]) <= 1
    assert got.bound.max() < 5e-3


def test_transformers_yarn():
    got = rope.yarn(64, theta=1e4, factor=40.0, original_length=4096)
    index = list(YARN_V3)
    assert worst(list(YARN_V3.values()), got.value[index], got.bound[index]) <= 1
    got = rope.yarn(16, theta=1.6e5, factor=16.0, original_length=65536)
    assert worst(YARN_16, got.value, got.bound) <= 1
    assert (got.bound / got.value).max() < 1e-5


def test_yarn_with_a_factor_of_one_is_the_plain_one():
    np.testing.assert_allclose(
        rope.yarn(32, theta=1e4, factor=1.0, original_length=2048).value, rope.frequencies(32, theta=1e4).value, rtol=1e-14
    )


@pytest.mark.parametrize("size, rotary_size", ((8, 8), (16, 16), (16, 10), (12, 2)))
def test_a_turn_is_a_complex_multiplication(size, rotary_size):
    rng = np.random.default_rng(0)
    x, positions, pairs = rng.standard_normal((5, 3, size)), np.array([0, 1, 7, 100, 4095]), rotary_size // 2
    cos, sin = tables(positions, rotary_size)
    wheel = np.exp(1j * positions[:, None] * 10000.0 ** (-np.arange(pairs) / pairs))[:, None]
    z = (x[..., 0:rotary_size:2] + 1j * x[..., 1:rotary_size:2]) * wheel
    want = np.concatenate([np.stack([z.real, z.imag], -1).reshape(5, 3, rotary_size), x[..., rotary_size:]], -1)
    np.testing.assert_allclose(rope.interleaved(x, cos, sin).value, want, rtol=0, atol=1e-11)
    z = (x[..., :pairs] + 1j * x[..., pairs:rotary_size]) * wheel
    want = np.concatenate([z.real, z.imag, x[..., rotary_size:]], -1)
    np.testing.assert_allclose(rope.half(x, cos, sin).value, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("turn", (rope.half, rope.interleaved))
def test_inner_products_depend_on_the_distance_alone(turn):
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 16))
    products = [turn(q, *tables([p], 16)).value[0, 0] @ turn(k, *tables([p - 5], 16)).value[0, 0] for p in (5, 17, 3000)]
    np.testing.assert_allclose(products, products[0], rtol=1e-11)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("turn", (rope.half, rope.interleaved))
def test_float32_arithmetic_stays_within(turn, dtype):
    rng = np.random.default_rng(2)
    size, positions = 64, np.array([0, 1, 63, 4095, 131071], np.int32)
    x = rng.standard_normal((5, 2, size)).astype(KINDS[dtype])
    frequencies = np.float32(500000.0) ** (-np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    angle = positions.astype(np.float32)[:, None] * frequencies
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = (slice(0, 32), slice(32, 64)) if turn is rope.half else (slice(0, None, 2), slice(1, None, 2))
    got, wide = np.zeros(x.shape, np.float32), x.astype(np.float32)
    got[..., first] = wide[..., first] * cos - wide[..., second] * sin
    got[..., second] = wide[..., second] * cos + wide[..., first] * sin
    want = turn(x, *tables(positions, size, theta=500000.0, dtype="float32"))
    assert worst(got.astype(KINDS[dtype]), want.value, want.bound) <= 1
    assert want.bound[0].max() < 0.02 if dtype != "float32" else want.bound[:3].max() < 1e-3


def test_a_table_of_plain_frequencies_is_uncertain_by_its_angles_alone():
    frequencies = np.array([1.0, 0.01], np.float32)
    cos, sin = rope.table(np.array([0, 3, 100000], np.int32), frequencies, dtype="float32")
    assert isinstance(cos, Bounded) and cos.bound.max() < 0.03 and cos.bound[:2].max() < 1e-5
    got = np.cos(np.array([0, 3, 100000], np.float32)[:, None] * frequencies)
    assert worst(got, cos.value, cos.bound) <= 1
    assert sin.value[0].tolist() == [0.0, 0.0]


def test_dims_that_do_not_turn_pass_unchanged_and_without_error():
    x = np.random.default_rng(0).standard_normal((2, 1, 10)).astype(ml_dtypes.bfloat16)
    got = rope.half(x, *tables([4, 5], 6))
    np.testing.assert_array_equal(got.value[..., 6:], x[..., 6:].astype(np.float64))
    assert (got.bound[..., 6:] == 0).all() and (got.bound[..., :6] > 0).all()


def test_bad_input_is_named():
    x = np.ones((2, 1, 8))
    for call, message in (
        (lambda: rope.frequencies(7, theta=1e4), "got 7"),
        (lambda: rope.half(x[0], *tables([1, 2], 8)), "x must be"),
        (lambda: rope.half(x, *tables([1, 2, 3], 8)), r"cos \[3, 4\]"),
        (lambda: rope.interleaved(x, *tables([1, 2], 10)), r"cos \[2, 5\]"),
        (lambda: rope.table(np.zeros(2), rope.frequencies(8, theta=1e4), dtype="float32"), "positions"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
