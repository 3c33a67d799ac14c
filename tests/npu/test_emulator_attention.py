"""The emulated fused infer attention against attention in float64, in every documented layout."""

import pytest
import torch
from emulator_cases import TRIANGLE, band, causal, dense, draw, exact, paged, sequences_of

from npu import emulator
from npu.emulator import attention_call, kernels
from npu.emulator.behind import operator

emulator.install()
V1, V2 = operator(kernels.FUSED), operator(kernels.FUSED_V2)
SCALE = 0.08


def full(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool)


MODES = {
    "no mask": (full, {}),
    "causal": (causal, {"sparse_mode": 3, "atten_mask": TRIANGLE}),
    "causal, mask as a batch": (causal, {"sparse_mode": 3, "atten_mask": TRIANGLE[None, None].to(torch.int8)}),
    "left-up causal": (lambda q, k: torch.arange(k)[None] <= torch.arange(q)[:, None], {"sparse_mode": 2, "atten_mask": TRIANGLE}),
    "band": (lambda q, k: band(q, k, 5, 2), {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tokens": 5, "next_tokens": 2}),
}


def compare(arguments, keywords, sequences, seen, *, bias=None, layout=None, run=V1):
    layout = layout or keywords["input_layout"]
    flag = "softmax_lse_flag" if run is V1 else "return_softmax_lse"
    out, lse = run(*arguments, **keywords, **{"scale" if run is V1 else "softmax_scale": SCALE, flag: True})
    assert out.dtype == arguments[0].dtype and lse.dtype == torch.float32
    for b, (got, got_lse) in enumerate(sequences_of(out, lse, sequences, layout)):
        q, k, v = sequences.q[b], sequences.k[b], sequences.v[b]
        want, want_lse = exact(q, k, v, seen(len(q), len(k)), scale=SCALE, bias=None if bias is None else bias[b])
        torch.testing.assert_close(got.double(), want, atol=6e-3 if out.dtype == torch.float16 else 4e-2, rtol=1e-2)
        torch.testing.assert_close(got_lse.double(), want_lse, atol=2e-4, rtol=1e-5)
    return out, lse


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "TND"])
def test_keys_held_whole(layout, mode):
    sequences = draw([7, 9, 4], [33, 9, 17])
    seen, keywords = MODES[mode]
    arguments, described = dense(sequences, layout)
    compare(arguments, described | keywords, sequences, seen)


@pytest.mark.parametrize("mode", ["no mask", "causal", "band"])
@pytest.mark.parametrize(
    ("layout", "by_head"), [("BSH", False), ("BSND", False), ("BNSD", False), ("BNSD", True), ("TND", False), ("TND", True)]
)
def test_pages(layout, by_head, mode):
    sequences = draw([5, 9, 2], [130, 128, 300], heads=6, key_heads=2)
    seen, keywords = MODES[mode]
    arguments, described = paged(sequences, layout, page_size=128, by_head=by_head)
    compare(arguments, described | keywords, sequences, seen)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "TND"])
@pytest.mark.parametrize("page_size", [16, 48])
def test_decode_ignores_mode_and_band(layout, page_size):
    sequences = draw([1, 1, 1], [16, 70, 5], heads=4, key_heads=1)
    arguments, described = paged(sequences, layout, page_size=page_size)
    compare(arguments, described | MODES["band"][1], sequences, full)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (7, 1), (10, 2), (64, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_and_dtypes(heads, key_heads, dtype):
    sequences = draw([3, 5], [20, 5], heads=heads, key_heads=key_heads, size=64, dtype=dtype)
    arguments, described = dense(sequences, "BSND")
    compare(arguments, described | MODES["causal"][1], sequences, causal)


@pytest.mark.parametrize(("size", "value_size"), [(128, 128), (192, 192), (192, 128)])
def test_packed_sizes(size, value_size):
    sequences = draw([3, 1, 5], [20, 7, 5], size=size, value_size=value_size)
    arguments, described = dense(sequences, "TND")
    compare(arguments, described | MODES["causal"][1], sequences, causal)


def test_explicit_masks_of_every_documented_rank():
    queries, keys, batch = 6, 24, 2
    sequences = draw([queries] * batch, [keys] * batch, size=32)
    arguments, described = dense(sequences, "BSND")
    shared = torch.rand(queries, keys, generator=torch.Generator().manual_seed(1)) < 0.4
    shared[:, 0] = False
    for mask in (shared, shared[None], shared[None, None], shared[None, None].expand(batch, 1, queries, keys).contiguous()):
        for mode in (0, 1):
            compare(arguments, described | {"atten_mask": mask.to(torch.uint8), "sparse_mode": mode}, sequences, lambda q, k: ~shared)
    one = draw([1] * batch, [keys] * batch, size=32)
    each = torch.rand(batch, keys, generator=torch.Generator().manual_seed(2)) < 0.4
    arguments, described = dense(one, "BNSD")
    for mask in (each, each[:, None, None]):
        out, _ = V1(*arguments, **described, scale=SCALE, atten_mask=mask)
        for b in range(batch):
            want, _ = exact(one.q[b], one.k[b], one.v[b], ~each[b][None], scale=SCALE)
            torch.testing.assert_close(out[b].transpose(0, 1).double(), want, atol=6e-3, rtol=1e-2)


def test_position_bias_is_added_after_the_scale():
    sequences = draw([6, 6], [24, 24], heads=4, size=32)
    arguments, described = dense(sequences, "BSND")
    bias = torch.randn(2, 4, 6, 24, generator=torch.Generator().manual_seed(3)).half()
    compare(arguments, described | {"pse_shift": bias} | MODES["causal"][1], sequences, causal, bias=bias)
    compare(arguments, described | {"pse_shift": bias[:1]}, sequences, full, bias=bias[:1].expand(2, -1, -1, -1))


def test_the_second_version_under_its_own_names():
    sequences = draw([5, 2], [20, 33], heads=4, key_heads=2)
    for arguments, described in (dense(sequences, "TND"), paged(sequences, "TND", page_size=16), dense(sequences, "BSND")):
        named = {"actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen", "num_heads": "num_query_heads"}
        described = {named.get(name, name): value for name, value in described.items()}
        compare(arguments, described | MODES["causal"][1], sequences, causal, layout=described["input_layout"], run=V2)


def test_a_learnable_sink_is_one_more_logit():
    sequences = draw([5, 1], [20, 33])
    arguments, described = dense(sequences, "TND")
    sink = torch.tensor([0.5, -1.0, 2.0, 9.0], dtype=torch.bfloat16)
    lens = {"actual_seq_qlen": described["actual_seq_lengths"], "actual_seq_kvlen": described["actual_seq_lengths_kv"]}
    keywords = {
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "softmax_scale": SCALE,
        "return_softmax_lse": True,
    } | lens
    out, lse = V2(*arguments, **keywords, learnable_sink=sink)
    with emulator.variant("sink-in-lse:no"):
        _, without = V2(*arguments, **keywords, learnable_sink=sink)
    for b, (got, got_lse) in enumerate(sequences_of(out, lse, sequences, "TND")):
        want, want_lse = exact(sequences.q[b], sequences.k[b], sequences.v[b], full(len(got), len(sequences.k[b])), scale=SCALE)
        joint = torch.logaddexp(want_lse, sink.double())
        torch.testing.assert_close(got.double(), want * (want_lse - joint).exp()[..., None], atol=6e-3, rtol=1e-2)
        torch.testing.assert_close(got_lse.double(), joint, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(sequences_of(out, without, sequences, "TND")[b][1].double(), want_lse, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(("run", "names"), [(kernels.FUSED, attention_call._V1_NAMES), (kernels.FUSED_V2, attention_call._V2_NAMES)])
def test_out_overloads_write_what_the_functional_ones_return(run, names):
    theirs = {ours: name for name, ours in names.items()}
    sequences = draw([5, 5], [20, 20], size=64)
    arguments, _ = dense(sequences, "BSND")
    keywords = {theirs["heads"]: 4, theirs["key_heads"]: 2, theirs["layout"]: "BSND", theirs["wants_lse"]: True}
    want = operator(run)(*arguments, **keywords)
    out = [torch.full_like(result, torch.nan) for result in want]
    returned = operator(f"{run}.out")(*arguments, **keywords, workspace=None, out=out)
    for got, there, expected in zip(returned, out, want, strict=True):
        assert torch.equal(there, expected) and got.data_ptr() == there.data_ptr()
    with pytest.raises(RuntimeError, match="out has"):
        operator(f"{run}.out")(*arguments, **keywords, workspace=None, out=[out[0].float(), out[1]])


def test_empty_queries_and_empty_keys():
    query, none = torch.randn(2, 3, 4, 64).half(), torch.zeros(2, 0, 4, 64).half()
    keywords = {"num_heads": 4, "input_layout": "BSND", "softmax_lse_flag": True}
    out, lse = V1(none, query, query, **keywords)
    assert out.shape == (2, 0, 4, 64) and lse.shape == (2, 4, 0, 1)
    out, lse = V1(query, none, none, **keywords)
    assert torch.equal(out, torch.zeros_like(query)) and torch.equal(lse, torch.full((2, 4, 3, 1), torch.inf))


def test_a_call_gives_the_same_bits_twice_and_whatever_stands_in_unread_places():
    sequences = draw([5, 9], [130, 140])
    arguments, described = paged(sequences, "TND", page_size=128)
    first = V1(*arguments, **described, scale=SCALE)[0]
    caches = [torch.where(cache.isnan(), torch.inf, cache) for cache in arguments[1:]]
    again = V1(arguments[0], *caches, **described, scale=SCALE)[0]
    assert torch.equal(first, again)


def test_chunks_cover_the_keys_and_depend_on_sizes_alone():
    from npu.emulator.attention import chunks

    seen = [chunks(queries, keys, 4) for queries in (1, 5) for keys in (1, 2, 33, 500)]
    assert all(sorted(runs)[0][0] == 0 and all(a[1] == b[0] for a, b in zip(sorted(runs), sorted(runs)[1:], strict=False)) for runs in seen)
    assert max(map(len, seen)) > 2 and any(runs != sorted(runs) for runs in seen)


def test_arguments_that_are_not_emulated_are_refused():
    query = torch.randn(1, 3, 4, 64).half()
    with pytest.raises(RuntimeError, match="query_rope is not emulated"):
        V1(query, query, query, query_rope=query, num_heads=4, input_layout="BSND")
    with pytest.raises(RuntimeError, match="num_query_heads"):
        V1(query, query, query, num_query_heads=4)
