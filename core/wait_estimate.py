"""When a request that comes now would have its first token, and how fast the queue drains. Any thread; pure.

The estimate is the step-cost model's, fed with what waits before the request and with what runs. It is meant to be
right where it matters, under load: there the prompts ahead are computed beside a full batch of decodes, and slots or
blocks come free as fast as answers end.
"""

from collections import deque
from dataclasses import dataclass

from core.step_cost import StepWork, row_cost_s
from core.types import EngineStats

FIRST_GUESS_TOKENS = 128.0  # of an answer, until some have ended
LATE_SHARE = 0.1
MARGIN_STEP = 0.1
LEAST_MARGIN, MOST_MARGIN = 0.5, 3.0
DRAIN_WINDOW = 64  # departures that the drain rate is measured over
FORGET_EVERY_S = 1.0  # bookings that have passed


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """What the engine has room for.

    Args:
        max_batch_tokens: computed in one step.
        num_kv_tokens: that the KV cache holds.
        inter_token_target: see EngineConfig.
    """

    max_sequences: int
    max_batch_tokens: int
    num_kv_tokens: int
    inter_token_target: float | None


@dataclass(slots=True)
class Backlog:
    """Prompts that are to be computed.

    Args:
        num_sequences: that will hold a slot each.
        prompt_kv: KV tokens that the prompts' tiles read (StepWork).
    """

    num_requests: float = 0.0
    num_sequences: float = 0.0
    prompt_tokens: float = 0.0
    prompt_kv: float = 0.0

    def add(self, other: "Backlog", part: float = 1.0) -> None:
        self.num_requests += part * other.num_requests
        self.num_sequences += part * other.num_sequences
        self.prompt_tokens += part * other.prompt_tokens
        self.prompt_kv += part * other.prompt_kv


def backlog_of(num_prompt_tokens: int, num_sequences: int) -> Backlog:
    """One request's."""
    work = StepWork()
    work.add(0, num_prompt_tokens, num_prompt_tokens)
    return Backlog(1, num_sequences, num_prompt_tokens, work.prompt_kv)


def expected_ttft_s(
    room: EngineRoom, stats: EngineStats, num_decoding: int, answer_tokens: float, ahead: Backlog, own: Backlog
) -> float | None:
    """Seconds from now to the first token of a request; None while too few steps were measured.

    Args:
        num_decoding: sequences that have had their first token.
        answer_tokens: that one of these has yet to say, on average (tokens_left).
        ahead: what is served before it, prompts that are half computed included.
    """
    if stats.step_cost_s is None:
        return None
    load = _Load(room, stats, num_decoding, ahead, own)
    both = Backlog()
    both.add(ahead)
    both.add(own)
    return max(load.prefill_s(both), load.room_s(answer_tokens) + load.prefill_s(own))


def expected_end_s(
    room: EngineRoom, stats: EngineStats, num_decoding: int, answer_tokens: float, most_tokens: float
) -> float | None:
    """Seconds from now until one of the sequences that decode ends; None: none does, or too few steps were measured.

    Args:
        answer_tokens: that one of these has yet to say, on average (tokens_left).
        most_tokens: after which the first has as many as it may.
    """
    if stats.step_cost_s is None or not num_decoding:
        return None
    load = _Load(room, stats, num_decoding, Backlog(), Backlog())
    return load.decode_s(num_decoding) * min(answer_tokens / num_decoding, most_tokens)


def tokens_left(mean_tokens: float, num_said: int, num_allowed: int) -> float:
    """How many more an answer is expected to have that has said so many.

    As many as any, while its length is nothing out of the common: lengths are taken to be spread exponentially. One of
    over twice the mean shows that it is not of their kind: it then goes on for about as long as it has, or to its end.
    Never less than the mean, even where num_allowed is near: it serves to say how often one of all ends, and the next
    one in its place has all of its own to say.

    Args:
        mean_tokens: of answers that have ended.
        num_allowed: its max_tokens.
    """
    return max(mean_tokens, min(num_said - mean_tokens, num_allowed - num_said))


class _Load:
    """The engine while it works off what is ahead and the request itself."""

    def __init__(self, room: EngineRoom, stats: EngineStats, num_decoding: int, ahead: Backlog, own: Backlog) -> None:
        assert stats.step_cost_s is not None
        self._coefficients_s = stats.step_cost_s
        self._room = room
        self._num_decoding = num_decoding
        # What is found in the cache is not computed: as much of these prompts as of those before
        self._miss_ratio = 1 - stats.num_cache_hits / stats.num_cache_queries if stats.num_cache_queries else 1.0
        kv_share = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        self._kv_of_one = kv_share * room.num_kv_tokens / max(1, stats.num_running)
        self._num_coming = ahead.num_sequences + own.num_sequences
        self._coming_tokens = ahead.prompt_tokens + own.prompt_tokens

    def decode_s(self, num_sequences: float) -> float:
        """A step in which so many decode, the KV being what it is now."""
        fixed, _, _, token_s, kv_s = self._coefficients_s
        return fixed + num_sequences * token_s + self._num_decoding * self._kv_of_one * kv_s

    def _full_step_s(self) -> float:
        """A step with as much of prompts in it as the inter-token target allows."""
        num_soon = min(self._num_decoding + self._num_coming, self._room.max_sequences)
        return (self._room.inter_token_target or 1.0) * self.decode_s(num_soon)

    def prefill_s(self, backlog: Backlog) -> float:
        work = StepWork(round(backlog.prompt_tokens * self._miss_ratio), round(backlog.prompt_kv * self._miss_ratio))
        work_s = row_cost_s(self._coefficients_s, work)
        num_steps = 1 + work.prompt_tokens / max(1, self._room.max_batch_tokens - self._num_decoding)
        beside_s = self.decode_s(self._num_decoding)
        if self._num_decoding and self._room.inter_token_target is not None:
            num_steps = max(num_steps, work_s / (self._full_step_s() - beside_s))
        return work_s + num_steps * beside_s

    def room_s(self, answer_tokens: float) -> float:
        """Until there are slots and blocks for all."""
        num_missing = self._num_decoding + self._num_coming - self._room.max_sequences
        if self._kv_of_one:
            free_tokens = self._room.num_kv_tokens - self._num_decoding * self._kv_of_one
            num_missing = max(num_missing, (self._coming_tokens - free_tokens) / self._kv_of_one)
        if num_missing <= 0 or not self._num_decoding:
            return 0.0
        # Those that come and find room decode by then, and end as well
        num_full = max(self._num_decoding, self._num_decoding + self._num_coming - num_missing)
        return num_missing * answer_tokens * self._full_step_s() / num_full


class Margin:
    """What estimates are multiplied with, so that one in ten of those told comes later than that.

    Who comes later and goes first, how far prompts are computed already, how long answers will be: the model does not
    know, and what it leaves out changes with the load. Each first token moves the factor a little: up by nine steps
    where it came late, down by one where it did not.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def note(self, is_late: bool) -> None:
        step = MARGIN_STEP * (1 - LATE_SHARE) if is_late else -MARGIN_STEP * LATE_SHARE
        self.factor = min(max(self.factor * (1 + step), LEAST_MARGIN), MOST_MARGIN)


class DrainMeter:
    """How fast requests leave the queue while somebody waits in it."""

    def __init__(self) -> None:
        self._left_s: deque[float] = deque(maxlen=DRAIN_WINDOW)

    def note(self, now: float, is_empty: bool) -> None:
        """One has left.

        Args:
            is_empty: nobody waits any more: what was measured is no measure for the next rush.
        """
        if is_empty:
            self._left_s.clear()
        else:
            self._left_s.append(now)

    def seconds_for(self, num_requests: float, now: float) -> float | None:
        """Until so many more have left; None where too few have."""
        if len(self._left_s) < 2 or now <= self._left_s[0]:
            return None
        return num_requests * (now - self._left_s[0]) / (len(self._left_s) - 1)


class Bookings:
    """When to come back, for those who are refused: each has a time of its own, as room comes free.

    A tenant's follow one another. Several tenants' go on side by side, each at its part of the rate: who is refused
    often, and comes back early, puts off nobody but itself.
    """

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}  # by tenant, of those that are to come
        self._forgot_s = 0.0

    def book(self, tenant: str, interval_s: float, now: float) -> float:
        """Seconds from now.

        Args:
            interval_s: in which there is room for one more.
        """
        if now >= self._forgot_s + FORGET_EVERY_S:
            self._forgot_s = now
            self._last_s = {name: last_s for name, last_s in self._last_s.items() if last_s > now}
        last_s = max(now, self._last_s.get(tenant, now))
        self._last_s[tenant] = last_s + interval_s * len(self._last_s.keys() | {tenant})
        return self._last_s[tenant] - now
