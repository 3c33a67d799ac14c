"""Refusals: what a target does not take is predicted, verified, noted by feature, and replaced by what it does take."""

from __future__ import annotations

from dataclasses import dataclass

from fattn.conformance.cases import Case, Scalar
from fattn.conformance.compare import Mismatch
from fattn.conformance.required import alternatives, required
from fattn.conformance.targets import Target
from fattn.conformance.trial import Trial
from fattn.types import Unsupported


@dataclass
class Feature:
    """How one value of one option fared: examples that passed, and why it was refused where it was."""

    examples: int = 0
    decisive: int = 0
    refused: str = ""


Features = dict[tuple[str, Scalar], Feature]


def taken(target: Target, case: Case, features: Features) -> Trial | None:
    """The case on the target, or the nearest case that it takes: what it refuses on the way is noted in `features`.

    None where it takes none, which is then noted for required features too. Raises Mismatch where a refusal is not as predicted.
    """
    trial = Trial(case, target)
    why = refusal(trial)
    if why is None:
        return trial
    for other in alternatives(target.name, case):
        trial = Trial(other, target)
        if refusal(trial) is None:
            for feature in (set(case.options) - set(other.options)) & features.keys():
                alone = refusal(Trial(other.option(*feature), target))
                features[feature].refused = features[feature].refused or alone or why
            return trial
    core = required(target.name, case.operation)
    for name, value in case.options:
        if value in core.get(name, ()):
            features[name, value].refused = features[name, value].refused or why
    return None


def refusal(trial: Trial) -> str | None:
    """Why the target refuses the case, or None. Without predictions it is tried: what it returned is kept in the trial.

    Raises Mismatch where the target ran what it was predicted to refuse.
    """
    target = trial.target
    if target.excluded is not None and (reason := target.excluded(trial.call)) is not None:
        return reason
    if target.refusal is None:
        raised = _raised(trial)
        return None if raised is None else str(raised)
    predicted = target.refusal(trial.call)
    if predicted is None:
        return None
    raised = _raised(trial)
    if raised is None:
        raise Mismatch(f"predicted to be refused ({predicted}), but it was not")
    return str(raised)


def _raised(trial) -> Unsupported | None:
    try:
        trial.got  # noqa: B018
    except Unsupported as error:
        return error
    except Exception:  # whatever else goes wrong is for the checks to find
        return None
    return None
