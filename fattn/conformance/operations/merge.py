"""Cases of merge.empty, merge.merge and merge.finish."""

from __future__ import annotations

import numpy as np

from fattn.conformance.calls import Call
from fattn.conformance.cases import Case, case_of, numbers
from fattn.conformance.operations.base import Flips, Operation, rolled
from fattn.types import Partial

LSES = ("near", "far", "some empty", "tied", "extreme")


def _empty(case: Case) -> Call:
    t, h, dv = ((1, 1, 16), (5, 3, 64), (65, 4, 8), (0, 2, 32))[int(case.rng().integers(4))]
    return Call("merge.empty", {"tokens": t, "heads": h, "value_size": dv}, {"dtype": case["dtype"]})


def _sizes_flips(call: Call) -> Flips:
    for name, size in call.arguments.items():
        yield f"{name} + 1", call.change({name: size + 1})


EMPTY = Operation(
    "merge.empty",
    {"dtype": ("float32", "bfloat16", "float16")},
    _empty,
    _sizes_flips,
    results=lambda case: {".out": "input", ".lse": "input"},
)


def partial(case: Case, rng: np.random.Generator, kind: str = "float32") -> Partial:
    """A Partial in float32 (`kind`) whose lse is of the case's kind. Rows that see nothing have out = 0."""
    t, h, dv = numbers(case["shape"])
    lse = rng.standard_normal((t, h))
    match case["lse"]:
        case "far":
            lse = lse * 30
        case "extreme":
            lse = lse * 3e3
        case "tied":
            lse = np.round(lse)
        case "some empty":
            lse = np.where(rng.random((t, h)) < 0.4, -np.inf, lse)
    out = np.where(np.isfinite(lse)[..., None], rng.standard_normal((t, h, dv)) * 2, 0)
    return Partial(out.astype(kind), lse.astype(kind))


def _merge(case: Case) -> Call:
    rng, kind = case.rng(), _kind(case)
    return Call("merge.merge", {"a": partial(case, rng, kind), "b": partial(case, rng, kind)}, {})


def _kind(case):
    return dict(case.options).get("dtype", "float32")


def _merge_flips(call: Call) -> Flips:
    a, b = call.arguments.values()
    yield "lse exchanged", call.change({"a": Partial(a.out, b.lse), "b": Partial(b.out, a.lse)})
    in_base_2 = {name: Partial(p.out, p.lse * np.float32(np.log(2))) for name, p in call.arguments.items()}
    yield "lse in base 2", call.change(in_base_2)
    yield "a ignored", call.change({"a": Partial(a.out, np.full_like(a.lse, -np.inf))})
    yield "b ignored", call.change({"b": Partial(b.out, np.full_like(b.lse, -np.inf))})
    if a.lse.shape[1] > 1:
        yield "heads of a rolled", call.change({"a": Partial(np.roll(a.out, 1, 1), np.roll(a.lse, 1, 1))})


def _merge_unused(call: Call, fill: float, hidden: float) -> Call | None:
    a, b = (Partial(np.where((p.lse == -np.inf)[..., None], np.float32(fill), p.out), p.lse) for p in call.arguments.values())
    return call.change({"a": a, "b": b}) if any((p.lse == -np.inf).any() for p in (a, b)) else None


MERGE = Operation(
    "merge.merge",
    {"shape": ("1x1x16", "5x3x64", "65x4x8"), "lse": LSES},
    _merge,
    _merge_flips,
    results=lambda case: {".out": _kind(case), ".lse": _kind(case)},
    unused=_merge_unused,
    also=tuple(case_of("merge.merge", {"shape": "5x3x64", "lse": lse, "dtype": "float64"}) for lse in ("near", "some empty")),
)


def _finish(case: Case) -> Call:
    rng = case.rng()
    given = partial(case, rng)
    sink = None
    if case["sink"] is not None:
        finite = np.where(np.isfinite(given.lse), given.lse, 0)
        sink = (finite[0] + rng.standard_normal(finite.shape[1])).astype(np.float32)
        if case["sink"] == "infinite":
            sink[0] = -np.inf
            sink[-1] = np.inf if len(sink) > 1 else sink[-1]
    return Call("merge.finish", {"partial": given, "sink": sink}, {"dtype": case["dtype"]})


def _finish_flips(call: Call) -> Flips:
    given, sink = call.arguments.values()
    yield "out rolled", call.change({"partial": Partial(np.roll(given.out, 1, -1), given.lse)})
    if sink is None:
        return
    yield "sink ignored", call.change({"sink": None})
    yield "sink twice", call.change({"sink": sink + np.float32(np.log(2))})
    yield "lse in base 2", call.change({"partial": Partial(given.out, given.lse * np.float32(np.log(2)))})
    yield from rolled(call, "sink")


def _finish_unused(call: Call, fill: float, hidden: float) -> Call | None:
    given, sink = call.arguments.values()
    if sink is None or not (given.lse == -np.inf).any():
        return None
    return call.change({"partial": Partial(np.where((given.lse == -np.inf)[..., None], np.float32(fill), given.out), given.lse)})


FINISH = Operation(
    "merge.finish",
    {"dtype": ("float32", "bfloat16", "float16"), "shape": ("1x1x16", "5x3x64", "65x4x8"), "lse": LSES, "sink": (None, "some", "infinite")},
    _finish,
    _finish_flips,
    results=lambda case: {"": "input"},
    unused=_finish_unused,
)
