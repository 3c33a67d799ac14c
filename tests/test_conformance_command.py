"""The command line: exit codes, JSON, what is printed."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fattn.__main__ import app

PLAIN = "fattn.conformance.plain"


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_conform_prints_rows_and_a_headline_and_writes_json(tmp_path):
    path = tmp_path / "results.json"
    done = run("conform", PLAIN, "--op", "merge", "--examples", "5", "--seed", "7", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "merge.finish" in done.output and "core " in done.output and "optional 0/0" in done.output
    written = json.loads(path.read_text())
    assert (written["target"], written["seed"]) == (PLAIN, 7)
    assert {row["operation"] for row in written["results"]} == {"merge.empty", "merge.merge", "merge.finish"}
    assert all(row["status"] == "passed" for row in written["results"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("conform", "no_such_package"), "no_such_package"),
        (("conform", "json"), "ARRAYS"),
        (("conform", "./mypackage"), "./mypackage"),
        (("conform", "fattn.conformance.laws"), "ARRAYS"),
        (("conform", PLAIN, "--op", "dense.atend"), "dense.atend"),
        (("replay", __file__), "failures/"),
        (("conform", PLAIN, "--device", "tpu"), "tpu"),
        (("conform", PLAIN, "--examples", "0"), "examples"),
        (("replay", "no-such-file.npz"), "no-such-file"),
        (("conform",), "PACKAGE"),
    ],
)
def test_bad_usage_exits_2_and_names_what_is_wrong(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2 and said in re.sub(r"[│\s]+", " ", done.output)  # whatever the width


def test_a_package_of_ones_own_fails_and_its_failure_is_replayed(tmp_path, monkeypatch):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text('ARRAYS = "numpy"\n')
    source = "from fattn.conformance.plain.merge import empty, finish\nfrom fattn.types import Partial\n"
    (package / "merge.py").write_text(source + "def merge(a, b):\n    return Partial((a.out + b.out) / 2, a.lse)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = run("conform", "mine", "--op", "merge.merge", "--op", "rope.half", "--examples", "5")
    assert done.exit_code == 1
    assert "failed" in done.output and "no function: rope.half" in done.output and ", absent 1" in done.output
    files = sorted((tmp_path / "failures").iterdir())
    assert files
    again = run("replay", *map(str, files))
    assert again.exit_code == 1 and "merge.merge" in again.output


def test_a_package_without_any_of_the_functions_is_bad_usage(tmp_path, monkeypatch):
    (tmp_path / "misnamed.py").write_text('ARRAYS = "numpy"\n')
    monkeypatch.syspath_prepend(tmp_path)
    done = run("conform", "misnamed")
    assert done.exit_code == 2 and "none of the functions" in done.output


def test_python_m_fattn_runs_from_a_shell():
    command = [sys.executable, "-m", "fattn", "conform", PLAIN, "--op", "merge.empty", "--examples", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "merge.empty" in done.stdout
