"""Finds torch_npu's operators on first use, and says what to do where they cannot run."""

from __future__ import annotations

import functools
import importlib

import torch

from fattn.types import Partial
from npu import _errors

HOW = (
    "On an Ascend machine install torch_npu and CANN for your torch and pass tensors on the npu device; "
    "anywhere else call npu.emulator.install() first, which runs the same operators on CPU tensors"
)


def attention(device: str):
    """npu_fused_infer_attention_score for tensors on a device of this type. Raises RuntimeError that says how to make it run.

    What the operator refuses when it is called comes back as Unsupported, with its text and what it means (`_errors`).
    """
    return _read(_operator("npu", "npu_fused_infer_attention_score", device), "npu_fused_infer_attention_score")


def attention_call(device: str, workspace: torch.Tensor | None):
    """`attention` as a function of its arguments by name and of the outputs to write, a list of two, or None for the operator's own.

    Scratch memory is the caller's `workspace` where outputs are given and it is not None.
    """

    def launch(arguments, out):
        try:
            if out is None:
                return _operator("npu", "npu_fused_infer_attention_score", device)(**arguments)
            return _operator("npu", "npu_fused_infer_attention_score", device, "out")(**arguments, workspace=workspace, out=out)
        except RuntimeError as error:
            _raise_read(error, "npu_fused_infer_attention_score")

    return launch


def fusion(device: str):
    """npu_fusion_attention, as `attention`: the operator that has a gradient."""
    return _read(_operator("npu", "npu_fusion_attention", device), "npu_fusion_attention")


def workspace(device: str):
    """_npu_fused_infer_attention_score_get_max_workspace, as `attention`: a tensor of as much scratch memory as a call may need."""
    name = "_npu_fused_infer_attention_score_get_max_workspace"
    return _read(_operator("npu", name, device), name)


def rotary(device: str):
    """npu_rotary_mul, as `attention`."""
    return _read(_operator("npu", "npu_rotary_mul", device), "npu_rotary_mul")


# What npu_scatter_pa_kv_cache calls the forms of a cache: ND [p b hk d], and NZ [p hk*d/tile b tile].
CACHE_MODES = {"ND": "Norm", "NZ": "PA_NZ"}


def scatter(device: str, form: str = "ND"):
    """The cache write, as `attention`: a function of (k, v, k_cache, v_cache, slots) with caches in a form of CACHE_MODES.

    npu_scatter_pa_kv_cache where its schema lets the caller say which form (its default is NZ), else, for ND, ATB's operator.
    """
    if form == "NZ" or _has("npu", "npu_scatter_pa_kv_cache"):
        write = _operator("npu", "npu_scatter_pa_kv_cache", device)
        if _takes(write, "cache_mode"):
            return functools.partial(_read(write, "npu_scatter_pa_kv_cache"), cache_mode=CACHE_MODES[form])
        if form == "NZ":
            return _read(write, "npu_scatter_pa_kv_cache")
    older = _read(_operator("atb", "_npu_reshape_and_cache", device), "_npu_reshape_and_cache")
    # it takes int32 slots alone
    return lambda k, v, k_cache, v_cache, slots: older(k, v, k_cache, v_cache, slots.to(torch.int32))


def paged_attention(device: str):
    """ATB's _npu_paged_attention, as `attention`: it writes to its argument `out`, and returns nothing."""
    return _read(_operator("atb", "_npu_paged_attention", device), "_npu_paged_attention")


def has_paged_attention() -> bool:
    """Whether torch_npu and NNAL define it here. Raises RuntimeError where there is no torch_npu."""
    return _has("atb", "_npu_paged_attention")


def nothing(q: torch.Tensor, value_size: int) -> Partial:
    """What attention over no keys returns, in the operator's dtypes: out = 0 [t h dv] of q's, lse = -inf [t h] of float32."""
    return Partial(q.new_zeros((*q.shape[:2], value_size)), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32))


def _operator(namespace, name, device, overload="default"):
    _demand(namespace, name, device)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _read(operator, name):
    """The operator, with its errors read."""

    def call(*arguments, **named):
        try:
            return operator(*arguments, **named)
        except RuntimeError as error:
            _raise_read(error, name)

    return call


def _raise_read(error, name):
    """Raises what an operator's error means, or the error itself."""
    meaning = _errors.reading(error, name)
    if meaning is None:
        raise error
    raise meaning from error


# torch.compile takes the results of these three and does not look inside: it traces neither an import nor a schema.
@torch.compiler.assume_constant_result
def _demand(namespace, name, device):
    return _demanded(namespace, name, device)


@torch.compiler.assume_constant_result
def _has(namespace, name):
    return _defined(namespace, name)


@torch.compiler.assume_constant_result
def _takes(operator, argument):
    return argument in _argument_names(operator)


@functools.cache
def _demanded(namespace, name, device):
    """True; raises RuntimeError that says what to do where the operator cannot run."""
    _import_torch_npu()
    if not hasattr(getattr(torch.ops, namespace), name):
        raise RuntimeError(f"the installed torch_npu has no operator {namespace}::{name}. A torch_npu for CANN 8.1 or later has it")
    if device == "cpu" and not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", "CPU"):
        raise RuntimeError(f"{namespace}::{name} runs on an NPU, and the tensors are on the CPU. {HOW}")
    return True


@functools.cache
def _defined(namespace, name):
    _import_torch_npu()
    return hasattr(getattr(torch.ops, namespace), name)


@functools.cache
def _argument_names(operator):
    return {argument.name for argument in operator._schema.arguments}


def _import_torch_npu():
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise RuntimeError(f"torch_npu cannot be imported ({error}). {HOW}") from error
