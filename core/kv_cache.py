"""Owns the KV blocks: who holds which, which are in the prefix cache, which were copied to the host.

Thread: engine. A block is a number; the runner has its content. A block that no sequence holds is either empty (without
useful content) or cached (a lookup may find it). Empty blocks are allocated first, then the cached one that was
released longest ago.

A full block is published under a key: the serial of the block before it in its chain (the domain, for a chain's first
block) and its own token ids. A lookup compares the whole key, so a hit is always exact, and Python's hash has a secret
per process, so clients cannot construct colliding keys. A serial is never reused: once a block is forgotten, or evicted
without a host copy, no other block can lead to those computed after it.

A holder of a published block also holds those before it in the chain, and releases its last block first. So the least
recently used leaf is evicted next, and never a parent before its children. Only if all layers have sliding windows, a
sequence releases its first blocks while it runs; once one is evicted, the blocks after it are not found. Window blocks
(below) would do this, too, but blocks would then be without bytes, and copies and ranks need one table.

A block is published when the row that fills it is planned: later rows of the same plan may read it, because a step
writes all its keys and values before it reads any. If the row fails, the scheduler removes the block from the cache,
and the sequences that share it compute it themselves.

With recurrent layers, some published blocks have a stored state: that of these layers after the block's last token. A
sequence can continue only from there, so a lookup finds no blocks after the last one with a state.

If only some layers have sliding windows, these have blocks of their own, fewer, each attached to the block of the same
tokens. A sequence holds those that its next tokens see; a lookup ends where all that the next token sees are attached.

For host copies, this file only does the accounting; the runner copies, in the order of the plans. A host slot has one
block with its key and serial from the device, so a chain may be partly here and partly there. A copy can be found once
its plan was applied, and a slot that a plan copies from keeps its content until then: a failed step loses copies, but
no lookup finds a block that was not copied.
"""

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

ONLINE_RATE = 0.1  # weight of the newest copies in the measured time of one
_UNPUBLISHED = 0  # serials are larger

Domain = tuple[str, str]  # who may share blocks (a tenant, or ""), and the request's own salt
# Of a full block: the serial of the block before it (the domain, for a chain's first) and its token ids as int32
BlockKey = tuple[int | Domain, bytes]


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """The exact content of a full block: blocks with equal labels have equal content.

    Args:
        serial: represents the block in the keys of the next ones. Never reused for other content.
    """

    serial: int
    key: BlockKey


class Root(NamedTuple):
    """Where a chain of published blocks begins: its first block's serial, and who may share it."""

    serial: int
    domain: str


class BlockChange(NamedTuple):
    """A change of the prefix cache on the device: a block is found from now on, or no longer.

    Args:
        serial: of the block; 0: all blocks are removed.
        parent: the block before it; None: it is the first of its chain.
        content: its token ids as int32; empty: it is removed.
        domain: who may share it.
    """

    serial: int
    parent: int | None = None
    content: bytes = b""
    domain: Domain = ("", "")


@dataclass(slots=True)
class BlockCopies:
    """A plan's copies of whole blocks between the device and host slots. All offloads are read before any write.

    Args:
        offloads: slot -> block to copy out to it.
        labels: slot -> content of the block copied out.
        restores: block -> slot to copy back to it.
        used: an ordered set of the slots copied to or looked up, least recently used first.
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
    """The blocks of one sequence: position p lies in blocks[p // block_size].

    Args:
        domain: which blocks it may share.
        num_dropped: leading entries that were released: they are BlockPool.no_block.
        dropped: the dropped blocks that others may still find, with their serials.
        num_sent: leading entries that the runner knows.
        num_published: leading entries that other sequences can find.
        num_matched: entries that the last lookup would have found if there were a stored state after them.
        windows: of each block its window block, if the sequence holds it, else WindowBlocks.no_block; empty: all layers
            have one table.
        num_unseen: leading entries without window blocks.
        num_seen: window blocks that it holds.
    """

    domain: Domain = ("", "")
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0
    num_published: int = 0
    num_matched: int = 0
    num_dropped: int = 0
    dropped: list[tuple[int, int]] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    num_unseen: int = 0
    num_seen: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def held(self) -> list[int]:
        """The blocks that it has a reference to."""
        return self.blocks[self.num_dropped :] if self.num_dropped else self.blocks

    @property
    def num_held(self) -> int:
        return len(self.blocks) - self.num_dropped

    def replace(self, position: int, block: int) -> int:
        """Put another block at this index, to be sent with the next row. Returns the old one."""
        replaced, self.blocks[position] = self.blocks[position], block
        self.num_sent = min(self.num_sent, position)
        return replaced

    def take(self) -> list[int]:
        """Empty the table and return its blocks."""
        held, self.blocks, self.dropped, self.windows = self.held, [], [], []
        self.num_sent = self.num_published = self.num_dropped = self.num_unseen = self.num_seen = 0
        return held


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks for so many tokens."""
    return -(-num_tokens // block_size)


def num_seen_blocks(window: int, block_size: int) -> int:
    """Window blocks that one sequence holds between steps, at most: one more than are seen, for children."""
    return num_blocks_for(window, block_size) + 2


def least_window_blocks(window: int, max_batch_tokens: int, block_size: int) -> int:
    """With which any sequence can run alone."""
    return num_seen_blocks(window, block_size) + num_blocks_for(max_batch_tokens, block_size) + 1


class WindowBlocks:
    """Blocks of the layers with a window, each attached to the block of the same tokens (module docstring).

    One that no sequence holds stays attached while its block is published, until it is the least recently used. Every
    operation is O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.no_block = num_blocks  # no_block: the placeholder in tables; the runner has zeros there
        self._free = list(range(num_blocks))
        self._attached: dict[int, int] = {}  # by block
        self._num_holders: dict[int, int] = {}  # by block
        self._kept: OrderedDict[int, None] = OrderedDict()  # blocks whose window block is held by none, oldest first

    @property
    def num_free(self) -> int:
        """Those that can be attached, empty or cached."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def has(self, block: int) -> bool:
        return block in self._attached

    def is_shared(self, block: int) -> bool:
        return self._num_holders[block] > 1

    def hold(self, block: int) -> int:
        """Add a holder of the block's window block, attached now if there is none. Returns it."""
        if block not in self._attached:
            if not self._free:
                oldest, _ = self._kept.popitem(last=False)
                self._detach(oldest)
            self._attached[block], self._num_holders[block] = self._free.pop(), 0
        self._kept.pop(block, None)
        self._num_holders[block] += 1
        return self._attached[block]

    def release(self, block: int, is_published: bool) -> None:
        """One holder less."""
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            if is_published:
                self._kept[block] = None
            else:
                self._detach(block)

    def move(self, source: int, target: int) -> None:
        """Attach what one sequence holds to another block of equal content, which has none."""
        assert target not in self._attached, f"block {target} has a window block"
        assert self._num_holders[source] == 1, f"others hold the window block of {source}"
        self._attached[target], self._num_holders[target] = self._attached.pop(source), self._num_holders.pop(source)

    def drop(self, block: int) -> None:
        """The block cannot be found any more."""
        if block in self._kept:
            del self._kept[block]
            self._detach(block)

    def _detach(self, block: int) -> None:
        self._free.append(self._attached.pop(block))
        del self._num_holders[block]


class KeptStates:
    """Stored recurrent states, each of a published block; a new one replaces the least recently used.

    Args:
        num_places: 0: none are stored.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places))
        self._blocks: OrderedDict[int, int] = OrderedDict()  # place -> its block, least recently used first
        self._places: dict[int, int] = {}  # by block
        self._num_readers = [0] * num_places
        self._dropped: set[int] = set()  # places without a block that are still to be read

    @property
    def num_used(self) -> int:
        return self.num_places - len(self._free)

    def has(self, block: int) -> bool:
        return block in self._places

    def take(self) -> int | None:
        """A place to write to in the current plan; None: the plan reads all of them."""
        if self._free:
            return self._free.pop()
        for place, block in self._blocks.items():
            if not self._num_readers[place]:
                del self._blocks[place], self._places[block]
                return place
        return None

    def give_back(self, place: int) -> None:
        """Free a taken place that was not written, or whose state cannot be found."""
        self._free.append(place)

    def keep(self, place: int, block: int) -> None:
        """Register a taken place as the state at the end of this published block, if it has none yet."""
        if block in self._places:
            self.give_back(place)
        else:
            self._blocks[place], self._places[block] = block, place

    def read(self, block: int) -> int:
        """Protect the state of a block until done(), because a row will start from it."""
        place = self._places[block]
        self._blocks.move_to_end(place)
        self._num_readers[place] += 1
        return place

    def done(self, place: int) -> None:
        """The plan with the row was made, or will not be. Later plans may write to the place."""
        self._num_readers[place] -= 1
        if not self._num_readers[place] and place in self._dropped:
            self._dropped.remove(place)
            self._free.append(place)

    def drop(self, block: int) -> None:
        """The block cannot be found any more."""
        place = self._places.pop(block, None)
        if place is not None:
            del self._blocks[place]
            if self._num_readers[place]:
                self._dropped.add(place)
            else:
                self._free.append(place)


class HostBlocks:
    """The host slots, reused least recently used first.

    Args:
        num_slots: one block each; 0: nothing is copied.
        copy_s: seconds per block, either way, as measured at start.
        stored: slots that an earlier process filled, least recently used first.
    """

    def __init__(self, num_slots: int, copy_s: float = 0.0, stored: Iterable[tuple[int, BlockLabel]] = ()) -> None:
        self.num_slots = num_slots
        self.copy_s = copy_s
        self.num_offloaded = self.num_restored = self.num_recomputed = 0  # blocks, since the start
        self._labels: list[BlockLabel | None] = [None] * num_slots  # of slots that are or will be findable
        self._roots: list[Root | None] = [None] * num_slots  # of these; None: an earlier process filled it
        self._num_copies = [0] * num_slots  # by slot: from or to it, planned or in flight
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # findable, least recently used first
        self._coming: dict[BlockKey, int] = {}  # findable once a plan was applied
        self._dropped: list[int] = []  # forgotten since take_dropped()
        self._next = BlockCopies()
        self._in_flight: deque[BlockCopies] = deque()  # of each plan, oldest first
        for slot, label in stored:
            self._slots[label.key], self._labels[slot] = slot, label
        self.last_serial = max((label.serial for label in self._labels if label is not None), default=0)
        self._free = deque(slot for slot in range(num_slots) if self._labels[slot] is None)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def planned_s(self) -> float:
        """Estimated duration of the next plan's copies."""
        return self.copy_s * self._next.num_copies

    def has(self, key: BlockKey) -> bool:
        return key in self._slots

    def serial_of(self, key: BlockKey) -> int | None:
        """The serial of a block that is here or being copied: publishing the same content again reuses it."""
        slot = self._slots.get(key, self._coming.get(key))
        label = None if slot is None else self._labels[slot]
        return None if label is None else label.serial

    def roots(self) -> list[Root | None]:
        """Serials of the blocks that can be found, least recently used first."""
        return [self._roots[slot] for slot in self._slots.values()]

    def offload(self, block: int, label: BlockLabel, root: Root | None = None) -> None:
        """Copy a block out before the next plan writes to it, unless it is here already or no slot is available."""
        if label.key in self._slots:
            self._use(label.key)
        elif label.key not in self._coming and (slot := self._take_slot()) is not None:
            self._coming[label.key], self._labels[slot], self._roots[slot] = slot, label, root
            self._num_copies[slot] += 1
            self._next.offloads[slot] = block
            self._next.labels[slot] = label
            self._note_use(slot)

    def pin(self, keys: list[BlockKey]) -> None:
        """Protect a chain of slots that restore() is about to copy from. Its leaf will be reused first."""
        for key in reversed(keys):
            self._use(key)
            self._num_copies[self._slots[key]] += 1

    def restore(self, block: int, key: BlockKey) -> int:
        """Copy a pinned slot back to a block before the next plan reads it. Returns its serial."""
        slot = self._next.restores[block] = self._slots[key]
        label = self._labels[slot]
        assert label is not None, "a pinned slot is findable"
        return label.serial

    def reuse(self, blocks: Iterable[int]) -> None:
        """Cancel planned copies back to blocks that are now used for something else."""
        if self._next.restores:
            for block in blocks:
                if (slot := self._next.restores.pop(block, None)) is not None:
                    self._finish_copy(slot)

    def is_cheaper(self, num_blocks: int, recompute_s: float) -> bool:
        """Whether copying so many blocks back takes no longer than computing them; counted if it does."""
        if num_blocks * self.copy_s <= recompute_s:
            return True
        self.num_recomputed += num_blocks
        return False

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Remove these from the cache."""
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is None:
                slot = self._coming.pop(key, None)
            if slot is None:
                continue
            self._labels[slot] = None
            self._next.used.pop(slot, None)
            self._dropped.append(slot)
            if self._next.offloads.pop(slot, None) is not None:
                del self._next.labels[slot]
                self._finish_copy(slot)
            elif not self._num_copies[slot]:
                self._free.append(slot)

    def clear(self) -> None:
        self.forget([*self._slots, *self._coming])

    def take_dropped(self) -> list[int]:
        """The slots forgotten since the last call. Call it before copying anything to them again."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_copies(self) -> BlockCopies | None:
        """The copies of the current plan."""
        copies, self._next = self._next, BlockCopies()
        self._in_flight.append(copies)
        return None if copies.is_empty else copies

    def on_restart(self) -> BlockCopies | None:
        """The last step failed, perhaps before copying. Returns the copies for each part of it that is computed again.

        Its offloads are lost, because their blocks may be overwritten by now. Copying back twice does no harm.
        """
        failed = self._in_flight[-1]
        self._lose_offloads(failed)
        return BlockCopies(restores=failed.restores) if failed.restores else None

    def on_lost(self) -> None:
        """The oldest plan will not come back, and may not have copied anything."""
        self._lose_offloads(self._in_flight[0])
        self.on_applied(is_computed=False, copy_s=0.0)

    def on_applied(self, is_computed: bool, copy_s: float) -> None:
        """The oldest plan has come back.

        Args:
            is_computed: some row succeeded. Otherwise the next plan copies back instead.
            copy_s: duration of its copies; 0: unknown.
        """
        done = self._in_flight.popleft()
        if not (done.offloads or done.restores):
            return
        if copy_s > 0:
            self.copy_s += ONLINE_RATE * (copy_s / done.num_copies - self.copy_s)
        for slot, label in done.labels.items():
            if self._coming.get(label.key) == slot:
                self._slots[label.key] = self._coming.pop(label.key)
        self.num_offloaded += len(done.labels)
        for slot in done.offloads:
            self._finish_copy(slot)
        if is_computed:
            self.num_restored += len(done.restores)
        for block, slot in done.restores.items():
            if is_computed or block in self._next.restores:
                self._finish_copy(slot)
            else:
                self._next.restores[block] = slot

    def _lose_offloads(self, failed: BlockCopies) -> None:
        for slot, label in failed.labels.items():
            if self._coming.get(label.key) == slot:
                del self._coming[label.key]
                self._labels[slot] = None
                self._dropped.append(slot)  # a store may still have the slot's previous block
        failed.labels = {}

    def _finish_copy(self, slot: int) -> None:
        """One copy less from or to a slot; after the last one it is free, unless its block can be found."""
        self._num_copies[slot] -= 1
        if not self._num_copies[slot] and self._labels[slot] is None:
            self._free.append(slot)

    def _use(self, key: BlockKey) -> None:
        self._slots.move_to_end(key)
        self._note_use(self._slots[key])

    def _note_use(self, slot: int) -> None:
        self._next.used.pop(slot, None)
        self._next.used[slot] = None

    def _take_slot(self) -> int | None:
        """A free slot, else the least recently used one that nothing is copied from; None: there is none."""
        if self._free:
            return self._free.popleft()
        for key, slot in self._slots.items():
            if not self._num_copies[slot]:
                del self._slots[key]
                return slot
        return None


class BlockPool:
    """All blocks of the device: their holders and their published content. Every operation is O(1) per block.

    Args:
        has_prefix_cache: False: nothing is published, so nothing is found.
        host: where evicted blocks go.
        states: None: the model has no recurrent layers.
        windows: None: all layers have one table.
        window: the longest, in tokens.

    Attributes:
        on_change: called with each change of the prefix cache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        has_prefix_cache: bool = True,
        host: HostBlocks | None = None,
        states: KeptStates | None = None,
        windows: WindowBlocks | None = None,
        window: int = 1,
    ) -> None:
        self.states, self.windows = states, windows
        self._num_seen = num_blocks_for(window - 1, block_size)  # before a border: blocks that the next token sees
        self.num_blocks = num_blocks
        self.num_evictions = 0  # since the start
        self.has_prefix_cache = has_prefix_cache
        self._host = HostBlocks(0) if host is None else host
        self._block_size = block_size
        self._references = [0] * num_blocks
        self._empty = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()  # published and not held, next to be evicted first
        self._content = struct.Struct(f"{block_size}i").pack
        self._blocks: dict[BlockKey, int] = {}  # the published ones
        self._keys: list[BlockKey | None] = [None] * num_blocks  # by block
        self._serials = [_UNPUBLISHED] * num_blocks  # by block
        self._roots: list[Root | None] = [None] * num_blocks  # by block; None: unpublished
        self._last_serial = max(_UNPUBLISHED, self._host.last_serial)
        self.on_change: Callable[[BlockChange], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, empty or cached."""
        return len(self._empty) + len(self._kept)

    @property
    def num_free_pairs(self) -> int:
        """Blocks that can be allocated with their window blocks."""
        num_free = len(self._empty) + len(self._kept)
        return num_free if self.windows is None else min(num_free, self.windows.num_free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_published(self) -> int:
        return len(self._blocks)

    def is_published(self, block: int) -> bool:
        return self._keys[block] is not None

    def is_shared(self, block: int) -> bool:
        """Whether it has other holders, who would see a write to it."""
        return self._references[block] > 1

    def holdings(self) -> tuple[list[int], list[Root | None]]:
        """By block: how many sequences hold it, and its chain if it is published."""
        return self._references, self._roots

    # Who holds which

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, each with one reference. That many must be free."""
        assert count <= self.num_free, f"{count} KV blocks requested, {self.num_free} free"
        blocks = [self._empty.popleft() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self._host.reuse(blocks)
        return blocks

    def grow(self, table: BlockTable, count: int) -> None:
        """Allocate so many blocks at the end of a table, without window blocks."""
        table.blocks += self.allocate(count)
        if self.windows is not None:
            table.windows += [self.windows.no_block] * count

    def share(self, blocks: Seq[int]) -> None:
        """Add one reference to each of these held or cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._kept, f"block {block} is empty and cannot be shared"
                del self._kept[block]
            self._references[block] += 1

    def take_for_shared(self, block: int) -> int:
        """Exchange one reference to a shared block for a free block with one reference."""
        assert self.is_shared(block), f"block {block} has no other holder"
        (taken,) = self.allocate(1)
        self._references[block] -= 1
        return taken

    @property
    def no_block(self) -> int:
        """The placeholder in tables for released blocks; the runner has zeros there."""
        return self.num_blocks

    def drop(self, table: BlockTable, end: int) -> None:
        """Release the first blocks of a table, or their window blocks, up to this entry: no later row reads them."""
        if self.windows is not None:
            self._release_windows(table, range(table.num_unseen, end))
            table.num_unseen = end
            return
        first, table.num_dropped = table.num_dropped, end
        blocks = table.blocks[first:end]
        table.blocks[first:end] = [self.no_block] * len(blocks)
        table.dropped += [(block, self._serials[block]) for block in blocks if self.is_published(block)]
        self.release(blocks)

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

    def empty(self, table: BlockTable, num_kept: int = 0) -> None:
        """Empty a table, and release all that it holds but its first num_kept blocks."""
        self._release_windows(table, range(len(table.windows) - 1, table.num_unseen - 1, -1))
        self.release(table.take()[num_kept:])

    def cut(self, table: BlockTable, end: int) -> None:
        """Release a table's blocks from this entry on."""
        self._release_windows(table, range(len(table.windows) - 1, end - 1, -1))
        self.release(table.blocks[end:])
        del table.blocks[end:], table.windows[end:]
        table.num_sent = min(table.num_sent, end)

    # Window blocks of a table

    def num_windows_needed(self, table: BlockTable, first: int, end: int) -> int:
        """Of these entries, those without a window block; entries past the table's count too."""
        if self.windows is None:
            return 0
        return end - first - sum(one != self.windows.no_block for one in table.windows[first:end])

    def hold_windows(self, table: BlockTable, positions: Iterable[int]) -> None:
        """Hold the window blocks of these entries, attached if they have none yet. So many must be free."""
        windows = self.windows
        if windows is not None:
            table.windows += [windows.no_block] * (len(table.blocks) - len(table.windows))
            for position in positions:
                if table.windows[position] == windows.no_block:
                    table.windows[position] = windows.hold(table.blocks[position])
                    table.num_seen += 1

    def share_windows(self, source: BlockTable, table: BlockTable) -> None:
        """Hold what another table holds, whose first blocks this one has."""
        if self.windows is not None:
            end = len(table)
            table.windows, table.num_unseen = source.windows[:end], min(source.num_unseen, end)
            for position in range(table.num_unseen, end):
                if table.windows[position] != self.windows.no_block:
                    self.windows.hold(table.blocks[position])
                    table.num_seen += 1

    def _release_windows(self, table: BlockTable, positions: Iterable[int]) -> None:
        windows = self.windows
        if windows is not None:
            for position in positions:
                if table.windows[position] != windows.no_block:
                    block = table.blocks[position]
                    windows.release(block, self.is_published(block))
                    table.windows[position] = windows.no_block
                    table.num_seen -= 1

    def replace_shared(self, table: BlockTable, position: int) -> list[tuple[int, int]]:
        """Exchange the shared block at this entry, and its window block, for ones of its own.

        Returns: the copies that it needs, each (source, target) as in StepPlan.
        """
        shared, windows = table.blocks[position], self.windows
        own = table.blocks[position] = self.take_for_shared(shared)
        copies = [(shared, own)]
        if windows is not None and table.windows[position] != windows.no_block:
            target = windows.hold(own)
            copies.append((~table.windows[position], ~target))
            windows.release(shared, self.is_published(shared))
            table.windows[position] = target
        return copies

    def _put_found(self, table: BlockTable, block: int, is_seen: bool) -> None:
        """The published block is the table's next; its window block is held if the table's own was, or if it is seen.

        Of equal window blocks, one stays: that which others may hold.
        """
        position, windows = table.num_published, self.windows
        own = table.blocks[position] if position < len(table) else None
        if own is None:
            table.blocks.append(block)
            if windows is not None:
                table.windows.append(windows.no_block)
        else:
            table.replace(position, block)
        if windows is not None:
            if own is not None and table.windows[position] != windows.no_block:
                if windows.has(block):
                    table.windows[position] = windows.hold(block)
                    windows.release(own, self.is_published(own))
                else:
                    windows.move(own, block)
            elif is_seen and position >= table.num_unseen and windows.has(block):
                self.hold_windows(table, (position,))
        if own is not None:
            self.release((own,))
        table.num_published += 1

    def _num_continued(self, table: BlockTable, found: list[int], num_own: int) -> int:
        """How many of the blocks found it can continue after: all that its next token sees have window blocks.

        Args:
            num_own: blocks that it has computed itself, behind its published ones. Equal ones can replace them.
        """
        windows, first = self.windows, table.num_published
        if windows is None:
            return len(found)
        num_seen, best = 0, 0
        for one in table.windows[max(0, first - self._num_seen) : first]:
            num_seen = num_seen + 1 if one != windows.no_block else 0
        for index, block in enumerate(found):
            position = first + index
            has_own = position < len(table) and table.windows[position] != windows.no_block
            has_found = windows.has(block)
            can_move = has_own and index < num_own and not windows.is_shared(table.blocks[position])
            if has_own and not (has_found or can_move):
                break  # its own is not full yet, or others hold it where it is
            num_seen = num_seen + 1 if has_found or can_move else 0
            if index < num_own or num_seen >= min(position + 1, self._num_seen):
                best = index + 1
        return best

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        self.num_evictions += 1
        self._offload(block)
        self._unpublish(block)
        return block

    # Which can be found

    def forget_table(self, table: BlockTable) -> None:
        """forget() all that a sequence has computed."""
        self.forget([*(block for block, serial in table.dropped if self._serials[block] == serial), *table.held])

    def extend(self, table: BlockTable, token_ids: Seq[int], num_computed: int = 0) -> int:
        """Continue a table, from its last published block, with as many published blocks as match.

        The last token must be computed, because its logits are not cached. The table's own blocks that found ones
        replace are released.

        Args:
            num_computed: of these tokens, which need no stored state.

        Returns:
            The number of tokens in the table's published blocks.
        """
        size, parent, found = self._block_size, self._parent(table), list[int]()
        limit = (len(token_ids) - 1) // size  # blocks
        while table.num_published + len(found) < limit:
            block = self._blocks.get((parent, self._content_at(table.num_published + len(found), token_ids)))
            if block is None:
                break
            found.append(block)
            parent = self._serials[block]
        if self.states is not None:
            table.num_matched = table.num_published + len(found)
            num_own = num_computed // size - table.num_published
            while len(found) > max(num_own, 0) and not self.states.has(found[-1]):
                found.pop()
        if self.windows is not None:
            del found[self._num_continued(table, found, num_computed // size - table.num_published) :]
        first_seen = table.num_published + len(found) - self._num_seen
        for block in found:
            self.share((block,))
            self._put_found(table, block, table.num_published >= first_seen)
        return table.num_published * size

    def publish(self, table: BlockTable, token_ids: Seq[int], num_tokens: int) -> bool:
        """Publish the table's blocks that are full with its first num_tokens. Returns whether all are published now.

        It stops at a block whose content is published already: extend() replaces that block by the published one. It
        also stops after a forgotten block, because no lookup gets past it.
        """
        if not self.has_prefix_cache:
            return True
        while (position := table.num_published) < num_tokens // self._block_size:
            key = self._parent(table), self._content_at(position, token_ids)
            if key[0] == _UNPUBLISHED or key in self._blocks:
                return False
            serial = self._host.serial_of(key)
            if serial is None:
                serial = self._last_serial = self._last_serial + 1
            self._publish(table, key, serial)
        return True

    def forget(self, blocks: Seq[int]) -> None:
        """Remove these blocks, and those computed after them, from the cache. Their holders keep them."""
        self._host.forget(key for block in blocks if (key := self._keys[block]) is not None)
        for block in blocks:
            self._unpublish(block)
            if block in self._kept:
                del self._kept[block]
                self._empty.append(block)

    def clear(self) -> None:
        """Forget all blocks."""
        self._host.clear()
        tell, self.on_change = self.on_change, None
        self.forget(list(self._blocks.values()))
        self.on_change = tell
        if tell is not None:
            tell(BlockChange(_UNPUBLISHED))

    def _parent(self, table: BlockTable) -> int | Domain:
        position = table.num_published
        return self._serials[table.blocks[position - 1]] if position else table.domain

    def _content_at(self, position: int, token_ids: Seq[int]) -> bytes:
        start = position * self._block_size
        return self._content(*token_ids[start : start + self._block_size])

    def _publish(self, table: BlockTable, key: BlockKey, serial: int) -> None:
        position, block = table.num_published, table.blocks[table.num_published]
        self._blocks[key], self._keys[block], self._serials[block] = block, key, serial
        self._roots[block] = self._roots[table.blocks[position - 1]] if position else Root(serial, table.domain[0])
        table.num_published += 1
        if self.on_change is not None:
            parent = key[0] if isinstance(key[0], int) else None
            self.on_change(BlockChange(serial, parent, key[1], table.domain))

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            if self.on_change is not None:
                self.on_change(BlockChange(self._serials[block]))
            del self._blocks[key]
            self._keys[block] = None
            self._serials[block], self._roots[block] = _UNPUBLISHED, None
            if self.states is not None:
                self.states.drop(block)
            if self.windows is not None:
                self.windows.drop(block)

    # To the host and back

    def find_on_host(self, table: BlockTable, token_ids: Seq[int]) -> list[BlockKey]:
        """Keys of the chain on the host that continues where extend() stopped."""
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
        """Continue a table of published blocks with the chain that find_on_host() found, in new blocks.

        As many blocks must be free.
        """
        self._host.pin(keys)
        for key in keys:
            (block,) = self.allocate(1)
            table.blocks.append(block)
            self._publish(table, key, self._host.restore(block, key))

    def offload_kept(self) -> None:
        """Copy out the cached blocks after the last step, preferring the most recently used.

        Cached blocks that are also on the host are first marked as used there: lookups found them on the device, so
        their slots look old and would be overwritten.
        """
        kept = list(self._kept)[-self._host.num_slots :] if self._host.num_slots else []
        there = [block for block in kept if (key := self._keys[block]) is not None and self._host.has(key)]
        for block in (*there, *kept):
            self._offload(block)

    def _offload(self, block: int) -> None:
        key = self._keys[block]
        if key is not None and self._host.num_slots:
            self._host.offload(block, BlockLabel(self._serials[block], key), self._roots[block])
