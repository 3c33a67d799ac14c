"""Inert stand-ins for CANN's shared libraries, so that the torch_npu wheel can be imported where CANN is not installed.

They are generated from the wheel's own symbol table and compute nothing: there are zero devices, a function that returns a pointer returns
NULL, and every other one returns an error, except the few whose success the import and the exit need. All define MARKER, by which code can
tell them from the real libraries.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from npu.emulator import hostdev
from npu.emulator.wheel import cache_folder, settle

MARKER = "fattn_stub_cann_marker"
_BASE = "libascendcl.so"
_ERROR = 507899  # what a host without a driver reports
_SUCCEED = ("aclInit", "aclFinalize", "aclrtProcessReport", "aclmdlInitDump", "aclmdlFinalizeDump", "MsprofRegisterCallback", "aclAppLog")
_SUCCEED += ("HcclSetConfig",)
_RETURN_NULL = ("aclCreateDataBuffer", "aclCreateTensorDesc", "aclopCreateAttr", "aclGetRecentErrMsg", "aclrtGetSocName")
_RETURN_NULL += ("MsprofGetHashId", "MsprofSysCycleTime", "aclGetTensorDescNumDims")
_NO_DEVICES = "long aclrtGetDeviceCount(unsigned int *count) { if (count) *count = 0; return 0; }"
_SYSTEM = ("libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libstdc++.so.6")
_SYSTEM += ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
_SYSTEM_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib/aarch64-linux-gnu")
_SYSTEM_FOLDERS += ("/usr/lib/aarch64-linux-gnu",)


def real_cann() -> bool:
    """Whether the loader finds CANN's own libraries, and not our stand-ins."""
    try:
        library = ctypes.CDLL(_BASE)
    except OSError:
        return False
    return not hasattr(library, MARKER)


def build(wheel: Path, *, host_device: bool = False) -> Path:
    """The folder of stand-ins for the torch_npu unpacked in `wheel`; compiled once, safe with parallel processes.

    With `host_device` they are those of one device in host memory, with the library of its aclnn functions (`hostdev`).
    Raises RuntimeError that names what to install where the compiler or binutils are missing.
    """
    folder = cache_folder() / f"{'hostdev' if host_device else 'stubs'}-{_fingerprint(wheel, hostdev.SOURCES if host_device else ())}"
    if folder.is_dir():
        return folder
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"{' and '.join(missing)} not found: compiling the stand-ins for CANN needs gcc and binutils. "
            "Install them (Debian and Ubuntu: apt-get install gcc libc6-dev binutils)"
        )
    sonames, symbols = _wanted(wheel / "torch_npu")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="stubs-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        sources = hostdev.sources(wheel / "torch_npu") if host_device else {}
        _compile(made, [*sonames, *hostdev.OPENED_LATER] if host_device else sonames, symbols, sources)
        settle(made, folder)
    return folder


def preload(folder: Path) -> list[ctypes.CDLL]:
    """Loads the stand-ins under their library names, which satisfies the wheel's libraries with no LD_LIBRARY_PATH."""
    libraries = sorted(folder.glob("*.so"), key=lambda path: path.name != _BASE)
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in libraries]


def _fingerprint(wheel, sources):
    """Of what the stand-ins depend on: the wheel's files, torch's, this generator and its sources."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (Path(__file__), *sources)))
    for path in sorted([*_wheel_libraries(wheel / "torch_npu"), *_torch_libraries()]):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    version = wheel.name.removeprefix("torch_npu-") if wheel.name.startswith("torch_npu-") else "installed"
    return f"{version}-{digest.hexdigest()[:12]}"


def _wheel_libraries(package):
    return [*package.glob("lib/*.so"), *package.glob("_C*.so")]


def _torch_libraries():
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    return sorted(torch.glob("lib/*.so*"))


def _wanted(package):
    """The library names that the wheel links to and nothing provides, and the symbols that nothing defines."""
    ours, torch = _wheel_libraries(package), _torch_libraries()
    provided = {path.name for path in [*ours, *torch]}
    undefined, defined, sonames = set(), set(), set()
    for path in ours:
        undefined |= _symbols(path, "--undefined-only")
        defined |= _symbols(path, "--defined-only")
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-d", path))
        sonames |= {name for name in needed if name not in provided and _system_library(name) is None}
    system = [path for path in map(_system_library, _SYSTEM) if path]
    for path in [*(p for p in torch if re.match("lib(torch|c10|shm)", p.name)), *system]:
        defined |= _symbols(path, "--defined-only")
    return sorted(sonames | {_BASE}), sorted(name for name in undefined - defined if not re.match("_?Py", name))


def _symbols(path, which):
    symbols = set()
    for fields in map(str.split, _output("nm", "-D", which, path).splitlines()):
        weak = which == "--undefined-only" and fields[-2] in "wv"  # may stay null
        if not weak:
            symbols.add(fields[-1].split("@")[0])
    return symbols


def _system_library(name):
    return next((path for path in (Path(folder, name) for folder in _SYSTEM_FOLDERS) if path.exists()), None)


def _compile(folder, sonames, symbols, sources):
    runtime = sources.get(_BASE, "")
    defined = hostdev.names_defined(runtime)
    source = folder / "stubs.c"
    inert = (_definition(symbol) for symbol in symbols if symbol not in defined)
    source.write_text("\n".join([runtime, *inert, f"int {MARKER}(void) {{ return 1; }}", ""]))
    base = folder / _BASE
    gcc = ["gcc", "-w", "-fno-builtin", "-O1", "-shared", "-fPIC"]
    _output(*gcc, f"-Wl,-soname,{_BASE}", "-o", base, source)
    if hostdev.OPERATORS in sources:
        source = folder / "operators.c"
        source.write_text(sources[hostdev.OPERATORS])
        _output(*gcc, f"-Wl,-soname,{hostdev.OPERATORS}", "-o", folder / hostdev.OPERATORS, source, base, "-Wl,-rpath,$ORIGIN")
    # All symbols live in one library, and every other depends on it.
    for name in sonames:
        if name != _BASE:
            depends = ["-Wl,--no-as-needed", base, "-Wl,-rpath,$ORIGIN"]
            _output(*gcc, f"-Wl,-soname,{name}", "-o", folder / name, "-x", "c", os.devnull, "-x", "none", *depends)


def _definition(symbol):
    if symbol == "aclrtGetDeviceCount":
        return _NO_DEVICES
    if symbol.startswith(("_ZTI", "_ZTV", "_ZTS")):
        return f"char {symbol}[512];"
    return f"long {symbol}() {{ return {0 if symbol in _SUCCEED + _RETURN_NULL else _ERROR}; }}"


def _output(*command):
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{command[0]} failed while the stand-ins for CANN were made:\n{ended.stderr.strip()}")
    return ended.stdout
