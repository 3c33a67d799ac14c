"""Small calls of the operators, described on the CPU and run on a device, and what they should give: attention in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu._rules import triangle

ERRORS = (RuntimeError, TypeError, ValueError)  # how an operator refuses a call
NEAR = 0.03  # of float16 and bfloat16 results of numbers about 1; decisions that are asked about move results by more


@dataclass(frozen=True)
class Attention:
    """A call of npu_fused_infer_attention_score: sequences [q h d], [k hk d], [k hk dv] on the CPU, arguments by name on the device."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    arguments: Mapping[str, Any]

    @property
    def layout(self) -> str:
        return self.arguments["input_layout"]


@dataclass(frozen=True)
class Lengths:
    """Queries and keys of each sequence."""

    queries: Sequence[int]
    keys: Sequence[int]


def dense(
    lengths: Lengths,
    device: str,
    *,
    layout: str = "BSND",
    heads: int = 4,
    key_heads: int = 2,
    size: int = 64,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Attention:
    """A call over keys held whole, padded with zeros where the layout pads. Gaussian numbers, scale 1 / sqrt(size)."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        [torch.randn(n, h, d, generator=random).to(dtype) for n in lens]
        for lens, h, d in (
            (lengths.queries, heads, size),
            (lengths.keys, key_heads, size),
            (lengths.keys, key_heads, value_size or size),
        )
    )
    packed = layout == "TND"
    lens = (_ends(lengths.queries), _ends(lengths.keys)) if packed else (list(lengths.queries), list(lengths.keys))
    arguments = {"query": _laid(q, layout, device), "key": _laid(k, layout, device), "value": _laid(v, layout, device)}
    arguments |= {"actual_seq_lengths": lens[0], "actual_seq_lengths_kv": lens[1], "input_layout": layout, "softmax_lse_flag": True}
    arguments |= {"num_heads": heads, "num_key_value_heads": key_heads, "scale": size**-0.5}
    return Attention(q, k, v, arguments)


def paged(call: Attention, device: str, *, block: int, by_head: bool = False, tail: float = 0.0) -> Attention:
    """The same call with its keys in blocks, [p b hk*d] or [p hk b d]; rows past a sequence's keys hold `tail`."""
    counts = [-(-len(rows) // block) for rows in call.k]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.arange(first, first + count)
        first += count
    caches = {}
    for name, sequences in (("key", call.k), ("value", call.v)):
        cache = torch.full((max(first, 1) * block, *sequences[0].shape[1:]), tail, dtype=sequences[0].dtype)
        for rows, row in zip(sequences, table, strict=True):
            cache[int(row[0]) * block :][: len(rows)] = rows
        cache = cache.unflatten(0, (-1, block))
        caches[name] = (cache.transpose(1, 2).contiguous() if by_head else cache.flatten(2)).to(device)
    lens = {"actual_seq_lengths_kv": [len(rows) for rows in call.k], "block_table": table.to(device), "block_size": block}
    return Attention(call.q, call.k, call.v, {**call.arguments, **caches, **lens})


def changed(call: Attention, changes: Mapping[str, Any]) -> Attention:
    """The call with some arguments replaced."""
    return Attention(call.q, call.k, call.v, {**call.arguments, **changes})


def causal(call: Attention, device: str) -> Attention:
    """The call under the compressed causal mask, aligned at the last query and the last key."""
    return changed(call, {"sparse_mode": 3, "atten_mask": triangle(device)})


def raw(call: Attention) -> tuple[Tensor, Tensor]:
    """What the operator returns, on the CPU. Raises what it raises."""
    arguments = dict(call.arguments)
    rows = [arguments.pop(name) for name in ("query", "key", "value")]
    return tuple(result.cpu() for result in torch.ops.npu.npu_fused_infer_attention_score.default(*rows, **arguments))


def run(call: Attention) -> list[tuple[Tensor, Tensor]]:
    """(out [q h dv], lse [q h]) of each sequence, on the CPU in float32. Raises what the operator raises."""
    return by_sequence(call, *raw(call))


def by_sequence(call: Attention, out: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
    """An operator's results as (out [q h dv], lse [q h]) of each sequence, in float32, without padding."""
    out, sizes = out.float(), [len(q) for q in call.q]
    if call.layout == "TND":
        return list(zip(out.split(sizes), lse[..., 0].split(sizes), strict=True))
    out = out.transpose(1, 2) if call.layout == "BNSD" else out
    return [(out[b, :n], lse[b, :, :n, 0].T) for b, n in enumerate(sizes)]


def band(queries: int, keys: int, corner: int, before: int, after: int) -> Tensor:
    """Bool [queries keys]: key j from i + corner - before to i + corner + after."""
    offset = torch.arange(keys)[None] - torch.arange(queries)[:, None] - corner
    return (offset >= -before) & (offset <= after)


def exact(call: Attention, sequence: int, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(out [q h dv], lse [q h]) of one sequence in float64, where `seen` [q k] lets queries see keys; rows that see none are NaN, -inf."""
    q, k, v = (part[sequence].double() for part in (call.q, call.k, call.v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.arguments["scale"]
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def near(found: Tensor, expected: Tensor) -> bool:
    """Whether results agree but for rounding; nothing agrees with NaN."""
    return bool(((found.double() - expected.double()).abs() <= NEAR * (1 + expected.double().abs())).all())


def right(call: Attention, seen: Sequence[Tensor] | None = None) -> str:
    """Runs the call: "" where every sequence has the exact output and LSE under `seen` (by default everything), else what is wrong."""
    for sequence, (out, lse) in enumerate(run(call)):
        whole = torch.ones(len(call.q[sequence]), len(call.k[sequence]), dtype=torch.bool)
        expected = exact(call, sequence, whole if seen is None else seen[sequence])
        for name, found, exactly in (("output", out, expected[0]), ("LSE", lse, expected[1])):
            if not near(found, exactly):
                worst = (found.double() - exactly).abs().max().item()
                return f"the {name} of sequence {sequence} is wrong by up to {worst:.3g}"
    return ""


def _laid(rows, layout, device):
    if layout == "TND":
        return torch.cat(rows).to(device)
    longest = max(map(len, rows))
    padded = torch.stack([torch.cat([r, r.new_zeros(longest - len(r), *r.shape[1:])]) for r in rows])
    return (padded.transpose(1, 2).contiguous() if layout == "BNSD" else padded).to(device)


def _ends(lens):
    return torch.tensor(list(lens)).cumsum(0).tolist()
