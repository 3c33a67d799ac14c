"""Drawing cases: the covering array fixes the options, Hypothesis draws lengths, generator, seed and edits."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import lru_cache
from threading import Lock

from fattn.conformance import covering
from fattn.conformance.cases import Case
from fattn.conformance.operations import OPERATIONS
from fattn.conformance.operations.base import Operation
from fattn.conformance.targets import Target


def rows(operation: Operation) -> list[Case]:
    """One case for every row of the operation's covering array: options alone."""
    names = list(operation.options)
    return [Case(operation.name, tuple(zip(names, row, strict=True))) for row in covering.committed(operation.name)]


def also(name: str, seed: int, target: Target) -> list[Case]:
    """The operation's cases beyond its covering array, those in float64 where the target declares it."""
    found = [replace(case, seed=seed) for case in OPERATIONS[name].also]
    return [case for case in found if target.float64 or ("dtype", "float64") not in case.options]


_ONE_AT_A_TIME = Lock()  # Hypothesis keeps its own state


@lru_cache(maxsize=256)
def cases(name: str, examples: int, seed: int) -> tuple[Case, ...]:
    """At least `examples` cases of an operation: an equal number in every row, rows in turn."""
    operation = OPERATIONS[name]
    table = rows(operation)
    each = -(-examples // len(table))
    with _ONE_AT_A_TIME:
        drawn = [_row(operation, row, each, zlib.crc32(f"{name}:{index}:{seed}".encode())) for index, row in enumerate(table)]
    return tuple(case for turn in range(each) for of_row in drawn for case in of_row[turn : turn + 1])


def _row(operation, row, count, seed):
    import hypothesis
    from hypothesis import strategies as st

    found = []
    # Hypothesis begins with the simplest example: it should not be the same for every row and seed
    turn = seed % len(operation.generators)
    chosen = operation.generators[turn:] + operation.generators[:turn]
    sizes = [st.tuples(*(st.sampled_from(choices) for choices in pair)) for pair in operation.lengths(row)]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        st.tuples(*sizes),
        st.sampled_from(chosen),
        st.integers(0, 2**31 - 1),
        st.lists(st.sampled_from(operation.edits), max_size=2, unique=True) if operation.edits else st.just([]),
    )
    def collect(lengths, generator, array_seed, edits):
        found.append(Case(row.operation, row.options, lengths, generator, (array_seed + seed) % 2**31, tuple(edits)))

    collect()
    return found
