"""What the emulator believes where the operators' documents leave a question open, each belief with its evidence and its alternatives.

`npu` must agree under every variant, refuse, or be listed as depending on the belief. `variant` switches for a while, `install` for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from npu.evidence import ASSUMED, DEVICE, DOCUMENTED, HOST_LAYER, PROTOTYPE, USED


class Assumption(NamedTuple):
    """A question, the answer that the emulator gives, on what evidence, and the other answers that it can give (name: meaning)."""

    id: str
    question: str
    belief: str
    evidence: str
    variants: dict[str, str]


_FUSED = "npu_fused_infer_attention_score: "
TABLE = (
    Assumption(
        "lse-empty-prefill",
        _FUSED + "which LSE has a row that sees no key, where some sequence has several queries?",
        "+inf",
        PROTOTYPE,
        {"-inf": "minus infinity", "lowest": "the lowest finite float32"},
    ),
    Assumption(
        "lse-empty-decode",
        _FUSED + "which LSE has a row that sees no key, where every sequence has one query?",
        "lowest",
        PROTOTYPE,
        {"-inf": "minus infinity", "+inf": "plus infinity"},
    ),
    Assumption("lse-not-asked", _FUSED + "what is returned for an LSE that was not asked for?", "shape [0]", HOST_LAYER, {}),
    Assumption(
        "empty-row-output",
        _FUSED + "what is the output of a row whose keys are all masked, with inner_precise 0 or 1?",
        "junk",
        DOCUMENTED,
        {"mean": "the mean of all values, as a finite stand-in for minus infinity gives"},
    ),
    Assumption("corrected-row-output", _FUSED + "what is that output with inner_precise 2 or 3?", "zeros", DOCUMENTED, {}),
    Assumption(
        "no-keys-output",
        _FUSED + "what is the output of a sequence of length 0 beside others? (Zeros are documented where all keys are empty.)",
        "zeros",
        ASSUMED,
        {"junk": "whatever the memory held"},
    ),
    Assumption(
        "padded-query-output",
        _FUSED + "what stands in output rows past the lengths?",
        "junk",
        ASSUMED,
        {"zeros": "zeros"},
    ),
    Assumption(
        "padded-query-alignment",
        _FUSED
        + "does right-down causal (sparse_mode 3, 4) align the last of the actual queries, or of the tensor's, with the last actual key?",
        "actual",
        PROTOTYPE,
        {"tensor": "the tensor's last query row with the tensor's last key row"},
    ),
    Assumption(
        "tnd-one-query-band",
        _FUSED + "layout TND: for which sequences of one query is the band (sparse_mode 4) ignored, as it is for Q_S = 1?",
        "all-one",
        ASSUMED,
        {"never": "the band always applies", "each": "ignored for every sequence of one query, in mixed batches too"},
    ),
    Assumption(
        "tnd-lengths-end",
        _FUSED + "layout TND: may the query lengths end before T?",
        "must end at T",
        DEVICE,
        {"may end before": "rows past the last length are padding"},
    ),
    Assumption("one-query-band", _FUSED + "outside TND, does a band apply to one query?", "ignored", DOCUMENTED, {}),
    Assumption("one-query-lengths", _FUSED + "outside TND, do actual_seq_lengths apply to one query?", "ignored", DOCUMENTED, {}),
    Assumption(
        "one-query-mask",
        _FUSED + "one sequence of one query: how far does an explicit mask reach?",
        "every key",
        DOCUMENTED,
        {"512 keys": "keys past the 512th are dropped, as a public report measured (vllm-ascend 15503)"},
    ),
    Assumption(
        "mask-band-alignment",
        _FUSED + "sparse_mode 0 with a mask: to which corner do pre_tokens and next_tokens refer?",
        "top left",
        ASSUMED,
        {"bottom right": "the last query and the last key"},
    ),
    Assumption(
        "masked-keys-arithmetic",
        _FUSED + "do values under a mask, within a length, take part with weight 0 (NaN times 0 is NaN)?",
        "multiplied",
        ASSUMED,
        {"skipped": "never read"},
    ),
    Assumption(
        "page-tail-arithmetic",
        _FUSED + "are rows of the last page past a length read?",
        "unread",
        ASSUMED,
        {"multiplied": "read, with weight 0"},
    ),
    Assumption(
        "tnd-head-sizes",
        _FUSED + "layout TND: which head sizes?",
        "documented",
        DOCUMENTED,
        {"with 64": "64 too, as a device's message in a public report lists them"},
    ),
    Assumption(
        "shared-pages",
        _FUSED + "may sequences share pages, so that there are fewer pages than the sum of the sequences' counts?",
        "yes",
        USED,
        {"no": "refused, as the documented lower bound of the page count reads"},
    ),
    Assumption(
        "sink-in-lse",
        "npu_fused_infer_attention_score_v2: does the LSE include the learnable sink?",
        "yes",
        ASSUMED,
        {"no": "the LSE is that of the keys alone"},
    ),
    Assumption(
        "negative-slot",
        "npu_scatter_pa_kv_cache, _npu_reshape_and_cache: what does slot -1 do?",
        "refused",
        DOCUMENTED,
        {"skipped": "nothing is written, as vllm-ascend relies on"},
    ),
    Assumption("norm-cache", "npu_scatter_pa_kv_cache: does cache_mode='Norm' take [pages, page size, heads, head size]?", "yes", USED, {}),
    Assumption(
        "rotary-table-dtype",
        "npu_rotary_mul: must the tables have the input's dtype?",
        "same",
        ASSUMED,
        {"any": "float32 tables with float16 and bfloat16 inputs too"},
    ),
    Assumption(
        "rotary-arithmetic",
        "npu_rotary_mul: in which precision are float16 and bfloat16 computed?",
        "float32",
        ASSUMED,
        {"input": "every product and sum is rounded to the input's dtype"},
    ),
)
# Variants under which `npu` gives other results or is refused: on a device that answers so, do not use what the reason names.
DEPENDED_ON = {
    "padded-query-alignment:tensor": "padded queries (head sizes other than 128 and 192, several queries) with causal or window masks",
    "page-tail-arithmetic:multiplied": "caches whose unwritten rows hold NaN or infinity; `paged.allocate` fills them with zeros",
    "shared-pages:no": "batches whose sequences share so many pages that there are fewer than their counts add up to",
    "one-query-mask:512 keys": "one query of one sequence with more than 512 keys under an explicit mask: wide windows, chunks, biases",
    "tnd-one-query-band:each": "windows over batches that mix one query and several",
}
_BY_ID = {assumption.id: assumption for assumption in TABLE}
_chosen: dict[str, str] = {}


def answer(id: str) -> str:
    """What the emulator does now about one question: the belief, or the variant that was switched to."""
    return _chosen.get(id, _BY_ID[id].belief)


def choose(variants: Iterable[str]):
    """Makes exactly these answers ("id:variant") the emulator's, beliefs elsewhere. Raises ValueError that lists what exists."""
    chosen = {}
    for text in variants:
        id, _, name = text.partition(":")
        if id not in _BY_ID:
            raise ValueError(f"no assumption {id!r} (of {text!r}); there are {', '.join(_BY_ID)}")
        known = (_BY_ID[id].belief, *_BY_ID[id].variants)
        if name not in known:
            raise ValueError(f"assumption {id!r} has no variant {name!r}; it has {', '.join(known)}")
        chosen[id] = name
    _chosen.clear()
    _chosen.update(chosen)


@contextlib.contextmanager
def variant(*variants: str) -> Iterator[None]:
    """Within the block the emulator gives these answers ("id:variant") on top of the present ones. Raises as `choose`."""
    before = [f"{id}:{name}" for id, name in _chosen.items()]
    choose([*before, *variants])
    try:
        yield
    finally:
        choose(before)
