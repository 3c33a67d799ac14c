"""npu on batches of the plan: a request served in chunks, drafts and bucketed decode steps equals the oracle's one shot."""

import numpy as np
import pytest
import torch
from layer_cases import assert_within, launched, normal, numpy_of, precision

import npu
import reference.dense
from fattn.plan.batch import bucket, build
from fattn.types import Range, Tokens, causal, tree, window

BLOCKS, BLOCK_SIZE, NULL = 12, 128, [0, 1]
TABLES = [[5, 2, 9], [11, 3, 4]]


def served(q, k, v, steps, *, mask, d):
    """The outputs of two requests, given the lengths that each step adds to each, and the names of what was launched in each step."""
    cache = npu.paged.allocate(BLOCKS, 2, d, d, block_size=BLOCK_SIZE, layout="pbhd", dtype=torch.float16)
    done, outputs, launches = [0, 0], [[], []], []
    for step in steps:
        parts = [slice(n, n + more) for n, more in zip(done, step, strict=True)]
        done = [n + more for n, more in zip(done, step, strict=True)]
        batch = build(step, done, TABLES, block_size=BLOCK_SIZE, num_blocks=BLOCKS, null_blocks=NULL)
        batch = bucket(batch, null_blocks=NULL)
        rows = len(batch.slot_mapping)
        packed = [torch.cat([a[0][parts[0]], a[1][parts[1]]]) for a in (q, k, v)]
        packed = [torch.cat([a, a.new_full((rows - sum(step), *a.shape[1:]), torch.nan)]) for a in packed]
        placed = npu.place(batch, "cpu", mask)
        (out, cache), names = launched(npu.standard.attend_and_write, *packed, cache, placed, mask=mask, scale=0.125)
        assert not out[sum(step) :].any()
        outputs[0].append(out[: step[0]])
        outputs[1].append(out[step[0] : sum(step)])
        launches.append(names)
    return [torch.cat(parts) for parts in outputs], launches


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", [causal(), window(140, 0)], ids=str)
def test_chunks_and_decode_steps_equal_one_shot(d, mask):
    steps = [[130, 7], [100, 1], [5, 0], *[[1, 1]] * 3, [1, 0]]
    totals = [sum(step[i] for step in steps) for i in range(2)]
    q, k, v = ([normal(n, heads, d, seed=10 * i + heads) for i, n in enumerate(totals)] for heads in (4, 2, 2))
    v = [x.flip(-1) for x in v]
    outputs, launches = served(q, k, v, steps, mask=mask, d=d)
    for i, n in enumerate(totals):
        arrays = [numpy_of(x[i]) for x in (q, k, v)]
        expected = reference.dense.attend(*arrays, Range(0, n), Range(0, n), mask=mask, scale=0.125, precision=precision("float16"))
        assert_within(outputs[i], type(expected)(expected.value.out, expected.bound.out))
    decode = launches[3]
    assert decode == {"npu::npu_scatter_pa_kv_cache": 1, "npu::npu_fused_infer_attention_score": 1}


@pytest.mark.parametrize("d", [64, 128])
def test_draft_trees_of_the_plan(d):
    parents, context, mask = [-1, 0, 0, 1, -1], 140, tree("enter", "exit")
    batch = build([5, 1], [145, 3], TABLES, block_size=BLOCK_SIZE, num_blocks=BLOCKS, parents=[parents, None], null_blocks=NULL)
    k, v = normal(145, 2, d, seed=1), normal(145, 2, d, seed=2)
    q = normal(6, 4, d, seed=3)
    cache = npu.paged.allocate(BLOCKS, 2, d, d, block_size=BLOCK_SIZE, layout="pbhd", dtype=torch.float16)
    slots = np.concatenate([np.arange(128) + 5 * 128, np.arange(17) + 2 * 128, np.arange(3) + 11 * 128]).astype(np.int32)
    npu.paged.write(cache, torch.cat([k, k[:3]]), torch.cat([v, v[:3]]), torch.from_numpy(slots))
    found, _ = launched(npu.paged.attend, q, cache, npu.place(batch, "cpu", mask), mask=mask, scale=0.125)
    labels = [({n: x[:5] for n, x in batch.query_labels.items()}, {n: x[0, :145] for n, x in batch.key_labels.items()})]
    labels.append(({n: x[5:] for n, x in batch.query_labels.items()}, {n: x[1, :3] for n, x in batch.key_labels.items()}))
    for rows, keys, (own, others) in ((slice(0, 5), 145, labels[0]), (slice(5, 6), 3, labels[1])):
        expected = reference.dense.attend(
            numpy_of(q)[rows],
            numpy_of(k)[:keys],
            numpy_of(v)[:keys],
            Tokens(np.arange(context, context + 5)[: rows.stop - rows.start] if keys == 145 else Range(2, 1), own),
            Tokens(Range(0, keys), others),
            mask=mask,
            scale=0.125,
            precision=precision("float16"),
        )
        assert_within(type(found)(found.out[rows], found.lse[rows]), expected)
