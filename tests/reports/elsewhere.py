"""Reports of groups A to D, or parts of them, that do not concern masks, dense, merge, rope, paged or standard: why, and who takes them."""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    """A report, or what of it is left, with the reason and the work that takes it."""

    name: str
    part: str
    reason: str
    taken_by: str


ELSEWHERE = (
    Elsewhere(
        "B42",
        "all",
        "moving blocks between device and host is the offloaded cache; no module here copies blocks",
        "sparse attention (offload)",
    ),
    Elsewhere("B44", "all", "which rank holds which key head is a layout of a sharded cache", "sharding (handoff)"),
    Elsewhere(
        "B45",
        "all",
        "caches here hold the numbers themselves; scales are read and written by quant, each layer's of its own name",
        "int8 caches: test_quant.py, npu/test_layer_quant.py",
    ),
    Elsewhere("B04", "sink-inclusive merging over ranks", "ranks are sharding's", "sharding"),
    Elsewhere("B29", "gradient partials of a ring", "rings are sharding's; merging 8 partials is tested here", "sharding"),
    Elsewhere("B36", "slots of rows gathered over ranks", "gathering rows over ranks is sharding's", "sharding (prefill)"),
    Elsewhere(
        "B37", "ownership of blocks with interleave 128 over 4 ranks", "ownership is a layout of a sharded cache", "sharding (layouts)"
    ),
    Elsewhere("B43", "transfer from prefill to decode workers", "convert is tested here; the transfer is sharding's", "sharding (handoff)"),
    Elsewhere("B46", "prefix hits of MLA, SFA and DSA", "their modules come with their own work; standard is tested here", "MLA, SFA, DSA"),
    Elsewhere("B24", "16 query heads a latent head", "the latent cache is MLA's; any head count is tested here", "MLA"),
)
