"""KV blocks: who holds which, how often, and which is reused next. Thread: engine.

A block is a number, its content lies with the runner. A block that nobody holds is either empty, its content worth
nothing, or kept, its content worth finding again. Empty ones are handed out first, then kept ones, those that were
let go of longest ago first.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

Domain = tuple[str, str]  # whose prompts may share blocks (a tenant, or ""), and the request's own salt
# Of a full block: the serial of the block before it (the domain, for a chain's first) and its own token ids as int32.
BlockKey = tuple[int | Domain, bytes]


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Nothing was taken."""

    def __init__(self, num_asked: int, num_free: int) -> None:
        super().__init__(f"{num_asked} KV blocks asked for, {num_free} free")
        self.num_asked = num_asked
        self.num_free = num_free


class BlockPool:
    """All blocks with their reference counts. Every operation is O(1) per block.

    Args:
        on_evict: told of each block that is worth keeping and handed out all the same, before it is.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0  # since the start
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._is_worth_keeping = [False] * num_blocks
        self._empty = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()  # next to be evicted first

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._empty) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Of the free ones, those whose content is kept."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def kept(self) -> list[int]:
        """The free blocks whose content is kept, next to be evicted first."""
        return list(self._kept)

    def is_shared(self, block: int) -> bool:
        """Whether writing to it would be seen by another holder."""
        return self._references[block] > 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        blocks = [self._empty.popleft() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Seq[int]) -> None:
        """Add one reference to each of these blocks, which are used or kept."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._kept, f"block {block} is empty and cannot be shared"
                del self._kept[block]
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
                self._put_back(block)

    def keep(self, block: int) -> None:
        """This block, which is used, is worth keeping once nobody holds it."""
        self._is_worth_keeping[block] = True

    def discard(self, block: int) -> None:
        """This block is worth nothing any more to those who do not hold it."""
        self._is_worth_keeping[block] = False
        if block in self._kept:
            del self._kept[block]
            self._empty.append(block)

    def _put_back(self, block: int) -> None:
        if self._is_worth_keeping[block]:
            self._kept[block] = None
        else:
            self._empty.append(block)

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        self._is_worth_keeping[block] = False
        self.num_evictions += 1
        self._on_evict(block)
        return block


@dataclass(slots=True)
class BlockTable:
    """Which block holds which positions of one sequence: position p lies in blocks[p // block_size].

    Args:
        domain: whose blocks these may be.
        num_sent: the first entries, which the runner knows already.
        num_published: the first entries, which other sequences may find in the prefix cache.
    """

    domain: Domain = ("", "")
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0
    num_published: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def replace(self, position: int, block: int) -> int:
        """Put another block at this index; the runner is told with the next row. Returns what was there."""
        replaced, self.blocks[position] = self.blocks[position], block
        self.num_sent = min(self.num_sent, position)
        return replaced

    def take(self) -> list[int]:
        """Empty the table and return what it held."""
        blocks, self.blocks, self.num_sent, self.num_published = self.blocks, [], 0, 0
        return blocks


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)
