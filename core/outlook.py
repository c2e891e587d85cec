"""Estimates when a request that arrives now would get its first token, and how soon running answers end.

Any thread; pure. The scheduler sends an Outlook with its counts; the caller adds what it has submitted since (Backlog).
It aims to be right under load, where the prompts ahead are computed beside a full batch of decodes, and slots or blocks
come free as fast as answers end.
"""

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class Backlog:
    """Prompts that are still to be computed.

    Args:
        num_sequences: each will need a slot.
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


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state as of the last steps.

    Args:
        step_cost_s: StepCostModel.rough_s; fit, late_p90: its attributes, by which whole steps are predicted.
        num_kv_tokens: capacity of the KV cache.
        inter_token_target: see EngineConfig.
        miss_ratio: share of prompt tokens that the prefix cache does not have.
        kv_of_one: tokens that a running sequence holds.
        tokens_left: expected per decoding sequence, as the harmonic mean: it gives how often one of them ends.
        first_left: after so many tokens the first of them reaches its limit.
    """

    step_cost_s: tuple[float, float, float, float, float]
    fit: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    late_p90: float = 0.0
    max_sequences: int
    max_batch_tokens: int
    num_kv_tokens: int
    inter_token_target: float | None
    miss_ratio: float = 1.0
    kv_of_one: float = 0.0
    tokens_left: float
    first_left: float

    def ttft_s(self, num_decoding: int, ahead: Backlog, own: Backlog) -> float:
        """Seconds from now to the first token of a request.

        Args:
            num_decoding: sequences that have had their first token.
            ahead: what is served before it, partly computed prompts included.
        """
        num_coming = ahead.num_sequences + own.num_sequences
        num_soon = min(num_decoding + num_coming, self.max_sequences)
        # with as much of prompts in it as the inter-token target allows
        full_step_s = (self.inter_token_target or 1.0) * self._decode_s(num_soon, num_decoding)
        both = Backlog()
        both.add(ahead)
        both.add(own)
        num_missing = num_decoding + num_coming - self.max_sequences
        if self.kv_of_one:
            free_tokens = self.num_kv_tokens - num_decoding * self.kv_of_one
            num_missing = max(num_missing, (both.prompt_tokens - free_tokens) / self.kv_of_one)
        room_s = 0.0  # until there are slots and blocks for all
        if num_missing > 0 and num_decoding:
            # sequences that come and find room will decode by then, and end as well
            num_full = max(num_decoding, num_decoding + num_coming - num_missing)
            room_s = num_missing * self.tokens_left * full_step_s / num_full
        prefill_s = self._prefill_s(both, num_decoding, full_step_s)
        return max(prefill_s, room_s + self._prefill_s(own, num_decoding, full_step_s))

    def end_s(self, num_decoding: int) -> float | None:
        """Seconds from now until one of so many decoding sequences ends; None without any."""
        if not num_decoding:
            return None
        return self._decode_s(num_decoding, num_decoding) * min(self.tokens_left / num_decoding, self.first_left)

    def _decode_s(self, num_sequences: float, num_decoding: int) -> float:
        """A step in which so many decode, with the present KV."""
        fixed, _, _, token_s, kv_s = self.step_cost_s
        return fixed + num_sequences * token_s + num_decoding * self.kv_of_one * kv_s

    def _prefill_s(self, backlog: Backlog, num_decoding: int, full_step_s: float) -> float:
        num_tokens = backlog.prompt_tokens * self.miss_ratio
        work_s = self.step_cost_s[1] * num_tokens + self.step_cost_s[2] * backlog.prompt_kv * self.miss_ratio
        num_steps = 1 + num_tokens / max(1, self.max_batch_tokens - num_decoding)
        beside_s = self._decode_s(num_decoding, num_decoding)
        spare_s = full_step_s - beside_s  # of a step, for prompts; 0 where steps were measured to cost nothing
        if num_decoding and self.inter_token_target is not None and spare_s > 0:
            num_steps = max(num_steps, work_s / spare_s)
        return work_s + num_steps * beside_s


def tokens_left(mean_tokens: float, num_own: int, limit: int) -> float:
    """How many more tokens an answer of num_own tokens is expected to have.

    The mean, as for any answer, while its length is ordinary: lengths are taken to be exponentially distributed. An
    answer of over twice the mean is not one of these and is expected to double, or to reach its limit. Never less than
    the mean, even near the limit: the result serves to tell how often answers end, and the next answer in the same slot
    has all of its tokens to come.

    Args:
        mean_tokens: of answers that have ended.
        limit: its max_tokens.
    """
    return max(mean_tokens, min(num_own - mean_tokens, limit - num_own))
