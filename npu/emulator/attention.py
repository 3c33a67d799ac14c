"""What fused infer attention computes, from its documents: softmax(scale Q K^T + pse_shift, masked) V, sequence by sequence.

Hostile where the documents are silent: what no one promised is junk, and keys are summed in chunks of random sizes in random order.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from npu.emulator.assumptions import answer
from npu.emulator.attention_call import Call, key_side, query_side
from npu.emulator.attention_rules import check

LOWEST = torch.finfo(torch.float32).min
_EMPTY_LSE = {"+inf": torch.inf, "-inf": -torch.inf, "lowest": LOWEST}


def compute(call: Call) -> tuple[Tensor, Tensor]:
    """(attention_out in the query's layout and dtype, LSE float32 [B N Q_S 1] or [T N 1]; shape [0] where not asked for).

    Raises RuntimeError where the call breaks a documented limit.
    """
    check(call)
    out, lse = _outputs(call)
    if answer("padded-query-output") == "junk":
        out, lse = junk(out), junk(lse)
    by_sequence = zip(
        query_side(call, call.query),
        key_side(call, call.key),
        key_side(call, call.value),
        query_side(call, out),
        _lse_side(call, lse),
        strict=True,
    )
    for sequence, (q, k, v, out_rows, lse_rows) in enumerate(by_sequence):
        if len(q):
            _one(call, sequence, q, k, v, out_rows, lse_rows)
    return out, lse if call.wants_lse else lse.new_empty(0)


def junk(like: Tensor) -> Tensor:
    """What memory may hold, in the shape and dtype of `like`: finite garbage and NaN in turn."""
    held = torch.full(like.shape, 7.25, dtype=like.dtype)
    held.view(-1)[1::2] = torch.nan
    return held


def _outputs(call):
    shape = list(call.query.shape)
    shape[-1] = call.value_size * (call.heads if call.layout == "BSH" else 1)
    rows = [call.query_rows, call.heads, 1] if call.packed else [call.batch, call.heads, call.query_rows, 1]
    return call.query.new_zeros(shape), call.query.new_zeros(rows, dtype=torch.float32)


def _lse_side(call, lse):
    """Views [q, heads] of each sequence's actual rows."""
    if call.packed:
        return lse[: sum(call.query_sizes)].squeeze(-1).split(call.query_sizes)
    return [rows[:size] for rows, size in zip(lse.squeeze(-1).transpose(1, 2), call.query_sizes, strict=True)]


def _one(call, sequence, q, k, v, out, lse):
    """Attention of one sequence: q [q h d], k [k hk d] and v [k hk dv] (rows past the length too, where paged), into out and lse [q h]."""
    keys, group = call.key_sizes[sequence], call.heads // call.key_heads
    empty_lse = _EMPTY_LSE[answer("lse-empty-decode" if call.one_query else "lse-empty-prefill")]
    if keys == 0:
        lse.fill_(empty_lse)
        # zeros are documented where all keys are empty
        out.copy_(junk(out) if call.key_rows and answer("no-keys-output") == "junk" else torch.zeros_like(out))
        return
    tail, k, v = v[keys:], k[:keys], v[:keys]
    seen = _seen(call, sequence, len(q), keys)
    if answer("masked-keys-arithmetic") == "skipped":
        v = v.masked_fill(~seen.any(0)[:, None, None], 0)
    bias = None if call.bias is None else call.bias[min(sequence, len(call.bias) - 1), :, : len(q), :keys]
    result, log_sum = _softmax(call, q, k, v, seen, bias, chunks(len(q), keys, call.heads))
    if answer("page-tail-arithmetic") == "multiplied":
        result = result + (0 * tail.float()).sum(0).repeat_interleave(group, 0)
    out.copy_(result)
    lse.copy_(log_sum)
    hidden = ~seen.any(-1)
    lse[hidden] = empty_lse
    corrects = call.precise >= 2 or (call.mode == 3 and len(q) > keys and not call.one_query)
    if corrects:
        out[hidden] = 0
    elif answer("empty-row-output") == "junk":
        out[hidden] = junk(out[hidden])
    else:
        out[hidden] = v.float().mean(0).repeat_interleave(group, 0).to(out.dtype)


def chunks(queries: int, keys: int, heads: int) -> list[tuple[int, int]]:
    """Runs of keys in a random order, the same for the same sizes (a kernel's tiling depends on those alone)."""
    rng = random.Random(f"{queries} {keys} {heads}")
    cuts = sorted({0, keys, *(rng.randrange(keys) for _ in range(rng.randrange(4)))})
    runs = list(zip(cuts, cuts[1:], strict=False))
    rng.shuffle(runs)
    return runs


def _softmax(call, q, k, v, seen, bias, runs):
    """Online softmax over the runs of keys: ([q h dv], LSE [q h]), float32, P rounded to v's dtype."""
    queries, heads, group = len(q), call.heads, call.heads // call.key_heads
    scores = torch.einsum("qngd,knd->ngqk", q.float().unflatten(1, (-1, group)), k.float()) * call.scale
    if bias is not None:
        scores += bias.float().unflatten(0, (-1, group))
    scores.masked_fill_(~seen, -torch.inf)
    top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    total, acc = torch.zeros_like(top), scores.new_zeros(*scores.shape[:-1], v.shape[-1])
    for first, last in runs:
        part = scores[..., first:last]
        higher = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = higher.masked_fill(higher == -torch.inf, 0)
        p, shrink = (part - safe).exp(), (top - safe).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + torch.einsum("ngqk,knd->ngqd", p.to(v.dtype).float(), v[first:last].float())
        top = higher
    lse = top + total.log()
    if call.sink is not None:
        sink = call.sink.float().view(-1, group, 1, 1)
        with_sink = torch.logaddexp(lse, sink)
        acc, total = acc * (lse - with_sink).exp() / total, torch.ones_like(total)
        lse = with_sink if answer("sink-in-lse") == "yes" else lse
    out = acc / total
    return out.permute(2, 0, 1, 3).reshape(queries, heads, -1), lse.squeeze(-1).permute(2, 0, 1).reshape(queries, heads)


def _seen(call, sequence, queries, keys):
    """Bool [queries, keys]: what the sparse mode and the mask let through."""
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None]
    everything = torch.ones(queries, keys, dtype=torch.bool)
    explicit = everything
    if call.mask is not None and call.mode <= 1:
        explicit = ~_mask_of(call, sequence)[:queries, :keys].bool()
        if call.one_query and call.batch == 1 and answer("one-query-mask") == "512 keys":
            explicit &= columns < 512
    if _ignores_band(call, queries):
        return explicit
    last_corner = keys - queries
    if answer("padded-query-alignment") == "tensor" and not call.packed:
        last_corner = call.key_rows - call.query_rows
    if call.mode == 0 and call.mask is not None:
        corner = 0 if answer("mask-band-alignment") == "top left" else last_corner
        return explicit & _band(rows + corner, columns, call.before, call.after)
    if call.mode == 2:
        return columns <= rows
    if call.mode == 3:
        return columns <= rows + last_corner
    return _band(rows + last_corner, columns, call.before, call.after) if call.mode == 4 else explicit


def _ignores_band(call, queries):
    if not call.packed:
        return call.one_query
    return {"all-one": call.one_query, "never": False, "each": queries == 1}[answer("tnd-one-query-band")]


def _band(rows, columns, before, after):
    return (columns >= rows - before) & (columns <= rows + after)


def _mask_of(call, sequence):
    """The sequence's explicit mask [q, k], of any documented rank."""
    mask = call.mask
    if mask.ndim == 2:
        return mask[sequence][None] if call.one_query else mask
    return mask.flatten(0, -3)[min(sequence, mask.shape[0] - 1)]
