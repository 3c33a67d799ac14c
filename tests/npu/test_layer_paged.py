"""npu.paged and npu.place against the oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_cases import FLOATS, assert_within, batch_of, cache_of, launched, normal, numpy_of, pages_of, precision, tree_labels

import npu
import reference.paged
from fattn.types import Host, Pages, Unsupported, causal, chunk, full, same, tree, window


def check(
    query_lens, seq_lens, *, mask, h=4, hk=2, d=128, dv=None, block_size=128, layout="pbhd", dtype="float16", slopes=None, labels=None
):
    """paged.attend over a batch of these lengths, with and without lse, against the oracle; returns the result and the launches."""
    batch = batch_of(query_lens, seq_lens, block_size=block_size, labels=labels)
    cache = cache_of(batch, hk, d, value_size=dv, layout=layout, dtype=dtype)
    q = normal(sum(query_lens), h, d, dtype=dtype, seed=7)
    placed = npu.place(batch, "cpu", mask)
    found, launches = launched(npu.paged.attend, q, cache, placed, slopes, mask=mask, scale=d**-0.5)
    expected = reference.paged.attend(
        numpy_of(q), pages_of(cache), batch, numpy_of(slopes), mask=mask, scale=d**-0.5, precision=precision(dtype)
    )
    assert found.out.dtype == FLOATS[dtype] and found.lse.dtype == torch.float32
    assert_within(found, expected)
    without = npu.paged.attend(q, cache, placed, slopes, mask=mask, scale=d**-0.5, lse=False)
    assert without.lse is None
    assert_within(without.out, type(expected)(expected.value.out, expected.bound.out))
    return found, launches


# head size 128 goes by the packed layout, 64 by BSND (pbhd) or BNSD (phbd)
LAYOUTS = [(128, "pbhd"), (128, "phbd"), (64, "pbhd"), (64, "phbd")]
MASKS = [full(), causal(), window(140, 0), window(130, 2) & causal(), chunk(100), chunk(64) | window(3, 0)]
PHASES = {
    "prefill": ([130, 7], [130, 7]),
    "chunked": ([5, 9, 1], [200, 9, 301]),
    "draft tokens": ([3, 3], [131, 258]),
    "decode": ([1, 1, 1], [300, 1, 128]),
    "padded decode": ([1, 1, 1, 1], [7, 0, 3, 0]),
    "padded prefill": ([4, 0, 6], [133, 0, 0]),
    "idle sequence": ([1, 0, 1], [5, 130, 200]),
    "one sequence": ([2], [260]),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("d", "layout"), LAYOUTS)
def test_every_phase_mask_and_layout(phase, mask, d, layout):
    query_lens, seq_lens = PHASES[phase]
    check(query_lens, seq_lens, mask=mask, d=d, layout=layout, dtype="bfloat16" if phase == "chunked" else "float16")


@pytest.mark.parametrize("d", [64, 128])
def test_more_queries_than_keys(d):
    found, _ = check([5, 3], [2, 3], mask=causal(), d=d)  # B04
    assert (found.out[:3] == 0).all() and (found.lse[:3] == -torch.inf).all() and torch.isfinite(found.lse[3:]).all()


@pytest.mark.parametrize("d", [64, 128])
def test_a_sequence_without_keys_among_others(d):
    found, _ = check([1, 1, 1], [5, 0, 4], mask=causal(), d=d)  # B03
    assert (found.lse[1] == -torch.inf).all() and (found.out[1] == 0).all()


def test_padded_decode_rows_leave_real_rows_as_they_are():
    padded, _ = check([1, 1, 1, 1], [7, 0, 3, 0], mask=causal())  # B09
    assert torch.isfinite(padded.out).all() and (padded.out[[1, 3]] == 0).all()


@pytest.mark.parametrize(("block_size", "d"), [(16, 128), (48, 128), (1024, 128), (16, 64), (512, 64), (256, 96)])
def test_block_sizes_of_decode(block_size, d):
    check([1, 1], [70, 33], mask=causal(), block_size=block_size, d=d)
    check([1, 1], [70, 33], mask=window(20, 0), block_size=min(block_size, 512), d=d)


@pytest.mark.parametrize(("block_size", "d"), [(16, 128), (1024, 128), (384, 64), (512, 32)])
def test_block_sizes_of_prefill(block_size, d):
    check([5, 2], [70, 33], mask=causal(), block_size=block_size, d=d)


@pytest.mark.parametrize(("h", "hk"), [(1, 1), (9, 3), (7, 1), (16, 16), (64, 1)])
def test_head_groups(h, hk):
    check([2, 1], [5, 3], mask=causal(), h=h, hk=hk, d=64)
    check([2, 1], [5, 3], mask=causal(), h=h, hk=hk, d=128)


def test_a_window_begins_inside_and_at_a_block():
    for length in (128, 129, 130, 255, 256, 257, 384):
        for left in (0, 127, 128):
            check([1, 1], [length, 3], mask=window(left, 0), d=64)


def test_draft_trees_and_segments():
    parents = [-1, 0, 0, 1]
    own, keys = tree_labels(parents, context=130)
    width = 3 * 128  # blocks of the longest sequence, and one more entry in the table
    labels = (
        {name: np.concatenate([x, x]) for name, x in own.items()},
        {name: np.stack([np.pad(x, (0, width - x.size))] * 2) for name, x in keys.items()},
    )
    check([4, 4], [134, 134], mask=tree("enter", "exit"), labels=labels, d=64)
    check([4, 4], [134, 134], mask=tree("enter", "exit"), labels=labels)
    document = np.arange(2 * 256).reshape(2, 256) // 50
    labels = ({"document": np.array([0, 2, 2, 7, 99], np.int32)}, {"document": document.astype(np.int32)})
    found, _ = check([4, 1], [120, 100], mask=same("document"), labels=labels, d=64)
    assert (found.lse[4] == -torch.inf).all()
    with pytest.raises(ValueError, match="'user'"):
        npu.place(batch_of([1], [3], block_size=128), "cpu", same("user"))


@pytest.mark.parametrize(("d", "query_lens", "seq_lens"), [(64, [1, 1], [200, 31]), (64, [3, 3], [200, 31]), (128, [4, 1, 2], [130, 9, 0])])
@pytest.mark.parametrize("mask", [causal(), window(20, 0)], ids=str)
@pytest.mark.parametrize("layout", ["pbhd", "phbd"])
def test_slopes(d, query_lens, seq_lens, mask, layout):
    check(query_lens, seq_lens, mask=mask, d=d, slopes=npu.dense.alibi_slopes(4), layout=layout)


def test_sizes_192_and_128():
    check([4, 1], [130, 9], mask=causal(), d=192, dv=128)


def test_nothing_to_attend_launches_no_attention():
    found, launches = check([3, 1], [0, 0], mask=causal())
    assert (found.lse == -torch.inf).all() and not any("attention" in name for name in launches)
    check([], [], mask=causal())


def test_stale_table_entries_never_reach_the_operator():
    batch = batch_of([1, 1], [5, 0], block_size=128)  # B39: the helper's tables end in -1 and 999
    placed = npu.place(batch, "cpu", causal())
    assert placed.host.constants["block_table"].tolist() == [[int(batch.block_table[0, 0]), 0], [0, 0]]
    assert batch.block_table[1].tolist() == [-1, 999]  # and the plan's own arrays stay as they were


def test_write_convert_and_gather():
    batch = batch_of([5, 2], [7, 9], block_size=4)
    k, v = normal(7, 2, 32, seed=1), normal(7, 2, 48, seed=2)
    cache = npu.paged.allocate(12, 2, 32, 48, block_size=4, layout="pbhd", dtype=torch.float16)
    right = reference.paged.write(pages_of(cache), numpy_of(k), numpy_of(v), batch.slot_mapping)
    slots = torch.from_numpy(batch.slot_mapping)
    both = torch.cat([k, v], -1)
    written = npu.paged.write(cache, both[..., :32], both[..., 32:], slots)  # B25: strided rows
    assert written is cache and (numpy_of(cache.k) == right.k).all() and (numpy_of(cache.v) == right.v).all()
    table = np.array([[3, -1, 2], [0, 11, 12]], np.int32)
    for layout in ("pbhd", "phbd", "hpbd"):
        other = npu.paged.convert(cache, layout=layout)
        assert (numpy_of(other.k) == reference.paged.convert(right, layout=layout).k).all()
        for found, expected in zip(npu.paged.gather(other, torch.from_numpy(table)), reference.paged.gather(right, table), strict=True):
            assert (numpy_of(found) == expected).all()


def test_writes_land_in_halves_of_one_tensor_and_are_refused_where_interleaved():
    storage = torch.zeros(2, 3, 4, 2, 32, dtype=torch.float16)
    k, v = normal(2, 2, 32, seed=1), normal(2, 2, 32, seed=2)
    npu.paged.write(Pages(storage[0], storage[1], "pbhd", 4), k, v, torch.tensor([9, 2], dtype=torch.int32))
    assert torch.equal(storage[0, 2, 1], k[0]) and torch.equal(storage[1, 0, 2], v[1])
    mixed = torch.zeros(3, 2, 4, 2, 32, dtype=torch.float16)
    with pytest.raises(Unsupported, match="contiguous"):
        npu.paged.write(Pages(mixed[:, 0], mixed[:, 1], "pbhd", 4), k, v, torch.tensor([9, 2], dtype=torch.int32))
    assert not mixed.any()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"layout": "hpbd"}, "cache.layout"),
        ({"block_size": 64, "d": 64}, "cache.block_size"),
        ({"block_size": 40}, "cache.block_size"),
        ({"softcap": 20.0}, "softcap"),
        ({"dtype": torch.float32}, "q.dtype"),
        ({"exact": False}, "batch.host.exact"),
        ({"dv": 64}, "value_size"),
    ],
)
def test_refusals_name_the_argument(change, argument):
    block_size, d, dtype = change.get("block_size", 128), change.get("d", 128), change.get("dtype", torch.float16)
    batch = batch_of([2, 1], [5, 3], block_size=block_size)
    batch = replace(batch, host=replace(batch.host, exact=change.get("exact", True)))
    layout = change.get("layout", "pbhd")
    cache = npu.paged.allocate(8, 2, d, change.get("dv", d), block_size=block_size, layout=layout, dtype=dtype)
    q = torch.zeros(3, 4, d, dtype=dtype)
    with pytest.raises(Unsupported) as error:
        npu.paged.attend(q, cache, npu.place(batch, "cpu", causal()), mask=causal(), scale=1.0, softcap=change.get("softcap"))
    assert error.value.argument == argument


def test_bad_input_is_named():
    batch = batch_of([2, 1], [5, 3], block_size=128)
    cache, q = cache_of(batch, 2, 128), normal(3, 4, 128)
    placed = npu.place(batch, "cpu", causal())
    for argument, call in {
        "place": lambda: npu.paged.attend(q, cache, batch, mask=causal(), scale=1.0),
        "placed for mask": lambda: npu.paged.attend(q, cache, placed, mask=full(), scale=1.0),
        "q has 2 rows": lambda: npu.paged.attend(q[:2], cache, placed, mask=causal(), scale=1.0),
        "heads": lambda: npu.paged.attend(q[:, :3], cache, placed, mask=causal(), scale=1.0),
        "head size": lambda: npu.paged.attend(q[..., :64], cache, placed, mask=causal(), scale=1.0),
        "dtype": lambda: npu.paged.attend(q.bfloat16(), cache, placed, mask=causal(), scale=1.0),
        "slopes": lambda: npu.paged.attend(q, cache, placed, torch.ones(3), mask=causal(), scale=1.0),
        "block_size": lambda: npu.paged.attend(q, replace(cache, block_size=64), placed, mask=causal(), scale=1.0),
        "slots": lambda: npu.paged.write(cache, q[:, :2], q[:, :2], torch.tensor([1, 2])),
        "k has rows": lambda: npu.paged.write(cache, q, q, placed.slot_mapping),
        r"seq_lens\[1\]=-3": lambda: npu.place(replace(batch, host=Host((2, 1), (5, -3), batch.host.slots)), "cpu", causal()),
        r"seq_lens\[0\]=999": lambda: npu.place(replace(batch, host=Host((2, 1), (999, 3), batch.host.slots)), "cpu", causal()),
    }.items():
        with pytest.raises(ValueError, match=argument):
            call()


def test_a_batch_without_host_facts_is_read_from_its_arrays():
    batch = replace(batch_of([2, 1], [5, 3], block_size=128), host=None)
    assert npu.place(batch, "cpu", causal()).host.query_lens == (2, 1)


def test_launches_by_case():
    for case, (d, query_lens, seq_lens, mask, most) in {
        "decode, packed": (128, [1, 1], [300, 7], causal(), 1),
        "decode, head size 64": (64, [1, 1], [300, 7], causal(), 1),
        "windowed decode": (64, [1, 1], [300, 7], window(20, 0), 1),
        "mixed lengths, packed": (128, [5, 1], [300, 7], causal(), 1),
        "mixed lengths, head size 64: queries, output and lse copied": (64, [5, 1], [300, 7], causal(), 5),
    }.items():
        _, launches = check(query_lens, seq_lens, mask=mask, d=d)
        print(f"{case}: {sum(launches.values())} launches with lse: {launches}")
        assert sum(launches.values()) <= most, case
