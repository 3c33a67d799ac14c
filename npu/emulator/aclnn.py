"""The aclnn functions that the wheel's C++ layer calls on the host-memory device: their arguments, and the emulator's kernels behind them.

The order of arguments is that of the published prototypes, one document a function: aclnnFusedInferAttentionScoreV3 and V4,
aclnnScatterPaKvCache, aclnnRotaryPositionEmbedding and its V2, and aclnnInplaceCopy, in the operator libraries' documents.
"""

from __future__ import annotations

from dataclasses import replace

from npu.emulator import attention, attention_call, cache, rotary
from npu.emulator.acl import FLAG, INTEGER, INTEGERS, LIST, REAL, TENSOR, TEXT, Function

_ATTENTION_INPUTS = {"query": TENSOR, "key": LIST, "value": LIST, "pse_shift": TENSOR, "atten_mask": TENSOR}
_ATTENTION_INPUTS |= {"actual_seq_lengths": INTEGERS, "actual_seq_lengths_kv": INTEGERS}
_ATTENTION_INPUTS |= dict.fromkeys(
    ("dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2", "antiquant_scale", "antiquant_offset"), TENSOR
)
_ATTENTION_INPUTS |= dict.fromkeys(("block_table", "query_padding_size", "kv_padding_size"), TENSOR)
_ATTENTION_INPUTS |= dict.fromkeys(
    ("key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale", "value_antiquant_offset"), TENSOR
)
_ATTENTION_INPUTS |= {"key_shared_prefix": TENSOR, "value_shared_prefix": TENSOR, "actual_shared_prefix_len": INTEGERS}
_ATTENTION_INPUTS |= dict.fromkeys(("query_rope", "key_rope", "key_rope_antiquant_scale"), TENSOR)
_SINCE_V4 = {"dequant_scale_query": TENSOR, "learnable_sink": TENSOR}
_ATTENTION_OPTIONS = {"num_heads": INTEGER, "scale": REAL, "pre_tokens": INTEGER, "next_tokens": INTEGER, "input_layout": TEXT}
_ATTENTION_OPTIONS |= dict.fromkeys(("num_key_value_heads", "sparse_mode", "inner_precise", "block_size", "antiquant_mode"), INTEGER)
_ATTENTION_OPTIONS |= {"softmax_lse_flag": FLAG, "key_antiquant_mode": INTEGER, "value_antiquant_mode": INTEGER}
_ATTENTION_OUTPUTS = {"attention_out": TENSOR, "softmax_lse": TENSOR}
_QUERY_MODE = {"query_quant_mode": INTEGER}

_ATTENTION_V3 = _ATTENTION_INPUTS | _ATTENTION_OPTIONS | _ATTENTION_OUTPUTS
_ATTENTION_V4 = _ATTENTION_INPUTS | _SINCE_V4 | _ATTENTION_OPTIONS | _QUERY_MODE | _ATTENTION_OUTPUTS
_SCATTER = {"key": TENSOR, "key_cache": TENSOR, "slot_mapping": TENSOR, "value": TENSOR, "value_cache": TENSOR}
_SCATTER |= dict.fromkeys(("compress_lens", "compress_seq_offsets", "seq_lens"), TENSOR)
_SCATTER |= {"cache_mode": TEXT, "scatter_mode": TEXT, "strides": INTEGERS, "offsets": INTEGERS}
_ROTARY = {"x": TENSOR, "cos": TENSOR, "sin": TENSOR, "mode": INTEGER}
_ROTARY_MODES = ("half", "interleave")


def _attention(arguments):
    out, lse = arguments.pop("attention_out"), arguments.pop("softmax_lse")
    # what has a sink among its arguments is the second version of the operator, on these chips
    second = "learnable_sink" in arguments
    sink = arguments.pop("learnable_sink", None)
    call = attention_call.read_v1(arguments)
    found, sums = attention.compute(replace(call, operator=attention_call.V2, sink=sink) if second else call)
    out.copy_(found)
    if call.wants_lse:
        lse.copy_(sums)


def _scratch(arguments):
    # No document says how much. That it grows with the batch is what callers have to live with.
    return 1024 + 4 * arguments["query"].numel()


def _scatter(arguments):
    for name, plain in (("scatter_mode", ("None",)), ("strides", ([], [1, 1])), ("offsets", ([], [0, 0]))):
        value = arguments.pop(name)
        if value is not None and value not in plain:
            raise NotImplementedError(f"{name} {value} is not emulated")
    cache.scatter(**arguments)


def _rotate(arguments):
    mode = arguments["mode"]
    if mode not in range(len(_ROTARY_MODES)):
        raise NotImplementedError(f"rotary mode {mode} is not emulated")
    rotate = arguments.get("rotate")
    arguments["out"].copy_(rotary.rotary_mul(arguments["x"], arguments["cos"], arguments["sin"], _ROTARY_MODES[mode], rotate))


def _copy(arguments):
    arguments["to"].copy_(arguments["source"])


FUNCTIONS = {
    "aclnnFusedInferAttentionScoreV3": Function(_ATTENTION_V3, _attention, tuple(_ATTENTION_OUTPUTS), _scratch),
    "aclnnFusedInferAttentionScoreV4": Function(_ATTENTION_V4, _attention, tuple(_ATTENTION_OUTPUTS), _scratch),
    "aclnnScatterPaKvCache": Function(_SCATTER, _scatter, ("key_cache", "value_cache")),
    "aclnnRotaryPositionEmbedding": Function(_ROTARY | {"out": TENSOR}, _rotate, ("out",)),
    "aclnnRotaryPositionEmbeddingV2": Function(_ROTARY | {"rotate": TENSOR, "out": TENSOR}, _rotate, ("out",)),
    "aclnnInplaceCopy": Function({"to": TENSOR, "source": TENSOR}, _copy, ("to",)),
}
