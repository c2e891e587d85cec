"""KV blocks: who holds which, which hold the start of a prompt, and which were copied to the host. Thread: engine.

A block is a number, its content lies with the runner. A block that nobody holds is either empty, its content worth
nothing, or kept, its content worth finding again. Empty ones are handed out first, then kept ones, those that were
let go of longest ago first.

A full block is published under a key: the serial of the publication before it in its chain (the domain, for a chain's
first block) and its own token ids. Looking a key up compares all of it, so a hit is never a guess; Python hashes it
with a secret of the process, so no client can build keys that collide. A serial is never used twice: once a block is
forgotten, or evicted and not kept on the host, nothing that was computed after it can be found through another.

Whoever holds a published block holds those before it in the chain, and lets go of its last block first. So of what
nobody holds, the least recently used leaf is the next to be evicted, and never a parent before its children.

A block is published when the row that fills it is planned: rows after it in the plan may read it already, because a
step writes all its keys and values before any are read. If that row fails, the scheduler has the block forgotten, and
those who shared it compute it themselves.

Of blocks on the host only the books are kept here; the copies are the runner's, in the order of the plans that carry
them. A slot holds one block under the key and the serial that it had in the prefix cache: a chain may lie partly on the
device and partly there, and a hit compares token ids and domain wherever it lies. What a plan copies out can be found
once that plan was applied, and what it copies back keeps its slot until then. So a step that fails loses copies, but
nobody finds anything that was not copied.
"""

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

ONLINE_RATE = 0.1  # of the last copies in the measured time of one
_UNPUBLISHED = 0  # serials are larger

Domain = tuple[str, str]  # whose prompts may share blocks (a tenant, or ""), and the request's own salt
# Of a full block: the serial of the block before it (the domain, for a chain's first) and its own token ids as int32.
BlockKey = tuple[int | Domain, bytes]


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """What a full block holds, exactly: two blocks with the same label hold the same.

    Args:
        serial: names the block in the keys of those that follow it. Never used for another content.
    """

    serial: int
    key: BlockKey


@dataclass(slots=True)
class BlockCopies:
    """Whole blocks, between the device and slots of host memory. All that goes out is read before anything is written.

    Args:
        offloads: slot -> block that is copied out to it.
        labels: by slot, of what is copied out.
        restores: block -> slot that is copied back to it.
        used: slots that were copied to or asked for, least recently used first: a set in order.
    """

    offloads: dict[int, int] = field(default_factory=dict)
    labels: dict[int, BlockLabel] = field(default_factory=dict)
    restores: dict[int, int] = field(default_factory=dict)
    used: dict[int, None] = field(default_factory=dict)

    @property
    def num_copies(self) -> int:
        return len(self.offloads) + len(self.restores)

    @property
    def is_empty(self) -> bool:
        return not (self.offloads or self.restores or self.used)


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


class HostBlocks:
    """The slots of host memory. The least recently used one is reused first.

    Args:
        num_slots: of one block each; 0: nothing is ever copied.
        copy_s: that a block takes, either way, as measured at start.
        stored: slots that an earlier process has filled, least recently used first.
    """

    def __init__(self, num_slots: int, copy_s: float = 0.0, stored: Iterable[tuple[int, BlockLabel]] = ()) -> None:
        self.num_slots = num_slots
        self.copy_s = copy_s
        self.num_offloaded = self.num_restored = self.num_recomputed = 0  # blocks, since the start
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # can be found; least recently used first
        self._coming: dict[BlockKey, int] = {}  # slots that can be found once a plan was applied
        self._serials = [0] * num_slots  # by slot
        self._pinned: set[int] = set()  # slots that are copied back, until that plan was applied
        self._dropped: list[int] = []  # that were forgotten, until somebody asks
        self._leaving: set[int] = set()  # slots that are free once a plan was applied
        self._next = BlockCopies()
        self._in_flight: deque[BlockCopies] = deque()  # of each plan, oldest first
        for slot, label in stored:
            self._slots[label.key], self._serials[slot] = slot, label.serial
        self.last_serial = max(self._serials, default=0)
        filled = set(self._slots.values())
        self._free = deque(slot for slot in range(num_slots) if slot not in filled)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def planned_s(self) -> float:
        """What the copies of the next plan will take."""
        return self.copy_s * self._next.num_copies

    def has(self, key: BlockKey) -> bool:
        return key in self._slots

    def serial_of(self, key: BlockKey) -> int | None:
        """Of a block that lies here or comes: whoever publishes the same again goes on with it."""
        slot = self._slots.get(key, self._coming.get(key))
        return None if slot is None else self._serials[slot]

    def offload(self, block: int, label: BlockLabel) -> None:
        """Copy a block out before the next plan writes to it, unless it lies here already, or no slot can be had."""
        if label.key in self._slots:
            self._use(label.key)
        elif label.key not in self._coming and (slot := self._take_slot()) is not None:
            self._coming[label.key], self._serials[slot] = slot, label.serial
            self._next.offloads[slot] = block
            self._next.labels[slot] = label
            self._note_use(slot)

    def restore(self, block: int, key: BlockKey) -> int:
        """Copy what lies here to a block, before the next plan reads it. Returns its serial."""
        slot = self._slots[key]
        self._next.restores[block] = slot
        return self._serials[slot]

    def pin(self, keys: list[BlockKey]) -> None:
        """These, a chain that lies here, are about to be restored. Of them the leaf is reused first."""
        for key in reversed(keys):
            self._use(key)
            self._pinned.add(self._slots[key])

    def reuse(self, blocks: Iterable[int]) -> None:
        """Blocks are given away for something else: what would have been copied to them is not."""
        if self._next.restores:
            for block in blocks:
                self._next.restores.pop(block, None)

    def is_cheaper(self, num_blocks: int, recompute_s: float) -> bool:
        """Whether to copy so many blocks that lie here back, rather than compute them; counted if not."""
        if num_blocks * self.copy_s <= recompute_s:
            return True
        self.num_recomputed += num_blocks
        return False

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Let nobody find these any more."""
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is None:
                slot = self._coming.pop(key, None)
            if slot is not None:
                if self._next.offloads.pop(slot, None) is not None:
                    del self._next.labels[slot]
                self._next.used.pop(slot, None)
                self._dropped.append(slot)
                self._let_go(slot)

    def clear(self) -> None:
        self.forget([*self._slots, *self._coming])

    def take_dropped(self) -> list[int]:
        """The slots whose content was forgotten since this was asked last. Before what is copied to them next."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_copies(self) -> BlockCopies | None:
        """What the plan that is made now has to copy."""
        copies, self._next = self._next, BlockCopies()
        self._in_flight.append(copies)
        return None if copies.is_empty else copies

    def on_restart(self) -> BlockCopies | None:
        """The last step failed: whether it had copied is not known. Returns what each part of it has to copy.

        What was to be copied out may be overwritten by now; it is lost. Copying back twice does no harm.
        """
        failed = self._in_flight[-1]
        self._lose_offloads(failed)
        return BlockCopies(restores=failed.restores) if failed.restores else None

    def on_lost(self) -> None:
        """The oldest plan will not come back: whether it had copied is not known, and it is not computed again."""
        self._lose_offloads(self._in_flight[0])
        self.on_applied(is_computed=False, copy_s=0.0)

    def _lose_offloads(self, failed: BlockCopies) -> None:
        for slot, label in failed.labels.items():
            if self._coming.get(label.key) == slot:
                del self._coming[label.key]
                self._leaving.add(slot)
                self._dropped.append(slot)  # what a store has of the block before it there
        failed.offloads, failed.labels = {}, {}

    def on_applied(self, is_computed: bool, copy_s: float) -> None:
        """The oldest plan has come back.

        Args:
            is_computed: some of it did not fail. If all failed, what it was to copy back is left to the next.
            copy_s: that its copies took; 0: not known.
        """
        done = self._in_flight.popleft()
        if copy_s > 0 and done.num_copies:
            self.copy_s += ONLINE_RATE * (copy_s / done.num_copies - self.copy_s)
        for slot, label in done.labels.items():
            if self._coming.get(label.key) == slot:
                self._slots[label.key] = self._coming.pop(label.key)
        self.num_offloaded += len(done.offloads)
        if is_computed:
            self.num_restored += len(done.restores)
        else:
            self._next.restores = done.restores | self._next.restores
        if self._pinned or self._leaving:
            self._pinned = {slot for copies in (self._next, *self._in_flight) for slot in copies.restores.values()}
            leaving, self._leaving = self._leaving, set()
            for slot in leaving:
                self._let_go(slot)

    def _use(self, key: BlockKey) -> None:
        self._slots.move_to_end(key)
        self._note_use(self._slots[key])

    def _note_use(self, slot: int) -> None:
        self._next.used.pop(slot, None)
        self._next.used[slot] = None

    def _let_go(self, slot: int) -> None:
        """Of a slot that nobody can find: it is free, unless a copy from or to it is on its way."""
        if slot in self._pinned or any(slot in copies.offloads for copies in self._in_flight):
            self._leaving.add(slot)
        else:
            self._free.append(slot)

    def _take_slot(self) -> int | None:
        """A free one, else the least recently used; None where all are on their way."""
        if self._free:
            return self._free.popleft()
        for key, slot in self._slots.items():
            if slot not in self._pinned:
                del self._slots[key]
                return slot
        return None


class BlockPool:
    """All blocks: their holders, which of them can be found by what they hold, and what is copied to and from the host.

    Every operation is O(1) for each block that it looks at.

    Args:
        has_prefix_cache: False: nothing is published, so nothing is found.
        host: where blocks go that are evicted.
    """

    def __init__(
        self, num_blocks: int, block_size: int, has_prefix_cache: bool = True, host: HostBlocks | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0  # since the start
        self.has_prefix_cache = has_prefix_cache
        self._host = HostBlocks(0) if host is None else host
        self._block_size = block_size
        self._references = [0] * num_blocks
        self._empty = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()  # published, held by nobody; next to be evicted first
        self._content = struct.Struct(f"{block_size}i").pack
        self._blocks: dict[BlockKey, int] = {}  # the published ones
        self._keys: list[BlockKey | None] = [None] * num_blocks  # by block
        self._serials = [_UNPUBLISHED] * num_blocks  # by block
        self._last_serial = max(_UNPUBLISHED, self._host.last_serial)

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

    @property
    def num_published(self) -> int:
        """How many can be found."""
        return len(self._blocks)

    def is_published(self, block: int) -> bool:
        return self._keys[block] is not None

    def is_shared(self, block: int) -> bool:
        """Whether writing to it would be seen by another holder."""
        return self._references[block] > 1

    # Who holds which

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. As many must be free."""
        assert count <= self.num_free, f"{count} KV blocks asked for, {self.num_free} free"
        blocks = [self._empty.popleft() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self._host.reuse(blocks)
        return blocks

    def share(self, blocks: Seq[int]) -> None:
        """Add one reference to each of these blocks, which are used or kept."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._kept, f"block {block} is empty and cannot be shared"
                del self._kept[block]
            self._references[block] += 1

    def take_for_shared(self, block: int) -> int:
        """Take a free block, with one reference, in place of one reference to a shared block, which stays used."""
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
                if self._keys[block] is None:
                    self._empty.append(block)
                else:
                    self._kept[block] = None

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        self.num_evictions += 1
        self._offload(block)
        self._unpublish(block)
        return block

    # Which can be found

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
            self.share((block,))
            if position < len(table):
                self.release((table.replace(position, block),))
            else:
                table.blocks.append(block)
            table.num_published += 1
        return table.num_published * size

    def publish(self, table: BlockTable, token_ids: Seq[int], num_tokens: int) -> bool:
        """Let others find the table's blocks that are full with its first num_tokens. Returns whether they can now.

        It stops at a block whose content another one is published for: extend() puts that one in its place. (And at
        one that comes after a forgotten one: nobody can find it.)
        """
        if not self.has_prefix_cache:
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

    def forget(self, blocks: Seq[int]) -> None:
        """Let nobody find these blocks any more, nor what was computed after them. Those who hold them keep them."""
        self._host.forget(key for block in blocks if (key := self._keys[block]) is not None)
        for block in blocks:
            self._unpublish(block)
            if block in self._kept:
                del self._kept[block]
                self._empty.append(block)

    def clear(self) -> None:
        """Forget all blocks."""
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
        table.num_published += 1

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks[key]
            self._keys[block] = None
            self._serials[block] = _UNPUBLISHED

    # To the host and back

    def find_on_host(self, table: BlockTable, token_ids: Seq[int]) -> list[BlockKey]:
        """Keys of the chain that lies on the host and goes on where extend() has stopped."""
        keys: list[BlockKey] = []
        if not self._host.num_used:
            return keys
        parent = self._parent(table)
        for position in range(table.num_published, (len(token_ids) - 1) // self._block_size):
            key = parent, self._content_at(position, token_ids)
            serial = self._host.serial_of(key)
            if serial is None or key in self._blocks or not self._host.has(key):
                break
            keys.append(key)
            parent = serial
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

    def offload_kept(self) -> None:
        """Copy out what lies in blocks which nobody holds, last used first served: no more steps come.

        What was found on the device has not been looked up on the host meanwhile. So where it lies there too it is
        taken for used before anything is copied, or it would be the first to make room.
        """
        kept = list(self._kept)[-self._host.num_slots :] if self._host.num_slots else []
        there = [block for block in kept if (key := self._keys[block]) is not None and self._host.has(key)]
        for block in (*there, *kept):
            self._offload(block)

    def _offload(self, block: int) -> None:
        key = self._keys[block]
        if key is not None and self._host.num_slots:
            self._host.offload(block, BlockLabel(self._serials[block], key))
