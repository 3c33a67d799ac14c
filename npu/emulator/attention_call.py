"""A call of fused infer attention, v1 or v2, under one set of names; and its arguments as rows of sequences, whatever their layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from npu.emulator.refusal import refuse

V1, V2 = "aclnnFusedInferAttentionScore", "aclnnFusedInferAttentionScoreV2"

# What of each schema the emulator knows, under the names of Call.
_V1_NAMES = {
    "query": "query",
    "key": "key",
    "value": "value",
    "pse_shift": "bias",
    "atten_mask": "mask",
    "actual_seq_lengths": "query_lengths",
    "actual_seq_lengths_kv": "key_lengths",
    "block_table": "block_table",
    "num_heads": "heads",
    "num_key_value_heads": "key_heads",
    "scale": "scale",
    "pre_tokens": "before",
    "next_tokens": "after",
    "input_layout": "layout",
    "sparse_mode": "mode",
    "inner_precise": "precise",
    "block_size": "page_size",
    "softmax_lse_flag": "wants_lse",
}
_RENAMED_IN_V2 = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
_V2_NAMES = {_RENAMED_IN_V2.get(name, name): ours for name, ours in _V1_NAMES.items()} | {"learnable_sink": "sink"}
_NOT_DEFAULT = {"antiquant_mode", "key_antiquant_mode", "value_antiquant_mode", "query_quant_mode", "key_quant_mode", "value_quant_mode"}


@dataclass(frozen=True)
class Call:
    """The arguments, under names of our own. `key_heads` is never 0. Lengths are None where they were not given."""

    operator: str
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    mask: Tensor | None
    query_lengths: list[int] | None
    key_lengths: list[int] | None
    block_table: Tensor | None
    heads: int
    key_heads: int
    scale: float
    before: int
    after: int
    layout: str
    mode: int
    precise: int
    page_size: int
    wants_lse: bool
    sink: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.layout == "TND"

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    @property
    def query_rows(self) -> int:
        """T where packed, else Q_S."""
        return self.query.shape[{"TND": 0, "BNSD": 2}.get(self.layout, 1)]

    @property
    def key_rows(self) -> int:
        """KV_S; where paged, how many rows a sequence's pages hold; where packed and not paged, T."""
        if self.paged:
            return self.block_table.shape[1] * self.page_size
        return self.key.shape[{"TND": 0, "BNSD": 2}.get(self.layout, 1)]

    @property
    def value_size(self) -> int:
        """D of the value."""
        heads_are_flat = self.value.ndim == 3 and (self.paged or self.layout == "BSH")
        return self.value.shape[-1] // self.key_heads if heads_are_flat else self.value.shape[-1]

    @property
    def batch(self) -> int:
        return len(self.query_lengths) if self.packed else self.query.shape[0]

    @property
    def query_sizes(self) -> list[int]:
        """Queries of each sequence. Outside TND one query is one query, whatever the lengths say (documented)."""
        if self.packed:
            return _differences(self.query_lengths)
        return [1] * self.batch if self.query_rows == 1 else _for_each(self.query_lengths, self.batch, self.query_rows)

    @property
    def key_sizes(self) -> list[int]:
        """Keys of each sequence. Lengths are cumulative where the keys themselves are packed."""
        if self.packed:
            return list(self.key_lengths) if self.paged else _differences(self.key_lengths)
        return _for_each(self.key_lengths, self.batch, self.key_rows)

    @property
    def one_query(self) -> bool:
        """Whether the call is a decode: no sequence has more than one query."""
        return max(self.query_sizes, default=0) <= 1 if self.packed else self.query_rows == 1


def read_v1(arguments: dict) -> Call:
    """The call that npu_fused_infer_attention_score's arguments make. Raises RuntimeError for features that are not emulated."""
    return _read(V1, _V1_NAMES, arguments)


def read_v2(arguments: dict) -> Call:
    """As `read_v1`, of npu_fused_infer_attention_score_v2."""
    return _read(V2, _V2_NAMES, arguments)


def query_side(call: Call, rows: Tensor) -> list[Tensor]:
    """Views [q, heads, size] of each sequence's actual rows in a tensor that is laid out as the query."""
    if call.packed:
        return list(rows[: sum(call.query_sizes)].split(call.query_sizes))
    return [rows_of[:size] for rows_of, size in zip(_by_sequence(call, rows, call.heads), call.query_sizes, strict=True)]


def key_side(call: Call, rows: Tensor) -> Iterator[Tensor]:
    """[k, key heads, size] of each sequence's actual rows in `key` or `value`; of all rows of its pages where paged."""
    if call.paged:
        pages = rows.transpose(1, 2) if rows.ndim == 4 else rows.unflatten(2, (call.key_heads, -1))
        for table, size in zip(call.block_table.tolist(), call.key_sizes, strict=True):
            used = table[: -(-size // call.page_size)]
            yield pages[used].flatten(0, 1)
    elif call.packed:
        yield from rows[: sum(call.key_sizes)].split(call.key_sizes)
    else:
        for rows_of, size in zip(_by_sequence(call, rows, call.key_heads), call.key_sizes, strict=True):
            yield rows_of[:size]


def _by_sequence(call, rows, heads):
    if call.layout == "BSH":
        return rows.unflatten(2, (heads, -1))
    return rows.transpose(1, 2) if call.layout == "BNSD" else rows


def _read(operator, names, arguments):
    for name, value in arguments.items():
        if name not in names and value is not None and not (name in _NOT_DEFAULT and value == 0):
            refuse(operator, f"{name} is not emulated", "a value other than the default")
    call = {ours: arguments[name] for name, ours in names.items()}
    call["key_heads"] = call["key_heads"] or call["heads"]
    return Call(operator, **call)


def _differences(cumulative):
    return [after - before for before, after in zip([0, *cumulative], cumulative, strict=False)]


def _for_each(lengths, batch, rows):
    if lengths is None:
        return [rows] * batch
    return [lengths[0]] * batch if len(lengths) == 1 else list(lengths[:batch])
