"""The same functions once more in plain vectorised NumPy: quick, unclever, correct.

The kit evaluates flipped decisions with it (in float64), and faults and innocents are its variations. It conforms: `conform
fattn.conformance.plain`.
"""

from fattn.conformance.plain import dense, masks, merge, paged, rope, standard

ARRAYS = "numpy"
FLOAT64 = True

__all__ = ["ARRAYS", "FLOAT64", "dense", "masks", "merge", "paged", "rope", "standard"]
