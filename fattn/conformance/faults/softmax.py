"""Faults in the softmax, the sums and the stores of dense.attend: log-sum-exps, empty rows, low precision, blocks, poison, state."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fattn.conformance.faults.fault import Fault, Steps, attention
from fattn.conformance.plain import dense
from fattn.types import Partial

LOWEST = -5e4


def finite_stand_in(z, seen, v):
    """Masked scores are a large negative number: a row that sees nothing averages all values and has an lse near it."""
    return dense.softmax(np.where(seen, z, z.dtype.type(LOWEST)), np.ones_like(seen), v)


def torch_masked_fill(z, seen, v):
    """In torch, as it is usually written: masked_fill with the lowest number, softmax, logsumexp."""
    import torch

    scores = torch.from_numpy(z).masked_fill(torch.from_numpy(~seen), torch.finfo(torch.float32).min)
    values = torch.from_numpy(np.ascontiguousarray(v.transpose(1, 0, 2).astype(z.dtype)))
    out = torch.softmax(scores, -1) @ values
    return Partial(out.transpose(0, 1).contiguous().numpy(), torch.logsumexp(scores, -1).T.contiguous().numpy())


def leading_empty_rows(z, seen, v):
    """Rows before the first one that sees a key start from equal weights."""
    result, some = dense.softmax(z, seen, v), seen.any((0, 2))
    first = int(some.argmax()) if some.any() else 0
    result.out[:first] = v.mean(0)
    return result


def row_of_one_key(z, seen, v):
    """A row that sees one key keeps its score as lse, but without its sign."""
    result = dense.softmax(z, seen, v)
    return Partial(result.out, np.where(seen.sum(-1).T == 1, np.abs(result.lse), result.lse))


def base_two(z, seen, v):
    result = dense.softmax(z, seen, v)
    return Partial(result.out, result.lse / result.lse.dtype.type(np.log(2)))


def lse_without_maximum(z, seen, v):
    """ln of the sum of e^(z - max), and the maximum forgotten where it is negative."""
    result = dense.softmax(z, seen, v)
    top = np.where(seen, z, -np.inf).max(-1, initial=-np.inf).T
    return Partial(result.out, np.where(np.isfinite(top) & (top < 0), result.lse - top, result.lse))


def lse_of_the_scaled_sum(z, seen, v):
    result = dense.softmax(z, seen, v)
    return Partial(result.out, result.lse.astype(np.float16).astype(result.lse.dtype))


def empty_lse_is_plus_infinity(z, seen, v):
    result = dense.softmax(z, seen, v)
    return Partial(result.out, np.where(np.isneginf(result.lse), np.inf, result.lse))


def empty_lse_is_lowest(z, seen, v):
    result = dense.softmax(z, seen, v)
    return Partial(result.out, np.maximum(result.lse, np.finfo(result.lse.dtype).min))


def maximum_over_hidden_keys(z, seen, v):
    """The maximum is taken before the mask: a large hidden score underflows all visible ones."""
    kind = z.dtype.type
    top = z.max(-1, keepdims=True, initial=LOWEST)
    p = np.where(seen, np.exp(np.minimum(z - top, 0)), kind(0))
    total = np.where(p.sum(-1) > 0, p.sum(-1), kind(1))
    out = (p / total[..., None]) @ v.transpose(1, 0, 2).astype(kind)
    lse = np.where(seen.any(-1), top[..., 0] + np.log(total), kind(-np.inf))
    return Partial(np.ascontiguousarray(out.transpose(1, 0, 2)), lse.T.copy())


def exponent_clipped(z, seen, v):
    """No maximum is subtracted, and e^z is kept from overflowing by clipping z."""
    return dense.softmax(np.clip(z, -40, 40), seen, v)


def second_block_not_rescaled(z, seen, v, size=64):
    """Blocks of keys with a running maximum; the output so far is not rescaled when a later block raises it."""
    kind, (h, t, s) = z.dtype.type, z.shape
    out, total, top = np.zeros((h, t, v.shape[-1]), kind), np.zeros((h, t), kind), np.full((h, t), -np.inf, kind)
    values = v.transpose(1, 0, 2).astype(kind)
    for first in range(0, s, size):
        block = np.where(seen[..., first : first + size], z[..., first : first + size], kind(-np.inf))
        new = np.maximum(top, block.max(-1))
        safe = np.where(np.isneginf(new), 0, new)
        p = np.exp(block - safe[..., None])
        total = total * np.exp(np.where(np.isneginf(top), -np.inf, top) - safe) + p.sum(-1)
        out, top = out + p @ values[:, first : first + size], new
    some = total > 0
    lse = np.where(some, top + np.log(np.where(some, total, 1)), kind(-np.inf))
    return Partial(np.ascontiguousarray((out / np.where(some, total, 1)[..., None]).transpose(1, 0, 2)), lse.T.copy())


def last_key_of_a_block(z, seen, v):
    """A last block that holds one key alone is not read."""
    keep = seen.copy()
    if z.shape[-1] % 64 == 1 and z.shape[-1] > 1:
        keep[..., -1] = False
    return dense.softmax(z, keep, v)


def last_row_of_a_tile(z, seen, v):
    """A last tile that holds one query alone is not computed: it keeps what the buffer held."""
    result = dense.softmax(z, seen, v)
    if z.shape[1] % 64 == 1 and z.shape[1] > 1:
        result.out[-1], result.lse[-1] = result.out[-2], result.lse[-2]
    return result


def sums_in_float16(z, seen, v):
    """Sixteen keys at a time in float32, and the sum over them in float16."""
    kind, s = z.dtype.type, z.shape[-1]
    exact = dense.softmax(z, seen, v)
    p = np.where(seen, np.exp(z - np.where(np.isneginf(exact.lse), 0, exact.lse).T[..., None]), 0).astype(kind)
    out = np.zeros((z.shape[0], z.shape[1], v.shape[-1]), np.float16)
    for first in range(0, s, 16):
        part = p[..., first : first + 16] @ v[first : first + 16].transpose(1, 0, 2).astype(kind)
        with np.errstate(over="ignore"):
            out = (out + part.astype(np.float16)).astype(np.float16)
    return Partial(out.transpose(1, 0, 2).astype(kind), exact.lse)


def probabilities_in_bfloat16(z, seen, v):
    """P is cast for a faster product, and nobody declares it."""
    lower = dense.softmax(z, seen, v.astype(ml_dtypes.bfloat16))
    kind, exact = z.dtype.type, dense.softmax(z, seen, v)
    p = np.exp(np.where(seen, z, -np.inf) - np.where(np.isneginf(exact.lse), 0, exact.lse).T[..., None])
    out = p.astype(ml_dtypes.bfloat16).astype(kind) @ v.transpose(1, 0, 2).astype(kind)
    return Partial(np.ascontiguousarray(out.transpose(1, 0, 2)), lower.lse)


def permuted_elements(z, seen, v):
    """The store swaps the second and the third of every four elements."""
    result, size = dense.softmax(z, seen, v), v.shape[-1] // 4 * 4
    order = np.arange(v.shape[-1])
    order[1:size:4], order[2:size:4] = np.arange(2, size, 4), np.arange(1, size, 4)
    return Partial(result.out[..., order], result.lse)


def dropped_from_a_split(z, seen, v):
    """Two halves of the keys, combined with equal weights where their maxima are equal."""
    half = z.shape[-1] // 2
    if half == 0:
        return dense.softmax(z, seen, v)
    parts = [dense.softmax(z[..., cut], seen[..., cut], v[cut]) for cut in (slice(0, half), slice(half, None))]
    lse = np.logaddexp(*(part.lse for part in parts))
    tops = [np.where(seen[..., cut], z[..., cut], -np.inf).max(-1, initial=-np.inf).T for cut in (slice(0, half), slice(half, None))]
    with np.errstate(invalid="ignore"):
        weights = [np.where(tops[0] == tops[1], 0.5, np.exp(part.lse - lse)) for part in parts]
    weights = [np.where(np.isneginf(lse), 0, w)[..., None] for w in weights]
    return Partial(sum(w * part.out for w, part in zip(weights, parts, strict=True)).astype(z.dtype), lse)


def jax_slices_are_clamped(z, seen, v):
    """Blocks of 64 keys by JAX's dynamic_slice, which moves a start back where the block would reach past the end: keys count twice."""
    import jax
    import jax.numpy as jnp

    keys, size = z.shape[-1], 64
    if keys <= size:
        return dense.softmax(z, seen, v)
    starts = range(0, keys, size)
    cut = np.concatenate([np.asarray(jax.lax.dynamic_slice(jnp.arange(keys), (start,), (size,))) for start in starts])
    return dense.softmax(z[..., cut], seen[..., cut], v[cut])


def uncleaned(q, k, v, seen):
    return q, k, v


def uncleaned_tail(q, k, v, seen):
    """Keys after the last one that is seen are zeroed; those before it are multiplied by 0."""
    last = int(np.flatnonzero(seen.any((0, 1))).max(initial=-1)) + 1
    k, v = k.copy(), v.copy()
    k[last:], v[last:] = 0, 0
    return np.where(seen.any((0, 2))[:, None, None], q, q.dtype.type(0)), k, v


def contiguous_view(array, strides=None):
    """The array's memory read as if rows lay end to end (or with other strides), for as long as that stays inside."""
    lengths = [1]
    for n in array.shape[:0:-1]:
        lengths.insert(0, lengths[0] * n)
    wanted = tuple(n * array.itemsize for n in lengths) if strides is None else strides
    reach = [sum((n - 1) * s for n, s in zip(array.shape, each, strict=True)) for each in (wanted, array.strides)]
    return (
        array if reach[0] > reach[1] or min(array.strides, default=0) < 0 else np.lib.stride_tricks.as_strided(array, array.shape, wanted)
    )


def reads_as_if_contiguous(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    return dense.attend(q, contiguous_view(k), v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)


def second_call_keeps_its_strides():
    """A compiled kernel is kept by shape, and with it the strides of the call that it was compiled for."""
    kept = {}

    def attend(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
        strides = kept.setdefault((k.shape, k.dtype), k.strides)
        return dense.attend(q, contiguous_view(k, strides), v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)

    return attend


def second_call_keeps_its_scale():
    """A compiled kernel is kept by shapes, and with it the scale of the first call."""
    kept = {}

    def attend(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
        scale = kept.setdefault((q.shape, k.shape, q.dtype), scale)
        return dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)

    return attend


def scales_q_in_place(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    result = dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    q *= q.dtype.type(scale)
    return result


def torch_fills_the_bias_in_place(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    """Hidden entries of the bias are made finite with masked_fill_, in the caller's own memory."""
    import torch

    result = dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    if bias is not None and bias.dtype != ml_dtypes.bfloat16:  # which from_numpy does not take
        mine = torch.from_numpy(bias)
        mine.masked_fill_(torch.isinf(mine), -6e4)
    return result


def lse_in_the_input_dtype(q, k, v, q_pos, k_pos, bias=None, *, mask, scale, softcap=None):
    result = dense.attend(q, k, v, q_pos, k_pos, bias, mask=mask, scale=scale, softcap=softcap)
    return Partial(result.out.astype(q.dtype).astype(result.out.dtype), result.lse.astype(q.dtype).astype(result.lse.dtype))


def _fault(name, kind, function, why):
    return Fault(name, kind, "dense.attend", function, why)


def _softmax(name, kind, step, why):
    return _fault(name, kind, attention(Steps(softmax=step)), why)


FAULTS = (
    _softmax("masks_with_a_finite_score", "empty rows", finite_stand_in, "a stand-in for -inf is never taken back"),
    _softmax("torch_masked_fill_with_the_lowest", "empty rows", torch_masked_fill, "finfo.min is a number like any other"),
    _softmax("leading_empty_rows_average_the_values", "empty rows", leading_empty_rows, "the first tile starts from equal weights"),
    _softmax("lse_of_nothing_is_plus_infinity", "empty rows", empty_lse_is_plus_infinity, "-log(0)"),
    _softmax("lse_of_nothing_is_finite", "empty rows", empty_lse_is_lowest, "the lowest float stands for -inf"),
    _softmax("lse_in_base_two", "log-sum-exp", base_two, "exp2 inside, and not converted"),
    _softmax("lse_of_one_key_without_sign", "log-sum-exp", row_of_one_key, "a shortcut for rows of one key"),
    _softmax("lse_without_a_negative_maximum", "log-sum-exp", lse_without_maximum, "the running maximum starts from 0"),
    _softmax("lse_in_float16", "low precision", lse_of_the_scaled_sum, "stored beside the output"),
    _softmax("maximum_over_hidden_keys", "overflow", maximum_over_hidden_keys, "the mask is applied to P"),
    _softmax("exponent_clipped", "overflow", exponent_clipped, "no maximum is subtracted"),
    _softmax("second_block_not_rescaled", "block edge", second_block_not_rescaled, "online softmax without its correction"),
    _softmax("last_key_of_a_block_dropped", "block edge", last_key_of_a_block, "a last block of one key"),
    _softmax("last_query_of_a_tile_dropped", "block edge", last_row_of_a_tile, "a last tile of one query"),
    _softmax("jax_slices_are_clamped", "block edge", jax_slices_are_clamped, "dynamic_slice stays inside"),
    _softmax("sums_in_float16", "low precision", sums_in_float16, "the accumulator between blocks"),
    _softmax("probabilities_in_bfloat16", "low precision", probabilities_in_bfloat16, "P is cast without saying so"),
    _softmax("stores_permuted_elements", "layout", permuted_elements, "norms are right"),
    _softmax("equal_maxima_weigh_alike", "merging", dropped_from_a_split, "a split is combined by maxima"),
    _fault("masked_values_are_multiplied", "poison", attention(Steps(clean=uncleaned)), "0 * NaN"),
    _fault("inner_masked_values_are_multiplied", "poison", attention(Steps(clean=uncleaned_tail)), "the tail alone is zeroed"),
    _fault("rounded_partials", "low precision", lse_in_the_input_dtype, "partials in the input's type"),
    _fault("reads_as_if_contiguous", "strides", reads_as_if_contiguous, "k's strides are not read"),
    _fault("second_call_keeps_its_strides", "state", second_call_keeps_its_strides(), "strides belong to the cached kernel"),
    _fault("second_call_keeps_its_scale", "state", second_call_keeps_its_scale(), "the scale belongs to the cached kernel"),
    _fault("torch_fills_the_bias_in_place", "inputs changed", torch_fills_the_bias_in_place, "from_numpy shares memory"),
    _fault("scales_q_in_place", "inputs changed", scales_q_in_place, "q *= scale"),
)
