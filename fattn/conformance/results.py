"""Results of checks: one row per operation and check, and the counts of a headline."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Result:
    """One check of one operation.

    `check` is "value", the name of a law, or "option=value" of a feature. `status` is "passed", "refused", "failed", "absent" (the target
    lacks the operation, or another that the check needs) or "unreached" (no example of the feature passed). `decisive` counts the examples
    that a wrong decision would have changed by at least eight bounds, `decisive_output` those where the output alone shows it, without the
    log-sum-exp. `reason` says why it was refused, or the smallest input that failed and the file to replay. `core`: refusing it would be a
    failure.
    """

    operation: str
    check: str
    status: str
    examples: int
    decisive: int
    seconds: float
    reason: str = ""
    core: bool = True
    decisive_output: int = 0


def headline(results: list[Result]) -> str:
    """How many core and optional checks passed, of how many, and how many need a function that is not there."""
    core, optional = ([result for result in results if result.core == kind and result.status != "absent"] for kind in (True, False))
    passed = lambda part: sum(result.status == "passed" for result in part)
    absent = sum(result.status == "absent" for result in results)
    return f"core {passed(core)}/{len(core)}, optional {passed(optional)}/{len(optional)}" + (f", absent {absent}" if absent else "")


def as_json(target: str, provider: str, seed: int, results: list[Result]) -> dict:
    """What --json writes."""
    return {"target": target, "provider": provider, "seed": seed, "headline": headline(results), "results": [asdict(r) for r in results]}
