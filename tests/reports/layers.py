"""A layer as the reports see it: its modules, its arrays, and where it may differ from the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import reference.dense
import reference.paged
from fattn.plan import batch as plan
from fattn.types import Batch, Mask, Pages, Partial, Range, Tokens
from reference.bounded import FLOAT32, Bounded, Precision


class Report(NamedTuple):
    """A public report: its case, and the faults of its kind that the case must notice (names in fattn.conformance.faults)."""

    name: str
    case: Callable
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """`array` and `numpy` convert arrays, keeping strides where the library has them; `place` makes a planned batch the layer's own.

    `block_size` is the one that the layer takes where a report asks for another (None: any). `same_bits` says that a row has the same bits
    in every company. `refuses` names the arguments that it refuses, and `out_of_range_slots` whether write takes slots that write nothing.
    """

    name: str
    masks: Any
    dense: Any
    merge: Any
    rope: Any
    paged: Any
    standard: Any
    array: Callable[[np.ndarray], Any] = lambda x: x
    numpy_of: Callable[[Any], np.ndarray] = np.asarray
    place: Callable[[Batch, Mask], Batch] = lambda batch, mask: batch
    dtype: str = "float32"
    precision: Precision = FLOAT32
    head_size: int = 8
    block_size: int | None = None
    layouts: tuple[str, ...] = ("hpbd", "pbhd", "phbd")
    same_bits: bool = True
    out_of_range_slots: bool = True
    wide_partials: bool = True  # partials come in float32; False: in the operator's dtype, which the layer declares
    refuses: frozenset[str] = frozenset()

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    def block(self, size: int) -> int:
        """The block size that stands for a report's `size`."""
        return size if self.block_size is None else self.block_size

    def normal(self, seed: int, *shape: int) -> np.ndarray:
        """Gaussian numbers that the layer's dtype holds exactly, as NumPy."""
        return self.rounded(np.random.default_rng(seed).standard_normal(shape))

    def rounded(self, numbers) -> np.ndarray:
        return np.asarray(numbers).astype(np.dtype(self.dtype))

    def numpy(self, value):
        """A result of the layer in NumPy: of an oracle's Bounded the value."""
        if isinstance(value, Bounded):
            value = value.value
        if isinstance(value, Partial):
            return Partial(self.numpy(value.out), None if value.lse is None else self.numpy(value.lse))
        if isinstance(value, Pages):
            return replace(value, k=self.numpy(value.k), v=self.numpy(value.v))
        if isinstance(value, tuple):
            return tuple(self.numpy(part) for part in value)
        return self.numpy_of(value)

    def tokens(self, side):
        """Positions or Tokens of NumPy arrays as the layer's."""
        if isinstance(side, Tokens):
            return Tokens(self.tokens(side.pos), {name: self.ints(labels) for name, labels in side.labels.items()})
        return side if isinstance(side, Range) else self.ints(side)

    def ints(self, numbers):
        return self.array(np.asarray(numbers, np.int32))

    def cache(self, k: np.ndarray, v: np.ndarray) -> Pages:
        """Pages [p b hk d] of the layer from NumPy arrays."""
        return Pages(self.array(k.copy()), self.array(v.copy()), layout="pbhd", block_size=k.shape[1])

    def partial(self, out, lse) -> Partial:
        return Partial(self.array(np.asarray(out, np.float32)), self.array(np.asarray(lse, np.float32)))


def of_package(name: str, **differences) -> Layer:
    """The layer of a package whose modules have the names of fattn's."""
    modules = {module: importlib.import_module(f"{name}.{module}") for module in MODULES}
    return Layer(name, **modules, **differences)


MODULES = ("masks", "dense", "merge", "rope", "paged", "standard")


def with_function(layer: Layer, operation: str, function: Callable, name: str) -> Layer:
    """The layer with one of its functions, such as "dense.attend", replaced."""
    module, attribute = operation.split(".")
    replaced = SimpleNamespace(**{**vars(getattr(layer, module)), attribute: function})
    return replace(layer, name=name, **{module: replaced})


# --- calls: NumPy in, NumPy out --------------------------------------------------------------------------------------------------


def attend(layer: Layer, q, k, v, q_pos, k_pos, bias=None, *, mask: Mask, scale=None, softcap=None) -> Partial:
    """The layer's dense.attend."""
    q, k, v = (layer.array(x) for x in (q, k, v))
    bias = None if bias is None else layer.array(bias)
    scale = layer.scale if scale is None else scale
    sides = layer.tokens(q_pos), layer.tokens(k_pos)
    return layer.numpy(layer.dense.attend(q, k, v, *sides, bias, mask=mask, scale=scale, softcap=softcap))


def oracle(layer: Layer, q, k, v, q_pos, k_pos, bias=None, *, mask: Mask, scale=None, softcap=None) -> Bounded:
    """What dense.attend should return, and how far from it the layer may be."""
    scale = layer.scale if scale is None else scale
    return reference.dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap, precision=layer.precision)


class Step(NamedTuple):
    """A batch over a filled cache: queries [t h d], cache [p b hk d] and the batch, all in NumPy."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    batch: Batch


def step(layer: Layer, query_lens, seq_lens, *, block_size: int, heads=4, kv_heads=2, blocks=None, tables=None, seed=0) -> Step:
    """A step whose sequences lie in blocks dealt from the back; the blocks that no sequence owns are the first `null` ones."""
    pages = [-(-n // block_size) for n in seq_lens]
    blocks = sum(pages) + 2 if blocks is None else blocks
    if tables is None:
        free = list(range(blocks))[::-1]
        tables = [[free.pop(0) for _ in range(n)] for n in pages]
    null = sorted(set(range(blocks)) - {block for table in tables for block in table})
    batch = plan.build(query_lens, seq_lens, tables, block_size=block_size, num_blocks=blocks, null_blocks=null)
    d = layer.head_size
    k, v = (layer.normal(seed + i, blocks, block_size, kv_heads, d) for i in (1, 2))
    return Step(layer.normal(seed, sum(query_lens), heads, d), k, v, batch)


def paged_attend(layer: Layer, step: Step, *, mask: Mask, slopes=None, scale=None, softcap=None, lse=True) -> Partial:
    """The layer's paged.attend."""
    batch = layer.place(step.batch, mask)
    slopes = None if slopes is None else layer.array(np.asarray(slopes, np.float32))
    scale = layer.scale if scale is None else scale
    cache = layer.cache(step.k, step.v)
    return layer.numpy(layer.paged.attend(layer.array(step.q), cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse))


def paged_oracle(layer: Layer, step: Step, *, mask: Mask, slopes=None, scale=None, softcap=None) -> Bounded:
    """What paged.attend should return: the oracle's dense.attend of each sequence over rows that are looked up one token at a time."""
    scale = layer.scale if scale is None else scale
    parts, block, row = [], step.batch.block_size, 0
    for starts, length, table in zip(_spans(step.batch), step.batch.seq_lens, step.batch.block_table, strict=True):
        rows, length, row = slice(*starts), int(length), row + 1
        k, v = ([cache[table[j // block], j % block] for j in range(length)] for cache in (step.k, step.v))
        shape = (length, *step.k.shape[2:])
        sides = Range(length - (rows.stop - rows.start), rows.stop - rows.start), Range(0, length)
        bias = None if slopes is None else reference.dense.alibi(np.asarray(slopes), *sides, precision=layer.precision)
        keys, values = (np.array(x, step.k.dtype).reshape(shape) for x in (k, v))
        parts.append(oracle(layer, step.q[rows], keys, values, *sides, bias, mask=mask, scale=scale, softcap=softcap))
    return Bounded(*(Partial(*(np.concatenate(x) for x in zip(*side, strict=True))) for side in zip(*parts, strict=True)))


def _spans(batch):
    starts = np.asarray(batch.query_start_loc).tolist()
    return list(zip(starts[:-1], starts[1:], strict=True))


# --- comparisons -----------------------------------------------------------------------------------------------------------------


def exact(got, value):
    """Same shape, same numbers."""
    got, value = np.asarray(got, np.float64), np.asarray(value, np.float64)
    assert got.shape == value.shape, f"shape {got.shape}, not {value.shape}"
    assert np.array_equal(got, value), f"{got} is not exactly {value}"


def close(got, expected: Bounded):
    """Same shape, -inf at the same places, elsewhere finite and within the bound. A Partial's parts each."""
    if isinstance(got, Partial):
        for part in Partial._fields:
            close(getattr(got, part), Bounded(getattr(expected.value, part), getattr(expected.bound, part)))
        return
    got, value = np.asarray(got, np.float64), np.asarray(expected.value, np.float64)
    assert got.shape == value.shape, f"shape {got.shape}, not {value.shape}"
    empty = np.isneginf(value)
    assert np.array_equal(np.isneginf(got), empty), f"-inf at {np.argwhere(np.isneginf(got) != empty).tolist()} differs"
    assert np.isfinite(got[~empty]).all(), f"not finite: {got}"
    error = np.abs(got[~empty] - value[~empty])
    bound = np.broadcast_to(expected.bound, value.shape)[~empty]
    assert (error <= bound).all(), f"off by {error.max()}, {np.nanmax(error / np.maximum(bound, 1e-300)):.3g} times the bound"


def empty_rows(partial: Partial, rows):
    """These rows see nothing: out exactly 0, lse exactly -inf."""
    exact(partial.out[rows], np.zeros_like(partial.out[rows]))
    exact(partial.lse[rows], np.full_like(partial.lse[rows], -np.inf))


def same(layer: Layer, got: Partial, other: Partial, expected: Bounded):
    """The same bits where the layer promises them, else both within the oracle's bound."""
    close(got, expected)
    close(other, expected)
    if layer.same_bits:
        exact(got.out, other.out)
        exact(got.lse, other.lse)


def raises(error, call: Callable) -> Exception:
    """The error of this type that `call` raises."""
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__} was raised")
