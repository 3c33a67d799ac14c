"""Int8 caches on torch_npu, held to the oracle."""

import numpy as np
import pytest
import torch
from layer_cases import launched, numpy_of, precision
from quant_cases import FORMS, assert_attends, assert_writes, step

import npu
import npu.quant
from fattn.types import Pages, Unsupported, causal

ARRAYS = (torch.from_numpy, numpy_of)
native = lambda array: torch.from_numpy(np.asarray(array))


def place(batch, mask):
    return npu.place(batch, "cpu", mask)


@pytest.mark.parametrize("decode", [False, True], ids=["chunk", "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_attends_within_the_bound(form, decode):
    s = step(form, block=128, dtype=np.float16, decode=decode)
    assert_attends(npu.quant, native, numpy_of, place, s, precision=precision("float16"))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_has_the_oracles_bytes(form):
    s = step(form, block=128, dtype=np.float16)
    assert_writes(npu.quant, native, numpy_of, s, np.array([3, 1140, 17, 16, 143, 144, 9, 0], np.int32))


def test_packed_heads():
    """Head size 128 goes by the packed layout."""
    s = step("a head, offset of values", block=128, size=128, dtype=np.float16)
    assert_attends(npu.quant, native, numpy_of, place, s, precision=precision("float16"))


def test_no_traffic():
    s = step("a token", block=128, dtype=np.float16)
    cache = Pages(native(s.cache.k), native(s.cache.v), "pbhd", 128)
    scales = npu.quant.Scales(*(None if part is None else native(part) for part in s.scales))
    batch = place(s.batch, s.mask)
    _, writes = launched(npu.quant.write, cache, scales, native(s.k), native(s.v), batch.slot_mapping)
    _, reads = launched(npu.quant.attend, native(s.q), cache, scales, batch, mask=s.mask, scale=0.2)
    assert writes["npu::npu_scatter_pa_kv_cache"] == 1 and reads["npu::npu_fused_infer_attention_score"] == 1


def test_refused():
    s = step("one", block=128, layout="phbd", dtype=np.float16)
    cache = Pages(native(s.cache.k), native(s.cache.v), "phbd", 128)
    scales = npu.quant.Scales(*(None if part is None else native(part) for part in s.scales))
    with pytest.raises(Unsupported, match="cache.layout='phbd'"):
        npu.quant.write(cache, scales, native(s.k), native(s.v), torch.arange(8, dtype=torch.int32))
    with pytest.raises(ValueError, match="int8"):
        npu.quant.attend(
            native(s.q), Pages(cache.k.half(), cache.v.half(), "phbd", 128), scales, place(s.batch, s.mask), mask=s.mask, scale=1
        )
    with pytest.raises(ValueError, match=r"scales.k has shape \[3, 1\]"):
        npu.quant.attend(native(s.q), cache, scales._replace(k=torch.ones(3, 1)), place(s.batch, s.mask), mask=s.mask, scale=1.0)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\]=5 is not one of the cache's 5"):
        npu.quant.attend(
            native(s.q),
            Pages(cache.k[:5].contiguous(), cache.v[:5].contiguous(), "phbd", 128),
            scales,
            place(s.batch, causal()),
            mask=causal(),
            scale=1.0,
        )


def attribute(name, change):
    return lambda patch: patch.setattr(npu.quant, name, change(getattr(npu.quant, name)))


FAULTS = {
    "the offset is left out": attribute("dequantise", lambda real: lambda x, s, o=None, *, dtype: real(x, s, None, dtype=dtype)),
    "the scale is left out": attribute("dequantise", lambda real: lambda x, s, o=None, *, dtype: real(x, 1.0, o, dtype=dtype)),
    "blocks of the batch's own are looked up in the cache": attribute("_over_gathered", lambda real: lambda b, n: (b, real(b, n)[1])),
    "the token's scales are not stored": attribute("token_scales", lambda real: lambda x: torch.ones_like(real(x))),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    for form in FORMS:
        try:
            test_attends_within_the_bound(form, False)
            test_what_is_written_has_the_oracles_bytes(form)
        except (AssertionError, ValueError):
            return
    pytest.fail("no check saw it")
