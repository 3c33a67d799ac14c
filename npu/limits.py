"""What each operator takes, each limit with its evidence, and which of them a call would break: `check` raises, `refusal` predicts.

Sources: the documents of the operators, op-plugin and CANN 8.3 to 9.1; of aclnnFusedInferAttentionScoreV5 for the 950, to which torch_npu
routes there. `python -m npu support` prints what follows, `evidence.CONFLICTS` lists where sources disagree, `probe` asks a device.
The functions of `npu` describe a call as `Facts` before they launch anything, so what the conformance kit predicts is what they enforce.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fattn.types import Unsupported
from npu.evidence import ASSUMED, DOCUMENTED, HOST_LAYER


class Limit(NamedTuple):
    """One thing that an operator does not take, and on what evidence: on A2 and A3, and on a 950.

    `on_950` says how the 950's documents differ. The same limits hold everywhere: where a 950 takes more, it is refused all the same.
    """

    operator: str
    argument: str
    text: str
    instead: str
    evidence: str = DOCUMENTED
    evidence_950: str = DOCUMENTED
    on_950: str = ""

    def evidence_on(self, soc: str) -> str:
        """On what the limit rests for one of `releases.SOCS`."""
        return self.evidence_950 if soc == "950" else self.evidence


class Choice(NamedTuple):
    """Which of an operator's layouts or modes a case goes by, and the emulator's assumptions that its result depends on."""

    operation: str
    case: str
    how: str
    assumptions: tuple[str, ...] = ()


_FIA, _SCATTER, _ROTARY = "npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_rotary_mul"
_ATB = "ATB's _npu_paged_attention"

# Sizes of (query and key head, value head) in the packed layout; every other size goes by BSND or BNSD.
PACKED_SIZES = ((128, 128), (192, 192), (192, 128))
FLOATS = ("float16", "bfloat16")

LIMITS = {
    "attention dtype": Limit(_FIA, "q.dtype", "q, k and v are float16 or bfloat16", "cast q, k, v and the cache to float16 or bfloat16"),
    "softcap": Limit(
        _FIA,
        "softcap",
        "the operator has no cap on scores",
        "softcap=None, or fattn's function",
        evidence=HOST_LAYER,
        evidence_950=HOST_LAYER,
    ),
    "bias dtype": Limit(_FIA, "bias.dtype", "the additive bias (pse_shift) has q's dtype", "bias.to(q.dtype)"),
    "head size": Limit(
        _FIA,
        "head_size",
        "a head has at most 512 dims, in multiples of 16",
        "pad the heads of q, k and v with zeros",
        on_950="multiples of 16 are not asked for",
    ),
    "value size": Limit(
        _FIA,
        "value_size",
        "k and v have one shape, except sizes 192 and 128 where the layout is TND",
        "pad v with zeros to the size of k",
        on_950="sizes up to 128 may differ, with sparse modes 0, 2 and 3",
    ),
    "heads": Limit(_FIA, "heads", "at most 256 query heads", "split the heads over several calls", on_950="any number"),
    "group": Limit(
        _FIA,
        "heads / kv_heads",
        "at most 64 query heads read one key head",
        "split the query heads over several calls; or decode over a pbhd cache, with no window, slopes or LSE (ATB's operator takes more)",
        evidence_950=ASSUMED,
    ),
    "ATB head size": Limit(
        _ATB, "head_size", "heads of k and v have at most 256 dims", "split the query heads over several calls", evidence_950=ASSUMED
    ),
    "ATB block": Limit(
        _ATB, "cache.block_size", "a block has at most 128 tokens, in multiples of 16", "blocks of 128", evidence_950=ASSUMED
    ),
    "cache layout": Limit(_FIA, "cache.layout", "a paged cache is pbhd (BnBsH) or phbd (BnNBsD)", "paged.convert(cache, layout='pbhd')"),
    "cache strides": Limit(_FIA, "cache", "the cache is contiguous", "allocate k and v as tensors of their own (paged.allocate)"),
    "cache width": Limit(_FIA, "cache.k", "kv_heads * head_size of a pbhd cache is at most 65535", "a phbd cache"),
    "packed block": Limit(
        _FIA,
        "cache.block_size",
        "in layout TND a block has at most 1024 tokens, in multiples of 16",
        "blocks of 128",
        on_950="for head size 192 as outside TND",
    ),
    "prefill block": Limit(
        _FIA,
        "cache.block_size",
        "outside layout TND (head size other than 128 and 192, explicit masks, slopes) several queries of a sequence need blocks of "
        "128, 256, 384 or 512 tokens",
        "blocks of 128",
        on_950="multiples of 16 up to 1024 for head size 64",
    ),
    "decode block": Limit(
        _FIA,
        "cache.block_size",
        "outside layout TND a block has at most 512 tokens, in multiples of 16",
        "blocks of 128",
        on_950="up to 1024 for head size 64",
    ),
    "packed sequences": Limit(_FIA, "batch", "layout TND takes at most 4096 sequences", "split the batch", evidence_950=ASSUMED),
    "sequences": Limit(_FIA, "batch", "at most 65536 sequences", "split the batch"),
    "decode keys": Limit(
        _FIA, "batch.seq_lens", "one query reads at most 262144 keys", "split the keys and merge the partials", evidence_950=ASSUMED
    ),
    "exact lengths": Limit(
        _FIA,
        "batch.host.exact",
        "the operator takes exact lengths as host integers",
        "build the batch with exact lengths",
        evidence=HOST_LAYER,
        evidence_950=HOST_LAYER,
    ),
    "cache dtype": Limit(
        _SCATTER, "cache.dtype", "the caches that attention reads are float16 or bfloat16", "allocate it in float16 or bfloat16"
    ),
    "write layout": Limit(_SCATTER, "cache.layout", "rows are written to a pbhd cache alone", "paged.convert(cache, layout='pbhd')"),
    "write strides": Limit(_SCATTER, "cache", "the cache is contiguous", "allocate k and v as tensors of their own (paged.allocate)"),
    "rotary dtype": Limit(_ROTARY, "x.dtype", "float16, bfloat16 or float32", "x.float()"),
    "rotary size": Limit(_ROTARY, "rotary_size", "an even number of dims below 896", "rotate the heads in two parts", on_950="up to 1024"),
    "rotary heads": Limit(_ROTARY, "heads", "fewer than 1000 heads", "rotate q and k in calls of their own", on_950="any number"),
}


CHOICES = (
    Choice("dense.attend", "ranges that end together, one band, several queries", "BSND, sparse_mode 3 or 4, compressed mask"),
    Choice("dense.attend", "ranges of which every query sees every key", "BSND, no mask"),
    Choice("dense.attend", "any other positions or mask, one query, a bias", "BSND, sparse_mode 0, explicit mask", ("one-query-mask",)),
    Choice("dense.attend", "head size 128, or 192, without an explicit mask", "TND"),
    Choice("dense.attend", "q, k, v or a bias requires a gradient", "npu_fusion_attention, BSND; its gradient is an operator too"),
    Choice(
        "paged.attend",
        "head size 128, or 192: decode of full and causal masks, several queries of one band",
        "TND, BnBsH or BnNBsD cache, sparse_mode 0, 3 or 4",
        ("page-tail-arithmetic", "shared-pages"),
    ),
    Choice(
        "paged.attend",
        "head size 128, or 192: windows over a batch where some sequences have one query and some have several",
        "TND, sparse_mode 4",
        ("tnd-one-query-band",),
    ),
    Choice(
        "paged.attend",
        "other head sizes, ALiBi, explicit masks; equal query lengths",
        "BSND for a pbhd cache, BNSD for a phbd cache: queries are views",
        ("page-tail-arithmetic", "shared-pages", "padded-query-alignment"),
    ),
    Choice(
        "paged.attend",
        "other head sizes, ALiBi, explicit masks; mixed query lengths",
        "BSND or BNSD with queries padded to the longest: two copies, three with an LSE",
        ("page-tail-arithmetic", "shared-pages", "padded-query-alignment"),
    ),
    Choice(
        "paged.attend",
        "one query a sequence, window or chunk",
        "BSND or BNSD: the block table begins at the window's first block, an explicit mask hides the keys before the window",
        ("page-tail-arithmetic", "shared-pages", "one-query-mask"),
    ),
    Choice(
        "paged.attend",
        "trees, segments, unions of masks",
        "BSND or BNSD, sparse_mode 0, explicit mask",
        ("page-tail-arithmetic", "shared-pages"),
    ),
    Choice(
        "paged.attend",
        "more than 64 query heads on one key head: one query a sequence that sees all its keys, a pbhd cache, neither LSE nor slopes",
        "ATB's _npu_paged_attention, where the host has it",
        ("page-tail-arithmetic",),
    ),
    Choice("paged.write", "a pbhd cache", "cache_mode Norm, or ATB's operator where the schema has no cache_mode", ()),
    Choice("rope.half", "float16 and bfloat16", "float32 input and tables, cast there and back"),
)


@dataclass(frozen=True)
class Facts:
    """A call as limits see it: all of it known on the host before anything is launched.

    `queries` is the length of the longest query of a sequence that has keys (dense: all of q), `keys` that of the longest sequence.
    `explicit` says that the mask goes as an array (`_forms` decides), `additive` is the dtype of a bias or of slopes
    as they reach the operator.
    """

    operation: str
    dtype: str
    heads: int = 1
    kv_heads: int = 1
    head_size: int = 128
    value_size: int = 128
    queries: int = 1
    keys: int = 1
    sequences: int = 1
    explicit: bool = False
    additive: str | None = None
    softcap: float | None = None
    exact: bool = True
    layout: str | None = None  # of the cache
    block_size: int | None = None
    contiguous: bool = True  # the cache
    output_alone: bool = False  # each sequence has one query, and its output is all that is asked for

    @property
    def packed(self) -> bool:
        """Whether the call goes by the operator's packed layout, TND."""
        return (self.head_size, self.value_size) in PACKED_SIZES and not self.explicit and self.additive is None

    @property
    def by_atb(self) -> bool:
        """Whether the call goes by ATB's operator: decode that the other would refuse for its query heads on one key head."""
        grouped = self.operation == "paged.attend" and self.heads > 64 * self.kv_heads
        return grouped and self.output_alone and self.layout == "pbhd" and not self.explicit and self.additive is None


def refusal(facts: Facts) -> Unsupported | None:
    """The error that a call of these facts raises, or None where it is supported. Raises ValueError for an unknown operation."""
    name, value = next(_found(facts), (None, None))
    if name is None:
        return None
    limit = LIMITS[name]
    return Unsupported(limit.argument, value, f"{limit.text} ({limit.operator})", limit.instead)


def broken(facts: Facts) -> str | None:
    """The name of the limit that a call of these facts breaks first, or None. Raises as `refusal`."""
    return next(_found(facts), (None, None))[0]


def check(facts: Facts):
    """Raises the Unsupported that `refusal` predicts."""
    error = refusal(facts)
    if error is not None:
        raise error


def _found(facts: Facts) -> Iterator[tuple[str, object]]:
    """Names of the limits that a call breaks, with the values that break them."""
    if facts.operation not in _RULES:
        raise ValueError(f"operation {facts.operation!r} has no limits; one of {', '.join(_RULES)} would work")
    yield from _RULES[facts.operation](facts)


def _attention(f: Facts) -> Iterator[tuple[str, object]]:
    if f.dtype not in FLOATS:
        yield "attention dtype", f.dtype
    if f.softcap is not None:
        yield "softcap", f.softcap
    if f.additive not in (None, f.dtype):
        yield "bias dtype", f.additive
    if f.head_size % 16 or not 0 < f.head_size <= 512:
        yield "head size", f.head_size
    if f.value_size != f.head_size and not f.packed:
        yield "value size", f.value_size
    if f.heads > 256:
        yield "heads", f.heads
    if f.heads > 64 * f.kv_heads:
        yield "group", f.heads // f.kv_heads
    if f.queries == 1 and f.keys > 262144:
        yield "decode keys", f.keys


def _paged(f: Facts) -> Iterator[tuple[str, object]]:
    if f.by_atb:
        yield from _atb(f)
        return
    yield from _attention(f)
    if not f.exact:
        yield "exact lengths", f.exact
    if f.layout == "hpbd":
        yield "cache layout", f.layout
    if not f.contiguous:
        yield "cache strides", "a strided view"
    if f.layout == "pbhd" and f.kv_heads * f.head_size > 65535:
        yield "cache width", f.kv_heads * f.head_size
    if f.packed:
        if f.block_size % 16 or f.block_size > 1024:
            yield "packed block", f.block_size
        if f.sequences > 4096:
            yield "packed sequences", f.sequences
    elif f.queries > 1:
        if f.block_size not in (128, 256, 384, 512):
            yield "prefill block", f.block_size
    elif f.block_size % 16 or f.block_size > 512:
        yield "decode block", f.block_size
    if f.sequences > 65536:
        yield "sequences", f.sequences


def _atb(f: Facts) -> Iterator[tuple[str, object]]:
    if f.dtype not in FLOATS:
        yield "attention dtype", f.dtype
    if f.softcap is not None:
        yield "softcap", f.softcap
    if not f.exact:
        yield "exact lengths", f.exact
    if not f.contiguous:
        yield "cache strides", "a strided view"
    if max(f.head_size, f.value_size) > 256:
        yield "ATB head size", max(f.head_size, f.value_size)
    if f.block_size % 16 or f.block_size > 128:
        yield "ATB block", f.block_size


def _write(f: Facts) -> Iterator[tuple[str, object]]:
    if f.dtype not in FLOATS:
        yield "cache dtype", f.dtype
    if f.layout != "pbhd":
        yield "write layout", f.layout
    if not f.contiguous:
        yield "write strides", "a strided view"


def _rope(f: Facts) -> Iterator[tuple[str, object]]:
    if f.dtype not in (*FLOATS, "float32"):
        yield "rotary dtype", f.dtype
    if f.head_size % 2 or f.head_size >= 896:
        yield "rotary size", f.head_size
    if f.heads >= 1000:
        yield "rotary heads", f.heads


_RULES = {
    "dense.attend": _attention,
    "paged.attend": _paged,
    "paged.write": _write,
    "rope.half": _rope,
    "rope.interleaved": _rope,
}
