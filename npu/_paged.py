"""Attention over a paged cache as one call of the operator: its arguments from a placed batch, and its results as packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fattn.types import Batch, Pages, Partial
from npu import _atb, _operators
from npu.limits import Facts

# Calls the operator on its arguments by name, into the given outputs (None: into its own), and returns (attention_out, softmax_lse)
Launch = Callable[[Mapping[str, object], list[Tensor] | None], tuple[Tensor, Tensor]]


def attend_by(
    launch: Launch,
    facts: Facts,
    q: Tensor,
    cache: Pages,
    batch: Batch,
    slopes: Tensor | None,
    *,
    scale: float,
    lse: bool,
    out: Partial | None = None,
    own_memory: bool = False,
) -> Partial:
    """paged.attend of a call that is admitted already, by one call of `launch`, or of ATB's operator where the facts say so.

    Results go to `out` where it is given. `own_memory` gives the operator outputs of the caller's also where `out` is not.
    """
    constants = batch.host.constants
    form = constants["form"]
    if q.shape[0] == 0 or form.queries == 0:
        nothing = _operators.nothing(q, cache.v.shape[-1])
        return given(nothing if lse else Partial(nothing.out, None), out)
    if facts.by_atb:
        return _atb.decode(facts, q, cache, batch, scale=scale, out=out)
    layout = "TND" if facts.packed else "BSND" if cache.layout == "pbhd" else "BNSD"
    mode, left, right = constants["mode"]
    empty = constants.get("empty")
    arguments = {
        "query": _laid(q, batch, form, layout),
        "key": _viewed(cache.k, cache.layout),
        "value": _viewed(cache.v, cache.layout),
        "pse_shift": None if slopes is None else _shift(q, batch, slopes),
        "atten_mask": constants.get("hidden", constants.get("compressed")),
        **lengths(batch, layout),
        "block_table": constants["block_table"],
        "num_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "scale": scale,
        "pre_tokens": left,
        "next_tokens": right,
        "input_layout": layout,
        "sparse_mode": mode,
        # rows that see nothing spoil precision unless the operator corrects them; it does so for several queries only
        "inner_precise": 2 if empty is not None and form.queries > 1 else 0,
        "block_size": cache.block_size,
        "softmax_lse_flag": lse,
    }
    if out is None and not own_memory:
        found, sums = launch(arguments, None)
        return _results(found, sums if lse else None, batch, form, layout, empty)
    direct = out is not None and (layout == "TND" or (form.uniform and form.queries == 1))
    room = _room(q, cache, batch, form, layout, lse, out if direct else None)
    launch(arguments, room)
    if not direct:
        return given(_results(room[0], room[1] if lse else None, batch, form, layout, empty), out)
    if empty is not None:
        out.out.masked_fill_(empty[..., None], 0)
        if lse:
            out.lse.masked_fill_(empty, -torch.inf)
    return out


def store(cache: Pages, k: Tensor, v: Tensor, slots: Tensor) -> Pages:
    """paged.write of a call that is admitted already."""
    if k.shape[0]:
        _operators.scatter(k.device.type)(k.contiguous(), v.contiguous(), cache.k, cache.v, slots.contiguous())
    return cache


def lengths(batch: Batch, layout: str) -> dict[str, tuple[int, ...]]:
    """The host lengths of a placed batch as the operator takes them in a layout: what changes from step to step in a captured graph."""
    constants = batch.host.constants
    return {
        "actual_seq_lengths": constants["query_ends" if layout == "TND" else "query_rows"],
        "actual_seq_lengths_kv": constants["kv_lens"],
    }


def given(result: Partial, out: Partial | None) -> Partial:
    """The result, in the caller's tensors where there are any."""
    if out is None:
        return result
    out.out.copy_(result.out)
    if result.lse is not None:
        out.lse.copy_(result.lse)
    return out


def _room(q, cache, batch, form, layout, lse, out):
    """Tensors for the operator's results in its layout: views of `out`'s, or new ones."""
    heads, value_size = q.shape[1], cache.v.shape[-1]
    if layout == "TND":
        rows, sums = (q.shape[0], heads, value_size), (q.shape[0], heads, 1)
    else:
        sequences = len(batch.host.query_lens)
        rows, sums = (sequences, form.queries, heads, value_size), (sequences, heads, form.queries, 1)
        rows = rows if layout == "BSND" else (sequences, heads, form.queries, value_size)
    sums = sums if lse else (0,)
    if out is None:
        return [q.new_empty(rows), q.new_empty(sums, dtype=torch.float32)]
    return [out.out.view(rows), out.lse.view(sums) if lse else q.new_empty(sums, dtype=torch.float32)]


def _results(out, sums, batch, form, layout, empty):
    out = _packed(out, batch, form, layout)
    if sums is not None:
        sums = _packed(sums, batch, form, "TND" if layout == "TND" else "BNSD")[..., 0]
    if empty is not None:
        out = out.masked_fill(empty[..., None], 0)
        sums = None if sums is None else sums.masked_fill(empty, -torch.inf)
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
    # low-precision slopes would round distances past 256
    bias = -slopes.to(torch.promote_types(slopes.dtype, torch.float32))[:, None, None] * distance[:, None]
    return bias.clamp_min(torch.finfo(q.dtype).min).to(q.dtype)


def _viewed(array, layout):
    """A cache as the operator takes it, without a copy: BnBsH [p b hk*d] of pbhd, BnNBsD [p hk b d] of phbd."""
    return array.view(array.shape[0], array.shape[1], -1) if layout == "pbhd" else array
