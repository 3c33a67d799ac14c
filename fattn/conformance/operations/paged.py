"""Cases of paged.allocate, convert, write, gather and attend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fattn.conformance.calls import Call
from fattn.conformance.cases import Case, case_of, dtype_of, numbers
from fattn.conformance.operations import batches
from fattn.conformance.operations.base import Flips, Operation, mask_flips, rolled
from fattn.conformance.plain import paged as plain
from fattn.conformance.plain.masks import visible
from fattn.types import LAYOUTS, Pages

DTYPES = ("float32", "bfloat16", "float16")


def cache_of(case: Case, rng: np.random.Generator, num_blocks: int) -> Pages:
    """A cache of random numbers in the case's dtype, layout and block size."""
    hk, d, dv, b = *numbers(case["cache"]), case["block_size"]
    shape = (num_blocks, b, hk)
    k, v = (rng.standard_normal((*shape, size)).astype(dtype_of(case["dtype"])) for size in (d, dv))
    return plain.convert(Pages(k, v, "pbhd", b), layout=case["layout"])


def _allocate(case: Case) -> Call:
    num_blocks, hk, d, dv = ((1, 1, 16, 16), (3, 2, 64, 64), (5, 4, 32, 16))[int(case.rng().integers(3))]
    arguments = {"num_blocks": num_blocks, "kv_heads": hk, "head_size": d, "value_size": dv}
    return Call("paged.allocate", arguments, {"block_size": case["block_size"], "layout": case["layout"], "dtype": case["dtype"]})


def _allocate_flips(call: Call) -> Flips:
    for name, size in call.arguments.items():
        yield f"{name} + 1", call.change({name: size + 1})
    yield "block_size + 1", call.change({"block_size": call.static["block_size"] + 1})


ALLOCATE = Operation(
    "paged.allocate",
    {"dtype": DTYPES, "layout": LAYOUTS, "block_size": (16, 128)},
    _allocate,
    _allocate_flips,
    results=lambda case: {".k": "input", ".v": "input"},
)


def _convert(case: Case) -> Call:
    rng = case.rng()
    return Call("paged.convert", {"cache": cache_of(case, rng, 3)}, {"layout": case["to"]})


def cache_flips(call: Call, name: str = "cache") -> Flips:
    """The cache with its heads or its blocks moved round by one, keys and values exchanged where they can be."""
    cache = call.arguments[name]
    for axis in "hpb":
        index = cache.layout.index(axis)
        if cache.k.shape[index] > 1:
            k, v = (np.roll(array, 1, index) for array in (cache.k, cache.v))
            yield f"{name} rolled along {axis}", call.change({name: replace(cache, k=k, v=v)})
    if cache.k.shape == cache.v.shape:
        yield "k and v exchanged", call.change({name: replace(cache, k=cache.v, v=cache.k)})


CONVERT = Operation(
    "paged.convert",
    {"dtype": DTYPES, "layout": LAYOUTS, "to": LAYOUTS, "block_size": (16, 128), "cache": ("2/16/16", "1/64/64", "3/16/8", "16/8/8")},
    _convert,
    cache_flips,
    results=lambda case: {".k": "input", ".v": "input"},
)


def _write(case: Case) -> Call:
    rng = case.rng()
    cache, (hk, d, dv) = cache_of(case, rng, 4), numbers(case["cache"])
    total, tokens = 4 * case["block_size"], case["tokens"]
    slots = rng.permutation(total)[:tokens].astype(np.int32)
    if case["slots"] == "some unwritten":
        slots = np.where(rng.random(tokens) < 0.4, -rng.integers(1, 5, tokens), slots).astype(np.int32)
    if case["slots"] == "some past the end":
        slots = np.where(rng.random(tokens) < 0.4, total + rng.permutation(tokens), slots).astype(np.int32)
    if case["slots"] == "all written, int64":
        slots = slots.astype(np.int64)
    k, v = (rng.standard_normal((tokens, hk, size)).astype(dtype_of(case["dtype"])) for size in (d, dv))
    return Call("paged.write", {"cache": cache, "k": k, "v": v, "slots": slots}, {})


def _write_flips(call: Call) -> Flips:
    slots, cache = call.arguments["slots"], call.arguments["cache"]
    total = cache.k.shape[cache.layout.index("p")] * cache.block_size
    yield "slot + 1", call.change({"slots": np.where((slots >= 0) & (slots < total), (slots + 1) % total, slots).astype(slots.dtype)})
    if (slots < 0).any():
        last = np.where(slots == total - 1, -1, slots)
        last[np.flatnonzero(slots < 0)[0]] = total - 1
        yield "an unwritten row goes to the last slot", call.change({"slots": last})
    if (slots >= total).any():
        first_past = np.where(slots == slots[slots >= total][0], total - 1, np.where(slots == total - 1, -1, slots))
        yield "a slot past the end goes to the last", call.change({"slots": first_past.astype(slots.dtype)})
    for name in ("k", "v"):
        yield from rolled(call, name)
        yield from rolled(call, name, axis=1)
    yield from cache_flips(call)


def _write_unused(call: Call, fill: float, hidden: float) -> Call | None:
    slots, cache = call.arguments["slots"], call.arguments["cache"]
    unwritten = (slots < 0) | (slots >= cache.k.shape[cache.layout.index("p")] * cache.block_size)
    if not unwritten.any():
        return None
    k, v = (np.where(unwritten[:, None, None], rows.dtype.type(fill), rows) for rows in (call.arguments["k"], call.arguments["v"]))
    return call.change({"k": k, "v": v})


WRITE = Operation(
    "paged.write",
    {
        "dtype": DTYPES,
        "layout": LAYOUTS,
        "block_size": (16, 128),
        "cache": ("2/64/64", "1/128/128"),
        "tokens": (1, 17),
        "slots": ("all written", "all written, int64", "some unwritten", "some past the end"),
    },
    _write,
    _write_flips,
    results=lambda case: {".k": "input", ".v": "input"},
    unused=_write_unused,
)


def _gather(case: Case) -> Call:
    rng = case.rng()
    cache = cache_of(case, rng, 6)
    table = rng.integers(0, 6, (3, 2)).astype(np.int32)
    if case["ids"] == "some unknown":
        table = np.where(rng.random(table.shape) < 0.4, rng.choice([-1, -7, 6, 2000, 7768], table.shape), table).astype(np.int32)
    return Call("paged.gather", {"cache": cache, "block_table": table}, {})


def _gather_flips(call: Call) -> Flips:
    yield from rolled(call, "block_table", axis=1)
    yield from rolled(call, "block_table")
    yield from cache_flips(call)
    table = call.arguments["block_table"]
    if ((table < 0) | (table > 5)).any():
        yield "unknown blocks clipped", call.change({"block_table": np.clip(table, 0, 5)})


def _gather_unused(call: Call, fill: float, hidden: float) -> Call | None:
    cache, table = plain.convert(call.arguments["cache"], layout="pbhd"), call.arguments["block_table"]
    idle = ~np.isin(np.arange(cache.k.shape[0]), table)
    if not idle.any():
        return None
    cache.k[idle], cache.v[idle] = fill, fill
    return call.change({"cache": plain.convert(cache, layout=call.arguments["cache"].layout)})


GATHER = Operation(
    "paged.gather",
    {
        "dtype": DTYPES,
        "layout": LAYOUTS,
        "block_size": (16, 128),
        "cache": ("2/16/16", "1/32/64"),
        "ids": ("all known", "some unknown"),
    },
    _gather,
    _gather_flips,
    results=lambda case: {".0": "input", ".1": "input"},
    unused=_gather_unused,
)


def _attend(case: Case) -> Call:
    static, slopes = batches.static(case), batches.slopes_of(case)
    built = batches.build(case, **static, slopes=slopes)
    arguments = {"q": built.q, "cache": built.cache, "batch": built.batch, "slopes": slopes}
    return Call("paged.attend", arguments, static | {"lse": case["lse"] == "asked"})


def attend_flips(call: Call) -> Flips:
    """Each decision of attention over pages: the mask, scale, cap, slopes, heads, the table, the lengths."""
    for name, mask in mask_flips(call.static["mask"]):
        yield name, call.change({"mask": mask})
    yield "scale", call.change({"scale": 1.5 * call.static["scale"]})
    if call.static["softcap"] is not None:
        yield "softcap ignored", call.change({"softcap": None})
    if call.arguments["slopes"] is not None:
        yield "slopes ignored", call.change({"slopes": None})
        yield from rolled(call, "slopes")
    yield from rolled(call, "q", axis=1)
    cache, batch = call.arguments["cache"], call.arguments["batch"]
    head = cache.layout.index("h")
    if 1 < cache.k.shape[head] < call.arguments["q"].shape[1]:
        tiled = np.arange(call.arguments["q"].shape[1]) % cache.k.shape[head]
        rows = {name: call.arguments[name][:, tiled] for name in "kv" if name in call.arguments}
        yield "heads tiled", call.change({"cache": replace(cache, k=cache.k.take(tiled, head), v=cache.v.take(tiled, head)), **rows})
    if "k" not in call.arguments:
        yield from cache_flips(call)
    yield from batch_flips(call, batch)


def batch_flips(call: Call, batch) -> Flips:
    """The pages of a sequence exchanged, the tables of two sequences exchanged, a key forgotten."""
    queries = np.diff(batch.query_start_loc)
    used = -(-batch.seq_lens // batch.block_size)
    long = np.flatnonzero((used > 1) & (queries > 0))
    if long.size and "k" not in call.arguments:
        table = batch.block_table.copy()
        table[long[0], :2] = table[long[0], 1::-1]
        yield "pages exchanged", call.change({"batch": replace(batch, block_table=table)})
    several = np.flatnonzero((batch.seq_lens > queries) & (queries > 0) & (batch.seq_lens > 1))
    if several.size and not batch.key_labels and "k" not in call.arguments:
        yield "last key forgotten", call.change({"batch": batches.shorter(batch, int(several[-1]))})


def seen_by(call: Call, row: int):
    """Bool[t s] of one sequence, or None where it has no queries or keys."""
    rows, queries, keys, _ = plain.sequence(call.arguments["batch"], row)
    return visible(queries, keys, mask=call.static["mask"]) if rows.stop > rows.start and keys.pos.size else None


def plant(case: Case, call: Call, weak: list[Call]) -> tuple[str, ...]:
    """Spotlights on a key that the flipped call sees and this one does not (or the reverse), else on a seen key."""
    rng, found = np.random.default_rng(case.seed + 1), []
    for flipped in weak:
        best = None
        for row in rng.permutation(len(call.arguments["batch"].seq_lens)):
            seen = seen_by(call, int(row))
            if seen is None:
                continue
            other = seen
            if flipped.static["mask"] != call.static["mask"]:
                other = visible(*plain.sequence(call.arguments["batch"], int(row))[1:3], mask=flipped.static["mask"])
            differ = np.argwhere(other != seen)
            if len(differ) or best is None:
                places = differ if len(differ) else np.argwhere(seen)
                if len(places):
                    best = (row, *places[rng.integers(len(places))])
            if len(differ):
                break
        if best is not None:
            found.append("spotlight:" + ":".join(str(int(n)) for n in best))
    return tuple(dict.fromkeys(found))[:4]


def unused_of_batch(call: Call, fill: float, hidden: float):
    """(rows with `fill` where they pad, cache with `fill` in what no length reaches and `hidden` in keys that no query sees)."""
    batch, layout = call.arguments["batch"], call.arguments["cache"].layout
    cache = plain.convert(call.arguments["cache"], layout="pbhd")
    flat = [array.reshape(-1, *array.shape[2:]) for array in (cache.k, cache.v)]
    reached, unseen = np.zeros(len(flat[0]), bool), np.zeros(len(flat[0]), bool)
    for row in range(len(batch.seq_lens)):
        at, seen = batches.slots_of(batch, row), seen_by(call, row)
        reached[at] = True
        unseen[at] = True if seen is None else ~seen.any(0)
    for array in flat:
        array[~reached], array[unseen] = fill, hidden
    q = call.arguments["q"].copy()
    q[batches.padding_rows(batch)] = fill
    return q, plain.convert(cache, layout=layout)


def _attend_unused(call: Call, fill: float, hidden: float) -> Call | None:
    q, cache = unused_of_batch(call, fill, hidden)
    return call.change({"q": q, "cache": cache})


ATTEND_OPTIONS = {
    "dtype": DTYPES,
    "batch": ("decode", "chunked", "mixed", "prefill", "drafts"),
    "mask": ("causal", "causal & window(8, 0)", "full", "tree", "causal & same"),
    "heads": ("4/2", "6/2", "3/3", "5/1"),
    "sizes": ("128/128", "64/64"),
    "block_size": (128, 16),
    "layout": LAYOUTS,
    "scale": ("rsqrt", 0.25),
    "softcap": (None, 3.0),
    "slopes": (None, "alibi"),
}

GENERATORS = ("gaussian", "peaked", "flat", "tied", "huge", "offset", "position-coded")

_LONG = {"dtype": "bfloat16", "batch": "long", "mask": "causal", "heads": "2/1", "sizes": "64/64", "block_size": 128, "layout": "pbhd"}

ATTEND = Operation(
    "paged.attend",
    ATTEND_OPTIONS | {"lse": ("asked", "not asked")},
    _attend,
    attend_flips,
    results=lambda case: {".out": "accumulator", ".lse": "float32"},
    lengths=batches.lengths,
    generators=GENERATORS,
    plant=plant,
    unused=_attend_unused,
    places=lambda call: call.static["mask"],
    also=(case_of("paged.attend", _LONG | {"scale": "rsqrt", "softcap": None, "slopes": None, "lse": "asked"}),),
)
