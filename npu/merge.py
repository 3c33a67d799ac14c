"""The monoid of Partials: attention over some keys, merged with attention over others. A sink enters in `finish`, once."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fattn.types import Partial
from npu._checks import check_devices


def empty(tokens: int, heads: int, value_size: int, *, dtype) -> Partial:
    """Attention over no keys, the identity of merge: out = 0 [t h dv], lse = -inf [t h]. On torch's default device."""
    return Partial(torch.zeros((tokens, heads, value_size), dtype=dtype), torch.full((tokens, heads), -torch.inf, dtype=dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both: lse = ln(e^lse_a + e^lse_b), out = sum of e^(lse_i - lse) out_i. In float32, or float64 for float64.

    An `out` may have an operator's dtype. The `out` of a row whose lse is -inf is never read.
    Raises ValueError where an lse is missing or shapes differ.
    """
    check_devices({"a.out": a.out, "a.lse": a.lse, "b.out": b.out, "b.lse": b.lse})
    _check(a, b)
    a, b = _cleaned(a), _cleaned(b)
    top = torch.maximum(a.lse, b.lse)
    none = top == -torch.inf
    top = top.masked_fill(none, 0)
    # e^-inf is 0: an empty side weighs nothing, and `top` is finite
    wa, wb = torch.exp(a.lse - top), torch.exp(b.lse - top)
    total = (wa + wb).masked_fill(none, 1)
    out = (wa / total)[..., None] * a.out + (wb / total)[..., None] * b.out
    return Partial(out, (top + torch.log(total)).masked_fill(none, -torch.inf))


def finish(partial: Partial, sink: Float[Tensor, "h"] | None = None, *, dtype) -> Float[Tensor, "t h dv"]:
    """The output in `dtype`, with one extra logit per query head of value 0 where a sink is given: out / (1 + e^(sink - lse)).

    The sink is neither scaled nor capped; -inf is no sink, +inf gives 0. Launches nothing without a sink where
    `dtype` is the output's. Raises ValueError where a sink meets a Partial without lse.
    """
    if sink is None:
        return partial.out.to(dtype)
    check_devices({"partial.out": partial.out, "partial.lse": partial.lse, "sink": sink})
    if partial.lse is None:
        raise ValueError("partial.lse is None: a sink needs the log-sum-exp; ask for it with lse=True")
    if sink.shape != partial.lse.shape[-1:]:
        raise ValueError(f"sink has shape {list(sink.shape)}, but there are {partial.lse.shape[-1]} query heads")
    out, lse = _cleaned(partial)
    # 1 / (1 + e^(sink - lse)); a sink of -inf as the least finite number, so that no difference is inf - inf
    share = torch.sigmoid(lse - sink.to(lse.dtype).clamp_min(torch.finfo(lse.dtype).min))
    return (share[..., None] * out).to(dtype)


def _cleaned(partial):
    """In the accumulation dtype, and zero where no key was seen: a weight of 0 times NaN would be NaN."""
    accumulator = torch.float64 if partial.lse.dtype == torch.float64 else torch.float32
    out = partial.out.masked_fill((partial.lse == -torch.inf)[..., None], 0)
    return Partial(out.to(accumulator), partial.lse.to(accumulator))


def _check(a, b):
    for name, partial in (("a", a), ("b", b)):
        if partial.lse is None:
            raise ValueError(f"{name}.lse is None: merging needs the log-sum-exp; ask for it with lse=True")
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape:
        raise ValueError(
            f"partials disagree in shape: out {list(a.out.shape)} and {list(b.out.shape)}, lse {list(a.lse.shape)} and {list(b.lse.shape)}"
        )
