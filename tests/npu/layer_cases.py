"""What the tests of npu's layer share: batches made by hand, comparison with the oracle, and a call that allows no traffic."""

import ml_dtypes
import numpy as np
import torch

import npu
import npu.emulator
import npu.emulator.launches
from fattn.types import Batch, Host, Pages
from reference.bounded import Precision

torch.set_num_threads(1)
npu.emulator.install()

INT32_MAX = 2**31 - 1
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def precision(dtype: str) -> Precision:
    return Precision(**npu.PRECISION[dtype])


def numpy_of(value):
    """A tensor as the NumPy array of the same numbers; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.float().numpy().astype(ml_dtypes.bfloat16) if value.dtype == torch.bfloat16 else value.numpy()


def pages_of(cache: Pages) -> Pages:
    return Pages(numpy_of(cache.k), numpy_of(cache.v), cache.layout, cache.block_size)


def normal(*shape, dtype="float16", seed=0, size=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(FLOATS[dtype])


def assert_within(found, expected):
    """`found` (a Partial or a tensor of npu) lies within the bound of the oracle's Bounded, and is exact where the bound is 0."""
    fields = [("out", found, expected.value, expected.bound)]
    if isinstance(found, tuple):
        fields = [(name, *(getattr(x, name) for x in (found, *expected))) for name in found._fields if getattr(found, name) is not None]
    for name, value, right, bound in fields:
        value = value.double().numpy()
        assert value.shape == right.shape, (name, value.shape, right.shape)
        with np.errstate(invalid="ignore"):
            off = np.where(value == right, 0.0, np.abs(value - right))
        worst = np.unravel_index(np.argmax(np.nan_to_num(off - bound, nan=np.inf)), off.shape) if off.size else ()
        assert (off <= bound).all(), f"{name}{list(worst)} is {value[worst]}, expected {right[worst]} within {bound[worst]}"


def batch_of(query_lens, seq_lens, *, block_size, num_blocks=None, seed=0, labels=None):
    """A batch over shuffled blocks, as an engine would hand it over: table tails hold -1 or stale ids. Block 0 is the null block."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = num_blocks or 1 + max(sum(counts), 1) + 2
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    table = np.full((len(seq_lens), max(counts, default=0) + 1), -1, np.int32)
    table[:, -1] = 999
    for row, count in enumerate(counts):
        table[row, :count] = [next(ids) for _ in range(count)]
    slots, positions, null = [], [], 0
    for row, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for p in range(s - q, s):
            positions.append(p)
            slots.append(table[row, p // block_size] * block_size + p % block_size if p >= 0 else null)
            null += p < 0
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    query_labels, key_labels = labels or ({}, {})
    return Batch(
        starts,
        np.asarray(seq_lens, np.int32),
        table,
        np.asarray(slots, np.int32),
        np.asarray(positions, np.int32),
        query_labels,
        key_labels,
        block_size=block_size,
        max_query_len=max(query_lens, default=1),
        host=Host(tuple(query_lens), tuple(seq_lens), np.asarray(slots, np.int64)),
    )


def cache_of(batch, kv_heads, head_size, *, value_size=None, layout="pbhd", dtype="float16", seed=0):
    """A cache whose rows that no length reaches are NaN."""
    value_size = value_size or head_size
    blocks = 1 + int(np.where(batch.block_table < 900, batch.block_table, 0).max(initial=0)) + 2
    live = np.zeros((blocks, batch.block_size), bool)
    for row, length in enumerate(batch.seq_lens):
        for page in range(-(-int(length) // batch.block_size)):
            live[batch.block_table[row, page], : length - page * batch.block_size] = True
    k, v = (
        normal(blocks, batch.block_size, kv_heads, size, dtype=dtype, seed=seed + i).masked_fill(
            ~torch.from_numpy(live)[..., None, None], torch.nan
        )
        for i, size in enumerate((head_size, value_size))
    )
    return npu.paged.convert(Pages(k, v, "pbhd", batch.block_size), layout=layout)


def tree_labels(parents, context):
    """(enter, exit) of draft tokens numbered depth first, and of `context` keys before them."""
    enter = np.arange(len(parents), dtype=np.int32)
    exit = enter + 1
    for child in reversed(range(len(parents))):
        if parents[child] >= 0:
            exit[parents[child]] = max(exit[parents[child]], exit[child])
    keys = {
        "enter": np.concatenate([np.zeros(context, np.int32), enter]),
        "exit": np.concatenate([np.full(context, INT32_MAX, np.int32), exit]),
    }
    return {"enter": enter, "exit": exit}, keys


def launched(function, *args, **options):
    """(result, launches by name) of a call in which the host may not read the device."""
    with npu.emulator.launches.traffic_forbidden(), npu.emulator.launches.count() as launches:
        result = function(*args, **options)
    return result, {name: number for name, number in launches.items() if number}
