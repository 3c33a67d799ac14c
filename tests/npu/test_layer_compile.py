"""npu's functions under torch.compile and torch.export, on CPU tensors; test_hostdev.py has the same on npu:0."""

import pytest
from compiled import compiled, exported
from device_cases import assert_same_bits, cases

CASES = cases("cpu")


@pytest.mark.parametrize("name", CASES)
def test_compiles_whole(name):
    run, arguments = CASES[name]
    assert_same_bits(compiled(run, "aot_eager")(*arguments), run(*arguments))


def test_compiles_whole_without_decompositions():
    run, arguments = CASES["standard.forward"]
    assert_same_bits(compiled(run, "eager")(*arguments), run(*arguments))


@pytest.mark.parametrize("name", CASES)
def test_exports(name):
    run, arguments = CASES[name]
    assert_same_bits(exported(run, arguments)(*arguments), run(*arguments))
