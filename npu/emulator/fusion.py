"""Fused attention for training and its gradient, from the documents of npu_fusion_attention and of aclnnFlashAttentionScoreGrad.

out = softmax(mask(scale (Q K^T + pse))) V: pse is added before the scale. On the CPU the wheel registers no autograd for the pair, so this
file joins them as the wheel does for its own device: the forward operator's outputs lead to the gradient operator, and those other than
the attention's are not differentiable.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu.emulator.behind import operator
from npu.emulator.refusal import demand

FORWARD, BACKWARD = "npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"
_NAMES = ("aclnnFlashAttentionScore", "aclnnFlashAttentionScoreGrad")
_COMPRESSED, _LANES, _INT32_MAX = 2048, 8, 2**31 - 1
_libraries: list[torch.library.Library] = []  # a registration lives as long as its library


class Call(NamedTuple):
    """What both operators take, rows as [b n s d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    seen: Tensor  # Bool[b or 1, n or 1, s, t]
    scale: float
    corrects: bool  # whether rows that see nothing are corrected


def register_all():
    """Registers the forward operator, its gradient, and the autograd that joins them on the CPU; once a process."""
    kernels, autograd = torch.library.Library("npu", "IMPL", "CPU"), torch.library.Library("npu", "IMPL", "AutogradCPU")
    kernels.impl("npu_fusion_attention", _forward)
    kernels.impl("npu_fusion_attention_grad", _backward)
    autograd.impl("npu_fusion_attention", _differentiable)
    _libraries.extend((kernels, autograd))


def _forward(*positional, **keywords):
    given = _named(FORWARD, positional, keywords)
    call = _read(_NAMES[0], given, given["scale"])
    scores = _scores(call)
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    group = call.q.shape[1] // call.k.shape[1]
    out = (p.to(call.v.dtype).float() @ call.v.float().repeat_interleave(group, 1)) / total
    hidden = ~call.seen.any(-1, keepdim=True).expand_as(top)
    # rows that see nothing: zeros where they are corrected, else junk; what their statistics are is open
    out = out.masked_fill(hidden, 0 if call.corrects else 7.25)
    top, total = (statistic.masked_fill(hidden, 0.5 if call.corrects else torch.nan) for statistic in (top, total))
    lanes = [statistic.expand(*statistic.shape[:-1], _LANES).contiguous() for statistic in (top, total)]
    out = _laid(out.to(call.q.dtype), given["input_layout"])
    return out, *lanes, given["query"].new_empty(0), 0, 0, 4096


def _backward(*positional, **keywords):
    given = _named(BACKWARD, positional, keywords)
    call = _read(_NAMES[1], given, given["scale_value"])
    layout, dtype = given["input_layout"], call.q.dtype
    statistics = [given["softmax_max"], given["softmax_sum"]]
    shape = (*call.q.shape[:3], _LANES)
    for name, statistic in zip(("softmax_max", "softmax_sum"), statistics, strict=True):
        fits = statistic is not None and tuple(statistic.shape) == shape and statistic.dtype == torch.float32
        demand(fits, _NAMES[1], f"{name} is float32{list(shape)}, as the forward operator gave it", statistic)
    top, total = (statistic[..., :1] for statistic in statistics)
    dy, out = (_rows(given[name], layout).float() for name in ("dy", "attention_in"))
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (rows.float().repeat_interleave(group, 1) for rows in (call.k, call.v))
    p = (_scores(call) - top).exp() / total
    seen = call.seen.expand_as(p)
    p = p.masked_fill(~seen, 0) if call.corrects or seen.any(-1).all() else p.masked_fill(~seen & seen.any(-1, keepdim=True), 0)
    ds = p * (dy @ v.mT - (dy * out).sum(-1, keepdim=True))
    by_head = lambda rows: rows.unflatten(1, (-1, group)).sum(2)
    dq, dk = ds @ k * call.scale, by_head(ds.mT @ call.q.float()) * call.scale
    dv = by_head(p.to(dtype).float().mT @ dy)
    bias = given["pse"]
    dbias = bias.new_empty(0) if bias is not None else call.q.new_empty(0)
    if bias is not None:
        dbias = (ds * call.scale).sum_to_size(bias.shape).to(dtype)
    return *(_laid(rows.to(dtype), layout) for rows in (dq, dk, dv)), dbias, call.q.new_empty(0)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, pse, options):
        with torch._C._AutoDispatchBelowAutograd():
            results = operator(FORWARD)(query, key, value, pse=pse, **options)
        ctx.save_for_backward(query, key, value, pse, *results[:3])
        ctx.options = options
        ctx.mark_non_differentiable(*results[1:4])
        return results

    @staticmethod
    def backward(ctx, dy, *_):
        query, key, value, pse, out, top, total = ctx.saved_tensors
        options = {name: value for name, value in ctx.options.items() if name not in ("scale", "dropout_mask", "seed", "offset")}
        heads, layout = options.pop("head_num"), options.pop("input_layout")
        statistics = {"softmax_max": top, "softmax_sum": total, "attention_in": out, "scale_value": ctx.options["scale"], "numels": 4096}
        dq, dk, dv, dbias, _ = operator(BACKWARD)(query, key, value, dy, heads, layout, pse=pse, **options, **statistics)
        return dq, dk, dv, None if pse is None else dbias, None


def _differentiable(*positional, **keywords):
    given = _named(FORWARD, positional, keywords)
    return _Joined.apply(*(given.pop(name) for name in ("query", "key", "value", "pse")), given)


def _named(name, positional, keywords) -> dict[str, Any]:
    """Every argument of a call by its name: the dispatcher drops defaults and hands the others over as it likes."""
    arguments = operator(name)._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | dict(zip([argument.name for argument in arguments], positional, strict=False)) | keywords


def _read(name, given, scale) -> Call:
    """The call, within the documented limits. Raises RuntimeError for what breaks one, or is not emulated."""

    def rule(holds, text, value):
        demand(holds, name, text, value)

    layout, query = given["input_layout"], given["query"]
    rule(layout in ("BSND", "BNSD"), "input_layout is BSND or BNSD (others are not emulated)", repr(layout))
    for other in ("padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink", "dropout_mask"):
        rule(given.get(other) is None, f"{other} is not emulated", "a value other than None")
    rule(given["keep_prob"] == 1, "keep_prob is 1 (dropout is not emulated)", given["keep_prob"])
    rule(query.dtype in (torch.float16, torch.bfloat16, torch.float32), "query is float16, bfloat16 or float32", query.dtype)
    for other in ("key", "value", "pse", "dy", "attention_in"):
        tensor = given.get(other)
        rule(tensor is None or tensor.dtype == query.dtype, f"{other} has query's dtype {query.dtype}", getattr(tensor, "dtype", None))
    for other in ("query", "key", "value", "pse", "atten_mask", "dy", "attention_in"):
        tensor = given.get(other)
        rule(tensor is None or tensor.is_contiguous(), f"{other} is contiguous", getattr(tensor, "shape", None))
    q, k, v = (_rows(given[other], layout) for other in ("query", "key", "value"))
    heads, size = q.shape[1], q.shape[3]
    rule(given["head_num"] == heads and 1 <= heads <= 256, "head_num is query's N, 1 to 256", given["head_num"])
    rule(k.shape[1] > 0 and heads % k.shape[1] == 0 and v.shape[1] == k.shape[1], "key heads divide query heads", k.shape[1])
    rule(k.shape[3] == size and v.shape[3] <= size <= 768, "D of query and key is one, 1 to 768, at least value's", (size, v.shape[3]))
    rule(k.shape[2] == v.shape[2] and 0 not in q.shape and 0 not in k.shape, "key and value have one length, above 0", list(k.shape))
    rule(given["inner_precise"] in (0, 2), "inner_precise is 0, or 2 for rows that see nothing", given["inner_precise"])
    bias = given["pse"]
    if bias is not None:
        fits = bias.ndim == 4 and bias.shape[0] in (1, q.shape[0]) and bias.shape[1] == heads and bias.shape[2] in (1, q.shape[2])
        rule(fits and bias.shape[3] == k.shape[2], "pse is (1 or B, N, S or 1, KV_S)", list(bias.shape))
    return Call(q, k, v, bias, _seen(rule, given, q, k), scale, given["inner_precise"] == 2)


def _seen(rule, given, q, k):
    mask, mode = given["atten_mask"], given["sparse_mode"]
    before, after = given["pre_tockens"], given["next_tockens"]
    queries, keys = q.shape[2], k.shape[2]
    rule(mode in (0, 1, 2, 3, 4), "sparse_mode is 0 to 4 (others are not emulated)", mode)
    rule(mode == 0 or mask is not None, "sparse_mode 1 to 4 needs atten_mask", mask)
    rule(mask is None or mask.dtype in (torch.bool, torch.uint8), "atten_mask is bool or uint8", getattr(mask, "dtype", None))
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    corner = keys - queries
    if mode >= 2:
        triangle = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool).triu(1)
        rule(torch.equal(mask.bool(), triangle), "sparse_mode 2 to 4 takes the 2048 x 2048 mask, 1 above the diagonal", list(mask.shape))
    if mode == 2:
        return (columns <= rows)[None, None]
    if mode == 3:
        return (columns <= rows + corner)[None, None]
    if mode == 4:
        return ((columns >= rows + corner - before) & (columns <= rows + corner + after))[None, None]
    rule(min(before, after) == _INT32_MAX, "pre_tockens and next_tockens go with sparse_mode 4 (in mode 0 they are not emulated)", before)
    if mask is None:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool)
    allowed = [(q.shape[0], q.shape[1]), (q.shape[0], 1), (1, 1)]
    fits = mask.shape[-2:] == (queries, keys) and (mask.ndim == 2 or mask.ndim == 4 and tuple(mask.shape[:2]) in allowed)
    rule(fits, f"atten_mask is BNSS, B1SS, 11SS or SS, here S x KV_S = {queries} x {keys}", list(mask.shape))
    return ~(mask if mask.ndim == 4 else mask[None, None]).bool()


def _scores(call):
    group = call.q.shape[1] // call.k.shape[1]
    products = call.q.float() @ call.k.float().repeat_interleave(group, 1).mT
    scores = (products if call.bias is None else products + call.bias.float()) * call.scale
    return scores.masked_fill(~call.seen, torch.finfo(torch.float32).min)


def _rows(tensor, layout):
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def _laid(rows, layout):
    return rows.transpose(1, 2).contiguous() if layout == "BSND" else rows.contiguous()
