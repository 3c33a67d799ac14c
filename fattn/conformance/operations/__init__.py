"""Every operation that the kit holds an implementation to, in the order of the modules."""

from fattn.conformance.operations import dense
from fattn.conformance.operations.base import Operation

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (dense.ATTEND, dense.ALIBI, dense.ALIBI_SLOPES)}
