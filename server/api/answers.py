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
