"""ATB's paged attention, from the documents of PagedAttentionOperation (CANN 8.1 to 9.0): one query a sequence, no mask.

Hostile where the documents are silent: a sequence without keys gets junk, keys are summed in chunks of random sizes in random order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu.emulator.assumptions import answer
from npu.emulator.attention import chunks, junk
from npu.emulator.refusal import demand

PAGED = "ATB PagedAttentionOperation"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    workspace: Tensor | None = None,
) -> None:
    """Row t of query [T N D] attends to the first context_lens[t] rows of its blocks in [pages, page size, NK, D], into out [T N DV].

    Lengths are a tensor of the host. Raises RuntimeError where a documented limit is broken.
    """
    _check(query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens, out)
    demand(workspace is None, PAGED, "scratch memory of the caller's is not emulated", "a workspace")
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            out[row] = junk(out[row])
            continue
        k, v = (cache[block_table[row].long()].flatten(0, 1) for cache in (key_cache, value_cache))
        result = _one(query[row], k[:length], v[:length], scale_value)
        if answer("page-tail-arithmetic") == "multiplied":
            tail = v[length : -(-length // key_cache.shape[1]) * key_cache.shape[1]]
            result = result + (0 * tail.float()).sum(0).repeat_interleave(num_heads // v.shape[1], 0)
        out[row] = result.to(out.dtype)


def _check(query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens, out):
    rule, tensors = _rule, {"query": query, "key_cache": key_cache, "value_cache": value_cache, "out": out}
    rule(query.dtype in (torch.float16, torch.bfloat16), "query is float16 or bfloat16", query.dtype)
    for name, tensor in tensors.items():
        rule(tensor.dtype == query.dtype, f"{name} has query's dtype", tensor.dtype)
    for name, tensor in (tensors | {"block_table": block_table, "context_lens": context_lens}).items():
        rule(tensor.is_contiguous(), f"{name} is contiguous", f"shape {list(tensor.shape)}, strides {list(tensor.stride())}")
    rule(query.ndim == 3 and key_cache.ndim == value_cache.ndim == 4, "query has 3 dimensions, caches 4", list(query.shape))
    tokens, heads, size = query.shape
    pages, page_size, key_heads, value_size = value_cache.shape
    rule(heads == num_heads > 0, "headNum is query's num_heads, above 0", f"{num_heads} and {heads}")
    rule(key_heads == (num_kv_heads or num_heads), "kvHeadNum (0: headNum) is the caches' heads", f"{num_kv_heads} and {key_heads}")
    rule(num_heads % key_heads == 0, "headNum % kvHeadNum == 0", f"{num_heads} and {key_heads}")
    rule(list(key_cache.shape) == [pages, page_size, key_heads, size], "keyCache fits query and valueCache", list(key_cache.shape))
    rule(0 < size <= 256 and 0 < value_size <= 256, "head_size is in (0, 256]", f"{size} and {value_size}")
    rule(page_size % 16 == 0 and 0 < page_size <= 128, "block_size % 16 == 0, at most 128", page_size)
    rule(out.shape == (tokens, heads, value_size), "output is [num_tokens, num_heads, head_size of the values]", list(out.shape))
    for name, tensor, rank in (("blockTables", block_table, 2), ("contextLens", context_lens, 1)):
        fits = tensor.dtype == torch.int32 and tensor.ndim == rank and len(tensor) == tokens
        rule(fits, f"{name} is int32 with a row for each token", f"{tensor.dtype}{list(tensor.shape)}")
    rule(context_lens.device.type == "cpu", "contextLens is a tensor of the host", context_lens.device)
    lens, ids = context_lens.tolist(), block_table.flatten().tolist()
    rule(min(lens, default=0) >= 0, "contextLens are not negative", lens)
    room = block_table.shape[1] * page_size
    rule(max(lens, default=0) <= room, "max_num_blocks_per_seq holds the longest of contextLens", f"{lens} in {room}")
    rule(all(0 <= id < pages for id in ids), f"blockTables are in [0, {pages})", ids[:16])


def _rule(holds, text, value):
    demand(holds, PAGED, text, value)


def _one(q, k, v, scale):
    """Online softmax of one row: q [h d], k [s hk d], v [s hk dv] give [h dv]; float32, P rounded to v's dtype."""
    heads, key_heads = len(q), k.shape[1]
    scores = torch.einsum("ngd,knd->ngk", q.float().unflatten(0, (key_heads, -1)), k.float()) * scale
    top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    total, acc = torch.zeros_like(top), scores.new_zeros(*scores.shape[:-1], v.shape[-1])
    for first, last in chunks(1, len(k), heads):
        part = scores[..., first:last]
        higher = torch.maximum(top, part.amax(-1, keepdim=True))
        p, shrink = (part - higher).exp(), (top - higher).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + torch.einsum("ngk,knd->ngd", p.to(v.dtype).float(), v[first:last].float())
        top = higher
    return (acc / total).flatten(0, 1)
