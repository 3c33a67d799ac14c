"""The device whose documented limits the emulator enforces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A chip and a CANN release. `number` is what the wheel's own code calls the chip."""

    soc: str
    chip: str
    number: int
    cann: str


_CHIPS = {"a2": ("Ascend910B", 220), "a3": ("Ascend910_93", 250)}
_declared = [Target("a2", *_CHIPS["a2"], cann="9.1.0")]


def target() -> Target:
    """The declared target."""
    return _declared[0]


def declare(soc: str, cann: str) -> Target:
    """Makes the emulator and the wheel's Meta kernels see this chip and CANN release. Raises ValueError for an unknown chip."""
    if soc not in _CHIPS:
        raise ValueError(f"soc is {soc!r}; the emulator knows the limits of {', '.join(map(repr, _CHIPS))}")
    import torch_npu.op_plugin.meta._meta_registrations as meta

    chosen = Target(soc, *_CHIPS[soc], cann=cann)
    # With no device these two raise, and some Meta kernels ask them.
    meta.get_soc_version = lambda: chosen.number
    meta.get_cann_version = lambda module="CANN": chosen.cann
    _declared[0] = chosen
    return chosen
