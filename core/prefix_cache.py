"""Which blocks hold the start of a token sequence, so that nobody computes it again. Thread: engine.

A full block is published under a key: the serial of the publication before it in its chain (the domain, for a chain's
first block) and its own token ids. Looking a key up compares all of it, so a hit is never a guess; Python hashes it
with a secret of the process, so no client can build keys that collide. A serial is never used twice: once a block is
forgotten, or evicted and not kept on the host, nothing that was computed after it can be found through another.

Whoever holds a published block holds those before it in the chain, and lets go of its last block first. So of what
nobody holds, the least recently used leaf is the next to be evicted, and never a parent before its children.

A block is published when the row that fills it is planned: rows after it in the plan may read it already, because a
step writes all its keys and values before any are read. If that row fails, the scheduler has the block forgotten, and
those who shared it compute it themselves.
"""

import struct
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from core.blocks import BlockKey, BlockPool, BlockTable, Domain
from core.host_blocks import HostBlocks
from core.plan import BlockLabel

_UNPUBLISHED = 0  # serials are larger


class PrefixCache:
    """The published blocks of a pool, which it makes. What it does costs O(1) for each block that it looks at.

    Args:
        is_enabled: False: nothing is published, so nothing is found.
        host: where blocks go that are evicted.
    """

    def __init__(
        self, num_blocks: int, block_size: int, is_enabled: bool = True, host: HostBlocks | None = None
    ) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._on_evict)
        self._host = HostBlocks(0) if host is None else host
        self._block_size = block_size
        self.is_enabled = is_enabled
        self._content = struct.Struct(f"{block_size}i").pack
        self._blocks: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks  # by block
        self._serials = [_UNPUBLISHED] * num_blocks  # by block
        self._last_serial = max(_UNPUBLISHED, self._host.last_serial)

    def __len__(self) -> int:
        """How many blocks can be found."""
        return len(self._blocks)

    def num_published(self, blocks: Iterable[int]) -> int:
        """How many of these can be found."""
        return sum(self._keys[block] is not None for block in blocks)

    def extend(self, table: BlockTable, token_ids: Seq[int]) -> int:
        """Let a table go on, from its last published block, with as many blocks as others have published.

        The last token is left to compute, for what follows from it is not kept. Blocks of the table's own that the
        found ones replace are let go of.

        Returns:
            How many tokens the table's published blocks hold now.
        """
        size = self._block_size
        limit = (len(token_ids) - 1) // size  # blocks
        while table.num_published < limit:
            position = table.num_published
            block = self._blocks.get(self._key(table, token_ids))
            if block is None:
                break
            self.pool.share((block,))
            if position < len(table):
                self.pool.release((table.replace(position, block),))
            else:
                table.blocks.append(block)
            table.num_published += 1
        return table.num_published * size

    def publish(self, table: BlockTable, token_ids: Seq[int], num_tokens: int) -> bool:
        """Let others find the table's blocks that are full with its first num_tokens. Returns whether they can now.

        It stops at a block whose content another one is published for: extend() puts that one in its place. (And at
        one that comes after a forgotten one: nobody can find it.)
        """
        if not self.is_enabled:
            return True
        while table.num_published < num_tokens // self._block_size:
            if table.num_published and self._serials[table.blocks[table.num_published - 1]] == _UNPUBLISHED:
                return False
            key = self._key(table, token_ids)
            if key in self._blocks:
                return False
            serial = self._host.serial_of(key)
            if serial is None:
                serial = self._last_serial = self._last_serial + 1
            self._publish(table, table.blocks[table.num_published], key, serial)
        return True

    def find_on_host(self, table: BlockTable, token_ids: Seq[int]) -> list[BlockKey]:
        """Keys of the chain that lies on the host and goes on where extend() has stopped."""
        keys: list[BlockKey] = []
        if not self._host.num_used:
            return keys
        position = table.num_published
        parent = self._parent(table)
        while position < (len(token_ids) - 1) // self._block_size:
            key = parent, self._content_at(position, token_ids)
            serial = self._host.serial_of(key)
            if serial is None or key in self._blocks or not self._host.has(key):
                break
            keys.append(key)
            parent = serial
            position += 1
        return keys

    def restore(self, table: BlockTable, keys: list[BlockKey]) -> None:
        """Let a table that has nothing but published blocks go on with these, in new blocks, of which enough are free.

        Args:
            keys: as find_on_host() has found them.
        """
        self._host.pin(keys)
        for key in keys:
            (block,) = self.allocate(1)
            table.blocks.append(block)
            self._publish(table, block, key, self._host.restore(block, key))

    def allocate(self, count: int) -> list[int]:
        """Take new blocks from the pool, as it does."""
        blocks = self.pool.allocate(count)
        self._host.reuse(blocks)
        return blocks

    def take_for_shared(self, block: int) -> int:
        """As the pool does."""
        taken = self.pool.take_for_shared(block)
        self._host.reuse((taken,))
        return taken

    def offload_kept(self) -> None:
        """Copy out what lies in blocks which nobody holds, last used first served: no more steps come.

        What was found on the device has not been looked up on the host meanwhile. So where it lies there too it is
        taken for used before anything is copied, or it would be the first to make room.
        """
        kept = self.pool.kept()[-self._host.num_slots :] if self._host.num_slots else []
        there = [block for block in kept if (key := self._keys[block]) is not None and self._host.has(key)]
        for block in (*there, *kept):
            self._offload(block)

    def forget(self, blocks: Seq[int]) -> None:
        """Let nobody find these blocks any more, nor what was computed after them."""
        self._host.forget(key for block in blocks if (key := self._keys[block]) is not None)
        for block in blocks:
            self._unpublish(block)
            self.pool.discard(block)

    def clear(self) -> None:
        """Forget all blocks. Those who hold them keep them."""
        self._host.clear()
        self.forget(list(self._blocks.values()))

    def _key(self, table: BlockTable, token_ids: Seq[int]) -> BlockKey:
        """Of the first block that the table has not published."""
        return self._parent(table), self._content_at(table.num_published, token_ids)

    def _parent(self, table: BlockTable) -> int | Domain:
        position = table.num_published
        return self._serials[table.blocks[position - 1]] if position else table.domain

    def _content_at(self, position: int, token_ids: Seq[int]) -> bytes:
        start = position * self._block_size
        return self._content(*token_ids[start : start + self._block_size])

    def _publish(self, table: BlockTable, block: int, key: BlockKey, serial: int) -> None:
        self._blocks[key], self._keys[block], self._serials[block] = block, key, serial
        self.pool.keep(block)
        table.num_published += 1

    def _offload(self, block: int) -> None:
        key = self._keys[block]
        if key is not None and self._host.num_slots:
            self._host.offload(block, BlockLabel(self._serials[block], key))

    def _on_evict(self, block: int) -> None:
        self._offload(block)
        self._unpublish(block)

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks[key]
            self._keys[block] = None
            self._serials[block] = _UNPUBLISHED
