"""npu.limits: every limit can be met, what is predicted is what is raised, and what to do without torch_npu is said."""

import subprocess
import sys
from dataclasses import replace

import pytest
from layer_cases import FLOATS

from npu import limits
from npu.limits import Facts

DENSE = Facts("dense.attend", "float16")
PAGED = Facts("paged.attend", "float16", layout="pbhd", block_size=128)
WRITE = Facts("paged.write", "float16", layout="pbhd", block_size=128)
ROPE = Facts("rope.half", "float32")
BREAKS = {
    "attention dtype": replace(DENSE, dtype="float32"),
    "softcap": replace(DENSE, softcap=30.0),
    "bias dtype": replace(DENSE, additive="float32"),
    "head size": replace(DENSE, head_size=40, value_size=40),
    "value size": replace(DENSE, head_size=64),
    "heads": replace(DENSE, heads=257, kv_heads=257),
    "group": replace(DENSE, heads=130, kv_heads=2),
    "ATB head size": replace(PAGED, heads=65, head_size=272, output_alone=True),
    "ATB block": replace(PAGED, heads=65, block_size=256, output_alone=True),
    "cache layout": replace(PAGED, layout="hpbd"),
    "cache strides": replace(PAGED, contiguous=False),
    "cache width": replace(PAGED, heads=256, kv_heads=256, head_size=512, value_size=512),
    "packed block": replace(PAGED, block_size=24),
    "prefill block": replace(PAGED, block_size=64, queries=2, explicit=True),
    "decode block": replace(PAGED, block_size=1024, explicit=True),
    "packed sequences": replace(PAGED, sequences=4097),
    "sequences": replace(PAGED, sequences=65537, explicit=True),
    "decode keys": replace(PAGED, keys=262145),
    "exact lengths": replace(PAGED, exact=False),
    "cache dtype": replace(WRITE, dtype="float32"),
    "write layout": replace(WRITE, layout="phbd"),
    "write strides": replace(WRITE, contiguous=False),
    "rotary dtype": replace(ROPE, dtype="float64"),
    "rotary size": replace(ROPE, head_size=896),
    "rotary heads": replace(ROPE, heads=1000),
}


def test_every_limit_has_a_call_that_breaks_it_and_says_so():
    assert BREAKS.keys() == limits.LIMITS.keys()
    for name, facts in BREAKS.items():
        error = limits.refusal(facts)
        assert error is not None and limits.LIMITS[name].text in str(error) and limits.LIMITS[name].instead in str(error), name
        with pytest.raises(type(error), match="is not supported"):
            limits.check(facts)
    for facts in (DENSE, PAGED, WRITE, ROPE, replace(PAGED, dtype="bfloat16", head_size=64, value_size=64)):
        assert limits.refusal(facts) is None
    assert set(limits.FLOATS) == set(FLOATS)
    with pytest.raises(ValueError, match="dense.attend"):
        limits.refusal(replace(DENSE, operation="dense.atend"))


def test_without_torch_npu_a_call_says_what_to_do():
    program = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "import torch, npu\n"
        "from fattn.types import Range, full\n"
        "q = torch.zeros(1, 1, 64, dtype=torch.float16)\n"
        "npu.dense.attend(q, q, q, Range(0, 1), Range(0, 1), mask=full(), scale=1.0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1 and "RuntimeError: torch_npu cannot be imported" in run.stderr and "npu.emulator.install()" in run.stderr
