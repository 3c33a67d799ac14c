"""Every report of groups A to D on the oracle and on the definitions, and on implementations with its fault."""

from __future__ import annotations

import inspect
import re
from functools import cache, wraps
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fattn.conformance import faults
from reports import empty_sets, gradients, heads, mask_rules, pages, unchecked
from reports.elsewhere import ELSEWHERE
from reports.layers import Layer, of_package, with_function

REPORTS = (*empty_sets.REPORTS, *mask_rules.REPORTS, *heads.REPORTS, *pages.REPORTS)
FAULTS = {fault.name: fault for fault in (*faults.FAULTS, *unchecked.FAULTS)}

# Groups A to D of the public reports that the definitions were written against; numbers left out there are left out here.
NAMES = """
B01 B02 B03 B04 B06 B07 B09 B10 B11 B13
B14 B15 B16 B18 B19 B20 B21
B22 B24 B25 B26 B28 B29 B30 B32 B33
B34 B36 B37 B39 B40 B42 B43 B44 B45 B46
""".split()


@cache
def layer(name: str) -> Layer:
    """The oracle or the definitions as the reports see them."""
    if name == "reference":
        return of_package(name)
    definitions = of_package(name, array=jnp.asarray, place=lambda batch, mask: jax.tree.map(jnp.asarray, batch))
    for operation in ("dense.attend", "paged.attend", "standard.attend_and_write"):
        module, function = operation.split(".")
        definitions = with_function(definitions, operation, compiled(getattr(getattr(definitions, module), function)), name)
    return definitions


def compiled(function):
    """The function compiled for each value of its static arguments, under its own name and signature."""
    parameters = inspect.signature(function).parameters.values()
    static = [p.name for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY]
    jitted = jax.jit(function, static_argnames=static, compiler_options={"xla_backend_optimization_level": 0})
    return wraps(function)(lambda *arguments, **static: jitted(*arguments, **static))


@pytest.mark.parametrize("name", ("reference", "fattn"))
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.case.__name__)
def test_report(report, name):
    report.case(layer(name))


@pytest.mark.parametrize("report", gradients.REPORTS, ids=lambda report: report.case.__name__)
def test_gradient_report(report):
    report.case(gradients.DEFINITION)


@pytest.mark.parametrize(
    "report,name", [(report, name) for report in REPORTS for name in report.faults], ids=lambda x: getattr(x, "name", x)
)
def test_the_report_sees_its_fault(report, name):
    fault = FAULTS[name]
    broken = with_function(layer("reference"), fault.operation, fault.function, fault.name)
    with pytest.raises(AssertionError) as seen:
        report.case(broken)
    # a variant of the plain functions checks no arguments; only a fault of that kind may be seen by it
    assert "was raised" not in str(seen.value) or fault.kind == "bad input", f"{name} was noticed for the error that it does not raise"


@pytest.mark.parametrize("report,fault", [(r, fault) for r in gradients.REPORTS for fault in r.faults], ids=lambda x: getattr(x, "name", x))
def test_the_gradient_report_sees_its_fault(report, fault):
    with pytest.raises(AssertionError):
        report.case(gradients.FAULTS[fault])


def test_every_report_has_a_fault():
    assert all(report.faults for report in (*REPORTS, *gradients.REPORTS))


def test_every_report_is_a_case_or_listed_elsewhere():
    cases = [report.name for report in (*REPORTS, *gradients.REPORTS)]
    assert len(cases) == len(set(cases))
    whole = {entry.name for entry in ELSEWHERE if entry.part == "all"}
    assert sorted([*cases, *whole]) == sorted(NAMES)
    assert all(entry.name in cases for entry in ELSEWHERE if entry.part != "all")


def test_every_case_is_a_report():
    for module in (empty_sets, mask_rules, heads, pages, gradients):
        written = set(re.findall(r"^def (b\d\d_\w+)\(", Path(module.__file__).read_text(), re.M))
        assert written == {report.case.__name__ for report in module.REPORTS}
        assert all(report.case.__name__.startswith(report.name.lower()) and report.case.__doc__ for report in module.REPORTS)
