"""The host's time for a step: planning it, and the Python of each npu layer with operators that do nothing.

The original's numbers were measured on its own builder and layer (vllm-ascend, August 2026; one thread, null operators written in Python,
as here): what builds the metadata of a step from arrays that are there already, and the standard backend's forward. Its builder checks
nothing and finds no slots; ours does both, and makes the tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fattn.benchmarks.timer import Microseconds, timed
from fattn.plan import batch as plan
from fattn.types import causal

BLOCK, PAGES, KEYS, HEADS, KV_HEADS, SIZE = 128, 8, 900, 8, 2, 128
LAYERS = 28  # of the step that is compared as a whole
# sequences -> microseconds, least of 400
ORIGINAL_PLANNING = {
    "decode": {1: 9.3, 16: 9.6, 64: 10.3, 128: 11.4, 256: 13.2},
    "mixed": {1: 13.0, 16: 21.0, 64: 22.0, 128: 24.0, 256: 26.0},
}
ORIGINAL_LAYER, ORIGINAL_BARE = {1: 36.0, 64: 52.0, 128: 69.0, 256: 106.0}, {1: 12.0, 64: 26.0, 128: 39.0, 256: 66.0}
GROWTH = 1.35  # how much more the layer's own time may be for 256 sequences than for one: noise, not a trend


class Must(NamedTuple):
    """Something that has to hold: a time in microseconds, and the most that it may be."""

    name: str
    found: float
    most: float

    @property
    def holds(self) -> bool:
        return self.found <= self.most


def run(*, quick: bool = False) -> dict[str, Any]:
    """Times by `planning` and `layers`, a row for each size, and `musts`. `quick` takes fewer rounds and sizes."""
    rounds = 30 if quick else 200
    planning = [planned(kind, sequences, rounds) for kind in ORIGINAL_PLANNING for sequences in sizes(ORIGINAL_PLANNING[kind], quick)]
    layers = [layer(sequences, rounds) for sequences in sizes(ORIGINAL_LAYER, quick)]
    return {"planning": planning, "layers": layers, "musts": musts(planning, layers)}


def sizes(known, quick):
    """The numbers of sequences to measure: all, or the least and the greatest."""
    return [min(known), max(known)] if quick else list(known)


def arrays(kind: str, sequences: int):
    """query_lens, seq_lens and block_tables [b p] as an engine holds them: a decode step, or one with a prefill of 512 tokens."""
    queries = np.ones(sequences, np.int32)
    queries[0] = 512 if kind == "mixed" else 1
    tables = np.arange(1, 1 + sequences * PAGES, dtype=np.int32).reshape(sequences, PAGES)
    return queries, np.full(sequences, KEYS, np.int32), tables


def planned(kind: str, sequences: int, rounds: int) -> dict[str, Any]:
    """Times of plan.batch.build from an engine's arrays, and of npu.place, which makes tensors on the CPU."""
    import npu

    given, mask = arrays(kind, sequences), causal()
    build = lambda: plan.build(*given, block_size=BLOCK, num_blocks=1 + sequences * PAGES)
    batch, place = build(), npu.place
    found = timed({"build": build, "place": lambda: place(batch, "cpu", mask)}, rounds=rounds)
    return {"step": kind, "sequences": sequences, **found, "original": ORIGINAL_PLANNING[kind][sequences]}


def layer(sequences: int, rounds: int) -> dict[str, Any]:
    """Times of attend_and_write for a decode step, of its attention operator called bare, and of all that is Python of the layer: `own`.

    The operators do nothing, behind the real dispatcher.
    """
    import torch

    import npu
    from npu import paged, standard

    _null_operators()
    queries, keys, tables = arrays("decode", sequences)
    mask = causal()
    planned = plan.build(queries, keys, tables, block_size=BLOCK, num_blocks=1 + sequences * PAGES)
    batch = npu.place(planned, "cpu", mask)
    cache = paged.allocate(1 + sequences * PAGES, KV_HEADS, SIZE, SIZE, block_size=BLOCK, layout="pbhd", dtype=torch.float16)
    q = torch.zeros(sequences, HEADS, SIZE, dtype=torch.float16)
    k = torch.zeros(sequences, KV_HEADS, SIZE, dtype=torch.float16)
    flat, constants = cache.k.view(len(cache.k), BLOCK, -1), batch.host.constants
    attention = torch.ops.npu.npu_fused_infer_attention_score.default
    bare = lambda: attention(
        q,
        flat,
        flat,
        actual_seq_lengths=constants["query_ends"],
        actual_seq_lengths_kv=constants["kv_lens"],
        block_table=constants["block_table"],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=0.1,
        input_layout="TND",
        block_size=BLOCK,
    )
    whole = lambda: standard.attend_and_write(q, k, k, cache, batch, mask=mask, scale=0.1)
    found = timed({"layer": whole, "bare": bare}, rounds=rounds)
    own = Microseconds(*(a - b for a, b in zip(found["layer"], found["bare"], strict=True)))
    original = ORIGINAL_LAYER[sequences]
    return {"sequences": sequences, **found, "own": own, "original": original, "original own": original - ORIGINAL_BARE[sequences]}


def musts(planning: list[dict], layers: list[dict]) -> list[Must]:
    """What has to hold: the layer's own time, that it does not grow, and a whole decode step of LAYERS layers."""
    found = [Must(f"a layer's own Python, {row['sequences']} sequences", row["own"].least, row["original own"]) for row in layers]
    first, last = layers[0]["own"].least, layers[-1]["own"].least
    found.append(Must(f"the same, {layers[-1]['sequences']} sequences beside 1", last, GROWTH * first))
    decode = {row["sequences"]: row for row in planning if row["step"] == "decode"}
    for row in layers:
        step = decode[row["sequences"]]
        ours = step["build"].least + step["place"].least + LAYERS * row["layer"].least
        found.append(Must(f"a step of {LAYERS} layers, {row['sequences']} sequences", ours, step["original"] + LAYERS * row["original"]))
    return found


def show(console, result: dict[str, Any]):
    """Prints the two tables and the musts."""
    from rich.table import Table

    table = Table(title="planning a step, microseconds: least (median)", title_justify="left")
    for name in ("step", "sequences", "build", "place", "original builder"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for row in result["planning"]:
        table.add_row(row["step"], str(row["sequences"]), *map(_said, (row["build"], row["place"])), f"{row['original']:.0f}")
    console.print(table)
    table = Table(title="a decode layer with null operators, microseconds: least (median)", title_justify="left")
    for name in ("sequences", "layer", "operator bare", "own Python", "original layer", "original's own"):
        table.add_column(name, justify="right")
    for row in result["layers"]:
        times = map(_said, (row["layer"], row["bare"], row["own"]))
        table.add_row(str(row["sequences"]), *times, f"{row['original']:.0f}", f"{row['original own']:.0f}")
    console.print(table)
    for must in result["musts"]:
        verdict, colour = ("holds", "green") if must.holds else ("FAILS", "red")
        console.print(f"[{colour}]{verdict}[/{colour}] {must.name}: {must.found:.1f} us, at most {must.most:.1f}", highlight=False)


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """The result in JSON's types."""
    rows = {
        name: [{key: value._asdict() if isinstance(value, Microseconds) else value for key, value in row.items()} for row in result[name]]
        for name in ("planning", "layers")
    }
    return rows | {"musts": [must._asdict() | {"holds": must.holds} for must in result["musts"]]}


def _said(time):
    return f"{time.least:.1f} ({time.median:.1f})"


def _null_operators():
    """Puts kernels that do nothing behind the two operators of a decode layer, for the rest of the process."""
    import torch

    import npu.emulator

    if _libraries:
        return
    npu.emulator.install()
    library = torch.library.Library("npu", "IMPL")
    nothing = {}  # results made once for each size of q

    def attention(query, key, value, **options):
        if query.shape not in nothing:
            nothing[query.shape] = torch.zeros_like(query), torch.empty(0)
        return nothing[query.shape]

    library.impl("npu_fused_infer_attention_score", attention, "CPU", allow_override=True)
    library.impl("npu_scatter_pa_kv_cache", lambda *rows, **options: None, "CPU", allow_override=True)
    _libraries.append(library)


_libraries: list[Any] = []  # a registration lives as long as its library
