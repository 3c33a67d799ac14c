"""Cases of masks.visible, masks.compressed and masks.expand."""

from __future__ import annotations

import numpy as np

from fattn.conformance.calls import Call
from fattn.conformance.cases import MASKS, Case, numbers
from fattn.conformance.operations.base import Flips, Operation, mask_flips
from fattn.conformance.operations.dense import lengths, moved, sides
from fattn.types import Mask, Tokens, band, causal, full, window


def _visible(case: Case) -> Call:
    mask = MASKS[case["mask"]]
    queries, keys = sides(case, case.rng(), mask)
    return Call("masks.visible", {"queries": queries, "keys": keys}, {"mask": mask})


def _visible_flips(call: Call) -> Flips:
    for name, mask in mask_flips(call.static["mask"]):
        yield name, call.change({"mask": mask})
    yield "queries + 1", call.change({"queries": moved(call.arguments["queries"])})
    yield "keys + 1", call.change({"keys": moved(call.arguments["keys"])})
    keys = call.arguments["keys"]
    if isinstance(keys, Tokens):
        for name, label in keys.labels.items():
            yield f"{name} rolled", call.change({"keys": Tokens(keys.pos, {**keys.labels, name: np.roll(label, 1)})})


VISIBLE = Operation(
    "masks.visible",
    {"mask": tuple(MASKS), "shape": ("1x130", "65x66"), "positions": ("array", "range", "scattered")},
    _visible,
    _visible_flips,
    results=lambda case: {"": "bool"},
    lengths=lengths,
)

BANDS = ("full", "causal", "left", "both", "right", "open right", "causal & left", "windows")


def band_mask(case: Case) -> Mask:
    """The mask of a case of one of the BANDS, with sides drawn from its seed."""
    left, right, other = (int(n) for n in np.exp2(case.rng().uniform(0, 11, 3)))
    return {
        "full": full(),
        "causal": causal(),
        "left": window(left, 0),
        "both": window(left, right),
        "right": window(None, right),
        "open right": window(left, None),
        "causal & left": causal() & window(left, right),
        "windows": window(left, right) & window(other, None),
    }[case["band"]]


def _compressed(get, call: Call):
    found = get("masks.compressed")(**call.static)
    return np.array([int(n) for n in found[:3]]), found.atten_mask


def _band_flips(call: Call) -> Flips:
    for name, mask in mask_flips(call.static["mask"]):
        if band(mask) is not None:
            yield name, call.change({"mask": mask})


COMPRESSED = Operation(
    "masks.compressed",
    {"band": BANDS},
    lambda case: Call("masks.compressed", {}, {"mask": band_mask(case)}),
    _band_flips,
    results=lambda case: {".1": "bool"},
    invoke=_compressed,
)


def _expand(case: Case) -> Call:
    queries, keys = numbers(case["shape"])
    return Call("masks.expand", {}, {"mask": band_mask(case), "query_len": queries, "kv_len": keys})


def _expanded(get, call: Call):
    compressed = get("masks.compressed")(mask=call.static["mask"])
    return get("masks.expand")(compressed, query_len=call.static["query_len"], kv_len=call.static["kv_len"])


def _expand_flips(call: Call) -> Flips:
    yield from _band_flips(call)
    yield "kv_len + 1", call.change({"kv_len": call.static["kv_len"] + 1})


EXPAND = Operation(
    "masks.expand",
    {"band": BANDS, "shape": ("1x130", "65x66", "9x516", "40x24")},
    _expand,
    _expand_flips,
    results=lambda case: {"": "bool"},
    invoke=_expanded,
)
