"""Run by test_hostdev.py in a process of its own: the operators between the wheel's C++ layer, its Meta kernels and the emulator's.

What the C++ layer allocates, what it checks, and which aclnn functions it reaches, pinned: a change of any of them fails here.
"""

import pytest
import torch
from emulator_cases import dense, draw, paged
from torch.utils._pytree import tree_leaves, tree_map_only

from npu.emulator import aclnn, hostdev, kernels, schemas
from npu.emulator.behind import operator

V3, V4 = "aclnnFusedInferAttentionScoreV3", "aclnnFusedInferAttentionScoreV4"
SECOND = {  # what the second version calls the arguments of the first
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "softmax_lse_flag": "return_softmax_lse",
}
SEQUENCES = draw([3, 5], [130, 17])
ROWS, CACHE = torch.randn(3, 2, 64).half(), torch.zeros(4, 128, 2, 64).half()
SLOTS = torch.tensor([1, 5, 200], dtype=torch.int32)
TURNED, TABLE = torch.randn(1, 6, 4, 64), torch.randn(1, 6, 1, 64)


def attention(version, layout="BSND", *, lay=dense, wants_lse=True, out=False, change=lambda arguments: arguments, drop=(), **keywords):
    """(operator, positional arguments, keywords) of a call of fused infer attention."""
    arguments, described = lay(SEQUENCES, layout) if lay is dense else paged(SEQUENCES, layout, page_size=128)
    described = {n: v for n, v in (described | {"softmax_lse_flag": wants_lse} | keywords).items() if n not in drop}
    if version == 2:
        described = {SECOND.get(n, n): v for n, v in described.items()}
    name = kernels.FUSED if version == 1 else kernels.FUSED_V2
    if out:
        empty = torch.empty(8, 4, 128, dtype=torch.float16), torch.empty(8, 4, 1)
        return f"{name}.out", change(list(arguments)), described | {"out": list(empty), "workspace": torch.empty(32_768, dtype=torch.uint8)}
    return name, change(list(arguments)), described


def scatter(rows=ROWS, cache=CACHE, slots=SLOTS, *, functional="", mode="Norm"):
    return kernels.SCATTER + functional, [rows, rows, cache.clone(), cache.clone(), slots], {"cache_mode": mode}


def rotary(input=TURNED, table=TABLE, mode="half"):
    return kernels.ROTARY, [input, table, table, mode], {}


CALLS = {
    **{
        f"v{version} {layout} {lay.__name__}{'' if wants_lse else ' no lse'}": (
            attention(version, layout, lay=lay, wants_lse=wants_lse),
            {f},
        )
        for version, f in ((1, V3), (2, V4))
        for layout in ("BSH", "BSND", "BNSD", "TND")
        for lay, wants_lse in ((dense, True), (paged, False))
    },
    "v1 out": (attention(1, "TND", lay=paged, out=True), {V3}),
    "v2 out": (attention(2, "TND", lay=paged, out=True), {V4}),
    "scatter": (scatter(), {"aclnnScatterPaKvCache"}),
    "scatter functional": (scatter(functional="_functional"), {"aclnnScatterPaKvCache", "aclnnInplaceCopy"}),
    "rotary half": (rotary(), {"aclnnRotaryPositionEmbeddingV2"}),
    "rotary interleave": (rotary(mode="interleave"), {"aclnnRotaryPositionEmbeddingV2"}),
}


def moved(call, device):
    name, positional, keywords = call
    positional, keywords = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (positional, keywords))
    return name, positional, keywords


def run(call):
    name, positional, keywords = call
    return operator(name)(*positional, **keywords)


def described(result):
    return [(tuple(leaf.shape), leaf.dtype, leaf.stride()) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_outputs_agree_between_cpp_meta_and_emulator(name):
    call, expected = CALLS[name]
    library = hostdev.library()
    there = moved(call, "npu")
    before = library.calls()
    with library.accepting_everything():
        allocated = described(run(there))
    assert set(library.calls() - before) == expected
    computed, emulated = run(there), run(moved(call, "cpu"))
    assert allocated == described(computed) == described(emulated)
    if not name.endswith("out"):  # the wheel has no Meta kernel of these
        assert described(run(moved(call, "meta"))) == allocated
    for a, b in zip(tree_leaves((computed, there[1])), tree_leaves((emulated, call[1])), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a.cpu(), b if name != "scatter" else a.cpu(), rtol=0, atol=0, equal_nan=True)


def test_a_write_reaches_the_cache():
    (name, positional, keywords), _ = CALLS["scatter"]
    for device in ("cpu", "npu"):
        _, (_, _, k_cache, v_cache, _), _ = there = moved((name, positional, keywords), device)
        run(there)
        rows = [cache.cpu().view(-1, 2, 64)[SLOTS.long()] for cache in (k_cache, v_cache)]
        assert torch.equal(rows[0], ROWS) and torch.equal(rows[1], ROWS) and k_cache.count_nonzero() == ROWS.count_nonzero()


REFUSED_BY_CPP = {
    **{
        f"v{version} {name}": (attention(version, **changes), message)
        for version in (1, 2)
        for name, changes, message in (
            ("no heads", {"num_heads": 0}, "num_heads should be greater than 0"),
            ("negative heads", {"num_heads": -4}, "num_heads should be greater than 0"),
            ("layout SBH", {"input_layout": "SBH"}, "layout only support BSH, BSND, TND"),
            ("layout in small letters", {"input_layout": "bsnd"}, "layout only support BSH, BSND, TND"),
            ("query of three dims", {"change": lambda a: [a[0][0], *a[1:]]}, "query's dim should be consistent with that of Layout"),
            ("value of three dims", {"change": lambda a: [*a[:2], a[2][0]]}, "value'dim should equal to query's dim"),
            ("lengths that are no integers", {"actual_seq_lengths": [1.5, 2.5]}, "Expected a value of type"),
        )
    },
    "rotary mode": (rotary(mode="quarter"), "rotary_mode of npu_rotary_mul should be half or interleave"),
}


@pytest.mark.parametrize("name", REFUSED_BY_CPP)
def test_the_wheels_own_checks(name):
    call, message = REFUSED_BY_CPP[name]
    before = hostdev.library().calls()
    with pytest.raises(RuntimeError, match=message):
        run(moved(call, "npu"))
    assert not {V3, V4, "aclnnRotaryPositionEmbeddingV2"} & (hostdev.library().calls() - before).keys()


def test_the_wheel_refuses_tensors_on_two_devices():
    name, (query, *keys), keywords = attention(1)
    with pytest.raises(RuntimeError, match="same device, but got key is on cpu"):
        operator(name)(query.npu(), *keys, **keywords)


REFUSED_BY_EMULATOR = {  # what the C++ layer lets through, and a device would refuse
    "key heads": (attention(1, num_key_value_heads=3), "key heads divide query heads"),
    "dtypes mixed": (attention(1, change=lambda a: [a[0].bfloat16(), *a[1:]]), "key has query's dtype"),
    "float32": (attention(1, change=lambda a: [t.float() for t in a]), "query is float16 or bfloat16"),
    "head sizes": (attention(1, change=lambda a: [a[0][..., :64].contiguous(), *a[1:]]), "key's D is query's D"),
    "TND without lengths": (attention(1, "TND", drop=("actual_seq_lengths",)), "layout TND needs both sequence lengths"),
    "pages without a block size": (attention(1, lay=paged, drop=("block_size",)), "block_size is 128, 256, 384 or 512"),
    "another feature": (attention(1, query_rope=torch.zeros(2, 5, 4, 64).half()), "query_rope is not emulated"),
    "same slot twice": (scatter(slots=torch.tensor([1, 1, 2], dtype=torch.int32)), "slots are distinct"),
    "slots of floats": (scatter(slots=SLOTS.float()), "slots are one-dimensional int32 or int64"),
    "cache mode": (scatter(mode="Nope"), "cache_mode is None, 'Norm' or 'PA_NZ'"),
    "odd dims": (rotary(TURNED[..., :63].contiguous(), TABLE[..., :63].contiguous()), "D is even"),
}


@pytest.mark.parametrize("name", REFUSED_BY_EMULATOR)
def test_limits_come_back_as_a_devices_error(name):
    call, rule = REFUSED_BY_EMULATOR[name]
    with pytest.raises(RuntimeError, match="error code is 161002") as refused:
        run(moved(call, "npu"))
    assert rule in str(refused.value)


def test_an_unbound_function_is_named():
    x = torch.ones(2, 8, dtype=torch.float16, device="npu")
    with pytest.raises(RuntimeError, match="aclnnRmsNormGetWorkspaceSize is not emulated"):
        torch.ops.npu.npu_rms_norm(x, x[0])


def test_workspace_of_the_out_variants():
    name, positional, keywords = moved(attention(1, "TND", lay=paged, out=True), "npu")
    described = {n: v for n, v in keywords.items() if n not in ("out", "workspace")}
    enough = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(*positional, **described)
    run((name, positional, keywords | {"workspace": enough}))
    with pytest.raises(RuntimeError, match="the workspace has 1024 bytes"):
        run((name, positional, keywords | {"workspace": torch.empty(1024, dtype=torch.uint8, device="npu")}))


def test_atb_runs_without_the_cpp_layer():
    k_cache, v_cache = CACHE.npu(), CACHE.npu()
    before = hostdev.library().calls()
    torch.ops.atb._npu_reshape_and_cache(ROWS.npu(), ROWS.npu(), k_cache, v_cache, SLOTS.npu())
    assert not (hostdev.library().calls() - before).keys() - {"aclnnInplaceCopy"}
    assert torch.equal(k_cache.cpu().view(-1, 2, 64)[SLOTS.long()], ROWS)
    lens, table = torch.tensor([2, 1], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    given, out = (ROWS[:2], CACHE + 1, torch.randn(CACHE.shape).half(), 2, 2, 0.1, table), torch.zeros_like(ROWS[:2])
    torch.ops.atb._npu_paged_attention(*given, lens, out)
    moved, on_device = [x.npu() if isinstance(x, torch.Tensor) else x for x in given], torch.zeros_like(out).npu()
    torch.ops.atb._npu_paged_attention(*moved, lens, on_device)
    assert torch.equal(on_device.cpu(), out) and out.any()
    with pytest.raises(RuntimeError, match="context_lens must be a tensor of the host"):
        torch.ops.atb._npu_paged_attention(*moved, lens.npu(), on_device)


def test_what_is_reached_is_pinned():
    reached = {call[0] for call, _ in CALLS.values()}
    assert reached == {name for name in kernels.EMULATED if name.startswith("npu::")} and len(reached) == 7
    assert {name for name in schemas.OPERATORS if name.startswith("npu::")} <= reached
    # the first version of the rotary function is what wheels without a rotate argument call
    assert aclnn.FUNCTIONS.keys() - set().union(*(expected for _, expected in CALLS.values())) == {"aclnnRotaryPositionEmbedding"}
    assert len(hostdev.library().names) == 1819


def test_double_becomes_float_as_on_the_device():
    assert torch.ones(2, dtype=torch.float16, device="npu").to(torch.float64).dtype == torch.float32
