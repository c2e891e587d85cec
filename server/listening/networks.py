"""Networks as operators write them, and whether an address is in any of them. Pure; any thread."""

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_network

from server.values import BadValueError
from server.wire.peer import IpAddress

IpNetwork = IPv4Network | IPv6Network

_MAPPED_BITS = 96  # of an IPv6 address, before the IPv4 address in it

UNIX = "unix"  # where proxies are named: whoever connects to one of our Unix sockets

_EXPECTED = "a network or an address, such as 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32"


class NetworkSet:
    """Networks, asked in one look-up for each length of prefix that they have."""

    def __init__(self, networks: Iterable[IpNetwork]) -> None:
        self._prefixes: dict[tuple[int, int], set[int]] = {}  # (version, bits behind the prefix) -> prefixes
        for network in networks:
            shift = network.max_prefixlen - network.prefixlen
            prefixes = self._prefixes.setdefault((network.version, shift), set())
            prefixes.add(int(network.network_address) >> shift)

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def __contains__(self, address: IpAddress) -> bool:
        number = int(address)
        return any(
            version == address.version and number >> shift in prefixes
            for (version, shift), prefixes in self._prefixes.items()
        )


def network_value(text: str) -> IpNetwork:
    """A network; an address is the network of itself alone. IPv4 written as IPv6 is IPv4, as its addresses are.

    Raises:
        BadValueError: it is none, or has bits behind its prefix.
    """
    text = text.strip()
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise BadValueError(_EXPECTED) from error
    try:
        return _plain_network(ip_network(text))
    except ValueError as error:
        cause = f"{_EXPECTED}; {text} has bits behind its prefix, its network is {network}"
        raise BadValueError(cause, str(network)) from error


def _plain_network(network: IpNetwork) -> IpNetwork:
    """As wire.peer.plain_address has addresses (RFC 4291 §2.5.5.2)."""
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    if mapped is None or network.prefixlen < _MAPPED_BITS:
        return network
    return IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))


def proxy_value(text: str) -> IpNetwork | str:
    """A network of proxies, or `unix`."""
    if text.strip() == UNIX:
        return UNIX
    try:
        return network_value(text)
    except BadValueError as error:
        raise BadValueError(f"{error.expected}, or {UNIX}", error.proposal) from error
