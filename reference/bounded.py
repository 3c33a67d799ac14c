"""A value and how far a correct implementation may be from it, elementwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Bounded(NamedTuple):
    """`value` in float64 and `bound` of the same structure and shapes: |correct implementation - value| <= bound, elementwise."""

    value: Any
    bound: Any


@dataclass(frozen=True)
class Precision:
    """Unit roundoffs that an implementation declares: of its accumulator, of the types that P and the output are cast to (0: not cast)."""

    accumulator: float = 2.0**-24
    probabilities: float = 0.0
    output: float = 0.0


FLOAT32 = Precision()
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
