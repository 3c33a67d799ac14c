"""The torch_npu operators on a machine with no NPU: the real wheel, its dispatcher, schemas and Meta kernels, and CPU kernels behind them.

The kernels are written from the operators' documentation and share no code with the packages that call them. They enforce the documented
limits of a declared chip and CANN release, and are hostile where the documents are silent: see `assumptions`. Nothing here says anything
about a device's own arithmetic or speed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Literal

from npu.emulator.assumptions import variant

__all__ = ["install", "provider", "variant"]

_installed: list[str] = []  # what `provider` says


def install(soc: str = "a2", cann: str = "9.1.0", variants: Sequence[str] = (), *, device: Literal["cpu", "npu"] | None = None) -> str:
    """Makes `import torch_npu` work and its attention operators run on CPU tensors; returns `provider()`.

    With device="npu" they run on `npu:0` tensors, too, in host memory, through the wheel's own C++ layer (`hostdev`). The first call of a
    process chooses, for all of it; None is what the process has, at first "cpu".

    Prints one line that says what runs. On a host whose own NPU is available nothing is emulated. Fetches the wheel and compiles the
    stand-ins for CANN on first use. A second call declares another target or other answers ("assumption id:variant", all others as
    believed). Raises RuntimeError that names what to install where pip, the wheel or gcc is missing, RuntimeError where the process has
    another device or its one device another chip, and ValueError for an unknown chip or variant.
    """
    from npu.emulator import assumptions, hostdev, stubs
    from npu.emulator.target import chosen

    target = chosen(soc, cann)
    assumptions.choose(variants)
    if not _installed and stubs.real_cann() and _device_name():
        _installed.append(_device_name())
        print(f"{_installed[0]}: this host's own NPU and torch_npu run; nothing is emulated", flush=True)
    elif not _installed or provider().startswith("emulated"):
        if device == "npu" or hostdev.started():
            hostdev.check(target, installed=bool(_installed))
        _emulate(target, on_device=device == "npu")
    return provider()


def provider() -> str:
    """What runs the operators: "emulated torch_npu 2.13.0", or the name of the host's own chip. Raises RuntimeError before `install`."""
    if not _installed:
        raise RuntimeError("npu.emulator.install() has not been called")
    return _installed[0]


def _behind_the_wheel(target, on_device):
    """Imports the wheel and registers the kernels; once a process."""
    from npu.emulator import hostdev, stubs, wheel

    # `import torch` must not import torch_npu by itself before the stand-ins are loaded
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    folder = wheel.installed() or wheel.fetch(wheel.fitting_version())
    if on_device:
        os.environ["TASK_QUEUE_ENABLE"] = "0"  # operators run in the thread that calls them
    if not stubs.real_cann():
        stand_ins = stubs.build(folder, host_device=on_device)
        stubs.preload(stand_ins)
    importlib.import_module("torch")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    # The wheel warns that CANN's home is not set, which the line that install prints says better, and of escapes in its own docstrings.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch_npu")
        importlib.import_module("torch_npu.op_plugin.atb._atb_ops")  # defines torch.ops.atb
    importlib.import_module("npu.emulator.kernels").register_all()
    importlib.import_module("npu.emulator.fusion").register_all()
    importlib.import_module("npu.emulator.graphs").replace(on_device=on_device)
    if on_device:
        hostdev.start(stand_ins, target)


def _emulate(target, on_device):
    from npu.emulator import hostdev
    from npu.emulator.target import declare

    if not _installed:
        _behind_the_wheel(target, on_device)
    declare(target)
    name = f"emulated torch_npu {sys.modules['torch_npu'].__version__.split('+')[0]}"
    name += " on npu:0 in host memory" if hostdev.started() else ""
    line = f"{name} ({target.chip}, CANN {target.cann}): the wheel's schemas and Meta kernels, CPU kernels from the documents, no NPU"
    if [name, line] != _installed:
        print(line, flush=True)
    _installed[:] = [name, line]


def _device_name():
    """The chip of an available NPU, or None."""
    from npu.emulator import wheel

    if wheel.installed() is None:
        return None
    torch_npu = importlib.import_module("torch_npu")
    return torch_npu.npu.get_device_name(0) if torch_npu.npu.is_available() else None
