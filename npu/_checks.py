"""What the functions demand of their arguments, said once: errors name the argument, the value and what would work."""

from __future__ import annotations

import torch

from fattn.types import LAYOUTS, Range, Tokens

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """'float16' of torch.float16."""
    return str(dtype).removeprefix("torch.")


def side(tokens):
    """The Range or tensor of a query or key side, without its labels."""
    return tokens.pos if isinstance(tokens, Tokens) else tokens


def count(tokens) -> int:
    """How many positions a query or key side has. Raises ValueError where they are not one-dimensional integers."""
    pos = side(tokens)
    if isinstance(pos, Range):
        return pos.size
    if not isinstance(pos, torch.Tensor) or pos.ndim != 1 or pos.dtype not in INTEGERS:
        found = f"{name_of(pos.dtype)}{list(pos.shape)}" if isinstance(pos, torch.Tensor) else repr(pos)
        raise ValueError(f"positions must be a Range or a tensor of one-dimensional integers, got {found}")
    return pos.shape[0]


def positions(tokens, device) -> torch.Tensor:
    """The positions of a query or key side given as a Range, an integer tensor or Tokens: Int32[n] on `device`."""
    size, pos = count(tokens), side(tokens)
    if isinstance(pos, Range):
        return torch.arange(pos.start, pos.start + size, dtype=torch.int32, device=device)
    return pos.to(torch.int32)  # differences of unsigned integers would wrap


def check_devices(arguments: dict):
    """Raises ValueError that names two arguments and their devices where the tensors among them, by name, are not all on one device.

    Of Tokens the positions count, and what is no tensor does not.
    """
    first = None
    for name, value in arguments.items():
        if isinstance(value, Tokens):
            value = value.pos
        if not isinstance(value, torch.Tensor):
            continue
        if first is None:
            first, device = name, value.device
        elif value.device != device:
            raise ValueError(f"{first} is on {device}, but {name} is on {value.device}: move all to one device")


def check_attend(q, k, v, q_pos, k_pos, bias, *, softcap):
    """Raises ValueError that names the argument and the value where shapes, dtypes, positions or devices do not fit together."""
    check_devices({"q": q, "k": k, "v": v, "q_pos": q_pos, "k_pos": k_pos, "bias": bias})
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_rows(name, array)
    check_heads(q, "k", k.shape[1], k.shape[2], k.dtype)
    check_key_values(k, v)
    for name, tokens, rows in (("q_pos", q_pos, q.shape[0]), ("k_pos", k_pos, k.shape[0])):
        if count(tokens) != rows:
            raise ValueError(f"{name} has {count(tokens)} positions for {rows} rows of {name[0]}; layout is [rows, heads, size]")
    check_softcap(softcap)


def check_softcap(softcap):
    """Raises ValueError for a cap that is not positive."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap!r}")


def check_rows(name, array):
    """Raises ValueError where an array is not [rows, heads, size] of a floating dtype."""
    if array.ndim != 3:
        raise ValueError(f"{name} must be [rows, heads, size], got shape {list(array.shape)}")
    if not array.dtype.is_floating_point:
        raise ValueError(f"{name} has dtype {name_of(array.dtype)}; float16 or bfloat16 would work")


def check_key_values(k, v):
    """Raises ValueError where k [s hk d] and v [s hk dv] disagree in rows, heads or dtype."""
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v disagree in rows or heads: k {list(k.shape)}, v {list(v.shape)}")
    if k.dtype != v.dtype:
        raise ValueError(f"k and v must share one dtype, got {name_of(k.dtype)} and {name_of(v.dtype)}")


def check_heads(q, other, kv_heads, head_size, dtype):
    """Raises ValueError where q [t h d] does not fit keys of `kv_heads` heads, `head_size` and `dtype`, held by the argument `other`."""
    if q.dtype != dtype:
        raise ValueError(f"q and {other} must share one dtype, got {name_of(q.dtype)} and {name_of(dtype)}")
    if q.shape[2] != head_size:
        raise ValueError(f"q and {other} disagree in head size: q {list(q.shape)}, {other}'s is {head_size}")
    if kv_heads == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads, which is not a multiple of {other}'s {kv_heads}; layout is [rows, heads, size]")


# where blocks, rows of a block and heads lie in each layout of a cache
_AXES = {"hpbd": (1, 2, 0), "pbhd": (0, 1, 2), "phbd": (0, 2, 1)}


def cache_sizes(cache) -> tuple[int, int]:
    """(blocks, kv heads) of a cache. Raises ValueError where its arrays do not fit its layout or block size."""
    k, v = cache.k.shape, cache.v.shape
    if cache.layout not in _AXES:
        raise ValueError(f"cache.layout={cache.layout!r} is not one of {', '.join(LAYOUTS)}")
    blocks, rows, heads = _AXES[cache.layout]
    for name, shape in (("k", k), ("v", v)):
        if len(shape) != 4 or shape[rows] != cache.block_size:
            raise ValueError(f"cache.{name} has shape {list(shape)}, which is not {cache.layout} with block_size={cache.block_size}")
    if k[:3] != v[:3] or cache.k.dtype != cache.v.dtype:
        k, v = (f"{name_of(array.dtype)}{list(array.shape)}" for array in (cache.k, cache.v))
        raise ValueError(f"cache.k and cache.v disagree in blocks, heads or dtype: k {k}, v {v}")
    return k[blocks], k[heads]
