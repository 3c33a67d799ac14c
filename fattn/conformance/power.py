"""Power: whether an example could have shown a wrong decision at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fattn.conformance import compare, plain
from fattn.conformance.calls import Call, floats, is_float, leaves
from fattn.conformance.operations.base import Operation

DECISIVE = 8.0  # a flipped decision must move the result by this many bounds somewhere


class Power(NamedTuple):
    """Decisions of a call that have an effect, and those among them whose flip stays below DECISIVE bounds.

    `output` counts the same for the output alone: a fault in P.V that leaves the log-sum-exp right must be visible too.
    """

    applicable: tuple[str, ...]
    weak: tuple[str, ...]
    output: tuple[str, ...]
    calls: tuple[Call, ...]  # the flipped calls of `weak` and `output`, to plant spotlights for

    @property
    def decisive(self) -> bool:
        """Whether every decision that has an effect is visible, and there is one."""
        return bool(self.applicable) and not self.weak


def plain_function(name: str) -> Callable:
    """The plain implementation of "module.function"."""
    module, function = name.split(".")
    return getattr(getattr(plain, module), function)


def measure(operation: Operation, call: Call, bound) -> Power:
    """The power of a call whose result has these bounds: each flip is evaluated in float64 and compared in units of the bound.

    A flip that changes nothing is not applicable. Integers, caches and masks have no bound: any difference shows.
    """
    base = _evaluated(operation, call)
    bounds = dict(leaves(bound))
    applicable, weak, output, calls = [], [], [], []
    for name, flipped in operation.flips(call):
        moved = _moved(base, _evaluated(operation, flipped), bounds)
        if moved is None:
            continue
        applicable.append(name)
        if max(moved.values()) < DECISIVE:
            weak.append(name)
        if moved.get(".out", DECISIVE) < DECISIVE:
            output.append(name)
        if weak[-1:] == [name] or output[-1:] == [name]:
            calls.append(flipped)
    return Power(tuple(applicable), tuple(weak), tuple(output), tuple(calls))


def _evaluated(operation, call):
    with np.errstate(all="ignore"):
        result = operation.invoke(plain_function, Call(call.operation, floats(call.arguments, np.float64), call.static))
    return dict(leaves(result))


def _moved(base, other, bounds) -> dict[str, float] | None:
    """By how many bounds each array moved; None where none did."""
    if {path: a.shape for path, a in base.items()} != {path: a.shape for path, a in other.items()}:
        return {path: np.inf for path in base}
    found, any_effect = {}, False
    for path, array in base.items():
        if not is_float(array):
            found[path] = 0.0 if array is other[path] or (array == other[path]).all() else np.inf
            any_effect |= found[path] > 0
            continue
        with np.errstate(invalid="ignore"):
            near = np.abs(array - other[path]) <= 1e-13 * (1 + np.abs(array))
            same = (array == other[path]) | near | (np.isnan(array) & np.isnan(other[path]))
        if same.all():
            found[path] = 0.0
            continue
        any_effect = True
        found[path] = float(compare.ratios(other[path], array, bounds[path]).max()) if path in bounds else np.inf
    return found if any_effect else None
