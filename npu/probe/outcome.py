"""What an operator answers to a question."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from npu._errors import device_failed
from npu.probe.calls import ERRORS

HOLDS, DIFFERS, REFUSED, NOT_ASKED = "holds", "differs", "refused", "not asked"


class Outcome(NamedTuple):
    """The answer; the name of what holds instead, where the emulator can follow it; and what the operator said or gave."""

    answer: str
    variant: str | None = None
    message: str = ""


class Unaskable(Exception):
    """This host's operators cannot be asked the question; the text says why."""


class Trial(NamedTuple):
    """One call: what it is, and a function of the device that runs it and returns "" where the result is right, else what is wrong."""

    says: str
    run: Callable[[str], str]


def of_limit(device: str, inside: tuple[Trial, ...], outside: tuple[Trial, ...]) -> Outcome:
    """Whether what the limit allows runs, with right results, and what it forbids is refused.

    Raises RuntimeError where the device fails.
    """
    refusals = []
    for trial in inside:
        try:
            wrong = trial.run(device)
        except ERRORS as error:
            _go_on_after(error)
            return Outcome(REFUSED, message=f"{trial.says} is within the limit, but refused: {error}")
        if wrong:
            return Outcome(DIFFERS, message=f"{trial.says} is within the limit, but {wrong}")
    for trial in outside:
        try:
            wrong = trial.run(device)
        except ERRORS as error:
            _go_on_after(error)
            refusals.append(f"{trial.says}: {error}")
            continue
        return Outcome(DIFFERS, message=f"{trial.says} is beyond the limit, but taken, and " + (wrong or "the result is right"))
    return Outcome(HOLDS, message="; ".join(refusals))


def of_assumption(device: str, ask: Callable[[str], str], belief: str, variants: tuple[str, ...]) -> Outcome:
    """The answer where `ask` returns the name of what it saw: the belief, one of the variants, or words for something else."""
    try:
        seen = ask(device)
    except Unaskable as error:
        return Outcome(NOT_ASKED, message=str(error))
    except ERRORS as error:
        _go_on_after(error)
        return Outcome(REFUSED, message=str(error))
    if seen == belief:
        return Outcome(HOLDS, message=seen)
    if seen in variants:
        return Outcome(DIFFERS, seen, f"{seen}, not {belief}")
    return Outcome(DIFFERS, message=f"{seen}, which is neither {belief} nor a variant of the emulator")


def _go_on_after(error):
    """Raises the error again where the device failed: nothing that it says afterwards would be an answer."""
    if isinstance(error, RuntimeError) and device_failed(error):
        raise error
