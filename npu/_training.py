"""Attention that has gradients: the operator for training, whose gradient is an operator too.

The operators for inference have none, so what a gradient may be asked of goes by this one. torch_npu joins the two for tensors on the
device, `npu.emulator` for tensors on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fattn.types import Partial, Unsupported
from npu import _operators
from npu._checks import name_of
from npu._rules import INT32_MAX, sparse_mode, triangle

OPERATOR = "npu_fusion_attention"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def asks(*tensors: Tensor | None) -> bool:
    """Whether a result of these tensors takes part in a gradient."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_gradient(operation: str, **tensors: Tensor | None):
    """Raises Unsupported where a gradient would be asked of an operation whose operators have none."""
    if asks(*tensors.values()):
        name = next(name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad)
        raise Unsupported(
            f"{name}.requires_grad",
            True,
            f"{operation} goes by operators without a gradient",
            "call it under torch.no_grad(), or dense.attend over the keys that paged.gather gives",
        )


def attend(q, k, v, bias, how: str, mask, seen: Tensor | None, *, scale: float, softcap: float | None) -> Partial:
    """dense.attend through `npu_fusion_attention`: `how` as dense_form says, `seen` Bool[#h t s] where it is "explicit".

    The gradient of `out` reaches q, k, v and bias; that of `lse` is refused. Raises Unsupported for what the operator does not take.
    Source: the documents of npu_fusion_attention.
    """
    _check(q, k, v, bias, scale, softcap)
    (t, h, _), s = q.shape, k.shape[0]
    mode, left, right = 0, INT32_MAX, INT32_MAX
    hidden = pse = empty = None
    if how == "compressed":
        mode, left, right = sparse_mode(mask)
        hidden = triangle(q.device)
    elif how == "explicit":
        hidden = (~seen)[None]
        empty = ~seen.any(-1).expand(h, t).T
    if bias is not None:
        # the operator adds before it scales; what is hidden is finite, so that no product is NaN
        pse = (torch.where(seen, bias, 0) / scale).to(q.dtype).expand(h, t, s).contiguous()[None]
    out, top, total, *_ = _operators.fusion(q.device.type)(
        *(rows.contiguous()[None] for rows in (q, k, v)),
        h,
        "BSND",
        pse=pse,
        atten_mask=hidden,
        scale=scale,
        pre_tockens=left,
        next_tockens=right,
        sparse_mode=mode,
        inner_precise=2 if how == "explicit" else 0,
    )
    lse = (top + total.log())[0, ..., 0].T
    out = out[0]
    if empty is not None:
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return Partial(out, _NoGradient.apply(lse, out))


class _NoGradient(torch.autograd.Function):
    """The identity, as something that depends on `out`: a gradient that comes here is refused, not lost."""

    @staticmethod
    def forward(ctx, lse, out):
        ctx.set_materialize_grads(False)
        return lse.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient is not None:
            raise Unsupported(
                "lse", "its gradient", f"{OPERATOR} has a gradient of its output alone", "a loss of `out`, or fattn's function"
            )
        return None, None


def _check(q, k, v, bias, scale, softcap):
    size, value_size = q.shape[2], v.shape[2]
    for broken, argument, value, limit, instead in (
        (q.dtype not in DTYPES, "q.dtype", name_of(q.dtype), "float16, bfloat16 or float32", "cast q, k and v"),
        (softcap is not None, "softcap", softcap, "the operator has no cap on scores", "softcap=None, or fattn's function"),
        (
            bias is not None and bias.dtype != q.dtype,
            "bias.dtype",
            bias is not None and name_of(bias.dtype),
            "q's dtype",
            "bias.to(q.dtype)",
        ),
        # it adds before it scales: the bias goes divided by the scale, which float16 may not hold
        (bias is not None and q.dtype == torch.float16, "bias", "float16", "biases are bfloat16 or float32 here", "bfloat16 or float32"),
        (bias is not None and scale == 0, "scale", scale, "a bias is divided by the scale", "a scale other than 0"),
        (not 0 < size <= 768, "head_size", size, "a head has at most 768 dims", "split the heads"),
        (value_size > size, "value_size", value_size, "values are no wider than keys", "pad q and k with zeros"),
        (q.shape[1] > 256, "heads", q.shape[1], "at most 256 query heads", "split the heads over several calls"),
    ):
        if broken:
            raise Unsupported(argument, value, f"{limit} ({OPERATOR})", instead)
