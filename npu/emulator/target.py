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


# What the documents call A2 and A3: the chip, and its number in the wheel's own code.
CHIPS = {"a2": ("Ascend910B", 220), "a3": ("Ascend910_93", 250)}
_declared = [Target("a2", *CHIPS["a2"], cann="9.1.0")]


def target() -> Target:
    """The declared target."""
    return _declared[0]


def chosen(soc: str, cann: str) -> Target:
    """The target of a chip's short name. Raises ValueError for a chip whose limits are not known."""
    if soc not in CHIPS:
        raise ValueError(f"soc is {soc!r}; the emulator knows the limits of {', '.join(map(repr, CHIPS))}")
    return Target(soc, *CHIPS[soc], cann=cann)


def declare(target: Target):
    """Makes the emulator and the wheel's Meta kernels see this chip and CANN release."""
    import torch_npu.op_plugin.meta._meta_registrations as meta

    # With no device these two raise, and some Meta kernels ask them.
    meta.get_soc_version = lambda: target.number
    meta.get_cann_version = lambda module="CANN": target.cann
    _declared[0] = target
