"""A small engine on a captured step: sequences that grow, finish and join, over one paged cache."""

from __future__ import annotations

import numpy as np
import torch
from layer_cases import normal

import npu
from fattn.plan import batch as plan
from fattn.types import Batch, Pages

BLOCK, BLOCKS, PAGES = 128, 16, 3  # blocks 0 and 1 are null blocks
KV_HEADS, HEADS = 1, 2


class Engine:
    """`layers` caches and inputs of the bucket's size at fixed addresses; `step` is what is captured and what runs eagerly."""

    def __init__(self, head_size, masks, *, tokens, layers=2, sinks=False, seed=0, device="cpu"):
        self.masks, self.device = masks, device
        self.caches = [self._cache(head_size, seed + layer) for layer in range(layers)]
        self.x = torch.zeros(3, tokens, HEADS, head_size, dtype=torch.float16, device=device)
        self.sinks = normal(HEADS, seed=5).float().to(device) if sinks else None
        self.calls = 0

    def _cache(self, head_size, seed):
        shape = (BLOCKS, BLOCK, KV_HEADS, head_size)
        k, v = (normal(*shape, seed=seed + add).to(self.device) for add in (0, 100))
        return Pages(k, v, "pbhd", BLOCK)

    def fill(self, seed):
        self.x.copy_(normal(*self.x.shape, seed=seed))

    def step(self, attend, *batches):
        """Layer i writes and attends under mask i, on what the layer before gave: outputs of all layers."""
        self.calls += 1
        q, k, v = self.x[0], self.x[1][:, :KV_HEADS], self.x[2][:, :KV_HEADS]
        outputs = []
        for layer, cache in enumerate(self.caches):
            batch, mask = batches[layer % len(batches)], self.masks[layer % len(batches)]
            out, _ = npu.standard.attend_and_write(q, k, v, cache, batch, self.sinks, mask=mask, scale=0.1, attend=attend)
            outputs.append(out)
            q = out
        return outputs

    def eager(self, batch: Batch):
        """The step without a graph, on copies of the caches: outputs, and the caches after it."""
        kept = self.caches
        self.caches = [Pages(cache.k.clone(), cache.v.clone(), cache.layout, cache.block_size) for cache in kept]
        try:
            return self.step(npu.paged.attend, *(npu.place(batch, self.device, mask) for mask in self.masks)), self.caches
        finally:
            self.caches = kept


def batch_of(query_lens, seq_lens, *, tokens, sequences, seed=0, max_query_len=None) -> Batch:
    """A batch over shuffled blocks, padded to a bucket."""
    ids = iter(np.random.default_rng(seed).permutation(np.arange(2, BLOCKS)).tolist())
    tables = [[next(ids) for _ in range(-(-n // BLOCK))] for n in seq_lens]
    built = plan.build(query_lens, seq_lens, tables, block_size=BLOCK, num_blocks=BLOCKS, null_blocks=(0, 1))
    return plan.bucket(built, tokens=[tokens], sequences=[sequences], pages=[PAGES], null_blocks=(0, 1))


def assert_step_is_eager(engine, step, batch, seed):
    """A replay returns, in every row, and writes, null blocks apart, bit for bit what the eager step does."""
    engine.fill(seed)
    expected, caches = engine.eager(batch)
    for ours, theirs in zip(npu.graph.replay(step, batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for ours, theirs in zip(engine.caches, caches, strict=True):
        assert torch.equal(ours.k[2:], theirs.k[2:]) and torch.equal(ours.v[2:], theirs.v[2:])
