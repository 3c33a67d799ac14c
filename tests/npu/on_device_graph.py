"""A captured step on the host-memory device: streams are real, operators go through the wheel's own layer. Run by test_hostdev.py."""

import pytest
from graph_cases import Engine, assert_step_is_eager, batch_of

import npu
import npu.graph
from fattn.types import causal, window


@pytest.mark.parametrize("head_size, next_n", [(128, 1), (128, 4), (64, 1), (64, 4)])
def test_replay_is_eager(head_size, next_n):
    masks, size = (causal(), window(70, 0)), dict(tokens=4 * next_n, sequences=4)
    engine = Engine(head_size, masks, sinks=True, tokens=size["tokens"], device="npu:0")
    step = npu.graph.record(engine.step, batch_of([next_n] * 3, [8] * 3, **size), masks, device="npu:0")
    assert step.workspace.device.type == "npu"
    for keys in (9, 40, 200):
        assert_step_is_eager(engine, step, batch_of([next_n] * 3, [keys, keys + 3, keys + 100], seed=keys, **size), keys)
