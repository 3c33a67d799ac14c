"""Writing keys and values into a paged cache, from the documents of npu_scatter_pa_kv_cache and of ATB's reshape_and_cache."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from npu.emulator.assumptions import answer
from npu.emulator.refusal import demand

SCATTER, RESHAPE = "aclnnScatterPaKvCache", "ATB ReshapeAndCacheOperation"


def scatter(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    compress_lens=None,
    compress_seq_offsets=None,
    seq_lens=None,
    cache_mode="PA_NZ",
) -> None:
    """Row t of key [T N D] goes to slot slot_mapping[t] of key_cache, in place; value likewise.

    A cache is [pages, page size, N, D] where cache_mode is Norm or None, and [pages, N D / last, page size, last] where it is PA_NZ.
    Raises RuntimeError where a documented limit is broken.
    """
    demand(
        compress_lens is None and compress_seq_offsets is None and seq_lens is None, SCATTER, "compressed caches are not emulated", "given"
    )
    demand(cache_mode in (None, "Norm", "PA_NZ"), SCATTER, "cache_mode is None, 'Norm' or 'PA_NZ'", repr(cache_mode))
    _check(SCATTER, key, value, key_cache, value_cache, slot_mapping, tiled=cache_mode == "PA_NZ")
    for rows, pages in ((key, key_cache), (value, value_cache)):
        _write(rows, pages, slot_mapping, tiled=cache_mode == "PA_NZ")


def scatter_functional(key, value, key_cache, value_cache, slot_mapping, **options) -> tuple[Tensor, Tensor]:
    """As `scatter`, into copies that are returned."""
    caches = key_cache.clone(), value_cache.clone()
    scatter(key, value, *caches, slot_mapping, **options)
    return caches


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """Row t of key [T N D] goes to row slot_indices[t] of key_cache [pages, page size, N, D], in place; value likewise.

    Raises RuntimeError where a documented limit is broken.
    """
    demand(slot_indices.dtype == torch.int32, RESHAPE, "slot_indices is int32", slot_indices.dtype)
    demand(key.dtype in (torch.float16, torch.bfloat16, torch.int8), RESHAPE, "key is float16, bfloat16 or int8", key.dtype)
    _check(RESHAPE, key, value, key_cache, value_cache, slot_indices, tiled=False)
    for rows, pages in ((key, key_cache), (value, value_cache)):
        _write(rows, pages, slot_indices, tiled=False)


def _check(operator, key, value, key_cache, value_cache, slots, *, tiled):
    rule = functools.partial(_rule, operator)
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slots": slots}
    for name, tensor in tensors.items():
        rule(tensor.is_contiguous(), f"{name} is contiguous", f"shape {list(tensor.shape)}, strides {list(tensor.stride())}")
    for name in ("value", "key_cache", "value_cache"):
        rule(tensors[name].dtype == key.dtype, f"{name} has key's dtype {key.dtype}", tensors[name].dtype)
    rule(key.ndim == 3 and value.ndim == 3, "key and value have three dimensions", f"{list(key.shape)} and {list(value.shape)}")
    rule(key.shape[:2] == value.shape[:2], "key and value agree in tokens and heads", f"{list(key.shape)} and {list(value.shape)}")
    rule(
        slots.dtype in (torch.int32, torch.int64) and slots.ndim == 1,
        "slots are one-dimensional int32 or int64",
        f"{slots.dtype}{list(slots.shape)}",
    )
    rule(len(slots) == len(key), "there is a slot for each token", f"{len(slots)} slots, {len(key)} tokens")
    for rows, pages in ((key, key_cache), (value, value_cache)):
        rule(pages.ndim == 4, "a cache has four dimensions", list(pages.shape))
        fits = pages.shape[1] * pages.shape[3] == rows[0].numel() if tiled else pages.shape[2:] == rows.shape[1:]
        rule(
            len(rows) == 0 or fits,
            f"a {'PA_NZ' if tiled else 'Norm'} cache holds rows of [N, D] = {list(rows.shape[1:])}",
            list(pages.shape),
        )
    slot_list = slots.tolist()
    written = [slot for slot in slot_list if slot >= 0] if answer("negative-slot") == "skipped" else slot_list
    count = key_cache.shape[0] * key_cache.shape[2 if tiled else 1]
    wrong = [(token, slot) for token, slot in enumerate(slot_list) if not 0 <= slot < count and slot in written]
    rule(not wrong, f"slots are in [0, {count})", f"(token, slot) {wrong[:4]}")
    rule(len(set(written)) == len(written), "slots are distinct", f"slots {slot_list[:16]}")


def _rule(operator, holds, text, value):
    demand(holds, operator, text, value)


def _write(rows, pages, slots, *, tiled):
    slots = slots.long()
    kept = slots >= 0
    rows, slots = rows[kept], slots[kept]
    if tiled:
        page_size, last = pages.shape[2], pages.shape[3]
        pages.transpose(1, 2)[slots // page_size, slots % page_size] = rows.reshape(len(rows), -1, last)
    else:
        pages.flatten(0, 1)[slots] = rows
