"""The laws of each operation. Each is checked through the implementation under test, against the oracle's value of the original call."""

from fattn.conformance.laws import attention, common
from fattn.conformance.laws.base import Law

LAWS: dict[str, tuple[Law, ...]] = {
    "dense.attend": (common.POISON, *attention.DENSE),
}


def of(operation: str) -> tuple[Law, ...]:
    """Every law of an operation, those of all operations included."""
    return (*common.EVERYWHERE, *LAWS.get(operation, ()))
