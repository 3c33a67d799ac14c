"""Which blocks of the paged cache hold which tokens, so that a prompt that begins like an earlier one reuses its keys and values."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """Blocks for one sequence, in order, and how many of its leading tokens they hold already."""

    blocks: list[int]
    hit: int


class Prefixes:
    """The blocks of a cache, for one sequence at a time: `take` them, run the sequence, `give` them back with what they hold.

    A block is remembered with all tokens from the sequence's beginning to the block's last one: keys depend on everything before them.
    """

    def __init__(self, blocks: range, *, block_size: int):
        self.block_size = block_size
        self.free = list(blocks)
        self.known: dict[int, list[int]] = {}  # least recently used first

    def take(self, ids: list[int], *, room: int) -> Held:
        """Blocks for `ids` and `room` tokens after them. At least the last of `ids` is left to compute, since its logits are wanted.

        Raises ValueError where there are no ids, or the cache is too small.
        """
        if not ids:
            raise ValueError("ids has no tokens; a sequence needs at least one")
        needed = -(-(len(ids) + room) // self.block_size)
        if needed > len(self.free) + len(self.known):
            raise ValueError(f"{len(ids)} tokens and room for {room} need {needed} blocks; there are {len(self.free) + len(self.known)}")
        blocks, hit = [], 0
        while hit == len(blocks) * self.block_size:
            best = max(self.known, key=lambda block: self._common(block, ids, hit), default=None)
            common = hit if best is None else self._common(best, ids, hit)
            if common <= hit:
                break
            # a block that agrees only in part is continued in place: its other tokens are forgotten, and written over
            del self.known[best]
            blocks.append(best)
            hit = common
        while len(blocks) < needed:
            blocks.append(self.free.pop() if self.free else next(iter(self.known)))
            self.known.pop(blocks[-1], None)
        return Held(blocks, hit)

    def give(self, ids: list[int], blocks: list[int]):
        """Ends a sequence: its blocks hold the keys and values of `ids`."""
        for index, block in enumerate(blocks):
            held = ids[: (index + 1) * self.block_size]
            if len(held) > index * self.block_size:
                self.known[block] = held
            else:
                self.free.append(block)

    def forget(self):
        """Frees every block that is remembered."""
        self.free += self.known
        self.known.clear()

    def _common(self, block: int, ids: list[int], hit: int) -> int:
        """How many leading tokens of `ids`, the last one apart, are there once `block` follows blocks that hold the first `hit`."""
        held = self.known[block]
        if len(held) <= hit or len(held) > hit + self.block_size or held[:hit] != ids[:hit]:
            return 0
        common = hit
        while common < min(len(held), len(ids) - 1) and held[common] == ids[common]:
            common += 1
        return common
