"""Batches over a paged cache for cases of paged and standard: built by the plan, as an engine would."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fattn.conformance import generators
from fattn.conformance.cases import MASKS, Case, dtype_of, numbers
from fattn.conformance.operations.base import labels_at
from fattn.conformance.plain import paged as plain
from fattn.plan import batch as plan
from fattn.types import Batch, Mask, Pages


class Kind(NamedTuple):
    """A class of batches: choices of (query length, key length) for each sequence, the padded tokens and sequences, and the longest tile
    of queries and table of keys."""

    sequences: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    tokens: int
    padded_sequences: int
    max_query_len: int = 32
    longest: int = 130


_ENDS = (129, 128, 127, 65, 64, 63, 17, 2, 1)
KINDS = {
    "decode": Kind((((1,), _ENDS), ((1,), (130, *_ENDS)), ((1, 0), (*_ENDS, 0))), 5, 6, max_query_len=1),
    "prefill": Kind((((33, 16, 17, 2), (0,)), ((31, 32, 15, 1), (0,))), 66, 3, max_query_len=64),
    "chunked": Kind((((17, 16, 3), _ENDS), ((9, 1), (130, *_ENDS)), ((6, 5), (6, 5, 4))), 34, 4),
    "drafts": Kind((((2, 5, 16), _ENDS), ((4, 2, 3), _ENDS)), 22, 3),
    "mixed": Kind((((1,), _ENDS), ((20, 4), (0,)), ((0,), (5, 0)), ((7, 3), (4, 2, 0))), 32, 6),
    "long": Kind((((1,), (2048, 2047)), ((1,), (65, 64))), 3, 3, max_query_len=1, longest=2048),
}


class Built(NamedTuple):
    """A batch with its queries and its cache."""

    q: np.ndarray
    cache: Pages
    batch: Batch


def lengths(case: Case):
    """Choices of lengths for every sequence of the case's class of batches. Key length 0: as long as the queries."""
    return KINDS[case["batch"]].sequences


def sequences_of(case: Case) -> list[tuple[int, int]]:
    """(query_len, seq_len) of each sequence."""
    kind = KINDS[case["batch"]]
    given = case.lengths or [(queries[0], keys[0]) for queries, keys in kind.sequences]
    whole = case["batch"] in ("prefill", "mixed")
    return [(query_len, query_len if whole and seq_len == 0 else seq_len) for query_len, seq_len in given]


def build(case: Case, mask: Mask, *, scale: float, softcap: float | None, slopes=None) -> Built:
    """The batch of a case: lengths, shuffled block tables, labels, rows, and a cache that holds every key up to each length."""
    rng, kind, block_size = case.rng(), KINDS[case["batch"]], case["block_size"]
    (h, hk), (d, dv) = numbers(case["heads"]), numbers(case["sizes"])
    lens = sequences_of(case)
    pages = -(-kind.longest // block_size)
    nulls = -(-kind.tokens // block_size)
    num_blocks = pages * len(lens) + 2 + nulls
    ids = rng.permutation(num_blocks - nulls)
    tables = [ids[row * pages : row * pages + max(-(-seq_len // block_size), 1)].tolist() for row, (_, seq_len) in enumerate(lens)]
    query_labels, key_labels = _labels(rng, mask, lens)
    null_blocks = tuple(range(num_blocks - nulls, num_blocks))
    batch = plan.build(
        [query_len for query_len, _ in lens],
        [seq_len for _, seq_len in lens],
        tables,
        block_size=block_size,
        num_blocks=num_blocks,
        query_labels=query_labels,
        key_labels=key_labels,
        null_blocks=null_blocks,
    )
    surplus = kind.tokens - len(batch.slot_mapping)
    least = len(lens) + (surplus if max(query_len for query_len, _ in lens) <= 1 else 1)
    batch = plan.pad(batch, tokens=kind.tokens, sequences=max(kind.padded_sequences, least), pages=pages, null_blocks=null_blocks)
    batch = replace(batch, max_query_len=kind.max_query_len)
    dtype = dtype_of(case["dtype"])
    q = rng.standard_normal((kind.tokens, h, d)).astype(dtype)
    shape = (num_blocks, block_size, hk)
    cache = Pages(*(rng.standard_normal((*shape, size)).astype(dtype) for size in (d, dv)), "pbhd", block_size)
    for row, (query_len, seq_len) in enumerate(lens):
        own_q, k, v = generators.rows(case.generator, rng, query_len, seq_len, (h, hk, d, dv), dtype)
        for edit in case.edits:
            if edit.startswith(f"spotlight:{row}:"):
                i, j = (int(n) for n in edit.split(":")[2:])
                if i < query_len and j < seq_len:
                    sides = plain.sequence(batch, row)[1:3]
                    bias = None if slopes is None else plain.dense.alibi(slopes.astype(np.float64), *sides)
                    generators.spotlight(own_q, k, v, i, j, *sides, bias, mask=mask, scale=scale, softcap=softcap)
        q[batch.query_start_loc[row] : batch.query_start_loc[row + 1]] = own_q
        _fill(cache, batch, row, k, v)
    return Built(q, plain.convert(cache, layout=case["layout"]), batch)


def _fill(cache, batch, row, k, v):
    at = slots_of(batch, row)
    for array, rows in ((cache.k, k), (cache.v, v)):
        array.reshape(-1, *array.shape[2:])[at] = rows


def slots_of(batch: Batch, row: int) -> np.ndarray:
    """Where the keys of a sequence lie, as slots."""
    positions = np.arange(int(batch.seq_lens[row]))
    return batch.block_table[row][positions // batch.block_size] * batch.block_size + positions % batch.block_size


def _labels(rng, mask, lens):
    if not mask.labels():
        return {}, {}
    queries, keys = {name: [] for name in mask.labels()}, {name: [] for name in mask.labels()}
    for query_len, seq_len in lens:
        table = labels_at(rng, mask, max(seq_len, 1), context=max(seq_len - query_len, 0))
        for name, label in table.items():
            keys[name].append(label[:seq_len])
            queries[name].append(label[np.clip(seq_len - query_len + np.arange(query_len), 0, None)])
    return {name: np.concatenate(parts) for name, parts in queries.items()}, keys


def static(case: Case) -> dict:
    """mask, scale and softcap of a case."""
    d = numbers(case["sizes"])[0]
    return {"mask": MASKS[case["mask"]], "scale": d**-0.5 if case["scale"] == "rsqrt" else float(case["scale"]), "softcap": case["softcap"]}


def slopes_of(case: Case) -> np.ndarray | None:
    """ALiBi slopes of a case that has them."""
    h = numbers(case["heads"])[0]
    return None if case["slopes"] is None else (2.0 ** -np.linspace(1, 6, h)).astype(np.float32)


def shorter(batch: Batch, row: int) -> Batch:
    """The batch with one key less in a sequence, its queries one position earlier."""
    seq_lens = batch.seq_lens.copy()
    seq_lens[row] -= 1
    host = replace(batch.host, seq_lens=tuple(seq_lens.tolist()))
    return replace(batch, seq_lens=seq_lens, host=host)


def padding_rows(batch: Batch) -> np.ndarray:
    """Bool[t]: rows at negative positions."""
    queries = np.diff(batch.query_start_loc)
    positions = np.arange(batch.query_start_loc[-1]) + np.repeat(batch.seq_lens - queries - batch.query_start_loc[:-1], queries)
    return positions < 0
