"""Targets: how the kit reaches an implementation, whatever its array library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from fattn.conformance import plain
from fattn.conformance.calls import Call, leaves, rebuild
from fattn.conformance.operations import OPERATIONS
from fattn.conformance.operations.base import Operation
from fattn.types import Batch, Mask, Pages, Unsupported
from reference.bounded import ROUNDOFF, Precision


class Absent(LookupError):
    """A target lacks a function that a check needs."""


@dataclass(frozen=True)
class Arrays:
    """One array library: from and to NumPy, dtypes by name, and calls compiled where it compiles."""

    to_array: Callable[[np.ndarray], Any]
    to_numpy: Callable[[Any], np.ndarray]
    dtype: Callable[[str], Any]
    compiled: Callable[[Callable], Callable] = lambda function: function
    compiles: bool = False  # once for every new shape
    strided: Callable[[np.ndarray], Any] | None = None  # the same values with other strides; None where arrays have none
    float64: Callable[[], AbstractContextManager] = nullcontext  # within it float64 stays what it is


@dataclass(frozen=True)
class Target:
    """An implementation under test. `get("dense.attend")` is its function, or None.

    `precision(dtype)` is what it declares of its arithmetic; `refusal(call)` predicts what it raises Unsupported for (None: it does
    not say), `excluded(call)` names what its documentation leaves undefined, which is not run.
    `place` puts a planned batch on its device. `finite_hidden`: keys that no query's mask shows must hold finite numbers.
    `float64` and `batch_invariant`: it declares that it takes float64, and that a sequence has the same bits in every batch. `notes` say
    on what its results rest.
    """

    name: str
    provider: str
    get: Callable[[str], Any]
    arrays: Arrays
    precision: Callable[[str], Precision]
    place: Callable[[Batch, Mask | None], Batch] | None = None
    refusal: Callable[[Call], Unsupported | None] | None = None
    excluded: Callable[[Call], str | None] | None = None
    finite_hidden: bool = False
    float64: bool = False
    batch_invariant: bool = False
    notes: tuple[str, ...] = ()
    _compiled: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of_functions(
        cls,
        name: str,
        functions: Mapping[str, Callable],
        *,
        arrays: str = "numpy",
        base: ModuleType = plain,
        precision: Callable[[str], Precision] | None = None,
    ) -> Target:
        """Some functions by name, everything else from a package (by default the plain NumPy one). `precision` as declared of them.

        Raises ValueError for a name that the package does not have.
        """
        found = partial(_of_package, base)
        for wanted in functions:
            if wanted.count(".") != 1 or found(wanted) is None:
                raise ValueError(f"{wanted!r} is no function of {base.__name__}; a name such as 'dense.attend' would work")
        return cls(name, name, lambda wanted: functions.get(wanted) or found(wanted), library(arrays), precision or conventional)

    def function(self, name: str):
        """The function of that name, compiled where the library compiles."""
        if name not in self._compiled:
            found = self.get(name)
            self._compiled[name] = found if found is None or isinstance(found, type) else self.arrays.compiled(found)
        return self._compiled[name]

    def needed(self, name: str):
        """The function of that name. Raises Absent where there is none."""
        found = self.function(name)
        if found is None:
            raise Absent(f"{self.name} has no {name}")
        return found

    def run(self, operation: Operation, call: Call, *, strided: bool = False):
        """The result of a call, as NumPy arrays in the types of the target. Raises Absent where it lacks a function that this takes."""
        wide = any(array.dtype == np.float64 for _, array in leaves(call.arguments))
        with self.arrays.float64() if wide else nullcontext(), np.errstate(all="ignore"):  # unread places hold NaNs that NumPy warns of
            given = self.convert(operation, call, strided=strided)
            return operation.settled(call, self.to_numpy(operation.invoke(self.needed, given)))

    def convert(self, operation: Operation, call: Call, *, strided: bool = False) -> Call:
        """The call in the target's own arrays, dtypes, types and placed batches."""
        change = self.arrays.strided if strided and self.arrays.strided else self.arrays.to_array
        mask = operation.places(call)
        arguments = {name: self._argument(value, change, mask) for name, value in call.arguments.items()}
        static = {name: self.arrays.dtype(value) if name == "dtype" else value for name, value in call.static.items()}
        return Call(call.operation, arguments, static)

    def to_numpy(self, result):
        """A result of the target as NumPy arrays."""
        return rebuild(result, lambda array: array.copy() if isinstance(array, np.ndarray) else self.arrays.to_numpy(array))

    def _argument(self, value, change, mask):
        if isinstance(value, Batch):
            return rebuild(value, self.arrays.to_array) if self.place is None else self.place(value, mask)
        if isinstance(value, Pages):  # storage that the caller owns: never strided
            return rebuild(value, self.arrays.to_array)
        made = rebuild(value, change)
        if type(value).__module__.startswith("fattn.conformance.plain."):  # Weights and Prepared are each implementation's own
            module, name = type(value).__module__.rsplit(".", 1)[-1], type(value).__name__
            return self.needed(f"{module}.{name}")(*made)
        return made


def target_of(name: str, *, device: str = "cpu", assume: str | None = None) -> Target:
    """The target that a package of the public names is. It says which arrays it takes: ARRAYS = "jax", "torch" or "numpy".

    `assume` is a file of `python -m npu probe`, which npu's emulator then follows.
    Optional: PRECISION, a mapping from dtype to the fields of reference's Precision; `refusal(call)`, which predicts Unsupported;
    FLOAT64 = True, which says that it takes float64; and BATCH_INVARIANT = True, which says that paged.attend gives a sequence the same
    bits in every batch.
    Raises ModuleNotFoundError for an unknown package, ValueError where it does not declare ARRAYS or has none of the functions.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no package's name: as it is imported, such as mypackage or mypackage.kernels, would work")
    package = importlib.import_module(name)
    kind = getattr(package, "ARRAYS", None)
    if kind not in ("jax", "torch", "numpy"):
        raise ValueError(f"package {name!r} must declare ARRAYS = 'jax', 'torch' or 'numpy', it has {kind!r}")
    get = partial(_of_package, package)
    if name == "npu":
        from fattn.conformance.npu_target import make

        return make(package, get, device, assume)
    if assume is not None:
        raise ValueError(f"the answers in {assume} are for npu's emulator, and package {name!r} has none")
    if all(get(operation) is None for operation in OPERATIONS):
        modules = ", ".join(dict.fromkeys(operation.split(".")[0] for operation in OPERATIONS))
        raise ValueError(f"package {name!r} has none of the functions in its modules {modules}")
    declared = getattr(package, "PRECISION", None)
    precision = conventional if declared is None else lambda dtype: Precision(**declared.get(dtype, {}))
    return Target(
        name,
        f"{name} ({kind})",
        get,
        library(kind),
        precision,
        refusal=getattr(package, "refusal", None),
        float64=getattr(package, "FLOAT64", False),
        batch_invariant=getattr(package, "BATCH_INVARIANT", False),
    )


def conventional(dtype: str) -> Precision:
    """The convention where nothing is declared: float32 sums (float64 for float64), P cast to the dtype of V."""
    if dtype == "float64":
        return Precision(accumulator=ROUNDOFF[dtype])
    return Precision(probabilities=0.0 if dtype in ("float32", "float64") else ROUNDOFF[dtype])


def library(kind: str) -> Arrays:
    """The array library of that name. Raises ValueError for another."""
    match kind:
        case "numpy":
            return Arrays(lambda a: a.copy(), lambda a: np.array(a), dtype=np.dtype, strided=_strided)
        case "jax":
            return _jax()
        case "torch":
            return _torch()
    raise ValueError(f"arrays={kind!r} is not 'jax', 'torch' or 'numpy'")


def _of_package(package, name: str):
    module, function = name.split(".")
    try:
        found = importlib.import_module(f"{package.__name__}.{module}")
    except ModuleNotFoundError as error:
        if error.name == f"{package.__name__}.{module}":
            return None
        raise
    return getattr(found, function, None)


def _jax() -> Arrays:
    import jax
    import jax.numpy as jnp

    def compiled(function):
        versions = {}

        def call(*arguments, **static):
            leaves = jax.tree.leaves(arguments)
            if not leaves or not all(isinstance(leaf, jax.Array) for leaf in leaves):
                return function(*arguments, **static)
            key = tuple(static.items())
            if key not in versions:
                versions[key] = jax.jit(partial(function, **static))
            return versions[key](*arguments)

        return call

    # device_put compiles nothing, unlike jnp.asarray; of a copy, because it may alias
    put = lambda array: jax.device_put(np.array(array))
    return Arrays(put, np.asarray, jnp.dtype, compiled, compiles=True, float64=partial(jax.enable_x64, True))


def _torch() -> Arrays:
    import torch

    def to_array(array):
        array = np.ascontiguousarray(array).copy()
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype.name == "bfloat16" else torch.from_numpy(array)

    def to_numpy(tensor):
        import ml_dtypes

        tensor = tensor.detach().cpu().contiguous()
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy().copy()

    def strided(array):
        if array.ndim < 2:
            return to_array(np.repeat(array, 2))[::2] if array.ndim else to_array(array)
        return to_array(np.moveaxis(array, 0, 1)).transpose(0, 1)

    return Arrays(to_array, to_numpy, dtype=lambda name: getattr(torch, name), strided=strided)


def _strided(array):
    return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array.copy()
