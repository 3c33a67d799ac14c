"""Rotary embedding: frequencies, tables, and the two ways to pair dims."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from npu import _checks, _operators, limits
from npu._checks import check_devices, check_rows, name_of


def frequencies(rotary_size: int, *, theta: float) -> Float[Tensor, "rotary_size/2"]:
    """Radians a token for each pair of dims: theta^(-2i / rotary_size). Float32, on torch's default device.

    Raises ValueError for a size that is odd or below 2. Source: Su et al. 2021, "RoFormer".
    """
    _check_size(rotary_size)
    return torch.tensor(_plain(rotary_size, theta), dtype=torch.float32)


def yarn(
    rotary_size: int, *, theta: float, factor: float, original_length: int, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> Float[Tensor, "rotary_size/2"]:
    """YaRN's frequencies for a context `factor` times as long as the `original_length` tokens of training.

    Pairs that turn more than beta_fast times over the original length keep their frequency, those that turn less than beta_slow times are
    slowed by `factor`, and between them (bounds rounded outwards to whole pairs) the share grows linearly.
    Raises ValueError for a size that is odd or below 2, or a factor below 1. Source: Peng et al. 2023, "YaRN".
    """
    _check_size(rotary_size)
    if not factor >= 1:
        raise ValueError(f"factor must be at least 1, got {factor!r}")

    def pair_that_turns(times):
        return rotary_size * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), rotary_size - 1)
    width = high - low if high != low else 0.001  # a step, where both bounds fall on one pair
    slowed = [min(max((i - low) / width, 0.0), 1.0) for i in range(rotary_size // 2)]
    plain = _plain(rotary_size, theta)
    return torch.tensor([f / factor * s + f * (1 - s) for f, s in zip(plain, slowed, strict=True)], dtype=torch.float32)


def table(
    positions: Int32[Tensor, "t"], frequencies: Float[Tensor, "rotary_size/2"], *, dtype
) -> tuple[Float[Tensor, "t rotary_size/2"], Float[Tensor, "t rotary_size/2"]]:
    """cos and sin of position * frequency, computed in float32 (float64 for float64 frequencies) and returned in `dtype`.

    Raises ValueError for positions that are not one-dimensional integers.
    """
    check_devices({"positions": positions, "frequencies": frequencies})
    accumulator = torch.float64 if frequencies.dtype == torch.float64 else torch.float32
    angles = _checks.positions(positions, frequencies.device).to(accumulator)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def half(x: Float[Tensor, "t h d"], cos: Float[Tensor, "t rotary_size/2"], sin: Float[Tensor, "t rotary_size/2"]) -> Float[Tensor, "t h d"]:
    """x with dims (i, i + rotary_size / 2) of its leading rotary_size dims turned, the others unchanged (NeoX, Llama).

    Arithmetic is float32: a float16 or bfloat16 x is cast there and back. Raises ValueError for shapes that do not fit together, and
    Unsupported for what `limits` lists. Source: the documents of npu_rotary_mul.
    """
    return _rotated("rope.half", "half", x, cos, sin, lambda angles: torch.cat((angles, angles), -1))


def interleaved(
    x: Float[Tensor, "t h d"], cos: Float[Tensor, "t rotary_size/2"], sin: Float[Tensor, "t rotary_size/2"]
) -> Float[Tensor, "t h d"]:
    """x with dims (2i, 2i + 1) of its leading rotary_size dims turned, in the same order, the others unchanged (GPT-J). Else as `half`."""
    return _rotated("rope.interleaved", "interleave", x, cos, sin, lambda angles: angles.repeat_interleave(2, -1))


def _rotated(operation, mode, x, cos, sin, doubled):
    check_rows("x", x)
    check_devices({"x": x, "cos": cos, "sin": sin})
    t, h, d = x.shape
    size = 2 * cos.shape[-1]
    for name, array in (("cos", cos), ("sin", sin)):
        if tuple(array.shape) != (t, size // 2):
            raise ValueError(f"{name} has shape {list(array.shape)}, but x has {t} rows and cos {size // 2} pairs")
    if size > d:
        raise ValueError(f"cos has {size // 2} pairs of dims, but x has {d} dims")
    limits.check(limits.Facts(operation, name_of(x.dtype), heads=h, head_size=size))
    if t == 0 or size == 0:
        return x
    cos, sin = (doubled(array.float())[None, :, None] for array in (cos, sin))
    turned = _operators.rotary(x.device.type)(x[None, ..., :size].float().contiguous(), cos, sin, mode)[0].to(x.dtype)
    return turned if size == d else torch.cat((turned, x[..., size:]), -1)


def _plain(rotary_size, theta):
    return [theta ** (-2 * i / rotary_size) for i in range(rotary_size // 2)]


def _check_size(rotary_size):
    if rotary_size < 2 or rotary_size % 2:
        raise ValueError(f"rotary_size must be an even count of dims >= 2, got {rotary_size}")
