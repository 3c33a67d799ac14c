"""Group D: paged cache, slots, pages, padding of captured steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np

import reference.merge
from fattn.plan import batch as plan
from fattn.types import Pages, Unsupported, causal, window
from reference.bounded import Bounded
from reports.layers import Layer, Report, close, empty_rows, exact, paged_attend, paged_oracle, raises, same, step


def b34_negative_slots(layer: Layer):
    """Slot -1 of a padding row wrote the last row of the last block, where a real token was.

    Right: slots below 0 write nothing, in every dtype and however many there are, and so do slots past the end. Where an operator takes
    no such slot, the plan gives padding rows of a null block and nothing else changes; where there is no null block, it is an error.
    """
    block = layer.block(4)
    slots = {0: 0, 2: block + 1, 4: block - 1}
    if layer.out_of_range_slots:
        for hidden in ((-1, -1), (-1, -2), (-100, -(2**31)), (-block, -2 * block), (2 * block, 2 * block + 3), (-1, 2**31 - 1)):
            _written_slots(layer, block, [slots.get(row, hidden[row % 4 // 2]) for row in range(5)])
        _written_slots(layer, block, [-1] * 5)
        return
    filled = np.full((3, block, 2, layer.head_size), 7.0)
    q, k, v = (layer.normal(i, 5, heads, layer.head_size) for i, heads in enumerate((4, 2, 2)))
    for seq_lens in ((2, 1), (0, 0)):
        batch = plan.build((3, 2), seq_lens, [[0], [2]], block_size=block, num_blocks=3, null_blocks=(1,))
        exact(batch.slot_mapping, [slot for length, rows, first in zip(seq_lens, (3, 2), (0, 2 * block), strict=True)
                                   for slot in [-1] * (rows - length) + [first + i for i in range(length)]])  # fmt: skip
        wanted = [filled.copy().reshape(-1, 2, layer.head_size) for _ in "kv"]
        for row, slot in enumerate(batch.slot_mapping):
            if slot >= 0:
                wanted[0][slot], wanted[1][slot] = k[row], v[row]
        _, cache = layer.standard.attend_and_write(
            *(layer.array(x) for x in (q, k, v)),
            layer.cache(layer.rounded(filled), layer.rounded(filled)),
            layer.place(batch, causal()),
            mask=causal(),
            scale=layer.scale,
        )
        for held, rows in zip((layer.numpy(cache).k, layer.numpy(cache).v), wanted, strict=True):
            exact(held[[0, 2]], rows.reshape(held.shape)[[0, 2]])
    unplaced = plan.build((3,), (2,), [[0]], block_size=block, num_blocks=3)
    cache = layer.cache(layer.rounded(filled), layer.rounded(filled))
    error = raises(
        ValueError,
        lambda: layer.standard.attend_and_write(
            *(layer.array(x[:3]) for x in (q, k, v)), cache, layer.place(unplaced, causal()), mask=causal(), scale=layer.scale
        ),
    )
    assert "null_blocks" in str(error)
    exact(layer.numpy(cache).k, filled)


def _written_slots(layer, block, slots):
    filled = layer.rounded(np.full((2, block, 2, layer.head_size), 7.0))
    k, v = (layer.normal(i, len(slots), 2, layer.head_size) for i in (1, 2))
    for dtype in (np.int32, np.int64):
        for layout in layer.layouts:
            cache = layer.paged.convert(layer.cache(filled, filled), layout=layout)
            cache = layer.paged.write(cache, layer.array(k), layer.array(v), layer.array(np.asarray(slots, dtype)))
            cache = layer.numpy(layer.paged.convert(cache, layout="pbhd"))
            for held, rows in ((cache.k, k), (cache.v, v)):
                wanted = filled.copy().reshape(-1, 2, layer.head_size)
                for row, slot in enumerate(slots):
                    if 0 <= slot < 2 * block:
                        wanted[slot] = rows[row]
                exact(held, wanted.reshape(filled.shape))


def b36_slot_dtypes(layer: Layer):
    """A buffer of int64 slots was read as int32, and a list of slots was cut to the local tokens.

    Right: both dtypes give the same cache, and one slot for each row, or an error.
    """
    block = layer.block(4)
    k, v = (layer.normal(i, 6, 2, layer.head_size) for i in (1, 2))
    slots = np.array([7, 0, block + 1, 2, block, 3])
    zeros = np.zeros((2, block, 2, layer.head_size), k.dtype)
    caches = [
        layer.numpy(layer.paged.write(layer.cache(zeros, zeros), layer.array(k), layer.array(v), layer.array(slots.astype(dtype))))
        for dtype in (np.int32, np.int64)
    ]
    for held, rows in ((0, k), (1, v)):
        wanted = zeros.copy().reshape(-1, 2, layer.head_size)
        wanted[slots] = rows
        for cache in caches:
            exact((cache.k, cache.v)[held], wanted.reshape(zeros.shape))
    for count in (3, 7):
        few = layer.ints(np.arange(count))
        raises(ValueError, lambda few=few: layer.paged.write(layer.cache(zeros, zeros), layer.array(k), layer.array(v), few))


def b37_one_block_size(layer: Layer):
    """A slot made with blocks of 16 was decoded with pages of 4, and pages of 64 were taken for blocks of 128.

    Right: the block size belongs to the cache; slot 75849 is row slot % b of block slot // b for every block size b, and a batch made for
    another block size than the cache's is an error. (Who owns a block under context parallelism: see elsewhere.py.)
    """
    slot = 75849
    for size in (4, 16) if layer.block_size is None else (128, 256):
        blocks = slot // size + 1
        k, v = (layer.normal(i, 1, 1, layer.head_size) for i in (1, 2))
        zeros = np.zeros((blocks, size, 1, layer.head_size), k.dtype)
        cache = layer.numpy(layer.paged.write(layer.cache(zeros, zeros), layer.array(k), layer.array(v), layer.ints([slot])))
        exact(cache.k[slot // size, slot % size], k[0])
        exact(cache.v[slot // size, slot % size], v[0])
        assert np.count_nonzero(cache.k.any(-1)) == 1 and np.count_nonzero(cache.v.any(-1)) == 1
    block = layer.block(4)
    s = step(layer, (2, 1), (2 * block + 1, block), block_size=block)
    close(paged_attend(layer, s, mask=causal()), paged_oracle(layer, s, mask=causal()))
    coarse = (s.k.shape[0] // 2, 2 * block, *s.k.shape[2:])
    other = s._replace(k=s.k[: 2 * coarse[0]].reshape(coarse), v=s.v[: 2 * coarse[0]].reshape(coarse))
    assert "block_size" in str(raises(ValueError, lambda: paged_attend(layer, other, mask=causal())))


def b39_stale_entries_of_a_block_table(layer: Layer):
    """Table entries past a length kept ids of an earlier step, and padding rows live pages: both were read.

    Right: entries at or beyond ceil(length / block) are never followed, whatever they are, and a sequence of length 0 touches nothing.
    """
    block = layer.block(4)
    for query_lens in ((1, 1), (3, 2)):
        s = step(layer, query_lens, (block + 1, 0), block_size=block, blocks=5, tables=[[3, 1], []])
        unused = [i for i in range(5) if i not in (3, 1)]
        k, v = s.k.copy(), s.v.copy()
        k[unused], v[unused] = np.nan, np.nan
        expected = paged_oracle(layer, s, mask=causal())
        clean = paged_attend(layer, s, mask=causal())
        for table in ([[3, 1, -1, 999], [3, 3, 3, 3]], [[3, 1, 0, 2], [0, 2, 4, 0]], [[3, 1, 3, 1], [-1, -1, -1, -1]]):
            stale = replace(s.batch, block_table=np.array(table, np.int32))
            got = paged_attend(layer, s._replace(k=k, v=v, batch=stale), mask=causal())
            same(layer, got, clean, expected)
            empty_rows(got, slice(query_lens[0], None))


def b40_physical_placement(layer: Layer):
    """The same sequence in other pages gave another result, because a block of a mask was looked up by the page's id.

    Right: the same bits for every order of the pages, under causal and under a window that is wider than a page.
    """
    block = layer.block(4)
    length = 2 * block + block // 2
    for mask in (causal(), window(2 * block - 1, 0)):
        for queries in (1, 5):
            first, expected = None, None
            for order in permutations((4, 0, 2)):
                s = step(layer, (queries,), (length,), block_size=block, blocks=6, tables=[list(order)])
                base = step(layer, (queries,), (length,), block_size=block, blocks=6, tables=[[0, 1, 2]])
                k, v = s.k.copy(), s.v.copy()
                k[list(order)], v[list(order)] = base.k[:3], base.v[:3]
                got = paged_attend(layer, s._replace(k=k, v=v), mask=mask)
                first, expected = (got, paged_oracle(layer, base, mask=mask)) if first is None else (first, expected)
                same(layer, got, first, expected)


def b43_axis_order_of_a_cache(layer: Layer):
    """Producer and consumer disagreed on the order of heads and rows: the sizes matched, the heads were permuted.

    Right: the order belongs to the cache, conversion is explicit and exact both ways (also where 4 heads and pages of 4 hide a mistake),
    and an order that nobody knows is an error. Attention over the converted cache is attention over the original.
    """
    p, b, h, d = 3, 4, 4, 3
    k = np.arange(p * b * h * d, dtype=np.float64).reshape(p, b, h, d)
    for source in ("hpbd", "pbhd", "phbd"):
        shaped = [np.ascontiguousarray(np.transpose(x, ["pbhd".index(axis) for axis in source])) for x in (k, -k)]
        cache = Pages(*(layer.array(layer.rounded(x)) for x in shaped), layout=source, block_size=b)
        for target in ("hpbd", "pbhd", "phbd"):
            converted = layer.paged.convert(cache, layout=target)
            assert converted.layout == target and converted.block_size == b
            plain = layer.numpy(converted)
            exact(plain.k, np.transpose(k, ["pbhd".index(axis) for axis in target]))
            exact(plain.v, -np.transpose(k, ["pbhd".index(axis) for axis in target]))
            back = layer.numpy(layer.paged.convert(converted, layout=source))
            exact(back.k, shaped[0])
    raises(ValueError, lambda: layer.paged.convert(layer.cache(layer.rounded(k), layer.rounded(k)), layout="nhd"))
    block = layer.block(4)
    s = step(layer, (3, 1), (block + 2, 3), block_size=block, heads=8, kv_heads=4)
    expected = paged_oracle(layer, s, mask=causal())
    batch = layer.place(s.batch, causal())
    for layout in ("hpbd", "pbhd", "phbd"):
        cache = layer.paged.convert(layer.cache(s.k, s.v), layout=layout)
        call = lambda cache=cache: layer.paged.attend(layer.array(s.q), cache, batch, mask=causal(), scale=layer.scale)
        if layout in layer.layouts:
            close(layer.numpy(call()), expected)
        else:
            assert "layout" in raises(Unsupported, call).argument


def b46_prefix_hit(layer: Layer):
    """A prompt whose prefix was cached gave other tokens than the same prompt cold: the hit took another code path.

    Right: split at every place, and in chunks of 1, 4, 7 and all, the output is that of the one-shot prefill.
    """
    length, block = 23, layer.block(4)
    table = list(range(-(-length // block)))[::-1]
    q, k, v = (layer.normal(i, length, heads, layer.head_size) for i, heads in enumerate((4, 2, 2)))
    whole = step(layer, (length,), (length,), block_size=block, blocks=len(table) + 4, tables=[table])
    cache = whole.k.copy(), whole.v.copy()
    for j in range(length):
        for held, rows in zip(cache, (k, v), strict=True):
            held[table[j // block], j % block] = rows[j]
    partial = paged_oracle(layer, whole._replace(q=q, k=cache[0], v=cache[1]), mask=causal())
    expected = reference.merge.finish(partial, dtype=layer.dtype)
    splits = [(s, length - s) for s in range(length)] + [(n,) * (length // n) + (length % n,) for n in (1, 4, 7, length)]
    for split in splits:
        pages, start = layer.cache(whole.k, whole.v), 0
        for count in split:
            if count == 0:
                continue
            rows = slice(start, start + count)
            start += count
            # buckets, as an engine has them: a compiled layer is compiled once for each
            null = range(len(table), len(table) + 4)
            batch = plan.build((count,), (start,), [table], block_size=block, num_blocks=len(table) + 4, null_blocks=null)
            batch = plan.bucket(batch, sequences=(2,), null_blocks=null) if count > 1 else batch
            padding = np.zeros(len(batch.slot_mapping) - count, int)
            q_step, k_step, v_step = (np.concatenate([x[rows], x[padding]]) for x in (q, k, v))
            out, pages = layer.standard.attend_and_write(
                *(layer.array(x) for x in (q_step, k_step, v_step)),
                pages,
                layer.place(batch, causal()),
                mask=causal(),
                scale=layer.scale,
            )
            close(layer.numpy(out)[:count], Bounded(expected.value[rows], expected.bound[rows]))
        assert start == length


REPORTS = (
    Report("B34", b34_negative_slots, ("negative_slots_wrap", "minus_one_alone_is_skipped", "last_slot_takes_what_is_past_the_end")),
    Report("B36", b36_slot_dtypes, ("reads_int64_slots_as_int32", "cuts_slots_to_their_number")),
    Report("B37", b37_one_block_size, ("slots_of_another_block_size", "block_size_of_the_batch")),
    Report("B39", b39_stale_entries_of_a_block_table, ("paged_follows_the_whole_table", "paged_padding_reads_a_block")),
    Report("B40", b40_physical_placement, ("paged_window_by_page_id",)),
    Report("B43", b43_axis_order_of_a_cache, ("convert_swaps_heads_and_rows",)),
    Report("B46", b46_prefix_hit, ("attends_before_it_writes", "layer_prefix_hit_counts_from_zero")),
)
