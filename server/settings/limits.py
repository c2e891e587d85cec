"""How much is taken, and for how long. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field

from server.settings.option import GiB, KiB, MiB, Setting
from server.values import count_between, duration_between, format_duration, format_size, size_between


@dataclass(frozen=True)
class LimitSettings:
    """How much is taken, and for how long."""

    max_body_bytes: int = field(
        default=8 * MiB,
        metadata=Setting(
            name="max-body",
            parse=size_between(KiB, GiB),
            metavar="SIZE",
            help="a larger request body gets 413",
            group="limits",
            show=format_size,
        ),
    )
    max_connections: int = field(
        default=1024,
        metadata=Setting(
            name="max-connections",
            parse=count_between(1, 1_000_000),
            metavar="COUNT",
            help="open at once, TLS handshakes included; one more is closed at once",
            group="limits",
        ),
    )
    max_connections_per_address: int | None = field(
        default=None,
        metadata=Setting(
            name="max-connections-per-address",
            parse=count_between(1, 1_000_000),
            metavar="COUNT",
            help="open at once from one client, IPv6 by its /64; behind trusted proxies: requests in progress"
            " (default: seven eighths of --max-connections)",
            group="limits",
        ),
    )
    max_queue: int = field(
        default=1024,
        metadata=Setting(
            name="max-queue",
            parse=count_between(1, 1_000_000),
            metavar="COUNT",
            help="requests that wait or run; more get 503",
            group="limits",
        ),
    )
    max_queue_tokens: int = field(
        default=1_000_000,
        metadata=Setting(
            name="max-queue-tokens",
            parse=count_between(1, 10**12),
            metavar="COUNT",
            help="of prompts that wait for their first token; more get 503",
            group="limits",
        ),
    )
    max_queue_bytes: int = field(
        default=256 * MiB,
        metadata=Setting(
            name="max-queue-bytes",
            parse=size_between(1, 2**50),
            metavar="SIZE",
            help="of bodies of requests that wait or run, those being tokenized among them; more get 503",
            group="limits",
            show=format_size,
        ),
    )
    head_timeout_s: float = field(
        default=10.0,
        metadata=Setting(
            name="head-timeout",
            parse=duration_between(0.1, 3600),
            metavar="TIME",
            help="for a request's head, from its first byte",
            group="limits",
            show=format_duration,
        ),
    )
    body_timeout_s: float = field(
        default=30.0,
        metadata=Setting(
            name="body-timeout",
            parse=duration_between(0.1, 3600),
            metavar="TIME",
            help="for a request's body",
            group="limits",
            show=format_duration,
        ),
    )
    idle_timeout_s: float = field(
        default=75.0,
        metadata=Setting(
            name="idle-timeout",
            parse=duration_between(0.1, 86_400),
            metavar="TIME",
            help="a connection without a request is closed",
            group="limits",
            show=format_duration,
        ),
    )
    stall_timeout_s: float = field(
        default=30.0,
        metadata=Setting(
            name="stall-timeout",
            parse=duration_between(0.1, 3600),
            metavar="TIME",
            help="a reader that takes nothing for so long loses its stream",
            group="limits",
            show=format_duration,
        ),
    )
    ttft_deadline_s: float = field(
        default=120.0,
        metadata=Setting(
            name="ttft-deadline",
            parse=duration_between(0.001, 604_800),
            metavar="TIME",
            help="from a request's head to its first token; then 504. A request that cannot have it by then is refused"
            " at once",
            group="limits",
            show=format_duration,
        ),
    )
    inter_token_deadline_s: float = field(
        default=30.0,
        metadata=Setting(
            name="inter-token-deadline",
            parse=duration_between(0.001, 604_800),
            metavar="TIME",
            help="from one token of an answer to its next, less what a slow reader takes",
            group="limits",
            show=format_duration,
        ),
    )
    total_deadline_s: float = field(
        default=3600.0,
        metadata=Setting(
            name="total-deadline",
            parse=duration_between(0.001, 604_800),
            metavar="TIME",
            help="from a request's head to its answer's end. Requests and tenants may ask for less",
            group="limits",
            show=format_duration,
        ),
    )
    drain_timeout_s: float = field(
        default=60.0,
        metadata=Setting(
            name="drain-timeout",
            parse=duration_between(0, 86_400),
            metavar="TIME",
            help="running requests may finish for so long after SIGTERM",
            group="limits",
            show=format_duration,
        ),
    )
