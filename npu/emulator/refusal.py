"""How an emulated operator refuses a call: as the device does, but with the rule by name."""

from __future__ import annotations

from npu.emulator.target import target

PARAMETER_INVALID = 161002


def refuse(operator: str, rule: str, value):
    """Raises RuntimeError in the form of an operator's own error, naming the documented rule and the value that breaks it."""
    where = f"emulated {target().chip}, CANN {target().cann}"
    raise RuntimeError(f"call {operator} failed, error code is {PARAMETER_INVALID} ({where}). [Rule] {rule}. [Got] {value}")


def demand(holds: bool, operator: str, rule: str, value):
    """`refuse` unless the rule holds."""
    if not holds:
        refuse(operator, rule, value)
