"""h2's connection, set up as a server's; what it must not decide is taken from it. Thread: loop. Sans-io."""

from collections.abc import Iterable
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hpack import Encoder

from server.connection_limits import Http2Limits
from server.frame_gate import FRAME_HEADER, SETTINGS
from server.http1_prefilter import HeadLimits

NUM_REMEMBERED_STREAMS = 1024  # that have ended

_DEFAULT_WINDOW = 65_535  # RFC 9113 §6.9.2
_TABLE_BYTES = 4096  # RFC 9113 §6.5.2, the initial value: a peer may lower it, not raise it
_UNLIMITED = 2**31


class _H2(H2Connection):
    MAX_CLOSED_STREAMS = NUM_REMEMBERED_STREAMS


class _PlainEncoder(Encoder):
    """Writes literals as they are: Huffman's code (RFC 7541 §5.2, optional) saves 30 bytes for a tenth of an answer."""

    def encode(self, headers: Iterable[Any], huffman: bool = False) -> bytes:
        return super().encode(headers, huffman)


def new_h2_connection(head: HeadLimits, limits: Http2Limits, upgrade: bytes | None) -> tuple[H2Connection, bytes]:
    """The connection, and what it says first.

    Args:
        upgrade: see Http2Protocol.

    Raises:
        h2.exceptions.ProtocolError: see Http2Protocol.
    """
    connection = _H2(
        H2Configuration(
            client_side=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    advertised = {
        SettingCodes.MAX_CONCURRENT_STREAMS: limits.num_streams,
        SettingCodes.MAX_HEADER_LIST_SIZE: head.head_bytes,
    }
    # h2 would end the connection over one stream too many; refusing it is ours
    local = Settings(client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: _UNLIMITED})
    connection.local_settings = local
    connection.encoder = _PlainEncoder()
    connection.decoder.max_header_list_size = limits.list_bytes
    if upgrade is None:
        connection.initiate_connection()
    else:
        connection.initiate_upgrade_connection(upgrade)
    connection.clear_outbound_data_buffer()
    payload = b"".join(code.to_bytes(2, "big") + value.to_bytes(4, "big") for code, value in advertised.items())
    settings = FRAME_HEADER.pack(0, len(payload), SETTINGS, 0, 0) + payload
    connection.increment_flow_control_window(limits.window_bytes - _DEFAULT_WINDOW)
    return connection, settings + connection.data_to_send()


def clamp_encoder(connection: H2Connection) -> None:
    """The peer's SETTINGS_HEADER_TABLE_SIZE is how much we may use of its memory, and of ours.

    RFC 7541 §4.2: of several changes the smallest and the last are signalled. hpack 4.2 signals all of them, also
    such as the last one forbids, and none when the last one is said twice.
    """
    encoder = connection.encoder
    changes = encoder.table_size_changes
    if changes:
        size = min(encoder.header_table_size, _TABLE_BYTES)
        least = min(*changes, size)
        encoder.header_table_size = size
        encoder.table_size_changes = [least, size] if least < size else [size]
        encoder.header_table.resized = True
