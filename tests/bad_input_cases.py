"""Bad input, once for all layers: good arguments for every function, and the ways to spoil them that each layer must refuse."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from fattn.plan import batch as plan
from fattn.types import Pages, causal

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 64, 128, 6
QUERY_LENS, SEQ_LENS, TABLES = [3, 2], [130, 2], [[4, 1], [2]]
ROWS, KEYS = 5, 7


@dataclass(frozen=True)
class Layer:
    """A package, its arrays from NumPy's and back, and what it makes of a batch that the plan built."""

    package: ModuleType
    array: Callable
    numpy: Callable
    place: Callable

    def call(self, function: str, changes: dict):
        """Calls `function` on good arguments, some of them changed: a callable gets the good one. Returns the cache as it is then."""
        module, name = function.split(".")
        arguments = good(function) | {"mask": causal(), "scale": 0.125}
        for argument, change in changes.items():
            arguments[argument] = change(arguments[argument]) if callable(change) else change
        if function == "paged.write":
            del arguments["mask"], arguments["scale"]
        native = {argument: self._native(value) for argument, value in arguments.items()}
        if "batch" in native:
            native["batch"] = self.place(native["batch"], native["mask"])
        before = self._bytes(native)
        positional = [value for argument, value in native.items() if argument not in ("mask", "scale", "softcap")]
        options = {argument: native[argument] for argument in ("mask", "scale", "softcap") if argument in native}
        try:
            getattr(getattr(self.package, module), name)(*positional, **options)
        finally:
            assert self._bytes(native) == before, "something was written"

    def _native(self, value):
        if isinstance(value, Pages):
            return replace(value, k=self.array(value.k), v=self.array(value.v))
        return self.array(value) if isinstance(value, np.ndarray) else value

    def _bytes(self, native):
        cache = native.get("cache")
        return cache and (self.numpy(cache.k).tobytes(), self.numpy(cache.v).tobytes())


def rows(count, heads, *, size=HEAD_SIZE, dtype=np.float16):
    return np.random.default_rng(count * 100 + heads).standard_normal((count, heads, size)).astype(dtype)


def cache(layout="pbhd", dtype=np.float16):
    """A cache that is full of numbers, so that anything written shows."""
    lengths = {"p": BLOCKS, "b": BLOCK_SIZE, "h": KV_HEADS, "d": HEAD_SIZE}
    shape = [lengths[axis] for axis in layout]
    k, v = np.random.default_rng(0).standard_normal((2, *shape)).astype(dtype)
    return Pages(k, v, layout=layout, block_size=BLOCK_SIZE)


def batch():
    return plan.build(QUERY_LENS, SEQ_LENS, TABLES, block_size=BLOCK_SIZE, num_blocks=BLOCKS, null_blocks=[0])


def good(function: str) -> dict:
    """Arguments that every layer accepts, by name and in order."""
    q, k, v = rows(ROWS, HEADS), rows(ROWS, KV_HEADS), rows(ROWS, KV_HEADS)
    match function:
        case "dense.attend":
            keys = {"k": rows(KEYS, KV_HEADS), "v": rows(KEYS, KV_HEADS)}
            return {"q": q, **keys, "q_pos": np.arange(2, KEYS, dtype=np.int32), "k_pos": np.arange(KEYS, dtype=np.int32)}
        case "paged.write":
            return {"cache": cache(), "k": k, "v": v, "slots": batch().slot_mapping}
        case "paged.attend":
            return {"q": q, "cache": cache(), "batch": batch()}
        case "standard.attend_and_write":
            return {"q": q, "k": k, "v": v, "cache": cache(), "batch": batch()}
    raise AssertionError(function)


def swapped(array):
    """[heads, rows, size] where [rows, heads, size] is meant."""
    return array.swapaxes(0, 1)


def spoiled(field, index, value):
    """A batch with one number of one array changed, on the host's side as well."""

    def change(good):
        array = getattr(good, field).copy()
        array[index] = value
        host = good.host
        if field == "seq_lens":
            host = replace(host, seq_lens=tuple(array.tolist()))
        if field == "slot_mapping":
            host = replace(host, slots=array.astype(np.int64))
        return replace(good, **{field: array}, host=host)

    return change


SWAPPED_CACHE = Pages(cache("phbd").k, cache("phbd").v, layout="pbhd", block_size=BLOCK_SIZE)

# kind: (function, what is spoiled, what the error says)
SHAPES = {
    "queries and positions disagree": ("dense.attend", {"q_pos": lambda p: p[:-1]}, "q_pos has 4 positions for 5 rows of q"),
    "keys and positions disagree": ("dense.attend", {"k_pos": lambda p: p[:-1]}, "k_pos has 6 positions for 7 rows of k"),
    "keys and values disagree": ("dense.attend", {"v": lambda v: v[:-1]}, r"k and v disagree in rows or heads.*7, 2, 64.*6, 2, 64"),
    "sizes disagree": ("dense.attend", {"q": rows(ROWS, HEADS, size=32)}, r"q and k disagree in head size.*32.*64"),
    "heads that do not divide": ("dense.attend", {"q": rows(ROWS, 3)}, "q has 3 heads, which is not a multiple of k's 2"),
    "no key heads": ("dense.attend", {"k": rows(KEYS, 0), "v": rows(KEYS, 0)}, "q has 4 heads, which is not a multiple of k's 0"),
    "a layout swapped": ("dense.attend", {"q": swapped}, r"layout is \[rows, heads, size\]"),
    "keys swapped": ("dense.attend", {"k": swapped, "v": swapped}, r"layout is \[rows, heads, size\]"),
    "an axis missing": ("dense.attend", {"q": lambda q: q[0]}, r"q must be \[rows, heads, size\], got shape \[4, 64\]"),
    "dtypes mixed": ("dense.attend", {"k": lambda k: k.astype(np.float32)}, "float16.*float32"),
    "no float": ("dense.attend", {"q": lambda q: q.astype(np.int32)}, "q has dtype int32"),
    "positions that are no integers": ("dense.attend", {"q_pos": np.ones(ROWS, np.float32)}, r"positions must be .*float32\[5\]"),
    "a bias of another shape": ("dense.attend", {"bias": rows(3, ROWS, size=KEYS)}, r"bias has shape \[3, 5, 7\], .*\[4, 5, 7\]"),
    "a mask as a bias": ("dense.attend", {"bias": np.ones((ROWS, KEYS), bool)}, "bias has dtype bool; .*mask"),
    "a cap of zero": ("dense.attend", {"softcap": 0.0}, "softcap must be positive, or None for no cap; got 0.0"),
    "slots and rows disagree": ("paged.write", {"slots": lambda s: s[:-1]}, r"slots.*4"),
    "slots that are no integers": ("paged.write", {"slots": lambda s: s.astype(np.float32)}, r"slots must be .*float32\[5\]"),
    "keys of another head count are written": ("paged.write", {"k": rows(ROWS, 4)}, r"k has .*4, 64"),
    "values of another size are written": ("paged.write", {"v": rows(ROWS, KV_HEADS, size=32)}, r"v has .*2, 32"),
    "values of fewer rows are written": ("paged.write", {"v": lambda v: v[:-1]}, r"k .*5, 2, 64.* v .*4, 2, 64"),
    "another dtype is written": ("paged.write", {"k": lambda k: k.astype(np.float32), "v": lambda v: v.astype(np.float32)}, "float32"),
    "a cache in another layout is written": ("paged.write", {"cache": SWAPPED_CACHE}, r"cache.k .*6, 2, 128, 64.*pbhd"),
    "rows and batch disagree": ("paged.attend", {"q": lambda q: q[:-1]}, r"\b4\b.* rows|rows.*\b4\b"),
    "a batch of another block size": ("paged.attend", {"batch": lambda b: replace(b, block_size=256)}, "block_size=256.*block_size.*128"),
    "paged heads that do not divide": ("paged.attend", {"q": rows(ROWS, 3)}, "q has 3 heads, which is not a multiple of .*2"),
    "paged queries swapped": ("paged.attend", {"q": swapped}, "rows|heads"),
    "paged dtypes mixed": ("paged.attend", {"q": lambda q: q.astype(np.float32)}, "float32.*float16"),
    "a cache in another layout is read": ("paged.attend", {"cache": SWAPPED_CACHE}, r"cache.k .*6, 2, 128, 64.*pbhd"),
    "slopes of another head count": ("paged.attend", {"slopes": np.ones(3, np.float32)}, r"slopes has shape \[3\], but .*4"),
    "the layer's keys disagree": ("standard.attend_and_write", {"k": lambda k: k[:-1], "v": lambda v: v[:-1]}, "rows|slots"),
    "the layer's heads do not divide": ("standard.attend_and_write", {"q": rows(ROWS, 3)}, "q has 3 heads.*2"),
    "the layer's queries swapped": ("standard.attend_and_write", {"q": swapped}, "rows|heads"),
    "the layer's dtypes mixed": ("standard.attend_and_write", {"q": lambda q: q.astype(np.float32)}, "float32.*float16"),
    "the layer's cache in another layout": ("standard.attend_and_write", {"cache": SWAPPED_CACHE}, r"cache.k .*6, 2, 128, 64.*pbhd"),
    "sinks of another head count": ("standard.attend_and_write", {"sinks": np.ones(3, np.float32)}, r"sinks? has shape \[3\].*4"),
}

# what only those see that read numbers on the host: the oracle, npu (through npu.place), and plan.check for everybody
NUMBERS = {
    "a block id past the end": (spoiled("block_table", (0, 1), BLOCKS), r"block_table\[0, 1\]\s*=\s*6"),
    "a negative block id": (spoiled("block_table", (1, 0), -1), r"block_table\[1, 0\]\s*=\s*-1"),
    "an overlong length": (spoiled("seq_lens", 0, 300), r"seq_lens\[0\]\s*=\s*300"),
    "a negative length": (spoiled("seq_lens", 1, -3), r"seq_lens\[1\]\s*=\s*-3"),
}
