"""Inputs that are hard for attention kernels, and kernels that differ in everything an implementation may choose. NumPy alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fattn.types import Batch

KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def inputs(generator: str, rng: np.random.Generator, *, queries=7, keys=65, heads=4, kv_heads=2, size=32, value_size=24, dtype="float32"):
    """(q, k, v, scale) in `dtype`. The generators stress one thing each: see the branches."""
    q, k = rng.standard_normal((queries, heads, size)), rng.standard_normal((keys, kv_heads, size))
    v, scale = rng.standard_normal((keys, kv_heads, value_size)), size**-0.5
    match generator:
        case "gaussian":
            pass
        case "peaked":  # one key takes almost everything; the others' weights underflow
            k[rng.integers(keys)] *= 40
        case "flat":  # every score 0
            q *= 0
        case "tied":  # equal keys and values: rounding errors of sums all have one sign
            k[:], v[:] = k[0], np.abs(v[0])
        case "one-hot":  # each output number is one key's weight
            v = np.stack([np.eye(value_size)[(np.arange(keys) + h) % value_size] for h in range(kv_heads)], axis=1)
        case "huge":  # scores in the hundreds: a score's rounding error is visible in its weight
            q, k = q * 12, k * 12
        case "offset":  # values far from 0: cancellation in v - out
            v = v * 0.01 + 100
        case "position-coded":
            v = np.broadcast_to(np.arange(keys)[:, None, None] / keys, v.shape)
    return *(x.astype(KINDS[dtype]) for x in (q, k, v)), scale


GENERATORS = ("gaussian", "peaked", "flat", "tied", "one-hot", "huge", "offset", "position-coded")


def online(q, k, v, seen, scale, *, block, reverse=False, prescale=False, probabilities=np.float32, softcap=None, bias=None):
    """(out, lse) in float32 by the online softmax over blocks of keys; block = 1 sums sequentially, block >= s is the plain softmax."""
    t, h, _ = q.shape
    s, hk, dv = v.shape
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    scale = np.float32(scale)
    top, total, out = np.full((h, t), -np.inf, np.float32), np.zeros((h, t), np.float32), np.zeros((h, t, dv), np.float32)
    starts = range(0, s, block)
    for start in reversed(starts) if reverse else starts:
        rows = slice(start, start + block)
        keys, values = (np.repeat(x[rows], h // hk, axis=1).transpose(1, 0, 2) for x in (k, v))
        rotated = q.transpose(1, 0, 2)
        z = (rotated * scale) @ keys.swapaxes(1, 2) if prescale else (rotated @ keys.swapaxes(1, 2)) * scale
        if softcap is not None:
            z = np.float32(softcap) * np.tanh(z / np.float32(softcap))
        if bias is not None:
            z = z + bias[:, :, rows].astype(np.float32)
        z = np.where(seen[:, rows], z, np.float32(-np.inf))
        new_top = np.maximum(top, z.max(axis=-1))
        base = np.where(new_top > -np.inf, new_top, np.float32(0))
        shrink, p = np.exp(top - base), np.exp(z - base[..., None])
        total = total * shrink + p.sum(axis=-1, dtype=np.float32)
        out = out * shrink[..., None] + p.astype(probabilities).astype(np.float32) @ values
        top = new_top
    some = total > 0
    out = out / np.where(some, total, 1)[..., None]
    lse = np.where(some, top + np.log(np.where(some, total, 1)), -np.inf)
    return out.transpose(1, 0, 2), lse.T.astype(np.float32)


def join(a, b):
    """Two (out, lse) merged in float32."""
    top = np.maximum(a[1], b[1])
    base = np.where(top > -np.inf, top, np.float32(0))
    weights = [np.exp(x[1] - base) for x in (a, b)]
    total = weights[0] + weights[1]
    some = total > 0
    safe = np.where(some, total, np.float32(1))
    out = sum((w / safe)[..., None] * x[0] for w, x in zip(weights, (a, b), strict=True))
    return out, np.where(some, base + np.log(safe), -np.inf).astype(np.float32)


def split(q, k, v, seen, scale, *, parts, probabilities=np.float32):
    """(out, lse) by attention over `parts` runs of keys, merged one after the other."""
    edges = np.linspace(0, len(k), parts + 1).astype(int)
    pieces = [
        online(q, k[a:b], v[a:b], seen[:, a:b], scale, block=32, probabilities=probabilities)
        for a, b in zip(edges, edges[1:], strict=False)
        if b > a
    ]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = join(whole, piece)
    return whole


def eager(q, k, v, seen, scale, *, probabilities=np.float32, base2=False):
    """(out, lse) in float32 with P normalised before it is cast, as eager implementations do; `base2` takes powers of two."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    keys, values = (np.repeat(x, q.shape[1] // k.shape[1], axis=1).transpose(1, 0, 2) for x in (k, v))
    power, log = (np.exp2, np.log2) if base2 else (np.exp, np.log)
    scale = np.float32(scale) * np.float32(np.log2(np.e) if base2 else 1)
    z = np.where(seen, (q.transpose(1, 0, 2) @ keys.swapaxes(1, 2)) * scale, np.float32(-np.inf))
    top = z.max(axis=-1, keepdims=True)
    base = np.where(top > -np.inf, top, np.float32(0))
    total = power(z - base).sum(axis=-1, keepdims=True, dtype=np.float32)
    some = total > 0
    safe = np.where(some, total, np.float32(1))
    p = (power(z - base) / safe).astype(probabilities).astype(np.float32)
    lse = np.where(some, base + log(safe), np.float32(-np.inf))[..., 0]
    return (p @ values).transpose(1, 0, 2), (lse * np.float32(np.log(2) if base2 else 1)).T


KERNELS = {
    "eager": lambda *a, p: eager(*a, probabilities=p),
    "base 2": lambda *a, p: eager(*a, probabilities=p, base2=True),
    "plain": lambda *a, p: online(*a, block=len(a[1]), probabilities=p),
    "prescaled": lambda *a, p: online(*a, block=len(a[1]), prescale=True, probabilities=p),
    "blockwise": lambda *a, p: online(*a, block=16, probabilities=p),
    "reversed": lambda *a, p: online(*a, block=16, reverse=True, probabilities=p),
    "sequential": lambda *a, p: online(*a, block=1, probabilities=p),
    "split": lambda *a, p: split(*a, parts=5, probabilities=p),
}


def worst(got, want, bound) -> float:
    """The largest error in units of the bound; an error where the bound is 0 is infinite, places of infinity must agree."""
    got, want, bound = (np.asarray(x, np.float64) for x in (got, want, bound))
    assert got.shape == want.shape == bound.shape
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all() and (got[~finite] == want[~finite]).all()
    error = np.abs(got[finite] - want[finite])
    return float(np.divide(error, bound[finite], out=np.where(error > 0, np.inf, 0.0), where=bound[finite] > 0).max(initial=0))


def batch_of(query_lens, seq_lens, tables, *, block_size, query_labels=None, key_labels=None) -> Batch:
    """A Batch made by hand: `tables` holds a list of block ids for each sequence, extra entries included."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    positions = np.concatenate([n - m + np.arange(m) for m, n in zip(query_lens, seq_lens, strict=True)]).astype(np.int32)
    owner = np.repeat(np.arange(len(query_lens)), query_lens)
    slots = [tables[b][p // block_size] * block_size + p % block_size if p >= 0 else -1 for b, p in zip(owner, positions, strict=True)]
    width = max(len(table) for table in tables)
    table = np.array([list(t) + [-1] * (width - len(t)) for t in tables], np.int32).reshape(len(tables), width)
    return Batch(
        starts,
        np.array(seq_lens, np.int32),
        table,
        np.array(slots, np.int32),
        positions,
        query_labels or {},
        key_labels or {},
        block_size=block_size,
        max_query_len=max(query_lens),
    )
