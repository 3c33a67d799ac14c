"""The kit judged: every fault must be caught, no innocent accused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from fattn.conformance import draw, kit, laws
from fattn.conformance.faults import FAULTS, Fault
from fattn.conformance.innocents import INNOCENTS, Innocent
from fattn.conformance.targets import Target

SEEDS = 20
CASES = 3  # of an innocent, a seed: the value of each is compared
THIRDS = 3  # of the laws of an operation, one third is tried a seed


@dataclass(frozen=True)
class Verdict:
    """What the kit said of one implementation. `check` and `reason` are those of the first check that failed, or empty."""

    name: str
    kind: str
    operation: str
    check: str
    reason: str
    examples: int
    seconds: float

    @property
    def accused(self) -> bool:
        """Whether any check failed."""
        return bool(self.check)


def fault(subject: Fault, *, examples: int = kit.EXAMPLES, seed: int = 0) -> Verdict:
    """Checks the fault's operation, as `conform` would, until something fails."""
    start = time.monotonic()
    target = Target.of_functions(subject.name, {subject.operation: subject.function})
    rows = kit.check(subject.operation, target, examples=examples, seed=seed, first_failure=True, failures=None)
    failed = next((row for row in rows if row.status == "failed"), None)
    tried = max((row.examples for row in rows if "=" not in row.check), default=0)
    check, reason = ("", "") if failed is None else (failed.check, failed.reason)
    return Verdict(subject.name, subject.kind, subject.operation, check, reason, tried, time.monotonic() - start)


def innocent(subject: Innocent, *, seeds: Iterable[int] = range(SEEDS)) -> Verdict:
    """Compares values and tries laws in every seed. Rows of options and laws take turns, so that all are tried over the seeds."""
    start, tried = time.monotonic(), 0
    target = Target.of_functions(subject.name, {subject.operation: subject.function}, precision=subject.precision)
    every = laws.of(subject.operation)
    for seed in seeds:
        cases = draw.cases(subject.operation, 1, seed)
        for turn in range(min(CASES, len(cases))):
            case = cases[(seed * CASES + turn) % len(cases)]
            own = [law for index, law in enumerate(every) if index % CASES == turn and (index // CASES + seed) % THIRDS == 0]
            for law in (kit.VALUE, *own):
                tried += 1
                reason = kit.fails(law.name, case, target)
                if reason:
                    said = f"{reason}; seed {seed}, {case}"
                    return Verdict(subject.name, subject.freedom, subject.operation, law.name, said, tried, time.monotonic() - start)
    return Verdict(subject.name, subject.freedom, subject.operation, "", "", tried, time.monotonic() - start)


def run(advance: Callable[[str], None] = lambda name: None) -> tuple[list[Verdict], list[Verdict]]:
    """The verdicts on all faults and on all innocents, in their order, on every core. `advance(name)` is called as each one ends."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    verdicts = {}
    # one operation after the other: what the oracle says of its cases is kept in each process
    subjects = sorted([*FAULTS, *INNOCENTS], key=lambda each: (each.operation, isinstance(each, Fault)))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_by_name, each.name) for each in subjects]
        for future in as_completed(futures):
            verdict = future.result()
            verdicts[verdict.name] = verdict
            advance(verdict.name)
    return [verdicts[each.name] for each in FAULTS], [verdicts[each.name] for each in INNOCENTS]


def as_json(faults: list[Verdict], innocents: list[Verdict]) -> dict:
    """What --json writes."""
    rows = lambda verdicts, word: [{**asdict(verdict), word: verdict.accused} for verdict in verdicts]
    killed, accused = (sum(verdict.accused for verdict in verdicts) for verdicts in (faults, innocents))
    return {
        "killed": killed,
        "faults": rows(faults, "killed"),
        "kinds": len({verdict.kind for verdict in faults}),
        "accused": accused,
        "innocents": rows(innocents, "accused"),
    }


def _by_name(name: str) -> Verdict:
    """Functions made of steps do not travel between processes; names do."""
    for judge, subjects in ((fault, FAULTS), (innocent, INNOCENTS)):
        for subject in subjects:
            if subject.name == name:
                return judge(subject)
    raise KeyError(name)
