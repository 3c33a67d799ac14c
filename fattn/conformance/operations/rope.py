"""Cases of rope.frequencies, rope.yarn, rope.table, rope.half and rope.interleaved."""

from __future__ import annotations

import numpy as np

from fattn.conformance.calls import Call
from fattn.conformance.cases import Case, dtype_of, numbers
from fattn.conformance.operations.base import Flips, Operation, rolled


def _theta(case: Case) -> float:
    return float(np.exp(case.rng().uniform(np.log(1e3), np.log(1e7)))) if case["theta"] == "drawn" else float(case["theta"])


def _frequencies(case: Case) -> Call:
    return Call("rope.frequencies", {"rotary_size": case["rotary_size"]}, {"theta": _theta(case)})


def _static_flips(call: Call) -> Flips:
    for name, value in call.static.items():
        if isinstance(value, int | float):
            yield f"{name} twice", call.change({name: 2 * value})
    if "rotary_size" in call.arguments:
        yield "rotary_size twice", call.change({"rotary_size": 2 * call.arguments["rotary_size"]})


FREQUENCIES = Operation(
    "rope.frequencies",
    {"rotary_size": (2, 32, 64, 96, 128), "theta": ("drawn", 10000.0)},
    _frequencies,
    _static_flips,
    results=lambda case: {"": "float32"},
)


def _yarn(case: Case) -> Call:
    rng = np.random.default_rng(case.seed + 3)
    beta_fast, beta_slow = float(rng.uniform(16, 64)), float(rng.uniform(0.5, 2))
    betas = {"beta_fast": beta_fast, "beta_slow": beta_slow} if case["betas"] == "drawn" else {}
    static = {"theta": _theta(case), "factor": float(case["factor"]), "original_length": case["original_length"], **betas}
    return Call("rope.yarn", {"rotary_size": case["rotary_size"]}, static)


YARN = Operation(
    "rope.yarn",
    {
        "rotary_size": (64, 96, 128),
        "theta": ("drawn", 10000.0),
        "factor": (4, 40.0),
        "original_length": (2048, 4096, 32768),
        "betas": (None, "drawn"),
    },
    _yarn,
    _static_flips,
    results=lambda case: {"": "float32"},
)


def positions(case: Case, rng: np.random.Generator, count: int) -> np.ndarray:
    """Int32[count] of the case's kind."""
    kind = case["positions"]
    if kind == "near":
        return rng.integers(0, 64, count).astype(np.int32)
    if kind == "far":
        return rng.integers(0, 131072, count).astype(np.int32)
    return np.where(rng.random(count) < 0.3, -1, rng.integers(0, 4096, count)).astype(np.int32)


def _table(case: Case) -> Call:
    rng, size = case.rng(), case["rotary_size"]
    frequencies = (10000.0 ** -(np.arange(0, size, 2) / size)).astype(np.float32)
    return Call("rope.table", {"positions": positions(case, rng, case["tokens"]), "frequencies": frequencies}, {"dtype": case["dtype"]})


def _table_flips(call: Call) -> Flips:
    yield "positions + 1", call.change({"positions": call.arguments["positions"] + np.int32(1)})
    yield from rolled(call, "positions")
    yield from rolled(call, "frequencies")


TABLE = Operation(
    "rope.table",
    {
        "dtype": ("float32", "bfloat16", "float16"),
        "rotary_size": (32, 64),
        "tokens": (3, 65),
        "positions": ("near", "far", "padded"),
    },
    _table,
    _table_flips,
    results=lambda case: {".0": "input", ".1": "input"},
)


def _turn(name: str):
    def build(case: Case) -> Call:
        rng = case.rng()
        t, h, d = numbers(case["shape"])
        size = d if case["turned"] == "all" else d // 2
        frequencies = 10000.0 ** -(np.arange(0, size, 2) / size)
        angle = positions(case, rng, t)[:, None] * frequencies
        kind = dtype_of(case["dtype"]) if case["tables"] == "same" else np.float32
        x = rng.standard_normal((t, h, d)).astype(dtype_of(case["dtype"]))
        return Call(name, {"x": x, "cos": np.cos(angle).astype(kind), "sin": np.sin(angle).astype(kind)}, {})

    return build


def _turn_flips(call: Call) -> Flips:
    yield "turned the other way", call.change({"sin": -call.arguments["sin"]})
    yield "not turned", call.change({"cos": np.ones_like(call.arguments["cos"]), "sin": np.zeros_like(call.arguments["sin"])})
    for axis in (0, 1, 2):
        yield from rolled(call, "x", axis=axis)
    yield "tables of another pair", call.change({"cos": np.roll(call.arguments["cos"], 1, 1), "sin": np.roll(call.arguments["sin"], 1, 1)})


TURN_OPTIONS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "shape": ("1x4x64", "65x2x128", "7x1x32"),
    "turned": ("all", "half of the dims"),
    "tables": ("float32", "same"),
    "positions": ("near", "padded"),
}

HALF, INTERLEAVED = (
    Operation(name, TURN_OPTIONS, _turn(name), _turn_flips, results=lambda case: {"": "input"})
    for name in ("rope.half", "rope.interleaved")
)
