"""A call of one public function as a value: NumPy arrays in the types of `fattn.types`, which targets turn into their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


class Call(NamedTuple):
    """`arguments` are positional, in order; `static` are keyword-only. `operation` is "module.function"."""

    operation: str
    arguments: dict[str, Any]
    static: dict[str, Any]

    def change(self, changed: Mapping[str, Any]) -> Call:
        """The call with some arguments replaced, positional or static, by name."""
        unknown = set(changed) - set(self.arguments) - set(self.static)
        if unknown:
            raise KeyError(f"{self.operation} has no argument {sorted(unknown)}")
        arguments = {name: changed.get(name, value) for name, value in self.arguments.items()}
        return Call(self.operation, arguments, {name: changed.get(name, value) for name, value in self.static.items()})


def is_array(value) -> bool:
    """Whether `value` is an array of any library."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def rebuild(value, change: Callable):
    """`value` with change(array) in the place of every array in it. Static and host-only fields stay as they are."""
    if is_array(value):
        return change(value)
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if not (f.metadata.get("static") or f.metadata.get("drop"))]
        return dataclasses.replace(value, **{name: rebuild(getattr(value, name), change) for name in fields}) if fields else value
    if isinstance(value, tuple):
        parts = [rebuild(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Mapping):
        return {name: rebuild(part, change) for name, part in value.items()}
    return value


def leaves(value, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, array) for every array in `value`, in a fixed order; missing parts (None) are left out."""
    if is_array(value):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not (field.metadata.get("static") or field.metadata.get("drop")):
                yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        names = getattr(value, "_fields", [str(i) for i in range(len(value))])
        for name, part in zip(names, value, strict=True):
            yield from leaves(part, f"{path}.{name}")
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield from leaves(value[name], f"{path}.{name}")


def floats(value, dtype) -> Any:
    """`value` with its floating-point arrays cast to `dtype`."""
    return rebuild(value, lambda a: a.astype(dtype) if is_float(a) else a)


def is_float(array) -> bool:
    """Whether a NumPy array holds floating-point numbers, bfloat16 included."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def bits(array: np.ndarray) -> np.ndarray:
    """The array as unsigned integers of its width, so that NaNs and signed zeros compare."""
    array = np.ascontiguousarray(array)
    return array.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind != "b" else array.view(np.uint8)
