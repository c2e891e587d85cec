"""The header a proxy sends ahead of everything else: PROXY protocol, version 2 (the binary one). Sans-io; any thread.

Source: haproxy's doc/proxy-protocol.txt, section 2.2. Addresses are read, what follows them (TLVs) is skipped. Version
1 is refused: it is text, of no fixed length, and whoever speaks it speaks version 2 as well.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from server.wire.peer import Peer, plain_address

MAX_BYTES = 4096  # of addresses and TLVs; the format allows 65,535, proxies send a few hundred

_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_HEAD_BYTES = 16
_VERSION = 2
_LOCAL, _PROXY = 0, 1
_UNSPECIFIED, _INET, _INET6, _UNIX = range(4)
_ADDRESS_BYTES = {_UNSPECIFIED: 0, _INET: 12, _INET6: 36, _UNIX: 216}
_STREAM = 1


class ProxyProtocolError(Exception):
    """What came is no header, or one that is malformed."""


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """
    Args:
        source: the proxy's client; None: the connection's own peer is meant (a health check of the proxy's, mostly).
    """

    source: Peer | None


class ProxyHeaderParser:
    """Feed it what comes, never more than num_wanted: what follows the header is not its own."""

    def __init__(self) -> None:
        self._received = bytearray()

    @property
    def num_wanted(self) -> int:
        """Bytes that surely belong to the header, and have not come."""
        received = self._received
        if len(received) < _HEAD_BYTES:
            return _HEAD_BYTES - len(received)
        return _HEAD_BYTES + int.from_bytes(received[14:16], "big") - len(received)

    def receive(self, data: bytes) -> ProxyHeader | None:
        """The header once it is complete.

        Raises:
            ProxyProtocolError: at the first byte that tells.
        """
        assert len(data) <= self.num_wanted
        received = self._received
        received += data
        if received[:12] != _SIGNATURE[: len(received)]:
            raise ProxyProtocolError("it does not begin with the signature of version 2")
        if len(received) > 12:
            _check_command(received[12])
        if len(received) > 13:
            _check_family(received[12], received[13])
        if len(received) < _HEAD_BYTES:
            return None
        command, family = received[12] & 0xF, received[13] >> 4
        length = int.from_bytes(received[14:16], "big")
        if length > MAX_BYTES:
            raise ProxyProtocolError(f"it announces {length} bytes, and {MAX_BYTES} are taken")
        if command == _PROXY and length < _ADDRESS_BYTES[family]:
            raise ProxyProtocolError(f"{length} bytes hold no addresses of its family")
        if self.num_wanted:
            return None
        return ProxyHeader(_source(family, bytes(received[_HEAD_BYTES:])) if command == _PROXY else None)


def _check_command(byte: int) -> None:
    if byte >> 4 != _VERSION or byte & 0xF not in (_LOCAL, _PROXY):
        raise ProxyProtocolError(f"its version and command are 0x{byte:02x}")


def _check_family(command: int, byte: int) -> None:
    """Of a local connection, the family is not to be looked at."""
    family, transport = byte >> 4, byte & 0xF
    is_fit = family == _UNSPECIFIED or (family in _ADDRESS_BYTES and transport == _STREAM)
    if command & 0xF == _PROXY and not is_fit:
        raise ProxyProtocolError(f"its family and transport are 0x{byte:02x}")


def _source(family: int, block: bytes) -> Peer | None:
    if family == _INET:
        return Peer(IPv4Address(block[:4]), int.from_bytes(block[8:10], "big"))
    if family == _INET6:
        return Peer(plain_address(IPv6Address(block[:16])), int.from_bytes(block[32:34], "big"))
    return Peer() if family == _UNIX else None
