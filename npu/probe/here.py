"""What the probe asks here: this host's NPU where it has one, else the emulation."""

from __future__ import annotations

import importlib

from npu.emulator.target import CHIPS

_OTHER_CHIPS = {"Ascend950": "950"}


def install(soc: str, cann: str) -> tuple[str, str, str, str]:
    """(provider, device, soc, cann) of what answers: of the emulation as declared, of an NPU as it says. Raises as `emulator.install`."""
    from npu import emulator

    provider = emulator.install(soc, cann)
    if provider.startswith("emulated"):
        return provider, "cpu", soc, cann
    utils = importlib.import_module("torch_npu.npu.utils")
    return provider, "npu:0", soc_of(provider), str(utils.get_cann_version(module="CANN"))


def soc_of(chip: str) -> str:
    """The short name of a chip that calls itself "Ascend910B3". Raises RuntimeError for one that the limits do not know."""
    names = {name: soc for soc, (name, _) in CHIPS.items()} | _OTHER_CHIPS
    found = [soc for name, soc in names.items() if chip.startswith(name)]
    if not found:
        raise RuntimeError(f"this host's chip is {chip!r}; the limits are about {', '.join(names)}")
    return found[0]
