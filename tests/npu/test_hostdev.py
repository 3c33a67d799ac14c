"""The host-memory device, in a process of its own: a process has one kind of device for all its life."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from npu.emulator import hostdev

HERE = Path(__file__).parent
FILES = sorted(path.stem for path in HERE.glob("on_device_*.py"))
RUN = "import sys, npu.emulator, pytest; npu.emulator.install(device='npu'); sys.exit(pytest.main(sys.argv[1:]))"
# How many tests there are: fewer would mean that some are no longer reached.
LEAST = {"on_device_graph": 4, "on_device_operators": 50, "on_device_streams": 19, "on_device_values": 80}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the tests on the device did, by file and name: None where it passed, else its message. And what the process printed."""
    report = tmp_path_factory.mktemp("device") / "report.xml"
    options = ["-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    files = [str(HERE / f"{name}.py") for name in FILES]
    # with it every launch waits for its stream, so that no side stream is late: the probe's command sets it for its own process
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_LAUNCH_BLOCKING"}
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *options, *files], capture_output=True, text=True, env=environment, cwd=HERE.parents[1]
    )
    assert report.exists(), ended.stdout + ended.stderr
    found = {name: {} for name in FILES}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped") is not None
        found[Path(case.get("file")).stem][case.get("name")] = "skipped" if skipped else None if failure is None else failure.text
    return found, ended.stdout


@pytest.mark.parametrize("name", FILES)
def test_on_the_device(outcomes, name):
    found, printed = outcomes
    failed = {test: message for test, message in found[name].items() if message is not None}
    assert not failed, "\n".join(f"{test}: {message}" for test, message in failed.items())
    assert len(found[name]) >= LEAST[name], printed


def test_the_process_says_what_it_is(outcomes):
    assert "emulated torch_npu" in outcomes[1] and "on npu:0 in host memory" in outcomes[1] and "no NPU" in outcomes[1]


def test_a_process_that_runs_on_cpu_tensors_keeps_to_them():
    code = "import npu.emulator as e; e.install(); e.install(device='npu')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1])
    assert ended.returncode and "operators run on CPU tensors in this process already" in ended.stderr


def test_elsewhere_than_on_x86_64_it_says_so(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "needs an x86-64 processor, and this is aarch64" in hostdev.problem()
    with pytest.raises(RuntimeError, match="operators run on CPU tensors"):
        hostdev.check(None, installed=False)


def test_a_process_without_the_device_says_how_to_get_it():
    with pytest.raises(RuntimeError, match=r"install\(device='npu'\)"):
        hostdev.library()
