"""Implementations that are wrong in one known way each: what the kit must see.

They are variations of `fattn.conformance.plain`. Most are right nearly everywhere: wrong at one edge, for one row, in one size class, in
decode alone or at the second call. `python -m fattn faults` runs the kit on every one.
"""

from fattn.conformance.faults import layer, masking, merging, paging, rotary, scores, softmax, storing
from fattn.conformance.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *masking.FAULTS,
    *scores.FAULTS,
    *softmax.FAULTS,
    *merging.FAULTS,
    *rotary.FAULTS,
    *storing.FAULTS,
    *paging.FAULTS,
    *layer.FAULTS,
)

__all__ = ["FAULTS", "Fault"]
