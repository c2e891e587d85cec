"""Who is at the other end of a connection. Frozen; any thread."""

import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

IpAddress = IPv4Address | IPv6Address

IPV6_SITE_BITS = 64  # that an address is of is a site's own choice: RFC 4291 §2.5.4
UNIX_CLIENT = "unix"  # as logs show who came over a Unix socket


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """What a client's certificate says, once a CA of ours has vouched for it.

    Args:
        subject: as RFC 4514 writes it: "CN=router,O=Example".
        names: subjectAltName, kind and value: ("DNS", "router.example"), ("URI", "spiffe://example/router").
    """

    subject: str
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """
    Args:
        address: None: it came over a Unix socket, and has none.
        port: 0 where it is not known.
        is_proxy: a trusted one: each request may name the client that it is from.
        certificate: None: it showed none.
    """

    address: IpAddress | None = None
    port: int = 0
    is_proxy: bool = False
    certificate: ClientCertificate | None = None

    @property
    def network(self) -> str | None:
        """Its address; of IPv6 its /64, of which one client may have any; None: a Unix socket's."""
        if self.address is None or self.address.version == 4:
            return None if self.address is None else str(self.address)
        return str(IPv6Network((int(self.address) >> IPV6_SITE_BITS << IPV6_SITE_BITS, 128 - IPV6_SITE_BITS)))

    def __str__(self) -> str:
        """`192.0.2.1:5000` or `[::1]:5000`; without the port where it is not known."""
        if self.address is None:
            return UNIX_CLIENT
        if not self.port:
            return str(self.address)
        return f"[{self.address}]:{self.port}" if self.address.version == 6 else f"{self.address}:{self.port}"


def socket_peer(family: int, address: Any) -> Peer:
    """The peer as accept(2) names it."""
    if family == socket.AF_UNIX:
        return Peer()
    return Peer(plain_address(ip_address(address[0].partition("%")[0])), address[1])


def plain_address(address: IpAddress) -> IpAddress:
    """IPv4 as IPv4, also where a dual-stack socket has it as an IPv6 address (RFC 4291 §2.5.5.2)."""
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
