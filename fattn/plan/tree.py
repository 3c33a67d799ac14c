"""Draft trees as labels: ancestry becomes a comparison of two numbers, a pairwise rule that survives any split of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32


def tree_labels(parents: Sequence[int]) -> tuple[Int32[np.ndarray, "n"], Int32[np.ndarray, "n"]]:
    """(enter, exit) of every node, such that j is i or an ancestor of i iff enter[j] <= enter[i] < exit[j].

    `parents[i]` is the index of node i's parent, -1 for a root. Raises ValueError for an index out of range or a cycle.
    """
    n = len(parents)
    children: list[list[int]] = [[] for _ in range(n + 1)]  # the last is the common root, which index -1 names
    for i, parent in enumerate(parents):
        if not -1 <= parent < n:
            raise ValueError(f"parent of query {i} is {parent}; it must be -1 (the context) or an index below {n}")
        children[parent].append(i)
    enter, exit = np.full(n, -1, np.int32), np.zeros(n, np.int32)
    clock, stack = 0, [(i, False) for i in reversed(children[-1])]
    while stack:
        node, leaving = stack.pop()
        if leaving:
            exit[node] = clock
            continue
        enter[node], clock = clock, clock + 1
        stack.append((node, True))
        stack.extend((child, False) for child in reversed(children[node]))
    if (unreached := np.flatnonzero(enter < 0)).size:
        raise ValueError(f"query {int(unreached[0])} is its own ancestor; parents must lead to -1 (the context)")
    return enter, exit
