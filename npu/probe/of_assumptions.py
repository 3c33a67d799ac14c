"""A question for each assumption of the emulator: a call whose result tells the answers apart, and the name of the one that was seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npu._errors import device_failed
from npu._rules import triangle
from npu.emulator.assumptions import TABLE
from npu.probe.calls import ERRORS, Attention, Lengths, band, by_sequence, causal, changed, dense, exact, near, paged, raw, right, run
from npu.probe.outcome import NOT_ASKED, Outcome, Unaskable, of_assumption

_WIDE = 10_000  # an open side of a band
NEITHER = "neither"


def _lse_name(lse: Tensor) -> str:
    """What an LSE of rows that see no key is called."""
    lowest = torch.finfo(torch.float32).min
    names = {
        "+inf": (lse == torch.inf).all(),
        "-inf": (lse == -torch.inf).all(),
        "lowest": (lse.isfinite() & (lse <= 0.99 * lowest)).all(),
    }
    return next((name for name, holds in names.items() if holds), f"{lse.flatten()[0].item():.4g}")


def _lse_empty_prefill(device):
    (_, lse), _ = run(causal(dense(Lengths((3, 2), (2, 5)), device), device))
    return _lse_name(lse[:1])


def _lse_empty_decode(device):
    hidden = torch.zeros(2, 1, 1, 9, dtype=torch.bool, device=device)
    hidden[0] = True
    (_, lse), _ = run(changed(dense(Lengths((1, 1), (9, 9)), device), {"atten_mask": hidden}))
    return _lse_name(lse)


def _lse_not_asked(device):
    _, lse = raw(changed(dense(Lengths((1,), (9,)), device), {"softmax_lse_flag": False}))
    return f"shape {list(lse.shape)}"


def _hidden_row(device, precise):
    """The call, and the output of a row whose keys are all masked."""
    hidden = torch.zeros(1, 1, 2, 9, dtype=torch.bool, device=device)
    hidden[..., 0, :] = True
    call = changed(dense(Lengths((2,), (9,)), device), {"atten_mask": hidden, "inner_precise": precise})
    return call, run(call)[0][0][0]


def _empty_row_output(device):
    call, row = _hidden_row(device, 0)
    mean = call.v[0].float().mean(0).repeat_interleave(2, 0)
    return "mean" if near(row, mean) else "junk"


def _corrected_row_output(device):
    _, row = _hidden_row(device, 2)
    return "junk" if row.isnan().any() or row.any() else "zeros"


def _no_keys_output(device):
    (out, _), _ = run(dense(Lengths((2, 2), (0, 5)), device))
    return "junk" if out.isnan().any() or out.any() else "zeros"


def _padded_query_output(device):
    out, _ = raw(dense(Lengths((2, 4), (5, 5)), device))
    return "zeros" if not out[0, 2:].isnan().any() and not out[0, 2:].any() else "junk"


def _which(call: Attention, sequence: int, found: Tensor, seen: dict[str, Tensor]) -> str:
    """The name of the mask under which a sequence's output is what was found."""
    return next((name for name, mask in seen.items() if near(found, exact(call, sequence, mask)[0])), NEITHER)


def _padded_query_alignment(device):
    call = causal(dense(Lengths((2, 4), (5, 9)), device), device)
    corners = {"actual": 5 - 2, "tensor": 9 - 4}
    return _which(call, 0, run(call)[0][0], {name: band(2, 5, corner, _WIDE, 0) for name, corner in corners.items()})


def _one_query_sees(call: Attention, sequence: int) -> str:
    """Of a sequence of one query and a band of 3 keys before it: "band" where the band applied, "all" where it did not."""
    keys = len(call.k[sequence])
    seen = {"band": band(1, keys, keys - 1, 3, 0), "all": torch.ones(1, keys, dtype=torch.bool)}
    return _which(call, sequence, run(call)[sequence][0], seen)


def _banded(call: Attention, device: str) -> Attention:
    return changed(call, {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 0, "atten_mask": triangle(device)})


def _tnd_one_query_band(device):
    alone, mixed = (
        _one_query_sees(_banded(dense(Lengths(queries, (20, 30)), device, layout="TND", size=128), device), 0)
        for queries in ((1, 1), (1, 3))
    )
    return {("all", "band"): "all-one", ("band", "band"): "never", ("all", "all"): "each"}.get((alone, mixed), NEITHER)


def _one_query_band(device):
    sees = _one_query_sees(_banded(dense(Lengths((1, 1), (20, 30)), device), device), 0)
    return {"band": "applied", "all": "ignored"}.get(sees, NEITHER)


def _one_query_lengths(device):
    call = changed(dense(Lengths((1, 1), (20, 30)), device), {"actual_seq_lengths": [0, 1]})
    return "ignored" if not right(call) else "applied"


def _one_query_mask(device):
    keys = 600
    hidden = torch.zeros(1, 1, 1, keys, dtype=torch.bool, device=device)
    hidden[..., :40] = True
    call = changed(dense(Lengths((1,), (keys,)), device), {"atten_mask": hidden})
    seen = ~hidden[0, 0].cpu()
    return _which(call, 0, run(call)[0][0], {"every key": seen, "512 keys": seen & (torch.arange(keys) < 512)})


def _tnd_lengths_end(device):
    call = dense(Lengths((3, 5), (9, 20)), device, layout="TND", size=128)
    early = changed(call, {"actual_seq_lengths": [3, 7]})
    try:
        raw(early)
    except ERRORS as error:
        return _if_refusal(error, "must end at T")
    return "may end before"


def _mask_band_alignment(device):
    nothing = torch.zeros(1, 1, 3, 9, dtype=torch.bool, device=device)
    call = changed(dense(Lengths((3,), (9,)), device), {"atten_mask": nothing, "pre_tokens": 1, "next_tokens": 0})
    return _which(call, 0, run(call)[0][0], {"top left": band(3, 9, 0, 1, 0), "bottom right": band(3, 9, 6, 1, 0)})


def _masked_keys_arithmetic(device):
    hidden = torch.zeros(1, 1, 2, 9, dtype=torch.bool, device=device)
    hidden[..., 3] = True
    call = dense(Lengths((2,), (9,)), device)
    value = call.arguments["value"].clone()
    value[:, 3] = torch.nan
    out = run(changed(call, {"atten_mask": hidden, "value": value}))[0][0]
    seen = ~hidden[0, 0].cpu()
    return "multiplied" if out.isnan().any() else "skipped" if near(out, exact(call, 0, seen)[0]) else NEITHER


def _page_tail_arithmetic(device):
    call = paged(dense(Lengths((2,), (9,)), device), device, block=128, tail=torch.nan)
    out = run(call)[0][0]
    everything = torch.ones(2, 9, dtype=torch.bool)
    return "multiplied" if out.isnan().any() else "unread" if near(out, exact(call, 0, everything)[0]) else NEITHER


def _tnd_head_sizes(device):
    try:
        wrong = right(dense(Lengths((3, 5), (9, 20)), device, layout="TND", size=64))
    except ERRORS as error:
        return _if_refusal(error, "documented")
    return wrong or "with 64"


def _shared_pages(device):
    call = paged(dense(Lengths((1, 1, 1), (9, 9, 9)), device), device, block=16)
    first = {name: call.arguments[name][:1].contiguous() for name in ("key", "value")}
    table = torch.zeros_like(call.arguments["block_table"])
    same = Attention(call.q, [call.k[0]] * 3, [call.v[0]] * 3, {**call.arguments, **first, "block_table": table})
    try:
        wrong = right(same)
    except ERRORS as error:
        return _if_refusal(error, "no")
    return wrong or "yes"


def _sink_in_lse(device):
    if not hasattr(torch.ops.npu, "npu_fused_infer_attention_score_v2"):
        raise Unaskable("this torch_npu has no npu_fused_infer_attention_score_v2")
    call = dense(Lengths((3, 2), (9, 5)), device, layout="TND", size=128, dtype=torch.bfloat16)
    given, sink = call.arguments, torch.full((4,), 3.0, dtype=torch.bfloat16)
    out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2.default(
        given["query"],
        given["key"],
        given["value"],
        actual_seq_qlen=given["actual_seq_lengths"],
        actual_seq_kvlen=given["actual_seq_lengths_kv"],
        learnable_sink=sink.to(device),
        num_query_heads=given["num_heads"],
        num_key_value_heads=given["num_key_value_heads"],
        softmax_scale=given["scale"],
        input_layout="TND",
        return_softmax_lse=True,
    )
    found = by_sequence(call, out.cpu(), lse.cpu())[0][1]
    alone = exact(call, 0, torch.ones(3, 9, dtype=torch.bool))[1]
    return "no" if near(found, alone) else "yes" if near(found, torch.logaddexp(alone, sink.double())) else NEITHER


def _scatter(device, cache, slots):
    rows = torch.arange(2 * 2 * 16, dtype=torch.float32).reshape(2, 2, 16).half().to(device) + 1
    write = torch.ops.npu.npu_scatter_pa_kv_cache.default
    if "cache_mode" not in {argument.name for argument in write._schema.arguments}:
        raise Unaskable("npu_scatter_pa_kv_cache of this torch_npu has no cache_mode")
    write(rows, rows, cache, cache.clone(), torch.tensor(slots, dtype=torch.int32, device=device), cache_mode="Norm")
    return rows.cpu(), cache.cpu()


def _norm_cache(device):
    rows, cache = _scatter(device, torch.zeros(2, 16, 2, 16, dtype=torch.float16, device=device), [17, 3])
    expected = torch.zeros_like(cache)
    expected.view(-1, 2, 16)[[17, 3]] = rows
    return "yes" if torch.equal(cache, expected) else "no"


def _negative_slot(device):
    # the cache lies inside a larger one, so that a row which is written before its first slot does no harm, and is seen
    around = torch.zeros(4, 16, 2, 16, dtype=torch.float16, device=device)
    try:
        rows, cache = _scatter(device, around[1:3], [3, -1])
    except ERRORS as error:
        return _if_refusal(error, "refused")
    expected = torch.zeros_like(cache)
    expected.view(-1, 2, 16)[3] = rows[0]
    if not torch.equal(cache, expected):
        return "written inside the cache"
    outside = around.cpu()
    return "written before the cache" if outside[0].any() or outside[3].any() else "skipped"


def _rotation(device, dtype):
    random = torch.Generator().manual_seed(2)
    x = torch.randn(1, 40, 4, 64, generator=random).half()
    angles = torch.randn(1, 40, 1, 64, generator=random)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return x, cos, sin, torch.ops.npu.npu_rotary_mul.default(x.to(device), cos.to(device), sin.to(device), "half").cpu()


def _rotary_table_dtype(device):
    try:
        _rotation(device, torch.float32)
    except ERRORS as error:
        return _if_refusal(error, "same")
    return "any"


def _rotary_arithmetic(device):
    x, cos, sin, found = _rotation(device, torch.float16)
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rounded_once = (x.float() * cos.float() + turned.float() * sin.float()).half()
    rounded_often = x * cos + turned * sin
    telling = rounded_once != rounded_often
    shares = {name: (found == one)[telling].float().mean() for name, one in (("float32", rounded_once), ("input", rounded_often))}
    best = max(shares, key=shares.get)
    return best if shares[best] > 0.9 else NEITHER


def _if_refusal(error, name):
    """The name, where the operator refused; raises the error again where the device failed."""
    if device_failed(error):
        raise error
    return name


# What may harm a device that takes it comes last.
QUESTIONS: dict[str, Callable[[str], str]] = {
    "lse-empty-prefill": _lse_empty_prefill,
    "lse-empty-decode": _lse_empty_decode,
    "lse-not-asked": _lse_not_asked,
    "empty-row-output": _empty_row_output,
    "corrected-row-output": _corrected_row_output,
    "no-keys-output": _no_keys_output,
    "padded-query-output": _padded_query_output,
    "padded-query-alignment": _padded_query_alignment,
    "tnd-one-query-band": _tnd_one_query_band,
    "one-query-band": _one_query_band,
    "one-query-lengths": _one_query_lengths,
    "one-query-mask": _one_query_mask,
    "mask-band-alignment": _mask_band_alignment,
    "masked-keys-arithmetic": _masked_keys_arithmetic,
    "page-tail-arithmetic": _page_tail_arithmetic,
    "sink-in-lse": _sink_in_lse,
    "norm-cache": _norm_cache,
    "rotary-table-dtype": _rotary_table_dtype,
    "rotary-arithmetic": _rotary_arithmetic,
    "shared-pages": _shared_pages,
    "tnd-head-sizes": _tnd_head_sizes,
    "tnd-lengths-end": _tnd_lengths_end,
    "negative-slot": _negative_slot,
}
_BY_ID = {assumption.id: assumption for assumption in TABLE}


def ask(id: str, device: str) -> Outcome:
    """What the operators of this host answer to an assumption's question. Raises RuntimeError where the device fails."""
    if id not in QUESTIONS:
        return Outcome(NOT_ASKED, message="the probe has no question for it")
    return of_assumption(device, QUESTIONS[id], _BY_ID[id].belief, tuple(_BY_ID[id].variants))
