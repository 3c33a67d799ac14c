"""Faults in merge, finish and empty."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fattn.conformance.faults.fault import Fault
from fattn.conformance.plain import merge as plain
from fattn.types import Partial


def _weighted(a, b, lse):
    """Both sides weighted by e^(their lse - lse), with no care for rows that saw nothing."""
    with np.errstate(invalid="ignore", over="ignore"):
        out = sum(np.exp(part.lse - lse)[..., None] * part.out for part in (a, b))
    return Partial(out.astype(a.out.dtype), lse.astype(a.lse.dtype))


def two_empties(a, b):
    """An empty side is handled, both at once are not: (-inf) - (-inf)."""
    right = plain.merge(a, b)
    both = np.isneginf(a.lse) & np.isneginf(b.lse)
    return Partial(np.where(both[..., None], np.nan, right.out).astype(a.out.dtype), np.where(both, np.nan, right.lse).astype(a.lse.dtype))


def from_a_finite_stand_in(a, b):
    """-inf is replaced by a large number first: nothing merged with nothing becomes something."""
    low = np.float32(-1e30)
    a, b = (Partial(np.where(np.isneginf(part.lse)[..., None], 0, part.out), np.maximum(part.lse, low)) for part in (a, b))
    return _weighted(a, b, np.logaddexp(a.lse, b.lse))


def reads_empty_outputs(a, b):
    """A weight of 0 is multiplied, not selected."""
    right = plain.merge(a, b)
    with np.errstate(invalid="ignore"):
        garbage = sum(np.where(np.isneginf(part.lse)[..., None], 0 * part.out, 0) for part in (a, b))
    return Partial((right.out + garbage).astype(a.out.dtype), right.lse)


def second_empty_output_is_read(a, b):
    """As above, of the second side alone."""
    right = plain.merge(a, b)
    with np.errstate(invalid="ignore"):
        garbage = np.where(np.isneginf(b.lse)[..., None], 0 * b.out, 0)
    return Partial((right.out + garbage).astype(a.out.dtype), right.lse)


def in_bfloat16(a, b):
    right = plain.merge(a, b)
    return Partial(right.out.astype(ml_dtypes.bfloat16).astype(right.out.dtype), right.lse)


def lse_of_the_larger(a, b):
    right = plain.merge(a, b)
    return Partial(right.out, np.maximum(a.lse, b.lse))


def base_two_weights(a, b):
    right = plain.merge(a, b)
    some = (a.lse > -np.inf) & (b.lse > -np.inf)
    wa = 1 / (1 + np.exp2(np.where(some, b.lse, 0) - np.where(some, a.lse, 0)))[..., None]
    return Partial(np.where(some[..., None], wa * a.out + (1 - wa) * b.out, right.out).astype(a.out.dtype), right.lse)


def small_side_is_dropped(a, b):
    """A side that weighs less than one part in 128 is left out."""
    right = plain.merge(a, b)
    for near, far in ((a, b), (b, a)):
        with np.errstate(invalid="ignore"):
            light = near.lse - far.lse > np.log(128)
        right = Partial(np.where(light[..., None], near.out, right.out), np.where(light, near.lse, right.lse))
    return right


def weights_of_the_first_head(a, b):
    """The weights of head 0 are used for every head."""
    right = plain.merge(a, b)
    first = [Partial(part.out, np.broadcast_to(part.lse[:, :1], part.lse.shape)) for part in (a, b)]
    seen = (a.lse > -np.inf) & (b.lse > -np.inf) & (a.lse[:, :1] > -np.inf) & (b.lse[:, :1] > -np.inf)
    return Partial(np.where(seen[..., None], plain.merge(*first).out, right.out), right.lse)


def equal_sides_count_once(a, b):
    """Equal log-sum-exps are taken for the same keys."""
    right = plain.merge(a, b)
    return Partial(right.out, np.where(a.lse == b.lse, a.lse, right.lse))


def sink_overflows(partial, sink=None, *, dtype):
    """The share as e^lse / (e^lse + e^sink)."""
    if sink is None:
        return plain.finish(partial, dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        share = np.exp(partial.lse) / (np.exp(partial.lse) + np.exp(sink))
    return (np.where(np.isneginf(partial.lse), 0, share)[..., None] * np.nan_to_num(partial.out)).astype(dtype)


def sink_twice(partial, sink=None, *, dtype):
    return plain.finish(partial, None if sink is None else sink + sink.dtype.type(np.log(2)), dtype=dtype)


def sink_of_the_next_head(partial, sink=None, *, dtype):
    return plain.finish(partial, None if sink is None else np.roll(sink, -1), dtype=dtype)


def sink_of_the_group(partial, sink=None, *, dtype):
    """One sink for two heads, those of a key head."""
    return plain.finish(partial, None if sink is None else sink[np.arange(sink.size) // 2 * 2], dtype=dtype)


def sink_ignored_when_negative(partial, sink=None, *, dtype):
    return plain.finish(partial, None if sink is None else np.where(sink > 0, sink, -np.inf).astype(sink.dtype), dtype=dtype)


def empty_row_reads_its_output(partial, sink=None, *, dtype):
    """A share of 0 times whatever the row holds."""
    if sink is None:
        return plain.finish(partial, dtype=dtype)
    with np.errstate(invalid="ignore"):
        return (plain.finish(partial, sink, dtype=dtype) + np.where(np.isneginf(partial.lse)[..., None], 0 * partial.out, 0)).astype(dtype)


def finish_truncates(partial, sink=None, *, dtype):
    """The cast cuts digits off instead of rounding."""
    out = plain.finish(partial, sink, dtype=np.float32)
    if np.dtype(dtype).name != "bfloat16":
        return out.astype(dtype)
    return (out.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(dtype)


def lowest_for_empty(tokens, heads, value_size, *, dtype):
    right = plain.empty(tokens, heads, value_size, dtype=dtype)
    return Partial(right.out, np.full_like(right.lse, ml_dtypes.finfo(dtype).min))


def lse_zero_for_empty(tokens, heads, value_size, *, dtype):
    right = plain.empty(tokens, heads, value_size, dtype=dtype)
    return Partial(right.out, np.zeros_like(right.lse))


def _merge(name, kind, function, why):
    return Fault(name, kind, "merge.merge", function, why)


def _finish(name, kind, function, why):
    return Fault(name, kind, "merge.finish", function, why)


FAULTS = (
    _merge("merge_of_two_empties_is_nan", "empty rows", two_empties, "(-inf) - (-inf)"),
    _merge("merge_starts_from_a_finite_stand_in", "empty rows", from_a_finite_stand_in, "-1e30 stands for -inf"),
    _merge("merge_reads_empty_outputs", "poison", reads_empty_outputs, "0 * NaN"),
    _merge("merge_reads_the_second_empty_output", "poison", second_empty_output_is_read, "one side is selected, the other multiplied"),
    _merge("merge_in_bfloat16", "low precision", in_bfloat16, "the accumulator has the input's type"),
    _merge("merge_lse_of_the_larger", "merging", lse_of_the_larger, "ln(e^a + e^b) taken for max"),
    _merge("merge_weights_in_base_two", "log-sum-exp", base_two_weights, "exp2 of natural logarithms"),
    _merge("merge_drops_a_small_side", "merging", small_side_is_dropped, "a shortcut for sides that hardly weigh"),
    _merge("merge_weights_of_the_first_head", "head map", weights_of_the_first_head, "the head axis of lse is not read"),
    _merge("merge_equal_sides_count_once", "merging", equal_sides_count_once, "equal lse taken for equal keys"),
    _finish("sink_overflows", "overflow", sink_overflows, "exponentials before the difference"),
    _finish("sink_twice", "sink", sink_twice, "added in the kernel and again at the end"),
    _finish("sink_of_the_next_head", "head map", sink_of_the_next_head, "sharded heads off by one"),
    _finish("sink_of_the_group", "head map", sink_of_the_group, "a sink for every second head"),
    _finish("sink_ignored_when_negative", "sink", sink_ignored_when_negative, "0 and below taken for no sink"),
    _finish("finish_reads_empty_rows", "poison", empty_row_reads_its_output, "0 * NaN"),
    _finish("finish_truncates", "low precision", finish_truncates, "a cast by shifting bits"),
    Fault("empty_lse_is_lowest", "empty rows", "merge.empty", lowest_for_empty, "the lowest float stands for -inf"),
    Fault("empty_lse_is_zero", "empty rows", "merge.empty", lse_zero_for_empty, "zeros all over"),
)
