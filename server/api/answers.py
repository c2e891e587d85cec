"""What the answers of several surfaces have in common: usage, logprobs, and the refusal of a broken generation.

Thread: loop.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from core.types import FinishReason, TokenLogprobs, Usage
from server.api.envelope import WIRE_REASONS, cut_short
from server.api.surface import Choice, ReplyContext

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


def usage_object(usage: Usage) -> dict[str, Any]:
    """As chat and completions say it."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def partial_usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    """Of a choice so far, as vLLM's chunks say it."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN is not above it either


def logprob_entries(logprobs: Iterable[TokenLogprobs], context: ReplyContext) -> list[dict[str, Any]]:
    """One entry per token, as chat and responses say it."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": context.token_str(token_id),
            "logprob": finite(logprob),
            "bytes": list(context.token_bytes(token_id)),
        }

    return [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*likely) for likely in token.top]}
        for token in logprobs
    ]


def drawn_ids(logprobs: Iterable[TokenLogprobs] | None, stop: TokenLogprobs | None) -> list[int]:
    """Of tokens that come with their logprobs; the id that ends the text is one of them."""
    ids = [token.token_id for token in logprobs or ()]
    return ids if stop is None else [*ids, stop.token_id]


class VllmPromptLogprobs:
    """A prompt's logprobs as vLLM writes them: by token id, with the rank as far as it is known.

    Implements surface.PromptLogprobs.
    """

    __slots__ = ("_context", "entries")

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self.entries: list[dict[str, Any] | None] = [None]  # nothing comes before the first token

    def add_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self.entries += [self._entry(token) for token in logprobs]

    def _entry(self, token: TokenLogprobs) -> dict[str, Any]:
        entry = {str(token.token_id): self._line(token.token_id, token.logprob, None)}
        for rank, (token_id, logprob) in enumerate(token.top, 1):
            entry[str(token_id)] = self._line(token_id, logprob, rank)
        return entry

    def _line(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self._context.token_str(token_id)}


def wire_reason(reason: FinishReason | None) -> str | None:
    """The wire's word for it; None while the sequence goes on, and for what will be told as an error."""
    return reason.value if reason in WIRE_REASONS and reason is not None else None


def refuse_broken(choices: Sequence[Choice]) -> None:
    """
    Raises:
        ServiceError: a choice ended for a reason that the wire does not know: the whole answer is an error then.
    """
    for choice in choices:
        if choice.finish_reason not in WIRE_REASONS:
            raise cut_short(choice.finish_reason)
