"""Group C: heads, layout, dtypes, numerics. The reports about gradients are in gradients.py."""

from __future__ import annotations

from functools import reduce

import numpy as np

import reference.merge
from fattn.types import Range, causal, full
from reference.bounded import Bounded
from reports.layers import Layer, Report, attend, close, exact, oracle, paged_attend, paged_oracle, raises, same, step


def b22_heads_are_repeated_not_tiled(layer: Layer):
    """Query head h read key head h mod Hkv.

    Right: h // (H / Hkv). With 8 heads on 2 and each key head's values its own number, the outputs are 0,0,0,0,1,1,1,1; the same for
    every ratio, for one key head, and over pages.
    """
    for heads, kv_heads in ((8, 2), (2, 2), (6, 2), (10, 2), (7, 1), (9, 3), (4, 1)):
        own = np.arange(heads) // (heads // kv_heads)
        q = layer.normal(heads, 3, heads, layer.head_size)
        k, v = (layer.normal(kv_heads + i, 5, kv_heads, layer.head_size) for i in (0, 1))
        close(*(f(layer, q, k, v, Range(2, 3), Range(0, 5), mask=causal()) for f in (attend, oracle)))
        v = layer.rounded(np.broadcast_to(np.arange(kv_heads)[None, :, None], k.shape))
        got, expected = (f(layer, q, k, v, Range(2, 3), Range(0, 5), mask=causal()) for f in (attend, oracle))
        close(got.out, Bounded(np.broadcast_to(own[None, :, None], got.out.shape), expected.bound.out))
        if heads not in (8, 7):
            continue
        s = step(layer, (3, 1), (5, 4), block_size=layer.block(4), heads=heads, kv_heads=kv_heads)
        close(paged_attend(layer, s, mask=causal()), paged_oracle(layer, s, mask=causal()))


def b24_unusual_head_counts(layer: Layer):
    """A kernel took 32, 64 or 128 query heads alone; padding 20 heads to 32 left the key heads behind.

    Right: any count that divides gives the definition's result, prefill and decode; one that does not divide is an error.
    """
    for heads in (5, 7, 12, 16, 20, 40):
        for kv_heads in (1, heads):
            q = layer.normal(heads, 2, heads, layer.head_size)
            k, v = (layer.normal(heads + i, 3, kv_heads, layer.head_size) for i in (1, 2))
            close(*(f(layer, q, k, v, Range(1, 2), Range(0, 3), mask=causal()) for f in (attend, oracle)))
        if heads not in (5, 20):
            continue
        s = step(layer, (1, 1), (5, 3), block_size=layer.block(4), heads=heads, kv_heads=1)
        close(paged_attend(layer, s, mask=causal()), paged_oracle(layer, s, mask=causal()))
    q, k = layer.normal(1, 2, 20, layer.head_size), layer.normal(2, 3, 32, layer.head_size)
    assert "20" in str(raises(ValueError, lambda: attend(layer, q, k, k, Range(1, 2), Range(0, 3), mask=causal())))


def b25_strides(layer: Layer):
    """Transposed views, slices of a cache and halves of one K|V buffer were read as if contiguous, one of them on the second call only.

    Right: the result of the contiguous arrays, at once and again with equal shapes and other strides; writes through views land right.
    """
    d = layer.head_size
    q_rows, k_rows, v_rows = (layer.normal(i, rows, heads, d) for i, (rows, heads) in enumerate(((5, 4), (6, 2), (6, 2))))
    expected = oracle(layer, q_rows, k_rows, v_rows, Range(1, 5), Range(0, 6), mask=causal())
    for arrange in _ARRANGEMENTS:
        for _ in range(2):
            views = arrange(q_rows, k_rows, v_rows)
            for view, rows in zip(views, (q_rows, k_rows, v_rows), strict=True):
                exact(view, rows)
            close(attend(layer, *views, Range(1, 5), Range(0, 6), mask=causal()), expected)
    one_head = np.lib.stride_tricks.as_strided(k_rows[:, :1], (6, 1, d), (k_rows.strides[0], 4, k_rows.strides[2]))
    close(*(f(layer, q_rows, one_head, one_head, Range(1, 5), Range(0, 6), mask=causal()) for f in (attend, oracle)))
    block, slots = layer.block(4), np.array([3, 0, 5, 2 * layer.block(4) - 1, 2, 1])
    for arrange in _ARRANGEMENTS:
        _, k_view, v_view = arrange(q_rows, k_rows, v_rows)
        zeros = np.zeros((2, block, 2, d), k_rows.dtype)
        cache = layer.numpy(layer.paged.write(layer.cache(zeros, zeros), layer.array(k_view), layer.array(v_view), layer.ints(slots)))
        for held, rows in ((cache.k, k_rows), (cache.v, v_rows)):
            wanted = zeros.copy().reshape(-1, 2, d)
            wanted[slots] = rows
            exact(held, wanted.reshape(zeros.shape))


def _heads_first(*arrays):
    return [np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2) for x in arrays]


def _every_second_row(*arrays):
    spread = [np.full((2 * x.shape[0], *x.shape[1:]), 77, x.dtype) for x in arrays]
    for buffer, x in zip(spread, arrays, strict=True):
        buffer[::2] = x
    return [buffer[::2] for buffer in spread]


def _halves_of_one_buffer(q, k, v):
    buffer = np.concatenate([k, v], axis=-1)
    return [q, buffer[..., : k.shape[-1]], buffer[..., k.shape[-1] :]]


def _mixed(q, k, v):
    return [_heads_first(q)[0], _every_second_row(k)[0], v]


_ARRANGEMENTS = (_heads_first, _every_second_row, _halves_of_one_buffer, _mixed, lambda *arrays: arrays)


def b26_axis_order(layer: Layer):
    """Arrays given heads first to a function that takes rows first were computed with, silently.

    Right: positions count the rows, so 4 heads of 32 rows given in the other order are an error that names the layout; transposed by the
    caller they give the rows-first result.
    """
    q, k, v = (layer.normal(i, 4, 32, layer.head_size) for i in range(3))
    error = raises(ValueError, lambda: attend(layer, q, k, v, Range(0, 32), Range(0, 32), mask=causal()))
    assert "layout" in str(error) and "[rows, heads, size]" in str(error)
    rows_first = [x.transpose(1, 0, 2) for x in (q, k, v)]
    got = attend(layer, *rows_first, Range(0, 32), Range(0, 32), mask=causal())
    close(got, oracle(layer, *rows_first, Range(0, 32), Range(0, 32), mask=causal()))


def b29_partials_rounded_at_each_hop(layer: Layer):
    """A ring kept its accumulator in bf16 and lost accuracy at each hop.

    Right: over 8 hops and 1024 keys the error is at most twice that of one pass, for peaked and for flat scores, and merged partials are
    float32.
    """
    d, hops, keys = layer.head_size, 8, 1024
    for scale in (layer.scale, 8 * layer.scale):
        q, k, v = (layer.normal(i, rows, heads, d) for i, (rows, heads) in enumerate(((4, 4), (keys, 2), (keys, 2))))
        spans = [(a, keys // hops) for a in range(0, keys, keys // hops)]
        cuts = [(k[a : a + n], v[a : a + n], np.arange(keys, keys + 4), np.arange(a, a + n)) for a, n in spans]
        parts, bounds = ([f(layer, q, *cut, mask=causal(), scale=scale) for cut in cuts] for f in (attend, oracle))
        single, whole = (f(layer, q, k, v, Range(keys, 4), Range(0, keys), mask=causal(), scale=scale) for f in (attend, oracle))
        if layer.wide_partials:
            assert all(np.asarray(x).dtype in (np.float32, np.float64) for part in parts for x in part)
        folded = layer.numpy(reduce(layer.merge.merge, (layer.partial(*part) for part in parts)))
        close(folded, Bounded(whole.value, reduce(reference.merge.merge, bounds).bound))
        once, hopped = (np.abs(x.out - whole.value.out).max() for x in (single, folded))
        assert hopped <= 2 * once + np.abs(v).max() * 2.0**-22, f"{hopped} after {hops} hops, {once} in one pass"


def b32_elements_permuted(layer: Layer):
    """A kernel's last store permuted elements: norms and shapes looked right.

    Right: one-hot attention over v[j, d] = j D + d is an exact gather, element by element.
    """
    d = max(layer.head_size, 16)
    n = 16
    order = np.random.default_rng(0).permutation(n)
    keys = layer.rounded(32.0 * np.eye(n, d))[:, None]
    v = layer.rounded(np.arange(n * d).reshape(n, 1, d))
    q = np.repeat(keys[order], 2, axis=1)
    got = attend(layer, q, keys, v, Range(0, n), Range(0, n), mask=full(), scale=1.0)
    exact(got.out, np.repeat(v[order], 2, axis=1))


def b33_a_row_alone_and_in_a_batch(layer: Layer):
    """A request's result moved with the other requests of the batch and with where chunks ended.

    Right: the same bits alone, in batches of 2, 5 and 32, and at every place of the batch; within the bound for chunks of 1, 7, 16 and all.
    """
    block, length = layer.block(4), 23
    alone = step(layer, (1,), (length,), block_size=block, blocks=64 + 8, tables=[[70 - i for i in range(-(-length // block))]])
    got, expected = paged_attend(layer, alone, mask=causal()), paged_oracle(layer, alone, mask=causal())
    close(got, expected)
    table = [int(i) for i in alone.batch.block_table[0]]
    for size, slot in ((2, 0), (2, 1), (5, 3), (32, 31)):
        others = [[2 * i, 2 * i + 1] for i in range(size)]
        tables = [table if i == slot else others[i] for i in range(size)]
        lens = [length if i == slot else 1 + i % (2 * block) for i in range(size)]
        s = step(layer, (1,) * size, lens, block_size=block, blocks=72, tables=tables)
        q = s.q.copy()
        q[slot] = alone.q[0]
        batched = paged_attend(layer, s._replace(q=q), mask=causal())
        same(layer, type(got)(*(part[slot : slot + 1] for part in batched)), got, expected)
    whole = step(layer, (length,), (length,), block_size=block, blocks=72, tables=[table])
    wanted = paged_oracle(layer, whole, mask=causal())
    for chunk in (1, 7, 16, length):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = step(layer, (stop - start,), (stop,), block_size=block, blocks=72, tables=[table])
            result = paged_attend(layer, part._replace(q=whole.q[start:stop]), mask=causal())
            rows = slice(start, stop)
            close(result, Bounded(*(type(got)(*(x[rows] for x in side)) for side in wanted)))


REPORTS = (
    Report("B22", b22_heads_are_repeated_not_tiled, ("heads_are_tiled", "paged_heads_are_tiled", "first_key_head_for_odd_ratios")),
    Report("B24", b24_unusual_head_counts, ("heads_past_sixteen_repeat",)),
    Report("B25", b25_strides, ("reads_as_if_contiguous", "second_call_keeps_its_strides", "write_swaps_halves_of_a_buffer")),
    Report("B26", b26_axis_order, ("guesses_the_axis_order",)),
    Report("B29", b29_partials_rounded_at_each_hop, ("merge_in_bfloat16",)),
    Report("B32", b32_elements_permuted, ("stores_permuted_elements",)),
    Report("B33", b33_a_row_alone_and_in_a_batch, ("paged_drops_keys_in_wide_batches",)),
)
