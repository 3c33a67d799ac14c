"""Group A: empty sets, fully masked rows, log-sum-exps and merging."""

from __future__ import annotations

from functools import reduce
from itertools import permutations

import numpy as np

import reference.merge
from fattn.types import Partial, Range, Tokens, causal, full, same
from reports import layers
from reports.layers import Layer, Report, attend, close, empty_rows, exact, oracle, paged_attend, paged_oracle, step


def b01_merging_empty_partials(layer: Layer):
    """Merging two empty partials gave NaN, because (-inf) - (-inf) was evaluated.

    Right: an empty partial is the identity. All empty merge to (0, -inf), one full partial comes back bit for bit, and any others to
    what the full ones alone merge to, in every order and with any of the four empty.
    """
    subsets = np.array([[bool(row >> i & 1) for i in range(4)] for row in range(16)])  # row, partial: whether it has keys
    rng = np.random.default_rng(1)
    outs = np.where(subsets.T[..., None, None], rng.standard_normal((4, 16, 2, 4)), 0).astype(np.float32)
    lses = np.where(subsets.T[..., None], rng.standard_normal((4, 16, 2)) * 3, -np.inf).astype(np.float32)
    parts = [layer.partial(*pair) for pair in zip(outs, lses, strict=True)]
    weights = np.exp(lses.astype(np.float64))
    total = weights.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(total)
        out = np.nan_to_num((weights[..., None] * outs).sum(0) / total[..., None], nan=0.0)
    alone = subsets.sum(1) == 1
    out[alone], lse[alone] = outs.sum(0, np.float64)[alone], lses.max(0)[alone]
    for order in permutations(range(4)):
        folded = layer.numpy(reduce(layer.merge.merge, [parts[i] for i in order]))
        bound = reduce(reference.merge.merge, [Partial(outs[i], lses[i]) for i in order]).bound
        close(folded.out, layers.Bounded(out, bound.out))
        close(folded.lse, layers.Bounded(lse, bound.lse))
        empty_rows(folded, [0])
        for i in range(4):
            exact(folded.out[1 << i], outs[i, 1 << i])
            exact(folded.lse[1 << i], lses[i, 1 << i])
    nothing = layer.numpy(layer.merge.empty(3, 2, 4, dtype=layer.partial(outs[0], lses[0]).out.dtype))
    empty_rows(nothing, slice(None))


def b02_garbage_of_an_empty_partial(layer: Layer):
    """A rank without keys had weight 0 but an uninitialised output, and 0 * NaN spread.

    Right: the output of a row whose lse is -inf is never read. Merged with anything, on either side, the other comes back exactly.
    """
    full_partial = layer.partial(np.ones((3, 2, 4)), np.full((3, 2), 0.3))
    for garbage in (np.nan, np.inf, -np.inf):
        empty = layer.partial(np.full((3, 2, 4), garbage), np.full((3, 2), -np.inf))
        for pair in ((empty, full_partial), (full_partial, empty)):
            merged = layer.numpy(layer.merge.merge(*pair))
            exact(merged.out, np.ones((3, 2, 4)))
            exact(merged.lse, np.full((3, 2), np.float32(0.3)))
        empty_rows(layer.numpy(layer.merge.merge(empty, empty)), slice(None))
        sink = layer.array(np.array([0.5, -1.0], np.float32))
        exact(layer.numpy(layer.merge.finish(empty, sink, dtype=full_partial.out.dtype)), np.zeros((3, 2, 4)))


def b03_sign_of_an_empty_log_sum_exp(layer: Layer):
    """A sequence without keys got lse +inf from one kernel family and -inf from another, and merging took the sign for a weight.

    Right: -inf and output 0, from prefill and from decode, dense and paged.
    """
    for query_lens in ((2, 1, 2), (1, 1, 1)):
        s = step(layer, query_lens, (5, 0, 4), block_size=layer.block(4))
        got = paged_attend(layer, s, mask=causal())
        close(got, paged_oracle(layer, s, mask=causal()))
        first = query_lens[0]
        empty_rows(got, slice(first, first + query_lens[1]))
    q, k = layer.normal(1, 2, 4, layer.head_size), layer.normal(2, 3, 2, layer.head_size)
    empty_rows(attend(layer, q, k, k, Range(0, 2), np.full(3, -1), mask=full()), slice(None))
    empty_rows(attend(layer, q, k[:0], k[:0], Range(0, 2), Range(0, 0), mask=full()), slice(None))


def b04_masked_rows_with_a_finite_log_sum_exp(layer: Layer):
    """Rows that see no key got an lse near -5e4, the finite stand-in for -inf, which a merge takes for a weight.

    Right: exactly 0 and -inf, and merged with a valid partial the rows are that partial's bit for bit. The same where a context is
    attended to in chunks of two keys, of which later ones are empty for some of the requests.
    """
    s = step(layer, (5,), (2,), block_size=layer.block(2))
    got = paged_attend(layer, s, mask=causal())
    close(got, paged_oracle(layer, s, mask=causal()))
    empty_rows(got, slice(0, 3))
    valid = np.random.default_rng(3).standard_normal((5, 4, layer.head_size)).astype(np.float32), np.full((5, 4), 0.7, np.float32)
    merged = layer.numpy(layer.merge.merge(layer.partial(*got), layer.partial(*valid)))
    exact(merged.out[:3], valid[0][:3])
    exact(merged.lse[:3], valid[1][:3])

    contexts, request = (6, 0, 3), np.repeat(np.arange(3), 2)
    owner, index = np.repeat(np.arange(3), contexts), np.concatenate([np.arange(n) for n in contexts])
    q, k, v = (layer.normal(4 + i, rows, heads, layer.head_size) for i, (rows, heads) in enumerate(((6, 4), (9, 2), (9, 2))))
    queries = Tokens(np.full(6, 100), {"request": request})
    total, bounded = layer.partial(np.zeros((6, 4, layer.head_size)), np.full((6, 4), -np.inf)), None
    for chunk in range(3):
        keys = Tokens(np.where(index // 2 == chunk, index, -1), {"request": owner})
        part = attend(layer, q, k, v, queries, keys, mask=causal() & same("request"))
        empty_rows(part, np.array(contexts)[request] <= 2 * chunk)
        total = layer.merge.merge(total, layer.partial(*part))
        expected = oracle(layer, q, k, v, queries, keys, mask=causal() & same("request"))
        bounded = expected if bounded is None else reference.merge.merge(bounded, expected)
    whole = oracle(layer, q, k, v, queries, Tokens(index, {"request": owner}), mask=causal() & same("request"))
    close(layer.numpy(total), layers.Bounded(whole.value, bounded.bound))


def b06_base_of_the_log_sum_exp(layer: Layer):
    """A kernel returned its log-sum-exp in base 2 and the merge assumed base e: what came last was under-weighted.

    Right: natural logarithm. n keys of score 0 have lse ln n, and 64 keys of value 1 beside 3072 of value 0 merge to 64 / 3136.
    """
    q = layer.rounded(np.zeros((2, 4, layer.head_size)))
    for n in (1, 2, 3, 64, 3072):
        k = layer.normal(n, n, 2, layer.head_size)
        got = attend(layer, q, k, k, Range(n, 2), Range(0, n), mask=causal())
        expected = oracle(layer, q, k, k, Range(n, 2), Range(0, n), mask=causal())
        close(got, expected)
        close(got.lse, layers.Bounded(np.full((2, 4), np.log(n)), expected.bound.lse))
    k = layer.normal(5, 3136, 2, layer.head_size)
    v = layer.rounded(np.broadcast_to((np.arange(3136) >= 3072)[:, None, None], k.shape))
    spans = ((0, 3072), (3072, 64))
    parts = [attend(layer, q, k[a : a + n], v[a : a + n], Range(3136, 2), Range(a, n), mask=causal()) for a, n in spans]
    bounds = [oracle(layer, q, k[a : a + n], v[a : a + n], Range(3136, 2), Range(a, n), mask=causal()) for a, n in spans]
    merged = layer.numpy(layer.merge.merge(*(layer.partial(*part) for part in parts)))
    expected = np.full((2, 4, layer.head_size), 64 / 3136)
    close(merged.out, layers.Bounded(expected, reference.merge.merge(*bounds).bound.out))


def b07_layout_of_the_log_sum_exp(layer: Layer):
    """An empty sequence of a ragged batch wrote its -inf to a neighbour's row, because its early exit used another offset formula.

    Right: lse is [rows, heads], packed; only the empty sequence's row is -inf, and every other is the dense call's.
    """
    s = step(layer, (3, 1, 2), (5, 0, 4), block_size=layer.block(4))
    got = paged_attend(layer, s, mask=causal())
    exact(np.isneginf(got.lse), np.broadcast_to((np.arange(6) == 3)[:, None], (6, 4)))
    close(got, paged_oracle(layer, s, mask=causal()))


def b09_padded_decode_rows(layer: Layer):
    """Padding sequences of length 0 in a captured decode step gave NaN or uninitialised output, which spread to real rows.

    Right: they are exactly 0, and the real rows have the bits of the step without padding.
    """
    padded = step(layer, (1, 1, 1, 1), (7, 0, 3, 0), block_size=layer.block(4), seed=7)
    tables = [[int(block) for block in row if block >= 0] for row in padded.batch.block_table]
    alone = step(
        layer, (1, 1), (7, 3), block_size=layer.block(4), blocks=padded.k.shape[0], tables=[tables[0], tables[2]], seed=7
    )._replace(q=padded.q[[0, 2]])
    got, bare = paged_attend(layer, padded, mask=causal()), paged_attend(layer, alone, mask=causal())
    empty_rows(got, [1, 3])
    layers.same(layer, Partial(*(part[[0, 2]] for part in got)), bare, paged_oracle(layer, alone, mask=causal()))


def b11_poison_in_unused_places(layer: Layer):
    """NaN in masked keys, in the tail of the last page, in stale pages or in padded queries reached the output.

    Right: the bits are those of the call without poison, whatever lies where no query may read: NaN or Inf.
    """
    q, k, v = (layer.normal(i, rows, heads, layer.head_size) for i, (rows, heads) in enumerate(((5, 4), (9, 2), (9, 2))))
    q_pos, k_pos = np.array([3, -1, 4, 5, -1]), np.array([0, 1, -1, 2, 3, -1, 4, 5, -1])
    clean = attend(layer, q, k, v, q_pos, k_pos, mask=causal())
    expected = oracle(layer, q, k, v, q_pos, k_pos, mask=causal())
    s = step(layer, (3, 2, 1), (6, 0, 5), block_size=layer.block(4))
    paged_clean, paged_expected = paged_attend(layer, s, mask=causal()), paged_oracle(layer, s, mask=causal())
    used = np.zeros(s.k.shape[:2], bool)
    for length, table in zip(s.batch.seq_lens, s.batch.block_table, strict=True):
        for j in range(int(length)):
            used[table[j // s.batch.block_size], j % s.batch.block_size] = True
    for poison in (np.nan, np.inf):
        dirty = [x.copy() for x in (q, k, v)]
        for x, pos in zip(dirty, (q_pos, k_pos, k_pos), strict=True):
            x[pos < 0] = poison
        layers.same(layer, attend(layer, *dirty, q_pos, k_pos, mask=causal()), clean, expected)
        k2, v2, q2 = s.k.copy(), s.v.copy(), s.q.copy()
        k2[~used], v2[~used], q2[3:5] = poison, poison, poison
        layers.same(layer, paged_attend(layer, s._replace(q=q2, k=k2, v=v2), mask=causal()), paged_clean, paged_expected)


def b13_blocks_of_empty_rows_with_a_sink(layer: Layer):
    """The first 14 of 16 rows saw no key, and a kernel gave NaN there, though the same rows in mid-batch gave 0.

    Right: output 0 and lse -inf wherever the empty rows stand, and output 0 with a sink too.
    """
    k, v = (layer.normal(i, 2, 1, 16 if layer.head_size < 16 else layer.head_size) for i in (1, 2))
    q = layer.normal(3, 16, 2, k.shape[2])
    sink = np.array([0.3, -0.4], np.float32)
    for first in (0, 1, 2):
        pos = np.concatenate([np.arange(first) + 20, np.arange(14), np.arange(2 - first) + 20])
        got = attend(layer, q, k, v, pos, np.array([14, 15]), mask=causal(), scale=0.1)
        expected = oracle(layer, q, k, v, pos, np.array([14, 15]), mask=causal(), scale=0.1)
        rows = pos < 14
        empty_rows(got, rows)
        close(got, expected)
        given = layer.partial(*got)
        finished = layer.numpy(layer.merge.finish(given, layer.array(sink), dtype=given.out.dtype))
        exact(finished[rows], np.zeros_like(finished[rows]))
        close(finished, reference.merge.finish(expected, sink, dtype="float32"))


REPORTS = (
    Report("B01", b01_merging_empty_partials, ("merge_of_two_empties_is_nan", "merge_starts_from_a_finite_stand_in")),
    Report("B02", b02_garbage_of_an_empty_partial, ("merge_reads_empty_outputs",)),
    Report("B03", b03_sign_of_an_empty_log_sum_exp, ("paged_lse_of_nothing_is_plus_infinity",)),
    Report("B04", b04_masked_rows_with_a_finite_log_sum_exp, ("paged_masks_with_a_finite_score", "masks_with_a_finite_score")),
    Report("B06", b06_base_of_the_log_sum_exp, ("lse_in_base_two",)),
    Report("B07", b07_layout_of_the_log_sum_exp, ("paged_empty_sequence_clears_its_neighbour",)),
    Report("B09", b09_padded_decode_rows, ("paged_padding_reads_a_block",)),
    Report("B11", b11_poison_in_unused_places, ("masked_values_are_multiplied", "paged_tail_is_multiplied")),
    Report("B13", b13_blocks_of_empty_rows_with_a_sink, ("leading_empty_rows_average_the_values",)),
)
