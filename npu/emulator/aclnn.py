"""The aclnn functions that the wheel's C++ layer calls on the host-memory device: their arguments, and the emulator's kernels behind them.

The order of arguments is that of the published prototypes, one document a function: aclnnFusedInferAttentionScoreV3 to V5,
aclnnScatterPaKvCache, aclnnRotaryPositionEmbedding and its V2, aclnnInplaceCopy and aclnnCast, in the operator libraries' documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from npu.emulator import attention, attention_call, cache, rotary
from npu.emulator.acl import FLAG, INTEGER, INTEGERS, LIST, REAL, TENSOR, TEXT

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
_SINCE_V5 = {"q_start_idx": INTEGERS, "kv_start_idx": INTEGERS}
_ATTENTION_OPTIONS = {"num_heads": INTEGER, "scale": REAL, "pre_tokens": INTEGER, "next_tokens": INTEGER, "input_layout": TEXT}
_ATTENTION_OPTIONS |= dict.fromkeys(("num_key_value_heads", "sparse_mode", "inner_precise", "block_size", "antiquant_mode"), INTEGER)
_ATTENTION_OPTIONS |= {"softmax_lse_flag": FLAG, "key_antiquant_mode": INTEGER, "value_antiquant_mode": INTEGER}
_ATTENTION_OUTPUTS = {"attention_out": TENSOR, "softmax_lse": TENSOR}
_QUERY_MODE, _BIAS_KIND = {"query_quant_mode": INTEGER}, {"pse_type": INTEGER}

_ATTENTION = "aclnnFusedInferAttentionScore"
PROTOTYPES = {
    f"{_ATTENTION}V3": _ATTENTION_INPUTS | _ATTENTION_OPTIONS | _ATTENTION_OUTPUTS,
    f"{_ATTENTION}V4": _ATTENTION_INPUTS | _SINCE_V4 | _ATTENTION_OPTIONS | _QUERY_MODE | _ATTENTION_OUTPUTS,
    f"{_ATTENTION}V5": _ATTENTION_INPUTS | _SINCE_V4 | _SINCE_V5 | _ATTENTION_OPTIONS | _QUERY_MODE | _BIAS_KIND | _ATTENTION_OUTPUTS,
    "aclnnScatterPaKvCache": {"key": TENSOR, "key_cache": TENSOR, "slot_mapping": TENSOR, "value": TENSOR, "value_cache": TENSOR}
    | dict.fromkeys(("compress_lens", "compress_seq_offsets", "seq_lens"), TENSOR)
    | {"cache_mode": TEXT, "scatter_mode": TEXT, "strides": INTEGERS, "offsets": INTEGERS},
    "aclnnRotaryPositionEmbedding": {"x": TENSOR, "cos": TENSOR, "sin": TENSOR, "mode": INTEGER, "out": TENSOR},
    "aclnnRotaryPositionEmbeddingV2": {"x": TENSOR, "cos": TENSOR, "sin": TENSOR, "mode": INTEGER, "rotate": TENSOR, "out": TENSOR},
    "aclnnInplaceCopy": {"to": TENSOR, "source": TENSOR},
    "aclnnCast": {"source": TENSOR, "dtype": INTEGER, "to": TENSOR},
}
OUTPUTS = ("attention_out", "softmax_lse", "key_cache", "value_cache", "out", "to")
_ROTARY_MODES = ("half", "interleave")


def _attention(arguments):
    out, lse = arguments.pop("attention_out"), arguments.pop("softmax_lse")
    sink, kind = arguments.pop("learnable_sink", None), arguments.pop("pse_type", 0)
    if kind:
        raise NotImplementedError(f"pse_type {kind} is not emulated")
    call = attention_call.read_v1(arguments)
    found, sums = attention.compute(call if sink is None else replace(call, operator=attention_call.V2, sink=sink))
    out.copy_(found)
    if call.wants_lse:
        lse.copy_(sums)


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


KERNELS: dict[str, Callable[[dict], None]] = {f"{_ATTENTION}V{version}": _attention for version in (3, 4, 5)}
KERNELS |= {"aclnnScatterPaKvCache": _scatter, "aclnnRotaryPositionEmbedding": _rotate, "aclnnRotaryPositionEmbeddingV2": _rotate}
KERNELS |= {"aclnnInplaceCopy": _copy, "aclnnCast": _copy}
