"""The documented limits of fused infer attention on A2 and A3: `check` refuses a call that breaks one, naming the rule.

Source: op-plugin's documents of npu_fused_infer_attention_score and its v2, CANN 8.3 to 9.1.
"""

from __future__ import annotations

import functools

import torch

from npu.emulator.assumptions import answer
from npu.emulator.attention_call import V2, Call
from npu.emulator.refusal import demand

LAYOUTS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
_COMPRESSED = 2048


def check(call: Call):
    """Raises RuntimeError in the device's form where the call breaks a documented limit."""
    rule = functools.partial(_rule, call.operator)
    _tensors(call, rule)
    _sizes(call, rule)
    if call.packed:
        _packed(call, rule)
    if call.paged:
        _pages(call, rule)
    _lengths(call, rule)
    if call.paged:
        _page_ids(call, rule)
    _mask(call, rule)
    _options(call, rule)


def _rule(operator, holds, text, value):
    demand(holds, operator, text, value)


def _tensors(call, rule):
    rule(call.layout in LAYOUTS, f"input_layout is one of {', '.join(LAYOUTS)} (others are not emulated)", repr(call.layout))
    rule(call.query.dtype in (torch.float16, torch.bfloat16), "query is float16 or bfloat16", call.query.dtype)
    for name, tensor in (("key", call.key), ("value", call.value)):
        rule(tensor.dtype == call.query.dtype, f"{name} has query's dtype (quantised keys are not emulated)", tensor.dtype)
    given = {"query": call.query, "key": call.key, "value": call.value, "atten_mask": call.mask, "pse_shift": call.bias}
    for name, tensor in (given | {"block_table": call.block_table, "learnable_sink": call.sink}).items():
        if tensor is not None:
            rule(tensor.is_contiguous(), f"{name} is contiguous", f"shape {list(tensor.shape)}, strides {list(tensor.stride())}")
    rule(
        call.query.ndim == LAYOUTS[call.layout],
        f"query has {LAYOUTS[call.layout]} dimensions in layout {call.layout}",
        list(call.query.shape),
    )
    dims = (3, 4) if call.paged else (LAYOUTS[call.layout],)
    rule(call.key.ndim in dims, f"key has {' or '.join(map(str, dims))} dimensions", list(call.key.shape))


def _sizes(call, rule):
    rule(0 < call.heads <= 256, "1 <= N <= 256 query heads", call.heads)
    rule(0 < call.key_heads and call.heads % call.key_heads == 0, "key heads divide query heads", f"{call.heads} and {call.key_heads}")
    rule(call.heads // call.key_heads <= 64, "at most 64 query heads on one key head", call.heads // call.key_heads)
    shape, keys, values = list(call.query.shape), list(call.key.shape), list(call.value.shape)
    if call.layout == "BSH":
        rule(shape[2] % call.heads == 0, "H is N * D", shape)
        size = shape[2] // call.heads
    else:
        rule(shape[{"BNSD": 1}.get(call.layout, -2)] == call.heads, "query's N is num_heads", shape)
        size = shape[-1]
    rule(0 < size <= 512 and size % 16 == 0, "D <= 512 in multiples of 16", size)
    if call.paged and call.key.ndim == 3 or call.layout == "BSH":
        rule(keys[2] == call.key_heads * size, "key's H is key heads * D", keys)
    else:
        rule(keys[-1] == size, "key's D is query's D", keys)
        at = {"BNSD": 1}.get(call.layout, -2) if not call.paged else 1
        rule(keys[at] == call.key_heads, "key's N is num_key_value_heads", keys)
    if not (call.packed and values[:-1] == keys[:-1]):
        rule(keys == values, "key and value have one shape", f"{keys} and {values}")
    if not call.packed:
        rule(shape[0] <= 65536, "B <= 65536", shape[0])
        rule(call.paged or keys[0] == shape[0], "query and key have one batch size", f"{shape} and {keys}")


def _packed(call, rule):
    sizes = (call.query.shape[-1], call.value_size)
    allowed = [(128, 128), (192, 192), (192, 128)]
    if call.operator == V2 and call.heads == call.key_heads or answer("tnd-head-sizes") == "with 64":
        allowed.append((64, 64))
    rule(sizes in allowed, f"layout TND: D of query and key, and of value, are one of {allowed}", sizes)
    rule(call.query_lengths is not None and call.key_lengths is not None, "layout TND needs both sequence lengths", "None")
    rule(call.bias is None, "layout TND takes no pse_shift", "a tensor")
    if call.operator == V2:
        rule(not call.paged or call.key.ndim == 3, "layout TND of v2 takes pages as BnBsH alone", list(call.key.shape))
        allowed_precise = (0, 1) if call.query.dtype == torch.float16 else (0,)
        rule(call.precise in allowed_precise, f"layout TND of v2 takes inner_precise {allowed_precise}", call.precise)


def _lengths(call, rule):
    for name, lengths in (("query", call.query_lengths), ("key", call.key_lengths)):
        if lengths is None:
            continue
        rule(min(lengths, default=0) >= 0, f"{name} lengths are not negative", lengths)
        if call.packed:
            rule(len(lengths) == call.batch, "query and key lengths have one entry per sequence", f"{call.batch} and {len(lengths)}")
            cumulative = name == "query" or not call.paged
            rule(not cumulative or lengths == sorted(lengths), f"layout TND: {name} lengths are cumulative: they never fall", lengths)
        else:
            rule(len(lengths) == 1 or len(lengths) >= call.batch, f"{name} lengths have 1 entry or at least B = {call.batch}", len(lengths))
    if call.packed:
        rule(0 < call.batch <= 4096, "layout TND takes 1 to 4096 sequences", call.batch)
        last, rows = call.query_lengths[-1], call.query_rows
        ends = last <= rows if answer("tnd-lengths-end") == "may end before" else last == rows
        rule(ends, "layout TND: queryT must be equal to the last element of the query lengths", f"T = {rows}, last = {last}")
        if not call.paged:
            rule(
                call.key_lengths[-1] <= call.key_rows,
                "layout TND: key lengths end at or before key's T",
                f"{call.key_lengths[-1]} of {call.key_rows}",
            )
    else:
        rule(
            max(call.query_sizes, default=0) <= call.query_rows,
            "query lengths are at most Q_S",
            f"{call.query_sizes}, Q_S = {call.query_rows}",
        )
    if call.paged or not call.packed:
        rule(max(call.key_sizes, default=0) <= call.key_rows, "key lengths are at most KV_S", f"{call.key_sizes}, KV_S = {call.key_rows}")
    if call.one_query:
        rule(max(call.key_sizes, default=0) <= 262144, "one query reads at most 262144 keys", max(call.key_sizes, default=0))


def _pages(call, rule):
    rule(call.key_lengths is not None, "pages need the key lengths", "None")
    table, size = call.block_table, call.page_size
    rule(table.dtype == torch.int32 and table.ndim == 2, "block_table is int32 with two dimensions", f"{table.dtype}{list(table.shape)}")
    rule(table.shape[0] == call.batch, "block_table has a row for each sequence", f"{table.shape[0]} rows, {call.batch} sequences")
    if call.packed:
        rule(size > 0 and size % 16 == 0 and size <= 1024, "layout TND: block_size is a multiple of 16 up to 1024", size)
    elif call.one_query:
        rule(size > 0 and size % 16 == 0 and size <= 512, "one query: block_size is a multiple of 16 up to 512", size)
    else:
        rule(size in (128, 256, 384, 512), "several queries: block_size is 128, 256, 384 or 512", size)
    at = 1 if call.key.ndim == 3 else 2
    rule(call.key.shape[at] == size, "block_size is that of the cache", f"{size} and {list(call.key.shape)}")
    if call.key.ndim == 3:
        rule(call.key.shape[2] <= 65535, "pages as BnBsH: key heads * D <= 65535", call.key.shape[2])
    else:
        rule(call.layout in ("BNSD", "TND"), "pages as BnNBsD go with a query in layout BNSD or TND", call.layout)


def _page_ids(call, rule):
    table, size = call.block_table, call.page_size
    used = [row[: -(-length // size)] for row, length in zip(table.tolist(), call.key_sizes, strict=True)]
    pages = call.key.shape[0]
    wrong = [(b, p, page) for b, row in enumerate(used) for p, page in enumerate(row) if not 0 <= page < pages]
    rule(not wrong, f"block ids that the lengths reach are in [0, {pages})", f"(sequence, place, id) {wrong[:4]}")
    total = sum(map(len, used))
    rule(
        answer("shared-pages") == "yes" or total <= pages,
        "there are at least as many pages as the sequences' counts add up to",
        f"{pages} < {total}",
    )


def _mask(call, rule):
    rule(call.mode in (0, 1, 2, 3, 4), "sparse_mode is 0 to 4 (9 is not emulated)", call.mode)
    rule(call.mode == 0 or call.mask is not None, "sparse_mode 1 to 4 needs atten_mask", "None")
    if call.mask is None:
        return
    mask, shape = call.mask, list(call.mask.shape)
    rule(mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask is bool, int8 or uint8", mask.dtype)
    if call.mode >= 2:
        square = [_COMPRESSED, _COMPRESSED]
        rule(shape in (square, [1, *square], [1, 1, *square]), "sparse_mode 2 to 4: atten_mask is 2048 x 2048", shape)
        rule(
            _is_triangle(mask.reshape(square)),
            "sparse_mode 2 to 4: atten_mask hides exactly what is above the diagonal",
            "another",
        )
        return
    rule(not call.packed, "layout TND: masks other than the compressed one are not emulated", shape)
    queries, keys, batch = call.query_rows, call.key_rows, call.batch
    if len(shape) == 2:
        first = batch if call.one_query else queries
        fits = shape[0] >= first if not call.one_query else shape[0] == first
    elif len(shape) == 3:
        fits = shape[0] == 1 and shape[1] >= queries
    else:
        fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] == 1 and shape[2] >= queries
    rule(
        fits and shape[-1] >= keys,
        f"atten_mask is (1, Q_S, KV_S), (1 or B, 1, Q_S, KV_S), or (B, KV_S) for one query and (Q_S, KV_S) for several; "
        f"B = {batch}, Q_S = {queries}, KV_S = {keys}",
        shape,
    )


def _options(call, rule):
    rule(
        call.precise in ((0, 1) if call.one_query and not call.packed else (0, 1, 2, 3)),
        "inner_precise is 0 or 1, or for several queries 2 or 3",
        call.precise,
    )
    rule(call.before + call.after >= 0, "pre_tokens and next_tokens leave a band", f"{call.before} and {call.after}")
    if call.bias is not None:
        bias = call.bias
        rule(bias.dtype == call.query.dtype, "pse_shift has query's dtype", bias.dtype)
        fits = bias.ndim == 4 and bias.shape[0] in (1, call.batch) and bias.shape[1] == call.heads
        fits = fits and bias.shape[2] >= call.query_rows and bias.shape[3] >= call.key_rows
        rule(
            fits,
            f"pse_shift is (1 or B, N, Q_S, KV_S), here N = {call.heads}, Q_S = {call.query_rows}, KV_S = {call.key_rows}",
            list(bias.shape),
        )
    if call.sink is not None:
        rule(call.packed and call.bias is None, "learnable_sink needs layout TND and no pse_shift", call.layout)
        rule(
            call.sink.dtype == torch.bfloat16 and list(call.sink.shape) == [call.heads],
            "learnable_sink is bfloat16 [N]",
            f"{call.sink.dtype}{list(call.sink.shape)}",
        )
        rule(call.value_size <= 128, "learnable_sink needs a value size of at most 128", call.value_size)


def _is_triangle(mask):
    """Whether a mask of one-byte values is nonzero exactly above the diagonal. Eight are compared at a time: this runs in every call."""
    return torch.equal(mask.view(torch.int64), _triangle().view(torch.int64)) or torch.equal(mask.bool(), _triangle())


@functools.cache
def _triangle():
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool).triu(1)
