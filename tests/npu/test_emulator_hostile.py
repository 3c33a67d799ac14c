"""What the documents leave open is junk, or as believed; each alternative can be switched to (and `npu` is held to all of them)."""

import pytest
import torch
from emulator_cases import TRIANGLE, band, causal, dense, draw, exact, paged, sequences_of

from npu import emulator
from npu.emulator import assumptions, kernels
from npu.emulator.attention import LOWEST
from npu.emulator.behind import operator

emulator.install()
V1, SCATTER, ROTARY = operator(kernels.FUSED), operator(kernels.SCATTER), operator(kernels.ROTARY)
SCALE = 0.08


def run(arguments, keywords, sequences, **changes):
    out, lse = V1(*arguments, **keywords | {"scale": SCALE, "softmax_lse_flag": True} | changes)
    return sequences_of(out, lse, sequences, keywords["input_layout"])


def is_junk(rows):
    return bool(rows.isnan().any() and rows.isfinite().any())


def test_a_belief_that_is_only_assumed_has_an_alternative():
    assert len({assumption.id for assumption in assumptions.TABLE}) == len(assumptions.TABLE)
    kinds = {
        assumptions.DOCUMENTED,
        assumptions.PROTOTYPE,
        assumptions.HOST_LAYER,
        assumptions.DEVICE,
        assumptions.USED,
        assumptions.ASSUMED,
    }
    for assumption in assumptions.TABLE:
        assert assumption.evidence in kinds and assumption.belief not in assumption.variants
        assert assumption.variants or assumption.evidence != assumptions.ASSUMED, assumption.id


def test_switching_is_by_name_and_ends_with_its_block():
    assert assumptions.answer("negative-slot") == "refused"
    with emulator.variant("negative-slot:skipped"):
        with emulator.variant("rotary-table-dtype:any"):
            assert assumptions.answer("negative-slot") == "skipped" and assumptions.answer("rotary-table-dtype") == "any"
        assert assumptions.answer("rotary-table-dtype") == "same"
    assert assumptions.answer("negative-slot") == "refused"
    emulator.install(variants=["negative-slot:skipped"])
    assert assumptions.answer("negative-slot") == "skipped"
    emulator.install()
    assert assumptions.answer("negative-slot") == "refused"
    for wrong in ("nothing:at all", "negative-slot", "negative-slot:ignored"):
        with pytest.raises(ValueError, match="negative-slot"):
            assumptions.choose([wrong])


@pytest.mark.parametrize(("variant", "value"), [(None, torch.inf), ("-inf", -torch.inf), ("lowest", LOWEST)])
def test_rows_without_keys_in_prefill(variant, value):
    sequences = draw([3, 5], [0, 3])  # a sequence without keys, and two rows that stand before the first key
    arguments, keywords = paged(sequences, "TND", page_size=16)
    with emulator.variant(*([f"lse-empty-prefill:{variant}"] if variant else [])):
        (none, none_lse), (some, some_lse) = run(arguments, keywords, sequences, sparse_mode=3, atten_mask=TRIANGLE)
    assert not none.any() and torch.equal(none_lse, torch.full_like(none_lse, value))
    assert not some[:2].any(), "right-down causal with more queries than keys corrects such rows by itself"
    assert torch.equal(some_lse[:2], torch.full_like(some_lse[:2], value))
    want, want_lse = exact(sequences.q[1], sequences.k[1], sequences.v[1], causal(5, 3), scale=SCALE)
    torch.testing.assert_close(some[2:].double(), want[2:], atol=6e-3, rtol=1e-2)
    torch.testing.assert_close(some_lse[2:].double(), want_lse[2:], atol=2e-4, rtol=1e-5)
    with emulator.variant("no-keys-output:junk"):
        assert is_junk(run(arguments, keywords, sequences)[0][0])


@pytest.mark.parametrize(("variant", "value"), [(None, LOWEST), ("-inf", -torch.inf), ("+inf", torch.inf)])
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_rows_without_keys_in_decode(layout, variant, value):
    sequences = draw([1, 1], [0, 20])
    arguments, keywords = paged(sequences, layout, page_size=16)
    with emulator.variant(*([f"lse-empty-decode:{variant}"] if variant else [])):
        (out, lse), _ = run(arguments, keywords, sequences)
    assert not out.any() and torch.equal(lse, torch.full_like(lse, value))


def test_rows_whose_keys_are_all_masked():
    sequences = draw([4, 4], [16, 16], size=64)
    arguments, keywords = dense(sequences, "BSND")
    mask = torch.zeros(2, 1, 4, 16, dtype=torch.bool)
    mask[0, 0, 1] = True
    for precise in (0, 1):
        out, lse = run(arguments, keywords, sequences, atten_mask=mask, inner_precise=precise)[0]
        assert is_junk(out[1]) and (lse[1] == torch.inf).all() and out[[0, 2, 3]].isfinite().all()
    for precise in (2, 3):
        assert not run(arguments, keywords, sequences, atten_mask=mask, inner_precise=precise)[0][0][1].any()
    with emulator.variant("empty-row-output:mean"):
        out = run(arguments, keywords, sequences, atten_mask=mask)[0][0][1]
    torch.testing.assert_close(out, sequences.v[0].float().mean(0).repeat_interleave(2, 0).half(), atol=1e-3, rtol=1e-3)


def test_rows_past_the_lengths_are_junk():
    sequences = draw([2, 4], [16, 16], size=64)
    arguments, keywords = dense(sequences, "BSND")
    arguments[0] = arguments[0].nan_to_num(3.0)
    out, lse = V1(*arguments, **keywords, softmax_lse_flag=True)
    assert is_junk(out[0, 2:]) and is_junk(lse[0, :, 2:]) and out[1].isfinite().all()
    with emulator.variant("padded-query-output:zeros"):
        assert not V1(*arguments, **keywords)[0][0, 2:].any()
    _, lse = V1(*arguments, **keywords)
    assert lse.shape == (0,), "an LSE that was not asked for is not there"


def test_to_which_corner_a_padded_causal_call_aligns():
    sequences = draw([2, 4], [5, 16], size=64)
    arguments, keywords = dense(sequences, "BSND")
    causally = {"sparse_mode": 3, "atten_mask": TRIANGLE}
    want, _ = exact(sequences.q[0], sequences.k[0], sequences.v[0], causal(2, 5), scale=SCALE)
    torch.testing.assert_close(run(arguments, keywords, sequences, **causally)[0][0].double(), want, atol=6e-3, rtol=1e-2)
    with emulator.variant("padded-query-alignment:tensor"):
        out = run(arguments, keywords, sequences, **causally)[0][0]
    want, _ = exact(sequences.q[0], sequences.k[0], sequences.v[0], causal(4, 16)[:2, :5], scale=SCALE)
    torch.testing.assert_close(out.double(), want, atol=6e-3, rtol=1e-2)


def full(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool)


@pytest.mark.parametrize("variant", ["all-one", "never", "each"])
def test_where_the_packed_layout_ignores_a_band(variant):
    banded = {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tokens": 3, "next_tokens": 0}
    for query_lens in ([1, 1], [1, 4]):
        sequences = draw(query_lens, [20, 20])
        arguments, keywords = dense(sequences, "TND")
        with emulator.variant(f"tnd-one-query-band:{variant}"):
            got = run(arguments, keywords, sequences, **banded)
        for b, queries in enumerate(query_lens):
            ignored = queries == 1 and (variant == "each" or (variant == "all-one" and max(query_lens) == 1))
            seen = full(queries, 20) if ignored else band(queries, 20, 3, 0)
            want, _ = exact(sequences.q[b], sequences.k[b], sequences.v[b], seen, scale=SCALE)
            torch.testing.assert_close(got[b][0].double(), want, atol=6e-3, rtol=1e-2)


def test_to_which_corner_a_band_beside_a_mask_refers():
    sequences = draw([4], [16], size=64)
    arguments, keywords = dense(sequences, "BSND")
    beside = {"atten_mask": torch.zeros(4, 16, dtype=torch.bool), "pre_tokens": 2, "next_tokens": 1}
    i, j = torch.arange(4)[:, None], torch.arange(16)[None]
    for variant, shift in (("top left", 0), ("bottom right", 12)):
        with emulator.variant(f"mask-band-alignment:{variant}"):
            out = run(arguments, keywords, sequences, **beside)[0][0]
        seen = (j >= i + shift - 2) & (j <= i + shift + 1)
        want, _ = exact(sequences.q[0], sequences.k[0], sequences.v[0], seen, scale=SCALE)
        torch.testing.assert_close(out.double(), want, atol=6e-3, rtol=1e-2)


def test_values_under_a_mask_are_multiplied_by_zero():
    sequences = draw([4], [16], size=64)
    sequences.v[0][9], sequences.k[0][9] = torch.nan, torch.nan
    arguments, keywords = dense(sequences, "BSND")
    mask = torch.zeros(4, 16, dtype=torch.bool)
    mask[:, 9] = True
    assert run(arguments, keywords, sequences, atten_mask=mask)[0][0].isnan().all()
    with emulator.variant("masked-keys-arithmetic:skipped"):
        assert run(arguments, keywords, sequences, atten_mask=mask)[0][0].isfinite().all()


def test_rows_of_the_last_page_past_a_length():
    sequences = draw([1, 1], [20, 32])
    arguments, keywords = paged(sequences, "BSND", page_size=16)
    assert all(out.isfinite().all() for out, _ in run(arguments, keywords, sequences))
    with emulator.variant("page-tail-arithmetic:multiplied"):
        (spoiled, _), (whole, _) = run(arguments, keywords, sequences)
    assert spoiled.isnan().all() and whole.isfinite().all()


def test_what_some_devices_may_take():
    small = draw([3, 2], [8, 2], size=64)
    arguments, keywords = dense(small, "TND")
    with emulator.variant("tnd-head-sizes:with 64"):
        run(arguments, keywords, small)
    early = draw([3, 2], [8, 2])
    arguments, keywords = dense(early, "TND")
    with emulator.variant("tnd-lengths-end:may end before"):
        out, _ = V1(*arguments, **keywords | {"actual_seq_lengths": [3, 4]})
    assert is_junk(out[4:]) and out[:4].isfinite().all()
    shared = draw([1, 1], [16, 16])
    arguments, keywords = paged(shared, "BSND", page_size=16)
    narrow = keywords | {"block_table": torch.zeros(2, 1, dtype=torch.int32)}
    one_page = [arguments[0], *(cache[:1].nan_to_num() for cache in arguments[1:])]
    V1(*one_page, **narrow)
    with emulator.variant("shared-pages:no"), pytest.raises(RuntimeError, match="at least as many pages"):
        V1(*one_page, **narrow)


def test_p_is_rounded_to_the_type_of_v():
    # The second key's weight is 0.9985 times the first's: 1 in bfloat16, so that values 1 and -1 cancel where both keys are in one chunk.
    outs = []
    for heads in range(1, 17):
        k = torch.zeros(1, 2, heads, 16, dtype=torch.bfloat16)
        k[:, 1, :, 0] = -0.0015
        v = torch.ones_like(k)
        v[:, 1] = -1
        outs.append(V1(torch.ones_like(k)[:, :1], k, v, num_heads=heads, input_layout="BSND")[0].flatten())
    outs = torch.cat(outs).float()
    assert (outs == 0).any() and (outs.abs() < 2**-8).all()


def test_a_slot_of_minus_one_may_be_skipped():
    k, cache = torch.ones(3, 2, 16).half(), [torch.zeros(2, 16, 2, 16).half() for _ in range(2)]
    with emulator.variant("negative-slot:skipped"):
        SCATTER(k, k, *cache, torch.tensor([4, -1, 6]), cache_mode="Norm")
        with pytest.raises(RuntimeError, match="slots are in"):
            SCATTER(k, k, *cache, torch.tensor([4, -1, 32]), cache_mode="Norm")
    assert all(c.flatten(0, 1).any((1, 2)).nonzero().flatten().tolist() == [4, 6] for c in cache)


def test_what_rotary_tables_may_be():
    x, tables = torch.randn(1, 5, 2, 64).half(), torch.rand(2, 1, 5, 1, 64)
    with emulator.variant("rotary-table-dtype:any"):
        exactly = ROTARY(x, *tables)
        with emulator.variant("rotary-arithmetic:input"):
            coarsely = ROTARY(x, *tables)
    assert not torch.equal(exactly, coarsely)
    torch.testing.assert_close(exactly, coarsely, atol=4e-3, rtol=4e-3)
