"""What an operation is to the kit: its options, how a case becomes a call, and which decisions a call tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fattn.conformance.calls import Call
from fattn.conformance.cases import Case, Scalar
from fattn.types import And, Causal, Chunk, Full, Mask, Or, Same, Tree, Window, full

Flips = Iterator[tuple[str, Call]]
Lengths = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def directly(get: Callable[[str], Callable], call: Call):
    """The function of the call's name on its arguments."""
    return get(call.operation)(*call.arguments.values(), **call.static)


@dataclass(frozen=True)
class Operation:
    """One public function.

    `options` are the columns of its covering array: every value of every option is a feature. `build` makes a call from a case and nothing
    else. `lengths` gives, for a row of options, the (query length, key length) choices of each sequence. `flips` names each decision that
    a call depends on, with the call in which it is taken the other way. `plant` gives edits that make a decision visible.
    `results` says which dtype each array of the result has: "float32", "accumulator" (the Partial's out) or "input". `settled` blanks what
    a result may hold anything in. `places` is the mask under which an engine would place the call's batch. `also` are cases that are too
    large or too special for an option: their values alone are compared.
    """

    name: str
    options: Mapping[str, tuple[Scalar, ...]]
    build: Callable[[Case], Call]
    flips: Callable[[Call], Flips]
    results: Callable[[Case], Mapping[str, str]]
    lengths: Callable[[Case], Lengths] = lambda case: ()
    generators: tuple[str, ...] = ("gaussian",)
    edits: tuple[str, ...] = ()
    plant: Callable[[Case, Call, list[Call]], tuple[str, ...]] = lambda case, call, weak: ()
    unused: Callable[[Call, float, float], Call | None] = lambda call, fill, hidden: None
    invoke: Callable[[Callable[[str], Callable], Call], Any] = directly
    places: Callable[[Call], Mask | None] = lambda call: None
    settled: Callable[[Call, Any], Any] = lambda call, result: result
    also: tuple[Case, ...] = ()


def near(size: int) -> tuple[int, ...]:
    """Lengths worth trying up to `size`: all of it first, the lengths just below (where blocks end), half, one and none."""
    usual = (size, size - 1, size - 2, size - 3, size // 2, size // 3)
    return (*(max(n, 1) for n in (*usual, *usual)), 1, 0)


def mask_flips(mask: Mask) -> Iterator[tuple[str, Mask]]:
    """The mask with one of its decisions taken the other way: each edge moved by one, each label ignored, "and" for "or"."""
    match mask:
        case Full():
            yield "full hides what comes later", Causal()
        case Causal():
            yield "causal sees one more", Window(None, 1)
            yield "causal hides the diagonal", Window(None, -1)
        case Window(left, right):
            for name, (a, b) in (("left", (1, 0)), ("right", (0, 1))):
                side = left if name == "left" else right
                if side is not None:
                    yield f"window {name} + 1", Window(left if left is None else left + a, right if right is None else right + b)
                    yield f"window {name} - 1", Window(left if left is None else left - a, right if right is None else right - b)
        case Chunk(size):
            yield "chunk + 1", Chunk(size + 1)
            yield "chunk ignored", full()
        case Same() | Tree():
            yield "label ignored", full()
        case And(first, second) | Or(first, second):
            kind = type(mask)
            yield ("and for or" if kind is Or else "or for and"), (And if kind is Or else Or)(first, second)
            for name, flipped in mask_flips(first):
                yield name, kind(flipped, second)
            for name, flipped in mask_flips(second):
                yield name, kind(first, flipped)


def rolled(call: Call, name: str, axis: int = 0) -> Flips:
    """One argument with its rows (or another axis) moved round by one, where that can matter."""
    array = call.arguments.get(name)
    if array is not None and array.ndim > axis and array.shape[axis] > 1:
        yield f"{name} rolled along axis {axis}", call.change({name: np.roll(array, 1, axis)})


def tree_labels(rng: np.random.Generator, nodes: int):
    """(enter, exit) of a random tree of `nodes` nodes: j is an ancestor of i, or i itself, iff enter[j] <= enter[i] < exit[j]."""
    parents = [int(rng.integers(-1, n)) for n in range(nodes)]
    enter, exit = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
    clock = 1

    def visit(node):
        nonlocal clock
        enter[node], clock = clock, clock + 1
        for child in range(node + 1, nodes):
            if parents[child] == node:
                visit(child)
        exit[node] = clock

    for node in range(nodes):
        if parents[node] == -1:
            visit(node)
    return enter, exit


def labels_at(rng: np.random.Generator, mask: Mask, length: int, context: int) -> dict[str, np.ndarray]:
    """The labels that `mask` reads, for positions 0..length - 1, of which those from `context` on are nodes of a tree."""
    found = {}
    if "segment" in mask.labels():
        cuts = np.sort(rng.integers(0, max(length, 1), 2))
        found["segment"] = (np.searchsorted(cuts, np.arange(length), side="right") % 3).astype(np.int32)
    if "enter" in mask.labels():
        enter, exit = tree_labels(rng, length - context)
        found["enter"] = np.concatenate([np.zeros(context, np.int32), enter])
        found["exit"] = np.concatenate([np.full(context, 2**31 - 1, np.int32), exit])
    return found
