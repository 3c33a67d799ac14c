"""Faults in the standard layer: preparing weights, writing and attending, the sink, projections and rotation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fattn.conformance.faults import paging
from fattn.conformance.faults.fault import Fault
from fattn.conformance.plain import merge, paged, standard


def attends_before_it_writes(q, k, v, cache, batch, sinks=None, slopes=None, *, mask, scale, softcap=None, attend=paged.attend):
    partial = attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=sinks is not None)
    return merge.finish(partial, sinks, dtype=q.dtype), paged.write(cache, k, v, batch.slot_mapping)


def _changed(prepare_arguments):
    """attend_and_write with some of its arguments changed first: change(q, k, v, batch, sinks, slopes) -> the same six."""

    def attend_and_write(q, k, v, cache, batch, sinks=None, slopes=None, *, mask, scale, softcap=None, attend=paged.attend):
        q, k, v, batch, sinks, slopes = prepare_arguments(q, k, v, batch, sinks, slopes)
        return standard.attend_and_write(q, k, v, cache, batch, sinks, slopes, mask=mask, scale=scale, softcap=softcap, attend=attend)

    return attend_and_write


def without_sinks_in_prefill(q, k, v, batch, sinks, slopes):
    return q, k, v, batch, None if batch.max_query_len > 1 else sinks, slopes


def without_slopes(q, k, v, batch, sinks, slopes):
    return q, k, v, batch, sinks, None


def one_token_a_sequence(q, k, v, batch, sinks, slopes):
    """Each sequence writes its last token alone: right in decode."""
    last = np.zeros(len(q), bool)
    last[batch.query_start_loc[1:] - 1] = True
    return q, k, v, replace(batch, slot_mapping=np.where(last, batch.slot_mapping, -1).astype(np.int32)), sinks, slopes


def padding_writes(q, k, v, batch, sinks, slopes):
    """A padding row's slot -1 is taken for slot 0."""
    return q, k, v, replace(batch, slot_mapping=np.maximum(batch.slot_mapping, 0)), sinks, slopes


def sink_twice(q, k, v, cache, batch, sinks=None, slopes=None, *, mask, scale, softcap=None, attend=paged.attend):
    """The kernel has added the sink to its lse, and the end adds it again."""
    cache = paged.write(cache, k, v, batch.slot_mapping)
    partial = attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=True)
    out = merge.finish(partial, sinks, dtype=np.float32)
    if sinks is not None:
        again = partial._replace(out=out, lse=np.logaddexp(partial.lse, sinks).astype(np.float32))
        out = merge.finish(again, sinks, dtype=np.float32)
    return out.astype(q.dtype), cache


def uncapped_with_sinks(q, k, v, cache, batch, sinks=None, slopes=None, *, mask, scale, softcap=None, attend=paged.attend):
    softcap = softcap if sinks is None else None
    return standard.attend_and_write(q, k, v, cache, batch, sinks, slopes, mask=mask, scale=scale, softcap=softcap, attend=attend)


def prefix_hit_counts_from_zero(q, k, v, cache, batch, sinks=None, slopes=None, *, mask, scale, softcap=None, attend=paged.attend):
    """A prompt whose prefix is in the cache is attended to as if it were cold."""
    cache = paged.write(cache, k, v, batch.slot_mapping)
    partial = paging.prefix_from_zero(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=sinks is not None)
    return merge.finish(partial, sinks, dtype=q.dtype), cache


def bias_of_keys_dropped(weights, *, config):
    return standard.prepare(weights._replace(bk=None), config=config)


def keys_and_values_swapped(weights, *, config):
    swapped = weights._replace(wk=weights.wv, wv=weights.wk, bk=weights.bv, bv=weights.bk)
    return standard.prepare(swapped, config=config)


def frequencies_of_the_whole_head(weights, *, config):
    right = standard.prepare(weights, config=config)
    if right.frequencies is None:
        return right
    return right._replace(frequencies=standard.rope.frequencies(config.head_size, theta=config.rotary_theta)[: right.frequencies.size])


def fixed_theta(weights, *, config):
    return standard.prepare(weights, config=replace(config, rotary_theta=10000.0))


def turns_at_rows(x, weights, cache, batch, *, config, attend=paged.attend):
    """Rotation counts rows of the batch, not positions of the sequence."""
    return standard.forward(x, weights, cache, replace(batch, positions=np.arange(len(x), dtype=np.int32)), config=config, attend=attend)


def turns_at_the_end(x, weights, cache, batch, *, config, attend=paged.attend):
    """Every row of a sequence turns at its last position: right in decode."""
    counts = np.diff(batch.query_start_loc)
    last = np.repeat(batch.seq_lens - 1, counts).astype(np.int32)
    return standard.forward(x, weights, cache, replace(batch, positions=np.maximum(last, 0)), config=config, attend=attend)


def halves_only(x, weights, cache, batch, *, config, attend=paged.attend):
    config = replace(config, rotary="half") if config.rotary else config
    return standard.forward(x, weights, cache, batch, config=config, attend=attend)


def without_last_bias(x, weights, cache, batch, *, config, attend=paged.attend):
    return standard.forward(x, weights._replace(bo=None), cache, batch, config=config, attend=attend)


def without_sinks(x, weights, cache, batch, *, config, attend=paged.attend):
    return standard.forward(x, weights._replace(sinks=None), cache, batch, config=config, attend=attend)


def own_attention(x, weights, cache, batch, *, config, attend=paged.attend):
    return standard.forward(x, weights, cache, batch, config=config)


def _write(name, kind, function, why):
    return Fault(name, kind, "standard.attend_and_write", function, why)


def _forward(name, kind, function, why):
    return Fault(name, kind, "standard.forward", function, why)


def _prepare(name, kind, function, why):
    return Fault(name, kind, "standard.prepare", function, why)


FAULTS = (
    _write("attends_before_it_writes", "order", attends_before_it_writes, "the step's own tokens are not in the cache yet"),
    _write("layer_prefix_hit_counts_from_zero", "causal alignment", prefix_hit_counts_from_zero, "right in decode and when cold"),
    _write("sink_ignored_in_prefill", "ignored argument", _changed(without_sinks_in_prefill), "only the decode kernel takes it"),
    _write("slopes_ignored", "ignored argument", _changed(without_slopes), "swallowed on the way"),
    _write("writes_one_token_a_sequence", "slots", _changed(one_token_a_sequence), "right in decode"),
    _write("padding_writes_to_slot_zero", "padding leak", _changed(padding_writes), "-1 is clipped to 0"),
    _write("sink_in_the_kernel_and_at_the_end", "sink", sink_twice, "lse includes the sink"),
    _write("softcap_ignored_with_sinks", "ignored argument", uncapped_with_sinks, "two features, two kernels"),
    _prepare("bias_of_keys_dropped", "ignored argument", bias_of_keys_dropped, "some models have none"),
    _prepare("keys_and_values_swapped", "layout", keys_and_values_swapped, "the order of the fused projection"),
    _prepare("frequencies_of_the_whole_head", "scale", frequencies_of_the_whole_head, "rotary_size is not read"),
    _prepare("theta_is_fixed", "ignored argument", fixed_theta, "10000, whatever was asked for"),
    _forward("turns_at_rows", "rotary", turns_at_rows, "rows taken for positions"),
    _forward("turns_at_the_last_position", "rotary", turns_at_the_end, "right in decode"),
    _forward("turns_halves_only", "rotary pairing", halves_only, "the configuration's pairing is not read"),
    _forward("last_bias_dropped", "ignored argument", without_last_bias, "the output projection has none in most models"),
    _forward("sinks_dropped", "ignored argument", without_sinks, "not handed on"),
    _forward("attend_ignored", "ignored argument", own_attention, "the layer's own is called"),
)
