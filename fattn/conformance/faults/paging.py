"""Faults in attention over pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fattn.conformance.faults import masking, scores, softmax
from fattn.conformance.faults.fault import Fault, PagedSteps, Steps, attention, moved, paged_attention
from fattn.conformance.plain import dense, masks, paged
from fattn.types import Partial, Range, Window


def _sequence(change):
    """A fault in what belongs to a sequence: change(batch, row, rows, queries, keys, table) -> (rows, queries, keys, table)."""
    return paged_attention(PagedSteps(sequence=lambda batch, row: change(batch, row, *paged.sequence(batch, row))))


def _shorter(keys, size):
    return type(keys)(Range(0, size), {name: labels[:size] for name, labels in keys.labels.items()})


def top_left(batch, row, rows, queries, keys, table):
    return rows, moved(queries, Range(0, queries.pos.size)), keys, table


def top_left_with_several_queries(batch, row, rows, queries, keys, table):
    """Decode is right; chunks of a prefill count from the first key."""
    return top_left(batch, row, rows, queries, keys, table) if 1 < queries.pos.size < keys.pos.size else (rows, queries, keys, table)


def length_is_an_index(batch, row, rows, queries, keys, table):
    """The last key is the sequence's length, not one before it: one more key, from whatever the table's last page holds."""
    longer = keys.pos.size + (keys.pos.size % batch.block_size != 0)
    labels = {name: batch.key_labels[name][row, :longer] for name in keys.labels}
    return rows, moved(queries, Range(longer - queries.pos.size, queries.pos.size)), type(keys)(Range(0, longer), labels), table


def full_page_loses_its_last_key(batch, row, rows, queries, keys, table):
    full_page = keys.pos.size % batch.block_size == 0 and keys.pos.size > 1
    return rows, queries, _shorter(keys, keys.pos.size - 1) if full_page else keys, table


def last_page_of_one_key(batch, row, rows, queries, keys, table):
    """Pages are counted by rounding down where one key is left over."""
    alone = keys.pos.size % batch.block_size == 1 and keys.pos.size > 1 and queries.pos.size == 1
    return rows, queries, _shorter(keys, keys.pos.size - 1) if alone else keys, table


def wide_batches_lose_a_key(batch, row, rows, queries, keys, table):
    """With more than four sequences keys are split in two, and the first key of the second half falls between."""
    if len(batch.seq_lens) <= 4 or keys.pos.size < 4:
        return rows, queries, keys, table
    half = keys.pos.size // 2
    pos = np.arange(keys.pos.size)
    return rows, queries, moved(keys, np.where(pos == half, -1, pos)), table


def table_of_the_row_before(batch, row, rows, queries, keys, table):
    """A row of the table is found by the number of sequences that have keys: empty ones shift it."""
    found = int((np.asarray(batch.seq_lens)[:row] > 0).sum())
    return rows, queries, keys, batch.block_table[found : found + 1, : table.shape[1]]


def window_stops_early_in_decode(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    narrower = lambda m: Window(m.left - 1, m.right) if isinstance(m, Window) and m.left else m
    mask = masking.rewritten(mask, narrower) if len(q) == 1 else mask
    return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def window_in_whole_blocks(block):
    """A window in decode drops blocks that lie before it, and forgets the keys of the block that it begins in."""

    def see(queries, keys, *, mask):
        seen = masks.visible(queries, keys, mask=mask)
        if seen.shape[0] != 1 or not seen.any() or not any(isinstance(m, Window) for m in masking.parts(mask)):
            return seen
        first = int(seen[0].argmax()) // block * block
        return (np.arange(seen.shape[1]) >= first)[None] & (masks.positions(keys) <= masks.positions(queries)[0])[None]

    return attention(Steps(see=see))


def window_by_page_id(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    """Pages are visited in the order of their ids, and positions counted along."""

    def read(cache, table, length):
        k, v = (rows[0] for rows in paged.gather(cache, np.sort(table, axis=1)))
        return k[:length], v[:length]

    return paged_attention(PagedSteps(read=read))(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


def whole_table(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    """All pages of the table are read, and what lies past a length is multiplied by a weight of 0."""

    def sequence(batch, row):
        rows, queries, keys, _ = paged.sequence(batch, row)
        return rows, queries, keys, batch.block_table[row : row + 1]

    def read(cache, table, length):
        blocks = cache.k.shape[cache.layout.index("p")]
        return tuple(rows[0] for rows in paged.gather(cache, np.clip(table, 0, blocks - 1)))

    def attend(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
        length = k_pos.pos.size
        part = dense.attend(q, k[:length], v[:length], q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
        with np.errstate(invalid="ignore"):
            beyond = 0 * v[length:].astype(np.float32).sum()
        return Partial((part.out + beyond).astype(part.out.dtype), part.lse)

    steps = PagedSteps(sequence=sequence, read=read, attend=attend)
    return paged_attention(steps)(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


def tail_is_multiplied(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    """The tail of the last page is multiplied by a weight of 0."""

    def read(cache, table, length):
        return tuple(rows[0] for rows in paged.gather(cache, table))

    def attend(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
        length = k_pos.pos.size
        part = dense.attend(q, k[:length], v[:length], q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
        with np.errstate(invalid="ignore"):
            return Partial((part.out + 0 * v[length:].astype(np.float32).sum()).astype(part.out.dtype), part.lse)

    return paged_attention(PagedSteps(read=read, attend=attend))(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


def _rows_without_keys(batch):
    spans = zip(batch.query_start_loc[:-1], batch.query_start_loc[1:], batch.seq_lens, strict=True)
    return [(int(a), int(b)) for a, b, length in spans if b > a and length == 0]


def plus_infinity_without_keys(result, batch):
    for a, b in _rows_without_keys(batch):
        result.lse[a:b] = np.inf
    return result


def neighbour_is_cleared(result, batch):
    """The early exit of an empty sequence writes one row further up."""
    for a, _ in _rows_without_keys(batch):
        result.lse[max(a - 1, 0)] = -np.inf
    return result


def padding_holds_what_was_there(result, batch):
    for a, b in _rows_without_keys(batch):
        result.out[a:b] = 1
    return result


def padding_reads_a_block(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    """A sequence of length 0 reads one key of its first block."""
    batch = replace(batch, seq_lens=np.maximum(batch.seq_lens, 1).astype(np.int32), block_table=np.maximum(batch.block_table, 0))
    return paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


def without_softcap(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    return paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, lse=lse)


def slopes_ignored_in_decode(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    slopes = None if batch.max_query_len == 1 else slopes
    return paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)


def alibi_from_the_first_query(slopes, queries, keys):
    """Distances count from the first query's row, not from its position."""
    return dense.alibi(slopes, Range(0, queries.pos.size), keys)


def lse_given_anyway(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
    return paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap)


def labels_of_the_first_sequence(batch, row, rows, queries, keys, table):
    labels = {name: batch.key_labels[name][0, : keys.pos.size] for name in keys.labels}
    return rows, queries, type(keys)(keys.pos, labels), table


prefix_from_zero = _sequence(top_left_with_several_queries)


def _attend(name, kind, function, why):
    return Fault(name, kind, "paged.attend", function, why)


def _core(attend):
    return paged_attention(PagedSteps(attend=attend))


FAULTS = (
    _attend("paged_causal_is_top_left", "causal alignment", _sequence(top_left), "queries count from the first key"),
    _attend("prefix_hit_counts_from_zero", "causal alignment", prefix_from_zero, "right in decode and when cold"),
    _attend("paged_length_is_a_last_index", "lengths", _sequence(length_is_an_index), "one key too many"),
    _attend("paged_drops_the_last_key_of_a_full_page", "block edge", _sequence(full_page_loses_its_last_key), "length % block is 0"),
    _attend("paged_drops_a_page_of_one_key", "block edge", _sequence(last_page_of_one_key), "pages are counted by rounding down"),
    _attend("paged_drops_keys_in_wide_batches", "batch dependence", _sequence(wide_batches_lose_a_key), "a split chosen by batch size"),
    _attend("paged_tables_shift_past_empty_sequences", "table tail", _sequence(table_of_the_row_before), "empty sequences are not counted"),
    _attend("paged_labels_of_the_first_sequence", "labels", _sequence(labels_of_the_first_sequence), "key labels are not indexed by row"),
    _attend("paged_window_sees_one_less_in_decode", "window edge", _core(window_stops_early_in_decode), "right in prefill"),
    _attend("paged_window_in_whole_blocks", "window edge", _core(window_in_whole_blocks(16)), "a window cut off at a block"),
    _attend("paged_window_by_page_id", "layout", window_by_page_id, "logical and physical order mixed up"),
    _attend("paged_follows_the_whole_table", "table tail", whole_table, "weights of 0 times stale pages"),
    _attend("paged_tail_is_multiplied", "poison", tail_is_multiplied, "0 * NaN"),
    _attend("paged_lse_of_nothing_is_plus_infinity", "empty rows", paged_attention(PagedSteps(last=plus_infinity_without_keys)), "-log(0)"),
    _attend(
        "paged_empty_sequence_clears_its_neighbour", "empty rows", paged_attention(PagedSteps(last=neighbour_is_cleared)), "early exit"
    ),
    _attend(
        "paged_padding_keeps_its_buffer", "padding leak", paged_attention(PagedSteps(last=padding_holds_what_was_there)), "not written"
    ),
    _attend("paged_padding_reads_a_block", "padding leak", padding_reads_a_block, "at least one key for everyone"),
    _attend(
        "paged_masks_with_a_finite_score", "empty rows", _core(attention(Steps(softmax=softmax.finite_stand_in))), "a stand-in for -inf"
    ),
    _attend("paged_second_block_not_rescaled", "block edge", _core(attention(Steps(softmax=softmax.second_block_not_rescaled))), "online"),
    _attend("paged_heads_are_tiled", "head map", _core(attention(Steps(expand=scores.tiled))), "h mod Hkv"),
    _attend("paged_ignores_softcap", "ignored argument", without_softcap, "swallowed"),
    _attend("paged_ignores_slopes_in_decode", "ignored argument", slopes_ignored_in_decode, "only prefill adds a bias"),
    _attend("paged_alibi_of_rows", "alibi", paged_attention(PagedSteps(alibi=alibi_from_the_first_query)), "rows taken for positions"),
    _attend("paged_returns_lse_unasked", "ignored argument", lse_given_anyway, "lse=False is not read"),
)
