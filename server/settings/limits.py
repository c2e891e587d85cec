"""How much is taken, and for how long. Thread: main, at start; frozen after that."""

from dataclasses import dataclass

from server.settings.option import GiB, Group, KiB, MiB

_LIMITS = Group("limits")


@dataclass(frozen=True)
class LimitSettings:
    """How much is taken, and for how long."""

    max_body_bytes: int = _LIMITS.size("max-body", 8 * MiB, (KiB, GiB), "a larger request body gets 413")
    max_connections: int = _LIMITS.count(
        "max-connections", 1024, (1, 1_000_000), "open at once, TLS handshakes included; one more is closed at once"
    )
    max_connections_per_address: int | None = _LIMITS.count(
        "max-connections-per-address",
        None,
        (1, 1_000_000),
        "open at once from one client, IPv6 by its /64; behind trusted proxies: requests in progress"
        " (default: seven eighths of --max-connections)",
    )
    max_queue: int = _LIMITS.count("max-queue", 1024, (1, 1_000_000), "requests that wait or run; more get 503")
    max_queue_tokens: int = _LIMITS.count(
        "max-queue-tokens", 1_000_000, (1, 10**12), "of prompts that wait for their first token; more get 503"
    )
    max_queue_bytes: int = _LIMITS.size(
        "max-queue-bytes",
        256 * MiB,
        (1, 2**50),
        "of bodies of requests that wait or run, those being tokenized among them; more get 503",
    )
    head_timeout_s: float = _LIMITS.duration(
        "head-timeout", 10.0, (0.1, 3600), "for a request's head, from its first byte"
    )
    body_timeout_s: float = _LIMITS.duration("body-timeout", 30.0, (0.1, 3600), "for a request's body")
    idle_timeout_s: float = _LIMITS.duration(
        "idle-timeout", 75.0, (0.1, 86_400), "a connection without a request is closed"
    )
    stall_timeout_s: float = _LIMITS.duration(
        "stall-timeout", 30.0, (0.1, 3600), "a reader that takes nothing for so long loses its stream"
    )
    ttft_deadline_s: float = _LIMITS.duration(
        "ttft-deadline",
        120.0,
        (0.001, 604_800),
        "from a request's head to its first token; then 504. A request that cannot have it by then is refused at once",
    )
    inter_token_deadline_s: float = _LIMITS.duration(
        "inter-token-deadline",
        30.0,
        (0.001, 604_800),
        "from one token of an answer to its next, less what a slow reader takes",
    )
    total_deadline_s: float = _LIMITS.duration(
        "total-deadline",
        3600.0,
        (0.001, 604_800),
        "from a request's head to its answer's end. Requests and tenants may ask for less",
    )
    drain_timeout_s: float = _LIMITS.duration(
        "drain-timeout", 60.0, (0, 86_400), "running requests may finish for so long after SIGTERM"
    )
