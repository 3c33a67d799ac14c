"""The five states of an eager step on one code path: no state is an argument, no operator is another state's.

Prefill without a cache, a prefix hit, chunked prefill, decode alone and drafts to verify are batches that differ in lengths. All go through
`npu.standard.attend_and_write` on one paged cache, and each output is the oracle's dense attention over the sequence's own rows.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import numpy as np
import pytest
import torch
from layer_cases import FLOATS, launched, normal, numpy_of, precision

import npu
import npu._forms
import npu._paged
import reference.dense
import reference.merge
from fattn.plan import batch as plan
from fattn.types import Range, causal, window

BLOCKS, BLOCK_SIZE, NULL = 16, 128, (0,)
HEADS, KV_HEADS = 4, 2
OPERATORS = ["npu::npu_scatter_pa_kv_cache", "npu::npu_fused_infer_attention_score"]


class State(NamedTuple):
    """A step: how many tokens each sequence brings, how many keys it then has, and its blocks, which sequences may share."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


STATES = {
    "prefill without a cache": State((130, 7), (130, 7), ((5, 2), (11,))),
    # the first block is a live request's, and was never written by this sequence
    "prefix hit": State((12, 1), (140, 136), ((5, 9), (5, 7))),
    "chunked prefill": State((40, 9), (160, 265), ((3, 8), (14, 1, 6))),
    "decode only": State((1, 1, 1), (129, 1, 300), ((5, 2), (11,), (4, 10, 13))),
    "speculative drafts": State((4, 4), (131, 12), ((5, 2), (11,))),
}


def sequences(state, d, dtype):
    """The keys and values of every sequence, [s hk d] each; sequences whose tables begin with the same block begin with the same rows."""
    shared = [normal(BLOCK_SIZE, KV_HEADS, d, dtype=dtype, seed=seed) for seed in (1, 2)]
    found = []
    for row, (length, table) in enumerate(zip(state.seq_lens, state.tables, strict=True)):
        own = [normal(length, KV_HEADS, d, dtype=dtype, seed=10 * row + seed) for seed in (3, 4)]
        begins = sum(other[0] == table[0] for other in state.tables) > 1
        found.append([torch.cat([block, rows[BLOCK_SIZE:]]) if begins else rows for block, rows in zip(shared, own, strict=True)])
    return found


def served(name, *, d=128, dtype="float16", mask=None):
    """One step of a state against the oracle; the names of what was launched, in order of first call."""
    state, mask = STATES[name], mask or causal()
    rows = sequences(state, d, dtype)
    cache = npu.paged.allocate(BLOCKS, KV_HEADS, d, d, block_size=BLOCK_SIZE, layout="pbhd", dtype=FLOATS[dtype])
    cache.k.fill_(9.0), cache.v.fill_(-9.0)  # what no sequence wrote is far off where it is read
    before = [length - count for length, count in zip(state.seq_lens, state.query_lens, strict=True)]
    for keys, table, start in zip(rows, state.tables, before, strict=True):
        for position in range(start):
            for held, new in zip((cache.k, cache.v), keys, strict=True):
                held[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = new[position]
    q = normal(sum(state.query_lens), HEADS, d, dtype=dtype, seed=7)
    k, v = (torch.cat([keys[side][start:] for keys, start in zip(rows, before, strict=True)]) for side in (0, 1))
    batch = plan.build(state.query_lens, state.seq_lens, state.tables, block_size=BLOCK_SIZE, num_blocks=BLOCKS, null_blocks=NULL)
    placed = npu.place(batch, "cpu", mask)
    (out, after), launches = launched(npu.standard.attend_and_write, q, k, v, cache, placed, mask=mask, scale=d**-0.5)
    assert after is cache and out.dtype == FLOATS[dtype]
    starts = np.cumsum([0, *state.query_lens])
    for row, (keys, start) in enumerate(zip(rows, before, strict=True)):
        part = slice(starts[row], starts[row + 1])
        count = state.query_lens[row]
        sides = Range(start, count), Range(0, start + count)
        arrays = (numpy_of(x) for x in (q[part], *keys))
        partial = reference.dense.attend(*arrays, *sides, mask=mask, scale=d**-0.5, precision=precision(dtype))
        right = reference.merge.finish(partial, dtype=dtype, precision=precision(dtype))
        off = np.abs(out[part].double().numpy() - right.value)
        assert (off <= right.bound).all(), f"{name}, sequence {row}: off by {off.max()}, at most {right.bound.max()} is right"
    return launches


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", [causal(), window(100, 0)], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_a_state_is_the_oracles(state, mask, d, dtype):
    served(state, d=d, dtype=dtype, mask=mask)


@pytest.mark.parametrize("d", [64, 128])
def test_every_state_calls_the_same_operators_once(d):
    """In the packed layout nothing else is launched; otherwise rows are laid out, and never by another attention."""
    for state in STATES:
        launches = served(state, d=d)
        assert [name for name in launches if name.startswith(("npu::", "atb::"))] == OPERATORS, f"{state}: {launches}"
        assert all(launches[name] == 1 for name in OPERATORS)
        assert d == 64 or list(launches) == OPERATORS, f"{state}: {launches}"


def test_no_argument_names_a_state():
    """What differs between the states is in the batch alone: lengths, slots and a table."""
    arguments = list(inspect.signature(npu.standard.attend_and_write).parameters)
    assert arguments == ["q", "k", "v", "cache", "batch", "sinks", "slopes", "mask", "scale", "softcap", "attend"]
    named = {field for field in plan.Batch.__dataclass_fields__ if "prefill" in field or "decode" in field or "state" in field}
    assert not named


def own_keys_alone(patch):
    """The step sees the keys that it brings, as a prefill without a cache may: cached ones are forgotten."""
    real = npu._paged.lengths

    def lengths(batch, layout):
        found = real(batch, layout)
        short = tuple(min(own, all_) for own, all_ in zip(batch.host.query_lens, found["actual_seq_lengths_kv"], strict=True))
        return found | {"actual_seq_lengths_kv": short}

    patch.setattr(npu._paged, "lengths", lengths)


def attends_before_it_writes(patch):
    real_store, real_attend = npu.standard.store, npu.standard.attend_by

    def attend_by(launch, facts, q, cache, *rest, **options):
        held = [(cache.k.clone(), cache.v.clone()), later.pop()]
        cache.k.copy_(held[1][0]), cache.v.copy_(held[1][1])
        found = real_attend(launch, facts, q, cache, *rest, **options)
        cache.k.copy_(held[0][0]), cache.v.copy_(held[0][1])
        return found

    later = []

    def store(cache, *rows):
        later.append((cache.k.clone(), cache.v.clone()))
        return real_store(cache, *rows)

    patch.setattr(npu.standard, "store", store)
    patch.setattr(npu.standard, "attend_by", attend_by)


def queries_count_from_zero(patch):
    """A causal mask whose corner is the first key, as it is for a prefill without a cache."""
    from npu import _operators

    real = _operators.attention_call

    def of_device(device, workspace):
        launch = real(device, workspace)
        return lambda arguments, out: launch(arguments | {"sparse_mode": 2 if arguments["sparse_mode"] == 3 else 0}, out)

    patch.setattr(_operators, "attention_call", of_device)


FAULTS = {
    "prefix hit, own keys alone": ("prefix hit", own_keys_alone),
    "chunked prefill, own keys alone": ("chunked prefill", own_keys_alone),
    "decode only, own keys alone": ("decode only", own_keys_alone),
    "speculative drafts, own keys alone": ("speculative drafts", own_keys_alone),
    "prefill, attends before it writes": ("prefill without a cache", attends_before_it_writes),
    "decode only, attends before it writes": ("decode only", attends_before_it_writes),
    "prefix hit, counts from zero": ("prefix hit", queries_count_from_zero),
    "chunked prefill, counts from zero": ("chunked prefill", queries_count_from_zero),
    "speculative drafts, counts from zero": ("speculative drafts", queries_count_from_zero),
}


@pytest.mark.parametrize("state,fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(state, fault, monkeypatch):
    served(state)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        served(state)
