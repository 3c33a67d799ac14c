"""One case on one target: the call, what the oracle says, what the target returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from fattn.conformance import compare, oracle, power
from fattn.conformance.calls import Call, leaves
from fattn.conformance.cases import Case
from fattn.conformance.operations import OPERATIONS
from fattn.conformance.operations.base import Operation
from fattn.conformance.targets import Target
from reference.bounded import Precision


@dataclass(frozen=True)
class Trial:
    """A case that a target takes. Everything follows from the two; results are compared here and nowhere else."""

    case: Case
    target: Target

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.case.operation]

    @cached_property
    def call(self) -> Call:
        return _call(self.case)

    @cached_property
    def precision(self) -> Precision:
        return precision_of(self.case, self.target)

    @property
    def expected(self) -> oracle.Expected:
        return _expected(self.case, self.precision)

    @cached_property
    def got(self):
        """What the target returns for the case, as NumPy arrays."""
        return self.run(self.call)

    def rng(self) -> np.random.Generator:
        """The source of what a law draws: it follows from the case."""
        return np.random.default_rng(self.case.seed + 2)

    def run(self, call: Call, *, strided: bool = False):
        """The target's result of another call of any operation."""
        return self.target.run(OPERATIONS[call.operation], call, strided=strided)

    def oracle(self, call: Call) -> oracle.Expected:
        """The oracle's result of another call."""
        return oracle.expected(OPERATIONS[call.operation], call, self.precision)

    def agrees(self, got, expected: oracle.Expected | None = None, *, label: str = "result") -> float:
        """The worst error of `got` in units of the bound. Raises Mismatch beyond 1, or for another shape or dtype."""
        value, bound = self.expected if expected is None else expected
        return compare.within(got, value, bound, dtypes=self.dtypes(), label=label)

    def dtypes(self) -> dict[str, str]:
        """The dtype that each array of the result must have."""
        kinds = {"accumulator": "float32", "input": "float32"}
        if "dtype" in dict(self.case.options):
            name = str(self.case["dtype"])
            single = "float64" if name == "float64" else "float32"
            # an implementation that says it casts its output returns the input's dtype
            kinds = {"accumulator": name if self.precision.output else single, "input": name, "float32": single}
        return {path: kinds.get(kind, kind) for path, kind in self.operation.results(self.case).items()}


def precision_of(case: Case, target: Target) -> Precision:
    """What the target declares for the dtype of the case."""
    return target.precision(str(dict(case.options).get("dtype", "float32")))


def decisive(case: Case, precision: Precision) -> tuple[Case, power.Power]:
    """The case with spotlights planted where a decision would not show, and its power after that."""
    found = measured(case, precision)
    if not found.calls:
        return case, found
    operation = OPERATIONS[case.operation]
    edits = operation.plant(case, _call(case), list(found.calls))
    if not edits:
        return case, found
    planted = replace(case, edits=case.edits + edits)
    again = measured(planted, precision)
    # a spotlight outshines other keys: keep it only where it made more visible than it hid
    return (planted, again) if len(again.weak) <= len(found.weak) else (case, found)


@lru_cache(maxsize=4096)
def measured(case: Case, precision: Precision) -> power.Power:
    """The power of a case."""
    operation = OPERATIONS[case.operation]
    return power.measure(operation, _call(case), _expected(case, precision).bound)


@lru_cache(maxsize=32)
def _call(case: Case) -> Call:
    return OPERATIONS[case.operation].build(case)


@lru_cache(maxsize=4096)
def _expected(case: Case, precision: Precision) -> oracle.Expected:
    operation = OPERATIONS[case.operation]
    found = oracle.expected(operation, _call(case), precision)
    for path, array in leaves(found.value):
        if array.dtype.kind == "f" and path.endswith(("out", "lse")) and np.isnan(array).any():
            raise AssertionError(f"the oracle has NaN in {path} of {case}")
    return found
