"""What may not be refused: for each package and operation, the values of each option that a conforming implementation takes.

Every value of every option of an operation is a feature. A required one is part of the core; what is not listed is optional, and may be
refused with Unsupported where the target predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fattn.conformance.cases import Case, Scalar
from fattn.conformance.operations import OPERATIONS

Features = Mapping[str, tuple[Scalar, ...]]

# What `npu` may refuse, as option values left out of its core. Everything else is required of it.
OPTIONAL_ON_NPU: Mapping[str, Features] = {
    "dense.attend": {"dtype": ("float32",), "softcap": (3.0, 30.0), "sizes": ("32/16",)},
}


def required(package: str, operation: str) -> Features:
    """The features of `operation` that `package` may not refuse. The definitions, and any package that is not `npu`, refuse nothing."""
    left_out = OPTIONAL_ON_NPU.get(operation, {}) if package == "npu" else {}
    options = OPERATIONS[operation].options
    return {name: tuple(value for value in values if value not in left_out.get(name, ())) for name, values in options.items()}


def alternatives(package: str, case: Case) -> list[Case]:
    """The case with one of its optional features replaced by the first required value of that option, then with all of them replaced."""
    core = required(package, case.operation)
    optional = [name for name, value in case.options if value not in core[name] and core[name]]
    found = [case.option(name, core[name][0]) for name in optional]
    whole = case
    for name in optional:
        whole = whole.option(name, core[name][0])
    return [*found, *([whole] if len(optional) > 1 else [])]
