"""The oracle's pages: any table, block size and layout is attention over the keys in order, and nothing else is ever read."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from reference_cases import batch_of, worst

from fattn.types import LAYOUTS, Pages, Range, Tokens, causal, full, same, window
from reference import dense, paged
from reference.bounded import Bounded

CALL = dict(mask=causal() & window(6, None), scale=0.3)


def scattered(lengths, *, block_size, num_blocks=16, layout="pbhd", kv_heads=2, size=8, value_size=6, seed=0, fill=np.nan):
    """(cache, tables, keys and values in order): every token lies where a shuffled table says, and all other places hold `fill`."""
    rng = np.random.default_rng(seed)
    k, v = ([rng.standard_normal((n, kv_heads, d)) for n in lengths] for d in (size, value_size))
    order, tables = list(rng.permutation(num_blocks)), []
    cache = paged.allocate(num_blocks, kv_heads, size, value_size, block_size=block_size, layout="pbhd", dtype="float64")
    cache.k[:], cache.v[:] = fill, fill
    for row, length in enumerate(lengths):
        tables.append([int(order.pop()) for _ in range(-(-length // block_size))])
        for j in range(length):
            at = tables[row][j // block_size], j % block_size
            cache.k[at], cache.v[at] = k[row][j], v[row][j]
        tables[row] += [-1, 99, int(order[0])][: row % 4]
    return paged.convert(cache, layout=layout), tables, k, v


def dense_rows(q, starts, lengths, k, v, slopes=None, **call):
    """dense.attend of each sequence on its own."""
    outs = []
    for row, length in enumerate(lengths):
        own = q[starts[row] : starts[row + 1]]
        sides = Range(length - len(own), len(own)), Range(0, length)
        bias = None if slopes is None else dense.alibi(slopes, *sides)
        outs.append(dense.attend(own, k[row], v[row], *sides, bias, **call))
    return outs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", (1, 3, 4, 16))
def test_any_table_block_size_and_layout_is_dense_attention(layout, block_size):
    query_lens, lengths = (4, 1, 7, 2, 1), (9, 5, 7, 0, 16)
    cache, tables, k, v = scattered(lengths, block_size=block_size, num_blocks=64, layout=layout)
    batch = batch_of(query_lens, lengths, [t or [0] for t in tables], block_size=block_size)
    q, slopes = np.random.default_rng(1).standard_normal((15, 4, 8)), np.array([0.5, 0.25, 0.1, 1.0])
    got = paged.attend(q, cache, batch, slopes, softcap=3.0, **CALL)
    for row, want in enumerate(dense_rows(q, batch.query_start_loc, lengths, k, v, slopes, softcap=3.0, **CALL)):
        rows = slice(*batch.query_start_loc[row : row + 2])
        for field, wanted in zip((*got.value, *got.bound), (*want.value, *want.bound), strict=True):
            np.testing.assert_allclose(field[rows], wanted, rtol=1e-13, atol=1e-15)
    without = paged.attend(q, cache, batch, slopes, softcap=3.0, lse=False, **CALL)
    assert without.value.lse is None and without.bound.lse is None
    np.testing.assert_array_equal(without.value.out, got.value.out)


def test_more_queries_than_keys_are_padding():
    cache, tables, k, v = scattered((2, 3), block_size=2)
    batch = batch_of((5, 2), (2, 3), tables, block_size=2)
    got = paged.attend(np.random.default_rng(1).standard_normal((7, 4, 8)), cache, batch, mask=causal(), scale=1.0)
    assert (got.value.out[:3] == 0).all() and (got.value.lse[:3] == -np.inf).all() and np.isfinite(got.value.lse[3:]).all()
    np.testing.assert_allclose(got.value.out[3, 0], v[0][0, 0])


def test_labels_travel_with_the_batch():
    lengths = (6, 4)
    cache, tables, k, v = scattered(lengths, block_size=4)
    users = np.array([[0, 0, 1, 1, 0, 1, 7, 7], [2, 3, 2, 3, 7, 7, 7, 7]], np.int32)
    batch = batch_of((2, 3), lengths, tables, block_size=4, query_labels={"user": np.array([0, 1, 3, 2, 3])}, key_labels={"user": users})
    q = np.random.default_rng(1).standard_normal((5, 4, 8))
    got = paged.attend(q, cache, batch, mask=same("user") & causal(), scale=0.4)
    for row, rows in ((0, slice(0, 2)), (1, slice(2, 5))):
        n = lengths[row]
        queries = Tokens(Range(n - (rows.stop - rows.start), rows.stop - rows.start), {"user": batch.query_labels["user"][rows]})
        keys = Tokens(Range(0, n), {"user": users[row, :n]})
        want = dense.attend(q[rows], k[row], v[row], queries, keys, mask=same("user") & causal(), scale=0.4)
        np.testing.assert_array_equal(got.value.out[rows], want.value.out)
    with pytest.raises(ValueError, match="user"):
        paged.attend(q, cache, replace(batch, key_labels={}), mask=same("user"), scale=0.4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_then_gather_is_the_identity_and_touches_nothing_else(layout):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((5, 2, 8)).astype(np.float32), rng.standard_normal((5, 2, 6)).astype(np.float32)
    cache = paged.allocate(4, 2, 8, 6, block_size=3, layout=layout, dtype="float32")
    before = (cache.k.copy(), cache.v.copy())
    slots = np.array([7, -1, 0, 12, 2], np.int32)
    new = paged.write(cache, k, v, slots)
    assert isinstance(new, Pages) and new.layout == layout and new.k.dtype == np.float32
    np.testing.assert_array_equal(cache.k, before[0])
    np.testing.assert_array_equal(cache.v, before[1])
    for rows, written in zip((k, v), paged.gather(new, np.array([[0, 1, 2, 3]])), strict=True):
        want = np.zeros(written.shape[1:], np.float32)
        for i, slot in enumerate(slots):
            if 0 <= slot < 12:
                want[slot] = rows[i]
        np.testing.assert_array_equal(written[0], want)


def test_gather_of_a_block_that_is_not_there_is_zero():
    cache, tables, k, v = scattered((6,), block_size=3, fill=5.0)
    keys, values = paged.gather(cache, np.array([[tables[0][1], -1, 16, tables[0][0]]]))
    assert keys.shape == (1, 12, 2, 8) and values.shape == (1, 12, 2, 6)
    np.testing.assert_array_equal(keys[0], np.concatenate([k[0][3:], np.zeros((6, 2, 8)), k[0][:3]]))
    np.testing.assert_array_equal(values[0, 3:9], 0)


def test_convert_is_a_permutation_of_axes():
    cache, *_ = scattered((5,), block_size=4, fill=1.0)
    shapes = {"pbhd": (16, 4, 2, 8), "phbd": (16, 2, 4, 8), "hpbd": (2, 16, 4, 8)}
    for layout in LAYOUTS:
        other = paged.convert(cache, layout=layout)
        assert other.k.shape == shapes[layout] and other.layout == layout
        np.testing.assert_array_equal(paged.convert(other, layout="pbhd").k, cache.k)
    assert paged.convert(cache, layout="phbd").k[3, 1, 2, 5] == cache.k[3, 2, 1, 5]


def test_computed_keys_make_a_bounded_cache():
    rng = np.random.default_rng(0)
    k, v = (Bounded(rng.standard_normal((4, 2, d)), np.full((4, 2, d), 1e-3)) for d in (8, 6))
    cache = paged.allocate(4, 2, 8, 6, block_size=2, layout="phbd", dtype="bfloat16")
    batch = batch_of((4,), (4,), [[3, 1]], block_size=2)
    new = paged.write(cache, k, v, batch.slot_mapping)
    assert new.value.k.dtype == ml_dtypes.bfloat16 and new.bound.k.shape == new.value.k.shape
    keys, values = paged.gather(new, np.array([[3, 1]]))
    for sign in (1, -1):
        other = (k.value + sign * k.bound).astype(ml_dtypes.bfloat16)
        assert 0 < worst(other, keys.value[0], keys.bound[0]) <= 1
    q = rng.standard_normal((4, 4, 8))
    exact = paged.attend(q, replace(new.value, k=new.value.k.astype(float), v=new.value.v.astype(float)), batch, mask=full(), scale=0.3)
    got = paged.attend(Bounded(q, 0 * q), new, batch, mask=full(), scale=0.3)
    np.testing.assert_array_equal(got.value.out, exact.value.out)
    assert (got.bound.out > 100 * exact.bound.out).all()
    again = paged.write(new, k.value.astype(ml_dtypes.bfloat16), v.value.astype(ml_dtypes.bfloat16), batch.slot_mapping)
    assert (again.bound.k == 0).all()
    assert paged.convert(again, layout="hpbd").bound.v.shape == (2, 4, 2, 6)


def test_bad_input_is_named():
    cache, tables, k, v = scattered((6, 3), block_size=3)
    batch = batch_of((2, 3), (6, 3), tables, block_size=3)
    q, rows = np.ones((5, 4, 8)), (k[0][:5], v[0][:5])
    wrong_id = batch.block_table.copy()
    wrong_id[1, 0] = 77
    attends = [
        ((q[:, :3], cache, batch), "3 heads"),
        ((q[:4], cache, batch), "query_start_loc runs from 0 to 5, but there are 4"),
        ((q.transpose(1, 0, 2), cache, batch), "layout"),
        ((q[..., :4], cache, batch), "head size 4"),
        ((q.astype(np.float32), cache, batch), "float32"),
        ((q, cache, replace(batch, block_size=4)), "block_size=4"),
        ((q, replace(cache, layout="phbd"), batch), "block_size"),
        ((q, replace(cache, layout="bphd"), batch), "bphd"),
        ((q, cache, replace(batch, block_table=wrong_id)), r"block_table\[1, 0\]=77"),
        ((q, cache, replace(batch, seq_lens=np.array([6, 60], np.int32))), r"seq_lens\[1\]=60"),
        ((q, cache, replace(batch, seq_lens=np.array([-1, 3], np.int32))), r"seq_lens\[0\]=-1"),
        ((q, cache, replace(batch, query_start_loc=np.array([0, 6, 5], np.int32))), "6 queries"),
        ((q, cache, replace(batch, query_start_loc=np.array([0, 5], np.int32))), "disagrees"),
        ((q, cache, replace(batch, max_query_len=2)), "max_query_len=2"),
        ((q, cache, batch, np.ones(3)), "slopes"),
    ]
    for arguments, message in attends:
        with pytest.raises(ValueError, match=message):
            paged.attend(*arguments, **CALL)
    writes = [
        ((*rows, np.array([0, 1, 2, 1, -1])), r"slots\[3\]=1 is already written by row 1"),
        ((*rows, np.arange(4)), "slots"),
        ((*rows, np.arange(5.0)), "float64"),
        ((rows[0][:, :1], rows[1], np.arange(5)), "k has shape"),
        ((rows[0], rows[1].astype(np.float32), np.arange(5)), "float32"),
    ]
    for arguments, message in writes:
        with pytest.raises(ValueError, match=message):
            paged.write(cache, *arguments)
    with pytest.raises(ValueError, match="layout"):
        paged.allocate(1, 1, 1, 1, block_size=1, layout="pdhb", dtype="float32")
    with pytest.raises(ValueError, match="int8"):
        paged.allocate(1, 1, 1, 1, block_size=1, layout="pbhd", dtype="int8")
