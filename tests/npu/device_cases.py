"""One call of every function of npu, on any device: the same values each time, so that devices and compilers can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from layer_cases import batch_of, cache_of, normal
from torch.utils._pytree import tree_leaves, tree_map_only

import npu
from fattn.types import Pages, Range, StandardConfig, Tokens, causal, same, window

CONFIG = StandardConfig(hidden_size=32, heads=4, kv_heads=2, head_size=64, scale=0.1, mask=causal(), rotary="half")
HEAD = {"mask": causal(), "scale": 0.1}


class Case(NamedTuple):
    """`run`(*`arguments`) calls one function; what of the call is static is in `run`."""

    run: Callable
    arguments: tuple


def cases(device: str) -> dict[str, Case]:
    """Name to case, every tensor on `device`."""
    move = lambda value: tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
    q, k, v = move((normal(5, 4, 64, seed=1), normal(9, 2, 64, seed=2), normal(9, 2, 64, seed=3)))
    p, j = move((torch.arange(4, 9, dtype=torch.int32), torch.arange(9, dtype=torch.int32)))
    segments = move((torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0] * 6 + [1] * 3)))
    sinks, slopes = move((normal(4, seed=4).float(), npu.dense.alibi_slopes(4)))
    rows, keys, angles = move((normal(6, 4, 64, seed=5), normal(6, 2, 64, seed=6), normal(6, 16, seed=7).float()))
    mixed, pages = paged(device, [3, 3], [50, 130], HEAD["mask"], 64)
    write, written = paged(device, [3, 3], [50, 130], HEAD["mask"], 64)
    packed, packed_pages = paged(device, [3, 1, 5], [50, 130, 5], window(20, 0), 128)
    decode, decode_pages = paged(device, [1, 1], [50, 130], window(20, 0), 64)
    partial = npu.dense.attend(q, k, v, Range(4, 5), Range(0, 9), **HEAD)
    weights = move(npu.standard.Weights(*(normal(*shape, seed=8).float() * 0.1 for shape in ((32, 256), (32, 128), (32, 128), (256, 32)))))
    prepared = npu.standard.prepare(weights, config=CONFIG)
    return {
        "masks.visible": Case(lambda p, j: npu.masks.visible(p, j, mask=causal() | window(3, 0)), (p, j)),
        "masks.visible, labels": Case(
            lambda p, j, a, b: npu.masks.visible(Tokens(p, {"segment": a}), Tokens(j, {"segment": b}), mask=same("segment")),
            (p, j, *segments),
        ),
        "dense.attend": Case(lambda q, k, v: npu.dense.attend(q, k, v, Range(4, 5), Range(0, 9), **HEAD), (q, k, v)),
        "dense.attend, positions": Case(lambda *given: npu.dense.attend(*given, **HEAD), (q, k, v, p, j)),
        "dense.attend, bias": Case(
            lambda q, k, v, bias: npu.dense.attend(q, k, v, Range(4, 5), Range(0, 9), bias, **HEAD),
            (q, k, v, move(normal(4, 5, 9, seed=9))),
        ),
        "dense.alibi": Case(lambda slopes: npu.dense.alibi(slopes, Range(0, 5), Range(0, 9)), (slopes,)),
        "merge.merge": Case(npu.merge.merge, (partial, partial)),
        "merge.finish": Case(lambda partial, sink: npu.merge.finish(partial, sink, dtype=torch.float16), (partial, sinks)),
        "rope.table": Case(lambda p, f: npu.rope.table(p, f, dtype=torch.float32), (p, move(npu.rope.frequencies(32, theta=10_000.0)))),
        "rope.half": Case(npu.rope.half, (rows, angles.cos(), angles.sin())),
        "rope.interleaved": Case(npu.rope.interleaved, (rows, angles.cos(), angles.sin())),
        "paged.attend": Case(lambda q: npu.paged.attend(q, pages, mixed, **HEAD), (rows,)),
        "paged.attend, slopes": Case(lambda q, slopes: npu.paged.attend(q, pages, mixed, slopes, **HEAD), (rows, slopes)),
        "paged.attend, packed": Case(
            lambda q: npu.paged.attend(q, packed_pages, packed, mask=window(20, 0), scale=0.1), (move(normal(9, 4, 128, seed=10)),)
        ),
        "paged.attend, decode": Case(
            lambda q: npu.paged.attend(q, decode_pages, decode, mask=window(20, 0), scale=0.1, lse=False), (rows[:2].clone(),)
        ),
        "paged.write": Case(lambda k, slots: arrays(npu.paged.write(written, k, k, slots)), (keys, write.slot_mapping)),
        "paged.gather": Case(lambda table: npu.paged.gather(pages, table), (mixed.block_table,)),
        "paged.convert": Case(lambda k: arrays(npu.paged.convert(Pages(k, k, "pbhd", 128), layout="phbd")), (pages.k,)),
        "standard.prepare": Case(lambda *given: npu.standard.prepare(npu.standard.Weights(*given), config=CONFIG), tuple(weights[:4])),
        "standard.attend_and_write": Case(
            lambda q, k, sinks: npu.standard.attend_and_write(q, k, k, written, write, sinks, **HEAD)[0], (rows, keys, sinks)
        ),
        "standard.forward": Case(
            lambda x: npu.standard.forward(x, prepared, written, write, config=CONFIG)[0], (move(normal(6, 32, seed=11).float()),)
        ),
    }


def paged(device, query_lens, seq_lens, mask, head_size):
    """A placed batch, and a cache of two key heads for it."""
    batch = batch_of(query_lens, seq_lens, block_size=128)
    cache = cache_of(batch, 2, head_size)
    return npu.place(batch, device, mask), Pages(cache.k.to(device), cache.v.to(device), cache.layout, cache.block_size)


def arrays(pages: Pages):
    return pages.k, pages.v


def assert_same_bits(found, expected):
    """Same tensors, wherever they lie: shape, dtype, and each number, NaN for NaN."""
    found, expected = ([leaf.cpu() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)] for result in (found, expected))
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
