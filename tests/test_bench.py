"""The benchmarks' commands: what they print and write, and that a must that fails is an exit status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fattn.__main__ as commands
from fattn.benchmarks import plan as benchmark
from fattn.benchmarks.timer import Microseconds, timed

ROOT = Path(__file__).parents[1]
TIME = Microseconds(20.0, 22.0)


def test_plan_measures_and_says_what_ran(tmp_path):
    """In a process of its own: it puts operators that do nothing behind the dispatcher."""
    command = [sys.executable, "-m", "fattn", "bench", "plan", "--quick", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(row["step"], row["sequences"]) for row in found["planning"]] == [("decode", 1), ("decode", 256), ("mixed", 1), ("mixed", 256)]
    assert [row["sequences"] for row in found["layers"]] == [1, 256]
    for row in found["layers"]:
        assert 0 < row["own"]["least"] < row["layer"]["least"] and row["bare"]["least"] > 0
    assert len(found["musts"]) == 5 and all(must["most"] > 0 for must in found["musts"])
    assert "null operators" in done.stdout and "own Python" in done.stdout and "256 sequences" in done.stdout


def rows(own):
    """Results in which a layer of 256 sequences has this much Python of its own."""
    planning = [{"step": "decode", "sequences": n, "build": TIME, "place": TIME, "original": 9.0} for n in (1, 256)]
    layers = [
        {"sequences": n, "layer": TIME, "bare": TIME, "own": Microseconds(x, x), "original": 36.0, "original own": 24.0}
        for n, x in ((1, 10.0), (256, own))
    ]
    return {"planning": planning, "layers": layers, "musts": benchmark.musts(planning, layers)}


@pytest.mark.parametrize("own, failing", [(11.0, []), (15.0, ["the same"]), (30.0, ["a layer's own", "the same"])])
def test_check_is_an_exit_status(own, failing, monkeypatch):
    result = rows(own)
    broken = [must.name for must in result["musts"] if not must.holds]
    assert len(broken) == len(failing) and all(name.startswith(start) for name, start in zip(broken, failing, strict=True))
    monkeypatch.setattr(benchmark, "run", lambda *, quick: result)
    for options, status in ((["--check"], int(bool(failing))), ([], 0)):
        done = CliRunner().invoke(commands.app, ["bench", "plan", *options])
        assert done.exit_code == status, done.output
        assert done.output.count("FAILS") == len(failing)


def test_the_whole_step_is_compared():
    slow = rows(11.0)["layers"]
    slow[0]["layer"] = Microseconds(40.0, 40.0)
    broken = [must for must in benchmark.musts(rows(11.0)["planning"], slow) if not must.holds]
    assert [must.name for must in broken] == ["a step of 28 layers, 1 sequences"] and broken[0].found == 40 + 28 * 40


def test_contenders_take_turns():
    order = []
    found = timed({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, calls=2)
    assert "".join(order) == "ab" + "aabb" * 3
    assert all(0 < time.least <= time.median for time in found.values())
