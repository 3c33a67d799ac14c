"""The kit: what conforms passes, what does not is caught, made small, saved and replayed; refusals are held to what was predicted."""

import hashlib
import inspect
import json
from dataclasses import replace

import numpy as np
import pytest

from fattn import conformance
from fattn.conformance import draw, kit, laws, plain, replay, required, results
from fattn.conformance.cases import Case, case_of
from fattn.conformance.compare import Mismatch, identical, within
from fattn.conformance.laws.base import Law
from fattn.conformance.operations import OPERATIONS
from fattn.conformance.targets import Target, target_of
from fattn.conformance.trial import Trial
from fattn.types import Partial, Unsupported

PLAIN = target_of("fattn.conformance.plain")
# how many features each package may not refuse, and the digest of all of them
PINNED = ({"fattn": 334, "npu": 312, "another": 268}, "0129dea975037afc")


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_the_plain_implementation_conforms(name):
    found = kit.check(name, PLAIN, examples=12, failures=None)
    assert [row for row in found if row.status != "passed"] == []
    value = found[0]
    assert value.check == "value" and value.decisive >= 12


def test_tests_are_made_for_somebody_elses_test_file():
    made = conformance.tests(PLAIN, operations=["merge.merge"], examples=5)
    assert list(made) == ["test_merge_merge"]
    made["test_merge_merge"]()
    broken = Target.of_functions("broken", {"merge.merge": lambda a, b: a})
    with pytest.raises(AssertionError, match="merge.merge value"):
        kit_tests = conformance.tests(broken, operations=["merge.merge"], examples=5)
        kit_tests["test_merge_merge"]()


def ignores_the_scale(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    return plain.dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=q.shape[-1] ** -0.5, softcap=softcap)


def test_a_failure_is_made_small_saved_and_replayed(tmp_path):
    target = Target.of_functions("ignores the scale", {"dense.attend": ignores_the_scale})
    (found,) = kit.check("dense.attend", target, examples=8, checks=["value"], failures=str(tmp_path))
    assert found.status == "failed" and "smallest input dense.attend(" in found.reason
    (path,) = tmp_path.iterdir()
    saved = replay.load(str(path))
    assert (saved.target, saved.check) == ("ignores the scale", "value")
    t, s = (len(saved.arrays[f"argument.{name}"]) for name in "qk")
    assert t * s <= 2, "one query and two keys show a wrong scale"
    assert "beyond" in kit.fails(saved.check, saved.case, target)
    assert kit.fails(saved.check, saved.case, PLAIN) == ""


def test_a_file_that_is_no_failure_is_named(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, a=np.zeros(2))
    with pytest.raises(ValueError, match="not a saved failure"):
        replay.load(str(path))


def test_an_operation_that_a_package_lacks_is_absent():
    target = replace(PLAIN, name="partial", get=lambda name: None)
    (row,) = kit.check("rope.half", target)
    assert row.status == "absent" and not row.core


def test_a_check_that_needs_another_function_says_so_and_accuses_nobody():
    target = replace(PLAIN, name="dense alone", get=lambda name: PLAIN.get(name) if name == "dense.attend" else None)
    rows = kit.check("dense.attend", target, examples=12, failures=None)
    (split,) = [row for row in rows if row.check == "split keys"]
    assert (split.status, split.reason) == ("absent", "dense alone has no merge.merge")
    assert all(row.status == "passed" for row in rows if row is not split)
    target = replace(PLAIN, name="forward alone", get=lambda name: PLAIN.get(name) if name == "standard.forward" else None)
    (row,) = kit.check("standard.forward", target, examples=12, failures=None)
    assert (row.status, row.reason) == ("absent", "forward alone has no standard.Weights")
    assert results.headline([split, row]) == "core 0/0, optional 0/0, absent 2"


def test_names_that_nothing_has_are_refused():
    with pytest.raises(ValueError, match="'dense.atend' is no operation"):
        kit.check("dense.atend", PLAIN)
    with pytest.raises(ValueError, match="'dense.atend' is no operation"):
        conformance.tests(PLAIN, operations=["dense.atend"])
    with pytest.raises(ValueError, match="'dense.atend' is no function"):
        Target.of_functions("mine", {"dense.atend": plain.dense.attend})
    with pytest.raises(ValueError, match="'np' is not"):
        Target.of_functions("mine", {}, arrays="np")


def test_a_module_is_all_of_its_functions_and_a_function_that_is_named_must_be_there():
    lacking = replace(PLAIN, name="partial", get=lambda name: None)
    of_module = conformance.tests(lacking, operations=["merge"])
    assert list(of_module) == ["test_merge_empty", "test_merge_merge", "test_merge_finish"]
    of_module["test_merge_merge"]()
    with pytest.raises(AssertionError, match="partial has no merge.merge"):
        conformance.tests(lacking, operations=["merge.merge"])["test_merge_merge"]()


def refuses_softcap(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    if softcap is not None:
        raise Unsupported("softcap", softcap, "no cap here", "softcap=None")
    return plain.dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def refusal_rows(target):
    return {row.check: row for row in kit.check("dense.attend", target, examples=40, failures=None)}


def test_an_optional_refusal_is_no_failure_and_no_example():
    rows = refusal_rows(Target.of_functions("others", {"dense.attend": refuses_softcap}))
    assert rows["softcap=3.0"].status == "refused" and "no cap here" in rows["softcap=3.0"].reason
    assert not rows["softcap=3.0"].core and rows["softcap=3.0"].examples == 0
    assert rows["value"].decisive >= 40, "the offered alternative is run instead"
    assert all(row.status in ("passed", "refused") for row in rows.values())


def test_a_required_refusal_is_a_failure():
    rows = refusal_rows(Target.of_functions("fattn", {"dense.attend": refuses_softcap}))
    assert rows["softcap=3.0"].status == "failed" and rows["softcap=3.0"].core


def test_a_refusal_that_was_predicted_and_does_not_come_is_a_failure():
    predicts = lambda call: Unsupported("softcap", 1, "none", "None") if call.static["softcap"] else None
    rows = refusal_rows(replace(PLAIN, name="others", refusal=predicts))
    assert rows["refusals"].status == "failed" and "predicted to be refused" in rows["refusals"].reason


def test_a_refusal_that_was_not_predicted_is_a_failure():
    target = replace(Target.of_functions("others", {"dense.attend": refuses_softcap}), refusal=lambda call: None)
    rows = refusal_rows(target)
    assert rows["value"].status == "failed" and "Unsupported" in rows["value"].reason


def takes_small_blocks(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    if cache.block_size > 128:
        raise Unsupported("cache.block_size", cache.block_size, "up to 128", "128")
    return plain.paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


@pytest.mark.parametrize("predicts", [True, False])
def test_a_refusal_in_a_law_accuses_only_who_said_that_there_is_none(predicts):
    """The law about block sizes doubles them: a package that does not predict its refusals may refuse that."""
    target = Target.of_functions("others", {"paged.attend": takes_small_blocks})
    target = replace(target, refusal=lambda call: None) if predicts else target
    (row,) = kit.check("paged.attend", target, examples=40, checks=["block size"], failures=None)
    assert row.status == ("failed" if predicts else "passed") and (predicts or row.examples > 0), row


@pytest.mark.parametrize("package", ["fattn", "npu"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_required_feature_is_in_some_case(package, name):
    reached = {feature for row in draw.rows(OPERATIONS[name]) for feature in row.options}
    core = required.required(package, name)
    assert {(option, value) for option, values in core.items() for value in values} <= reached


def test_the_core_is_pinned():
    """A line of required.py that is lost, and an option value that is lost, change this."""
    table = {package: {name: required.required(package, name) for name in OPERATIONS} for package in ("fattn", "npu", "another")}
    counts = {package: sum(len(values) for features in of.values() for values in features.values()) for package, of in table.items()}
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]
    assert (counts, digest) == PINNED


def test_every_law_is_stated_and_every_operation_has_some():
    for name in OPERATIONS:
        found = laws.of(name)
        assert len({law.name for law in found}) == len(found) >= 5
        for law in found:
            assert law.statement.endswith(".") and law.kind in ("bits", "bound")
            assert list(inspect.signature(law.check).parameters) == ["trial"]


def test_results_say_what_the_json_promises():
    found = kit.check("merge.empty", PLAIN, examples=5)
    text = json.loads(json.dumps(results.as_json("plain", "numpy", 3, found)))
    assert (text["target"], text["provider"], text["seed"]) == ("plain", "numpy", 3)
    assert {"operation", "check", "status", "examples", "decisive", "seconds", "reason"} <= set(text["results"][0])
    assert results.headline(found) == f"core {len(found)}/{len(found)}, optional 0/0"


def test_comparison_is_of_shape_then_dtype_then_special_values_then_error():
    value, bound = Partial(np.zeros((2, 1, 2)), np.zeros((2, 1))), Partial(np.full((2, 1, 2), 1e-3), np.full((2, 1), 1e-3))
    dtypes = {".out": "float32", ".lse": "float32"}
    good = Partial(np.zeros((2, 1, 2), np.float32), np.zeros((2, 1), np.float32))
    assert within(good, value, bound, dtypes=dtypes) == 0
    nan = good.out.copy()
    nan[1, 0, 1] = np.nan
    wrong = {
        r"result.out has shape \[1, 1, 2\]": Partial(good.out[:1], good.lse),
        "result.out has dtype float64": Partial(good.out.astype(np.float64), good.lse),
        r"result.out\[1, 0, 1\] is nan, expected 0.0 \(1 of 4 places of NaN differ\)": Partial(nan, good.lse),
        r"result.lse\[0, 0\] is -inf": Partial(good.out, np.full((2, 1), -np.inf, np.float32)),
        r"result.out\[0, 0, 0\] is 0.00200000009, expected 0": Partial(good.out + np.float32(2e-3), good.lse),
        r"result has parts \['.out'\]": Partial(good.out, None),
    }
    for message, got in wrong.items():
        with pytest.raises(Mismatch, match=message):
            within(got, value, bound, dtypes=dtypes)


def test_bits_tell_nan_from_nan_and_zero_from_minus_zero():
    identical(np.array([np.nan, 0.0]), np.array([np.nan, 0.0]))
    with pytest.raises(Mismatch, match=r"\[1\] is -0.0"):
        identical(np.array([np.nan, -0.0]), np.array([np.nan, 0.0]))


# --- each kind of law sees a fault of its kind ------------------------------------------------------------------------------


def keeps_state():
    """Attention that returns the first result of a shape again."""
    results = {}

    def attend(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
        got = plain.dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
        return results.setdefault((q.shape, k.shape, v.shape, mask), got)

    return attend


def multiplies_masked_keys(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    got = plain.dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    with np.errstate(all="ignore"):
        return Partial(got.out + 0 * v.astype(np.float32).sum(), got.lse)


def overwrites_q(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    got = plain.dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    q *= q.dtype.type(2)
    return got


def prefers_the_first(a, b):
    got = plain.merge.merge(a, b)
    return Partial(np.where((a.lse == b.lse)[..., None], a.out, got.out), got.lse)


@pytest.mark.parametrize(
    ("operation", "function", "check"),
    [
        ("dense.attend", keeps_state(), "value"),
        ("dense.attend", multiplies_masked_keys, "poison"),
        ("dense.attend", overwrites_q, "arguments unchanged"),
        ("merge.merge", prefers_the_first, "commutative"),
    ],
    ids=["keeps state", "reads hidden keys", "overwrites q", "prefers the first"],
)
def test_a_law_sees_what_it_states(operation, function, check):
    target = Target.of_functions("broken", {operation: function})
    (row,) = kit.check(operation, target, examples=100, checks=[check], failures=None)
    assert row.status == "failed", row


def depends_on_the_batch(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    """Sums in another order where there are several sequences: within every bound, and not the same bits."""
    got = plain.paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)
    several = sum(length > 0 for length in batch.host.seq_lens) > 1
    return Partial(np.nextafter(got.out, np.float32(np.inf)) if several else got.out, got.lse)


@pytest.mark.parametrize("declared", [True, False])
def test_who_declares_batch_invariance_is_held_to_bits(declared):
    target = replace(Target.of_functions("dependent", {"paged.attend": depends_on_the_batch}), batch_invariant=declared)
    (row,) = kit.check("paged.attend", target, examples=25, checks=["sequence alone"], failures=None)
    assert row.status == ("failed" if declared else "passed"), row
    assert not declared or "expected the bits of" in row.reason


def test_float64_and_long_keys_are_tried_where_they_are_taken():
    lengths = {name: {dict(case.options).get("dtype") for case in draw.also(name, 0, PLAIN)} for name in ("dense.attend", "merge.merge")}
    assert all("float64" in dtypes for dtypes in lengths.values())
    undeclared = replace(PLAIN, float64=False)
    assert [case for case in draw.also("dense.attend", 0, undeclared) if case["dtype"] == "float64"] == []
    (long,) = draw.also("paged.attend", 0, PLAIN)
    assert OPERATIONS["paged.attend"].build(long).arguments["batch"].host.seq_lens[0] == 2048
    assert 2048 in {len(OPERATIONS["dense.attend"].build(case).arguments["k"]) for case in draw.also("dense.attend", 0, PLAIN)}


def rounds_to_float32(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    got = plain.dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    return Partial(got.out.astype(np.float32).astype(got.out.dtype), got.lse)


def test_float64_is_held_to_float64():
    target = replace(Target.of_functions("float32 inside", {"dense.attend": rounds_to_float32}), float64=True)
    (row,) = kit.check("dense.attend", target, examples=1, checks=["value"], failures=None)
    assert row.status == "failed" and "dtype=float64" in row.reason, row


def test_what_the_output_alone_decides_is_counted():
    (row,) = kit.check("dense.attend", PLAIN, examples=10, checks=["value"], failures=None)
    assert 0 < row.decisive_output < row.decisive
    assert row.reason == f"{row.decisive_output} decisive for the output alone"
    (exact,) = kit.check("masks.expand", PLAIN, examples=10, checks=["value"], failures=None)
    assert exact.decisive_output == exact.decisive


def test_a_law_that_says_nothing_of_a_case_counts_no_example():
    silent = Law("silent", "bound", lambda trial: False)
    case = case_of("dense.alibi_slopes", {"heads": "any"})
    assert silent.check(Trial(case, PLAIN)) is False
    assert isinstance(case, Case)
