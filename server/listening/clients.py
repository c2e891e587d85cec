"""Which clients may connect, how many connections each may have, and who a trusted proxy speaks for. Thread: loop.

The real client is judged. If it connects itself, or a PROXY header names it, that is done for the connection; if a
trusted proxy names it in a field of each request (X-Forwarded-For, or RFC 7239's Forwarded), for each request. Proxies
append the peer they saw, and the client may have sent anything further left: both fields are read from the right.

Of the PROXY protocol (haproxy's doc/proxy-protocol.txt, section 2.2) only the binary version 2 is taken: version 1 has
no fixed length. Its addresses are read, its TLVs skipped. The parsers are pure.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from server.values import BadValueError
from server.wire.messages import IPV6_SITE_BITS, Headers, IpAddress, Peer, plain_address

logger = logging.getLogger(__name__)

IpNetwork = IPv4Network | IPv6Network

UNIX = "unix"  # as a trusted proxy: whoever connects to one of our Unix sockets
_MAPPED_BITS = 96  # of an IPv6 address, before the IPv4 address in it
_EXPECTED = "a network or an address, such as 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32"


class NetworkSet:
    """Networks; a look-up takes one step for each length of their prefixes."""

    def __init__(self, networks: Iterable[IpNetwork]) -> None:
        self._prefixes: dict[tuple[int, int], set[int]] = {}  # (version, bits behind the prefix) -> prefixes
        for network in networks:
            shift = network.max_prefixlen - network.prefixlen
            self._prefixes.setdefault((network.version, shift), set()).add(int(network.network_address) >> shift)

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def __contains__(self, address: IpAddress) -> bool:
        number = int(address)
        return any(
            version == address.version and number >> shift in prefixes
            for (version, shift), prefixes in self._prefixes.items()
        )


def network_value(text: str) -> IpNetwork:
    """A network, or an address as a network of one; IPv4-mapped IPv6 becomes IPv4 (RFC 4291 §2.5.5.2).

    Raises:
        BadValueError: it is neither, or has bits behind its prefix.
    """
    text = text.strip()
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise BadValueError(_EXPECTED) from error
    try:
        network = ip_network(text)
    except ValueError as error:
        cause = f"{_EXPECTED}; {text} has bits behind its prefix, its network is {network}"
        raise BadValueError(cause, str(network)) from error
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    if mapped is None or network.prefixlen < _MAPPED_BITS:
        return network
    return IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))


def proxy_value(text: str) -> IpNetwork | str:
    """A network of proxies, or `unix`. Raises BadValueError."""
    if text.strip() == UNIX:
        return UNIX
    try:
        return network_value(text)
    except BadValueError as error:
        raise BadValueError(f"{error.expected}, or {UNIX}", error.proposal) from error


# Fields in which proxies name their clients.

FORWARDED = "forwarded"
X_FORWARDED_FOR = "x-forwarded-for"

_MAX_HOPS = 32
_MAX_BYTES = 4096  # of the right end
# RFC 7239 §4: forwarded-element, the last one of a list
_PAIR = r"""[\w!#$%&'*+.^`|~-]+=(?:[^\s",;]+|"[^"]*")"""
_LAST_ELEMENT = re.compile(rf"(?:^|,)[ \t]*({_PAIR}(?:[ \t]*;[ \t]*{_PAIR})*)[ \t]*$", re.ASCII)
_FOR = re.compile(r"""(?:^|;)[ \t]*for=(?:"([^"]*)"|([^\s",;]+))""", re.ASCII | re.IGNORECASE)
_NODE = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::(\d{1,5}))?", re.ASCII)


def hops(headers: Headers, name: str) -> Iterator[Peer | None]:
    """The peer that each proxy saw, the nearest proxy's first; None: it did not tell, or it is not an address.

    Args:
        name: FORWARDED or X_FORWARDED_FOR.
    """
    wanted = name.encode()
    text = ",".join(value.decode("latin-1") for key, value in headers if key == wanted)[-_MAX_BYTES:]
    elements = _forwarded_elements(text) if name == FORWARDED else reversed(text.split(",") if text else ())
    for _, element in zip(range(_MAX_HOPS), elements, strict=False):
        yield node_peer(element.strip())


def _forwarded_elements(text: str) -> Iterator[str]:
    """The `for` of each element, from the right; ends at one that is malformed."""
    while (match := _LAST_ELEMENT.search(text)) is not None:
        found = _FOR.search(match[1])
        yield "" if found is None else found[1] or found[2] or ""
        text = text[: match.start()]


def node_peer(text: str) -> Peer | None:
    """An address as proxies write it, with or without a port; None: `unknown`, an obfuscated name, or malformed."""
    bracketed, bare, port = None, text, None
    if (match := _NODE.fullmatch(text)) is not None:
        bracketed, bare, port = match.groups()
    try:
        return Peer(plain_address(ip_address(bracketed or bare)), int(port or 0))
    except ValueError:
        return None


# The PROXY protocol.

PROXY_HEAD_BYTES = 16  # of a PROXY header, ahead of its addresses and TLVs
MAX_PROXY_BYTES = 4096  # of those; the format allows 65,535, proxies send a few hundred

_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_VERSION = 2
_LOCAL, _PROXY = 0, 1
_UNSPECIFIED, _INET, _INET6, _UNIX = range(4)
_ADDRESS_BYTES = {_UNSPECIFIED: 0, _INET: 12, _INET6: 36, _UNIX: 216}
_STREAM = 1


class ProxyProtocolError(Exception):
    """The PROXY header is missing or malformed."""


def num_behind_proxy_head(head: bytes) -> int:
    """How many bytes of addresses and TLVs follow the first PROXY_HEAD_BYTES. Raises ProxyProtocolError."""
    if not head.startswith(_SIGNATURE):
        raise ProxyProtocolError("it does not begin with the signature of version 2")
    (version, command), (family, transport) = divmod(head[12], 16), divmod(head[13], 16)
    length = int.from_bytes(head[14:16], "big")
    if version != _VERSION or command not in (_LOCAL, _PROXY):
        raise ProxyProtocolError(f"its version and command are 0x{head[12]:02x}")
    if length > MAX_PROXY_BYTES:
        raise ProxyProtocolError(f"it announces {length} bytes, more than {MAX_PROXY_BYTES}")
    if command == _PROXY:  # the family of a LOCAL header must be ignored
        if family != _UNSPECIFIED and (family not in _ADDRESS_BYTES or transport != _STREAM):
            raise ProxyProtocolError(f"its family and transport are 0x{head[13]:02x}")
        if length < _ADDRESS_BYTES[family]:
            raise ProxyProtocolError(f"{length} bytes contain no addresses of its family")
    return length


def proxied_client(head: bytes, block: bytes) -> Peer | None:
    """The client that the proxy speaks for; None: the connection is the proxy's own, such as a health check.

    Args:
        head: that num_behind_proxy_head has accepted.
        block: what follows it.
    """
    family = head[13] >> 4 if head[12] & 0xF == _PROXY else _UNSPECIFIED
    if family == _INET:
        return Peer(IPv4Address(block[:4]), int.from_bytes(block[8:10], "big"))
    if family == _INET6:
        return Peer(plain_address(IPv6Address(block[:16])), int.from_bytes(block[32:34], "big"))
    return Peer() if family == _UNIX else None


# Who is refused.

LOG_INTERVAL_S = 10.0

MAX_CONNECTIONS = "max_connections"
MAX_PER_ADDRESS = "max_per_address"
DENIED = "denied"
UNTRUSTED_PROXY = "untrusted_proxy"
PROXY_HEADER = "proxy_header"
HANDSHAKE = "tls_handshake"
SHUTDOWN = "shutdown"

_EXPLANATIONS = {
    MAX_CONNECTIONS: "--max-connections are open",
    MAX_PER_ADDRESS: "--max-connections-per-address are open from there",
    DENIED: "--allow and --deny exclude it",
    UNTRUSTED_PROXY: "a bind with proxy: accepts connections from --trusted-proxies only",
    PROXY_HEADER: "its PROXY protocol header is missing, malformed or late",
    HANDSHAKE: "the TLS handshake failed",
    SHUTDOWN: "the server is shutting down",
}


class Refusals:
    """Counts refused connections by reason, and logs them, at most one line per reason and LOG_INTERVAL_S.

    Args:
        now: seconds, of any origin.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(_EXPLANATIONS, 0))
        self._now = now
        self._logged: dict[str, tuple[float, int]] = {}  # by reason: when it was logged last, and its count then

    def add(self, reason: str, peer: Peer) -> None:
        self.counts[reason] += 1
        count, now = self.counts[reason], self._now()
        since, num_logged = self._logged.get(reason, (-LOG_INTERVAL_S, 0))
        if now - since < LOG_INTERVAL_S:
            return
        self._logged[reason] = now, count
        number = "a connection" if count - num_logged == 1 else f"{count - num_logged} connections"
        level = logging.INFO if reason == HANDSHAKE else logging.WARNING  # TCP health checks end in the handshake
        logger.log(level, "%s refused, the last from %s: %s", number, peer, _EXPLANATIONS[reason])


@dataclass(frozen=True, slots=True)
class ClientRules:
    """
    Args:
        allow: who may connect; empty: everybody.
        deny: who may not, even if allowed.
        trusted_proxies: networks, or UNIX for our Unix sockets.
        forwarded_header: in which the proxies name their clients; None: in none.
        max_per_address: connections, or proxied requests, at once; IPv6 addresses count by their /64.
    """

    allow: Sequence[IpNetwork] = ()
    deny: Sequence[IpNetwork] = ()
    trusted_proxies: Sequence[IpNetwork | str] = ()
    forwarded_header: str | None = X_FORWARDED_FOR
    max_per_address: int = 4096


class ClientGate:
    """Applies the rules: `why_refused` judges a client, `enter` counts it, `leave` once gives its place back."""

    def __init__(self, rules: ClientRules) -> None:
        self._allow = NetworkSet(rules.allow)
        self._deny = NetworkSet(rules.deny)
        self._proxies = NetworkSet(one for one in rules.trusted_proxies if not isinstance(one, str))
        self._trusts_unix = UNIX in rules.trusted_proxies
        self._forwarded_header = rules.forwarded_header
        self._max_per_address = rules.max_per_address
        self._counts: Counter[tuple[int, int]] = Counter()

    @property
    def num_addresses(self) -> int:
        """Addresses with open connections."""
        return len(self._counts)

    @property
    def trusts_proxies(self) -> bool:
        return bool(self._proxies) or self._trusts_unix

    def identify(self, peer: Peer) -> Peer:
        """The peer, marked if it is a trusted proxy."""
        is_proxy = self._trusts_unix if peer.address is None else peer.address in self._proxies
        return replace(peer, is_proxy=True) if is_proxy else peer

    def client_of(self, proxy: Peer, headers: Headers) -> Peer:
        """The client of a trusted proxy's request: the nearest hop that is not a proxy of ours, or the last known."""
        client = proxy
        if self._forwarded_header is not None:
            for hop in hops(headers, self._forwarded_header):
                if hop is None:
                    break
                client = self.identify(hop)
                if not client.is_proxy:
                    break
        return replace(client, certificate=proxy.certificate)

    def why_refused(self, client: Peer) -> str | None:
        """The reason, for Refusals; None: it may come. A Unix socket's peers are judged by its file's permissions."""
        address = client.address
        if address is None:
            return None
        if address in self._deny or (self._allow and address not in self._allow):
            return DENIED
        if not client.is_proxy and self._counts[_key(client)] >= self._max_per_address:
            return MAX_PER_ADDRESS
        return None

    def enter(self, client: Peer) -> None:
        if client.address is not None and not client.is_proxy:
            self._counts[_key(client)] += 1

    def leave(self, client: Peer) -> None:
        if client.address is None or client.is_proxy:
            return
        key = _key(client)
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]


def _key(client: Peer) -> tuple[int, int]:
    assert client.address is not None
    number = int(client.address)
    return client.address.version, number if client.address.version == 4 else number >> IPV6_SITE_BITS
