"""Blocks copied out to host memory before they are reused, and back instead of computed again. Thread: engine.

Keeps the books; the copies are the runner's, in the order of the plans that carry them. A slot holds one block under
the key and the serial that it had in the prefix cache: a chain may lie partly on the device and partly here, and a hit
compares token ids and domain wherever it lies. The least recently used slot is reused first.

What a plan copies out can be found once that plan was applied, and what it copies back keeps its slot until then. So a
step that fails loses copies, but nobody finds anything that was not copied.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

from core.blocks import BlockKey
from core.plan import BlockCopies, BlockLabel

ONLINE_RATE = 0.1  # of the last copies in the measured time of one


class HostBlocks:
    """The slots of host memory.

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
