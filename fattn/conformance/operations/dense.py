"""Cases of dense.attend, dense.alibi and dense.alibi_slopes."""

from __future__ import annotations

import numpy as np

from fattn.conformance import generators
from fattn.conformance.calls import Call
from fattn.conformance.cases import MASKS, Case, case_of, dtype_of, numbers
from fattn.conformance.operations.base import Flips, Operation, labels_at, mask_flips, near, rolled
from fattn.conformance.plain.masks import positions, visible
from fattn.types import Range, Tokens

OPTIONS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "heads": ("4/2", "6/2", "18/18", "5/1"),
    "sizes": ("64/64", "128/128", "40/24"),
    "mask": tuple(name for name in MASKS if name not in ("window(None, 2)", "window(4, None)", "causal & window(20, 0) & same")),
    "shape": ("1x129", "65x66", "9x513"),
    "positions": ("array", "range", "scattered"),
    "scale": ("rsqrt", 0.25),
    "softcap": (None, 3.0, 30.0),
    "bias": (None, "heads", "rows", "hides", "columns"),
}


def build(case: Case) -> Call:
    """The call of a case: positions and labels first, then rows, bias and spotlights."""
    rng, mask = case.rng(), MASKS[case["mask"]]
    (queries, keys), (h, hk), (d, dv) = numbers(case["shape"]), numbers(case["heads"]), numbers(case["sizes"])
    q_pos, k_pos = sides(case, rng, mask)
    q, k, v = generators.rows(case.generator, rng, queries, keys, (h, hk, d, dv), dtype_of(case["dtype"]))
    arguments = {"q": q, "k": k, "v": v, "q_pos": q_pos, "k_pos": k_pos, "bias": _bias(case, rng, h, queries, keys, q_pos, k_pos)}
    scale = d**-0.5 if case["scale"] == "rsqrt" else float(case["scale"])
    static = {"mask": mask, "scale": scale, "softcap": case["softcap"]}
    for edit in case.edits:
        if edit.startswith("spotlight"):
            i, j = (int(n) for n in edit.split(":")[1:])
            if i < queries and j < keys:
                generators.spotlight(q, k, v, i, j, q_pos, k_pos, arguments["bias"], **static)
    return Call("dense.attend", arguments, static)


def sides(case: Case, rng, mask):
    """(queries, keys): positions by the case's kind, as Tokens where the mask reads labels."""
    queries, keys = numbers(case["shape"])
    if case["positions"] == "range":
        q_pos, k_pos = Range(keys - queries, queries), Range(0, keys)
        p, j = positions(q_pos), positions(k_pos)
    else:
        (count, length), stride, start = case.lengths[0] if case.lengths else (queries, keys), 1, 0
        p, j = np.full(queries, -1, np.int32), np.full(keys, -1, np.int32)
        p[:count], j[:length] = length - count + np.arange(count), np.arange(length)
        if case["positions"] == "scattered":
            stride, start = 2, 1000
            rng.shuffle(j)
            p[:count] = rng.integers(0, max(length, 1), count)
        p, j = (np.where(x < 0, x, start + stride * x).astype(np.int32) for x in (p, j))
        q_pos, k_pos = p, j
    if not mask.labels():
        return q_pos, k_pos
    last = max(int(p.max(initial=0)), int(j.max(initial=0))) + 1
    table = labels_at(rng, mask, last, context=max(last - 12, 0))
    return tuple(Tokens(side, {name: label[np.maximum(x, 0)] for name, label in table.items()}) for side, x in ((q_pos, p), (k_pos, j)))


def flips(call: Call) -> Flips:
    """Each edge of the mask, scale, cap, bias, the map of heads, and each positional argument."""
    for name, mask in mask_flips(call.static["mask"]):
        yield name, call.change({"mask": mask})
    yield "scale", call.change({"scale": 1.5 * call.static["scale"]})
    if call.static["softcap"] is not None:
        yield "softcap ignored", call.change({"softcap": None})
    if call.arguments["bias"] is not None:
        yield "bias ignored", call.change({"bias": None})
        yield from rolled(call, "bias", axis=call.arguments["bias"].ndim - 1)
    q, k, v = (call.arguments[name] for name in "qkv")
    if 1 < k.shape[1] < q.shape[1]:
        tiled = np.arange(q.shape[1]) % k.shape[1]
        yield "heads tiled", call.change({"k": k[:, tiled], "v": v[:, tiled]})
    yield from rolled(call, "q", axis=1)
    for name in ("k", "v"):
        yield from rolled(call, name, axis=1)
        yield from rolled(call, name)
    yield "q_pos + 1", call.change({"q_pos": moved(call.arguments["q_pos"])})


def plant(case: Case, call: Call, weak: list[Call]) -> tuple[str, ...]:
    """A spotlight for each weak decision: on a key that the other mask sees and this one does not (or the reverse), else on a seen key."""
    seen, rng, found = _seen(call), np.random.default_rng(case.seed + 1), []
    for flipped in weak:
        other = _seen(flipped)
        places = np.argwhere((other != seen) if (other != seen).any() else seen)
        if len(places):
            i, j = places[rng.integers(len(places))]
            found.append(f"spotlight:{i}:{j}")
    return tuple(dict.fromkeys(found))[:4]


def unused(call: Call, fill: float, hidden: float) -> Call | None:
    """The call with `fill` in padding rows and `hidden` in keys that no query sees; None where there are no such places."""
    bias = call.arguments["bias"]
    seen = _seen(call)[None]
    if bias is not None:
        seen = seen & np.broadcast_to(bias > -np.inf, (call.arguments["q"].shape[1], *seen.shape[1:]))
    idle, unseen, padding = ~seen.any((0, 2)), ~seen.any((0, 1)), positions(call.arguments["k_pos"]) < 0
    if not (idle.any() or unseen.any()):
        return None
    q, k, v = (call.arguments[name].copy() for name in "qkv")
    q[positions(call.arguments["q_pos"]) < 0] = fill
    for rows in (k, v):
        rows[unseen & ~padding], rows[padding] = hidden, fill
    return call.change({"q": q, "k": k, "v": v})


def _seen(call):
    return visible(call.arguments["q_pos"], call.arguments["k_pos"], mask=call.static["mask"])


def _bias(case, rng, h, queries, keys, q_pos, k_pos):
    shapes = {"heads": (h, 1, keys), "rows": (queries, keys), "hides": (h, queries, keys), "columns": (h, queries, 1)}
    if case["bias"] is None:
        return None
    bias = rng.standard_normal(shapes[case["bias"]])
    if case["bias"] == "hides":
        bias = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias)
    return bias.astype(dtype_of(case["dtype"]))


def moved(side):
    """Positions one later, padding apart."""
    if isinstance(side, Tokens):
        return Tokens(moved(side.pos), side.labels)
    return Range(side.start + 1, side.size) if isinstance(side, Range) else np.where(side < 0, side, side + 1).astype(side.dtype)


def lengths(case: Case):
    """Choices of (query length, key length) under the padded shape."""
    queries, keys = numbers(case["shape"])
    return ((near(queries), near(keys)),)


_LONG = {"dtype": "float32", "heads": "2/1", "sizes": "64/64", "mask": "causal & window(8, 0)", "shape": "2x2048", "positions": "array"}
_PLAIN = {"scale": "rsqrt", "softcap": None, "bias": None}
_DOUBLE = {"dtype": "float64", "heads": "4/2", "sizes": "40/24", "mask": "causal", "shape": "5x66", "positions": "array"}

ATTEND = Operation(
    "dense.attend",
    OPTIONS,
    build,
    flips,
    results=lambda case: {".out": "accumulator", ".lse": "float32"},
    lengths=lengths,
    generators=generators.GENERATORS,
    plant=plant,
    unused=unused,
    also=(
        case_of("dense.attend", _LONG | _PLAIN),
        case_of("dense.attend", _LONG | _PLAIN | {"dtype": "bfloat16", "mask": "causal"}),
        case_of("dense.attend", _DOUBLE | _PLAIN),
        case_of("dense.attend", _DOUBLE | {"scale": 0.25, "softcap": 3.0, "bias": "hides"}),
    ),
)


def _alibi(case: Case) -> Call:
    rng = case.rng()
    q_pos, k_pos = sides(case, rng, MASKS["causal"])
    slopes = (2.0 ** -rng.uniform(0, 8, case["count"])).astype(dtype_of(case["dtype"]))
    return Call("dense.alibi", {"slopes": slopes, "q_pos": q_pos, "k_pos": k_pos}, {})


def _alibi_flips(call: Call) -> Flips:
    yield from rolled(call, "slopes")
    yield "sign", call.change({"slopes": -call.arguments["slopes"]})
    yield "q_pos + 1", call.change({"q_pos": moved(call.arguments["q_pos"])})
    yield "k_pos + 1", call.change({"k_pos": moved(call.arguments["k_pos"])})


ALIBI = Operation(
    "dense.alibi",
    {"dtype": ("float32", "bfloat16"), "count": (1, 4, 5), "shape": ("1x130", "65x66"), "positions": ("array", "range", "scattered")},
    _alibi,
    _alibi_flips,
    results=lambda case: {"": "float32"},
    lengths=lengths,
)


def _slopes(case: Case) -> Call:
    rng = case.rng()
    heads = 2 ** int(rng.integers(0, 8)) if case["heads"] == "power of two" else int(rng.integers(3, 256))
    return Call("dense.alibi_slopes", {"heads": heads}, {})


ALIBI_SLOPES = Operation(
    "dense.alibi_slopes",
    {"heads": ("power of two", "any")},
    _slopes,
    lambda call: iter([("twice the heads", call.change({"heads": 2 * call.arguments["heads"]}))]),
    results=lambda case: {"": "float32"},
)
