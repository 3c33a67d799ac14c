"""Comparison with an oracle's value and bound: shape, dtype, places of NaN and infinity, then elementwise error, in that order."""

from __future__ import annotations

import numpy as np

from fattn.conformance.calls import bits, is_float, leaves


class Mismatch(AssertionError):
    """What an implementation returned is not what was asked: where, and by how much."""


def within(got, value, bound, *, dtypes: dict[str, str], label: str = "result") -> float:
    """The worst |got - value| / bound over all arrays. Raises Mismatch where a shape, a dtype or a special value differs, or it exceeds 1.

    `bound` None asks for the same bits as `value`. `dtypes` names the expected dtype of arrays by path ("" for a bare array).
    """
    found, wanted = dict(leaves(got)), dict(leaves(value))
    if set(found) != set(wanted):
        raise Mismatch(f"{label} has parts {sorted(found)}, expected {sorted(wanted)}")
    bounds = {} if bound is None else dict(leaves(bound))
    worst = 0.0
    for path, array in found.items():
        name = label + path
        if tuple(array.shape) != tuple(wanted[path].shape):
            raise Mismatch(f"{name} has shape {list(array.shape)}, expected {list(wanted[path].shape)}")
        if path in dtypes and array.dtype.name != dtypes[path]:
            raise Mismatch(f"{name} has dtype {array.dtype.name}, expected {dtypes[path]}")
        if path in bounds and is_float(wanted[path]):
            worst = max(worst, _close(array, wanted[path], bounds[path], name))
        else:
            identical(array, wanted[path], label=name)
    return worst


def identical(got, value, *, label: str = "result"):
    """Raises Mismatch unless every array has the same bits."""
    wanted = dict(leaves(value))
    for path, array in leaves(got):
        other = wanted[path]
        if array.shape != other.shape or array.dtype != other.dtype:
            raise Mismatch(f"{label}{path} is {array.dtype}{list(array.shape)}, expected {other.dtype}{list(other.shape)}")
        different = bits(array) != bits(other)
        if different.any():
            at = tuple(np.argwhere(different)[0])
            count = int(different.sum())
            raise Mismatch(f"{label}{path}{_index(at)} is {array[at]}, expected the bits of {other[at]} ({count} of {array.size} differ)")


def _close(got, value, bound, name) -> float:
    got = got.astype(np.float64)
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        strange = test(got) != test(value)
        if strange.any():
            at = tuple(np.argwhere(strange)[0])
            count = f"{int(strange.sum())} of {got.size} places of {kind} differ"
            raise Mismatch(f"{name}{_index(at)} is {got[at]}, expected {value[at]} ({count})")
    ratio = ratios(got, value, bound)
    if ratio.size and ratio.max() > 1:
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        off = f"|difference| {abs(got[at] - value[at]):.3g} is {ratio[at]:.3g} times the bound {bound[at]:.3g}"
        count = f"{int((ratio > 1).sum())} of {got.size} beyond"
        raise Mismatch(f"{name}{_index(at)} is {got[at]:.9g}, expected {value[at]:.9g}: {off} ({count})")
    return float(ratio.max(initial=0))


def ratios(got, value, bound) -> np.ndarray:
    """|got - value| / bound elementwise; 0 where both are the same infinity or equal, inf where they differ and the bound is 0."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(got == value, 0.0, np.abs(got - value))
        return np.where(error == 0, 0.0, np.where(np.isnan(error), np.inf, error / bound))


def _index(at) -> str:
    return str([int(i) for i in at])
