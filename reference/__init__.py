"""The oracle: float64 NumPy, loops, one query at a time. Every function returns its value and an error bound for correct kernels.

Submodules load on first use, as in `fattn`: `reference.dense.attend(...)`. They import NumPy and `fattn.types` alone.
"""

import importlib

ARRAYS = "numpy"  # what the functions take and return; the conformance kit reads it

_SUBMODULES = ("bounded", "dense", "masks", "merge", "paged", "quant", "rope", "standard")


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f"reference.{name}")
    raise AttributeError(f"module 'reference' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_SUBMODULES])
