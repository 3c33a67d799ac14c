"""Times of short functions beside each other: contenders take turns, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Microseconds(NamedTuple):
    """Of one call: the least over all rounds, which disturbances cannot lower, and the median."""

    least: float
    median: float


def timed(contenders: Mapping[str, Callable[[], object]], *, rounds: int, calls: int = 20) -> dict[str, Microseconds]:
    """Microseconds of a call of each contender, from `rounds` turns of `calls` calls."""
    found = {name: [] for name in contenders}
    for function in contenders.values():
        function()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, function in contenders.items():
                began = time.perf_counter_ns()
                for _ in range(calls):
                    function()
                found[name].append((time.perf_counter_ns() - began) / calls / 1e3)
    finally:
        gc.enable()
    return {name: Microseconds(min(all_), statistics.median(all_)) for name, all_ in found.items()}
