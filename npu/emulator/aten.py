"""What torch's own operators compute on the host-memory device: their CPU kernels, on the same bytes.

They replace the wheel's kernels for this device, whose aclnn functions nothing computes. Allocation, copies, views and storage stay the
wheel's own. ATB's operators, which are C++ objects behind the wheel's C++ layer, get the emulator's kernels in the same way.
"""

from __future__ import annotations

import functools

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from npu.emulator.acl import Library, on_bytes
from npu.emulator.behind import operator
from npu.emulator.kernels import EMULATED

# The wheel's own: allocation, copies and what belongs to storages and streams.
_STAYS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_with_format", "unsafe_empty_with_format"}
_STAYS |= {"empty_with_swapped_memory", "copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "clone", "contiguous", "copy_memory_"}
_STAYS |= {"_lazy_clone", "resize_", "resize_as_", "set_", "is_set_to", "record_stream", "is_pinned", "pin_memory", "_pin_memory"}
_STAYS |= {"_local_scalar_dense", "as_strided", "view", "_reshape_alias", "unfold", "detach"}
_TAKE_INDICES_FROM_THE_HOST = {"index", "index_put", "index_put_", "_index_put_impl_"}
_ON_THE_HOST = {"_npu_paged_attention": ("context_lens",)}  # arguments that are tensors of the host
_KEY = "PrivateUse1"
_libraries: list[torch.library.Library] = []  # a registration lives as long as its library


def register_all(library: Library):
    """Puts the CPU kernel of every operator of torch, apart from those that stay the wheel's, behind the device; once a process."""
    for namespace, names in (("aten", _torchs()), ("atb", [name for name in EMULATED if name.startswith("atb::")])):
        registered = torch.library.Library(namespace, "IMPL")
        for name in names:
            kernel = functools.partial(_on_same_bytes, library, operator(name))
            registered.impl(name.removeprefix(f"{namespace}::"), kernel, _KEY)
        _libraries.append(registered)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device as a CPU tensor over the same bytes; a CPU tensor as it is."""
    if tensor.device.type == "cpu":
        return tensor
    found = on_bytes(tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    found = found.neg() if tensor.is_neg() else found
    return found.conj() if tensor.is_conj() else found


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a CPU tensor in a new tensor of the device, with its strides where no two elements share a place."""
    made = torch.empty_like(tensor, device="npu")
    alias(made).copy_(tensor)
    return made


def _torchs():
    """The names of torch's operators that have a kernel for the CPU or for the wheel's device, and whose bytes are theirs alone."""
    for name in sorted({name for key in ("CPU", _KEY) for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        # the wheel has names of its own in aten, which no schema describes
        known = (
            namespace == "aten" and hasattr(torch.ops.aten, base) and (overload or "default") in getattr(torch.ops.aten, base).overloads()
        )
        if known and base not in _STAYS and not operator(name).is_view:
            yield name


def _on_same_bytes(library, overload, *positional, **keywords):
    base = overload.__name__.split(".")[0]
    arguments = overload._schema.arguments
    given = dict(zip([argument.name for argument in arguments], positional, strict=False)) | keywords
    on_host = _ON_THE_HOST.get(base, ())
    given_tensors = [leaf for leaf in tree_leaves({n: v for n, v in given.items() if n not in on_host}) if isinstance(leaf, torch.Tensor)]
    # a tensor of no dimensions goes as a launch argument
    elsewhere = [tensor for tensor in given_tensors if tensor.device.type != "npu" and tensor.ndim]
    if elsewhere and base not in _TAKE_INDICES_FROM_THE_HOST:
        raise RuntimeError(f"{overload.name()}: expected all tensors on one device, but found {elsewhere[0].device} beside npu:0")
    stream = torch.npu.current_stream().npu_stream
    side = library.is_side(stream)
    if side:
        library.runtime.fattn_drain(stream)
        if library.races(stream, given_tensors):
            raise RuntimeError(f"{overload.name()}: {library.message()}")
    if any(given[name].device.type != "cpu" for name in on_host):
        raise RuntimeError(f"{overload.name()}: {', '.join(on_host)} must be a tensor of the host")
    if given.get("device") is not None:
        given["device"] = torch.device("cpu")
    changed = [given[argument.name] for argument in arguments if argument.is_write and given.get(argument.name) is not None]
    outs = {argument.name: given[argument.name] for argument in arguments if argument.is_out}
    on_cpu = tree_map_only(torch.Tensor, alias, given)
    # an output may have to change its size, which borrowed bytes cannot
    on_cpu |= {name: out.new_empty(0, device="cpu") for name, out in outs.items()}
    result = overload(**on_cpu)
    for name, out in outs.items():
        if out.shape != on_cpu[name].shape:
            out.resize_(on_cpu[name].shape)
        alias(out).copy_(on_cpu[name])
    if not changed:
        result = tree_map_only(torch.Tensor, to_device, result)
    elif len(overload._schema.returns) == 1:
        result = changed[0]
    else:
        result = tuple(changed) if overload._schema.returns else None
    if not side:
        library.wrote(tree_leaves(changed or result))
    return result
