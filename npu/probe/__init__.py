"""Asks the operators of this host whether the limits and the emulator's assumptions hold, one small call at a time.

On an Ascend host the answers are a device's. On any other they come from the emulation, and say so: they test the probe, nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from npu.emulator import assumptions
from npu.limits import LIMITS
from npu.probe.outcome import DIFFERS, HOLDS, NOT_ASKED, REFUSED, Outcome

ANSWERS = (HOLDS, DIFFERS, REFUSED, NOT_ASKED)
LIMIT, ASSUMPTION = "limit", "assumption"


class Answer(NamedTuple):
    """What the operators say to one question. `evidence` is what the statement rested on before it was asked."""

    kind: str
    id: str
    question: str
    answer: str
    variant: str | None
    evidence: str
    message: str
    seconds: float


class Report(NamedTuple):
    """Answers, and of what: `emulated` ones are no device's."""

    provider: str
    emulated: bool
    soc: str
    cann: str
    torch_npu: str
    answers: tuple[Answer, ...]


def questions() -> list[tuple[str, str]]:
    """(kind, id) of every limit and every assumption, in the order in which they are asked: what may harm a device comes last."""
    from npu.probe import of_assumptions

    last = [id for id in of_assumptions.QUESTIONS if id in {one.id for one in assumptions.TABLE}]
    unknown = [one.id for one in assumptions.TABLE if one.id not in last]
    return [*((LIMIT, name) for name in LIMITS), *((ASSUMPTION, id) for id in unknown + last)]


def ask(
    device: str, only: Collection[str] = (), progress: Callable[[Answer], None] = lambda answer: None, *, soc: str = "a2"
) -> tuple[Answer, ...]:
    """Answers to all questions, or to those of these ids, from the operators for tensors on `device`, of the chip `soc`.

    Where the device fails, the question that broke it is "refused", and the rest is "not asked". Raises ValueError for an unknown id.
    """
    known = questions()
    for id in only:
        if id not in {name for _, name in known}:
            raise ValueError(f"no limit or assumption {id!r}; there are {', '.join(name for _, name in known)}")
    answers, failed = [], ""
    for kind, id in known:
        if only and id not in only:
            continue
        start = time.monotonic()
        if failed:
            found = Outcome(NOT_ASKED, message=f"the device failed at {failed!r}; ask again in a new process: --only {id!r}")
        else:
            found, failed = _outcome(kind, id, device)
        answers.append(_answer(kind, id, found, time.monotonic() - start, soc))
        progress(answers[-1])
    return tuple(answers)


def write(path: str, report: Report):
    """Writes a report as JSON."""
    content = {**report._asdict(), "answers": [answer._asdict() for answer in report.answers]}
    with open(path, "w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def read(path: str) -> Report:
    """The report in a file that `write` made. Raises OSError, or ValueError that says what is wrong with the file."""
    try:
        with open(path) as file:
            content = json.load(file)
        answers = tuple(Answer(**answer) for answer in content.pop("answers"))
        report = Report(**content, answers=answers)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a report of python -m npu probe ({error})") from error
    for answer in answers:
        if answer.answer not in ANSWERS:
            raise ValueError(f"{path}: the answer to {answer.id!r} is {answer.answer!r}, not one of {', '.join(ANSWERS)}")
    return report


def variants(report: Report) -> list[str]:
    """The emulator's variants ("id:name") that follow the answers."""
    return [f"{answer.id}:{answer.variant}" for answer in report.answers if answer.kind == ASSUMPTION and answer.variant]


def unfollowed(report: Report) -> list[Answer]:
    """Answers that are not what `npu` and the emulator believe, and that no variant follows."""
    return [answer for answer in report.answers if answer.answer in (DIFFERS, REFUSED) and not answer.variant]


def never_probed(report: Report | None) -> list[str]:
    """Ids of limits and assumptions that no device has answered in this report; all of them where there is none, or an emulation's."""
    asked = set() if report is None or report.emulated else {answer.id for answer in report.answers if answer.answer != NOT_ASKED}
    return [id for _, id in questions() if id not in asked]


def summary(answers: Sequence[Answer]) -> str:
    """How many answers of which kind."""
    return ", ".join(f"{sum(answer.answer == name for answer in answers)} {name}" for name in ANSWERS)


def dependent(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those variants among `names` under which `npu` may not be used for something, with what."""
    return ((name, assumptions.DEPENDED_ON[name]) for name in names if name in assumptions.DEPENDED_ON)


def _outcome(kind, id, device) -> tuple[Outcome, str]:
    """The outcome, and the id again where the device failed."""
    from npu.probe import of_assumptions, of_limits

    try:
        return (of_limits if kind == LIMIT else of_assumptions).ask(id, device), ""
    except RuntimeError as error:
        return Outcome(REFUSED, message=f"the device failed: {error}"), id


def _answer(kind, id, found, seconds, soc):
    if kind == LIMIT:
        limit = LIMITS[id]
        question, evidence = f"{limit.operator}: is it so that {limit.text}?", limit.evidence_on(soc)
    else:
        one = next(one for one in assumptions.TABLE if one.id == id)
        question, evidence = one.question, one.evidence
    return Answer(kind, id, question, found.answer, found.variant, evidence, found.message, round(seconds, 3))
