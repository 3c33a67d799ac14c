"""What a call over a paged cache checks before it launches anything, from facts that the host has."""

from __future__ import annotations

from fattn.types import Batch, Mask, Pages
from npu import limits
from npu._checks import cache_sizes, check_devices, check_heads, check_rows, check_softcap, name_of


def admit(q, cache: Pages, batch: Batch, slopes, *, mask: Mask, softcap: float | None) -> limits.Facts:
    """What paged.attend checks: raises its ValueError or Unsupported, else describes the call."""
    num_blocks, kv_heads = cache_sizes(cache)
    _check(q, cache, batch, slopes, mask, kv_heads, softcap)
    check_reach(batch, num_blocks=num_blocks, writes=False)
    constants = batch.host.constants
    facts = limits.Facts(
        "paged.attend",
        name_of(q.dtype),
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_size=q.shape[2],
        value_size=cache.v.shape[-1],
        queries=constants["form"].queries,
        keys=max(constants["kv_lens"], default=0),
        sequences=len(constants["kv_lens"]),
        explicit=constants["form"].explicit,
        additive=None if slopes is None else name_of(q.dtype),
        softcap=softcap,
        exact=batch.host.exact,
        layout=cache.layout,
        block_size=cache.block_size,
        contiguous=contiguous(cache),
    )
    limits.check(facts)
    return facts


def _check(q, cache, batch, slopes, mask, kv_heads, softcap):
    check_rows("q", q)
    devices = {"q": q, "cache.k": cache.k, "cache.v": cache.v, "batch.block_table": batch.block_table, "slopes": slopes}
    check_devices(devices)
    check_heads(q, "cache.k", kv_heads, cache.k.shape[-1], cache.k.dtype)
    check_softcap(softcap)
    if slopes is not None and tuple(slopes.shape) != (q.shape[1],):
        raise ValueError(f"slopes has shape {list(slopes.shape)}, but q has {q.shape[1]} heads")
    _check_placed(batch)
    if batch.host.constants["mask"] != mask:
        raise ValueError(f"batch was placed for mask {batch.host.constants['mask']!r}, not {mask!r}: place it once for each mask")
    if batch.block_size != cache.block_size:
        raise ValueError(f"batch.block_size={batch.block_size}, but cache.block_size={cache.block_size}")
    total = sum(batch.host.query_lens)
    if q.shape[0] != total:
        raise ValueError(f"q has {q.shape[0]} rows, but the batch's query lengths add up to {total}")


def check_reach(batch: Batch, *, num_blocks: int, writes: bool):
    """Raises ValueError naming field, row and value where a placed batch leads outside a cache of `num_blocks` blocks.

    Looks at the host's copies alone. `writes` asks for a slot of every row, too.
    """
    _check_placed(batch)
    extremes = batch.host.constants["extremes"]
    for place, value in extremes["block_table"]:
        if not 0 <= value < num_blocks:
            raise ValueError(f"batch.block_table{place}={value} is not one of the cache's {num_blocks} blocks")
    for place, value in extremes["slot_mapping"] if writes else ():
        if value < 0:
            raise ValueError(f"batch.slot_mapping{place}={value} must not reach the operator: build the batch with null_blocks for padding")
        if value >= num_blocks * batch.block_size:
            raise ValueError(f"batch.slot_mapping{place}={value} is past the cache's {num_blocks} blocks of {batch.block_size} tokens")


def _check_placed(batch):
    if batch.host is None or "extremes" not in batch.host.constants:
        raise ValueError("batch is not on the device yet: npu.place(batch, device, mask) makes what the operators need")


def contiguous(cache: Pages) -> bool:
    """Whether both arrays of a cache are, as operators ask."""
    return cache.k.is_contiguous() and cache.v.is_contiguous()
