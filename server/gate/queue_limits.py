"""How much may wait, as the operator says it. Frozen; any thread."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """
    Args:
        max_requests: that wait or run.
        max_tokens: of prompts that wait for their first token; one prompt alone may have more.
        max_bytes: of bodies of requests that wait or run; one alone may have more.
    """

    max_requests: int
    max_tokens: int
    max_bytes: int
