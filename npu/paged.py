"""A paged KV cache: allocate, convert, write, gather, and attention over a block table."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from fattn.types import LAYOUTS, Batch, Mask, Pages, Partial
from npu import _operators
from npu._admit import admit, admit_write
from npu._checks import cache_sizes, check_devices, name_of
from npu._paged import attend_by, store


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
    sizes = cache_sizes(cache)
    check_devices({"cache.k": cache.k, "cache.v": cache.v, "k": k, "v": v, "slots": slots})
    admit_write(cache, sizes, k, v, slots)
    return store(cache, k, v, slots)


def gather(cache: Pages, block_table: Int32[Tensor, "b p"]) -> tuple[Float[Tensor, "b s hk d"], Float[Tensor, "b s hk dv"]]:
    """Keys and values of the blocks that each row of the table names, end to end: s = p * block_size. An id out of range gives zeros.

    Raises ValueError for a table that is not two-dimensional integers.
    """
    blocks, _ = cache_sizes(cache)
    check_devices({"cache.k": cache.k, "cache.v": cache.v, "block_table": block_table})
    if block_table.ndim != 2 or block_table.dtype not in (torch.int32, torch.int64):
        found = f"{name_of(block_table.dtype)}{list(block_table.shape)}"
        raise ValueError(f"block_table must be int32 or int64 [sequences, blocks], got {found}")
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
    out: Partial | None = None,
    workspace: Tensor | None = None,
) -> Partial:
    """Attention of a batch's packed queries over its sequences' keys in the cache, as dense.attend over the first seq_len keys of each.

    The batch comes from npu.place, under the same mask. `slopes` adds ALiBi's -slope |p - j|, rounded to q's dtype. `out` has q's dtype,
    `lse` is float32, or None where it is not asked for. What the packed layout (TND) does not take goes by BSND, or BNSD for a phbd cache:
    one query a sequence and equal lengths as views, mixed lengths with queries padded to the longest (two copies).
    `out` takes the result, and is returned; `workspace` is the operator's scratch memory, as `graph` measures it.
    Raises ValueError for arguments that do not fit together, and Unsupported for what `limits` lists.
    Source: the documents of npu_fused_infer_attention_score.
    """
    facts = admit(q, cache, cache_sizes(cache), batch, slopes, mask=mask, softcap=softcap, lse=lse, out=out, workspace=workspace)
    launch = _operators.attention_call(q.device.type, workspace)
    return attend_by(launch, facts, q, cache, batch, slopes, scale=scale, lse=lse, out=out, own_memory=workspace is not None)


def _permuted(array, layout, other):
    return array.permute([layout.index(axis) for axis in other])


def _gathered(array, ids, known):
    rows = array.index_select(0, ids).view(*known.shape, *array.shape[1:])
    return rows.masked_fill(~known[..., None, None, None], 0).flatten(1, 2)
