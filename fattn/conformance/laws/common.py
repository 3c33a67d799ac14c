"""Laws of every operation."""

from __future__ import annotations

import numpy as np

from fattn.conformance import compare
from fattn.conformance.calls import leaves
from fattn.conformance.laws.base import Law
from fattn.conformance.trial import Trial
from fattn.types import Pages, Range

FILLS = (float("nan"), float("inf"), 3.0e4, -7.0)


def twice(trial: Trial) -> None:
    """The same call twice gives the same bits, and another call of the same shape in between changes nothing."""
    first = trial.run(trial.call)
    flips = [flipped for _, flipped in trial.operation.flips(trial.call) if _same_shape(flipped, trial.call)]
    if flips:
        trial.run(flips[trial.rng().integers(len(flips))])
    compare.identical(trial.run(trial.call), first, label="second result")


def strides(trial: Trial) -> bool | None:
    """Non-contiguous arguments give the result of contiguous ones."""
    if trial.target.arrays.strided is None:
        return False
    trial.agrees(trial.run(trial.call, strided=True), label="result of strided arguments")


def unchanged(trial: Trial) -> None:
    """Arguments keep their bits, caches apart, which torch updates in place."""
    given = trial.target.convert(trial.operation, trial.call)
    before = {name: trial.target.to_numpy(value) for name, value in given.arguments.items() if not isinstance(value, Pages)}
    trial.operation.invoke(trial.target.function, given)
    for name, value in before.items():
        compare.identical(trial.target.to_numpy(given.arguments[name]), value, label=name)


def poison(trial: Trial) -> bool | None:
    """What stands in places that no query may read changes no bit: NaN, +Inf and two finite numbers are tried."""
    if trial.operation.unused(trial.call, 0.0, 0.0) is None:
        return False
    wanted = _read(trial.got)
    for index, fill in enumerate(FILLS):
        hidden = FILLS[2 + index % 2] if trial.target.finite_hidden else fill
        poisoned = trial.operation.unused(trial.call, fill, hidden)
        compare.identical(_read(trial.run(poisoned)), wanted, label=f"result with {fill} in unread places")


def arguments(trial: Trial) -> bool | None:
    """Each argument, changed once, changes the result as the oracle says."""
    flips = [flipped for name, flipped in trial.operation.flips(trial.call) if valid(flipped) and _same_static(flipped, trial.call)]
    return _follows(trial, flips)


def options(trial: Trial) -> bool | None:
    """Each static option, changed once, changes the result as the oracle says."""
    flips = [flipped for name, flipped in trial.operation.flips(trial.call) if valid(flipped) and not _same_static(flipped, trial.call)]
    return _follows(trial, flips)


def valid(call) -> bool:
    """Whether a flipped call could have been written: some masks of the flips cannot be constructed."""
    return "=-" not in repr(call.static.get("mask"))


def _read(result):
    """The result without a returned cache, which keeps what was put in its unread places."""
    return result[0] if isinstance(result, tuple) and isinstance(result[-1], Pages) else result


def _follows(trial, flips):
    if not flips:
        return False
    flipped = flips[trial.rng().integers(len(flips))]
    if trial.target.refusal is not None and trial.target.refusal(flipped) is not None:
        return False
    trial.agrees(trial.run(flipped), trial.oracle(flipped), label="result of the changed call")


def _same_static(a, b):
    return a.static == b.static and _same_shape(a, b)


def _same_shape(a, b):
    shapes = [{path: np.shape(x) for path, x in leaves(call.arguments)} for call in (a, b)]
    # a Range is static, too: another start is another call to a compiling library
    ranges = [[part for part in call.arguments.values() if isinstance(part, Range)] for call in (a, b)]
    return shapes[0] == shapes[1] and ranges[0] == ranges[1] and a.static == b.static


TWICE = Law("same call twice", "bits", twice, every=5)
STRIDES = Law("strides", "bound", strides, every=3)
UNCHANGED = Law("arguments unchanged", "bits", unchanged, every=6)
POISON = Law("poison", "bits", poison, every=3)
ARGUMENTS = Law("arguments", "bound", arguments, every=2)
OPTIONS = Law("options", "bound", options, every=3, narrow=True)
EVERYWHERE = (TWICE, STRIDES, UNCHANGED, ARGUMENTS, OPTIONS)
