"""Attention for large language models as pure functions in JAX: the executable definitions.

Submodules load on first use (`fattn.dense.attend(...)`), so `import fattn` itself imports neither jax nor anything else heavy.
"""

import importlib

ARRAYS = "jax"  # what the functions take and return; the conformance kit reads it
FLOAT64 = True  # dense, merge and rope take float64, within jax.enable_x64

_SUBMODULES = ("conformance", "dense", "masks", "merge", "paged", "plan", "quant", "rope", "standard", "types")


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f"fattn.{name}")
    raise AttributeError(f"module 'fattn' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_SUBMODULES])
