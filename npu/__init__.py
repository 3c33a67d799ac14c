"""The functions of `fattn` on Huawei Ascend NPUs: the same names and signatures, in torch, on the operators of torch_npu.

Submodules load on first use, and torch_npu only when an operator is called. On a host with no NPU, `npu.emulator.install()` runs the same
code through the real dispatcher on CPU kernels. Accepted dtypes are float16 and bfloat16 where an operator computes attention.
"""

import importlib

ARRAYS = "torch"  # what the functions take and return; the conformance kit reads it

# Unit roundoffs that the operators declare, for reference's Precision: P, the output and biases are cast to the input's dtype
PRECISION = {
    "float16": {"accumulator": 2.0**-24, "probabilities": 2.0**-11, "output": 2.0**-11, "bias": 2.0**-11},
    "bfloat16": {"accumulator": 2.0**-24, "probabilities": 2.0**-8, "output": 2.0**-8, "bias": 2.0**-8},
}

_SUBMODULES = ("dense", "emulator", "graph", "limits", "masks", "merge", "nz", "paged", "probe", "quant", "rope", "standard", "support")


def __getattr__(name):
    if name == "place":
        return importlib.import_module("npu._place").place
    if name in _SUBMODULES:
        return importlib.import_module(f"npu.{name}")
    raise AttributeError(f"module 'npu' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), "place", *_SUBMODULES])
