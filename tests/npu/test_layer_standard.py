"""npu.rope and npu.standard against the oracle, and the count of launches of a decode step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_cases import FLOATS, assert_within, batch_of, cache_of, launched, normal, numpy_of, pages_of, precision

import npu
import reference.rope
import reference.standard
from fattn.types import StandardConfig, Unsupported, causal, window


def step(query_lens, seq_lens, *, h=4, hk=2, d=64, mask=None, dtype="float16", block_size=128, seed=0):
    """A batch on the device with its cache and rotated q, k, v."""
    batch = batch_of(query_lens, seq_lens, block_size=block_size, seed=seed)
    cache = cache_of(batch, hk, d, dtype=dtype)
    rows = [normal(sum(query_lens), n, d, dtype=dtype, seed=20 + i) for i, n in enumerate((h, hk, hk))]
    return batch, npu.place(batch, "cpu", mask or causal()), cache, *rows


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", [causal(), window(30, 0)], ids=str)
def test_a_decode_step_is_two_launches(d, mask):
    _, placed, cache, q, k, v = step([1, 1, 1], [300, 1, 128], d=d, mask=mask)
    _, launches = launched(npu.standard.attend_and_write, q, k, v, cache, placed, mask=mask, scale=d**-0.5)
    assert launches == {"npu::npu_scatter_pa_kv_cache": 1, "npu::npu_fused_infer_attention_score": 1}


def test_launches_of_other_steps_are_printed():
    for case, (query_lens, seq_lens, sinks) in {
        "decode with a sink": ([1, 1], [300, 7], torch.zeros(4)),
        "padded decode": ([1, 1], [300, 0], None),
        "mixed lengths": ([5, 1], [300, 7], None),
    }.items():
        for d in (64, 128):
            _, placed, cache, q, k, v = step(query_lens, seq_lens, d=d)
            _, launches = launched(npu.standard.attend_and_write, q, k, v, cache, placed, sinks, mask=causal(), scale=0.1)
            print(f"{case}, head size {d}: {sum(launches.values())} launches: {launches}")
            assert launches["npu::npu_fused_infer_attention_score"] == 1 and sum(launches.values()) <= 12


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1], [300, 1]), ([5, 1, 2], [130, 7, 2]), ([2, 1, 1], [2, 0, 0])])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attend_and_write(query_lens, seq_lens, dtype, d, with_sinks):
    batch, placed, cache, q, k, v = step(query_lens, seq_lens, d=d, dtype=dtype)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0]) if with_sinks else None
    expected, written = reference.standard.attend_and_write(
        *(numpy_of(x) for x in (q, k, v)),
        pages_of(replace(cache, k=cache.k.clone(), v=cache.v.clone())),
        batch,
        numpy_of(sinks),
        mask=causal(),
        scale=d**-0.5,
        precision=precision(dtype),
    )
    found, after = npu.standard.attend_and_write(q, k, v, cache, placed, sinks, mask=causal(), scale=d**-0.5)
    assert found.dtype == FLOATS[dtype]
    assert_within(found, expected)
    live = np.setdiff1d(np.arange(written.k.shape[0]), [0])  # padding went to the null block
    for name in ("k", "v"):
        np.testing.assert_array_equal(numpy_of(getattr(after, name))[live].view(np.uint16), getattr(written, name)[live].view(np.uint16))


def test_bad_input_is_named_before_anything_is_written():
    batch, _, cache, q, k, v = step([1, 1], [300, 0])

    def placed(slot=None, block=None, mask=None, host=True):
        slots, table = batch.host.slots.copy(), batch.block_table.copy()
        if slot is not None:
            slots[1] = slot
        if block is not None:
            table[0, 1] = block
        return npu.place(
            replace(batch, block_table=table, slot_mapping=slots, host=replace(batch.host, slots=slots) if host else None),
            "cpu",
            mask or causal(),
        )

    before = cache.k.clone()
    for message, error, call in (
        (r"slot_mapping\[1\]=-1.*null_blocks", ValueError, lambda: (q, k, v, cache, placed(slot=-1))),
        (r"slot_mapping\[1\]=9999", ValueError, lambda: (q, k, v, cache, placed(slot=9999))),
        (r"slot_mapping\[1\]=.* row 0", ValueError, lambda: (q, k, v, cache, placed(slot=batch.host.slots[0], host=False))),
        (r"block_table\[0, 1\]=99 ", ValueError, lambda: (q, k, v, cache, placed(block=99))),
        (r"block_table\[0, 1\]=-1 ", ValueError, lambda: (q, k, v, cache, placed(block=-1))),
        ("placed for mask", ValueError, lambda: (q, k, v, cache, placed(mask=window(3, 0)))),
        ("place", ValueError, lambda: (q, k, v, cache, batch)),
        ("rows", ValueError, lambda: (q, k[:1], v[:1], cache, placed())),
        ("heads", ValueError, lambda: (q[:, :3], k, v, cache, placed())),
        ("one dtype", ValueError, lambda: (q.bfloat16(), k, v, cache, placed())),
        ("one dtype", ValueError, lambda: (q, k.float(), v.float(), cache, placed())),
        ("sinks", ValueError, lambda: (q, k, v, cache, placed(), torch.zeros(3))),
        ("cache.layout", Unsupported, lambda: (q, k, v, npu.paged.convert(cache, layout="hpbd"), placed())),
    ):
        with pytest.raises(error, match=message):
            npu.standard.attend_and_write(*call(), mask=causal(), scale=0.1)
    with pytest.raises(Unsupported, match="softcap"):
        npu.standard.attend_and_write(q, k, v, cache, placed(), mask=causal(), scale=0.1, softcap=30.0)
    assert torch.equal(cache.k.view(torch.int16), before.view(torch.int16))
    found = npu.paged.attend(q, cache, placed(slot=-1), mask=causal(), scale=0.1)  # attention alone needs no slot
    assert (found.lse[1] == -torch.inf).all()


@pytest.mark.parametrize("name", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("d", "size"), [(64, 64), (64, 32), (128, 128), (80, 20)])
def test_rope(name, dtype, d, size):
    positions = torch.tensor([0, 1, 77, 4095, 100_000], dtype=torch.int32)
    frequencies = npu.rope.frequencies(size, theta=10000.0)
    cos, sin = npu.rope.table(positions, frequencies, dtype=torch.float32)
    x = torch.randn(5, 3, d, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    found = getattr(npu.rope, name)(x, cos, sin)
    assert found.dtype == x.dtype
    expected = getattr(reference.rope, name)(numpy_of(x), cos.numpy(), sin.numpy())
    assert_within(found.double(), expected)
    assert torch.equal(found[..., size:], x[..., size:])
    wide = torch.cat([x, x], 1)[:, :3]
    assert torch.equal(getattr(npu.rope, name)(wide, cos, sin), found)


def test_frequencies_and_tables():
    for found, expected in (
        (npu.rope.frequencies(64, theta=1e6), reference.rope.frequencies(64, theta=1e6)),
        (
            npu.rope.yarn(64, theta=10000.0, factor=40.0, original_length=4096),
            reference.rope.yarn(64, theta=10000.0, factor=40.0, original_length=4096),
        ),
        (
            npu.rope.yarn(128, theta=150000.0, factor=32.0, original_length=4096, beta_fast=16.0, beta_slow=2.0),
            reference.rope.yarn(128, theta=150000.0, factor=32.0, original_length=4096, beta_fast=16.0, beta_slow=2.0),
        ),
    ):
        assert_within(found, expected)
    positions = np.array([0, 3, 5000], np.int32)
    frequencies = npu.rope.frequencies(32, theta=10000.0)
    found = npu.rope.table(torch.from_numpy(positions), frequencies, dtype=torch.float32)
    for wave, expected in zip(found, reference.rope.table(positions, frequencies.numpy(), dtype="float32"), strict=True):
        assert_within(wave, expected)


def test_rope_refusals():
    x, wave = torch.zeros(2, 3, 8, dtype=torch.float64), torch.zeros(2, 4)
    with pytest.raises(Unsupported, match="x.dtype"):
        npu.rope.half(x, wave, wave)
    with pytest.raises(ValueError, match="sin has shape"):
        npu.rope.half(x.float(), wave, wave[:1])
    with pytest.raises(ValueError, match="4 pairs"):
        npu.rope.half(x.float()[..., :6], wave, wave)
    with pytest.raises(ValueError, match="rotary_size"):
        npu.rope.frequencies(5, theta=1e4)


def weights(config, *, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    d, q, kv = config.hidden_size, config.heads * config.head_size, config.kv_heads * config.head_size
    projections = [torch.randn(shape, generator=generator) * shape[0] ** -0.5 for shape in ((d, q), (d, kv), (d, kv), (q, d))]
    biases = [torch.randn(n, generator=generator) for n in (q, kv)] if bias else [None, None]
    return npu.standard.Weights(*projections, bq=biases[0], bv=biases[1], sinks=torch.zeros(config.heads) if bias else None)


@pytest.mark.parametrize("rotary", ["half", "interleaved", None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cached", FLOATS)
def test_the_layer(rotary, bias, cached):
    config = StandardConfig(hidden_size=48, heads=4, kv_heads=2, head_size=32, scale=32**-0.5, mask=causal(), rotary=rotary, rotary_size=16)
    given = weights(config, bias=bias)
    prepared = npu.standard.prepare(given, config=config)
    batch, placed, cache, *_ = step([3, 1], [131, 7], d=32, dtype=cached)
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(3))
    host_weights = reference.standard.prepare(reference.standard.Weights(*map(numpy_of, given)), config=config)
    before = replace(cache, k=cache.k.clone(), v=cache.v.clone())
    expected, _ = reference.standard.forward(x.numpy(), host_weights, pages_of(before), batch, config=config, precision=precision(cached))
    found, after = npu.standard.forward(x, prepared, cache, placed, config=config)
    assert found.dtype == torch.float32 and after is cache
    assert_within(found, expected)


def test_the_layer_takes_another_attention():
    config = StandardConfig(hidden_size=48, heads=4, kv_heads=2, head_size=32, scale=0.2, mask=causal())
    _, placed, cache, *_ = step([1, 1], [131, 7], d=32)
    seen = []

    def attend(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
        seen.append((q.dtype, lse))
        return npu.paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)

    npu.standard.forward(
        torch.zeros(2, 48), npu.standard.prepare(weights(config, bias=False), config=config), cache, placed, config=config, attend=attend
    )
    assert seen == [(torch.float16, False)]
    with pytest.raises(ValueError, match="weights.wk"):
        npu.standard.prepare(weights(config, bias=False)._replace(wk=torch.zeros(48, 32)), config=config)


@pytest.mark.parametrize(
    "changes, rows, message",
    [
        ({"rotary": None}, (2, 48), "config.rotary=None, but the weights were prepared for another"),
        ({"heads": 2, "kv_heads": 2}, (2, 48), r"weights.wqkv has shape \[48, 256\], but the configuration makes it \[48, 192\]"),
        ({}, (2, 47), r"x has shape \[2, 47\], config.hidden_size is 48"),
    ],
)
def test_a_layer_of_another_configuration_is_refused_before_anything_is_written(changes, rows, message):
    config = StandardConfig(hidden_size=48, heads=4, kv_heads=2, head_size=32, scale=0.2, mask=causal())
    _, placed, cache, *_ = step([1, 1], [131, 7], d=32)
    before, prepared = cache.k.clone(), npu.standard.prepare(weights(config, bias=False), config=config)
    with pytest.raises(ValueError, match=message):
        npu.standard.forward(torch.zeros(rows), prepared, cache, placed, config=replace(config, **changes))
    assert torch.equal(cache.k.view(torch.int16), before.view(torch.int16))  # the cache holds NaN
