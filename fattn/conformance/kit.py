"""Checking an operation of a target: cases are drawn, their values compared, laws tried, refusals held to what was predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from fattn.conformance import draw, laws, replay
from fattn.conformance.calls import Call
from fattn.conformance.cases import Case
from fattn.conformance.compare import Mismatch
from fattn.conformance.laws.base import Law
from fattn.conformance.minimise import minimise
from fattn.conformance.operations import OPERATIONS
from fattn.conformance.required import alternatives, required
from fattn.conformance.results import Result
from fattn.conformance.targets import Target, target_of
from fattn.conformance.trial import Trial, decisive, precision_of
from fattn.types import Unsupported

EXAMPLES = 100
NARROW_ROWS = 3
VALUE = Law("value", "bound", lambda trial: bool(trial.agrees(trial.got) >= 0), every=1)


@dataclass
class _Tally:
    examples: int = 0
    decisive: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    failure: str = ""


@dataclass
class _Feature:
    examples: int = 0
    decisive: int = 0
    refused: str = ""


def check(
    operation: str,
    target: Target | str,
    *,
    examples: int = EXAMPLES,
    seed: int = 0,
    checks: Collection[str] | None = None,
    first_failure: bool = False,
    failures: str | None = "failures",
    progress: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Holds one operation of a target to the oracle and the laws: a Result per check, then one per feature.

    Draws until `examples` are decisive (at most twice as many). `checks` limits what is tried; `first_failure` stops at the first one that
    fails. What fails is made small and saved in the folder `failures` (None: neither). `progress` is called after every example.
    """
    target = target_of(target) if isinstance(target, str) else target
    if target.function(operation) is None:
        return [Result(operation, "value", "absent", 0, 0, 0.0, f"{target.name} has no {operation}", core=False)]
    tried = [law for law in (VALUE, *laws.of(operation)) if checks is None or law.name in checks]
    tallies = {law.name: _Tally() for law in tried}
    features = {(name, value): _Feature() for name, values in OPERATIONS[operation].options.items() for value in values}
    rows, enough = len(draw.rows(OPERATIONS[operation])), 0
    unpredicted = ""
    for index, drawn in enumerate(draw.cases(operation, 2 * examples, seed)):
        if enough >= examples and index >= rows:
            break
        try:
            case = _supported(target, drawn, features)
        except Mismatch as error:
            unpredicted = unpredicted or f"{error}; {drawn}"
            continue
        if case is None:
            continue
        case, power = decisive(case, precision_of(case, target))
        enough += power.decisive
        trial, passed = Trial(case, target), True
        for law in tried:
            if tallies[law.name].failure or not _chosen(law, index, rows):
                continue
            passed &= _try(law, trial, tallies[law.name], power.decisive, failures)
            if first_failure and not passed:
                return _rows(operation, tallies, {}, "", target)
        if passed:
            for key in features.keys() & set(case.options):
                features[key].examples += 1
                features[key].decisive += power.decisive
        progress()
    return _rows(operation, tallies, features, unpredicted, target)


def tests(
    target: Target | str, *, operations: Collection[str] | None = None, examples: int = EXAMPLES, seed: int = 0
) -> dict[str, Callable]:
    """Test functions for `globals().update(...)` in a test file: one per operation, which fails with the rows that failed."""

    def test_of(name):
        def test():
            failed = [row for row in check(name, target, examples=examples, seed=seed) if row.status == "failed"]
            assert not failed, "\n".join(f"{row.operation} {row.check}: {row.reason}" for row in failed)

        test.__name__ = f"test_{name.replace('.', '_')}"
        test.__doc__ = f"{name} conforms."
        return test

    return {(made := test_of(name)).__name__: made for name in (operations or OPERATIONS)}


def fails(check_name: str, case: Case, target: Target) -> str:
    """What a check says of a case: "" where it holds or says nothing, else the failure."""
    law, trial = next(law for law in (VALUE, *laws.of(case.operation)) if law.name == check_name), Trial(case, target)
    try:
        trial.expected  # noqa: B018
    except (ValueError, IndexError):
        return ""  # no such case: an option was made smaller than others allow
    try:
        law.check(trial)
    except Unsupported:
        return ""
    except Exception as error:  # a foreign implementation may fail in any way, and each is a result
        return f"{type(error).__name__}: {error}" if not isinstance(error, Mismatch) else str(error)
    return ""


def _try(law, trial, tally, is_decisive, failures) -> bool:
    start = time.monotonic()
    try:
        said = law.check(trial)
    except Exception as error:  # a foreign implementation may fail in any way, and each is a result
        tally.failure = _failure(law, trial, error, failures)
        said = False
    tally.seconds += time.monotonic() - start
    if said is not False:
        tally.examples += 1
        tally.decisive += is_decisive
    return not tally.failure


def _failure(law, trial, error, failures) -> str:
    text = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
    if failures is None:
        return f"{text}; {trial.case}"
    small = minimise(trial.operation, trial.case, lambda case: bool(fails(law.name, case, trial.target)))
    text = fails(law.name, small, trial.target) or text
    path = replay.save(failures, trial.target.name, law.name, small)
    return f"{text}; smallest input {small}; replay {path}"


def _chosen(law, index, rows) -> bool:
    return index % rows < NARROW_ROWS and index < 4 * rows if law.narrow else index % law.every == 0


def _supported(target, case, features) -> Case | None:
    """The case, or the nearest one to it that the target takes: what it refuses on the way is noted by feature.

    Raises Mismatch where a refusal differs from what the target predicted.
    """
    refusal = _refusal(target, case)
    if refusal is None:
        return case
    for other in alternatives(target.name, case):
        if _refusal(target, other) is None:
            for feature in set(case.options) - set(other.options):
                alone = _refusal(target, other.option(*feature))
                features[feature].refused = features[feature].refused or alone or refusal
            return other
    core = required(target.name, case.operation)
    for name, value in case.options:
        if value in core[name]:
            features[name, value].refused = features[name, value].refused or refusal
    return None


def _refusal(target, case) -> str | None:
    """Why the target refuses the case, or None."""
    call = OPERATIONS[case.operation].build(case)
    if target.excluded is not None and (reason := target.excluded(call)) is not None:
        return reason
    predicted = target.refusal(call) if target.refusal is not None else None
    if target.refusal is not None and predicted is None:
        return None
    raised = _raised(target, call)
    if predicted is not None and raised is None:
        raise Mismatch(f"predicted to be refused ({predicted}), but it ran")
    return None if raised is None else str(raised)


def _raised(target, call: Call) -> Unsupported | None:
    try:
        target.run(OPERATIONS[call.operation], call)
    except Unsupported as error:
        return error
    except Exception:  # whatever else goes wrong is for the checks to find
        return None
    return None


def _rows(operation, tallies, features, unpredicted, target) -> list[Result]:
    return list(_results(operation, tallies, features, unpredicted, target))


def _results(operation, tallies, features, unpredicted, target) -> Iterator[Result]:
    for name, tally in tallies.items():
        status = "failed" if tally.failure else "passed" if tally.examples else "unreached"
        if status != "unreached":
            yield Result(operation, name, status, tally.examples, tally.decisive, round(tally.seconds, 3), tally.failure, worst=tally.worst)
    if unpredicted:
        yield Result(operation, "refusals", "failed", 0, 0, 0.0, unpredicted)
    core = required(target.name, operation)
    for (name, value), feature in features.items():
        needed = value in core[name]
        status = "passed" if feature.examples else "refused" if feature.refused else "unreached"
        if needed and (status != "passed" or feature.refused) and not any(tally.failure for tally in tallies.values()):
            status = "failed"
        reason = feature.refused or ("" if status == "passed" else "no example of it passed")
        if status == "passed" and feature.refused:
            reason = f"not everywhere: {reason}"
        yield Result(operation, f"{name}={value}", status, feature.examples, feature.decisive, 0.0, reason, core=needed)
