"""Cases of standard.prepare, standard.attend_and_write and standard.forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fattn.conformance.calls import Call
from fattn.conformance.cases import MASKS, Case, dtype_of, numbers
from fattn.conformance.operations import batches
from fattn.conformance.operations.base import Flips, Operation, rolled
from fattn.conformance.operations.paged import ATTEND_OPTIONS, DTYPES, GENERATORS, attend_flips, plant, unused_of_batch
from fattn.conformance.plain import paged as plain
from fattn.conformance.plain.standard import Weights
from fattn.types import StandardConfig, causal, full


def _attend_and_write(case: Case) -> Call:
    static, slopes, rng = batches.static(case), batches.slopes_of(case), np.random.default_rng(case.seed + 4)
    built = batches.build(case, **static, slopes=slopes)
    batch, h = built.batch, numbers(case["heads"])[0]
    cache = plain.convert(built.cache, layout="pbhd")
    rows = [rng.standard_normal((len(built.q), *array.shape[2:])).astype(array.dtype) for array in (cache.k, cache.v)]
    written = batch.slot_mapping >= 0
    for new, array in zip(rows, (cache.k, cache.v), strict=True):
        flat, at = array.reshape(-1, *array.shape[2:]), batch.slot_mapping[written]
        new[written] = flat[at]  # this step's keys arrive as rows; the cache holds something else there until they are written
        flat[at] = rng.standard_normal(flat[at].shape)
    sinks = None if case["sinks"] is None else (2 + 2 * rng.standard_normal(h)).astype(np.float32)
    arguments = {
        "q": built.q,
        "k": rows[0],
        "v": rows[1],
        "cache": plain.convert(cache, layout=case["layout"]),
        "batch": batch,
        "sinks": sinks,
        "slopes": slopes,
    }
    return Call("standard.attend_and_write", arguments, static)


def _write_flips(call: Call) -> Flips:
    yield from attend_flips(call)
    if call.arguments["sinks"] is not None:
        yield "sinks ignored", call.change({"sinks": None})
        yield from rolled(call, "sinks")
    for name in ("k", "v"):
        yield from rolled(call, name)
        yield from rolled(call, name, axis=1)


def _settled(call: Call, result):
    """The result with zeros in the cache's rows of null blocks: a step may leave its padding there."""
    batch, (out, cache) = call.arguments["batch"], result
    if cache is None:
        return result
    idle = np.unique(batch.host.slots[batch.slot_mapping < 0])
    pages = plain.convert(cache, layout="pbhd")
    for array in (pages.k, pages.v):
        array.reshape(-1, *array.shape[2:])[idle[idle >= 0]] = 0
    return out, plain.convert(pages, layout=cache.layout)


def _attend_unused(call: Call, fill: float, hidden: float) -> Call | None:
    q, cache = unused_of_batch(call, fill, hidden)
    batch = call.arguments["batch"]
    idle = (batch.slot_mapping < 0)[:, None, None]
    k, v = (np.where(idle, rows.dtype.type(fill), rows) for rows in (call.arguments["k"], call.arguments["v"]))
    return call.change({"q": q, "k": k, "v": v, "cache": cache})


ATTEND_AND_WRITE = Operation(
    "standard.attend_and_write",
    ATTEND_OPTIONS | {"sinks": (None, "some")},
    _attend_and_write,
    _write_flips,
    results=lambda case: {".0": "input", ".1.k": "input", ".1.v": "input"},
    lengths=batches.lengths,
    generators=GENERATORS,
    plant=plant,
    unused=_attend_unused,
    settled=_settled,
    places=lambda call: call.static["mask"],
)


def config_of(case: Case) -> StandardConfig:
    """The layer of a case."""
    (h, hk), (d, _) = numbers(case["heads"]), numbers(case["sizes"])
    rotary = {"half": ("half", None), "interleaved": ("interleaved", None), "part": ("half", d // 2), None: (None, None)}[case["rotary"]]
    scale = d**-0.5
    return StandardConfig(case["hidden"], h, hk, d, scale, MASKS[case["mask"]], case["softcap"], *rotary, 10000.0)


def x_dtype(case: Case) -> np.dtype:
    """The dtype of hidden states and weights, which may be the cache's or another."""
    return dtype_of(case["dtype"] if case["x"] == "same" else case["x"])


def weights_of(case: Case, rng: np.random.Generator) -> Weights:
    """Weights that make attention neither flat nor a choice of one key.

    Sparse ones use few dims of each head and give each output few inputs: worst-case bounds of low precision stay near the signal there.
    """
    config, kind = config_of(case), x_dtype(case)
    inner, kv_inner, size, d = config.heads * config.head_size, config.kv_heads * config.head_size, config.hidden_size, config.head_size
    shapes = ((size, inner), (size, kv_inner), (size, kv_inner), (inner, size))
    wq, wk, wv, wo = (rng.standard_normal(shape) / np.sqrt(shape[0]) for shape in shapes)
    bq, bk, bv, bo = (rng.standard_normal(n) for n in (inner, kv_inner, kv_inner, size))
    if case.generator == "sparse":
        active = np.isin(np.arange(d), [0, 1, d // 4, d // 2, d // 2 + 1])
        wq, bq = (4 * x * np.tile(active, config.heads) for x in (wq, bq))
        wk, bk = (2 * x * np.tile(active, config.kv_heads) for x in (wk, bk))
        wo = np.sqrt(inner) * wo * (rng.random(wo.shape) < 2 / inner)
        wo[rng.integers(0, inner, size), np.arange(size)] = 1
    biases = {"all": (bq, bk, bv, bo), "some": (bq, None, bv, None), None: (None,) * 4}[case["biases"]]
    cast = lambda x: None if x is None else x.astype(kind)
    sinks = (1 + rng.standard_normal(config.heads)).astype(np.float32) if case["sinks"] is not None else None
    slopes = (2.0 ** -np.linspace(0, 5, config.heads)).astype(np.float32) if case["slopes"] is not None else None
    return Weights(*map(cast, (wq, wk, wv, wo, *biases)), sinks, slopes)


def _prepare(case: Case) -> Call:
    return Call("standard.prepare", {"weights": weights_of(case, case.rng())}, {"config": config_of(case)})


def _prepare_flips(call: Call) -> Flips:
    weights, config = call.arguments["weights"], call.static["config"]
    for name, array in zip(weights._fields, weights, strict=True):
        if array is not None:
            yield f"{name} rolled", call.change({"weights": weights._replace(**{name: np.roll(array, 1, -1)})})
    if config.rotary is not None:
        yield "theta", call.change({"config": replace(config, rotary_theta=2 * config.rotary_theta)})


PREPARE = Operation(
    "standard.prepare",
    {
        "x": DTYPES,
        "heads": ("4/2", "5/1"),
        "sizes": ("32/32", "16/16"),
        "hidden": (24, 40),
        "mask": ("causal",),
        "softcap": (None,),
        "rotary": ("half", "interleaved", "part", None),
        "biases": (None, "all", "some"),
        "sinks": (None, "some"),
        "slopes": (None, "alibi"),
    },
    _prepare,
    _prepare_flips,
    results=lambda case: {".frequencies": "float32", ".wqkv": case["x"], ".wo": case["x"]},
)


def _forward(case: Case) -> Call:
    rng, config = np.random.default_rng(case.seed + 4), config_of(case)
    built = batches.build(case, config.mask, scale=config.scale, softcap=config.softcap)
    x = rng.standard_normal((len(built.q), config.hidden_size)).astype(x_dtype(case))
    arguments = {"x": x, "weights": weights_of(case, rng), "cache": built.cache, "batch": built.batch}
    return Call("standard.forward", arguments, {"config": config})


def _prepared(get, call: Call):
    x, weights, cache, batch = call.arguments.values()
    prepared = get("standard.prepare")(weights, config=call.static["config"])
    return get("standard.forward")(x, prepared, cache, batch, **call.static)


def _forward_flips(call: Call) -> Flips:
    """What the layer itself decides or hands on. Edges of masks are attend_and_write's: the projections' bounds would hide them."""
    config, weights = call.static["config"], call.arguments["weights"]
    yield "mask ignored", call.change({"config": replace(config, mask=full() if config.mask == causal() else causal())})
    yield "scale ignored", call.change({"config": replace(config, scale=1.0)})
    if config.softcap is not None:
        yield "softcap ignored", call.change({"config": replace(config, softcap=None)})
    if config.rotary is not None:
        yield "theta", call.change({"config": replace(config, rotary_theta=2.0)})
        yield "not turned", call.change({"config": replace(config, rotary=None)})
        other = "half" if config.rotary == "interleaved" else "interleaved"
        yield "turned in other pairs", call.change({"config": replace(config, rotary=other)})
    for name in ("bq", "bk", "bv", "bo", "sinks", "slopes"):
        if getattr(weights, name) is not None:
            yield f"{name} ignored", call.change({"weights": weights._replace(**{name: None})})
    for name in ("wq", "wk", "wv", "wo"):
        yield f"{name} rolled", call.change({"weights": weights._replace(**{name: np.roll(getattr(weights, name), config.head_size, -1)})})
    yield from rolled(call, "x", axis=1)


def _forward_unused(call: Call, fill: float, hidden: float) -> Call | None:
    batch, x = call.arguments["batch"], call.arguments["x"].copy()
    as_attend = Call("", {"q": x, "cache": call.arguments["cache"], "batch": batch}, {"mask": call.static["config"].mask})
    q, cache = unused_of_batch(as_attend, fill, hidden)
    return call.change({"x": q, "cache": cache})


FORWARD = Operation(
    "standard.forward",
    {
        "dtype": DTYPES,
        "x": ("same", "float32"),
        "batch": ("decode", "chunked", "mixed", "prefill", "drafts"),
        "mask": ("causal", "causal & window(8, 0)", "tree"),
        "heads": ("4/2", "3/3", "5/1"),
        "sizes": ("64/64", "32/32"),
        "hidden": (24, 40),
        "block_size": (128, 16),
        "layout": ("pbhd", "hpbd"),
        "softcap": (None, 3.0),
        "rotary": ("half", "interleaved", "part", None),
        "biases": (None, "all", "some"),
        "sinks": (None, "some"),
        "slopes": (None, "alibi"),
    },
    _forward,
    _forward_flips,
    results=lambda case: {".0": x_dtype(case).name, ".1.k": "input", ".1.v": "input"},
    lengths=batches.lengths,
    generators=("sparse", "sparse", "gaussian"),
    unused=_forward_unused,
    invoke=_prepared,
    settled=_settled,
    places=lambda call: call.static["config"].mask,
)
