"""Gradients of dense.attend on torch_npu: through the operator for training, held to float64 autograd of the definition."""

import pytest
import torch
from layer_cases import batch_of, cache_of, normal

import npu
import npu.emulator.fusion
from fattn.types import Range, Tokens, Unsupported, causal, chunk, full, same, window
from npu import _operators, _training

ROUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# q heads, k heads, head size, value size, q_pos, k_pos, mask, bias shape, dtype
CASES = {
    "causal": (4, 2, 32, 32, Range(4, 5), Range(0, 9), causal(), None, torch.float32),
    "half": (4, 4, 64, 64, Range(4, 5), Range(0, 9), causal(), None, torch.float16),
    "bfloat16": (4, 1, 128, 128, Range(4, 5), Range(0, 9), causal(), None, torch.bfloat16),
    "narrow values": (2, 2, 48, 16, Range(0, 5), Range(0, 9), full(), None, torch.float32),
    "window": (4, 2, 32, 32, Range(4, 5), Range(0, 9), window(2, 1), None, torch.float32),
    "window of half": (4, 2, 32, 32, Range(4, 5), Range(0, 9), causal() & window(2, 0), None, torch.float16),
    "one query": (4, 2, 32, 32, Range(8, 1), Range(0, 9), causal(), None, torch.float32),
    "chunk": (4, 2, 32, 32, Range(4, 5), Range(0, 9), chunk(3), None, torch.float32),
    "rows without keys": (4, 2, 32, 32, torch.tensor([-1, 2, 0, -1, 3]), torch.arange(1, 10), causal(), None, torch.float32),
    "bias": (4, 2, 32, 32, Range(4, 5), Range(0, 9), causal(), (4, 5, 9), torch.float32),
    "bias of a row": (4, 2, 32, 32, Range(4, 5), Range(0, 9), causal(), (9,), torch.float32),
    "bias in bfloat16": (4, 2, 32, 32, Range(4, 5), Range(0, 9), causal(), (4, 1, 9), torch.bfloat16),
    "segments": (2, 2, 32, 32, "labels", "labels", causal() & same("user"), None, torch.float32),
}
SCALE = 0.3


def definition(q, k, v, seen, bias):
    """Attention in float64, rows that see nothing zero; log-sum-exp beside."""
    group = q.shape[1] // k.shape[1]
    k, v = (rows.repeat_interleave(group, 1) for rows in (k, v))
    z = torch.einsum("thd,shd->hts", q, k) * SCALE
    z = z if bias is None else z + bias
    some = seen.any(-1, keepdim=True)
    z = torch.where(seen & some, z, torch.where(some, -torch.inf, 0))
    return torch.einsum("hts,shd->thd", z.softmax(-1) * some, v), z.logsumexp(-1).T


def sides(q_pos, k_pos):
    if q_pos != "labels":
        return q_pos, k_pos
    user = torch.tensor([0] * 6 + [1] * 3)
    return Tokens(Range(4, 5), {"user": user[4:]}), Tokens(Range(0, 9), {"user": user})


def drawn(case):
    heads, kv_heads, size, value_size, q_pos, k_pos, mask, bias_shape, dtype = case
    q_pos, k_pos = (sides(q_pos, k_pos)) if isinstance(q_pos, str) else (q_pos, k_pos)
    count = lambda tokens: len(tokens) if isinstance(tokens, torch.Tensor) else getattr(tokens, "size", None) or tokens.pos.size
    t, s = count(q_pos), count(k_pos)
    arrays = [normal(t, heads, size, seed=1), normal(s, kv_heads, size, seed=2), normal(s, kv_heads, value_size, seed=3)]
    arrays += [] if bias_shape is None else [normal(*bias_shape, seed=4)]
    given = [array.to(dtype).requires_grad_() for array in arrays]
    return given, q_pos, k_pos, mask, normal(t, heads, value_size, seed=5).to(dtype)


def assert_gradients(case):
    given, q_pos, k_pos, mask, dy = drawn(case)
    dtype = given[0].dtype
    seen = npu.masks.visible(q_pos, k_pos, mask=mask)
    partial = npu.dense.attend(*given[:3], q_pos, k_pos, *given[3:], mask=mask, scale=SCALE)
    exact = [array.detach().double().requires_grad_() for array in given]
    out, lse = definition(*exact[:3], seen, *exact[3:] or (None,))
    out.backward(dy.double())
    partial.out.backward(dy)
    pairs = [
        ("out", partial.out, out),
        *((name, a.grad, b.grad) for name, a, b in zip(("q", "k", "v", "bias"), given, exact, strict=False)),
    ]
    for name, found, right in pairs:
        assert found.dtype == dtype and found.shape == right.shape, name
        off, size = (found.double() - right).abs().max(), right.abs().max()
        assert off <= 8 * ROUND[dtype] * size, f"{name}: off by {off}, the greatest is {size}"
    rows = seen.any(-1)
    torch.testing.assert_close(partial.lse[rows].double(), lse[rows], rtol=1e-5, atol=2e-2 if dtype != torch.float32 else 1e-5)
    assert (partial.lse[~rows] == -torch.inf).all() and (partial.out[~rows] == 0).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_definition(case):
    assert_gradients(case)


def test_what_no_query_sees_may_hold_anything():
    """NaN in a key that no query sees reaches neither the output nor a gradient, and has gradient 0."""
    given, q_pos, k_pos, mask, dy = drawn(CASES["causal"])
    q, k, v = (array.detach() for array in given)
    k_pos = torch.tensor([0, 1, -1, 3, 4, 5, -1, 7, 8])
    hidden = k_pos < 0
    k, v = (rows.masked_fill(hidden[:, None, None], torch.nan).requires_grad_() for rows in (k, v))
    out = npu.dense.attend(q, k, v, torch.arange(4, 9), k_pos, mask=mask, scale=SCALE).out
    out.backward(dy)
    assert out.isfinite().all() and all(rows.grad.isfinite().all() and (rows.grad[hidden] == 0).all() for rows in (k, v))


def test_two_operators_a_pass_and_no_traffic():
    given, q_pos, k_pos, mask, dy = drawn(CASES["causal"])
    with npu.emulator.launches.traffic_forbidden(), npu.emulator.launches.count() as launches:
        npu.dense.attend(*given, q_pos, k_pos, mask=mask, scale=SCALE).out.backward(dy)
    operators = {name: number for name, number in launches.items() if name.startswith("npu::")}
    assert operators == {npu.emulator.fusion.FORWARD: 1, npu.emulator.fusion.BACKWARD: 1}


def test_without_gradients_the_operator_for_inference_runs():
    given, q_pos, k_pos, mask, _ = drawn(CASES["half"])
    for grads, name in ((torch.no_grad(), "npu::npu_fused_infer_attention_score"), (torch.enable_grad(), npu.emulator.fusion.FORWARD)):
        with grads, npu.emulator.launches.count() as launches:
            npu.dense.attend(*given, q_pos, k_pos, mask=mask, scale=SCALE)
        assert launches[name] == 1


def test_a_gradient_of_the_lse_is_refused_not_lost():
    given, q_pos, k_pos, mask, _ = drawn(CASES["causal"])
    partial = npu.dense.attend(*given, q_pos, k_pos, mask=mask, scale=SCALE)
    with pytest.raises(Unsupported, match="lse.*fattn"):
        (partial.out.sum() + partial.lse.sum()).backward()
    with pytest.raises(Unsupported, match="lse"):
        npu.merge.finish(
            npu.dense.attend(*given, q_pos, k_pos, mask=mask, scale=SCALE), torch.zeros(4), dtype=torch.float32
        ).sum().backward()


REFUSED = {
    "float64": (lambda q, k, v: (q.double(), k.double(), v.double()), {}, "q.dtype='float64'"),
    "softcap": (lambda q, k, v: (q, k, v), {"softcap": 5.0}, "softcap=5.0"),
    "wide values": (lambda q, k, v: (q, k, v.repeat(1, 1, 2)), {}, "value_size=64"),
    "a float16 bias": (lambda *rows: tuple(row.half() for row in rows), {"bias": torch.full((9,), 9000.0).half()}, "bias='float16'"),
    "a bias without a scale": (lambda q, k, v: (q, k, v), {"bias": torch.ones(9), "scale": 0.0}, "scale=0.0"),
    "large heads": (lambda q, k, v: (q.repeat(1, 1, 25), k.repeat(1, 1, 25), v), {}, "head_size=800"),
}


@pytest.mark.parametrize("change, options, message", REFUSED.values(), ids=REFUSED)
def test_refused(change, options, message):
    given, q_pos, k_pos, mask, _ = drawn(CASES["causal"])
    with pytest.raises(Unsupported, match=message):
        npu.dense.attend(*change(*given), q_pos, k_pos, **({"mask": mask, "scale": SCALE} | options))


def test_outputs_of_the_caller_are_refused():
    given, q_pos, k_pos, mask, _ = drawn(CASES["causal"])
    out = npu.dense.attend(*(array.detach().half() for array in given), q_pos, k_pos, mask=mask, scale=SCALE)
    with pytest.raises(ValueError, match="out is given, but .* requires a gradient"):
        npu.dense.attend(*(array.half() for array in given), q_pos, k_pos, mask=mask, scale=SCALE, out=out)


def test_pages_have_no_gradient_but_what_is_gathered_from_them_has():
    batch = batch_of([2], [20], block_size=16)
    placed, cache = npu.place(batch, "cpu", causal()), cache_of(batch, 2, 128)
    q = normal(2, 4, 128).requires_grad_()
    with pytest.raises(Unsupported, match="q.requires_grad=True.*paged.gather"):
        npu.paged.attend(q, cache, placed, mask=causal(), scale=SCALE)
    k = normal(2, 2, 128).requires_grad_()
    with pytest.raises(Unsupported, match="k.requires_grad=True"):
        npu.standard.attend_and_write(q.detach(), k, k, cache, placed, mask=causal(), scale=SCALE)
    with torch.no_grad():
        expected = npu.paged.attend(q, cache, placed, mask=causal(), scale=SCALE).out
    k, v = (rows[0, :20] for rows in npu.paged.gather(cache, placed.block_table[:, :2]))
    found = npu.dense.attend(q, k, v, Range(18, 2), Range(0, 20), mask=causal(), scale=SCALE).out
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    assert q.grad.isfinite().all() and q.grad.abs().max() > 0


def attribute(place, name, change):
    def fault(patch):
        patch.setattr(place, name, change(getattr(place, name)))

    return fault


def bias_is_not_divided(real):
    def attend(q, k, v, bias, how, mask, seen, *, scale, softcap):
        return real(q, k, v, None if bias is None else bias * scale, how, mask, seen, scale=scale, softcap=softcap)

    return attend


def changed(**options):
    """The operator for training with some of its arguments replaced."""

    def change(real):
        def of_device(device):
            return lambda *rows, **named: real(device)(*rows, **(named | {k: v(named) for k, v in options.items()}))

        return of_device

    return change


def _inverted(named):
    """The mask, the other way round where it is explicit."""
    mask = named["atten_mask"]
    return mask if mask is None or named["sparse_mode"] else ~mask


FAULTS = {
    "the bias is not divided by the scale": attribute(_training, "attend", bias_is_not_divided),
    "the scale is forgotten": attribute(_operators, "fusion", changed(scale=lambda named: 1.0)),
    "the mask's corner is the top left": attribute(
        _operators, "fusion", changed(sparse_mode=lambda named: 2 if named["sparse_mode"] == 3 else named["sparse_mode"])
    ),
    "a window is one wider": attribute(
        _operators, "fusion", changed(pre_tockens=lambda named: named["pre_tockens"] + (named["sparse_mode"] == 4))
    ),
    "rows without keys are not corrected": attribute(_operators, "fusion", changed(inner_precise=lambda named: 0)),
    "the mask is the other way round": attribute(
        _operators,
        "fusion",
        changed(atten_mask=lambda named: named["atten_mask"] if named["sparse_mode"] else _inverted(named["atten_mask"])),
    ),
    "the operator for inference computes": attribute(_training, "asks", lambda real: lambda *tensors: False),
    "bias has no gradient": attribute(
        _operators, "fusion", changed(pse=lambda named: None if named["pse"] is None else named["pse"].detach())
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    for case in CASES.values():
        try:
            assert_gradients(case)
        except (AssertionError, RuntimeError, Unsupported, TypeError, AttributeError):
            return
    pytest.fail("no case saw it")
