"""Every operation that the kit holds an implementation to, in the order of the modules."""

from fattn.conformance.operations import dense, masks, merge, paged, rope, standard
from fattn.conformance.operations.base import Operation

_ALL = (
    *(masks.VISIBLE, masks.COMPRESSED, masks.EXPAND),
    *(dense.ATTEND, dense.ALIBI, dense.ALIBI_SLOPES),
    *(merge.EMPTY, merge.MERGE, merge.FINISH),
    *(rope.FREQUENCIES, rope.YARN, rope.TABLE, rope.HALF, rope.INTERLEAVED),
    *(paged.ALLOCATE, paged.CONVERT, paged.WRITE, paged.GATHER, paged.ATTEND),
    *(standard.PREPARE, standard.ATTEND_AND_WRITE, standard.FORWARD),
)
OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _ALL}
