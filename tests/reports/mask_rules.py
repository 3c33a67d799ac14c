"""Group B: masks, windows, softcap, arguments that are ignored."""

from __future__ import annotations

import inspect

import numpy as np

import reference.merge
from fattn.plan import batch as plan
from fattn.types import Partial, Range, Unsupported, causal, full, window
from reference.bounded import Bounded
from reports.layers import MODULES, Layer, Report, attend, close, empty_rows, exact, oracle, paged_attend, paged_oracle, raises, step


def b14_causal_alignment(layer: Layer):
    """Some kernels align causal masks top-left and others bottom-right where query and key lengths differ; one was wrong for q > k.

    Right: bottom-right, from positions. (2, 5) sees 11110 and 11111; (5, 2) has three empty rows, then 10 and 11.
    """
    for (t, s), rows in CAUSAL_ROWS.items():
        seen = np.array([[bit == "1" for bit in row] for row in rows])
        queries, keys = Range(s - t, t), Range(0, s)
        for sides in ((queries, keys), (np.arange(s - t, s), np.arange(s))):
            exact(layer.numpy(layer.masks.visible(*map(layer.tokens, sides), mask=causal())), seen)
        form = layer.masks.compressed(mask=causal())
        exact(layer.numpy(layer.masks.expand(form, query_len=t, kv_len=s)), seen)
        q = layer.rounded(np.zeros((t, 4, layer.head_size)))
        k, v = layer.normal(s, s, 2, layer.head_size), _coded(layer, s)
        got, expected = attend(layer, q, k, v, queries, keys, mask=causal()), oracle(layer, q, k, v, queries, keys, mask=causal())
        close(got, expected)
        counts = seen.sum(1)
        mean = np.where(counts > 0, seen @ np.arange(1.0, s + 1) / np.maximum(counts, 1), 0)
        close(got.out, Bounded(np.broadcast_to(mean[:, None, None], got.out.shape), expected.bound.out))
        empty_rows(got, counts == 0)
        paged = step(layer, (t,), (s,), block_size=layer.block(2))
        close(paged_attend(layer, paged, mask=causal()), paged_oracle(layer, paged, mask=causal()))


CAUSAL_ROWS = {
    (2, 5): ("11110", "11111"),
    (5, 2): ("00", "00", "00", "10", "11"),
    (1, 7): ("1111111",),
    (4, 4): ("1000", "1100", "1110", "1111"),
}


def b15_lengths_are_counts(layer: Layer):
    """Two operators of one family took the number of keys and the last key's index for the same thing.

    Right: counts. A decode step with one key returns that key's value, one whose keys end with their page sees the page's last key, and
    a length beyond the table or below 0 is an error.
    """
    for length in (1, layer.block(16) - 1, layer.block(16), layer.block(16) + 1):
        s = step(layer, (1,), (length,), block_size=layer.block(16))
        got, expected = paged_attend(layer, s, mask=causal()), paged_oracle(layer, s, mask=causal())
        close(got, expected)
        if length == 1:
            own = np.repeat(s.v[s.batch.block_table[0][0], 0], 2, axis=0)[None]
            close(got.out, Bounded(own, expected.bound.out))
        flat = s._replace(q=np.zeros_like(s.q))
        counted = paged_attend(layer, flat, mask=causal()).lse
        close(counted, Bounded(np.full((1, 4), np.log(length)), paged_oracle(layer, flat, mask=causal()).bound.lse))
    for length in (-1, 2 * layer.block(16) + 1):
        raises(ValueError, lambda length=length: plan.build((1,), (length,), [[0, 1]], block_size=layer.block(16), num_blocks=2))


def b16_sliding_windows(layer: Layer):
    """A window of W meant W or W + 1 keys depending on the backend, and without causal it reached as far ahead as behind.

    Right: window(left, right) is inclusive on both sides; a model's window of W tokens is window(W - 1, 0), where row i sees
    min(i + 1, W) keys and W = 1 returns the row's own value.
    """
    for width in (1, 3, 4, 7):
        mask = window(width - 1, 0)
        for t, s in ((8, 8), (3, 8)):
            queries, keys = Range(s - t, t), Range(0, s)
            p = np.arange(s - t, s)
            seen = layer.numpy(layer.masks.visible(queries, keys, mask=mask))
            exact(seen.sum(1), np.minimum(p + 1, width))
            for i, row in enumerate(seen):
                exact(np.flatnonzero(row), np.arange(max(p[i] - width + 1, 0), p[i] + 1))
            both = window(width, width)
            exact(
                layer.numpy(layer.masks.visible(queries, keys, mask=both)).sum(1),
                np.minimum(p + width, s - 1) - np.maximum(p - width, 0) + 1,
            )
            exact(layer.numpy(layer.masks.visible(queries, keys, mask=both & causal())).sum(1), np.minimum(p, width) + 1)
            if t == s or width in (3, 7):
                continue
            q = layer.normal(width, t, 4, layer.head_size)
            k, v = (layer.normal(width + i, s, 2, layer.head_size) for i in (1, 2))
            for rule in (mask, both, both & causal()):
                got, expected = (f(layer, q, k, v, queries, keys, mask=rule) for f in (attend, oracle))
                close(got, expected)
                if rule == mask and width == 1:
                    close(got.out, Bounded(np.repeat(v[s - t :], 2, axis=1), expected.bound.out))
                form = layer.masks.compressed(mask=rule)
                exact(
                    layer.numpy(layer.masks.expand(form, query_len=t, kv_len=s)), layer.numpy(layer.masks.visible(queries, keys, mask=rule))
                )
        length = 2 * layer.block(4) + 3
        for query_lens in ((1, 1), (3, 2)):
            paged = step(layer, query_lens, (length, 2), block_size=layer.block(4))
            close(paged_attend(layer, paged, mask=mask), paged_oracle(layer, paged, mask=mask))


def b18_softcap_before_the_mask(layer: Layer):
    """A cap applied after the mask turned -inf into -cap, and masked keys took 52.5 % of the mass.

    Right: scale, cap, bias, mask, softmax. With one visible key out is exactly its value and lse is cap tanh(z / cap).
    """
    heads, d = 4, layer.head_size
    q, k = layer.rounded(np.zeros((1, heads, d))), layer.normal(1, 4, 2, d)
    v = layer.rounded(np.broadcast_to((np.arange(4) == 0)[:, None, None], k.shape))
    k_pos = np.array([0, 1, 2, 3])
    if "softcap" in layer.refuses:
        error = raises(Unsupported, lambda: attend(layer, q, k, v, np.array([0]), k_pos, mask=causal(), softcap=1.0))
        assert error.argument == "softcap" and error.instead
        paged = step(layer, (1,), (4,), block_size=layer.block(4))
        raises(Unsupported, lambda: paged_attend(layer, paged, mask=causal(), softcap=1.0))
        return
    got = attend(layer, q, k, v, np.array([0]), k_pos, mask=causal(), softcap=1.0)
    exact(got.out, np.ones((1, heads, d)))
    exact(got.lse, np.zeros((1, heads)))
    q = layer.rounded(np.full((1, heads, d), 0.5))
    got = attend(layer, q, k, v, np.array([0]), k_pos, mask=causal(), softcap=1.0, scale=1.0)
    expected = oracle(layer, q, k, v, np.array([0]), k_pos, mask=causal(), softcap=1.0, scale=1.0)
    close(got, expected)
    score = 0.5 * np.repeat(k[0].astype(np.float64).sum(-1), 2)[None]
    close(got.lse, Bounded(np.tanh(score), expected.bound.lse))
    bias = np.array([[[3.0, 0, 0, 0]]], np.float32)
    got = attend(layer, q, k, v, np.array([0]), k_pos, bias, mask=causal(), softcap=1.0, scale=1.0)
    expected = oracle(layer, q, k, v, np.array([0]), k_pos, bias, mask=causal(), softcap=1.0, scale=1.0)
    close(got.lse, Bounded(np.tanh(score) + 3, expected.bound.lse))
    paged = step(layer, (3, 1), (6, 5), block_size=layer.block(4))
    close(paged_attend(layer, paged, mask=causal(), softcap=0.7), paged_oracle(layer, paged, mask=causal(), softcap=0.7))


def b20_ignored_arguments(layer: Layer):
    """Sinks swallowed by **kwargs, a sink not applied in prefill, a mask dropped by a vision path, a left padding that one backend ignored.

    Right: every argument, flipped once, changes the result as the oracle says, or the call raises Unsupported naming it.
    No public function takes **kwargs.
    """
    for module in MODULES:
        for name, function in vars(getattr(layer, module)).items():
            if inspect.isfunction(function) and function.__module__.endswith(f".{module}"):
                kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
                assert inspect.Parameter.VAR_KEYWORD not in kinds, f"{name} takes **kwargs"
    base = {
        "q": layer.normal(1, 3, 4, layer.head_size),
        "k": layer.normal(2, 6, 2, layer.head_size),
        "v": layer.normal(3, 6, 2, layer.head_size),
        "q_pos": np.array([3, 4, 5]),
        "k_pos": np.arange(6),
        "bias": None,
        "mask": causal(),
        "scale": layer.scale,
        "softcap": None,
    }
    flips = {
        "q_pos": np.array([2, 3, 4]),
        "k_pos": np.array([-1, -1, 2, 3, 4, 5]),
        "bias": layer.normal(4, 4, 3, 6),
        "mask": window(1, 0),
        "scale": 2 * layer.scale,
        "softcap": 0.5,
    }
    plain = attend(layer, *_positional(base), **_static(base))
    close(plain, oracle(layer, *_positional(base), **_static(base)))
    for name, value in flips.items():
        flipped = base | {name: value}
        if name in layer.refuses:
            assert name in raises(Unsupported, lambda case=flipped: attend(layer, *_positional(case), **_static(case))).argument
            continue
        got, expected = (call(layer, *_positional(flipped), **_static(flipped)) for call in (attend, oracle))
        close(got, expected)
        _differs(expected, plain, name)
    _paged_flips(layer)
    _sink_flips(layer)


def _paged_flips(layer):
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    for query_lens in ((3, 2), (1, 1)):
        s = step(layer, query_lens, (6, 5), block_size=layer.block(4))
        plain = paged_attend(layer, s, mask=causal())
        flips = {
            "mask": {"mask": window(1, 0)},
            "scale": {"scale": 2 * layer.scale},
            "slopes": {"slopes": slopes},
            "softcap": {"softcap": 0.5},
        }
        for name, change in flips.items():
            if name in layer.refuses:
                assert name in raises(Unsupported, lambda s=s, c=change: paged_attend(layer, s, **({"mask": causal()} | c))).argument
                continue
            got, expected = (call(layer, s, **({"mask": causal()} | change)) for call in (paged_attend, paged_oracle))
            close(got, expected)
            _differs(expected, plain, name)
        assert paged_attend(layer, s, mask=causal(), lse=False).lse is None


def _sink_flips(layer):
    """attend_and_write with and without sinks, in prefill and in decode."""
    sinks = np.array([0.5, -0.5, 1.0, 2.0], np.float32)
    for query_lens, seq_lens in (((3, 2), (6, 5)), ((1, 1), (6, 5))):
        s = step(layer, query_lens, seq_lens, block_size=layer.block(4))
        k, v = (layer.normal(i, sum(query_lens), 2, layer.head_size) for i in (8, 9))
        written = s._replace(k=s.k.copy(), v=s.v.copy())
        for row, slot in enumerate(s.batch.slot_mapping):
            at = divmod(int(slot), s.batch.block_size)
            written.k[at], written.v[at] = k[row], v[row]
        partial = paged_oracle(layer, written, mask=causal())
        for given in (None, sinks):
            out, cache = layer.standard.attend_and_write(
                *(layer.array(x) for x in (s.q, k, v)),
                layer.cache(s.k, s.v),
                layer.place(s.batch, causal()),
                None if given is None else layer.array(given),
                mask=causal(),
                scale=layer.scale,
            )
            close(layer.numpy(out), reference.merge.finish(partial, given, dtype=layer.dtype))
            owned = np.unique(s.batch.block_table[s.batch.block_table >= 0])
            exact(layer.numpy(cache).k[owned], written.k[owned])
            exact(layer.numpy(cache).v[owned], written.v[owned])


def b21_broadcast_of_a_bias_under_grouped_heads(layer: Layer):
    """A mask for each head failed only where heads are grouped, and masks with axes of size 1 were refused or broadcast wrongly.

    Right: every shape equals the fully expanded one, additive and hiding, and its head axis is the query heads'.
    """
    t, s, heads, kv_heads = 5, 7, 8, 2
    q = layer.normal(1, t, heads, layer.head_size)
    k, v = (layer.normal(i, s, kv_heads, layer.head_size) for i in (2, 3))
    for n, shape in enumerate(((s,), (t, s), (1, 1, s), (1, t, s), (heads, t, s), (heads, 1, s), (heads, t, 1), (1, 1, 1))):
        additive = layer.normal(10 + n, *shape)
        hiding = np.where(layer.normal(30 + n, *shape) > 0.3, -np.inf, 0).astype(additive.dtype)
        if shape[-1] == s:
            hiding[..., 0] = 0
        for bias in (additive, hiding):
            whole = np.broadcast_to(bias, (heads, t, s))
            expected = oracle(layer, q, k, v, Range(s - t, t), Range(0, s), whole, mask=full())
            close(attend(layer, q, k, v, Range(s - t, t), Range(0, s), bias, mask=full()), expected)


def _coded(layer, rows):
    """Values that name their row: row j holds j + 1."""
    return layer.rounded(np.broadcast_to(np.arange(1.0, rows + 1)[:, None, None], (rows, 2, layer.head_size)))


def _positional(case):
    return [case[name] for name in ("q", "k", "v", "q_pos", "k_pos", "bias")]


def _static(case):
    return {name: case[name] for name in ("mask", "scale", "softcap")}


def _differs(expected: Bounded, plain: Partial, name):
    moved = np.abs(expected.value.out - plain.out) > 2 * expected.bound.out
    assert moved.any(), f"this case cannot see whether {name} is applied"


REPORTS = (
    Report("B14", b14_causal_alignment, ("causal_is_top_left", "compressed_causal_is_top_left", "paged_causal_is_top_left")),
    Report("B15", b15_lengths_are_counts, ("paged_length_is_a_last_index", "paged_drops_the_last_key_of_a_full_page")),
    Report("B16", b16_sliding_windows, ("window_sees_one_more", "window_is_symmetric", "paged_window_sees_one_less_in_decode")),
    Report("B18", b18_softcap_before_the_mask, ("softcap_after_the_mask", "softcap_after_the_bias", "paged_ignores_softcap")),
    Report(
        "B20",
        b20_ignored_arguments,
        ("ignores_bias", "ignores_left_padding", "ignores_positions", "sink_ignored_in_prefill", "paged_ignores_slopes_in_decode"),
    ),
    Report("B21", b21_broadcast_of_a_bias_under_grouped_heads, ("bias_of_the_key_head", "bias_of_one_column_dropped")),
)
