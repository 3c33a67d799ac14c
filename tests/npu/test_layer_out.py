"""Results in the caller's tensors, with the caller's scratch memory: the same bits as without."""

import pytest
import torch
from layer_cases import batch_of, cache_of, normal

import npu
from fattn.types import Partial, Range, causal, window

# head size, cache layout, query and key lengths, mask
PAGED = {
    "TND": (128, "pbhd", [3, 1, 5], [50, 130, 5], causal()),
    "TND, rows without keys": (128, "pbhd", [3, 2], [50, 0], causal()),
    "BSND, one query": (64, "pbhd", [1, 1], [50, 130], window(20, 0)),
    "BSND, equal lengths": (64, "pbhd", [3, 3], [50, 130], causal()),
    "BSND, mixed lengths": (64, "pbhd", [3, 1, 2], [50, 130, 0], causal()),
    "BNSD, one query": (64, "phbd", [1, 1], [50, 130], causal()),
    "BNSD, equal lengths": (64, "phbd", [3, 3], [50, 130], causal()),
    "no rows": (128, "pbhd", [0], [50], causal()),
}
DENSE = {
    "TND": (128, Range(4, 5), Range(0, 9), causal()),
    "BSND": (64, Range(4, 5), Range(0, 9), causal()),
    "explicit": (64, torch.tensor([4, -1, 6]), torch.arange(9), causal()),
    "one query": (64, Range(8, 1), Range(0, 9), causal()),
    "no keys": (64, Range(8, 1), Range(0, 0), causal()),
}


def junk(result: Partial) -> Partial:
    """Tensors of the shapes of a result, which hold NaN."""
    return Partial(*(None if array is None else torch.full(array.shape, torch.nan, dtype=array.dtype) for array in result))


def assert_same(found: Partial, out: Partial, expected: Partial):
    for ours, given, right in zip(found, out, expected, strict=True):
        assert ours is given
        if right is not None:
            torch.testing.assert_close(ours, right, rtol=0, atol=0)


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("case", PAGED.values(), ids=PAGED)
def test_paged_results_in_the_callers_tensors(case, lse):
    head_size, layout, query_lens, seq_lens, mask = case
    batch = batch_of(query_lens, seq_lens, block_size=128)
    q, cache = normal(sum(query_lens), 4, head_size, seed=1), cache_of(batch, 2, head_size, layout=layout)
    run = lambda **given: npu.paged.attend(q, cache, npu.place(batch, "cpu", mask), mask=mask, scale=0.1, lse=lse, **given)
    expected, workspace = run(), torch.empty(1 << 20, dtype=torch.uint8)
    out = junk(expected)
    assert_same(run(out=out), out, expected)
    out = junk(expected)
    assert_same(run(out=out, workspace=workspace), out, expected)
    for ours, right in zip(run(workspace=workspace), expected, strict=True):
        assert ours is right is None or torch.equal(ours, right)


@pytest.mark.parametrize("case", DENSE.values(), ids=DENSE)
def test_dense_results_in_the_callers_tensors(case):
    head_size, q_pos, k_pos, mask = case
    q, k, v = (
        normal(rows.size if isinstance(rows, Range) else len(rows), n, head_size, seed=n)
        for rows, n in ((q_pos, 4), (k_pos, 2), (k_pos, 2))
    )
    run = lambda **given: npu.dense.attend(q, k, v, q_pos, k_pos, mask=mask, scale=0.1, **given)
    expected, workspace = run(), torch.empty(1 << 20, dtype=torch.uint8)
    out = junk(expected)
    assert_same(run(out=out, workspace=workspace), out, expected)
    assert all(map(torch.equal, run(workspace=workspace), expected))


def within_canaries(result: Partial) -> tuple[Partial, Partial]:
    """(tensors that hold NaN, with two more rows at either end; the rows between, for a result)."""
    whole = Partial(*(torch.full((len(array) + 4, *array.shape[1:]), torch.nan, dtype=array.dtype) for array in result))
    return whole, Partial(*(array[2:-2] for array in whole))


def assert_rows_around_stay(whole: Partial):
    for array in whole:
        assert array[:2].isnan().all() and array[-2:].isnan().all()


@pytest.mark.parametrize("case", PAGED.values(), ids=PAGED)
def test_rows_around_the_callers_tensors_stay(case):
    head_size, layout, query_lens, seq_lens, mask = case
    batch = batch_of(query_lens, seq_lens, block_size=128)
    q, cache = normal(sum(query_lens), 4, head_size, seed=1), cache_of(batch, 2, head_size, layout=layout)
    run = lambda **given: npu.paged.attend(q, cache, npu.place(batch, "cpu", mask), mask=mask, scale=0.1, **given)
    expected = run()
    whole, out = within_canaries(expected)
    assert_same(run(out=out), out, expected)
    assert_rows_around_stay(whole)


@pytest.mark.parametrize("case", DENSE.values(), ids=DENSE)
def test_rows_around_the_callers_tensors_stay_in_dense(case):
    head_size, q_pos, k_pos, mask = case
    count = lambda rows: rows.size if isinstance(rows, Range) else len(rows)
    q, k, v = normal(count(q_pos), 4, head_size), normal(count(k_pos), 2, head_size, seed=1), normal(count(k_pos), 2, head_size, seed=2)
    run = lambda **given: npu.dense.attend(q, k, v, q_pos, k_pos, mask=mask, scale=0.1, **given)
    expected = run()
    whole, out = within_canaries(expected)
    assert_same(run(out=out), out, expected)
    assert_rows_around_stay(whole)


def test_where_rows_lie_as_the_operator_has_them_nothing_is_copied():
    batch = batch_of([1, 1], [50, 130], block_size=128)
    placed, cache = npu.place(batch, "cpu", causal()), cache_of(batch, 2, 128)
    q = normal(2, 4, 128)
    out = Partial(torch.empty(2, 4, 128, dtype=torch.float16), torch.empty(2, 4))
    with npu.emulator.launches.count() as launches:
        npu.paged.attend(q, cache, placed, mask=causal(), scale=0.1, out=out)
    assert launches == {"npu::npu_fused_infer_attention_score.out": 1}


BAD = {
    "shape": (lambda out: out._replace(out=out.out[:1]), r"out.out must be contiguous float16\[2, 4, 128\]"),
    "dtype": (lambda out: out._replace(lse=out.lse.half()), r"out.lse must be contiguous float32\[2, 4\].*got float16"),
    "strides": (lambda out: out._replace(lse=out.lse.T.contiguous().T), "out.lse must be contiguous"),
    "device": (lambda out: out._replace(out=out.out.to("meta")), "on cpu, got float16.* on meta"),
    "no lse": (lambda out: out._replace(lse=None), "out.lse is missing, but lse=True"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_tensors_that_cannot_take_the_result(change, message):
    batch = batch_of([1, 1], [50, 130], block_size=128)
    placed, cache, q = npu.place(batch, "cpu", causal()), cache_of(batch, 2, 128), normal(2, 4, 128)
    out = change(Partial(torch.empty(2, 4, 128, dtype=torch.float16), torch.empty(2, 4)))
    with pytest.raises(ValueError, match=message):
        npu.paged.attend(q, cache, placed, mask=causal(), scale=0.1, out=out)
    k = normal(9, 2, 128)
    with pytest.raises(ValueError, match=message):
        npu.dense.attend(q, k, k, Range(7, 2), Range(0, 9), mask=causal(), scale=0.1, out=out)
    with pytest.raises(ValueError, match="workspace must be a tensor on q's device cpu"):
        npu.paged.attend(q, cache, placed, mask=causal(), scale=0.1, workspace=4096)


def test_an_lse_that_was_not_asked_for_is_refused():
    batch = batch_of([1, 1], [50, 130], block_size=128)
    placed, cache, q = npu.place(batch, "cpu", causal()), cache_of(batch, 2, 128), normal(2, 4, 128)
    with pytest.raises(ValueError, match="out.lse is given, but lse=False"):
        npu.paged.attend(
            q, cache, placed, mask=causal(), scale=0.1, lse=False, out=Partial(torch.empty(2, 4, 128).half(), torch.empty(2, 4))
        )


def test_a_workspace_that_is_too_small_is_the_operators_refusal():
    batch = batch_of([1, 1], [50, 130], block_size=128)
    placed, cache, q = npu.place(batch, "cpu", causal()), cache_of(batch, 2, 128), normal(2, 4, 128)
    with pytest.raises(NotImplementedError, match="the workspace has"):
        npu.paged.attend(q, cache, placed, mask=causal(), scale=0.1, workspace=torch.empty(64, dtype=torch.uint8))
