"""KV blocks: who holds which, how often, and which is reused next. Thread: engine.

A block is a number, its content lies with the runner. It keeps that content after its last holder has let go, until it
is handed out again, least recently freed first.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Nothing was taken."""

    def __init__(self, num_asked: int, num_free: int) -> None:
        super().__init__(f"{num_asked} KV blocks asked for, {num_free} free")
        self.num_asked = num_asked
        self.num_free = num_free


class BlockPool:
    """All blocks with their reference counts. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be reused first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_shared(self, block: int) -> bool:
        """Whether writing to it would be seen by another holder."""
        return self._references[block] > 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free))
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Seq[int]) -> None:
        """Add one reference to each of these used blocks."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free and cannot be shared"
            self._references[block] += 1

    def take_for_shared(self, block: int) -> int:
        """Take a free block, with one reference, in place of one reference to a shared block, which stays used.

        Raises:
            OutOfBlocks: none is free.
        """
        assert self.is_shared(block), f"block {block} has no other holder"
        (taken,) = self.allocate(1)
        self._references[block] -= 1
        return taken

    def release(self, blocks: Seq[int]) -> None:
        """Drop one reference of each, last first: a sequence's tail is reused before its head."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None


@dataclass(slots=True)
class BlockTable:
    """Which block holds which positions of one sequence: position p lies in blocks[p // block_size].

    Args:
        num_sent: the first entries, which the runner knows already.
    """

    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self) -> list[int]:
        """Empty the table and return what it held."""
        blocks, self.blocks, self.num_sent = self.blocks, [], 0
        return blocks


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)
