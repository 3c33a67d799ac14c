"""What may not be refused: for each package and operation, the values of each option that a conforming implementation takes.

Every value of every option of an operation is a feature. A required one is part of the core; one that is not listed is optional, and may
be refused with Unsupported. Sizes are "head/value" sizes, heads "query/key" heads, shapes "queries x keys". Draft tokens are "drafts"
(2 to 16 queries a sequence), chunked prefill and prefix hits are "chunked", sequences without keys or with too few are in "mixed".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from fattn.conformance.cases import Case, Scalar
from fattn.conformance.operations import OPERATIONS

Features = Mapping[str, tuple[Scalar, ...]]

ATTENTION_ON_NPU: Features = {
    "dtype": ("bfloat16", "float16"),
    "batch": ("decode", "chunked", "mixed", "prefill", "drafts"),
    "mask": ("causal", "causal & window(8, 0)", "full", "tree", "causal & same"),
    "heads": ("4/2", "6/2", "3/3", "5/1"),
    "sizes": ("128/128", "64/64"),
    "block_size": (128,),
    "layout": ("pbhd",),
    "scale": ("rsqrt", 0.25),
    "softcap": (None,),
    "slopes": (None, "alibi"),
}

# Operations of `npu` that are limited by what the device's operators take. All others take everything.
ON_NPU: Mapping[str, Features] = {
    "dense.attend": {
        "dtype": ("bfloat16", "float16"),
        "heads": ("4/2", "6/2", "18/18", "5/1"),
        "sizes": ("64/64", "128/128"),
        "mask": (
            "full",
            "causal",
            "causal & window(8, 0)",
            "window(6, 3)",
            "causal & chunk(16)",
            "causal & same",
            "tree",
            "causal & (window(3, 0) | same)",
        ),
        "shape": ("1x129", "65x66", "9x513"),
        "positions": ("array", "range", "scattered"),
        "scale": ("rsqrt", 0.25),
        "softcap": (None,),
        "bias": (None, "heads", "rows", "hides", "columns"),
    },
    "paged.write": {
        "dtype": ("bfloat16", "float16"),
        "layout": ("pbhd",),
        "block_size": (16, 128),
        "cache": ("2/64/64", "1/128/128"),
        "tokens": (1, 17),
        "slots": ("all written", "all written, int64"),
    },
    "paged.attend": ATTENTION_ON_NPU | {"layout": ("pbhd", "phbd"), "lse": ("asked", "not asked")},
    "standard.attend_and_write": ATTENTION_ON_NPU | {"sinks": (None, "some")},
    "standard.forward": {
        "dtype": ("bfloat16", "float16"),
        "x": ("same", "float32"),
        "batch": ("decode", "chunked", "mixed", "prefill", "drafts"),
        "mask": ("causal", "causal & window(8, 0)", "tree"),
        "heads": ("4/2", "3/3", "5/1"),
        "sizes": ("64/64", "32/32"),
        "hidden": (24, 40),
        "block_size": (128,),
        "layout": ("pbhd",),
        "softcap": (None,),
        "rotary": ("half", "interleaved", "part", None),
        "biases": (None, "all", "some"),
        "sinks": (None, "some"),
        "slopes": (None, "alibi"),
    },
}

# Of a package that is neither `fattn` nor `npu`: what every attention library has. Its dtypes and layouts are its own choice.
OF_OTHERS: Mapping[str, Features] = {
    name: {option: values for option, values in features.items() if option not in ("dtype", "layout", "slopes", "block_size")}
    | {option: () for option in ("dtype", "layout", "slopes", "block_size") if option in features}
    | ({"mask": ("causal", "full") if name != "standard.forward" else ("causal",)} if "mask" in features else {})
    | ({"bias": (None,)} if "bias" in features else {})
    for name, features in ON_NPU.items()
}


def required(package: str, operation: str) -> Features:
    """The features of `operation` that `package` may not refuse. The definitions refuse nothing."""
    options = OPERATIONS[operation].options
    if package == "fattn" or package.startswith("fattn."):
        return options
    return {**options, **(ON_NPU if package == "npu" else OF_OTHERS).get(operation, {})}


def alternatives(package: str, case: Case) -> Iterator[Case]:
    """The case with optional features replaced by required ones (or, where an option has none, by its other values): the fewest first."""
    core, options = required(package, case.operation), OPERATIONS[case.operation].options
    optional = [name for name, value in case.options if name in core and value not in core[name]]
    for count in range(1, len(optional) + 1):
        for names in combinations(optional, count):
            found = [case]
            for name in names:
                others = core[name][:1] or [value for value in options[name] if value != case[name]]
                found = [each.option(name, value) for each in found for value in others]
            yield from found
