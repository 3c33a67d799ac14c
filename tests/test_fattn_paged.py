"""Pages and their attention: any block size, layout, table and batch, against the same keys held whole."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_cases import BLOCKS, built, cached, close, dense_attend, paged_attend, single

from fattn import dense, paged
from fattn.plan import batch as plan
from fattn.types import LAYOUTS, Range, Tokens, causal, same, tree, window


@partial(jax.jit, static_argnames=("mask", "scale", "softcap"))
def held_whole(q, cache, batch, q_pos, *, mask, scale, softcap):
    """All sequences at once through dense.attend: a key is seen from its own sequence alone."""
    k, v = paged.gather(cache, batch.block_table)
    sequences, size = k.shape[:2]
    k_pos = jnp.where(jnp.arange(size) < batch.seq_lens[:, None], jnp.arange(size), -1).reshape(-1)
    owner = jnp.repeat(jnp.arange(sequences), batch.query_start_loc[1:] - batch.query_start_loc[:-1], total_repeat_length=q.shape[0])
    queries, keys = Tokens(q_pos, {"owner": owner}), Tokens(k_pos, {"owner": jnp.repeat(jnp.arange(sequences), size)})
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    return dense.attend(q, k, v, queries, keys, mask=mask & same("owner"), scale=scale, softcap=softcap)


@pytest.mark.parametrize(
    "query_lens, seq_lens, block_size, layout",
    [
        *(([5, 1, 0, 3], [17, 9, 4, 3], 16, layout) for layout in LAYOUTS),
        ([1, 1, 1], [1, 40, 16], 7, "hpbd"),
        ([150, 7, 1], [150, 200, 31], 16, "hpbd"),  # more queries than a tile holds
        ([4, 2], [2, 0], 1, "hpbd"),
    ],
)
def test_pages_are_the_keys_that_the_table_names(query_lens, seq_lens, block_size, layout):
    cache, batch = cached(block_size, layout), built(query_lens, seq_lens, block_size)
    q, options = single(sum(query_lens), 4, 8), dict(mask=causal() & window(60, 0), scale=0.3, softcap=5.0)
    q_pos = np.concatenate([np.arange(s - n, s) for n, s in zip(query_lens, seq_lens, strict=True)])
    expected = held_whole(q, cache, batch, q_pos, **options)
    found = paged_attend(q, cache, batch, **options)
    jax.tree.map(close, found, expected)
    if layout != "hpbd":
        return
    bucketed = plan.bucket(batch)
    padded = paged_attend(jnp.pad(q, ((0, len(bucketed.slot_mapping) - len(q)), (0, 0), (0, 0))), cache, bucketed, **options)
    jax.tree.map(lambda a, b: close(a[: len(q)], b), padded, expected)
    assert not padded.out[len(q) :].any() and np.isneginf(padded.lse[len(q) :]).all()
    alone = paged_attend(q, cache, batch, **options, lse=False)
    assert alone.lse is None
    close(alone.out, found.out)


def test_rows_that_no_sequence_owns_see_nothing():
    batch = built([2], [5])
    loose = replace(batch, slot_mapping=np.full(4, -1, np.int32), positions=np.zeros(4, np.int32), host=None)
    found = paged_attend(single(4, 4, 8), cached(16), loose, mask=causal(), scale=0.3)
    assert np.isneginf(found.lse[2:]).all() and not found.out[2:].any() and np.isfinite(found.lse[:2]).all()


@pytest.mark.parametrize("rows, sequences", [([], []), ([0, 0], [0, 3]), ([2], [0])])
def test_steps_without_work(rows, sequences):
    batch = built(rows, sequences)
    found = paged_attend(single(sum(rows), 4, 8), cached(16), batch, mask=causal(), scale=0.3)
    assert found.out.shape == (sum(rows), 4, 6) and not found.out.any() and np.isneginf(found.lse).all()


def test_labels_travel_with_their_sequences():
    parents = [[-1, 0, 0, 1], None]
    users = {"user": [[0] * 5 + [1] * 7, [2, 3, 2]]}
    batch = built([4, 1], [12, 3], parents=parents, query_labels={"user": [1, 1, 1, 0, 2]}, key_labels=users)
    q, cache = single(5, 4, 8), cached(16)
    found = paged_attend(q, cache, batch, mask=tree("enter", "exit") & same("user"), scale=0.3)
    k, v = (x[0, :12] for x in paged.gather(cache, batch.block_table[:1]))
    ancestors = {0: [8], 1: [8, 9], 2: [8, 10], 3: [8, 9, 11]}
    for row, own in ancestors.items():
        seen = [j for j in [*range(8), *own] if users["user"][0][j] == [1, 1, 1, 0][row]]
        expected = dense_attend(
            q[row : row + 1], k[jnp.asarray(seen)], v[jnp.asarray(seen)], Range(20, 1), Range(0, len(seen)), mask=causal(), scale=0.3
        )
        jax.tree.map(lambda a, b, row=row: close(a[row : row + 1], b), found, expected)


def test_alibi_is_made_from_positions():
    batch, cache, q, slopes = built([3, 1], [20, 4]), cached(16), single(4, 4, 8), dense.alibi_slopes(4)
    found = paged_attend(q, cache, batch, slopes, mask=causal(), scale=0.3)
    k, v = (x[0, :20] for x in paged.gather(cache, batch.block_table[:1]))
    bias = dense.alibi(slopes, Range(17, 3), Range(0, 20))
    expected = dense_attend(q[:3], k, v, Range(17, 3), Range(0, 20), bias, mask=causal(), scale=0.3)
    jax.tree.map(lambda a, b: close(a[:3], b), found, expected)


@pytest.mark.parametrize(
    "layout, dtype, slots",
    [
        *((layout, dtype, np.asarray([3, -1, 640, 2**40 + 5, 17])) for layout in LAYOUTS for dtype in (jnp.float32, jnp.bfloat16)),
        ("hpbd", jnp.float16, jnp.asarray([3, -1, 640, 99999, 17])),
    ],
)
def test_writes_land_in_their_slots_and_nowhere_else(layout, dtype, slots):
    cache, k, v = cached(16, layout, dtype), single(5, 2, 8, seed=1).astype(dtype), single(5, 2, 6, seed=2).astype(dtype)
    before, after = (paged.convert(c, layout="pbhd") for c in (cache, paged.write(cache, k, v, slots)))
    for pages, new, old in ((after.k, k, before.k), (after.v, v, before.v)):
        expected = np.array(old).reshape(-1, *old.shape[2:])
        expected[[3, 17]] = np.asarray(new)[[0, 4]]
        np.testing.assert_array_equal(np.asarray(pages).reshape(expected.shape), expected)


def test_gather_gives_zeros_for_blocks_that_are_not_there():
    k, v = paged.gather(cached(4), np.asarray([[-1, 3], [BLOCKS, 39]]))
    assert k.shape == (2, 8, 2, 8) and v.shape == (2, 8, 2, 6)
    assert not k[:, :4].any() and not v[:, :4].any()
    np.testing.assert_array_equal(k[1, 4:], cached(4).k[:, 39].swapaxes(0, 1))


def test_allocate_and_convert():
    for layout in LAYOUTS:
        cache = paged.allocate(7, 2, 8, 6, block_size=4, layout=layout, dtype=jnp.bfloat16)
        sizes = {"h": 2, "p": 7, "b": 4}
        assert cache.k.shape == tuple({**sizes, "d": 8}[axis] for axis in layout) and not cache.v.any()
        there = paged.convert(cached(4), layout=layout)
        np.testing.assert_array_equal(paged.convert(there, layout="hpbd").v, cached(4).v)
    with pytest.raises(ValueError, match="layout 'bphd' is not one of hpbd, pbhd, phbd"):
        paged.convert(cached(4), layout="bphd")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(mask=same("user")), r"the mask reads label 'user', which batch.query_labels lacks; it holds \[\]"),
        (dict(slopes=jnp.ones(3)), r"slopes has shape \[3\], but q has 4 heads"),
        (dict(q=jnp.ones((2, 4, 8), jnp.float16)), "q and cache must share one dtype, got float16 and float32"),
        (dict(q=jnp.ones((2, 3, 8))), "q has 3 heads, which is not a multiple of cache's 2"),
        (dict(softcap=0.0), "softcap must be positive, or None for no cap; got 0.0"),
    ],
)
def test_paged_arguments_that_do_not_fit(changes, message):
    arguments = dict(q=single(2, 4, 8), slopes=None, mask=causal(), scale=0.3) | changes
    q, slopes = arguments.pop("q"), arguments.pop("slopes")
    with pytest.raises(ValueError, match=message):
        paged.attend(q, cached(16), built([2], [5]), slopes, **arguments)
