"""CANN's C values as Python's, and aclnn entry points bound to Python functions.

An aclnn function is two: NameGetWorkspaceSize takes the arguments, Name(workspace, size, executor, stream) runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char, c_char_p, c_double, c_int64, c_long, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

# the documented codes: a parameter that the operator refuses, a failure inside it; and those of the stand-ins, see their sources
_REFUSED, _FAILED, _NOT_EMULATED, _RACE = 161002, 561103, 561999, 507900
_DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64}
_DTYPES |= {11: torch.float64, 12: torch.bool, 27: torch.bfloat16}


class _Tensor(ctypes.Structure):
    _fields_ = [("rank", c_int64), ("shape", c_int64 * 16), ("stride", c_int64 * 16), ("dtype", c_int64), ("offset", c_int64)]
    _fields_ += [("data", c_void_p)]


def tensor(pointer: int | None) -> torch.Tensor | None:
    """The bytes of an aclTensor as a CPU tensor, without a copy."""
    if not pointer:
        return None
    described = _Tensor.from_address(pointer)
    shape, stride = (list(field[: described.rank]) for field in (described.shape, described.stride))
    return on_bytes(described.data, _DTYPES[described.dtype], shape, stride, described.offset)


def on_bytes(address: int, dtype: torch.dtype, shape, stride, offset: int) -> torch.Tensor:
    """A CPU tensor over memory that someone else owns, without a copy."""
    if 0 in shape:
        return torch.empty_strided(shape, stride, dtype=dtype)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    memory = (c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride, offset)


def integers(pointer: int | None) -> list[int] | None:
    """An aclIntArray's numbers; None where there is none."""
    return None if not pointer else list((c_int64 * c_uint64.from_address(pointer).value).from_address(pointer + 8))


def only(pointer: int | None) -> torch.Tensor | None:
    """The one tensor of an aclTensorList. Raises NotImplementedError for a list of several."""
    if not pointer:
        return None
    count = c_uint64.from_address(pointer).value
    if count != 1:
        raise NotImplementedError(f"a list of {count} tensors is not emulated")
    return tensor(c_void_p.from_address(pointer + 8).value)


def text(value: bytes | None) -> str | None:
    """A C string."""
    return None if value is None else value.decode()


# What an argument can be: its C type, and how Python reads it.
TENSOR, LIST, INTEGERS = (c_void_p, tensor), (c_void_p, only), (c_void_p, integers)
INTEGER, REAL, FLAG, TEXT = (c_int64, int), (c_double, float), (c_bool, bool), (c_char_p, text)

_FIRST_PHASE, _LARGEST = "GetWorkspaceSize", "GetMaxWorkspaceSize"
_ON_TOKEN = CFUNCTYPE(c_long, c_void_p)


def _no_workspace(arguments: dict) -> int:
    return 0


class Function(NamedTuple):
    """What an aclnn function computes: a kernel of its arguments by name, in the order of its prototype, and which of them it writes.

    `workspace` says how many bytes of scratch memory a call asks its caller for.
    """

    prototype: Mapping[str, tuple]
    kernel: Callable[[dict], None]
    outputs: Sequence[str]
    workspace: Callable[[dict], int] = _no_workspace


class Library:
    """The entry points of a built folder of stand-ins, and its streams. `names` are the entry points, in their order in the library."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self._operators, self.runtime = (ctypes.CDLL(str(folder / name)) for name in ("libopapi.so", "libascendcl.so"))
        self.names = names
        for function in (self._operators.fattn_call_counts, self._operators.fattn_bindings):
            function.restype = c_void_p
        self._counts = (c_uint64 * len(names)).from_address(self._operators.fattn_call_counts())
        self._bound = (c_void_p * len(names)).from_address(self._operators.fattn_bindings())
        self.runtime.fattn_collect.argtypes = [c_void_p, _ON_TOKEN, c_void_p]
        self.runtime.fattn_wrote.argtypes, self.runtime.fattn_races.argtypes = [c_void_p, c_size_t], [c_void_p, c_void_p, c_size_t]
        self.runtime.aclGetRecentErrMsg.restype = c_char_p
        for function in (self.runtime.fattn_is_side, self.runtime.fattn_drain, self.runtime.fattn_default_stream):
            function.argtypes = [c_void_p]
        self._pending, self._tokens = {}, itertools.count(1)
        self._run_token = _ON_TOKEN(self._run)
        self._kept = []  # a ctypes callback lives as long as it can be called

    def bind(self, name: str, function: Function):
        """Makes the entry point `name` compute `function`; and NameGetMaxWorkspaceSize tell its workspace, where the library has that."""
        kinds = [kind for kind, _ in function.prototype.values()]
        takes = CFUNCTYPE(c_long, *kinds, POINTER(c_uint64), POINTER(c_void_p))

        def measure(*given):
            values = zip(function.prototype.items(), given[:-2], strict=True)
            arguments = {argument: read(value) for (argument, (_, read)), value in values}
            given[-2].contents.value = function.workspace(arguments)
            return arguments

        def take(*given):
            given[-1].contents.value = token = next(self._tokens)
            self._pending[token] = (function, measure(*given))

        def run(workspace, size, token, stream):
            _, arguments = self._pending[token]
            if size < function.workspace(arguments):
                return self._checked(_too_small)(size, function.workspace(arguments))
            if self.is_side(stream):
                if self.races(stream, arguments.values()):
                    return _RACE
                self.runtime.fattn_collect(stream, self._run_token, token)
                return 0
            status = self._run(token)
            self.wrote([arguments[output] for output in function.outputs])
            return status

        self._set(name + _FIRST_PHASE, takes(self._checked(take)))
        self._set(name, CFUNCTYPE(c_long, c_void_p, c_uint64, c_void_p, c_void_p)(run))
        if name + _LARGEST in self.names:
            self._set(name + _LARGEST, takes(self._checked(measure)))

    def is_side(self, stream: int) -> bool:
        """Whether a stream, given by its address, is another than the default one."""
        return bool(self.runtime.fattn_is_side(stream))

    def wrote(self, values: Iterable):
        """Notes which tensors among `values` the default stream wrote: see hostdev.c on waits."""
        for written in _with_bytes(values):
            self.runtime.fattn_wrote(*_span(written))

    def races(self, stream: int, values: Iterable) -> bool:
        """Whether a side stream that works on the tensors among `values` meets what the default stream wrote, and it did not wait for."""
        return any(self.runtime.fattn_races(stream, *_span(tensor)) for tensor in _with_bytes(values))

    def message(self) -> str:
        """What was last said of an error."""
        return (self.runtime.aclGetRecentErrMsg() or b"").decode()

    def waiting(self) -> int:
        """How many pieces of work side streams have collected, and nothing has waited for."""
        return self.runtime.fattn_waiting()

    def calls(self) -> Counter:
        """How often each function was called since the process began, by name; of the two phases, the one that runs."""
        counted = zip(self.names, self._counts, strict=True)
        return Counter({name: count for name, count in counted if count and not name.endswith((_FIRST_PHASE, _LARGEST))})

    @contextlib.contextmanager
    def accepting_everything(self) -> Iterator[None]:
        """Within the block every function accepts its arguments and computes nothing: what is left is the C++ layer's own work."""
        before = list(self._bound)
        accepts = ctypes.cast(self._operators.fattn_accepts, c_void_p).value
        try:
            for index in range(len(before)):
                self._bound[index] = accepts
            yield
        finally:
            for index, bound in enumerate(before):
                self._bound[index] = bound

    def _set(self, name, callback):
        self._kept.append(callback)
        self._bound[self.names.index(name)] = ctypes.cast(callback, c_void_p).value

    def _run(self, token):
        function, arguments = self._pending.pop(token)
        return self._checked(function.kernel)(dict(arguments))

    def _checked(self, function):
        def call(*given):
            try:
                function(*given)
            # An exception cannot cross C: ctypes would drop it and report success. It goes the way of a device's error, as a status and a
            # message, which the wheel raises.
            except Exception as error:
                self.runtime.fattn_message(f"{type(error).__name__}: {error}".encode())
                refused = _NOT_EMULATED if isinstance(error, NotImplementedError) else _REFUSED
                return refused if isinstance(error, RuntimeError) else _FAILED
            return 0

        return call


def _too_small(size, needed):
    raise ValueError(f"the workspace has {size} bytes, and the call needs {needed}")


def _with_bytes(values):
    return (value for value in values if isinstance(value, torch.Tensor) and value.numel())


def _span(tensor):
    """Where a tensor's bytes begin, and how many lie up to its last one."""
    elements = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), elements * tensor.element_size()
