"""Making a failing case small: fewer rows, keys, heads and dims, plainer options, small integers, while the same check fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fattn.conformance.cases import Case, numbers
from fattn.conformance.operations.base import Operation

SIMPLE = {
    "heads": ("1/1", "2/1"),
    "sizes": ("1/1", "2/2", "4/4", "16/16"),
    "mask": ("full", "causal"),
    "positions": ("range", "array"),
    "layout": ("pbhd",),
    **dict.fromkeys(("softcap", "bias", "slopes", "sinks", "biases"), (None,)),
}


def minimise(operation: Operation, case: Case, fails: Callable[[Case], bool], *, seconds: float = 10.0) -> Case:
    """The smallest case found within `seconds` on which `fails` still holds. `fails(case)` must hold to begin with."""
    end, found = time.monotonic() + seconds, case
    shrunk = True
    while shrunk and time.monotonic() < end:
        shrunk = False
        for smaller in steps(operation, found):
            if time.monotonic() > end:
                break
            if smaller != found and fails(smaller):
                found, shrunk = smaller, True
                break
    return found


def steps(operation: Operation, case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first."""
    for edit in case.edits:
        yield replace(case, edits=tuple(other for other in case.edits if other != edit))
    names = dict(case.options)
    if "shape" in names and not case.lengths and len(numbers(case["shape"])) > 2:
        yield from _smaller_shapes(case)
    elif "shape" in names:
        queries, keys = numbers(case["shape"])
        lengths = case.lengths[0] if case.lengths else (queries, keys)
        if tuple(lengths) != (queries, keys):
            yield _resized(case, *lengths)
        halves = ((-(-queries // 2), keys), (queries, -(-keys // 2)))
        for t, s in ((1, 1), (1, keys), (queries, 1), *halves, (queries - 1, keys), (queries, keys - 1)):
            if t > 0 and s > 0 and (t, s) != (queries, keys):
                yield _resized(case, t, s)
    yield from _fewer_sequences(case)
    for name, simple in SIMPLE.items():
        if name in names:
            choices = simple[: simple.index(case[name])] if case[name] in simple else simple
            for value in choices:
                yield case.option(name, value)
    if case.generator not in ("integers", "gaussian"):
        yield replace(case, generator="gaussian")
    if case.generator == "gaussian" and "integers" not in operation.generators and len(operation.generators) > 1:
        yield replace(case, generator="integers")
    if case.seed > 3:
        for seed in range(3):
            yield replace(case, seed=seed)


def _smaller_shapes(case: Case) -> Iterator[Case]:
    sizes = numbers(case["shape"])
    for index, size in enumerate(sizes):
        for smaller in {1, size // 2} - {0, size}:
            yield case.option("shape", "x".join(str(n) for n in (*sizes[:index], smaller, *sizes[index + 1 :])))


def _resized(case: Case, queries: int, keys: int) -> Case:
    return replace(case.option("shape", f"{queries}x{keys}"), lengths=((queries, keys),))


def _fewer_sequences(case: Case) -> Iterator[Case]:
    if len(case.lengths) < 2:
        return
    for index in range(len(case.lengths)):
        if case.lengths[index] != (0, 0):
            lengths = list(case.lengths)
            lengths[index] = (0, 0)
            yield replace(case, lengths=tuple(lengths))
    for index, (queries, keys) in enumerate(case.lengths):
        for smaller in ((queries, keys // 2), (queries, keys - 1), (queries // 2, keys), (queries - 1, keys)):
            if min(smaller) >= 0 and smaller != (queries, keys):
                lengths = list(case.lengths)
                lengths[index] = smaller
                yield replace(case, lengths=tuple(lengths))
