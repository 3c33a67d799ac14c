"""What the reports about operators share: the calls that reach an operator, and ways to make the adapter ask for something else."""

from __future__ import annotations

import contextlib

import pytest
import torch

from npu import _admit, _operators, releases
from npu.emulator import schemas

ATTENTION = "npu::npu_fused_infer_attention_score"


class Recorded:
    """An operator that keeps what it is called with, under the schema of a release."""

    def __init__(self, real, name, calls, version):
        self.real, self.name, self.calls = real, name, calls
        self._schema = torch._C.parse_schema(schemas.load(version)[name])

    def __call__(self, *rows, **named):
        self.calls.append((self.name, rows, named))
        return self.real(*rows, **named)


@contextlib.contextmanager
def recorded(version="2.13.0"):
    """Within the block, the calls that reach an operator: (name, arguments by place, arguments by name)."""
    calls, real = [], _operators._operator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _operators,
            "_operator",
            lambda space, name, device, *more: Recorded(real(space, name, device, *more), f"{space}::{name}", calls, version),
        )
        yield calls


def attention(calls):
    """The arguments of the one call of the attention operator."""
    (named,) = (named for name, _, named in calls if name == ATTENTION)
    return named


def changed(change):
    """A fault: the adapter hands the attention operator other arguments."""

    def fault(patch):
        real = _operators.attention_call

        def of_device(device, workspace):
            launch = real(device, workspace)
            return lambda arguments, out: launch(arguments | change(arguments), out)

        patch.setattr(_operators, "attention_call", of_device)

    return fault


def replaced(place, name, value):
    """A fault: another function or number in a module."""
    return lambda patch: patch.setattr(place, name, value)


@contextlib.contextmanager
def forgotten():
    """What npu decides once and keeps is neither taken from the tests before nor left to those after: faults change decisions."""
    kept = [function for module in (releases, _admit) for function in vars(module).values() if hasattr(function, "cache_clear")]
    for function in kept:
        function.cache_clear()
    try:
        yield
    finally:
        for function in kept:
            function.cache_clear()
