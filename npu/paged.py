"""A paged KV cache: allocate, convert, write, gather, and attention over a block table."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from fattn.types import LAYOUTS, Batch, Mask, Pages, Partial
from npu import _operators, limits
from npu._admit import admit, contiguous
from npu._checks import cache_sizes, check_devices, check_key_values, check_rows, name_of
from npu._rules import INT32_MAX, sparse_mode


def allocate(num_blocks: int, kv_heads: int, head_size: int, value_size: int, *, block_size: int, layout: str, dtype) -> Pages:
    """A cache of zeros for num_blocks * block_size tokens, on torch's default device. Raises ValueError for a size or layout."""
    for name, size in (
        ("num_blocks", num_blocks),
        ("kv_heads", kv_heads),
        ("head_size", head_size),
        ("value_size", value_size),
        ("block_size", block_size),
    ):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    lengths = {"h": kv_heads, "p": num_blocks, "b": block_size}
    shape = [lengths[axis] for axis in layout[:-1]]
    k, v = (torch.zeros((*shape, size), dtype=dtype) for size in (head_size, value_size))
    return Pages(k, v, layout=layout, block_size=block_size)


def convert(cache: Pages, *, layout: str) -> Pages:
    """The same cache in another layout (a copy, unless it is the layout already). Raises ValueError for an unknown layout."""
    cache_sizes(cache)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    k, v = (_permuted(array, cache.layout, layout).contiguous() for array in (cache.k, cache.v))
    return Pages(k, v, layout=layout, block_size=cache.block_size)


def write(cache: Pages, k: Float[Tensor, "t hk d"], v: Float[Tensor, "t hk dv"], slots: Int32[Tensor, "t"]) -> Pages:
    """The cache with row i of k and v at slot slots[i] = block * block_size + offset: in place, the storage is the argument's.

    The operator takes distinct slots inside the cache, and nothing checks a tensor on the device: a placed batch's slot_mapping has
    padding mapped to null blocks. Raises ValueError for shapes or dtypes that do not fit, and Unsupported for what `limits` lists.
    Source: the documents of npu_scatter_pa_kv_cache.
    """
    _, kv_heads = cache_sizes(cache)
    check_devices({"cache.k": cache.k, "cache.v": cache.v, "k": k, "v": v, "slots": slots})
    for name, rows, array in (("k", k, cache.k), ("v", v, cache.v)):
        check_rows(name, rows)
        if rows.dtype != array.dtype:
            raise ValueError(f"{name} and the cache must share one dtype, got {name_of(rows.dtype)} and {name_of(array.dtype)}")
        if rows.shape[1:] != (kv_heads, array.shape[-1]):
            raise ValueError(f"{name} has rows of {list(rows.shape[1:])}, the cache's are {[kv_heads, array.shape[-1]]} (heads, size)")
    check_key_values(k, v)
    if tuple(slots.shape) != (k.shape[0],):
        raise ValueError(f"slots has shape {list(slots.shape)} for {k.shape[0]} rows of k")
    limits.check(limits.Facts("paged.write", name_of(cache.k.dtype), kv_heads=kv_heads, layout=cache.layout, contiguous=contiguous(cache)))
    if k.shape[0]:
        _operators.scatter(k.device.type)(k.contiguous(), v.contiguous(), cache.k, cache.v, slots.contiguous())
    return cache


def gather(cache: Pages, block_table: Int32[Tensor, "b p"]) -> tuple[Float[Tensor, "b s hk d"], Float[Tensor, "b s hk dv"]]:
    """Keys and values of the blocks that each row of the table names, end to end: s = p * block_size. An id out of range gives zeros."""
    blocks, _ = cache_sizes(cache)
    check_devices({"cache.k": cache.k, "cache.v": cache.v, "block_table": block_table})
    if block_table.ndim != 2:
        raise ValueError(f"block_table must be [sequences, blocks], got shape {list(block_table.shape)}")
    known = (block_table >= 0) & (block_table < blocks)
    ids = block_table.clamp(0, blocks - 1).reshape(-1)
    return tuple(_gathered(_permuted(array, cache.layout, "pbhd"), ids, known) for array in (cache.k, cache.v))


def attend(
    q: Float[Tensor, "t h d"],
    cache: Pages,
    batch: Batch,
    slopes: Float[Tensor, "h"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    lse: bool = True,
) -> Partial:
    """Attention of a batch's packed queries over its sequences' keys in the cache, as dense.attend over the first seq_len keys of each.

    The batch comes from npu.place, under the same mask. `slopes` adds ALiBi's -slope |p - j|, rounded to q's dtype. `out` has q's dtype,
    `lse` is float32, or None where it is not asked for. What the packed layout (TND) does not take goes by BSND, or BNSD for a phbd cache:
    one query a sequence and equal lengths as views, mixed lengths with queries padded to the longest (two copies).
    Raises ValueError for arguments that do not fit together, and Unsupported for what `limits` lists.
    Source: the documents of npu_fused_infer_attention_score.
    """
    facts = admit(q, cache, batch, slopes, mask=mask, softcap=softcap)
    constants, form = batch.host.constants, batch.host.constants["form"]
    if q.shape[0] == 0 or form.queries == 0:
        nothing = _operators.nothing(q, cache.v.shape[-1])
        return nothing if lse else Partial(nothing.out, None)
    mode, left, right = sparse_mode(mask) if "compressed" in constants else (0, INT32_MAX, INT32_MAX)
    layout = "TND" if facts.packed else "BSND" if cache.layout == "pbhd" else "BNSD"
    lens = constants["query_ends"] if facts.packed else tuple(min(n, form.queries) for n in batch.host.query_lens)
    out, sums = _operators.attention(q.device.type)(
        _laid(q, batch, form, layout),
        _viewed(cache.k, cache.layout),
        _viewed(cache.v, cache.layout),
        pse_shift=None if slopes is None else _shift(q, batch, slopes),
        atten_mask=constants.get("hidden", constants.get("compressed")),
        actual_seq_lengths=lens,
        actual_seq_lengths_kv=constants["kv_lens"],
        block_table=constants["block_table"],
        num_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        scale=scale,
        pre_tokens=left,
        next_tokens=right,
        input_layout=layout,
        sparse_mode=mode,
        # rows that see nothing spoil precision unless the operator corrects them; it does so for several queries only
        inner_precise=2 if "empty" in constants and form.queries > 1 else 0,
        block_size=cache.block_size,
        softmax_lse_flag=lse,
    )
    out = _packed(out, batch, form, layout)
    sums = _packed(sums, batch, form, "TND" if layout == "TND" else "BNSD")[..., 0] if lse else None
    if "empty" in constants:
        out = out.masked_fill(constants["empty"][..., None], 0)
        sums = sums.masked_fill(constants["empty"], -torch.inf) if lse else None
    return Partial(out, sums)


def _laid(q, batch, form, layout):
    """Packed queries [t h d] as the operator's layout: themselves, [b queries h d] or [b h queries d]."""
    if layout == "TND":
        return q.contiguous()
    if not form.uniform:
        q = q.index_select(0, batch.host.constants["padded_rows"])
    q = q.contiguous().view(-1, form.queries, *q.shape[1:])
    return q if layout == "BSND" else q.transpose(1, 2).contiguous()


def _packed(result, batch, form, layout):
    """An operator's result in its layout as packed rows [t h size]."""
    if layout == "TND":
        return result
    if layout == "BNSD":
        result = result.transpose(1, 2).contiguous()
    rows = result.view(-1, *result.shape[2:])
    return rows if form.uniform else rows.index_select(0, batch.host.constants["packed_rows"])


def _shift(q, batch, slopes):
    """ALiBi's bias as the operator takes it: [b h queries keys] in q's dtype. A key table cut at a window shifts both positions alike."""
    constants = batch.host.constants
    queries, keys = constants["form"].queries, constants["block_table"].shape[1] * batch.block_size
    own = constants["kv_lens_array"] - batch.query_start_loc.diff()
    p = own[:, None, None] + torch.arange(queries, dtype=torch.int32, device=q.device)[:, None]
    distance = (p - torch.arange(keys, dtype=torch.int32, device=q.device)).abs()
    bias = -slopes[:, None, None] * distance[:, None]
    return bias.clamp_min(torch.finfo(q.dtype).min).to(q.dtype)


def _viewed(array, layout):
    """A cache as the operator takes it, without a copy: BnBsH [p b hk*d] of pbhd, BnNBsD [p hk b d] of phbd."""
    return array.view(array.shape[0], array.shape[1], -1) if layout == "pbhd" else array


def _permuted(array, layout, other):
    return array.permute([layout.index(axis) for axis in other])


def _gathered(array, ids, known):
    rows = array.index_select(0, ids).view(*known.shape, *array.shape[1:])
    return rows.masked_fill(~known[..., None, None, None], 0).flatten(1, 2)
