"""Run by test_hostdev.py in a process of its own: every function of npu on npu:0 tensors, against the same on CPU tensors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from compiled import COMPILERS, compiled, exported
from device_cases import assert_same_bits, cases, paged
from layer_cases import batch_of, normal

import npu
from fattn.types import Pages, Range, Unsupported, causal
from npu import emulator
from npu.emulator import hostdev, launches

CPU, NPU = cases("cpu"), cases("npu")
# What a function asks of the aclnn library beside views and torch's own operators, copies included.
REACHED = {
    "dense.attend": {"aclnnFusedInferAttentionScoreV3": 1},
    "dense.attend, positions": {"aclnnFusedInferAttentionScoreV3": 1},
    "dense.attend, bias": {"aclnnFusedInferAttentionScoreV3": 1},
    "rope.half": {"aclnnRotaryPositionEmbeddingV2": 1},
    "rope.interleaved": {"aclnnRotaryPositionEmbeddingV2": 1},
    "paged.attend": {"aclnnFusedInferAttentionScoreV3": 1},
    "paged.attend, slopes": {"aclnnFusedInferAttentionScoreV3": 1},
    "paged.attend, packed": {"aclnnFusedInferAttentionScoreV3": 1},
    "paged.attend, decode": {"aclnnFusedInferAttentionScoreV3": 1},
    "paged.write": {"aclnnScatterPaKvCache": 1},
    "standard.attend_and_write": {"aclnnScatterPaKvCache": 1, "aclnnFusedInferAttentionScoreV3": 1},
    "standard.forward": {"aclnnRotaryPositionEmbeddingV2": 1, "aclnnScatterPaKvCache": 1, "aclnnFusedInferAttentionScoreV3": 1},
}
COPY = "aclnnInplaceCopy"


@pytest.mark.parametrize("name", NPU)
def test_same_bits_as_on_cpu_tensors(name):
    run, arguments = NPU[name]
    before = hostdev.library().calls()
    found = run(*arguments)
    reached = {function: count for function, count in (hostdev.library().calls() - before).items() if function != COPY}
    assert reached == REACHED.get(name, {})
    assert_same_bits(found, CPU[name].run(*CPU[name].arguments))


# prepare runs once, and takes the frequencies from the host
@pytest.mark.parametrize("name", [name for name in NPU if name != "standard.prepare"])
def test_no_hidden_traffic(name):
    run, arguments = NPU[name]
    with launches.traffic_forbidden():
        run(*arguments)


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.zeros(3).to("npu") + x.sum(),
        lambda x: x + torch.zeros(3),
    ],
    ids=["item", "nonzero", "boolean index", "to the host", "from the host", "two devices"],
)
def test_hidden_traffic_fails(reads):
    x = torch.ones(3, device="npu")
    with launches.traffic_forbidden(), pytest.raises(RuntimeError, match="hidden traffic"):
        reads(x)


@pytest.mark.parametrize("device", ["npu", None])
def test_the_device_is_one_chip(device):
    assert torch.npu.get_device_name(0) == "Ascend910B1"
    with pytest.raises(RuntimeError, match="another chip needs a process of its own"):
        emulator.install("a3", device=device)
    assert "npu:0" in emulator.install()


def test_an_operators_own_refusal_is_read():
    """Two sequences on the same pages, with an emulator that takes the documented count of pages by its word."""
    shared = replace(batch_of([1, 1], [130, 130], block_size=128), block_table=np.asarray([[1, 2], [1, 2]], np.int32))
    pages = torch.zeros(3, 128, 2, 64, dtype=torch.float16, device="npu")
    batch, cache = npu.place(shared, "npu", causal()), Pages(pages, pages.clone(), "pbhd", 128)
    with emulator.variant("shared-pages:no"), pytest.raises(Unsupported, match="npu_fused_infer_attention_score"):
        npu.paged.attend(_rows(("npu",))[0][:2], cache, batch, mask=causal(), scale=0.1)


def test_torchs_operators_refuse_tensors_on_two_devices():
    with pytest.raises(RuntimeError, match="expected all tensors on one device, but found cpu beside npu:0"):
        torch.ones(3, device="npu") + torch.zeros(3)
    assert torch.equal((torch.ones(3, device="npu") + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))


@pytest.mark.parametrize("head_size", [64, 128])
def test_a_decode_step_is_two_launches(head_size):
    batch, cache = paged("npu", [1, 1, 1], [5, 130, 17], causal(), head_size)
    q, k = normal(3, 4, head_size, seed=1).npu(), normal(3, 2, head_size, seed=2).npu()
    before = hostdev.library().calls()
    with launches.count() as launched:
        npu.standard.attend_and_write(q, k, k, cache, batch, mask=causal(), scale=0.1)
    assert {name: count for name, count in launched.items() if count} == {
        "npu::npu_scatter_pa_kv_cache": 1,
        "npu::npu_fused_infer_attention_score": 1,
    }
    assert hostdev.library().calls() - before == {"aclnnScatterPaKvCache": 1, "aclnnFusedInferAttentionScoreV3": 1}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", ["dense.attend, bias", "merge.finish", "paged.attend, packed", "standard.forward"])
def test_compiles_whole(name, compiler):
    run, arguments = NPU[name]
    assert_same_bits(compiled(run, compiler)(*arguments), run(*arguments))


@pytest.mark.parametrize("name", NPU)
def test_exports(name):
    run, arguments = NPU[name]
    assert_same_bits(exported(run, arguments)(*arguments), run(*arguments))


MIXED = {
    "dense.attend": lambda: npu.dense.attend(*_rows(("npu", "npu", "cpu")), Range(4, 5), Range(0, 9), mask=causal(), scale=0.1),
    "dense.attend, positions": lambda: npu.dense.attend(*_rows(("npu",) * 3), torch.arange(5), Range(0, 9), mask=causal(), scale=0.1),
    "paged.attend": lambda: npu.paged.attend(_rows(("cpu",))[0], _pages("npu")[1], _pages("npu")[0], mask=causal(), scale=0.1),
    "paged.attend, batch": lambda: npu.paged.attend(_rows(("npu",))[0], _pages("npu")[1], _pages("cpu")[0], mask=causal(), scale=0.1),
    "paged.write": lambda: npu.paged.write(_pages("npu")[1], *_rows(("npu", "npu", "npu"))[1:], torch.arange(9, dtype=torch.int32)),
    "rope.half": lambda: npu.rope.half(_rows(("npu",))[0], torch.ones(5, 8), torch.ones(5, 8)),
    "merge.finish": lambda: npu.merge.finish(
        npu.dense.attend(*_rows(("npu",) * 3), Range(4, 5), Range(0, 9), mask=causal(), scale=0.1), torch.zeros(4), dtype=torch.float16
    ),
}
MESSAGES = {
    "dense.attend": "q is on npu:0, but v is on cpu",
    "dense.attend, positions": "q is on npu:0, but q_pos is on cpu",
    "paged.attend": "q is on cpu, but cache.k is on npu:0",
    "paged.attend, batch": "q is on npu:0, but batch.block_table is on cpu",
    "paged.write": "cache.k is on npu:0, but slots is on cpu",
    "rope.half": "x is on npu:0, but cos is on cpu",
    "merge.finish": "partial.out is on npu:0, but sink is on cpu",
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_on_two_devices_are_refused(name):
    with pytest.raises(ValueError, match=MESSAGES[name]):
        MIXED[name]()


def _rows(devices):
    rows = torch.zeros(5, 4, 64), torch.zeros(9, 2, 64), torch.zeros(9, 2, 64)
    return [row.half().to(device) for row, device in zip(rows, devices, strict=False)]


def _pages(device):
    return paged(device, [2, 3], [50, 130], causal(), 64)
