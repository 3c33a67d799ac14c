"""Laws of attention over keys held whole."""

from __future__ import annotations

import numpy as np

from fattn.conformance import compare, oracle
from fattn.conformance.calls import Call
from fattn.conformance.laws.base import Law
from fattn.conformance.plain.masks import positions
from fattn.conformance.trial import Trial
from fattn.types import Partial, Tokens


def permutation(trial: Trial) -> bool | None:
    """Keys in another order, with their positions, values, labels and biases, give the same result."""
    keys = len(trial.call.arguments["k"])
    if keys < 2 or trial.case["positions"] == "range":
        return False
    trial.agrees(trial.run(take_keys(trial.call, trial.rng().permutation(keys))), label="result of permuted keys")


def split(trial: Trial) -> bool | None:
    """Keys split anywhere, attended separately and merged, give the whole."""
    keys = len(trial.call.arguments["k"])
    if keys < 2 or _recompiled(trial):
        return False
    at = keys // 3 + 1
    take = keep_keys if trial.target.arrays.compiles else take_keys
    parts = [take(trial.call, side) for side in (np.arange(at), np.arange(at, keys))]
    got = trial.run(Call("merge.merge", dict(zip("ab", (trial.run(part) for part in parts), strict=True)), {}))
    function = lambda name: oracle.function(name, precision=trial.precision)
    bound = function("merge.merge")(*(function("dense.attend")(*part.arguments.values(), **part.static) for part in parts)).bound
    compare.within(got, trial.expected.value, bound, dtypes={}, label="merged result")


def heads(trial: Trial) -> bool | None:
    """A key head that serves several query heads is that key head repeated for each."""
    q, k, v = (trial.call.arguments[name] for name in "qkv")
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return False
    repeated = trial.call.change({"k": np.repeat(k, group, axis=1), "v": np.repeat(v, group, axis=1)})
    trial.agrees(trial.run(repeated), label="result of repeated heads")


def alone(trial: Trial) -> bool | None:
    """A query alone has the result that it has among others."""
    queries = len(trial.call.arguments["q"])
    if queries < 2 or _recompiled(trial):
        return False
    i = int(trial.rng().integers(queries))
    if trial.target.arrays.compiles:
        got = trial.run(trial.call.change({"q_pos": keep_side(trial.call.arguments["q_pos"], [i])}))
        got = Partial(*(array[i : i + 1] for array in got))
    else:
        got = trial.run(take_queries(trial.call, [i]))
    expected = oracle.Expected(*(Partial(*(array[i : i + 1] for array in part)) for part in trial.expected))
    trial.agrees(got, expected, label=f"row {i} alone")


def take_keys(call: Call, rows) -> Call:
    """The call with some of its keys, in that order."""
    k, v, bias = (call.arguments[name] for name in ("k", "v", "bias"))
    if bias is not None and bias.shape[-1] > 1:
        bias = bias[..., rows]
    return call.change({"k": k[rows], "v": v[rows], "k_pos": take_side(call.arguments["k_pos"], rows), "bias": bias})


def keep_keys(call: Call, rows) -> Call:
    """The call with some of its keys where they were, all others padding: its shapes are the same."""
    return call.change({"k_pos": keep_side(call.arguments["k_pos"], rows)})


def take_queries(call: Call, rows) -> Call:
    """The call with some of its queries, in that order."""
    bias = call.arguments["bias"]
    if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
        bias = bias[..., rows, :]
    return call.change({"q": call.arguments["q"][rows], "q_pos": take_side(call.arguments["q_pos"], rows), "bias": bias})


def take_side(side, rows):
    """Some tokens of a query or key side, as arrays."""
    taken = positions(side)[rows].astype(np.int32)
    return Tokens(taken, {name: label[rows] for name, label in side.labels.items()}) if isinstance(side, Tokens) else taken


def keep_side(side, rows):
    """A query or key side as arrays, with every token but some at position -1, where padding stands."""
    pos = positions(side)
    kept = np.where(np.isin(np.arange(len(pos)), rows), pos, -1).astype(np.int32)
    return Tokens(kept, side.labels) if isinstance(side, Tokens) else kept


def _recompiled(trial):
    """Whether positions as arrays are another compilation."""
    return trial.target.arrays.compiles and trial.case["positions"] == "range"


DENSE = (
    Law("permuted keys", "bound", permutation, every=3),
    Law("split keys", "bound", split, every=6),
    Law("repeated heads", "bound", heads, every=3, narrow=True),
    Law("row alone", "bound", alone, every=3),
)
