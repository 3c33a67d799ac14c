"""The kit catches every fault, and accuses no innocent (a few seeds here; `python -m fattn faults` tries twenty)."""

from __future__ import annotations

import json
from collections import Counter
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fattn.__main__ import app
from fattn.conformance import judge, judge_report
from fattn.conformance.faults import FAULTS
from fattn.conformance.innocents import INNOCENTS
from fattn.conformance.operations import OPERATIONS

GROSS = ("has shape", "has dtype", "has parts", "Error:")  # what any comparison would see: such faults would prove nothing


@pytest.mark.parametrize("operation", dict.fromkeys(fault.operation for fault in FAULTS))
def test_every_fault_is_caught(operation):
    for subject in FAULTS:
        if subject.operation == operation:
            verdict = judge.fault(subject)
            assert verdict.accused, f"{subject.name} ({subject.why}) survived {verdict.examples} examples"
            if subject.kind not in ("dtype", "ignored argument"):
                assert not any(word in verdict.reason for word in GROSS), f"{subject.name} is gross: {verdict.reason}"


@pytest.mark.parametrize("subject", INNOCENTS, ids=lambda subject: subject.name)
def test_no_innocent_is_accused(subject):
    verdict = judge.innocent(subject, seeds=range(3))
    assert not verdict.accused, f"{subject.name}: {verdict.check}: {verdict.reason}"


def test_there_are_enough_of_them():
    kinds = Counter(fault.kind for fault in FAULTS)
    assert len(FAULTS) >= 30 and len(kinds) >= 12 and len(INNOCENTS) >= 8
    assert len({each.name for each in (*FAULTS, *INNOCENTS)}) == len(FAULTS) + len(INNOCENTS)
    assert {fault.operation for fault in FAULTS} == set(OPERATIONS)
    assert all(fault.why for fault in FAULTS)


def test_the_command_exits_by_what_it_found(monkeypatch, tmp_path):
    caught, survivor = (judge.Verdict(name, "edge", "dense.attend", check, "", 3, 0.1) for name, check in (("a", "value"), ("b", "")))
    for broken, correct, code in (([caught], [survivor], 0), ([caught, survivor], [survivor], 1), ([caught], [caught], 1)):
        monkeypatch.setattr(judge, "run", lambda advance, found=(broken, correct): found)
        ran = CliRunner().invoke(app, ["faults", "--json", str(tmp_path / "found.json")])
        assert ran.exit_code == code and f"of {len(broken)} faults" in ran.output
        assert json.loads((tmp_path / "found.json").read_text())["killed"] == 1


def test_the_report_names_survivors_and_the_accused():
    caught, survivor = (
        judge.Verdict(name, "edge", "dense.attend", check, "far off", 3, 0.1) for name, check in (("a", "value"), ("b", ""))
    )
    console = Console(width=160, record=True, file=StringIO())
    judge_report.show(console, [caught, survivor], [survivor, caught])
    text = console.export_text()
    assert "killed 1 of 2 faults of 1 kinds" in text and "accused 1 of 2 innocents" in text and "survived" in text
    written = json.loads(json.dumps(judge.as_json([caught, survivor], [survivor, caught])))
    assert (written["killed"], written["accused"]) == (1, 1)
    assert [row["killed"] for row in written["faults"]] == [True, False]
