"""CANN's C values as Python's, and aclnn entry points bound to Python functions.

An aclnn function is two: NameGetWorkspaceSize takes the arguments, Name(workspace, size, executor, stream) runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char, c_char_p, c_double, c_int64, c_long, c_uint64, c_void_p
from pathlib import Path

import torch

_FAILED = 561103  # what an operator's own checks report
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

_FIRST_PHASE, _ON_TOKEN = "GetWorkspaceSize", CFUNCTYPE(c_long, c_void_p)


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
        self.runtime.fattn_wrote.argtypes = [c_void_p, ctypes.c_size_t]
        for function in (self.runtime.fattn_is_side, self.runtime.fattn_drain, self.runtime.fattn_default_stream):
            function.argtypes = [c_void_p]
        self._pending, self._tokens = {}, itertools.count(1)
        self._run_token = _ON_TOKEN(self._run)
        self._kept = []  # a ctypes callback lives as long as it can be called

    def bind(self, name: str, prototype: Mapping[str, tuple], kernel: Callable[[dict], None], outputs: Sequence[str]):
        """Makes the function `name` compute `kernel`(arguments by name); `outputs` are the arguments that it writes."""

        def take(*given):
            values = zip(prototype.items(), given[:-2], strict=True)
            arguments = {argument: read(value) for (argument, (_, read)), value in values}
            token = next(self._tokens)
            self._pending[token] = (kernel, arguments, [arguments[output] for output in outputs if output in arguments])
            given[-2].contents.value, given[-1].contents.value = 0, token

        def run(workspace, size, token, stream):
            if self.runtime.fattn_is_side(stream):
                self.runtime.fattn_collect(stream, self._run_token, token)
                return 0
            written = self._pending[token][2]
            status = self._run(token)
            self.wrote(written)
            return status

        kinds = [kind for kind, _ in prototype.values()]
        self._set(name + _FIRST_PHASE, CFUNCTYPE(c_long, *kinds, POINTER(c_uint64), POINTER(c_void_p))(self._checked(take)))
        self._set(name, CFUNCTYPE(c_long, c_void_p, c_uint64, c_void_p, c_void_p)(run))

    def wrote(self, tensors: Sequence[torch.Tensor | None]):
        """Notes what the default stream wrote: see hostdev.c on waits in the other direction."""
        for written in tensors:
            if written is not None and written.numel():
                size = 1 + sum((n - 1) * step for n, step in zip(written.shape, written.stride(), strict=True))
                self.runtime.fattn_wrote(written.data_ptr(), size * written.element_size())

    def calls(self) -> Counter:
        """How often each function was called since the process began, by name; of the two phases, the one that runs."""
        return Counter({name: n for name, n in zip(self.names, self._counts, strict=True) if n and not name.endswith(_FIRST_PHASE)})

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
        kernel, arguments, _ = self._pending.pop(token)
        return self._checked(kernel)(arguments)

    def _checked(self, function):
        def call(*given):
            try:
                function(*given)
            # An exception cannot cross C: ctypes would drop it and report success. It goes the way of a device's error, as a status and a
            # message, which the wheel raises.
            except Exception as error:
                self.runtime.fattn_message(f"{type(error).__name__}: {error}".encode())
                return _FAILED
            return 0

        return call
