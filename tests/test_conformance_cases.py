"""Cases: the covering array is complete and committed, and every array follows from a case."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fattn.conformance import covering, draw, generators, power
from fattn.conformance.calls import bits, leaves
from fattn.conformance.cases import Case, case_of
from fattn.conformance.operations import OPERATIONS
from fattn.conformance.plain import dense
from fattn.types import causal
from reference.bounded import FLOAT32

NAMES = list(OPERATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_options_meets(name):
    columns = OPERATIONS[name].options
    assert len(covering.pairs(columns) - covering.reached(columns, covering.committed(name))) == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_rows_are_what_is_generated(name):
    assert covering.committed(name) == covering.generate(OPERATIONS[name].options)


def test_the_committed_file_has_these_operations_and_no_others():
    path = Path(covering.__file__).with_name("covering.json")
    assert list(json.loads(path.read_text())) == NAMES


def test_rows_are_few():
    """A compiling library pays for each."""
    counts = {name: len(covering.committed(name)) for name in NAMES}
    assert max(counts.values()) <= 45, counts


@pytest.mark.parametrize("name", NAMES)
def test_arrays_follow_from_the_case_and_the_case_from_its_json(name):
    for case in draw.cases(name, 5, seed=1)[:5]:
        again = Case.from_json(case.to_json())
        assert again == case
        first, second = (dict(leaves(OPERATIONS[name].build(each).arguments)) for each in (case, again))
        assert first.keys() == second.keys()
        assert all((bits(first[path]) == bits(second[path])).all() for path in first)


def test_another_seed_draws_other_cases():
    assert len(set(draw.cases("dense.attend", 40, 0)) & set(draw.cases("dense.attend", 40, 1))) < 3


def test_every_generator_and_many_lengths_are_drawn():
    drawn = draw.cases("dense.attend", 200, 0)
    assert {case.generator for case in drawn} == set(generators.GENERATORS)
    assert len({case.lengths for case in drawn}) > 40


@pytest.mark.parametrize("generator", [*generators.GENERATORS, "integers"])
def test_generators_fit_the_narrowest_dtype(generator):
    rows = generators.rows(generator, np.random.default_rng(0), 5, 40, (4, 2, 64, 64), np.dtype("float16"))
    assert all(np.isfinite(array.astype(np.float64)).all() and array.dtype == np.float16 for array in rows)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("generator", ["gaussian", "flat", "one-hot", "tied"])
def test_a_spotlight_has_about_half_of_the_probability(generator, softcap):
    q, k, v = generators.rows(generator, np.random.default_rng(1), 3, 50, (4, 2, 64, 64), np.dtype("float32"))
    sides = {"q_pos": np.arange(47, 50, dtype=np.int32), "k_pos": np.arange(50, dtype=np.int32)}
    generators.spotlight(q, k, v, 1, 30, *sides.values(), mask=causal(), scale=0.125, softcap=softcap)
    z = dense.scores(q, k, scale=0.125, softcap=softcap)[0, 1, :49]
    p = np.exp(z - z.max())
    assert 0.4 < (p / p.sum())[30] < 0.6


def test_a_weak_decision_gets_a_spotlight_and_is_decisive_then():
    """One key of 500 at the edge of a window moves the output of a flat softmax by less than bfloat16 rounds."""
    from fattn.conformance.trial import decisive
    from reference.bounded import Precision

    options = {"dtype": "bfloat16", "heads": "4/2", "sizes": "64/64", "mask": "causal", "shape": "1x513", "positions": "array"}
    case = case_of("dense.attend", options | {"scale": "rsqrt", "softcap": None, "bias": None})
    case = replace(case, generator="flat", lengths=((1, 510),))
    precision = Precision(probabilities=2.0**-8)
    operation = OPERATIONS["dense.attend"]
    from fattn.conformance.trial import measured

    assert measured(case, precision).output
    planted, after = decisive(case, precision)
    assert any(edit.startswith("spotlight") for edit in planted.edits)
    assert after.decisive and len(after.output) < len(measured(case, precision).output)
    assert operation.name == planted.operation


def test_a_flip_that_changes_nothing_is_not_applicable():
    options = {"dtype": "float32", "heads": "4/2", "sizes": "64/64", "mask": "causal & window(8, 0)", "shape": "1x4", "positions": "range"}
    operation = OPERATIONS["dense.attend"]
    call = operation.build(case_of("dense.attend", options | {"scale": "rsqrt", "softcap": None, "bias": None}))
    from fattn.conformance import oracle

    found = power.measure(operation, call, oracle.expected(operation, call, FLOAT32).bound)
    assert "window left - 1" not in found.applicable
    assert "causal hides the diagonal" in found.applicable
