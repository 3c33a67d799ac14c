"""Sequences for the emulated attention, packed into each documented layout, and attention written anew in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

torch.set_num_threads(1)
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@dataclass
class Sequences:
    """Queries [q h d], keys [k hk d] and values [k hk dv] of each sequence, in one dtype."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def query_lens(self):
        return [len(q) for q in self.q]

    @property
    def key_lens(self):
        return [len(k) for k in self.k]


def draw(query_lens, key_lens, *, heads=4, key_heads=2, size=128, value_size=None, dtype=torch.float16, seed=0):
    """Gaussian sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)

    def rows(lens, heads, size):
        return [torch.randn(n, heads, size, generator=generator).to(dtype) for n in lens]

    return Sequences(rows(query_lens, heads, size), rows(key_lens, key_heads, size), rows(key_lens, key_heads, value_size or size))


def exact(q, k, v, seen, *, scale, bias=None):
    """Attention of one sequence in float64, one head at a time: (out [q h dv], lse [q h]); rows that see nothing are 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for head in range(q.shape[1]):
        scores = scale * q[:, head].double() @ k[:, head // group].double().T
        if bias is not None:
            scores = scores + bias[head].double()
        scores = torch.where(seen, scores, -torch.inf)
        lses.append(scores.logsumexp(-1))
        weights = torch.where(seen, (scores - lses[-1][:, None]).exp(), 0)
        outs.append(weights @ v[:, head // group].double())
    return torch.stack(outs, 1), torch.stack(lses, 1)


def causal(queries, keys):
    """Each query sees the keys up to its own place, the last query the last key."""
    return torch.arange(keys)[None] <= torch.arange(queries)[:, None] + keys - queries


def band(queries, keys, before, after):
    offset = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    return (offset >= -before) & (offset <= after)


def cumulative(lens):
    return torch.tensor(lens).cumsum(0).tolist()


def padded(rows, *, fill=0.0):
    """[B S h d] of sequences of several lengths."""
    longest = max(map(len, rows))
    return torch.stack([torch.cat([r, torch.full((longest - len(r), *r.shape[1:]), fill, dtype=r.dtype)]) for r in rows])


def dense(sequences, layout):
    """query, key and value in a layout, and the keywords that describe them; padding rows hold NaN."""
    heads = {"num_heads": sequences.q[0].shape[1], "num_key_value_heads": sequences.k[0].shape[1], "input_layout": layout}
    parts = sequences.q, sequences.k, sequences.v
    if layout == "TND":
        lens = {"actual_seq_lengths": cumulative(sequences.query_lens), "actual_seq_lengths_kv": cumulative(sequences.key_lens)}
        return [torch.cat(part) for part in parts], heads | lens
    lens = {"actual_seq_lengths": sequences.query_lens, "actual_seq_lengths_kv": sequences.key_lens}
    return [laid(padded(part, fill=torch.nan), layout) for part in parts], heads | lens


def paged(sequences, layout, *, page_size, by_head=False, seed=0):
    """As `dense`, keys and values in pages of a shuffled order; rows and pages that no length reaches hold NaN."""
    counts = [-(-n // page_size) for n in sequences.key_lens]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    caches = []
    for part in (sequences.k, sequences.v):
        cache = torch.full((pages, page_size, *part[0].shape[1:]), torch.nan, dtype=part[0].dtype)
        taken = iter(order)
        for b, rows in enumerate(part):
            for p, chunk in enumerate(rows.split(page_size)) if len(rows) else ():
                page = next(taken)
                table[b, p] = page
                cache[page, : len(chunk)] = chunk
        caches.append(cache.transpose(1, 2).contiguous() if by_head else cache.flatten(2))
    (query, _, _), keywords = dense(sequences, layout)
    keywords |= {"actual_seq_lengths_kv": sequences.key_lens, "block_table": table, "block_size": page_size}
    return [query, *caches], keywords


def laid(rows, layout):
    """[B S h d] as BSH, BSND or BNSD."""
    return {"BSH": lambda: rows.flatten(2), "BSND": lambda: rows, "BNSD": lambda: rows.transpose(1, 2).contiguous()}[layout]()


def sequences_of(out, lse, sequences, layout):
    """The operator's outputs as a list of (out [q h d], lse [q h]), one per sequence, without padding."""
    if layout == "TND":
        return list(zip(out.split(sequences.query_lens), lse.squeeze(-1).split(sequences.query_lens), strict=True))
    heads = sequences.q[0].shape[1]
    out = out.unflatten(2, (heads, -1)) if layout == "BSH" else out.transpose(1, 2) if layout == "BNSD" else out
    return [(out[b, :n], lse[b, :, :n, 0].T) for b, n in enumerate(sequences.query_lens)]
