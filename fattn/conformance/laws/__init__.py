"""The laws of each operation. Each is checked through the implementation under test, against the oracle's value of the original call."""

from fattn.conformance.laws import attention, common, pages, small
from fattn.conformance.laws.base import Law

LAWS: dict[str, tuple[Law, ...]] = {
    "masks.visible": small.VISIBLE,
    "masks.compressed": small.COMPRESSED,
    "masks.expand": small.EXPAND,
    "dense.attend": (common.POISON, *attention.DENSE),
    "merge.merge": (common.POISON, *small.MERGE),
    "merge.finish": (common.POISON,),
    "rope.half": small.TURN,
    "rope.interleaved": small.TURN,
    "paged.convert": pages.CONVERT,
    "paged.write": (common.POISON, *pages.WRITE),
    "paged.gather": (common.POISON,),
    "paged.attend": (common.POISON, *pages.ATTEND),
    "standard.attend_and_write": (common.POISON, *pages.LAYER),
    "standard.forward": (common.POISON, *pages.LAYER),
}


def of(operation: str) -> tuple[Law, ...]:
    """Every law of an operation, those of all operations included."""
    return (*common.EVERYWHERE, *LAWS.get(operation, ()))
