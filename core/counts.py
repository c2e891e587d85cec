"""What the engine has done since the start, and how far a request's prompt has come. Thread: engine."""

from dataclasses import dataclass

from core.sequence import SequenceGroup
from core.types import EngineMark, Prefilled, Prefilling


@dataclass(slots=True)
class Counts:
    """Counters since the start, as EngineStats has them."""

    num_steps: int = 0
    num_rows: int = 0
    num_prefill_rows: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cache_queries: int = 0
    num_cache_hits: int = 0
    step_s: float = 0.0
    device_s: float = 0.0
    kv_block_s: float = 0.0

    def add_step(self, num_rows: int, step_s: float, num_held: int) -> None:
        """
        Args:
            num_held: blocks, meanwhile.
        """
        self.num_steps += 1
        self.num_rows += num_rows
        self.step_s = step_s
        self.device_s += step_s
        self.kv_block_s += num_held * step_s

    def add_prompt(self, group: SequenceGroup, before: int, end: int, has_cache: bool) -> None:
        """Positions `before` to `end` - 1 of a request's prompt are computed; what lies before was, or is cached."""
        if group.num_prompt_tokens_done == 0 and has_cache:
            self.num_cache_queries += len(group.request.prompt_ids)
        num_cached = max(0, before - group.num_prompt_tokens_done)  # nobody of this request has computed these
        group.num_cached_tokens += num_cached
        self.num_cache_hits += num_cached
        group.num_prompt_tokens_done = max(group.num_prompt_tokens_done, end)


def mark_of_chunk(group: SequenceGroup, end: int, now: float) -> EngineMark | None:
    """What the loop is told of a chunk up to position `end` of a prompt that had not been done before."""
    request_id = group.request.request_id
    group.num_prompt_chunks += 1
    if end == len(group.request.prompt_ids):
        group.is_prefilled = True
        return Prefilled(request_id, now, group.num_prompt_chunks, group.num_cached_tokens)
    return Prefilling(request_id, end) if group.request.tells_progress else None
