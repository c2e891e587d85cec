"""Gives sequences the blocks that they read and write, and takes them back. Thread: engine.

Four kinds: found in the prefix cache, copied back from the host, shared with a parent, new. Whoever asks for more than
is free gets nothing, and has to decide (the scheduler does) who gives way.
"""

from collections.abc import Callable, Iterable

from core.blocks import num_blocks_for
from core.host_blocks import HostBlocks
from core.plan import BlockLabel, RunnerLimits
from core.plan_builder import PlanBuilder
from core.prefix_cache import PrefixCache
from core.sequence import ALL_SCORED, Sequence


class SequenceBlocks:
    """The pool, the prefix cache over it and what was copied out of it, as sequences see them.

    Args:
        prefill_s: what it costs to compute positions `start` to `end` - 1 of a sequence with so long a prompt.
        stored: see HostBlocks.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        has_prefix_cache: bool,
        prefill_s: Callable[[int, int, int], float],
        stored: Iterable[tuple[int, BlockLabel]],
    ) -> None:
        self.host = HostBlocks(limits.num_host_blocks, limits.host_copy_s, stored)
        self.cache = PrefixCache(limits.num_blocks, limits.block_size, has_prefix_cache, self.host)
        self.pool = self.cache.pool
        self._block_size = limits.block_size
        self._prefill_s = prefill_s

    def num_to_admit(self, sequence: Sequence) -> int:
        """Blocks of all its tokens and the next."""
        return num_blocks_for(len(sequence.token_ids) + 1, self._block_size)

    def admit(self, sequence: Sequence, num_reserved: int) -> bool:
        """Give a waiting sequence what is cached of it and new blocks for the rest, or nothing and False.

        Into the first of the new ones is copied what lies on the host, where that is cheaper than to compute it.

        Args:
            num_reserved: blocks that others will need soon.
        """
        table, num_free = sequence.table, self.pool.num_free
        if num_free - num_reserved < sequence.num_free_blocks_needed:  # a long prompt is not looked up in each step
            return False
        self.cache.extend(table, _cacheable(sequence))
        num_new = self.num_to_admit(sequence) - len(table)
        if num_new > self.pool.num_free - num_reserved:
            sequence.num_free_blocks_needed = num_new + num_free - self.pool.num_free
            self.pool.release(table.take())
            return False
        self._restore(sequence)
        sequence.num_computed_tokens = self.cache.extend(table, _cacheable(sequence))
        table.blocks += self.cache.allocate(self.num_to_admit(sequence) - len(table))
        sequence.num_free_blocks_needed = 0
        return True

    def _restore(self, sequence: Sequence) -> None:
        keys = self.cache.find_on_host(sequence.table, _cacheable(sequence))
        start = len(sequence.table) * self._block_size
        end = start + len(keys) * self._block_size
        if keys and self.host.is_cheaper(len(keys), self._prefill_s(start, end, sequence.num_prompt_tokens)):
            self.cache.restore(sequence.table, keys)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child start where its parent is, but for its last token: that one it computes itself.

        They share the parent's blocks; whoever writes into a shared one first, copies it. Into a full one nobody
        writes: where the last token fills a block, the child computes that block's tokens. What of the prompt's
        logprobs has not been told is the child's to compute.
        """
        assert not parent.plain_end, "it would go on in a block that is no longer its own"
        child.num_scored_tokens = parent.num_scored_tokens
        child.num_computed_tokens = min(parent.num_computed_tokens, len(child.token_ids) - 1, child.num_scored_tokens)
        if len(child.token_ids) % self._block_size == 0 or child.num_scored_tokens != ALL_SCORED:
            child.num_computed_tokens -= child.num_computed_tokens % self._block_size
        num_blocks = num_blocks_for(child.num_computed_tokens, self._block_size)
        child.table.blocks = parent.table.blocks[:num_blocks]
        child.table.num_published = min(parent.table.num_published, num_blocks)
        self.pool.share(child.table.blocks)

    def skip_cached(self, sequence: Sequence) -> int:
        """Let it go on after what others have computed of it by now. Returns its first position to compute."""
        num_cached_tokens = self.cache.extend(sequence.table, _cacheable(sequence))
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_cached_tokens)
        return sequence.num_computed_tokens

    def publish(self, sequence: Sequence, end: int) -> bool:
        """Let others find what is full with its first `end` tokens. False: of some of it they find somebody else's."""
        return self.cache.publish(sequence.table, sequence.token_ids, end)

    def own(self, builder: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Let it own all blocks that it writes up to position `end`: the shared one copied, new ones for the rest.

        False, and nothing is done, if there are too few free ones.
        """
        blocks = sequence.table.blocks
        first = sequence.num_computed_tokens // self._block_size  # only this one can be shared: later ones are new
        is_shared = first < len(blocks) and self.pool.is_shared(blocks[first])
        num_new = max(0, num_blocks_for(end, self._block_size) - len(blocks))
        if num_new + is_shared > self.pool.num_free:
            return False
        if is_shared:
            builder.replace_block(sequence, first, self.cache.take_for_shared(blocks[first]))
        if num_new:
            blocks += self.cache.allocate(num_new)
        return True


def _cacheable(sequence: Sequence) -> list[int]:
    """Its tokens as far as the cache may give them, and one more: logits that are asked for are not in there."""
    if sequence.num_scored_tokens == ALL_SCORED:
        return sequence.token_ids
    return sequence.token_ids[: sequence.num_scored_tokens + 1]
