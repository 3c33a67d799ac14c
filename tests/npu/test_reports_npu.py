"""Every public report of groups A to D on `npu`, in float16 on the emulated operators.

The cases are those of tests/reports. Where a report's sizes are not the operators', the layer says which stand for them: heads of 128 dims
and blocks of 128 tokens. Refusals are the documented ones, and the cases check that they name the argument.
"""

import numpy as np
import pytest
import torch
from reports import empty_sets, heads, mask_rules, pages
from reports.layers import of_package

import npu.emulator
from reference.bounded import Precision

npu.emulator.install()
torch.set_num_threads(1)

REPORTS = (*empty_sets.REPORTS, *mask_rules.REPORTS, *heads.REPORTS, *pages.REPORTS)

LAYER = of_package(
    "npu",
    array=torch.from_numpy,
    numpy_of=lambda tensor: tensor.numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor),
    place=lambda batch, mask: npu.place(batch, "cpu", mask),
    dtype="float16",
    precision=Precision(**npu.PRECISION["float16"]),
    head_size=128,
    block_size=128,
    layouts=("pbhd", "phbd"),
    same_bits=False,  # the emulator splits keys at random, as operators may
    out_of_range_slots=False,
    wide_partials=False,
    refuses=frozenset({"softcap"}),
)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.case.__name__)
def test_report(report):
    report.case(LAYER)
