"""Puts a CPU kernel behind one of the wheel's schemas, and holds its outputs to the wheel's own Meta kernel."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

_QUIRKS = Path(__file__).with_name("meta_quirks.json")
_libraries: list[torch.library.Library] = []  # a registration lives as long as its library


def operator(name: str) -> torch._ops.OpOverload:
    """The overload of a full name, "npu::npu_rotary_mul" or "npu::npu_fused_infer_attention_score.out"."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def has_kernel(name: str, key: str) -> bool:
    """Whether the dispatcher has a kernel of this operator for a dispatch key, as "CPU" or "Meta"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def register(name: str, kernel: Callable):
    """Registers `kernel`, a function of the schema's arguments by name, as the operator's CPU kernel.

    A call runs the wheel's Meta kernel on copies without data first, then `kernel`, and raises RuntimeError where they disagree in number,
    shape or dtype of outputs; meta_quirks.json lists the Meta kernels that are known to be wrong, each with its reason.
    """
    overload = operator(name)
    names = [argument.name for argument in overload._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in overload._schema.arguments if argument.has_default_value()}
    expects = has_kernel(name, "Meta") and name not in quirks()

    @functools.wraps(kernel)
    def checked(*positional, **keywords):
        # the dispatcher drops arguments at their defaults and hands the others over as it likes
        arguments = defaults | dict(zip(names, positional, strict=False)) | keywords
        expected = overload(**tree_map_only(torch.Tensor, _without_data, arguments)) if expects else None
        result = kernel(**arguments)
        if expects:
            _compare(name, expected, result)
        return result

    namespace, _, base = name.partition("::")
    library = torch.library.Library(namespace, "IMPL", "CPU")
    library.impl(base, checked)
    _libraries.append(library)


@functools.cache
def quirks() -> dict[str, str]:
    """Operators whose Meta kernel is known to disagree with what the wheel's C++ layer returns: name to reason."""
    return json.loads(_QUIRKS.read_text())


def _without_data(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _compare(name, expected, result):
    described = [[(tuple(t.shape), t.dtype) for t in _outputs(outputs)] for outputs in (expected, result)]
    if described[0] != described[1]:
        raise RuntimeError(f"{name}: the wheel's Meta kernel says outputs {described[0]}, the emulated kernel returned {described[1]}")


def _outputs(result):
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else result
