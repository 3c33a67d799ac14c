"""What npu_rotary_mul computes, from its document: input * r1 + rotated(input) * r2."""

from __future__ import annotations

import torch
from torch import Tensor

from npu.emulator.assumptions import answer
from npu.emulator.refusal import demand

OPERATOR = "aclnnRotaryPositionEmbedding"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """input * r1 + rotated * r2 in input's shape and dtype: rotated is (-second half, first half) in mode half, pairs (-x1, x0) in mode
    interleave. r1 and r2 (cosines and sines) broadcast over heads, and in mode half over the batch or not at all.

    Raises RuntimeError where a documented limit is broken.
    """
    demand(rotate is None, OPERATOR, "the rotate matrix is not emulated", "a tensor")
    demand(rotary_mode in ("half", "interleave"), OPERATOR, "rotary_mode is 'half' or 'interleave'", repr(rotary_mode))
    demand(input.ndim in (3, 4), OPERATOR, "input has 3 or 4 dimensions", list(input.shape))
    demand(input.dtype in _FLOATS, OPERATOR, "input is float16, bfloat16 or float32", input.dtype)
    size = input.shape[-1]
    demand(size % 2 == 0 and size < 896, OPERATOR, "D is even and less than 896", size)
    for name, table in (("r1", r1), ("r2", r2)):
        _check_table(name, table, input, rotary_mode)
    demand(
        r1.shape == r2.shape and r1.dtype == r2.dtype,
        OPERATOR,
        "r1 and r2 are alike",
        f"{r1.dtype}{list(r1.shape)}, {r2.dtype}{list(r2.shape)}",
    )
    if rotary_mode == "half":
        first, second = input.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-input[..., 1::2], input[..., 0::2]), -1).flatten(-2)
    if answer("rotary-arithmetic") == "input":
        r1, r2 = r1.to(input.dtype), r2.to(input.dtype)
        return (input * r1 + rotated * r2).contiguous()
    return (input.float() * r1.float() + rotated.float() * r2.float()).to(input.dtype).contiguous()


def _check_table(name, table, input, mode):
    dtypes = _FLOATS if answer("rotary-table-dtype") == "any" else (input.dtype,)
    demand(table.dtype in dtypes, OPERATOR, f"{name} has input's dtype {input.dtype}", table.dtype)
    demand(table.ndim == input.ndim, OPERATOR, f"{name} has input's rank", f"{list(table.shape)} for {list(input.shape)}")
    shape, full = list(table.shape), list(input.shape)
    demand(
        shape[-1] == full[-1] and all(n in (1, m) for n, m in zip(shape, full, strict=True)),
        OPERATOR,
        f"{name} broadcasts to input",
        f"{shape} for {full}",
    )
    leading = shape[:-1], full[:-1]
    if input.ndim == 3:
        allowed = [[full[0], 1]] + ([full[:2]] if mode == "half" else [])
        heads = full[1]
    else:
        # The layout is not an argument: the dimensions at which the table is wider than 1 tell where the sequence is.
        b_or_s, second, third = full[:3]
        allowed = [[1, 1, third], [1, second, 1], [b_or_s, 1, 1]]
        if mode == "half":
            allowed += [[b_or_s, 1, third], [b_or_s, second, 1], full[:3]]
        heads = full[0] * min(second, third) if mode == "interleave" else min(second, third)
    demand(leading[0] in allowed, OPERATOR, f"{name} has one of the documented broadcasts of mode {mode}: {allowed}", leading[0])
    demand(heads < 1000, OPERATOR, "fewer than 1000 heads (mode interleave: B * N)", heads)
