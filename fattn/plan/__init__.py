"""Host-side planning, NumPy only: batches (`plan.batch`) and the choice of a mechanism (`plan.select`)."""

import importlib

_SUBMODULES = ("batch", "select")


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f"fattn.plan.{name}")
    raise AttributeError(f"module 'fattn.plan' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_SUBMODULES])
