"""Decode by ATB's paged attention: for what npu_fused_infer_attention_score does not take, where the host has it."""

from __future__ import annotations

import torch
from torch import Tensor

from fattn.types import Batch, Pages, Partial, Unsupported
from npu import _operators
from npu.limits import LIMITS, Facts


def demand(facts: Facts):
    """Raises Unsupported where the call goes by ATB's operator and the installed torch_npu has none."""
    if facts.by_atb and not _operators.has_paged_attention():
        limit = LIMITS["group"]
        reason = f"{limit.text} ({limit.operator}); ATB's _npu_paged_attention takes more, and this host does not have it"
        instead = "install the NNAL package of this CANN release and source its set_env.sh, or split the query heads over several calls"
        raise Unsupported(limit.argument, facts.heads // facts.kv_heads, reason, instead)


def decode(facts: Facts, q: Tensor, cache: Pages, batch: Batch, *, scale: float, out: Partial | None) -> Partial:
    """paged.attend of an admitted call whose sequences have one query each: out [t h dv] in q's dtype, no LSE.

    Source: the documents of ATB's PagedAttentionOperation.
    """
    constants = batch.host.constants
    rows = q.new_empty((*q.shape[:2], cache.v.shape[-1])) if out is None else out.out
    _operators.paged_attention(q.device.type)(
        query=q.contiguous(),
        key_cache=cache.k,
        value_cache=cache.v,
        num_kv_heads=facts.kv_heads,
        num_heads=facts.heads,
        scale_value=scale,
        block_table=constants["block_table"],
        context_lens=torch.from_numpy(constants["context_lens"]),  # the operator reads lengths on the host
        out=rows,
    )
    empty = constants.get("empty")
    if empty is not None:
        rows.masked_fill_(empty[..., None], 0)
    return Partial(rows, None)
