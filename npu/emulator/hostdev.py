"""One pretend NPU whose memory is host memory: real `npu:0` tensors, and the wheel's own C++ layer between them and the kernels.

The wheel checks arguments, allocates outputs, chooses the aclnn function for the chip and hands it aclTensors; `aclnn` binds those
functions to the emulator's kernels, `aten` gives torch's own operators their CPU kernels, and an unbound function raises an error that
names it. Side streams do their work only where something waits for it (hostdev.c). x86-64 only.

ATB's operators are C++ objects that nothing can stand in for: their kernels run on the same bytes without the C++ layer.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu.emulator.acl import Library
    from npu.emulator.target import Target

OPERATORS = "libopapi.so"
OPENED_LATER = ("libnnopbase.so",)  # what the wheel opens by name in some calls
SOURCES = tuple(Path(__file__).with_name(name) for name in ("hostdev.c", "opapi_prelude.c", "hostdev.py"))
CHIPS = {"a2": "Ascend910B1", "a3": "Ascend910_9391"}
_MACHINES = ("x86_64", "AMD64")
_started: list[Library] = []
_chip: list[str] = []


def problem() -> str | None:
    """Why there is no host-memory device on this machine, or None."""
    machine = platform.machine()
    if machine in _MACHINES:
        return None
    return f"the host-memory device needs an x86-64 processor, and this is {machine}: operators run on CPU tensors (device='cpu')"


def check(target: Target, *, installed: bool):
    """Raises RuntimeError where this process can have no device of this kind: `installed` says that an emulation runs already."""
    reason = problem()
    if reason is None and installed and not _started:
        reason = "operators run on CPU tensors in this process already: call install(device='npu') first, or in a process of its own"
    if reason is None and _started and _chip[0] != CHIPS[target.soc]:
        reason = f"the device of this process is {_chip[0]}: another chip needs a process of its own"
    if reason is not None:
        raise RuntimeError(reason)


def start(stand_ins: Path, target: Target):
    """Makes the device, from compiled stand-ins that are loaded already and an imported wheel: binds its kernels, finds its streams."""
    import torch

    from npu.emulator import aclnn, aten
    from npu.emulator.acl import Library

    library = Library(stand_ins, entry_points((stand_ins / "operators.c").read_text()))
    for name, function in aclnn.FUNCTIONS.items():
        library.bind(name, function)
    library.runtime.fattn_declare(CHIPS[target.soc].encode(), target.cann.encode())
    aten.register_all(library)
    library.runtime.fattn_default_stream(torch.npu.default_stream().npu_stream)
    _started.append(library)
    _chip.append(CHIPS[target.soc])


def started() -> bool:
    """Whether this process has the device."""
    return bool(_started)


def library() -> Library:
    """The device's aclnn functions and streams. Raises RuntimeError where the process has no such device."""
    if not _started:
        raise RuntimeError("this process has no host-memory device: npu.emulator.install(device='npu') makes it")
    return _started[0]


def sources(package: Path) -> dict[str, str]:
    """The C sources to compile for a wheel's package, by the library that each makes: the runtime, and the aclnn functions."""
    runtime, prelude = (path.read_text() for path in SOURCES[:2])
    found = re.findall(rb"(?<=\0)(aclnn[A-Z][A-Za-z0-9]+)(?=\0)", (package / "lib" / "libtorch_npu.so").read_bytes())
    names = sorted({name.decode() for name in found})
    entries = [f"ENTRY({index}, {name})" for index, name in enumerate(names)]
    bound = ",".join(f"(void *)unbound_{name}" for name in names)
    tables = f"uint64_t fattn_calls[{len(names)}];\nvoid *fattn_bound[{len(names)}] = {{{bound}}};"
    return {"libascendcl.so": runtime, OPERATORS: "\n".join([prelude, *entries, tables, ""])}


def entry_points(source: str) -> list[str]:
    """The aclnn functions in a source of entry points, in order."""
    return re.findall(r"^ENTRY\(\d+, (\w+)\)", source, re.M)


def names_defined(source: str) -> set[str]:
    """The functions that a runtime's source defines."""
    return set(re.findall(r"^(?:long|int|void|const char) \*?(\w+)\(", source, re.M)) | set(re.findall(r"SUCCEEDS\((\w+)\)", source))
