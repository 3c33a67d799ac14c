"""What of attention runs where: operation by feature by operator, for a chip and a CANN release.

Nothing here states what runs: each row is a call described as `limits.Facts`, which the limits admit or refuse, on operators and arguments
that the release's own schemas have or lack. The rows on evidence alone come out as that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from fattn.types import Mask, causal, chunk, full, same, tree, window
from npu import limits
from npu._forms import batch_form
from npu._rules import sparse_mode
from npu.evidence import ASSUMED, DOCUMENTED, USED
from npu.limits import Facts
from npu.releases import Release, check_soc, operators, release

RUNS, REFUSED, ABSENT = "runs", "refused", "not available"
FUSED, FUSED_2 = "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"
SCATTER, RESHAPE, ROTARY = "npu::npu_scatter_pa_kv_cache", "atb::_npu_reshape_and_cache", "npu::npu_rotary_mul"
ATB = "atb::_npu_paged_attention"


class Row(NamedTuple):
    """One feature of one operation: by which operator, whether it runs, how or why not, and on what evidence."""

    operation: str
    feature: str
    operator: str
    status: str
    detail: str
    evidence: str


class Feature(NamedTuple):
    """A call to ask about. `required`: npu may not refuse it. `mask` is None where the operation takes none."""

    name: str
    facts: Facts
    mask: Mask | None = None
    required: bool = False
    argument: str | None = None  # that the operator must have for it


class Aside(NamedTuple):
    """A feature of an operator that npu does not use, by the argument that would be used, and why not."""

    operation: str
    feature: str
    operator: str
    argument: str
    why: str


_DENSE = Facts("dense.attend", "bfloat16", heads=8, kv_heads=2, queries=64, keys=64)
_PAGED = Facts("paged.attend", "bfloat16", heads=8, kv_heads=2, layout="pbhd", block_size=128)
_WRITE = Facts("paged.write", "bfloat16", kv_heads=2, layout="pbhd")
_ROPE = Facts("rope.half", "bfloat16", heads=8)
_TREE = causal() & tree("enter", "exit")


def _batch(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], mask: Mask, facts: Facts = _PAGED) -> Facts:
    """The facts of attention over a batch of these lengths."""
    form = batch_form(query_lens, seq_lens, mask)
    return replace(facts, queries=form.queries, keys=max(seq_lens), sequences=len(seq_lens), explicit=form.explicit)


def _prefill(facts: Facts = _PAGED) -> Facts:
    return _batch((64, 64), (64, 64), causal(), facts)


def _decode(facts: Facts = _PAGED) -> Facts:
    return _batch((1, 1), (300, 17), causal(), facts)


FEATURES = (
    Feature("bfloat16", _DENSE, causal(), True),
    Feature("float16", replace(_DENSE, dtype="float16"), causal(), True),
    Feature("float32", replace(_DENSE, dtype="float32"), causal()),
    Feature("head size 64", replace(_DENSE, head_size=64, value_size=64), causal(), True),
    Feature("head size 128", _DENSE, causal(), True),
    Feature("head size 80", replace(_DENSE, head_size=80, value_size=80), causal()),
    Feature("head size 192, values of 128", replace(_DENSE, head_size=192), causal()),
    Feature("head size 256", replace(_DENSE, head_size=256, value_size=256), causal()),
    Feature("head size 72", replace(_DENSE, head_size=72, value_size=72), causal()),
    Feature("values of another size", replace(_DENSE, head_size=64, value_size=32), causal()),
    Feature("grouped heads (4 query heads a key head)", _DENSE, causal(), True),
    Feature("one key head for 64 query heads", replace(_DENSE, heads=64, kv_heads=1), causal()),
    Feature("one key head for 128 query heads", replace(_DENSE, heads=128, kv_heads=1), causal()),
    Feature("causal", _DENSE, causal(), True),
    Feature("window", _DENSE, causal() & window(16, 0), True),
    Feature("no mask", _DENSE, full(), True),
    Feature("segments, chunks, unions", replace(_DENSE, explicit=True), same("segment") | chunk(16)),
    Feature("trees", replace(_DENSE, explicit=True), _TREE),
    Feature("LSE", _DENSE, causal(), True, argument="softmax_lse_flag"),
    Feature("sinks (merge.finish, from the LSE)", _DENSE, causal(), True, argument="softmax_lse_flag"),
    Feature("bias, ALiBi", replace(_DENSE, explicit=True, additive="bfloat16"), causal(), argument="pse_shift"),
    Feature("bias in float32", replace(_DENSE, explicit=True, additive="float32"), causal(), argument="pse_shift"),
    Feature("softcap", replace(_DENSE, softcap=30.0), causal()),
    Feature("prefill", _prefill(), causal(), True),
    Feature("prefill of head size 64", _prefill(replace(_PAGED, head_size=64, value_size=64)), causal(), True),
    Feature("chunked prefill beside decode", _batch((64, 1), (300, 17), causal()), causal(), True),
    Feature("prefill under a window", _batch((64, 64), (300, 64), causal() & window(99, 0)), causal() & window(99, 0), True),
    Feature("decode", _decode(), causal(), True),
    Feature("decode in float16", _decode(replace(_PAGED, dtype="float16")), causal(), True),
    Feature("decode of head size 64", _decode(replace(_PAGED, head_size=64, value_size=64)), causal(), True),
    Feature("decode under a window", _batch((1, 1), (300, 17), causal() & window(99, 0)), causal() & window(99, 0), True),
    *(Feature(f"{n} draft tokens", _batch((n + 1,) * 2, (300, 40), causal()), causal(), True) for n in (2, 4, 8, 16)),
    Feature("draft trees", _batch((5, 5), (300, 40), _TREE), _TREE),
    Feature("LSE, sinks", _decode(), causal(), True, argument="softmax_lse_flag"),
    Feature("ALiBi", replace(_prefill(), additive="bfloat16"), causal(), argument="pse_shift"),
    Feature("softcap", replace(_prefill(), softcap=30.0), causal()),
    Feature("float32", _prefill(replace(_PAGED, dtype="float32")), causal()),
    Feature("blocks of 16: decode", _decode(replace(_PAGED, block_size=16)), causal()),
    Feature("blocks of 16: prefill", _prefill(replace(_PAGED, block_size=16)), causal()),
    Feature("blocks of 16: prefill of head size 64", _prefill(replace(_PAGED, block_size=16, head_size=64, value_size=64)), causal()),
    Feature("blocks of 128", _prefill(), causal(), True),
    *(
        Feature(f"one key head for 128 query heads: decode{name}", replace(_decode(), heads=128, kv_heads=1, output_alone=alone), causal())
        for name, alone in ((" without an LSE", True), (" with an LSE", False))
    ),
    Feature("blocks of 1024: decode of head size 64", _decode(replace(_PAGED, block_size=1024, head_size=64, value_size=64)), causal()),
    Feature("cache pbhd", _prefill(), causal(), True),
    Feature("cache phbd", _prefill(replace(_PAGED, layout="phbd")), causal()),
    Feature("cache hpbd", _prefill(replace(_PAGED, layout="hpbd")), causal()),
    Feature("keys and values in one tensor", _prefill(replace(_PAGED, contiguous=False)), causal()),
    Feature("lengths as upper bounds", _prefill(replace(_PAGED, exact=False)), causal()),
    Feature("one query on more than 262144 keys", _batch((1,), (262145,), causal()), causal()),
    Feature("cache pbhd", _WRITE, required=True),
    Feature("cache phbd", replace(_WRITE, layout="phbd")),
    Feature("float16", replace(_WRITE, dtype="float16"), required=True),
    Feature("float32", replace(_WRITE, dtype="float32")),
    Feature("bfloat16, float16 (float32 arithmetic)", _ROPE, required=True, argument="rotary_mode"),
    Feature("float32", replace(_ROPE, dtype="float32"), argument="rotary_mode"),
    Feature("float64", replace(_ROPE, dtype="float64"), argument="rotary_mode"),
    Feature("896 dims and more", replace(_ROPE, head_size=896), argument="rotary_mode"),
    Feature("bfloat16, float16 (float32 arithmetic)", replace(_ROPE, operation="rope.interleaved"), required=True, argument="rotary_mode"),
)
_ONE_PATH = "npu applies sinks to the LSE instead: with every operator, dtype and head size, and once, after partials are merged"
ASIDES = (
    Aside("paged.attend", "sinks inside the operator", FUSED_2, "learnable_sink", _ONE_PATH),
    Aside(
        "paged.attend",
        "trees by sparse_mode 9",
        FUSED_2,
        "sparse_mode",
        "the mode is for latent attention alone; trees go as explicit masks",
    ),
    Aside("paged.attend", "rotated parts apart from the others", FUSED, "query_rope", "for latent attention, which npu does not have yet"),
    Aside("paged.write", "tiled caches (PA_NZ)", SCATTER, "cache_mode", "attention here reads plain caches"),
    Aside("rope.half", "a matrix that rotates", ROTARY, "rotate", "both pairings have a mode of their own"),
)


def table(soc: str, cann: str) -> list[Row]:
    """A row for every feature on a chip ("a2", "a3", "950") and a CANN release. Raises ValueError that names the known ones."""
    check_soc(soc)
    one = release(cann)
    has = operators(one)
    return [*(_row(feature, soc, one, has) for feature in FEATURES), *_asides(one, has)]


def required() -> list[tuple[str, str]]:
    """(operation, feature) of what npu may not refuse."""
    return [(feature.facts.operation, feature.name) for feature in FEATURES if feature.required]


def _row(feature: Feature, soc: str, one: Release, has: Mapping[str, frozenset[str]]) -> Row:
    operation = feature.facts.operation
    operator = ATB if feature.facts.by_atb else _operator(operation, has)
    short = operator.split("::")[1]
    if operator not in has:
        return Row(operation, feature.name, short, ABSENT, f"torch_npu for CANN {one.cann} has no {short}", DOCUMENTED)
    if feature.argument and feature.argument not in has[operator]:
        return Row(operation, feature.name, short, ABSENT, f"{short} has no {feature.argument} in CANN {one.cann}", DOCUMENTED)
    broken = limits.broken(feature.facts)
    if broken is not None:
        limit = limits.LIMITS[broken]
        beyond = f" (950: {limit.on_950})" if soc == "950" and limit.on_950 else ""
        return Row(operation, feature.name, short, REFUSED, f"{limit.text}{beyond}. Instead: {limit.instead}", limit.evidence_on(soc))
    return Row(operation, feature.name, short, RUNS, _how(feature, operator, has), _evidence(operator, soc, one))


def _operator(operation, has):
    if operation.endswith(".attend"):
        return FUSED
    if operation.startswith("rope."):
        return ROTARY
    # as `_operators.scatter` chooses
    return SCATTER if "cache_mode" in has.get(SCATTER, ()) else RESHAPE


def _how(feature, operator, has):
    """Layout and mode of a call that runs."""
    facts = feature.facts
    if operator == SCATTER:
        return "cache_mode Norm"
    if operator == RESHAPE:
        return "there is no npu_scatter_pa_kv_cache" if SCATTER not in has else "npu_scatter_pa_kv_cache has no cache_mode here"
    if operator == ROTARY:
        return f"rotary_mode {'half' if facts.operation == 'rope.half' else 'interleave'}"
    if operator == ATB:
        return "no mask, lengths on the host"
    layout = "TND" if facts.packed else "BNSD" if facts.layout == "phbd" else "BSND"
    mode = sparse_mode(feature.mask)[0] if facts.queries > 1 and not facts.explicit else 0
    masked = "explicit mask" if facts.explicit else f"sparse_mode {mode}"
    return f"{layout}, {masked}" + (", pse_shift" if facts.additive else "")


def _evidence(operator, soc, one):
    """The weaker of what is known of the operator on the chip and in the release."""
    if not one.documented or (operator in (RESHAPE, ATB) and soc == "950"):
        return ASSUMED
    return USED if operator == RESHAPE else DOCUMENTED


def _asides(one: Release, has: Mapping[str, frozenset[str]]) -> Iterator[Row]:
    for aside in ASIDES:
        short = aside.operator.split("::")[1]
        lacks = aside.argument not in has.get(aside.operator, ())
        why = f"CANN {one.cann} has no {short} with {aside.argument}" if lacks else f"not called: {aside.why}"
        yield Row(aside.operation, aside.feature, short, ABSENT, why, DOCUMENTED)
