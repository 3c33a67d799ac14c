"""Finds torch_npu's operators on first use, and says what to do where they cannot run."""

from __future__ import annotations

import functools
import importlib

import torch

from fattn.types import Partial

HOW = (
    "On an Ascend machine install torch_npu and CANN for your torch and pass tensors on the npu device; "
    "anywhere else call npu.emulator.install() first, which runs the same operators on CPU tensors"
)


def attention(device: str):
    """npu_fused_infer_attention_score for tensors on a device of this type. Raises RuntimeError that says how to make it run."""
    _demand("npu", "npu_fused_infer_attention_score", device)
    return torch.ops.npu.npu_fused_infer_attention_score.default


def rotary(device: str):
    """npu_rotary_mul, as `attention`."""
    _demand("npu", "npu_rotary_mul", device)
    return torch.ops.npu.npu_rotary_mul.default


def scatter(device: str):
    """The cache write, as `attention`: a function of (k, v, k_cache, v_cache, slots) with caches [p b hk d].

    npu_scatter_pa_kv_cache where its schema lets the caller say that the cache is not tiled (its default is PA_NZ), else ATB's operator.
    """
    if "cache_mode" in _demand("npu", "npu_scatter_pa_kv_cache", device).split():
        return functools.partial(torch.ops.npu.npu_scatter_pa_kv_cache.default, cache_mode="Norm")
    _demand("atb", "_npu_reshape_and_cache", device)
    return torch.ops.atb._npu_reshape_and_cache.default


def nothing(q: torch.Tensor, value_size: int) -> Partial:
    """What attention over no keys returns, in the operator's dtypes: out = 0 [t h dv] of q's, lse = -inf [t h] of float32."""
    return Partial(q.new_zeros((*q.shape[:2], value_size)), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32))


# torch.compile takes the result and does not look inside: it cannot trace an import.
@torch.compiler.assume_constant_result
def _demand(namespace, name, device):
    """The names of an operator's arguments, joined. Raises RuntimeError that says what to do where it cannot run."""
    return _arguments(namespace, name, device)


@functools.cache
def _arguments(namespace, name, device):
    _import_torch_npu()
    try:
        operator = getattr(getattr(torch.ops, namespace), name).default
    except AttributeError:
        raise RuntimeError(
            f"the installed torch_npu has no operator {namespace}::{name}. A torch_npu for CANN 8.3 or later has it"
        ) from None
    if device == "cpu" and not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", "CPU"):
        raise RuntimeError(f"{namespace}::{name} runs on an NPU, and the tensors are on the CPU. {HOW}")
    return " ".join(argument.name for argument in operator._schema.arguments)


def _import_torch_npu():
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise RuntimeError(f"torch_npu cannot be imported ({error}). {HOW}") from error
