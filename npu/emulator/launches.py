"""What a piece of code asks of the device: how many launches, and whether host and device wait for each other."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Dispatcher calls whose result or work depends on values: a device must finish first.
READS_BACK = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::nonzero_static",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Methods that read a CPU tensor's memory with no dispatcher call, and copy from a device.
_READING_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__, torch.Tensor.item}


@contextlib.contextmanager
def count() -> Iterator[Counter]:
    """Within the block, counts launches by name ("npu::npu_rotary_mul"): dispatcher calls that are no view, copies included."""
    launches = Counter()
    with _Counting(launches):
        yield launches


@contextlib.contextmanager
def traffic_forbidden() -> Iterator[None]:
    """Within the block raises RuntimeError on hidden traffic between host and device.

    That is: values read back (`item`, `tolist`, `nonzero`, a boolean index, `equal`), copies between devices, and operators on tensors of
    several devices. What an emulated operator does inside is its own.
    """
    with _NoReading(), _NoTraffic():
        yield


class _Counting(TorchDispatchMode):
    def __init__(self, launches):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.launches[func.name()] += 1
        return func(*args, **(kwargs or {}))


class _NoTraffic(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        if name in READS_BACK or name.split(".")[0] in READS_BACK:
            raise RuntimeError(f"hidden traffic: {name} makes the host wait for values of the device")
        if name.split(".")[0] in _INDEXED and any(index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None):
            raise RuntimeError(f"hidden traffic: {name} with a boolean index has a result size that depends on values")
        # a tensor of no dimensions on the CPU goes as a launch argument, and so do lengths where an operator reads them on the host
        lens = (kwargs or {}).get("context_lens") if name == "atb::_npu_paged_attention" else None
        devices = {tensor.device for tensor in tensors if tensor is not lens and (tensor.ndim or tensor.device.type != "cpu")}
        target = (kwargs or {}).get("device")
        if target is not None and tensors:
            devices.add(torch.device(target))
        if len(devices) > 1:
            raise RuntimeError(f"hidden traffic: {name} between devices {', '.join(sorted(map(str, devices)))}")
        return func(*args, **(kwargs or {}))


class _NoReading(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READING_METHODS:
            raise RuntimeError(f"hidden traffic: Tensor.{func.__name__} reads values back to the host")
        return func(*args, **(kwargs or {}))
