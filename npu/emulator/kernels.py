"""The CPU kernels of the emulated operators, each behind the wheel's own schema."""

from __future__ import annotations

import torch

from npu.emulator import atb, attention, attention_call, cache, rotary, workspace
from npu.emulator.behind import operator, register

FUSED, FUSED_V2 = "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"
SCATTER, RESHAPE = "npu::npu_scatter_pa_kv_cache", "atb::_npu_reshape_and_cache"
PAGED = "atb::_npu_paged_attention"
ROTARY, MEASURE = "npu::npu_rotary_mul", "npu::_npu_fused_infer_attention_score_get_max_workspace"
EMULATED = (FUSED, f"{FUSED}.out", FUSED_V2, f"{FUSED_V2}.out", SCATTER, f"{SCATTER}_functional", ROTARY, RESHAPE, PAGED)


def register_all():
    """Registers every kernel of EMULATED, and what measures their scratch memory; once a process."""
    register(FUSED, lambda **arguments: attention.compute(attention_call.read_v1(arguments)))
    register(FUSED_V2, lambda **arguments: attention.compute(attention_call.read_v2(arguments)))
    register(f"{FUSED}.out", _into_measured)
    register(f"{FUSED_V2}.out", lambda **arguments: _into(FUSED_V2, **arguments))
    register(MEASURE, workspace.measured)
    register(SCATTER, cache.scatter)
    register(f"{SCATTER}_functional", cache.scatter_functional)
    register(ROTARY, rotary.rotary_mul)
    register(RESHAPE, cache.reshape_and_cache)
    register(PAGED, atb.paged_attention)
    # The wheel has no Meta kernels of these two.
    torch.library.register_fake(RESHAPE, lambda key, value, key_cache, value_cache, slot_indices: None)
    torch.library.register_fake(PAGED, lambda *positional, **keywords: None)


def _into_measured(**arguments):
    workspace.check(attention_call.V1, arguments["workspace"], arguments)
    return _into(FUSED, **arguments)


def _into(name, *, out, workspace, **arguments):
    """The out overloads: the functional result, written to the tensors of `out`, which must have its shapes and dtypes."""
    results = operator(name)(**arguments)
    for into, result in zip(out, results, strict=True):
        if (into.shape, into.dtype) != (result.shape, result.dtype):
            raise RuntimeError(
                f"{name}.out: out has {into.dtype}{list(into.shape)} where the operator returns {result.dtype}{list(result.shape)}"
            )
        into.copy_(result)
    return tuple(out)
