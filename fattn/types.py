"""The vocabulary of every layer: partial results, positions, masks, batches, caches and refusal.

Host-side and array-library free. `fattn` (JAX), `reference` (NumPy) and `npu` (torch) all import their words from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Float, Int32

Array = Any  # each layer's own: jax.Array, numpy.ndarray or torch.Tensor


def static(**options):
    """A dataclass field that is part of a value's type: hashed, compared, never traced."""
    return field(metadata={"static": True}, **options)


def host_only(**options):
    """A dataclass field for `npu` alone: JAX drops it, because a static value that changes each step would compile anew each step."""
    return field(metadata={"drop": True}, compare=False, repr=False, **options)


class Unsupported(NotImplementedError):
    """An implementation cannot do what was asked: which argument, its value, the limit, and what would work instead."""

    def __init__(self, argument: str, value: object, limit: str, instead: str):
        super().__init__(f"{argument}={value!r} is not supported: {limit}. Instead: {instead}")
        self.argument, self.value, self.limit, self.instead = argument, value, limit, instead


class Partial(NamedTuple):
    """Attention over some of the keys, in a form that merges with attention over the others.

    `lse` is the natural log of the sum of exponentials of the visible scores, without any sink. A row that sees no key is exactly
    out = 0, lse = -inf. `lse` is None where it was not asked for; merge and sinks refuse such a Partial.
    """

    out: Float[Array, "t h dv"]
    lse: Float[Array, "t h"] | None


@dataclass(frozen=True)
class Range:
    """The positions start, start + 1, ..., start + size - 1, all known before tracing. Raises ValueError for a float or a negative size."""

    start: int = static()
    size: int = static()

    def __post_init__(self):
        for name in ("start", "size"):
            if isinstance(getattr(self, name), bool | float):
                raise ValueError(f"Range {name} must be an integer, got {getattr(self, name)!r}")
        if self.size < 0:
            raise ValueError(f"Range size must not be negative, got {self.size}")


@dataclass(frozen=True)
class Tokens:
    """Positions and the labels that travel with them. A negative position is padding: it sees nothing and nothing sees it."""

    pos: Range | Int32[Array, "n"]
    labels: Mapping[str, Int32[Array, "n"]]


# --- masks -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A rule that says which keys a query sees. Static and hashable; combine with & and |."""

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)

    def labels(self) -> frozenset[str]:
        """Names of the labels that the rule reads."""
        return frozenset()


@dataclass(frozen=True)
class Full(Mask):
    """full()."""


@dataclass(frozen=True)
class Causal(Mask):
    """causal()."""


@dataclass(frozen=True)
class Window(Mask):
    """window(left, right)."""

    left: int | None
    right: int | None


@dataclass(frozen=True)
class Chunk(Mask):
    """chunk(size)."""

    size: int


@dataclass(frozen=True)
class Same(Mask):
    """same(label)."""

    label: str

    def labels(self) -> frozenset[str]:
        return frozenset({self.label})


@dataclass(frozen=True)
class Tree(Mask):
    """tree(enter, exit)."""

    enter: str
    exit: str

    def labels(self) -> frozenset[str]:
        return frozenset({self.enter, self.exit})


@dataclass(frozen=True)
class And(Mask):
    """first & second."""

    first: Mask
    second: Mask

    def labels(self) -> frozenset[str]:
        return self.first.labels() | self.second.labels()


@dataclass(frozen=True)
class Or(Mask):
    """first | second."""

    first: Mask
    second: Mask

    def labels(self) -> frozenset[str]:
        return self.first.labels() | self.second.labels()


def full() -> Mask:
    """Every key that is not padding."""
    return Full()


def causal() -> Mask:
    """Key j is visible to query position p iff j <= p."""
    return Causal()


def window(left: int | None, right: int | None) -> Mask:
    """Key j is visible to query position p iff p - left <= j <= p + right; None leaves that side open.

    Inclusive on both sides: a model's "window of W tokens" is window(W - 1, 0). Raises ValueError for a negative side.
    """
    for name, side in (("left", left), ("right", right)):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(f"window {name} must be a count of tokens >= 0, or None for an open side; got {side!r}")
    return Window(left, right)


def chunk(size: int) -> Mask:
    """Key j is visible to query position p iff floor(j / size) == floor(p / size)."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"chunk size must be a count of tokens >= 1, got {size!r}")
    return Chunk(size)


def same(label: str) -> Mask:
    """Key j is visible to query i iff both carry the same value of `label` (documents of a packed row, images, users)."""
    return Same(label)


def tree(enter: str, exit: str) -> Mask:
    """Key j is visible to query i iff it is an ancestor of it, or itself: enter[j] <= enter[i] < exit[j].

    `plan.batch.tree_labels` makes the labels from parents; keys of the context carry (0, INT32_MAX).
    """
    return Tree(enter, exit)


class Band(NamedTuple):
    """window(left, right) with open sides as None; what a conjunction of causal and window masks amounts to."""

    left: int | None
    right: int | None


def band(mask: Mask) -> Band | None:
    """The one band that a mask is, or None where it is not just a band."""
    match mask:
        case Full():
            return Band(None, None)
        case Causal():
            return Band(None, 0)
        case Window(left, right):
            return Band(left, right)
        case And(first, second):
            a, b = band(first), band(second)
            return None if a is None or b is None else Band(_tighter(a.left, b.left), _tighter(a.right, b.right))
    return None


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


class Compressed(NamedTuple):
    """The form in which fused operators take a mask: a mode, a band, and one fixed triangle whatever the length (True = hidden)."""

    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    atten_mask: Any | None  # Bool[Array, "2048 2048"]


# --- caches and batches ----------------------------------------------------------------------------------------------------

LAYOUTS = ("hpbd", "pbhd", "phbd")


@dataclass(frozen=True)
class Pages:
    """A paged KV cache: `num_blocks` blocks of `block_size` tokens, in one of three axis orders.

    hpbd [hk, p, b, d] is nearest to a CPU's or GPU's bandwidth; pbhd [p, b, hk, d] is vLLM's (BnBsH); phbd [p, hk, b, d] is BnNBsD.
    """

    k: Float[Array, "..."]
    v: Float[Array, "..."]
    layout: str = static()
    block_size: int = static()


@dataclass(frozen=True)
class Host:
    """What `npu` needs of a batch on the host: operators take lengths as lists of Python ints."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    slots: Any  # int64 numpy [t]; padding goes to distinct rows of reserved null blocks, so -1 never reaches an operator
    exact: bool = True  # False: lengths are upper bounds, which operators that need exact lengths refuse
    constants: Mapping[str, Any] = field(default_factory=dict)  # tensors that npu.place made for this step or bucket


@dataclass(frozen=True)
class Batch:
    """One step of an engine: sequences packed end to end, their lengths, and where their keys lie in the paged cache.

    Query i of a sequence stands at position seq_len - query_len + i, so causal is aligned bottom-right. `seq_lens` counts keys,
    this step's tokens included. Padding sequences have seq_len 0. Entries of `block_table` at or beyond ceil(seq_len / block_size) and
    slots below 0 are never followed. Built and validated by `fattn.plan.batch.build`.
    """

    query_start_loc: Int32[Array, "b+1"]
    seq_lens: Int32[Array, "b"]
    block_table: Int32[Array, "b p"]
    slot_mapping: Int32[Array, "t"]
    positions: Int32[Array, "t"]  # for rotary embedding: seq_len - query_len + i, or context + depth in a draft tree
    query_labels: Mapping[str, Int32[Array, "t"]] = field(default_factory=dict)
    key_labels: Mapping[str, Int32[Array, "b p*block_size"]] = field(default_factory=dict)
    block_size: int = static(kw_only=True)
    max_query_len: int = static(kw_only=True)  # an upper bound over sequences that have keys, bucketed: it is compiled in
    host: Host | None = host_only(default=None, kw_only=True)


@dataclass(frozen=True)
class StandardConfig:
    """A standard attention layer. `rotary` pairs halves ("half", NeoX), neighbours ("interleaved", GPT-J), or is None.

    Raises ValueError for sizes that do not fit together.
    """

    hidden_size: int = static()
    heads: int = static()
    kv_heads: int = static()
    head_size: int = static()
    scale: float = static()
    mask: Mask = static()
    softcap: float | None = static(default=None)
    rotary: str | None = static(default="half")
    rotary_size: int | None = static(default=None)  # leading dims that turn; None: all of head_size
    rotary_theta: float = static(default=10000.0)

    def __post_init__(self):
        for name in ("hidden_size", "heads", "kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.rotary not in ("half", "interleaved", None):
            raise ValueError(f"rotary must be 'half', 'interleaved' or None, got {self.rotary!r}")
        if self.rotary_size is not None and (self.rotary_size % 2 or not 2 <= self.rotary_size <= self.head_size):
            raise ValueError(f"rotary_size must be even, from 2 to head_size={self.head_size}, or None for all; got {self.rotary_size!r}")
