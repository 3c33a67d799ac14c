"""Public report B80 on `npu`: a cache is written at distinct slots inside it, by whichever operator a release has.

The cases look at the calls that reach an operator as well as at the cache: an emulator follows documents, a device does not always.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_cases import FLOATS, normal, numpy_of, pages_of
from operator_calls import recorded, replaced
from reports.layers import raises

import fattn.plan._checks
import npu
import npu._place
import npu.emulator
import npu.standard
import reference.paged
from fattn.plan import batch as plan
from fattn.types import Unsupported, causal
from npu import _operators
from npu.emulator.target import CHIPS

WRITERS = {"2.8.0": "atb::_npu_reshape_and_cache", "2.13.0": "npu::npu_scatter_pa_kv_cache"}


def filled(dtype="float16", blocks=4):
    """A cache that holds 7 everywhere."""
    cache = npu.paged.allocate(blocks, 2, 64, 64, block_size=128, layout="pbhd", dtype=FLOATS[dtype])
    cache.k.fill_(7.0), cache.v.fill_(7.0)
    return cache


def b80_duplicates(dtype="float16"):
    """Two tokens for one slot are an error of the plan, and of a batch made by hand, before anything is written."""
    two = dict(block_size=128, num_blocks=4)
    assert "block 2 is written by sequences" in str(raises(ValueError, lambda: plan.build([1, 1], [5, 9], [[2], [2]], **two)))
    assert "names block 2 2 times" in str(raises(ValueError, lambda: plan.build([3], [140], [[2, 2]], **two)))
    batch, cache = plan.build([1, 1], [5, 9], [[2], [3]], **two), filled(dtype)
    rows = [normal(2, n, 64, dtype=dtype, seed=n) for n in (4, 2, 2)]
    for kind in (np.int32, np.int64):
        slots = np.array([300, 300], kind)
        for host in (None, replace(batch.host, slots=slots)):
            twice = replace(batch, slot_mapping=slots, host=host)
            with recorded() as calls:
                error = raises(
                    ValueError,
                    lambda twice=twice: npu.standard.attend_and_write(
                        *rows, cache, npu.place(twice, "cpu", causal()), mask=causal(), scale=0.1
                    ),
                )
            assert "slot_mapping[1]=300" in str(error) and not calls
    assert (cache.k == 7).all() and (cache.v == 7).all()


def b80_padding(version="2.13.0", dtype="float16"):
    """-1, many times: the operator gets distinct rows of null blocks; with no null block it is an error and nothing is written."""
    rows = [normal(8, n, 64, dtype=dtype, seed=n) for n in (4, 2, 2)]
    for null in ((0,), ()):
        batch = plan.build([2, 6], [5, 0], [[2], []], block_size=128, num_blocks=4, null_blocks=null)
        assert batch.slot_mapping.tolist() == [2 * 128 + 3, 2 * 128 + 4, *[-1] * 6]
        cache = filled(dtype)
        call = lambda batch=batch, cache=cache: npu.standard.attend_and_write(
            *rows, cache, npu.place(batch, "cpu", causal()), mask=causal(), scale=0.1
        )
        with recorded(version) as calls:
            if null:
                call()
                ((_, placed, _),) = (one for one in calls if one[0] == WRITERS[version])
                slots = placed[4].tolist()
                assert min(slots) >= 0 and len(set(slots)) == len(slots) and all(slot < 128 for slot in slots[2:])
            else:
                assert "null_blocks" in str(raises(ValueError, call)) and not calls
        live = cache.k.flatten(0, 1)[128:].clone(), cache.v.flatten(0, 1)[128:].clone()
        for held, new in zip(live, rows[1:], strict=True):
            if null:
                assert torch.equal(held[[131, 132]], new[:2])
                held[[131, 132]] = 7.0
            assert (held == 7).all(), "a row that no token has was written"


def b80_writers(dtype, kind):
    """Each release's writer, on scattered slots, writes what the oracle writes: the same cache."""
    slots = np.array([511, 0, 128, 127, 300], kind)
    k, v = normal(5, 2, 64, dtype=dtype, seed=1), normal(5, 2, 64, dtype=dtype, seed=2)
    right = reference.paged.write(pages_of(filled(dtype)), numpy_of(k), numpy_of(v), slots)
    for version, writer in WRITERS.items():
        with recorded(version) as calls:
            cache = npu.paged.write(filled(dtype), k, v, torch.from_numpy(slots))
        assert [name for name, *_ in calls] == [writer]
        for name in ("k", "v"):
            np.testing.assert_array_equal(numpy_of(getattr(cache, name)), getattr(right, name))


def test_b80_duplicate_slots_raise_before_anything_is_written():
    for dtype in FLOATS:
        b80_duplicates(dtype)


@pytest.mark.parametrize("version", WRITERS)
def test_b80_minus_one_never_reaches_the_operator(version):
    for dtype in FLOATS:
        b80_padding(version, dtype)


@pytest.fixture
def declared(request):
    """The chip that operators are emulated for; afterwards the default again."""
    npu.emulator.install(request.param)
    yield request.param
    npu.emulator.install()


@pytest.mark.parametrize("declared", CHIPS, indirect=True)
@pytest.mark.parametrize("kind", [np.int32, np.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_b80_both_writers_give_the_same_cache(dtype, kind, declared):
    b80_writers(dtype, kind)


def crossed(real):
    def scatter(device, form="ND"):
        write = real(device, form)
        return lambda k, v, k_cache, v_cache, slots: write(v, k, k_cache, v_cache, slots)

    return scatter


FAULTS = {
    "the plan lets a block be written twice": (
        b80_duplicates,
        replaced(fattn.plan._checks, "_block_written_twice", lambda *given: None),
    ),
    "place lets a slot be written twice": (b80_duplicates, replaced(npu._place, "check_batch", lambda *given: None)),
    "-1 goes to the operator": (b80_padding, replaced(npu.standard, "check_reach", lambda *given, **named: None)),
    "the older writer takes rows of values for keys": (
        lambda: b80_writers("float16", np.int32),
        lambda patch: patch.setattr(_operators, "scatter", crossed(_operators.scatter)),
    ),
}


@pytest.mark.parametrize("case,fault", FAULTS.values(), ids=FAULTS)
def test_the_report_sees_its_fault(case, fault, monkeypatch):
    case()
    fault(monkeypatch)
    with pytest.raises((AssertionError, Unsupported)):
        case()
