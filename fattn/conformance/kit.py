"""Checking an operation of a target: cases are drawn, values compared, laws tried, refusals held to what was predicted."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from fattn.conformance import draw, laws, replay
from fattn.conformance.calls import leaves
from fattn.conformance.cases import Case
from fattn.conformance.compare import Mismatch
from fattn.conformance.laws.base import Law
from fattn.conformance.minimise import minimise
from fattn.conformance.operations import OPERATIONS
from fattn.conformance.refusals import Feature, Features, taken
from fattn.conformance.required import required
from fattn.conformance.results import Result
from fattn.conformance.targets import Absent, Target, target_of
from fattn.conformance.trial import Trial, decisive, precision_of
from fattn.types import Unsupported

EXAMPLES = 100
NARROW_ROWS = 2  # of the covering array: where a law that changes shapes is tried, once each, if every shape is a compilation


@dataclass
class _Tally:
    examples: int = 0
    decisive: int = 0
    decisive_output: int = 0
    seconds: float = 0.0
    failure: str = ""
    absent: str = ""


def _value(trial: Trial) -> None:
    """The result is the oracle's, within its bound; shape, dtype and places of NaN and infinity are the same."""
    trial.agrees(trial.got)


VALUE = Law("value", "bound", _value, every=1)


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
    fails. What fails is made small and saved in the folder `failures` (None: neither). `progress` is called after every decisive example.
    Raises ValueError for an unknown operation, and what target_of raises.
    """
    _known(operation)
    target = target_of(target) if isinstance(target, str) else target
    if target.function(operation) is None:
        return [Result(operation, "value", "absent", 0, 0, 0.0, f"{target.name} has no {operation}", core=False)]
    tried = [law for law in (VALUE, *laws.of(operation)) if checks is None or law.name in checks]
    tallies = {law.name: _Tally() for law in tried}
    features: Features = {(name, value): Feature() for name, values in OPERATIONS[operation].options.items() for value in values}
    rows, enough, unpredicted = len(draw.rows(OPERATIONS[operation])), 0, ""
    own, drawn = draw.also(operation, seed, target), draw.cases(operation, 2 * examples, seed)
    for index, case in enumerate((*own, *drawn), start=-len(own)):
        if enough >= examples and index >= rows:
            break
        try:
            trial = taken(target, case, features)
        except Mismatch as error:
            unpredicted = unpredicted or f"{error}; {case}"
            continue
        if trial is None:
            continue
        planted, power = decisive(trial.case, precision_of(trial.case, target))
        trial = trial if planted == trial.case else Trial(planted, target)
        enough += power.decisive
        passed = True
        for law in tried:
            if not tallies[law.name].failure and _chosen(law, index, rows, trial):
                passed &= _try(law, trial, tallies[law.name], power, failures)
                if first_failure and not passed:
                    return list(_checks(operation, tallies, ""))
        for key in features.keys() & set(trial.case.options) if passed else ():
            features[key].examples += 1
            features[key].decisive += power.decisive
        if power.decisive:
            progress()
        if "value" in tallies and tallies["value"].absent:
            break
    found = list(_checks(operation, tallies, unpredicted))
    if "value" in tallies and tallies["value"].absent:
        return found[:1]
    return found if checks is not None else [*found, *_features(operation, features, target, found)]


def tests(
    target: Target | str, *, operations: Collection[str] | None = None, examples: int = EXAMPLES, seed: int = 0
) -> dict[str, Callable]:
    """Test functions for `globals().update(...)` in a test file: one per operation, which fails with the rows that failed.

    `operations` are functions or whole modules; a function that is named must be there. Raises ValueError for an unknown one.
    """
    named = operations or ()
    for name in named:
        _known(name, *(known.split(".")[0] for known in OPERATIONS))

    def test_of(name):
        def test():
            rows = check(name, target, examples=examples, seed=seed)
            failed = [row for row in rows if row.status == "failed" or (row.status == "absent" and row.check == "value" and name in named)]
            assert not failed, "\n".join(f"{row.operation} {row.check}: {row.reason}" for row in failed)

        test.__name__ = f"test_{name.replace('.', '_')}"
        test.__doc__ = f"{name} conforms."
        return test

    chosen = [name for name in OPERATIONS if operations is None or name in named or name.split(".")[0] in named]
    return {(made := test_of(name)).__name__: made for name in chosen}


def fails(check_name: str, case: Case, target: Target) -> str:
    """What a check says of a case: "" where it holds or says nothing, else the failure."""
    law, trial = next(law for law in (VALUE, *laws.of(case.operation)) if law.name == check_name), Trial(case, target)
    try:
        trial.expected  # noqa: B018
    except (ValueError, IndexError):
        return ""  # no such case: an option was made smaller than others allow
    try:
        law.check(trial)
    except (Unsupported, Absent):
        return ""
    except Exception as error:  # a foreign implementation may fail in any way, and each is a result
        return _text(error)
    return ""


def _known(name, *others):
    if name not in OPERATIONS and name not in others:
        raise ValueError(f"{name!r} is no operation; one of {', '.join(OPERATIONS)} would work")


def _try(law, trial, tally, power, failures) -> bool:
    start = time.monotonic()
    try:
        said = law.check(trial)
    except Absent as error:  # another function than the one under test
        tally.absent, said = str(error), False
    except Exception as error:  # a foreign implementation may fail in any way, and each is a result
        # who predicts refusals has none beside those; who does not may refuse another call of a law, which says nothing then
        if not isinstance(error, Unsupported) or trial.target.refusal is not None:
            tally.failure = _failure(law, trial, error, failures)
        said = False
    tally.seconds += time.monotonic() - start
    if said is not False:
        tally.examples += 1
        tally.decisive += power.decisive
        tally.decisive_output += power.decisive and not power.output
    return not tally.failure


def _failure(law, trial, error, failures) -> str:
    if failures is None:
        return f"{_text(error)}; {trial.case}"
    small = minimise(trial.operation, trial.case, lambda case: bool(fails(law.name, case, trial.target)))
    text = fails(law.name, small, trial.target) or _text(error)
    path = replay.save(failures, trial.target.name, law.name, small)
    return f"{text}; smallest input {small}; replay {path}"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"


def _chosen(law, index, rows, trial) -> bool:
    if index < 0:
        return law is VALUE
    if law.narrow and trial.target.arrays.compiles:
        return index < rows and (index + zlib.crc32(law.name.encode())) % rows < NARROW_ROWS
    # a call without arrays is compiled for every size
    sized = trial.target.arrays.compiles and not any(True for _ in leaves(trial.call.arguments))
    return index % law.every == 0 and (law is VALUE or not sized or index < rows)


def _checks(operation, tallies, unpredicted) -> Iterator[Result]:
    for name, tally in tallies.items():
        if tally.failure or tally.examples:
            status, seconds, output = "failed" if tally.failure else "passed", round(tally.seconds, 3), tally.decisive_output
            reason = tally.failure or (f"{output} decisive for the output alone" if output < tally.decisive and name == "value" else "")
            yield Result(operation, name, status, tally.examples, tally.decisive, seconds, reason, decisive_output=output)
        elif tally.absent:
            yield Result(operation, name, "absent", 0, 0, 0.0, tally.absent, core=False)
    if unpredicted:
        yield Result(operation, "refusals", "failed", 0, 0, 0.0, unpredicted)


def _features(operation, features, target, checks) -> Iterator[Result]:
    core, failed = required(target.name, operation), any(result.status == "failed" for result in checks)
    for (name, value), feature in features.items():
        needed = value in core[name]
        status = "passed" if feature.examples else "refused" if feature.refused else "unreached"
        reason = feature.refused or ("" if status == "passed" else "no example of it passed")
        if needed and reason:
            status = "unreached" if failed else "failed"  # after a failure of a check there are few examples
        elif status == "passed" and reason:
            reason = f"not everywhere: {reason}"
        yield Result(operation, f"{name}={value}", status, feature.examples, feature.decisive, 0.0, reason, core=needed)
