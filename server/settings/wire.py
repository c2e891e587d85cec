"""What one connection may take: DESIGN's table of limits. Thread: main, at start; frozen after that.

A deadline, a rate or a count that is not here or in limits.py is none that an operator need change.
"""

from dataclasses import dataclass

from server.settings.option import Group, KiB, MiB
from server.wire.limits import ConnectionLimits, FrameLimits, HeadLimits, Http2Limits, Rate, format_rate, rate_from

_CONNECTION = Group("limits of a connection")
_DEFAULTS = ConnectionLimits()
_FRAMES = _DEFAULTS.http2.frames
_LIST_PER_HEAD = _DEFAULTS.http2.list_bytes // _DEFAULTS.head.head_bytes
# With less no client of ours could be served: nghttp begins with five PRIORITY frames and reads with WINDOW_UPDATEs
_LEAST_SETTINGS = 2  # the client's own, and that it has heard of ours
_LEAST_SETTINGS_ENTRIES = 8
_LEAST_EMPTY_FRAMES = 16
_PARTS_OF_CONTROL = _DEFAULTS.max_control_bytes // _DEFAULTS.control_bytes


@dataclass(frozen=True)
class WireSettings:
    """What one connection may take."""

    handshake_timeout_s: float = _CONNECTION.duration(
        "handshake-timeout", 5.0, (0.1, 3600), "for a TLS handshake, from the accept; a PROXY header has as long"
    )
    max_request_line_bytes: int = _CONNECTION.size(
        "max-request-line", _DEFAULTS.head.request_line_bytes, (64, MiB), "HTTP/1.1: a longer request line gets 414"
    )
    max_head_bytes: int = _CONNECTION.size(
        "max-head",
        _DEFAULTS.head.head_bytes,
        (KiB, 128 * KiB),
        "of a request, by HTTP/2 unpacked; a larger one gets 431",
    )
    max_header_fields: int = _CONNECTION.count(
        "max-header-fields", _DEFAULTS.head.num_fields, (1, 10_000), "of a request, crumbs of cookies too; more get 431"
    )
    min_body_rate: int = _CONNECTION.size(
        "min-body-rate",
        round(_DEFAULTS.body_bytes_per_s),
        (1, MiB),
        "per second: each that comes prolongs --body-timeout; slower bodies get 408",
    )
    min_read_rate: int = _CONNECTION.size(
        "min-read-rate",
        round(_DEFAULTS.stall_bytes_per_s),
        (1, MiB),
        "per second: who reads less in --stall-timeout, and not all there is, loses the stream",
    )
    max_unsent_bytes: int = _CONNECTION.size(
        "max-unsent",
        _DEFAULTS.unsent_bytes,
        (4 * KiB, MiB),
        "of a stream, unread by its client, as much again in the kernel: then it is paused",
    )
    max_requests_per_connection: int = _CONNECTION.count(
        "max-requests-per-connection", _DEFAULTS.num_requests, (1, 10**9), "HTTP/1.1: it is closed after the last"
    )
    max_streams_per_connection: int = _CONNECTION.count(
        "max-streams-per-connection", _DEFAULTS.num_streams, (1, 2**30 - 1), "HTTP/2: it is closed after the last"
    )
    max_concurrent_streams: int = _CONNECTION.count(
        "max-concurrent-streams",
        _DEFAULTS.http2.num_streams,
        (1, 65_536),
        "HTTP/2: as it is advertised; more are refused",
    )
    max_refused_streams: int = _CONNECTION.count(
        "max-refused-streams",
        _DEFAULTS.http2.num_refused,
        (1, 65_536),
        "HTTP/2: above --max-concurrent-streams, one after the other; more end the connection",
    )
    max_heads_bytes: int = _CONNECTION.size(
        "max-heads",
        _DEFAULTS.http2.heads_bytes,
        (16 * KiB, 64 * MiB),
        "HTTP/2: of the requests that are open, together, and 100 bytes for each field; but for a single one, more are"
        " refused",
    )
    max_frame_bytes: int = _CONNECTION.size(
        "max-frame",
        _FRAMES.frame_bytes,
        (16 * KiB, MiB),
        "HTTP/2: as it is advertised; a larger one ends the connection",
    )
    max_header_block_bytes: int = _CONNECTION.size(
        "max-header-block",
        _FRAMES.header_block_bytes,
        (KiB, 4 * MiB),
        "HTTP/2: of a request's head, packed; a larger one ends the connection",
    )
    max_continuations: int = _CONNECTION.count(
        "max-continuations", _FRAMES.num_continuations, (0, 1024), "HTTP/2: frames that carry on a request's head"
    )
    max_resets: Rate = _CONNECTION.setting(
        "max-resets",
        _FRAMES.resets,
        rate_from(1),
        "RATE",
        "HTTP/2: of streams, by the client or for its faults",
        show=format_rate,
    )
    max_pings: Rate = _CONNECTION.setting(
        "max-pings", _FRAMES.pings, rate_from(1), "RATE", "HTTP/2: PING frames", show=format_rate
    )
    max_settings: Rate = _CONNECTION.setting(
        "max-settings",
        _FRAMES.settings,
        rate_from(_LEAST_SETTINGS),
        "RATE",
        "HTTP/2: SETTINGS frames",
        show=format_rate,
    )
    max_settings_entries: int = _CONNECTION.count(
        "max-settings-entries", _FRAMES.num_settings, (_LEAST_SETTINGS_ENTRIES, 2730), "HTTP/2: in one of them"
    )
    max_empty_frames: int = _CONNECTION.count(
        "max-empty-frames",
        _FRAMES.num_overhead_frames,
        (_LEAST_EMPTY_FRAMES, 1_000_000),
        "frames, and chunks of HTTP/1.1, that carry next to nothing, beyond what the content beside them earns",
    )
    max_control_output_bytes: int = _CONNECTION.size(
        "max-control-output",
        _DEFAULTS.max_control_bytes,
        (64 * KiB, 64 * MiB),
        "HTTP/2: answers to frames, not read by the client; at a quarter of it, nothing is read of it either",
    )

    @property
    def connection_limits(self) -> ConnectionLimits:
        """Of these; a head that is not too large is not refused for how it is packed."""
        head = HeadLimits(
            request_line_bytes=self.max_request_line_bytes,
            head_bytes=self.max_head_bytes,
            num_fields=self.max_header_fields,
            num_small_chunks=self.max_empty_frames,
        )
        frames = FrameLimits(
            frame_bytes=self.max_frame_bytes,
            header_block_bytes=max(self.max_header_block_bytes, self.max_head_bytes),
            num_continuations=self.max_continuations,
            resets=self.max_resets,
            pings=self.max_pings,
            settings=self.max_settings,
            num_settings=self.max_settings_entries,
            num_overhead_frames=self.max_empty_frames,
        )
        http2 = Http2Limits(
            frames=frames,
            num_streams=self.max_concurrent_streams,
            num_refused=self.max_refused_streams,
            heads_bytes=self.max_heads_bytes,
            list_bytes=_LIST_PER_HEAD * self.max_head_bytes,
        )
        return ConnectionLimits(
            head=head,
            http2=http2,
            body_bytes_per_s=self.min_body_rate,
            stall_bytes_per_s=self.min_read_rate,
            unsent_bytes=self.max_unsent_bytes,
            num_requests=self.max_requests_per_connection,
            num_streams=self.max_streams_per_connection,
            control_bytes=self.max_control_output_bytes // _PARTS_OF_CONTROL,
            max_control_bytes=self.max_control_output_bytes,
        )
