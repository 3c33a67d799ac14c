"""On what a statement about an operator rests, and where the sources of such statements disagree."""

from __future__ import annotations

from typing import NamedTuple

DOCUMENTED = "documentation"
PROTOTYPE = "prototype"  # the operators' public source
HOST_LAYER = "c++ host layer"  # of torch_npu's wheel: what it checks, allocates and calls
DEVICE = "device message"  # in a public report
USED = "used by vllm-ascend"
ASSUMED = "assumed"
KINDS = (DOCUMENTED, PROTOTYPE, HOST_LAYER, DEVICE, USED, ASSUMED)


class Claim(NamedTuple):
    """What one source says."""

    evidence: str
    says: str


class Conflict(NamedTuple):
    """A question to which sources give several answers, and what `npu` does so that none of them can make it wrong."""

    question: str
    claims: tuple[Claim, ...]
    ours: str
    asked_as: tuple[str, ...] = ()  # limits and assumptions by which the probe asks it


CONFLICTS = (
    Conflict(
        "what does slot -1 do in npu_scatter_pa_kv_cache?",
        (
            Claim(DOCUMENTED, "slots are unique and in [0, blocks * block size)"),
            Claim(USED, "padding keeps slot -1 and is taken to be skipped; its tests cover -1 on an A3"),
        ),
        "-1 never reaches the operator: the plan maps padding to distinct rows of null blocks",
        ("negative-slot",),
    ),
    Conflict(
        "which LSE has a row that sees no key?",
        (
            Claim(PROTOTYPE, "prefill writes +inf, decode the lowest finite float32"),
            Claim(DOCUMENTED, "(950) infinity marks invalid rows"),
            Claim(USED, "whatever is not finite becomes -inf before partials are merged"),
        ),
        "the host knows these rows; npu writes out = 0 and lse = -inf over whatever the operator returned",
        ("lse-empty-prefill", "lse-empty-decode"),
    ),
    Conflict(
        "which head sizes does layout TND take?",
        (
            Claim(DOCUMENTED, "128, 192, and 192 with values of 128; its second version also 64 without grouped heads; (950) any"),
            Claim(DEVICE, "'must be same equal 192/128/64, or queryD and keyD equal 192 and valueD equal 128' (vllm-ascend 9632)"),
            Claim(DEVICE, "'queryD(128) or keyD(128) must be 192, valueD(128) must be 192/128' (vllm-ascend 8045)"),
        ),
        "TND for 128 and 192 alone; every other size by BSND or BNSD",
        ("tnd-head-sizes", "packed block"),
    ),
    Conflict(
        "which blocks do several queries of a sequence take outside TND?",
        (
            Claim(DOCUMENTED, "(A2, A3) multiples of 128 up to 512"),
            Claim(DOCUMENTED, "(950) for head sizes 64 and 128 multiples of 16 up to 1024, for all others multiples of 128 up to 512"),
        ),
        "multiples of 128 up to 512 everywhere",
        ("prefill block",),
    ),
    Conflict(
        "what is the shape of an LSE that was not asked for?",
        (
            Claim(HOST_LAYER, "[0]"),
            Claim(DOCUMENTED, "[1]"),
        ),
        "it is never read",
        ("lse-not-asked",),
    ),
    Conflict(
        "which cache layout does npu_scatter_pa_kv_cache mean where its schema has no cache_mode?",
        (
            Claim(DOCUMENTED, "the default of cache_mode, where it exists, is PA_NZ"),
            Claim(USED, "plain caches are written with cache_mode='Norm'; releases before it use ATB's operator"),
        ),
        "cache_mode='Norm' where the schema has it, else ATB's operator",
        ("norm-cache",),
    ),
    Conflict(
        "may sequences share pages, so that there are fewer than their counts add up to?",
        (
            Claim(DOCUMENTED, "there are at least as many blocks as the sequences' counts add up to"),
            Claim(USED, "prefix caching shares blocks"),
        ),
        "they may; the emulator's variant refuses it, and `DEPENDED_ON` says so",
        ("shared-pages",),
    ),
    Conflict(
        "which triangle is the compressed mask of sparse modes 2 to 4?",
        (
            Claim(DOCUMENTED, "the text: zeros on and below the diagonal, 1 hides; one example passes the opposite triangle"),
            Claim(USED, "True above the diagonal"),
        ),
        "True above the diagonal",
        ("corrected-row-output",),
    ),
    Conflict(
        "may the query lengths of layout TND end before the last row?",
        (
            Claim(DOCUMENTED, "not said"),
            Claim(DEVICE, "'queryT(8) must be equal to the last element of actualSequenceLengthQ(5)' (vllm-ascend 6076, CANN 8.5.0)"),
        ),
        "they end at the last row",
        ("tnd-lengths-end",),
    ),
    Conflict(
        "which blocks and heads does ATB's paged attention take?",
        (
            Claim(DOCUMENTED, "(up to 8.0.RC2) block size times head size is at most 128 * 128, heads have up to 256 dims"),
            Claim(DOCUMENTED, "(8.1 and later) blocks in multiples of 16; up to 128 where heads have more than 256 dims (at most 576)"),
            Claim(USED, "heads of 512 dims too, never on a 950"),
        ),
        "blocks of at most 128 and heads of at most 256 dims, and only where the other operator refuses the query heads on one key head",
        ("ATB head size", "ATB block"),
    ),
    Conflict(
        "does latent attention with keys of size 512 return an LSE?",
        (
            Claim(DOCUMENTED, "(A2, A3) no"),
            Claim(USED, "its context parallelism reads one"),
        ),
        "npu has no latent attention yet",
    ),
)
