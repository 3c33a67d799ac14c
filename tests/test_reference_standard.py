"""The oracle's layer: against a layer made of torch's own parts, in float64, and against a low-precision one within the bound."""

import ml_dtypes
import numpy as np
import pytest
import torch
from reference_cases import KINDS, batch_of, worst

from fattn.types import causal, window
from reference import paged, standard
from reference.bounded import FLOAT32, ROUNDOFF, Bounded, Precision

FLOAT64 = Precision(accumulator=2.0**-53)
WIDTH, HEADS, KV_HEADS, SIZE, BLOCK = 24, 6, 2, 8, 4


def config(**changes):
    usual = dict(hidden_size=WIDTH, heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, scale=0.4, mask=causal())
    return standard.Config(**{**usual, **changes})


def weights(*, biases=True, sinks=True, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    inner, kv_inner = HEADS * SIZE, KV_HEADS * SIZE
    matrices = [rng.standard_normal(s) / s[0] ** 0.5 for s in ((WIDTH, inner), (WIDTH, kv_inner), (WIDTH, kv_inner), (inner, WIDTH))]
    vectors = [rng.standard_normal(n) / 4 for n in (inner, kv_inner, kv_inner, WIDTH)] if biases else [None] * 4
    extra = [rng.standard_normal(HEADS) if sinks else None]
    return standard.Weights(*(None if x is None else x.astype(dtype) for x in matrices + vectors + extra))


def torch_layer(x, w, cfg, *, dtype=torch.float64, cached=torch.float64):
    """The layer over whole sequences [rows, WIDTH], in torch: Linear, complex rotation, SDPA with an extra key for the sink."""
    linear = torch.nn.functional.linear
    give = lambda a: None if a is None else torch.from_numpy(np.asarray(a, np.float64)).to(dtype)
    x = give(x)
    q, k, v = (linear(x, give(m).T, give(b)).unflatten(1, (-1, SIZE)) for m, b in ((w.wq, w.bq), (w.wk, w.bk), (w.wv, w.bv)))
    if cfg.rotary is not None:
        size = cfg.rotary_size or SIZE
        speed = cfg.rotary_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * speed
        wheel = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (turned(part, wheel, cfg.rotary).to(dtype) for part in (q, k))
    q, k, v = (part.to(cached).transpose(0, 1) for part in (q, k, v))
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    if cfg.mask != causal():
        seen &= ~torch.ones(len(x), len(x), dtype=torch.bool).tril(-4)
    bias = torch.zeros(HEADS, len(x), len(x), dtype=cached).masked_fill(~seen, -torch.inf)
    if w.sinks is not None:
        k, v = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (k, v))
        bias = torch.cat([bias, give(w.sinks).to(cached)[:, None, None].expand(HEADS, len(x), 1)], -1)
    attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], bias[None], scale=cfg.scale, enable_gqa=True)[0]
    return linear(attended.transpose(0, 1).flatten(1).to(dtype), give(w.wo).T, give(w.bo)).double().numpy()


def turned(x, wheel, pairing):
    """x's leading dims, turned by complex multiplication in float64."""
    pairs, wide = wheel.shape[-1], x.double()
    head = wide[..., : 2 * pairs]
    z = torch.complex(head[..., :pairs], head[..., pairs:]) if pairing == "half" else torch.view_as_complex(head.unflatten(-1, (-1, 2)))
    z = z * wheel
    head = torch.cat([z.real, z.imag], -1) if pairing == "half" else torch.view_as_real(z).flatten(-2)
    return torch.cat([head, wide[..., 2 * pairs :]], -1)


def run(x, w, cfg, steps, *, precision=FLOAT64, dtype="float64", layout="pbhd"):
    """Two sequences through the paged layer, `steps` a list of (query_lens, seq_lens); returns their rows in order, and the cache."""
    cache = paged.allocate(8, KV_HEADS, SIZE, SIZE, block_size=BLOCK, layout=layout, dtype=dtype)
    prepared, rows = standard.prepare(w, config=cfg), ([], [])
    for query_lens, seq_lens in steps:
        batch = batch_of(query_lens, seq_lens, [[5, 0, 3], [2, 7, 1]], block_size=BLOCK)
        now = np.concatenate([x[b][n - m : n] for b, (m, n) in enumerate(zip(query_lens, seq_lens, strict=True))])
        y, cache = standard.forward(now, prepared, cache, batch, config=cfg, precision=precision)
        for b in range(2):
            rows[b].append([part[slice(*batch.query_start_loc[b : b + 2])] for part in y])
    return [Bounded(*(np.concatenate(part) for part in zip(*own, strict=True))) for own in rows], cache


def hidden(lengths=(9, 6), dtype=np.float64):
    rng = np.random.default_rng(9)
    return [rng.standard_normal((n, WIDTH)).astype(dtype) for n in lengths]


@pytest.mark.parametrize("biases, sinks", ((True, True), (False, False), (True, False)))
@pytest.mark.parametrize(
    "changes",
    ({}, {"rotary": "interleaved"}, {"rotary": None}, {"rotary_size": 4}, {"mask": causal() & window(3, None), "rotary_theta": 5e5}),
)
def test_prefill_is_the_torch_layer(changes, biases, sinks):
    x, w, cfg = hidden(), weights(biases=biases, sinks=sinks), config(**changes)
    got, _ = run(x, w, cfg, [((9, 6), (9, 6))])
    for own, rows in zip(got, x, strict=True):
        want = torch_layer(rows, w, cfg)
        np.testing.assert_allclose(own.value, want, rtol=0, atol=1e-7 if cfg.rotary else 1e-12)
        assert worst(want, own.value, own.bound) <= 1


@pytest.mark.parametrize(
    "steps",
    (
        [((4, 6), (4, 6)), ((5, 0), (9, 6))],
        [((1, 1), (1, 1)), ((7, 2), (8, 3)), ((1, 3), (9, 6))],
        [((3, 3), (3, 3)), *(((1, 1 if n < 7 else 0), (n, min(n, 6))) for n in range(4, 10))],
    ),
)
def test_chunked_prefill_and_decode_are_the_one_shot(steps):
    x, w, cfg = hidden(), weights(), config()
    whole, cache = run(x, w, cfg, [((9, 6), (9, 6))])
    got, other = run(x, w, cfg, steps, layout="hpbd")
    for a, b in zip(got, whole, strict=True):
        np.testing.assert_allclose(a.value, b.value, rtol=0, atol=1e-13)
    np.testing.assert_allclose(paged.convert(other, layout="pbhd").value.k, cache.value.k, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_layer_in_low_precision_stays_within(dtype):
    low = 0.0 if dtype == "float32" else ROUNDOFF[dtype]
    x, w, cfg = hidden(dtype=KINDS[dtype]), weights(dtype=KINDS[dtype]), config()
    declared = Precision(probabilities=low, output=low)
    got, cache = run(x, w, cfg, [((9, 6), (9, 6))], precision=declared, dtype=dtype)
    torch_dtype = getattr(torch, dtype)
    for own, rows in zip(got, x, strict=True):
        ratio = worst(torch_layer(rows, w, cfg, dtype=torch_dtype, cached=torch_dtype), own.value, own.bound)
        assert 0.001 < ratio <= 0.9
        # Roundings of every projected number may all conspire, and do not: kernels use a few percent of this.
        assert np.median(own.bound) < {"float32": 2e-4, "float16": 0.03, "bfloat16": 0.25}[dtype] * np.abs(own.value).max()
    assert isinstance(cache, Bounded) and cache.value.k.dtype == KINDS[dtype]


def test_every_flipped_decision_of_the_layer_is_far_outside():
    x, w, cfg = hidden(dtype=np.float32), weights(dtype=np.float32), config(mask=causal() & window(3, None), rotary_size=6)
    steps = [((9, 6), (9, 6))]
    swapped = [getattr(w, name).reshape(-1, KV_HEADS, SIZE)[:, ::-1].reshape(-1, KV_HEADS * SIZE) for name in ("wk", "wv")]
    flips = {
        "window": (w, config(mask=causal() & window(4, None), rotary_size=6)),
        "causal": (w, config(mask=window(3, 1), rotary_size=6)),
        "scale": (w, config(mask=cfg.mask, rotary_size=6, scale=0.35)),
        "pairing": (w, config(mask=cfg.mask, rotary_size=6, rotary="interleaved")),
        "rotary size": (w, config(mask=cfg.mask)),
        "theta": (w, config(mask=cfg.mask, rotary_size=6, rotary_theta=1000.0)),
        "sinks": (w._replace(sinks=None), cfg),
        "slopes": (w._replace(slopes=np.full(HEADS, 0.1, np.float32)), cfg),
        "softcap": (w, config(mask=cfg.mask, rotary_size=6, softcap=2.0)),
        "query bias": (w._replace(bq=None), cfg),
        "output bias": (w._replace(bo=None), cfg),
        "key heads": (w._replace(wk=swapped[0], wv=swapped[1]), cfg),
    }
    call = dict(precision=FLOAT32, dtype="float32")
    right, _ = run(x, w, cfg, steps, **call)
    for name, (other_weights, other_config) in flips.items():
        wrong, _ = run(x, other_weights, other_config, steps, **call)
        ratio = max((np.abs(a.value - b.value) / b.bound).max() for a, b in zip(wrong, right, strict=True))
        assert ratio >= 8, (name, ratio)


def test_the_dtypes_of_states_and_cache_may_differ():
    x, w, cfg = hidden(dtype=np.float32), weights(dtype=np.float32), config()
    got, cache = run(x, w, cfg, [((9, 6), (9, 6))], precision=Precision(probabilities=2.0**-11), dtype="float16")
    for own, rows in zip(got, x, strict=True):
        assert worst(torch_layer(rows, w, cfg, dtype=torch.float32, cached=torch.float16), own.value, own.bound) <= 0.9
    assert cache.value.v.dtype == np.float16


def test_padding_may_hold_anything_and_changes_nothing():
    x, w, cfg = hidden((4, 3)), weights(), config()
    prepared = standard.prepare(w, config=cfg)
    cache = paged.allocate(8, KV_HEADS, SIZE, SIZE, block_size=BLOCK, layout="pbhd", dtype="float64")
    batch = batch_of((4, 3), (4, 3), [[5], [2]], block_size=BLOCK)
    want, written = standard.forward(np.concatenate(x), prepared, cache, batch, config=cfg)
    cache.k[0], cache.v[4] = np.nan, np.inf
    padded = batch_of((4, 3, 2, 0), (4, 3, 0, 0), [[5, 6], [2, -1], [], [9]], block_size=BLOCK)
    got, other = standard.forward(np.concatenate([*x, np.full((2, WIDTH), np.nan)]), prepared, cache, padded, config=cfg)
    np.testing.assert_array_equal(got.value[:7], want.value)
    np.testing.assert_array_equal(got.value[7:], [w.bo, w.bo])
    for pages in (2, 5):
        np.testing.assert_array_equal(other.value.k[pages], written.value.k[pages])


def test_attend_and_write_on_plain_arrays_writes_exact_copies():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, h, SIZE)).astype(ml_dtypes.bfloat16) for h in (HEADS, KV_HEADS, KV_HEADS))
    cache = paged.allocate(4, KV_HEADS, SIZE, SIZE, block_size=BLOCK, layout="pbhd", dtype="bfloat16")
    batch = batch_of((3,), (3,), [[2]], block_size=BLOCK)
    asked = []

    def noted(*arguments, lse, **options):
        asked.append(lse)
        return paged.attend(*arguments, lse=lse, **options)

    call = dict(mask=causal(), scale=0.4, attend=noted)
    out, new = standard.attend_and_write(q, k, v, cache, batch, **call)
    np.testing.assert_array_equal(new.k[2, :3], k)
    assert out.value.shape == (3, HEADS, SIZE) and isinstance(out, Bounded)
    np.testing.assert_allclose(out.value[0, 5], v[0, 1].astype(float))
    assert out.bound[0, 5].max() >= 2.0**-8 * np.abs(out.value[0, 5]).max()
    halved, _ = standard.attend_and_write(q, k, v, cache, batch, np.full(HEADS, -np.inf), np.ones(HEADS), **call)
    np.testing.assert_allclose(halved.value[0], out.value[0])
    assert np.abs(halved.value[2] - out.value[2]).max() > 0.01
    assert asked == [False, True]


def test_prepare_fuses_and_fills():
    w = weights(biases=False)._replace(bk=np.ones(KV_HEADS * SIZE))
    prepared = standard.prepare(w, config=config())
    np.testing.assert_array_equal(prepared.wqkv, np.concatenate([w.wq, w.wk, w.wv], 1))
    np.testing.assert_array_equal(prepared.bqkv, [0] * 48 + [1] * 16 + [0] * 16)
    assert isinstance(prepared.frequencies, Bounded) and prepared.frequencies.value.shape == (SIZE // 2,)
    assert standard.prepare(w, config=config(rotary=None)).frequencies is None
    assert standard.prepare(weights(biases=False), config=config()).bqkv is None
    with pytest.raises(ValueError, match="wk has shape"):
        standard.prepare(w._replace(wk=w.wq), config=config())
    cache = paged.allocate(4, KV_HEADS, SIZE, SIZE, block_size=BLOCK, layout="pbhd", dtype="float64")
    with pytest.raises(ValueError, match="hidden_size"):
        standard.forward(np.ones((3, 5)), prepared, cache, batch_of((3,), (3,), [[2]], block_size=BLOCK), config=config())
    x = np.ones((3, config().hidden_size))
    for other, message in ((config(rotary=None), "prepared for another"), (config(kv_heads=1), "wqkv has shape")):
        with pytest.raises(ValueError, match=message):
            standard.forward(x, prepared, cache, batch_of((3,), (3,), [[2]], block_size=BLOCK), config=other)
