"""docs/limits.md's table, row by row: the default, what passes at the limit, what one past it gets.

HTTP/1.1's own limits on lines and heads are in http1_framing_cases.toml.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from h2.errors import ErrorCodes

from server.api import decoding
from server.config import ServerConfig
from server.config_sources import load_config
from server.wire.http2_frames import PRIORITY, WINDOW_UPDATE
from server.wire.limits import Rate
from tests.server import limit_probes as probes
from tests.server.fakes import MemoryServer
from tests.server.limit_probes import CALM, CONNECTION, FRAMES, HTTP2, PASSES, KiB, MiB
from tests.server.raw_http2 import (
    END_STREAM,
    MAX_FRAME,
    Frame,
    data,
    ping,
    post,
    settings,
    wire,
)
from tests.server.raw_peer import MemoryPeer, respond

JUST_BEFORE, JUST_AFTER = -0.01, 0.01  # s


@dataclass(frozen=True)
class Row:
    """A limit of docs/limits.md.

    Args:
        default: as it is set; `limit`: as it says.
        probe: tells what comes of an amount.
        within, past: the last amount that is let through, and the first that is not.
        at_limit: what comes of the last, where another limit is lower.
    """

    name: str
    default: float | Rate
    limit: float | Rate
    probe: Callable[[Any], str]
    within: float
    past: float
    breach: str
    at_limit: str = PASSES

    def __str__(self) -> str:
        return self.name


def row(name: str, default: float, limit: float, probe: Callable[[Any], str], breach: str, at: str = PASSES) -> Row:
    return Row(name, default, limit, probe, limit, limit + 1, breach, at)


def time(name: str, default: float, limit_s: float, probe: Callable[[Any], str], breach: str) -> Row:
    return Row(name, default, limit_s, probe, limit_s + JUST_BEFORE, limit_s + JUST_AFTER, breach)


def burst(name: str, default: Rate, limit: Rate, probe: Callable[[Any], str], num_used: int = 0) -> Row:
    most = limit.burst - num_used
    return Row(name, default, limit, probe, most, most + 1, CALM)


def rate(name: str, default: Rate, limit: Rate, probe: Callable[[Any], str]) -> Row:
    """So many more after a second."""
    return Row(name, default, limit, probe, limit.per_s, limit.per_s + 1, CALM)


ONE = b"\0\0\0\1"
OVERHEAD = FRAMES.num_overhead_frames
TABLE = (
    row("body, counted", ServerConfig().max_body_bytes, 8 * MiB, partial(probes.body_of, over="length"), "413"),
    row("body, in chunks", ServerConfig().max_body_bytes, 8 * MiB, partial(probes.body_of, over="chunks"), "413"),
    row("body, over HTTP/2", ServerConfig().max_body_bytes, 8 * MiB, partial(probes.body_of, over="HTTP/2"), "413"),
    Row("chunks of one byte", CONNECTION.head.num_small_chunks, 1000, probes.tiny_chunks, 1002, 1003, "400"),
    row("JSON depth", decoding.MAX_DEPTH, 64, probes.nested, "400"),
    time("head, HTTP/1.1", CONNECTION.head_s, 10, probes.http1_head_of, "408"),
    time("head, HTTP/2", CONNECTION.head_s, 10, probes.http2_head_of, CALM),
    time("body, HTTP/1.1", CONNECTION.body_s, 30, partial(probes.http1_body_of, 0, 0.0), "408"),
    time("body, HTTP/2", CONNECTION.body_s, 30, partial(probes.http2_body_of, 0, 0.0), "408"),
    time(
        "500 bytes more of a body, HTTP/1.1", CONNECTION.body_s + 1, 31, partial(probes.http1_body_of, 500, 20.0), "408"
    ),
    time(
        "500 bytes more of a body, HTTP/2", CONNECTION.body_s + 1, 31, partial(probes.http2_body_of, 500, 20.0), "408"
    ),
    time(
        "body that came fast, HTTP/1.1", CONNECTION.body_s + 20, 50, partial(probes.http1_body_of, 8 * MiB, 20.0), "408"
    ),
    time("body that came fast, HTTP/2", CONNECTION.body_s + 20, 50, partial(probes.http2_body_of, 50_000, 20.0), "408"),
    time("idle, HTTP/1.1", CONNECTION.idle_s, 75, probes.http1_idle_for, "closed"),
    time("idle, HTTP/2", CONNECTION.idle_s, 75, probes.http2_idle_for, "closed"),
    Row(
        "requests of an HTTP/1.1 connection",
        CONNECTION.num_requests,
        1000,
        probes.requests_on_http1,
        999,
        1000,
        "closes after the last",
    ),
    Row(
        "streams of an HTTP/2 connection",
        CONNECTION.num_streams,
        10_000,
        probes.requests_on_http2,
        9999,
        10_000,
        "closes after the last",
    ),
    row("HTTP/2 frame", FRAMES.frame_bytes, 16_384, probes.frame_of, "GOAWAY FRAME_SIZE_ERROR"),
    row("concurrent streams", HTTP2.num_streams, 256, probes.streams_at_once, "RST_STREAM REFUSED_STREAM"),
    row(
        "concurrent streams, insisted on", HTTP2.num_streams + HTTP2.num_refused, 512, probes.streams_insisted_on, CALM
    ),
    row("heads of open streams", HTTP2.heads_bytes, 768 * KiB, probes.heads_at_once, "RST_STREAM REFUSED_STREAM"),
    row("header block", FRAMES.header_block_bytes, 32 * KiB, probes.header_block_of, CALM, at="431"),
    row("CONTINUATION frames", FRAMES.num_continuations, 8, probes.continuations, CALM),
    row("decoded list", CONNECTION.head.head_bytes, 16 * KiB, probes.header_list_of, "431"),
    row("decoded list of a bomb", HTTP2.list_bytes, 64 * KiB, probes.bomb_of, CALM, at="431"),
    row("fields", CONNECTION.head.num_fields, 100, probes.header_fields, "431"),
    row(
        "fields, crumbs of a cookie",
        CONNECTION.head.num_fields,
        100,
        partial(probes.header_fields, name=b"cookie"),
        "431",
    ),
    burst("resets by the peer", FRAMES.resets, Rate(200, 20), probes.resets_by_peer),
    burst("resets caused by the peer", FRAMES.resets, Rate(200, 20), probes.resets_by_us),
    rate("resets, after a second", FRAMES.resets, Rate(200, 20), probes.resets_after),
    burst("PING", FRAMES.pings, Rate(100, 10), partial(probes.of_frames, ping())),
    rate("PING, after a second", FRAMES.pings, Rate(100, 10), probes.pings_after),
    burst("SETTINGS", FRAMES.settings, Rate(100, 10), partial(probes.of_frames, settings()), num_used=1),
    rate("SETTINGS, after a second", FRAMES.settings, Rate(100, 10), probes.settings_after),
    row("entries per SETTINGS", FRAMES.num_settings, 32, probes.settings_entries, CALM),
    row("empty DATA", OVERHEAD, 1000, partial(probes.of_frames, data()), CALM),
    row("PRIORITY", OVERHEAD, 1000, partial(probes.of_frames, Frame(PRIORITY, bytes(5), 0, 1)), CALM),
    row("WINDOW_UPDATE", OVERHEAD, 1000, partial(probes.of_frames, Frame(WINDOW_UPDATE, ONE)), CALM),
    row("unknown frames", OVERHEAD, 1000, partial(probes.of_frames, Frame(0x77, bytes(100))), CALM),
    Row(
        "control output, unread",
        CONNECTION.control_bytes,
        256 * KiB,
        partial(probes.control_output, 256 * KiB),
        0,
        1,
        "reading pauses",
    ),
    Row(
        "control output, at all",
        CONNECTION.max_control_bytes,
        MiB,
        partial(probes.control_output, MiB),
        0,
        1,
        "closed",
        "reading pauses",
    ),
    row("unsent per stream", CONNECTION.unsent_bytes, 16 * KiB, probes.unsent_of_a_stream, "Pause"),
    time("no progress on a paused stream", CONNECTION.stall_s, 30, probes.stall_of, "RST_STREAM CANCEL"),
    row("n", ServerConfig().max_choices, 64, lambda n: probes.asked(n=n), "400"),
    row("prompts", ServerConfig().max_prompts, 256, lambda n: probes.asked(prompt=["a"] * n, max_tokens=1), "400"),
    row("stop", ServerConfig().max_stops, 16, lambda n: probes.asked(stop=[f"~{i}" for i in range(n)]), "400"),
    row(
        "logit_bias",
        ServerConfig().max_logit_biases,
        300,
        lambda n: probes.asked(logit_bias={str(i): 0 for i in range(n)}),
        "400",
    ),
    time("drain", ServerConfig().drain_timeout_s, 60, probes.drain_of, "closed"),
    row("top_logprobs", ServerConfig().max_top_logprobs, 20, lambda n: probes.asked(logprobs=n), "400"),
)


SLOW = "streams of an HTTP/2 connection"  # 20,000 requests


@pytest.mark.parametrize(
    "limit", [pytest.param(limit, marks=pytest.mark.slow if limit.name == SLOW else ()) for limit in TABLE], ids=str
)
def test_limit_lets_through_what_is_within_and_nothing_past_it(limit: Row) -> None:
    assert limit.default == limit.limit
    assert limit.probe(limit.within) == limit.at_limit
    assert limit.probe(limit.past) == limit.breach


def test_a_larger_frame_is_taken_where_it_is_configured_and_advertised() -> None:
    limits = load_config({"max_frame_bytes": "20000"}, {}).connection_limits
    for size, goaway in ((20_000, None), (20_001, ErrorCodes.FRAME_SIZE_ERROR)):
        server = MemoryServer(respond, limits)
        peer = MemoryPeer(server)
        peer.send(wire([post(), data(bytes(size), END_STREAM)]))
        (advertised, *_) = peer.seen.frames
        assert (MAX_FRAME.to_bytes(2, "big") + (20_000).to_bytes(4, "big")) in advertised.content
        assert peer.seen.goaway == goaway
        assert peer.seen.statuses.get(1) == (200 if goaway is None else None)
        server.close()
