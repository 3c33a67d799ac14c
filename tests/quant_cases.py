"""Int8 caches as every layer has to read them: a step over two sequences, in each form of scales, made of NumPy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fattn.plan import batch as plan
from fattn.types import Batch, Mask, Pages, causal, window
from reference import quant as oracle
from reference.bounded import FLOAT32

HEADS, KV_HEADS, BLOCK = 4, 2, 16
RNG = np.random.default_rng(45)
# what a scale is given for: nothing alike, each head, each channel of each head, and the same with offsets
STATIC = {
    "one": (np.float32(0.25), np.float32(0.5), None, None),
    "a head": (np.array([[0.25], [0.0625]], np.float32), np.array([[0.5], [0.125]], np.float32), None, None),
    "a channel": (RNG.uniform(0.01, 0.1, (2, 64)), RNG.uniform(0.01, 0.1, (2, 64)), None, None),
    "a channel, offset": (
        RNG.uniform(0.01, 0.1, (2, 64)),
        RNG.uniform(0.01, 0.1, (2, 64)),
        RNG.integers(-30, 30, (2, 64)),
        RNG.uniform(-30, 30, (2, 64)),
    ),
    "a head, offset of values": (np.array([[0.25], [0.0625]]), np.float32(0.5), None, np.float32(-20.0)),
}
FORMS = (*STATIC, "a token")


class Step(NamedTuple):
    """Integers in a cache, what they mean, and a batch of queries over them. `k` and `v` are new rows for the batch's slots."""

    q: np.ndarray
    cache: Pages
    scales: oracle.Scales
    batch: Batch
    mask: Mask
    k: np.ndarray
    v: np.ndarray


def step(
    form: str, *, size: int = 64, layout: str = "pbhd", block: int = BLOCK, dtype=np.float32, decode: bool = False, seed: int = 0
) -> Step:
    """Two sequences of 21 and 37 keys, in scattered blocks; queries of a decode step, or of a chunk of prefill."""
    rng = np.random.default_rng(seed)
    blocks, counts = 9, [1, 1] if decode else [3, 5]
    tables = [[5, 2, 8], [1, 7, 4]]
    batch = plan.build(counts, [21, 37], tables, block_size=block, num_blocks=blocks)
    k8, v8 = (rng.integers(-128, 128, (blocks, block, KV_HEADS, size), dtype=np.int8) for _ in range(2))
    if form == "a token":
        own = [rng.uniform(0.01, 0.1, (blocks, block, KV_HEADS)).astype(np.float32) for _ in range(2)]
        scales = oracle.Scales(*own)
    else:
        given = (None if part is None else np.asarray(part, np.float32) for part in STATIC[form])
        scales = oracle.Scales(*(part if part is None or part.ndim == 0 else part[..., :size] for part in given))
    rows = sum(counts)
    q, k, v = (rng.standard_normal((rows, n, size)).astype(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    cache = Pages(*(np.transpose(pages, ["pbhd".index(axis) for axis in layout]).copy() for pages in (k8, v8)), layout, block)
    return Step(0.3 * q, cache, scales, batch, window(25, 0) if decode else causal(), 3 * k, 3 * v)


def plain_numbers(s: Step) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that a cache in layout pbhd means, in float64, said without the oracle: [p b hk d]."""
    found = []
    for pages, scale, offset in ((s.cache.k, s.scales.k, s.scales.k_offset), (s.cache.v, s.scales.v, s.scales.v_offset)):
        pages = np.transpose(pages, [s.cache.layout.index(axis) for axis in "pbhd"]).astype(np.float64)
        scale = np.asarray(scale, np.float64)
        found.append((pages - (0 if offset is None else offset)) * (scale[..., None] if scale.ndim == 3 else scale))
    return tuple(found)


def assert_attends(module: Any, native, numpy_of, place, s: Step, *, precision=FLOAT32, sizes=1.0):
    """module.attend is within the oracle's bound on this step."""
    expected = oracle.attend(s.q, s.cache, s.scales, s.batch, mask=s.mask, scale=0.2, precision=precision)
    cache = Pages(native(s.cache.k), native(s.cache.v), s.cache.layout, s.cache.block_size)
    scales = module.Scales(*(None if part is None else native(part) for part in s.scales))
    found = module.attend(native(s.q), cache, scales, place(s.batch, s.mask), mask=s.mask, scale=0.2)
    for name, ours, right, bound in zip(("out", "lse"), found, expected.value, expected.bound, strict=True):
        off = np.abs(numpy_of(ours).astype(np.float64) - right)
        assert (off <= sizes * bound).all(), f"{name}: off by {off.max()}, bound {bound.flat[off.argmax()]}"


def assert_writes(module: Any, native, numpy_of, s: Step, slots: np.ndarray):
    """module.write leaves the bytes, and the scales, that the oracle's does."""
    expected, scales = oracle.write(s.cache, s.scales, s.k, s.v, slots)
    cache = Pages(native(s.cache.k.copy()), native(s.cache.v.copy()), s.cache.layout, s.cache.block_size)
    held = module.Scales(*(None if part is None else native(part.copy()) for part in s.scales))
    found, found_scales = module.write(cache, held, native(s.k), native(s.v), native(slots))
    for ours, right in zip((found.k, found.v, *found_scales), (expected.k, expected.v, *scales), strict=True):
        assert (ours is None) == (right is None)
        if right is not None:
            np.testing.assert_array_equal(numpy_of(ours), right)
