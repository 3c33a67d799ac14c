"""The wheel around the emulated operators: schemas, opcheck, FakeTensor, Meta kernels; and what the cache and rotary kernels compute."""

import json

import pytest
import torch
from emulator_cases import TRIANGLE, dense, draw, paged
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from npu import emulator
from npu.emulator import behind, kernels, launches, schemas
from npu.emulator.behind import operator

emulator.install()
import torch_npu  # noqa: E402

ROTARY, SCATTER, RESHAPE = operator(kernels.ROTARY), operator(kernels.SCATTER), operator(kernels.RESHAPE)


def samples():
    """Every emulated operator with arguments that it takes."""
    sequences = draw([3, 5], [20, 9])
    named = {"actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen", "num_heads": "num_query_heads"}
    for described in (dense(draw([3, 3], [8, 8], size=64), "BSND"), dense(sequences, "TND"), paged(sequences, "TND", page_size=16)):
        arguments, keywords = described
        causal = {"sparse_mode": 3, "atten_mask": TRIANGLE}
        yield kernels.FUSED, arguments, keywords | causal | {"softmax_lse_flag": True}
        renamed = {named.get(name, name): value for name, value in keywords.items()}
        yield kernels.FUSED_V2, arguments, renamed | causal | {"return_softmax_lse": True}
    rows, cache = torch.randn(3, 2, 64).half(), torch.zeros(4, 16, 2, 64).half()
    slots = torch.tensor([5, 0, 17], dtype=torch.int32)
    yield kernels.SCATTER, (rows, rows, cache, cache.clone(), slots), {"cache_mode": "Norm"}
    yield f"{kernels.SCATTER}_functional", (rows, rows, cache, cache.clone(), slots), {"cache_mode": "Norm"}
    yield kernels.RESHAPE, (rows, rows, cache, cache.clone(), slots), {}
    x, lens = torch.randn(2, 4, 64).half(), torch.tensor([20, 16], dtype=torch.int32)
    yield kernels.PAGED, (x, cache, cache.clone(), 2, 4, 0.1, torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), lens, x.clone()), {}
    x, table = torch.randn(1, 6, 4, 64).half(), torch.rand(1, 6, 1, 64).half()
    yield kernels.ROTARY, (x, table, table), {}
    yield kernels.ROTARY, (x, table, table, "interleave"), {}


SAMPLES = list(samples())
IDS = [f"{i} {name.split('::')[1]}" for i, (name, *_) in enumerate(SAMPLES)]


@pytest.mark.parametrize(("name", "arguments", "keywords"), SAMPLES, ids=IDS)
def test_opcheck(name, arguments, keywords):
    checks = torch.library.opcheck(operator(name), tuple(arguments), keywords)
    assert set(checks.values()) == {"SUCCESS"} and len(checks) == 4


@pytest.mark.parametrize("name", [f"{kernels.FUSED}.out", f"{kernels.FUSED_V2}.out"])
def test_opcheck_finds_that_the_wheel_does_not_declare_what_its_out_overloads_write(name):
    arguments, keywords = dense(draw([3, 3], [8, 8], size=64), "BSND")
    keywords = {"query": arguments[0], "key": arguments[1], "value": arguments[2], "input_layout": "BSND"}
    keywords |= {"num_heads" if name == f"{kernels.FUSED}.out" else "num_query_heads": 4, "num_key_value_heads": 2}
    out = [torch.zeros_like(arguments[0]), torch.zeros(0)]
    with pytest.raises(torch.testing._internal.optests.OpCheckError, match="not specified as mutable|not defined to alias|mutated"):
        torch.library.opcheck(operator(name), (), keywords | {"workspace": None, "out": out}, test_utils="test_schema")


@pytest.mark.parametrize(("name", "arguments", "keywords"), SAMPLES, ids=IDS)
def test_fake_tensors_have_the_shapes_of_real_ones(name, arguments, keywords):
    real = operator(name)(*arguments, **keywords)
    with FakeTensorMode() as mode:
        arguments, keywords = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, keywords))
        fake = operator(name)(*arguments, **keywords)
    described = [[(t.shape, t.dtype) for t in behind._outputs(outputs)] for outputs in (real, fake)]
    assert described[0] == described[1]


@pytest.mark.parametrize(("name", "arguments", "keywords"), SAMPLES, ids=IDS)
def test_calls_bind_to_the_newest_schema_and_the_kept_one_is_the_wheels(name, arguments, keywords):
    if not name.endswith("_functional"):
        schemas.bind("2.13.0", name, arguments, keywords)


def test_kept_schemas_are_those_of_the_imported_wheel():
    kept = schemas.load("2.13.0")
    assert set(kept) == set(schemas.OPERATORS)
    assert {name: schemas.from_dispatcher(name) for name in kept} == {name: str(torch._C.parse_schema(text)) for name, text in kept.items()}
    assert all(set(schemas.load(version)) == set(schemas.OPERATORS) for version in schemas.VERSIONS)
    assert "cache_mode" not in schemas.load("2.8.0")[kernels.SCATTER]
    with pytest.raises(ValueError, match="2.99"):
        schemas.load("2.99")


MISFITS = {
    "an argument that a release lacks": (
        "2.8.0",
        kernels.SCATTER,
        (torch.zeros(1),) * 5,
        {"cache_mode": "Norm"},
        "has no argument cache_mode",
    ),
    "too many": ("2.8.0", kernels.ROTARY, (torch.zeros(1),) * 3 + ("half", None), {}, "takes 4 positional arguments, 5 were given"),
    "twice": ("2.13.0", kernels.ROTARY, (torch.zeros(1),) * 3, {"r2": torch.zeros(1)}, "r2 given twice"),
    "missing": ("2.13.0", kernels.ROTARY, (torch.zeros(1),) * 2, {}, "misses r2"),
    "a type": ("2.13.0", kernels.ROTARY, (torch.zeros(1),) * 2 + (3,), {}, "r2 is int"),
    "a keyword given by place": ("2.13.0", kernels.FUSED, (torch.zeros(1),) * 4, {}, "takes 3 positional"),
    "lengths as floats": ("2.13.0", kernels.FUSED, (torch.zeros(1),) * 3, {"actual_seq_lengths": [1.5]}, "actual_seq_lengths is list"),
    "a bool for a number": ("2.13.0", kernels.FUSED, (torch.zeros(1),) * 3, {"num_heads": True}, "num_heads is bool"),
    "another name": ("2.13.0", "npu::npu_rope", (), {}, "has no operator"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_calls_that_do_not_bind(name):
    version, operator_name, arguments, keywords, message = MISFITS[name]
    with pytest.raises(TypeError, match=message):
        schemas.bind(version, operator_name, arguments, keywords)


def test_the_dispatcher_refuses_what_bind_refuses():
    for version, name, arguments, keywords, _ in MISFITS.values():
        if version == "2.13.0" and name != "npu::npu_rope":
            with pytest.raises((RuntimeError, TypeError)):
                operator(name)(*arguments, **keywords)


def test_a_kernel_that_disagrees_with_the_wheels_meta_kernel_is_found():
    with pytest.raises(RuntimeError, match="Meta kernel says outputs .*float16.*the emulated kernel returned .*float32"):
        behind._compare("npu::x", torch.zeros(2).half(), torch.zeros(2))
    quirks = json.loads(behind._QUIRKS.read_text())
    assert set(quirks) <= set(kernels.EMULATED) and all(map(str.strip, quirks.values()))


def test_operators_are_reached_by_their_public_names():
    x, table = torch.randn(1, 6, 4, 64).half(), torch.rand(1, 6, 1, 64).half()
    assert torch.equal(torch_npu.npu_rotary_mul(x, table, table), ROTARY(x, table, table))
    k, caches = torch.randn(3, 2, 64).half(), [torch.zeros(4, 16, 2, 64).half() for _ in range(2)]
    slots = torch.tensor([5, 0, 17], dtype=torch.int32)
    torch_npu._npu_reshape_and_cache(key=k, value=k, key_cache=caches[0], value_cache=caches[1], slot_indices=slots)
    assert torch.equal(caches[0].flatten(0, 1)[slots.long()], k)
    with pytest.raises(NotImplementedError):
        torch_npu.npu_rms_norm(x, x[0, 0, 0])


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotary_rotates_pairs(mode, dtype):
    generator = torch.Generator().manual_seed(4)
    angles = 3 * torch.rand(6, 32, generator=generator)
    by_pair = angles.repeat(1, 2) if mode == "half" else angles.repeat_interleave(2, 1)
    cos, sin = by_pair.cos().to(dtype), by_pair.sin().to(dtype)
    x = torch.randn(6, 4, 64, generator=generator).to(dtype)
    pairs = [(i, i + 32) if mode == "half" else (2 * i, 2 * i + 1) for i in range(32)]
    want = torch.empty(6, 4, 64, dtype=torch.float64)
    for a, b in pairs:
        c, s = cos.double()[:, None, a], sin.double()[:, None, a]
        want[..., a] = x[..., a].double() * c - x[..., b].double() * s
        want[..., b] = x[..., b].double() * c + x[..., a].double() * s
    layouts = {
        "TND": (x, cos[:, None]),
        "BSND": (x[None], cos[None, :, None]),
        "SBND": (x[:, None], cos[:, None, None]),
        "BNSD": (x.transpose(0, 1)[None], cos[None, None]),
    }
    for layout, (rows, table) in layouts.items():
        got = ROTARY(rows, table, sin.view(table.shape), mode)
        assert got.dtype == dtype and got.shape == rows.shape
        got = got[0].transpose(0, 1) if layout == "BNSD" else got.reshape(6, 4, 64)
        tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_scatter_writes_rows_and_nothing_else(dtype, slots_dtype):
    k, v = torch.randn(5, 2, 32).mul(9).to(dtype), torch.randn(5, 2, 64).mul(9).to(dtype)
    slots = torch.tensor([17, 2, 63, 0, 31], dtype=slots_dtype)
    norm = [torch.full((4, 16, 2, n), 3).to(dtype) for n in (32, 64)]
    before = [cache.clone() for cache in norm]
    assert SCATTER(k, v, *norm, slots, cache_mode="Norm") is None
    tiled = [torch.full((4, 2 * n // 16, 16, 16), 3).to(dtype) for n in (32, 64)]
    SCATTER(k, v, *tiled, slots)
    functional = operator(f"{kernels.SCATTER}_functional")(k, v, *before, slots, cache_mode=None)
    for rows, cache, tiles, copy, old in zip((k, v), norm, tiled, functional, before, strict=True):
        want = torch.full((64, *rows.shape[1:]), 3).to(dtype)
        for token, slot in enumerate(slots.tolist()):
            want[slot] = rows[token]
        assert torch.equal(cache.flatten(0, 1), want) and torch.equal(copy, cache)
        assert torch.equal(tiles.transpose(1, 2).reshape(want.shape), want)
        assert (old == 3).all(), "the functional overload writes to copies"


def test_launches_are_dispatcher_calls_that_are_no_views():
    name, arguments, keywords = SAMPLES[4]
    x = torch.randn(4, 6)
    with launches.count() as seen:
        operator(name)(*arguments, **keywords)
        x.T[None].reshape(1, 6, 4), x.contiguous(), x.view(-1)[2:], x.to(torch.float32)  # views, and what does nothing
    assert seen == {name: 1}
    with launches.count() as seen:
        x.T.contiguous(), x.half(), x + 1, x.clone()
    assert seen.total() == 4


def test_hidden_traffic_is_forbidden():
    x, hidden, index = torch.ones(4, 2), torch.ones(4, 2, dtype=torch.bool), torch.tensor([0, 1])
    traffic = [
        lambda: x[0, 0].item(),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: x.cpu(),
        lambda: float(x[0, 0]),
        lambda: bool(hidden.all()),
        lambda: range(index[1]),
        lambda: x[hidden],
        lambda: x.__setitem__(hidden, 0),
        lambda: hidden.nonzero(),
        lambda: torch.where(hidden),
        lambda: x.masked_select(hidden),
        lambda: torch.equal(x, x),
        lambda: x.unique(),
        lambda: x.repeat_interleave(torch.ones(4, dtype=torch.int64), 0),
        lambda: x.to("meta"),
        lambda: x + torch.zeros(4, 2, device="meta"),
    ]
    for act in traffic:
        with pytest.raises(RuntimeError, match="hidden traffic"), launches.traffic_forbidden():
            act()
    name, arguments, keywords = SAMPLES[4]
    with launches.traffic_forbidden():
        operator(name)(*arguments, **keywords)
        x[index], x.masked_fill(hidden, 0), x.where(hidden, 0), x.sum(), x.half(), x[:, 0].clone()
        hidden.clone()[index] = torch.tensor([True, False])
