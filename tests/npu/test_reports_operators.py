"""Public reports about the attention operator (B74, B76, B77): what `npu` asks of it, and what it returns.

Every case looks at the calls that reach an operator as well as at the result: an emulator follows documents, a device does not always.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layer_cases import FLOATS, assert_within, cache_of, normal, numpy_of, pages_of, precision
from operator_calls import attention, changed, forgotten, recorded, replaced
from reports.layers import raises

import npu
import npu._place
import reference.dense
import reference.paged
from fattn.plan import batch as plan
from fattn.types import Range, Unsupported, causal, full, window
from npu import limits


def assert_full_rank(named, queries, keys, sequences):
    """A mask and a bias have all the axes that the operator documents, in full."""
    mask, bias = named["atten_mask"], named["pse_shift"]
    if mask is not None and named["sparse_mode"] == 0:
        assert list(mask.shape) == [sequences, 1, queries, keys], f"the mask has shape {list(mask.shape)}"
    if bias is not None:
        assert list(bias.shape) == [sequences, named["num_heads"], queries, keys], f"the bias has shape {list(bias.shape)}"


# --- B74: past key 512 the operator ignored a mask of [1, 1, 1, S], and misread a bias without heads -----------------------------

HEADS_74, SIZE_74, PAGES_74 = 12, 64, 32


def b74(length, dtype="float16", slopes=None, mask=None, sequences=1):
    """One query a sequence, 12 heads of 64 dims, 4096 keys of capacity in pages of 128, `length` of them live."""
    mask = mask or causal()
    ids = np.random.default_rng(length).permutation(PAGES_74 * sequences).reshape(sequences, PAGES_74)
    batch = plan.build([1] * sequences, [length] * sequences, ids, block_size=128, num_blocks=ids.size)
    cache = npu.paged.allocate(ids.size, HEADS_74, SIZE_74, SIZE_74, block_size=128, layout="pbhd", dtype=FLOATS[dtype])
    cache.k.copy_(normal(*cache.k.shape, dtype=dtype, seed=1)), cache.v.copy_(normal(*cache.v.shape, dtype=dtype, seed=2))
    q = normal(sequences, HEADS_74, SIZE_74, dtype=dtype, seed=3)
    with recorded() as calls:
        found = npu.paged.attend(q, cache, npu.place(batch, "cpu", mask), slopes, mask=mask, scale=0.125)
    expected = reference.paged.attend(
        numpy_of(q), pages_of(cache), batch, numpy_of(slopes), mask=mask, scale=0.125, precision=precision(dtype)
    )
    assert_within(found, expected)
    named = attention(calls)
    assert_full_rank(named, 1, named["block_table"].shape[1] * 128, sequences)
    if mask == causal():
        assert named["atten_mask"] is None, "a mask goes where lengths say it all"
        assert list(named["actual_seq_lengths_kv"]) == [length] * sequences


def b74_dense(length, dtype="float16"):
    """The same over keys held whole, with a bias that has neither heads nor queries, and keys that the mask hides: a full-rank call."""
    q, k, v = (normal(n, HEADS_74, SIZE_74, dtype=dtype, seed=n) for n in (1, length + 5, length + 5))
    bias = normal(length + 5, dtype=dtype, seed=4)
    with recorded() as calls:
        found = npu.dense.attend(q, k, v, Range(length - 1, 1), Range(0, length + 5), bias, mask=causal(), scale=0.125)
    sides = Range(length - 1, 1), Range(0, length + 5)
    arrays = [numpy_of(x) for x in (q, k, v)]
    assert_within(found, reference.dense.attend(*arrays, *sides, numpy_of(bias), mask=causal(), scale=0.125, precision=precision(dtype)))
    assert_full_rank(attention(calls), 1, length + 5, 1)


LENGTHS_74 = (137, 511, 512, 513, 1000, 4095)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("length", LENGTHS_74)
def test_b74_one_query_over_long_pages(length, biased, dtype):
    b74(length, dtype, npu.dense.alibi_slopes(HEADS_74) if biased else None)


@pytest.mark.parametrize("length", LENGTHS_74)
def test_b74_windows_of_two_sequences(length):
    b74(length, mask=window(600, 0), sequences=2)


@pytest.mark.parametrize("length", LENGTHS_74)
def test_b74_dense(length):
    b74_dense(length)


# --- B76: head sizes, layouts and pages that the operator does not take ----------------------------------------------------------

# (size of query and key heads, of value heads) and the layout by which it goes over pages, and over keys held whole
SIZES_76 = {
    (48, 48): "BSND",
    (64, 64): "BSND",
    (80, 80): "BSND",
    (128, 128): "TND",
    (192, 192): "TND",
    (256, 256): "BSND",
    (192, 128): "TND",
}


def answered(facts, call, expected, layout):
    """What limits.refusal predicts is what the call does: it runs by this layout, or raises before any operator is called."""
    predicted = limits.refusal(facts)
    assert facts.packed == (layout == "TND")
    with recorded() as calls:
        if predicted is None:
            assert_within(call(), expected())
            assert attention(calls)["input_layout"] == layout
            assert any(layout in choice.how for choice in limits.CHOICES if choice.operation == facts.operation)
            return
        error = raises(Unsupported, call)
    assert str(error) == str(predicted) and error.argument == predicted.argument, f"{error}, not {predicted}"
    assert limits.LIMITS[limits.broken(facts)].text in str(error)
    assert not calls, f"{calls[0][0]} was called before the answer"


def b76_paged(sizes, layout, *, query_lens=(5, 1), cache_layout="pbhd", slopes=None, block_size=128, dtype="float16"):
    d, dv = sizes
    batch = plan.build(query_lens, [131, 7], [[3, 0], [2, 2]], block_size=128, num_blocks=5)
    if block_size != 128:
        batch = plan.build(query_lens, [70, 7], [[3, 0], [2, 2]], block_size=block_size, num_blocks=5)
    cache = cache_of(batch, 2, d, value_size=dv, layout=cache_layout, dtype=dtype)
    q = normal(sum(query_lens), 4, d, dtype=dtype, seed=7)
    facts = limits.Facts(
        "paged.attend",
        dtype,
        heads=4,
        kv_heads=2,
        head_size=d,
        value_size=dv,
        queries=max(query_lens),
        keys=int(max(batch.seq_lens)),
        sequences=2,
        additive=None if slopes is None else dtype,
        layout=cache_layout,
        block_size=block_size,
    )
    answered(
        facts,
        lambda: npu.paged.attend(q, cache, npu.place(batch, "cpu", causal()), slopes, mask=causal(), scale=d**-0.5),
        lambda: reference.paged.attend(
            numpy_of(q), pages_of(cache), batch, numpy_of(slopes), mask=causal(), scale=d**-0.5, precision=precision(dtype)
        ),
        layout,
    )


def b76_dense(sizes, layout, *, explicit=False, dtype="float16"):
    d, dv = sizes
    q, k, v = (normal(n, heads, size, dtype=dtype, seed=n + heads) for n, heads, size in ((5, 4, d), (9, 2, d), (9, 2, dv)))
    sides = Range(4, 5), Range(0, 9)
    given = (torch.arange(4, 9), torch.arange(9)) if explicit else sides
    facts = limits.Facts("dense.attend", dtype, heads=4, kv_heads=2, head_size=d, value_size=dv, queries=5, keys=9, explicit=explicit)
    answered(
        facts,
        lambda: npu.dense.attend(q, k, v, *given, mask=causal(), scale=d**-0.5),
        lambda: reference.dense.attend(*map(numpy_of, (q, k, v)), *sides, mask=causal(), scale=d**-0.5, precision=precision(dtype)),
        layout,
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES_76, ids=str)
def test_b76_pages(sizes, dtype):
    for query_lens in ((5, 1), (1, 1)):
        b76_paged(sizes, SIZES_76[sizes], query_lens=query_lens, dtype=dtype)
        other = {"TND": "TND", "BSND": "BNSD"}[SIZES_76[sizes]]
        b76_paged(sizes, other, query_lens=query_lens, cache_layout="phbd", dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES_76, ids=str)
def test_b76_keys_held_whole(sizes, dtype):
    b76_dense(sizes, SIZES_76[sizes], dtype=dtype)
    b76_dense(sizes, "BSND", explicit=True, dtype=dtype)  # 192 and 128: refused, by name


@pytest.mark.parametrize("sizes", SIZES_76, ids=str)
def test_b76_what_the_packed_layout_does_not_take(sizes):
    b76_paged(sizes, "BSND", slopes=npu.dense.alibi_slopes(4))  # 192 and 128: refused
    b76_paged(sizes, SIZES_76[sizes], block_size=64)  # refused outside TND


# --- B77: rows that see nothing need the operator's mode for them ----------------------------------------------------------------


def b77(dtype, *, d=64):
    """Four queries on two keys, right-aligned: causal, the first two see nothing, whole and in pages; from key 0 on, all see both."""
    q, k, v = (normal(n, heads, d, dtype=dtype, seed=heads + n) for n, heads in ((4, 4), (2, 2), (2, 2)))
    rounding = precision(dtype)
    arrays = [numpy_of(x) for x in (q, k, v)]
    batch = plan.build([4], [2], [[1]], block_size=128, num_blocks=3)
    cache = npu.paged.allocate(3, 2, d, d, block_size=128, layout="pbhd", dtype=FLOATS[dtype])
    cache.k[1, :2], cache.v[1, :2] = k, v
    for mask in (causal(), full()):
        right = reference.dense.attend(*arrays, Range(-2, 4), Range(0, 2), mask=mask, scale=0.2, precision=rounding)
        for call in (
            lambda mask=mask: npu.dense.attend(q, k, v, Range(-2, 4), Range(0, 2), mask=mask, scale=0.2),
            lambda mask=mask: npu.dense.attend(q, k, v, torch.arange(-2, 2), torch.arange(2), mask=mask, scale=0.2),
            lambda mask=mask: npu.paged.attend(q, cache, npu.place(batch, "cpu", mask), mask=mask, scale=0.2),
        ):
            with recorded() as calls:
                found = call()
            assert_within(found, right)
            assert not found.out[:2].any(), f"rows without keys are {found.out[:2]}"
            assert (found.lse[:2] == -torch.inf).all() and torch.isfinite(found.lse[2:]).all()
            assert attention(calls)["inner_precise"] == 2, "rows without keys, and the operator was not asked to correct them"
    everything = reference.dense.attend(*arrays, Range(0, 4), Range(0, 2), mask=full(), scale=0.2, precision=rounding)
    with recorded() as calls:
        found = npu.dense.attend(q, k, v, Range(0, 4), Range(0, 2), mask=full(), scale=0.2)
    assert_within(found, everything)
    assert torch.isfinite(found.lse).all() and attention(calls)["atten_mask"] is None


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", FLOATS)
def test_b77_more_queries_than_keys(dtype, d):
    b77(dtype, d=d)


# --- faults of each kind, which the cases must see -------------------------------------------------------------------------------


def mask_instead_of_lengths(named):
    """What the report did: all of the capacity, and a mask of one row that hides the rest."""
    capacity, (length,) = named["block_table"].shape[1] * 128, named["actual_seq_lengths_kv"]
    hidden = torch.arange(capacity) >= min(length, 512)  # the device was right up to 512 keys, and took none after them
    return {"atten_mask": hidden[None, None, None], "actual_seq_lengths_kv": [capacity]}


FAULTS = {
    "B74: a mask in place of lengths": (lambda: b74(513), changed(mask_instead_of_lengths)),
    "B74: one mask for all sequences": (
        lambda: b74(1000, mask=window(600, 0), sequences=2),
        changed(lambda named: {"atten_mask": named["atten_mask"][:1]}),
    ),
    "B74: a bias without heads": (
        lambda: b74(513, slopes=npu.dense.alibi_slopes(HEADS_74)),
        changed(lambda named: {"pse_shift": named["pse_shift"][:, :1]}),
    ),
    "B74: a dense bias without heads": (lambda: b74_dense(513), changed(lambda named: {"pse_shift": named["pse_shift"][:, :1]})),
    "B74: a dense mask without rows": (lambda: b74_dense(513), changed(lambda named: {"atten_mask": named["atten_mask"][0, 0]})),
    "B76: limits are answered by the operator": (
        lambda: b76_dense((192, 128), "BSND", explicit=True),
        replaced(limits, "check", lambda facts: None),
    ),
    "B76: every size goes packed": (
        lambda: b76_dense((64, 64), "BSND"),
        replaced(limits, "PACKED_SIZES", (*limits.PACKED_SIZES, (64, 64))),
    ),
    "B76: pages of every size go packed": (
        lambda: b76_paged((256, 256), "BSND"),
        replaced(limits, "PACKED_SIZES", (*limits.PACKED_SIZES, (256, 256))),
    ),
    "B77: the mode of rows without keys is the default": (lambda: b77("float16"), changed(lambda named: {"inner_precise": 0})),
    "B77: rows without keys stay what the operator left": (
        lambda: b77("bfloat16"),
        replaced(npu._place, "_empty_rows", lambda query_lens, seq_lens: np.zeros(int(query_lens.sum()), bool)),
    ),
}


@pytest.mark.parametrize("length, seen", [(511, "a mask goes"), (512, "a mask goes"), (513, r"out\[")])
def test_b74_results_show_the_fault_from_513_keys_on(length, seen, monkeypatch):
    """Up to 512 keys the result is right all the same: only the call itself shows it."""
    changed(mask_instead_of_lengths)(monkeypatch)
    with pytest.raises(AssertionError, match=seen):
        b74(length)


@pytest.mark.parametrize("case,fault", FAULTS.values(), ids=FAULTS)
def test_the_report_sees_its_fault(case, fault, monkeypatch):
    with forgotten():
        case()
        fault(monkeypatch)
        with pytest.raises((AssertionError, Unsupported)):
            case()
