"""A value and how far a correct implementation may be from it, elementwise.

The bounds follow from the arithmetic of implementations, to first order in the unit roundoff u, and are never tuned:

- A sum of m terms, in any order, errs by at most u m times the sum of magnitudes; rounding errors of both signs grow as sqrt(m).
  Kernels sum in blocks, lanes or sequentially, and equal terms err with one sign, hence A(m) = max(KAPPA sqrt(m), m).
- An elementary function (exp, log, tanh, a product) errs by a few u of its result: KAPPA u.
- A cast to a type of unit roundoff u errs by u times the magnitude, plus half its least positive number where it underflows.
- What was uncertain on entry is carried through each function by the exact inequality for that function, not by its derivative, so that
  large uncertainties (scores in the thousands, low-precision projections) stay covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy then knows the name bfloat16)
import numpy as np


class Bounded(NamedTuple):
    """`value` in float64 and `bound` of the same structure and shapes: |correct implementation - value| <= bound, elementwise.

    In a cache, and there alone, `value` has the cache's own dtype, because what is stored is rounded to it.
    """

    value: Any
    bound: Any


@dataclass(frozen=True)
class Precision:
    """Unit roundoffs that an implementation declares: of its accumulator, and of types that it casts to on the way (0: not cast)."""

    accumulator: float = 2.0**-24
    probabilities: float = 0.0  # P, before its product with V
    output: float = 0.0  # the attention output of a Partial
    query: float = 0.0  # q after the scale was multiplied into it
    bias: float = 0.0  # an additive bias, ALiBi included


FLOAT32 = Precision()
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# The error of a number too small for a type: half of float16's least subnormal; the others may flush whatever is not normal to zero.
UNDERFLOW = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}

KAPPA = 4.0
SLACK = 1.5  # over the first-order terms of rounding
LARGEST_EXPONENT = 300.0  # a logit uncertain by this much may be anything: bounds then say so without overflowing


def growth(terms: int) -> float:
    """A(m): how many unit roundoffs of the sum of magnitudes a sum of `terms` terms may err by, whatever its order."""
    return max(KAPPA * terms**0.5, float(terms))


def accumulator(precision: Precision) -> float:
    """The unit roundoff of sums and elementary functions, the oracle's own float64 included (it matters against float64 alone)."""
    return precision.accumulator + ROUNDOFF["float64"]


def constant(precision: Precision) -> float:
    """The unit roundoff of constants, which implementations make in float32 for inputs of any type: frequencies, slopes, ALiBi's bias."""
    return max(accumulator(precision), ROUNDOFF["float32"])


def underflow(unit: float) -> float:
    """UNDERFLOW of the type whose unit roundoff is `unit`; 0 where nothing is cast."""
    return 0.0 if unit == 0 else UNDERFLOW["float16"] if unit == ROUNDOFF["float16"] else UNDERFLOW["float32"]


def bounded(array) -> Bounded:
    """`array` in float64 with bound 0, or as it is where it is Bounded already."""
    if isinstance(array, Bounded):
        return array
    value = np.asarray(array).astype(np.float64)
    return Bounded(value, np.zeros(value.shape))


def dtype_name(dtype) -> str:
    """The name of a float dtype, given as a name or anything that NumPy reads as a dtype. Raises ValueError for other types."""
    name = np.dtype(dtype).name
    if name not in ROUNDOFF:
        raise ValueError(f"dtype must be one of {', '.join(ROUNDOFF)}, got {name}")
    return name


def cast(x: Bounded, dtype) -> Bounded:
    """`x` after a correct implementation rounds it to `dtype`: same value, and a wider bound save where it is exactly of that dtype."""
    name = dtype_name(dtype)
    if name == "float64":
        return x
    unchanged = (x.bound == 0) & (x.value == x.value.astype(np.dtype(name)))
    rounding = ROUNDOFF[name] * (np.abs(x.value) + x.bound) + UNDERFLOW[name]
    return Bounded(x.value, x.bound + np.where(unchanged, 0, rounding))


def stored(x: Bounded, dtype) -> Bounded:
    """`x` rounded to `dtype` by an implementation and here alike: a value of that dtype, and a bound that includes both roundings."""
    value = x.value.astype(np.dtype(dtype_name(dtype)))
    return Bounded(value, cast(x, dtype).bound + np.abs(value.astype(np.float64) - x.value))


def matmul(x: Bounded, w: Bounded, *, precision: Precision) -> Bounded:
    """x @ w, contracting n terms: bound u A(n) sum |x||w|, plus what the operands are uncertain by."""
    magnitude = np.abs(x.value) @ np.abs(w.value)
    inherited = x.bound @ np.abs(w.value) + (np.abs(x.value) + x.bound) @ w.bound
    return Bounded(x.value @ w.value, accumulator(precision) * growth(x.value.shape[-1]) * magnitude + inherited)


def add(x: Bounded, y: Bounded, *, precision: Precision) -> Bounded:
    """x + y: one rounding of the sum."""
    value = x.value + y.value
    return Bounded(value, x.bound + y.bound + accumulator(precision) * np.abs(value))


def finite(name: str, array):
    """`array`, after a check that the oracle has a value everywhere. Raises ValueError that names the first place that has none."""
    if not np.isfinite(array).all():
        row = np.argwhere(~np.isfinite(array))[0]
        raise ValueError(f"{name}{row.tolist()} is {array[tuple(row)]}: a place that some query reads must hold finite numbers")
    return array
