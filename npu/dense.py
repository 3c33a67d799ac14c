"""Attention over keys held whole."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fattn.types import Mask, Partial
from npu import _operators, _training, limits
from npu._admit import check_out
from npu._checks import check_attend, check_devices, name_of, positions
from npu._forms import dense_form
from npu._paged import given
from npu._rules import INT32_MAX, sparse_mode, triangle, visible_on


def attend(
    q: Float[Tensor, "t h d"],
    k: Float[Tensor, "s hk d"],
    v: Float[Tensor, "s hk dv"],
    q_pos,
    k_pos,
    bias: Float[Tensor, "#h #t #s"] | None = None,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    out: Partial | None = None,
    workspace: Tensor | None = None,
) -> Partial:
    """Softmax attention of every query over the keys that `mask` lets it see: out = sum_j e^(z_j - lse) v_j, lse = ln sum_j e^(z_j).

    z = scale q.k + bias (broadcast against [h t s]; -inf hides a key). Query head h reads key head h // (h_q / h_k).
    Positions are a Range, Int32[n], or Tokens where the mask reads labels: ranges choose one of the operator's modes, arrays make an
    explicit mask. `out` has q's dtype, `lse` is float32. Padding keys may hold anything, other unseen keys anything finite.
    In float16 a key that -inf hides from some heads alone has a bias of -65504: what these heads see must lie far above that.
    The argument `out` takes the result, and is returned; `workspace` is the operator's scratch memory.
    Where q, k, v or bias requires a gradient, the operator for training computes, in float32 too: `out` has its gradient, `lse` has none.
    Raises ValueError for shapes, dtypes or positions that do not fit together, and Unsupported for what `limits` lists.
    Source: the documents of npu_fused_infer_attention_score.
    """
    check_attend(q, k, v, q_pos, k_pos, bias, softcap=softcap)
    t, h, d = q.shape
    s, hk, dv = v.shape
    additive = None if bias is None else _bias(bias, q.shape, k.shape)
    how = dense_form(q_pos, k_pos, mask, biased=bias is not None)
    seen = None
    if how == "explicit":
        seen = visible_on(q_pos, k_pos, mask=mask, device=q.device)[None]
        seen = seen if additive is None else seen & (additive != -torch.inf)
    if _training.asks(q, k, v, bias) and t and s:
        return _with_gradient(q, k, v, additive, how, mask, seen, out, workspace, scale=scale, softcap=softcap)
    facts = limits.Facts(
        "dense.attend",
        name_of(q.dtype),
        heads=h,
        kv_heads=hk,
        head_size=d,
        value_size=dv,
        queries=t,
        keys=s,
        explicit=how == "explicit",
        additive=None if bias is None else name_of(bias.dtype),
        softcap=softcap,
    )
    limits.check(facts)
    check_out(q, dv, lse=True, out=out, workspace=workspace)
    if t == 0 or s == 0:
        return given(_operators.nothing(q, dv), out)
    hidden = empty = shift = None
    mode, left, right = 0, INT32_MAX, INT32_MAX
    if how == "compressed":
        mode, left, right = sparse_mode(mask)
        hidden = triangle(q.device)
    elif how == "explicit":
        if additive is not None:
            # a key that one head alone may not see: the mask has no heads, and the operator's arithmetic no infinities
            lowest = torch.finfo(q.dtype).min
            shift = torch.where(seen, additive, lowest).expand(h, t, s).contiguous()[None]
        empty = ~seen.any(-1).T
        shared = seen.any(0)
        hidden = ~shared[None, None]
        k, v = _without_unseen(k, v, shared)
    packed = facts.packed
    arguments = {
        "query": _laid(q, packed),
        "key": _laid(k, packed),
        "value": _laid(v, packed),
        "pse_shift": shift,
        "atten_mask": hidden,
        "actual_seq_lengths": [t] if packed else None,
        "actual_seq_lengths_kv": [s] if packed else None,
        "num_heads": h,
        "num_key_value_heads": hk,
        "scale": scale,
        "pre_tokens": left,
        "next_tokens": right,
        "input_layout": "TND" if packed else "BSND",
        "sparse_mode": mode,
        # rows that see nothing spoil precision unless the operator corrects them; it does so for several queries only
        "inner_precise": 2 if how == "explicit" and t > 1 else 0,
        "softmax_lse_flag": True,
    }
    room = None if out is None and workspace is None else _room(q, dv, packed, out)
    found, sums = _operators.attention_call(q.device.type, workspace)(arguments, room)
    result = Partial(found.view(t, h, dv), sums.view(t, h) if packed else sums.view(h, t).T)
    if empty is not None:
        result = Partial(result.out.masked_fill(empty[..., None], 0), result.lse.masked_fill(empty, -torch.inf))
    # where the operator wrote to `out` itself, and no row was corrected, there is nothing left to copy
    return out if out is not None and packed and empty is None else given(result, out)


def _with_gradient(q, k, v, bias, how, mask, seen, out, workspace, *, scale, softcap):
    for name, tensor in (("out", out), ("workspace", workspace)):
        if tensor is not None:
            raise ValueError(f"{name} is given, but q, k, v or bias requires a gradient: leave it out, or call under torch.no_grad()")
    if seen is not None:
        k, v = _without_unseen(k, v, seen.any(0))
    return _training.attend(q, k, v, bias, how, mask, seen, scale=scale, softcap=softcap)


def _without_unseen(k, v, shared):
    """k and v with zeros where no query sees a key: 0 * NaN is NaN, and must not reach the sums."""
    unused = ~shared.any(0)[:, None, None]
    return k.masked_fill(unused, 0), v.masked_fill(unused, 0)


def alibi(slopes: Float[Tensor, "h"], q_pos, k_pos) -> Float[Tensor, "h t s"]:
    """ALiBi's bias, -slope |p - j|, in float32 (float64 for float64), for `attend`, which takes it in q's dtype; positions alike."""
    check_devices({"slopes": slopes, "q_pos": q_pos, "k_pos": k_pos})
    p, j = positions(q_pos, slopes.device), positions(k_pos, slopes.device)
    # low-precision slopes would round distances past 256
    slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    return -slopes[:, None, None] * (p[:, None] - j[None, :]).abs()


def alibi_slopes(heads: int) -> Float[Tensor, "h"]:
    """ALiBi's geometric slopes, 2^(-8 i / n) for i = 1..n with n the power of two at or below `heads`, then every second of 2n's.

    Raises ValueError for no heads. Source: Press et al. 2022, "Train Short, Test Long".
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads!r}")
    n = 1 << (heads.bit_length() - 1)
    exponents = [-8 * i / n for i in range(1, n + 1)] + [-4 * i / n for i in range(1, 2 * (heads - n), 2)]
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float32)


def _laid(rows, packed):
    """[t h d] as TND, or as BSND of one sequence."""
    rows = rows.contiguous()
    return rows if packed else rows[None]


def _room(q, value_size, packed, out):
    """Tensors for the operator's results: views of `out`'s where they are laid out as in the operator's layout, or new ones."""
    t, h, _ = q.shape
    rows, sums = ((t, h, value_size), (t, h, 1)) if packed else ((1, t, h, value_size), (1, h, t, 1))
    if out is None or not packed:
        return [q.new_empty(rows), q.new_empty(sums, dtype=torch.float32)]
    return [out.out.view(rows), out.lse.view(sums)]


def _bias(bias, q_shape, k_shape):
    full = (q_shape[1], q_shape[0], k_shape[0])
    if not bias.dtype.is_floating_point:
        raise ValueError(
            f"bias has dtype {name_of(bias.dtype)}; a float bias is added to scores, and `mask`, or a bias of -inf, hides keys"
        )
    if bias.ndim > 3 or any(n not in (1, m) for n, m in zip(bias.shape[::-1], full[::-1], strict=False)):
        raise ValueError(f"bias has shape {list(bias.shape)}, which does not broadcast to [heads, queries, keys] = {list(full)}")
    return bias.reshape((1,) * (3 - bias.ndim) + tuple(bias.shape))
