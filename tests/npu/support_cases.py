"""Checks of the table of support, of what errors mean and of the probe, as functions: tests and faults share them."""

from __future__ import annotations

from dataclasses import replace

import torch
from layer_cases import FLOATS

import npu
from fattn.plan import batch as plan
from fattn.types import Pages, Range, Tokens, Unsupported
from npu import _errors, _operators, limits, probe, releases, support
from npu.emulator import assumptions
from npu.limits import Facts
from npu.probe import of_assumptions, of_limits

DTYPES = FLOATS | {"float32": torch.float32, "float64": torch.float64}
TOO_BIG_TO_RUN = ("one query on more than 262144 keys",)
ATTENTION = [f for f in support.FEATURES if f.facts.operation.endswith(".attend") and f.name not in TOO_BIG_TO_RUN]
WRITES = [f for f in support.FEATURES if f.facts.operation == "paged.write"]
TURNS = [f for f in support.FEATURES if f.facts.operation.startswith("rope.")]


def row_of(feature, soc="a2", cann="9.1.0"):
    return next(row for row in support.table(soc, cann) if row[:2] == (feature.facts.operation, feature.name))


def check_attention(feature):
    """The call runs exactly where the table says so, by the layout, mode and arguments that it names."""
    row, calls = row_of(feature), []
    real = _operators._operator

    def operator(namespace, name, *rest):
        found = real(namespace, name, *rest)

        def call(*arguments, **named):
            calls.append(named)
            return found(*arguments, **named)

        return call if "attention" in name else found

    _operators._operator = operator
    try:
        call_attention(feature)
    except Unsupported as error:
        assert row.status == support.REFUSED, f"{feature.name} is refused ({error}), the table says: {row.status}"
        assert not calls, f"{feature.name} reached the operator"
        return
    except RuntimeError as error:
        raise AssertionError(f"{feature.name} is neither taken nor refused: {error}") from error
    finally:
        _operators._operator = real
    assert row.status == support.RUNS, f"{feature.name} runs, the table says: {row.status}"
    if feature.facts.by_atb:
        assert row.operator == "_npu_paged_attention" and row.detail.startswith("no mask") and "context_lens" in calls[0], feature.name
        return
    explicit = calls[0]["sparse_mode"] == 0 and calls[0]["atten_mask"] is not None
    how = f"{calls[0]['input_layout']}, " + ("explicit mask" if explicit else f"sparse_mode {calls[0]['sparse_mode']}")
    how += "" if calls[0]["pse_shift"] is None else ", pse_shift"
    assert row.detail == how, f"{feature.name} goes by {how}, the table says: {row.detail}"


def call_attention(feature):
    return (_dense if feature.facts.operation == "dense.attend" else _paged)(feature.facts, feature.mask)


def call_write(facts: Facts):
    dtype = DTYPES[facts.dtype]
    cache = npu.paged.allocate(2, 2, 16, 16, block_size=16, layout=facts.layout, dtype=dtype)
    rows = torch.ones(3, 2, 16, dtype=dtype)
    return npu.paged.write(cache, rows, rows, torch.tensor([7, 0, 20], dtype=torch.int32))


def call_turn(facts: Facts):
    x = torch.ones(2, 4, facts.head_size, dtype=DTYPES[facts.dtype])
    tables = torch.ones(2, facts.head_size // 2), torch.zeros(2, facts.head_size // 2)
    return getattr(npu.rope, facts.operation.split(".")[1])(x, *tables)


def _dense(f: Facts, mask):
    dtype = DTYPES[f.dtype]
    q = torch.zeros(f.queries, f.heads, f.head_size, dtype=dtype)
    k, v = (torch.zeros(f.keys, f.kv_heads, size, dtype=dtype) for size in (f.head_size, f.value_size))
    labels = {name: torch.full((64,), int(name == "exit"), dtype=torch.int32) for name in mask.labels()}
    side = Tokens(torch.arange(64, dtype=torch.int32), labels) if labels else Range(0, 64)
    bias = None if f.additive is None else torch.zeros(1, 1, 64, dtype=DTYPES[f.additive])
    return npu.dense.attend(q, k, v, side, side, bias, mask=mask, scale=0.1, softcap=f.softcap)


def _paged(f: Facts, mask):
    dtype, pages = DTYPES[f.dtype], -(-f.keys // f.block_size)
    tables = [[b * pages + p for p in range(pages)] for b in range(f.sequences)]
    parents = [[-1] + list(range(f.queries - 1))] * f.sequences if mask.labels() else None
    batch = plan.build(
        [f.queries] * f.sequences,
        [f.keys] * f.sequences,
        tables,
        block_size=f.block_size,
        num_blocks=f.sequences * pages,
        parents=parents,
        exact=f.exact,
    )
    sizes = (f.head_size, f.value_size)
    cache = npu.paged.allocate(f.sequences * pages, f.kv_heads, *sizes, block_size=f.block_size, layout=f.layout, dtype=dtype)
    if not f.contiguous:
        both = torch.cat([cache.k, cache.v], -1)
        cache = Pages(both[..., : f.head_size], both[..., f.head_size :], cache.layout, cache.block_size)
    q = torch.zeros(f.queries * f.sequences, f.heads, f.head_size, dtype=dtype)
    slopes = None if f.additive is None else torch.ones(f.heads)
    return npu.paged.attend(
        q, cache, npu.place(batch, "cpu", mask), slopes, mask=mask, scale=0.1, softcap=f.softcap, lse=not f.output_alone
    )


def check_all_attention():
    for feature in ATTENTION:
        check_attention(feature)


def check_writes_and_turns():
    """As `check_attention`, of cache writes and rotations."""
    for feature, call in [*((f, call_write) for f in WRITES), *((f, call_turn) for f in TURNS)]:
        try:
            call(feature.facts)
        except Unsupported:
            assert row_of(feature).status == support.REFUSED, feature.name
        else:
            assert row_of(feature).status == support.RUNS, feature.name


def check_required():
    """What may not be refused runs on every chip and documented release; softcap does not; trees and ALiBi do."""
    documented = [one.cann for one in releases.RELEASES if one.documented]
    assert documented == ["8.3.RC1", "8.5.0", "9.0.0", "9.1.0"] and len(support.required()) >= 25
    for soc in releases.SOCS:
        for cann in documented:
            status = {row[:2]: row.status for row in support.table(soc, cann)}
            assert len(status) >= 40
            assert {status[name] for name in support.required()} == {support.RUNS}, (soc, cann)
            for operation in ("dense.attend", "paged.attend"):
                assert status[operation, "softcap"] == support.REFUSED
            for name in (("dense.attend", "trees"), ("paged.attend", "draft trees"), ("paged.attend", "ALiBi")):
                assert status[name] == support.RUNS


def check_releases():
    """Operators and arguments are those of each release's schemas."""
    write = {one.cann: next(r for r in support.table("a2", one.cann) if r[:2] == ("paged.write", "float16")) for one in releases.RELEASES}
    assert [row.status for row in write.values()] == [support.ABSENT] + [support.RUNS] * 6
    assert [row.operator for row in write.values()] == ["_npu_reshape_and_cache"] * 5 + ["npu_scatter_pa_kv_cache"] * 2
    turn = {one.cann: next(r for r in support.table("a2", one.cann) if r.operation == "rope.half") for one in releases.RELEASES}
    assert [row.status for row in turn.values()] == [support.ABSENT] + [support.RUNS] * 6  # 8.0.0 has no rotary_mode
    assert {turn[cann].evidence for cann in ("8.1.RC1", "8.2.RC1")} == {"assumed"} and turn["9.1.0"].evidence == "documentation"
    sink = {one.cann: next(r for r in support.table("a2", one.cann) if "sinks inside" in r.feature) for one in releases.RELEASES}
    assert {row.status for row in sink.values()} == {support.ABSENT}
    assert ["has no" in sink[cann].detail for cann in ("8.2.RC1", "8.3.RC1")] == [True, False]
    here = releases.operators(releases.release("9.1"))
    for name, arguments in here.items():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        schema = getattr(getattr(getattr(torch.ops, space), base), overload or "default")._schema
        assert arguments <= {argument.name for argument in schema.arguments}, name
    assert len(here) >= 7


_A = Facts("dense.attend", "float16")
_P = Facts("paged.attend", "float16", layout="pbhd", block_size=128)
_R = Facts("rope.half", "float32")
_B = replace(_P, heads=65, output_alone=True)
EDGES = {  # the last that is allowed, the first that is not
    "head size": (replace(_A, head_size=512, value_size=512), replace(_A, head_size=528, value_size=528)),
    "heads": (replace(_A, heads=256, kv_heads=256), replace(_A, heads=257, kv_heads=257)),
    "group": (replace(_A, heads=64), replace(_A, heads=65)),
    "ATB head size": (replace(_B, head_size=256, value_size=256), replace(_B, head_size=272, value_size=256)),
    "ATB block": (_B, replace(_B, block_size=144)),
    "cache width": (replace(_P, heads=127, kv_heads=127, head_size=512, value_size=512, block_size=16),)
    + (replace(_P, heads=128, kv_heads=128, head_size=512, value_size=512, block_size=16),),
    "packed block": (replace(_P, block_size=1024), replace(_P, block_size=1040)),
    "prefill block": (replace(_P, block_size=512, queries=2, explicit=True), replace(_P, block_size=640, queries=2, explicit=True)),
    "decode block": (replace(_P, block_size=512, explicit=True), replace(_P, block_size=528, explicit=True)),
    "packed sequences": (replace(_P, sequences=4096), replace(_P, sequences=4097)),
    "sequences": (replace(_P, sequences=65536, explicit=True), replace(_P, sequences=65537, explicit=True)),
    "decode keys": (replace(_P, keys=262144), replace(_P, keys=262145)),
    "rotary size": (replace(_R, head_size=894), replace(_R, head_size=896)),
    "rotary heads": (replace(_R, heads=999), replace(_R, heads=1000)),
}


def check_edges():
    """Each limit begins where it says."""
    for name, (inside, outside) in EDGES.items():
        assert limits.broken(inside) is None, name
        assert limits.broken(outside) == name, name


TILING = (
    "npu_fused_infer_attention_score_symint:FusedInferAttentionScoreKernelNpuOpApi.cpp:415 NPU function error: "
    "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002\nE89999: Inner Error!\n"
    "When layout is TND, queryD(256), keyD(256) and valueD(256) must be same equal 192/128/64"
)


def check_errors():
    """An operator's refusal is Unsupported, a failure of the device is not, and both keep the text; the rest passes unchanged."""
    for code, says in ((161002, "argument check"), (561002, "tiling"), (561103, "null pointer")):
        error = _errors.reading(RuntimeError(TILING.replace("561002", str(code))), "npu_x")
        assert isinstance(error, Unsupported) and says in str(error) and "must be same equal 192/128/64" in str(error)
        assert error.argument == "npu_x" and str(code) in error.value
    for code, says in ((561003, "no kernel binary"), (507899, "driver"), (507015, "new process"), (207001, "memory"), (361001, "runtime")):
        error = _errors.reading(RuntimeError(f"SetDevice failed, error code is {code}, x"), "npu_x")
        assert type(error) is RuntimeError and says in str(error) and "error code is" in str(error), code
    wheel = _errors.reading(RuntimeError("Layout SBH is not supported ERR01003 OPS invalid value"), "npu_x")
    assert isinstance(wheel, Unsupported) and "Layout SBH" in str(wheel)
    assert _errors.reading(RuntimeError("shapes do not match"), "npu_x") is None
    cache = npu.paged.allocate(2, 2, 16, 16, block_size=16, layout="pbhd", dtype=torch.float16)
    rows = torch.ones(2, 2, 16, dtype=torch.float16)
    try:
        npu.paged.write(cache, rows, rows, torch.tensor([3, -1], dtype=torch.int32))
    except RuntimeError as error:
        assert isinstance(error, Unsupported) and "npu_scatter_pa_kv_cache" in str(error) and "slots are in [0, 32)" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    else:
        raise AssertionError("slot -1 was taken")
    assert not cache.k.any()


def check_probe_holds():
    """On the emulation as believed, every question is answered, and every answer holds."""
    answers = probe.ask("cpu")
    assert len(answers) == len(limits.LIMITS) + len(assumptions.TABLE) == len(probe.questions())
    wrong = [f"{answer.id}: {answer.answer}, {answer.message}" for answer in answers if answer.answer != "holds"]
    assert not wrong, wrong
    silent = [answer.id for answer in answers if not answer.message]
    assert not silent, silent


def check_probe_sees_variants():
    """Every variant of the emulator is told from its belief, by name."""
    for one in assumptions.TABLE:
        for name in one.variants:
            with npu.emulator.variant(f"{one.id}:{name}"):
                found = of_assumptions.ask(one.id, "cpu")
            assert (found.answer, found.variant) == ("differs", name), (one.id, name, found)


def report_of(answers, *, emulated=False, soc="a2"):
    return probe.Report("Ascend910B3" if not emulated else "emulated torch_npu", emulated, soc, "9.0.0", "2.9.0.post2", tuple(answers))


def check_reports():
    """Variants follow answers, and what no device answered is never counted as probed."""
    ids = [id for _, id in probe.questions()]
    with npu.emulator.variant("lse-empty-decode:-inf", "negative-slot:skipped"):
        answers = probe.ask("cpu", ["lse-empty-decode", "negative-slot", "norm-cache", "head size"])
    assert probe.variants(report_of(answers)) == ["lse-empty-decode:-inf", "negative-slot:skipped"]
    assert probe.never_probed(None) == ids == probe.never_probed(report_of(answers, emulated=True))
    assert set(ids) - set(probe.never_probed(report_of(answers))) == {"lse-empty-decode", "negative-slot", "norm-cache", "head size"}
    asked_not = answers[0]._replace(answer="not asked")
    assert asked_not.id in probe.never_probed(report_of([asked_not, *answers[1:]]))
    odd = answers[0]._replace(answer="differs", variant=None)
    assert probe.unfollowed(report_of([odd, *answers[1:]])) == [odd]


def check_limit_answers():
    """A limit that the operator does not have "differs", one that is tighter is "refused", wrong numbers "differ"."""
    taken, right, wrong = (lambda device: ""), (lambda device: ""), (lambda device: "the output is wrong")

    def refused(device):
        raise RuntimeError("no, error code is 561002")

    trial = probe.outcome.Trial
    assert probe.outcome.of_limit("cpu", (trial("a", right),), (trial("b", refused),)) == ("holds", None, "b: no, error code is 561002")
    assert probe.outcome.of_limit("cpu", (trial("a", right),), (trial("b", taken),)).answer == "differs"
    assert probe.outcome.of_limit("cpu", (trial("a", wrong),), (trial("b", refused),)).answer == "differs"
    assert probe.outcome.of_limit("cpu", (trial("a", refused),), (trial("b", refused),)).answer == "refused"
    assert of_limits.TRIALS.keys() | set(of_limits.SCHEMA_ANSWERS) == limits.LIMITS.keys()
