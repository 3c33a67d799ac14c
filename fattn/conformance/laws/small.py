"""Laws of masks, merging and rotary embedding."""

from __future__ import annotations

import numpy as np

from fattn.conformance import compare
from fattn.conformance.calls import Call
from fattn.conformance.cases import MASKS
from fattn.conformance.compare import Mismatch
from fattn.conformance.laws.base import Law
from fattn.conformance.oracle import split
from fattn.conformance.trial import Trial
from fattn.types import Partial, Unsupported, band
from reference import merge as reference
from reference.bounded import Bounded


def compressed_is_visible(trial: Trial) -> bool | None:
    """The compressed form of a mask shows what `visible` shows, over 2048 x 2048."""
    size, static = 2048, trial.call.static
    expanded = trial.run(Call("masks.expand", {}, {"mask": static["mask"], "query_len": size, "kv_len": size}))
    every = np.arange(size, dtype=np.int32)
    seen = trial.run(Call("masks.visible", {"queries": every, "keys": every}, {"mask": static["mask"]}))
    compare.identical(expanded, seen, label="expanded mask")


def others_refused(trial: Trial) -> bool | None:
    """A mask that is not one band is refused with Unsupported."""
    for name, mask in MASKS.items():
        if band(mask) is None:
            try:
                trial.run(Call("masks.compressed", {}, {"mask": mask}))
            except Unsupported:
                continue
            raise Mismatch(f"masks.compressed took {name}, which is not one band")


def pairwise(trial: Trial) -> bool | None:
    """Whether a query sees a key depends on that query and that key alone: some of each show the same."""
    from fattn.conformance.laws.attention import take_side

    queries, keys = trial.call.arguments.values()
    t, s = trial.expected.value.shape
    rng = trial.rng()
    some, others = (rng.permutation(n)[: max(n // 2, 1)] for n in (t, s))
    got = trial.run(trial.call.change({"queries": take_side(queries, some), "keys": take_side(keys, others)}))
    compare.identical(got, trial.expected.value[np.ix_(some, others)], label="visible of some")


def commutative(trial: Trial) -> bool | None:
    """merge(a, b) = merge(b, a)."""
    a, b = trial.call.arguments.values()
    trial.agrees(trial.run(trial.call.change({"a": b, "b": a})), label="merge(b, a)")


def associative(trial: Trial) -> bool | None:
    """merge(merge(a, b), c) = merge(a, merge(b, c)), both within the bound of three merged."""
    a, b = trial.call.arguments.values()
    c = Partial(np.roll(a.out, 1, 0) * np.float32(0.5), np.roll(b.lse, 1, 0))
    c = Partial(np.where((c.lse == -np.inf)[..., None], np.float32(0), c.out), c.lse)
    run = lambda x, y: trial.run(Call("merge.merge", {"a": x, "b": y}, {}))
    whole = reference.merge(reference.merge(a, b), c)
    other = reference.merge(a, reference.merge(b, c))
    trial.agrees(run(run(a, b), c), split(whole), label="merge(merge(a, b), c)")
    trial.agrees(run(a, run(b, c)), split(Bounded(whole.value, other.bound)), label="merge(a, merge(b, c))")


def identity(trial: Trial) -> bool | None:
    """merge(a, empty) = merge(empty, a) = a, whatever the empty one holds in its out."""
    a = trial.call.arguments["a"]
    t, h, dv = a.out.shape
    nothing = trial.run(Call("merge.empty", {"tokens": t, "heads": h, "value_size": dv}, {"dtype": "float32"}))
    junk = Partial(np.full_like(a.out, np.nan), np.full_like(a.lse, -np.inf))
    for label, pair in {"merge(a, empty)": (a, nothing), "merge(empty, a)": (nothing, a), "merge(a, junk)": (a, junk)}.items():
        got = trial.run(Call("merge.merge", dict(zip("ab", pair, strict=True)), {}))
        trial.agrees(got, split(reference.merge(a, reference.empty(t, h, dv, dtype="float32"))), label=label)


def orthogonal(trial: Trial) -> bool | None:
    """Rotation keeps lengths: every head's norm is what it was."""
    x, got = trial.call.arguments["x"].astype(np.float64), trial.run(trial.call).astype(np.float64)
    bound = trial.expected.bound
    # tables that are rounded turn by a matrix that is not quite orthogonal
    cos, sin = (trial.call.arguments[name].astype(np.float64) for name in ("cos", "sin"))
    stretch = np.abs(cos**2 + sin**2 - 1).max(initial=0) * (x**2).sum(-1)
    error = np.abs((got**2).sum(-1) - (x**2).sum(-1))
    allowed = (2 * np.abs(got) * bound + bound**2).sum(-1) + stretch + 1e-12
    if (error > allowed).any():
        at = np.unravel_index(int((error - allowed).argmax()), error.shape)
        raise Mismatch(f"squared norm of x[{at[0]}, {at[1]}] changed by {error[at]:.3g}, at most {allowed[at]:.3g} is rounding")


def inverse(trial: Trial) -> bool | None:
    """Turned by an angle and back, x is itself: what the oracle makes of the turned x, within its bound."""
    back = trial.call.change({"x": trial.run(trial.call), "sin": -trial.call.arguments["sin"]})
    trial.agrees(trial.run(back), trial.oracle(back), label="x turned and turned back")


def relative(trial: Trial) -> bool | None:
    """The inner product of two turned rows depends on the difference of their positions alone."""
    call = trial.call
    x, r = call.arguments["x"].astype(np.float32), call.arguments["cos"].shape[1]
    frequencies = (10000.0 ** -(np.arange(r) / r)).astype(np.float32)
    t = len(x)
    products = []
    for shift in (0, 37):
        turned = []
        for start, rows in ((5, x), (0, x[::-1].copy())):
            positions = np.arange(t, dtype=np.int32) + np.int32(shift + start)
            table = Call("rope.table", {"positions": positions, "frequencies": frequencies}, {"dtype": "float32"})
            cos, sin = trial.run(table)
            turned.append(trial.run(Call(call.operation, {"x": rows, "cos": cos, "sin": sin}, {})).astype(np.float64))
        products.append((turned[0] * turned[1]).sum(-1))
    size = np.linalg.norm(x, axis=-1) * np.linalg.norm(x[::-1], axis=-1)
    # angles up to t + 42 radians in float32, 4 roundings each, and the products' own
    allowed = size * 2.0**-24 * (8 * (t + 42) + 64) * 2
    error = np.abs(products[0] - products[1])
    if (error > allowed).any():
        moved = f"inner products moved by {error.max():.3g} when both positions moved by 37"
        raise Mismatch(f"{moved}, at most {allowed.max():.3g} is rounding")


VISIBLE = (Law("pairwise rule", "bits", pairwise, every=3, narrow=True),)
COMPRESSED = (Law("others refused", "bits", others_refused, every=40),)
EXPAND = (Law("expanded = visible", "bits", compressed_is_visible, every=8),)
MERGE = (
    Law("commutative", "bound", commutative, every=2),
    Law("associative", "bound", associative, every=2),
    Law("identity", "bound", identity, every=2),
)
TURN = (
    Law("orthogonal", "bound", orthogonal, every=2),
    Law("inverse", "bound", inverse, every=3),
    Law("relative", "bound", relative, every=6),
)
