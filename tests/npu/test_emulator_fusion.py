"""The emulated operator for training and its gradient: limits, layouts, and what is left open."""

import pytest
import torch

import npu.emulator
from npu.emulator.behind import operator
from npu.emulator.fusion import BACKWARD, FORWARD

npu.emulator.install()
FORWARD_OP, BACKWARD_OP = operator(FORWARD), operator(BACKWARD)


def rows(heads, length, size, seed, layout="BSND"):
    drawn = torch.randn(2, length, heads, size, generator=torch.Generator().manual_seed(seed))
    return drawn if layout == "BSND" else drawn.transpose(1, 2).contiguous()


def arguments(layout="BSND", **changes):
    given = {"query": rows(4, 5, 16, 1, layout), "key": rows(2, 7, 16, 2, layout), "value": rows(2, 7, 16, 3, layout)}
    return given | {"head_num": 4, "input_layout": layout, "scale": 0.3} | changes


def test_layouts_agree():
    one, other = FORWARD_OP(**arguments()), FORWARD_OP(**arguments("BNSD"))
    torch.testing.assert_close(one[0], other[0].transpose(1, 2))
    torch.testing.assert_close(one[1:3], other[1:3])
    assert one[1].shape == (2, 4, 5, 8) and one[4:] == (0, 0, 4096)


def test_shapes_are_those_of_the_meta_kernel():
    meta = FORWARD_OP(**{name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in arguments().items()})
    for ours, theirs in zip(FORWARD_OP(**arguments())[:4], meta[:4], strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_the_gradient_is_that_of_the_forward():
    given = arguments()
    leaves = [given[name].double().requires_grad_() for name in ("query", "key", "value")]
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True).transpose(1, 2)
    dy = rows(4, 5, 16, 9)
    out.backward(dy.double())
    found, top, total, *_ = FORWARD_OP(**given)
    torch.testing.assert_close(found.double(), out, rtol=1e-5, atol=1e-6)
    statistics = {"softmax_max": top, "softmax_sum": total, "attention_in": found, "scale_value": 0.3}
    grads = BACKWARD_OP(*(given[name] for name in ("query", "key", "value")), dy, 4, "BSND", **statistics)
    for ours, leaf in zip(grads[:3], leaves, strict=True):
        torch.testing.assert_close(ours.double(), leaf.grad, rtol=1e-4, atol=1e-5)


def test_rows_that_see_nothing_are_junk_unless_corrected():
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[2] = True
    for precise, junk in ((0, True), (2, False)):
        out, top, *_ = FORWARD_OP(**arguments(atten_mask=mask, inner_precise=precise))
        assert (out[:, 2] == 0).all() != junk and top[:, :, 2].isnan().all() == junk
        assert out[:, [0, 1, 3, 4]].isfinite().all()


REFUSED = {
    "layout": ({"input_layout": "TND"}, "input_layout"),
    "dropout": ({"keep_prob": 0.9}, "dropout is not emulated"),
    "heads": ({"head_num": 2}, "head_num is query's N"),
    "dtype": ({"key": rows(2, 7, 16, 2).half()}, "key has query's dtype"),
    "double": ({name: rows(n, s, 16, 1).double() for name, n, s in (("query", 4, 5), ("key", 2, 7), ("value", 2, 7))}, "float32"),
    "strides": ({"value": rows(2, 7, 32, 3)[..., ::2]}, "value is contiguous"),
    "key heads": ({"key": rows(3, 7, 16, 2), "value": rows(3, 7, 16, 2)}, "key heads divide"),
    "wide values": ({"value": rows(2, 7, 32, 3)}, "at least value's"),
    "no keys": ({"key": rows(2, 0, 16, 2), "value": rows(2, 0, 16, 3)}, "one length, above 0"),
    "small mask": ({"atten_mask": torch.zeros(5, 5, dtype=torch.bool)}, "atten_mask is BNSS"),
    "float mask": ({"atten_mask": torch.zeros(5, 7)}, "bool or uint8"),
    "compressed without its mask": ({"sparse_mode": 3}, "needs atten_mask"),
    "a triangle that is none": ({"sparse_mode": 3, "atten_mask": torch.zeros(2048, 2048, dtype=torch.bool)}, "1 above the diagonal"),
    "band without its mode": ({"pre_tockens": 3}, "go with sparse_mode 4"),
    "precision": ({"inner_precise": 3}, "inner_precise is 0, or 2"),
    "bias": ({"pse": torch.zeros(1, 1, 5, 7)}, "pse is"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_refused(changes, message):
    with pytest.raises((RuntimeError, IndexError), match=message):
        FORWARD_OP(**arguments(**changes))


def test_statistics_of_another_call_are_refused():
    given = arguments()
    out, top, total, *_ = FORWARD_OP(**given)
    tensors = [given[name] for name in ("query", "key", "value")]
    with pytest.raises(RuntimeError, match="softmax_sum is float32"):
        BACKWARD_OP(*tensors, out, 4, "BSND", softmax_max=top, softmax_sum=total[..., :1], attention_in=out, scale_value=0.3)
