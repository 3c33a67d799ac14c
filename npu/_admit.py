"""What a call over a paged cache checks before it launches anything, from facts that the host has."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch

from fattn.types import Batch, Mask, Pages, Partial
from npu import _atb, limits
from npu._checks import check_devices, check_heads, check_key_values, check_rows, check_softcap, name_of
from npu._training import refuse_gradient


def admit(
    q,
    cache: Pages,
    sizes: tuple[int, int],
    batch: Batch,
    slopes,
    *,
    mask: Mask,
    softcap: float | None,
    lse: bool = True,
    out: Partial | None = None,
    workspace=None,
    others: Mapping[str, object] | None = None,
) -> limits.Facts:
    """What paged.attend checks: raises its ValueError or Unsupported, else describes the call.

    `sizes` are cache_sizes(cache). `others` have to be on the same device.
    """
    num_blocks, kv_heads = sizes
    refuse_gradient("paged.attend", q=q)
    _check_placed(batch)
    constants = batch.host.constants
    arguments = {"q": q, "cache.k": cache.k, "cache.v": cache.v, "batch.block_table": batch.block_table, "slopes": slopes}
    check_rows("q", q)
    check_devices(arguments if others is None else arguments | others)
    check_heads(q, "cache.k", kv_heads, cache.k.shape[-1], cache.k.dtype)
    check_softcap(softcap)
    rows, heads, head_size = q.shape
    if slopes is not None and tuple(slopes.shape) != (heads,):
        raise ValueError(f"slopes has shape {list(slopes.shape)}, but q has {heads} heads")
    if constants["mask"] is not mask and constants["mask"] != mask:
        raise ValueError(f"batch was placed for mask {constants['mask']!r}, not {mask!r}: place it once for each mask")
    if batch.block_size != cache.block_size:
        raise ValueError(f"batch.block_size={batch.block_size}, but cache.block_size={cache.block_size}")
    if rows != constants["tokens"]:
        raise ValueError(f"q has {rows} rows, but the batch's query lengths add up to {constants['tokens']}")
    check_out(q, cache.v.shape[-1], lse=lse, out=out, workspace=workspace)
    check_reach(batch, num_blocks=num_blocks, writes=False)
    form = constants["form"]
    facts = _kept(_permitted)(
        name_of(q.dtype),
        heads,
        kv_heads,
        head_size,
        cache.v.shape[-1],
        form.queries,
        constants["longest"],
        len(constants["kv_lens"]),
        form.explicit,
        None if slopes is None else name_of(q.dtype),
        softcap,
        batch.host.exact,
        cache.layout,
        cache.block_size,
        contiguous(cache),
        form.uniform and form.queries == 1 and not lse and workspace is None,
    )
    _atb.demand(facts)
    return facts


def once_a_step(batch: Batch, tensors, statics, check):
    """What check() returned for a call of these tensors' kinds and these static arguments; only the first layer of a step runs it.

    A check may read the shapes, dtypes, devices and strides of the tensors, the static arguments and the batch, and nothing else.
    """
    known = None if batch.host is None else batch.host.constants.get("checked")
    if known is None or torch.compiler.is_compiling():
        return check()
    kind = (*[None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors], *statics)
    if kind not in known:
        known[kind] = check()
    return known[kind]


def _kept(cached):
    """The function with its results kept, or without where torch.compile reads it, which keeps none."""
    return cached.__wrapped__ if torch.compiler.is_compiling() else cached


@functools.lru_cache(4096)
def _permitted(*described):
    """The facts of a paged.attend call that breaks no limit; every layer of a step asks the same. Raises Unsupported for one that does."""
    facts = limits.Facts("paged.attend", *described)
    limits.check(facts)
    return facts


def check_out(q, value_size: int, *, lse: bool, out: Partial | None, workspace):
    """Raises ValueError where `out` cannot take the result of attention of q [t h d] over values of `value_size`, or workspace is none."""
    if workspace is not None and not (isinstance(workspace, torch.Tensor) and workspace.device == q.device):
        raise ValueError(f"workspace must be a tensor on q's device {q.device}, or None; got {workspace!r}")
    if out is None:
        return
    if (out.lse is None) == lse:
        raise ValueError(f"out.lse is {'missing' if lse else 'given'}, but lse={lse}: out is a Partial of what is asked for")
    wanted = [("out", out.out, (*q.shape[:2], value_size), q.dtype)]
    wanted += [("lse", out.lse, tuple(q.shape[:2]), torch.float32)] if lse else []
    for name, array, shape, dtype in wanted:
        if tuple(array.shape) != shape or array.dtype != dtype or array.device != q.device or not array.is_contiguous():
            found = f"{name_of(array.dtype)}{list(array.shape)} on {array.device}, strides {list(array.stride())}"
            raise ValueError(f"out.{name} must be contiguous {name_of(dtype)}{list(shape)} on {q.device}, got {found}")


def admit_write(cache: Pages, sizes: tuple[int, int], k, v, slots):
    """What paged.write checks, devices apart: raises its ValueError or Unsupported. `sizes` are cache_sizes(cache)."""
    kv_heads = sizes[1]
    for name, rows, array in (("k", k, cache.k), ("v", v, cache.v)):
        check_rows(name, rows)
        if rows.dtype != array.dtype:
            raise ValueError(f"{name} and the cache must share one dtype, got {name_of(rows.dtype)} and {name_of(array.dtype)}")
        if rows.shape[1] != kv_heads or rows.shape[2] != array.shape[-1]:
            raise ValueError(f"{name} has rows of {list(rows.shape[1:])}, the cache's are {[kv_heads, array.shape[-1]]} (heads, size)")
    check_key_values(k, v)
    if tuple(slots.shape) != (k.shape[0],) or slots.dtype not in (torch.int32, torch.int64):
        found = f"{name_of(slots.dtype)}{list(slots.shape)}"
        raise ValueError(f"slots must be int32 or int64, one a row of k, got {found} for {k.shape[0]} rows")
    _kept(_permit_write)(name_of(cache.k.dtype), kv_heads, cache.layout, contiguous(cache))


@functools.lru_cache(4096)
def _permit_write(dtype, kv_heads, layout, contiguous):
    limits.check(limits.Facts("paged.write", dtype, kv_heads=kv_heads, layout=layout, contiguous=contiguous))


def check_reach(batch: Batch, *, num_blocks: int, writes: bool):
    """Raises ValueError naming field, row and value where a placed batch leads outside a cache of `num_blocks` blocks.

    Looks at the host's copies alone. `writes` asks for a slot of every row, too.
    """
    _check_placed(batch)
    constants = batch.host.constants
    low_block, high_block, low_slot, high_slot = constants["extremes"]
    if low_block < 0 or high_block >= num_blocks:
        table = constants["host_table"]
        row, page = (int(i) for i in np.argwhere((table < 0) | (table >= num_blocks))[0])
        raise ValueError(f"batch.block_table[{row}, {page}]={table[row, page]} is not one of the cache's {num_blocks} blocks")
    if not writes:
        return
    slots = np.asarray(batch.host.slots)
    if low_slot < 0:
        row = int(np.argmax(slots < 0))
        raise ValueError(
            f"batch.slot_mapping[{row}]={slots[row]} must not reach the operator: build the batch with null_blocks for padding"
        )
    if high_slot >= num_blocks * batch.block_size:
        row = int(np.argmax(slots))
        raise ValueError(f"batch.slot_mapping[{row}]={slots[row]} is past the cache's {num_blocks} blocks of {batch.block_size} tokens")


def _check_placed(batch):
    if batch.host is None or "extremes" not in batch.host.constants:
        raise ValueError("batch is not on the device yet: npu.place(batch, device, mask) makes what the operators need")


def contiguous(cache: Pages) -> bool:
    """Whether both arrays of a cache are, as operators ask."""
    return cache.k.is_contiguous() and cache.v.is_contiguous()
