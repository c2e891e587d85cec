"""Who may connect, how often at once, and for whom a trusted proxy speaks. Thread: loop; the parsers are pure.

The real client counts. Where it comes itself, or a PROXY header names it, the connection is judged; where a trusted
proxy names it in a header of each request (X-Forwarded-For, or RFC 7239's Forwarded), the request is, and the proxy's
connection is not. Each proxy appends whom it had before it, and what stands further left may be the client's own
invention: both fields are read from their right end. Of the PROXY protocol (haproxy's doc/proxy-protocol.txt, section
2.2) version 2 is taken, the binary one: version 1 has no fixed length, and whoever speaks it speaks version 2 as well.
Addresses are read, what follows them (TLVs) is skipped.
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
    """As plain_address has addresses (RFC 4291 §2.5.5.2)."""
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
    """Whom the proxies had before them, the nearest proxy's first; None: it did not say, or nothing that is one.

    Args:
        name: FORWARDED or X_FORWARDED_FOR.
    """
    wanted = name.encode()
    text = ",".join(value.decode("latin-1") for key, value in headers if key == wanted)[-_MAX_BYTES:]
    elements = _forwarded_elements(text) if name == FORWARDED else reversed(text.split(",") if text else ())
    for _, element in zip(range(_MAX_HOPS), elements, strict=False):
        yield node_peer(element.strip())


def _forwarded_elements(text: str) -> Iterator[str]:
    """What each element says of `for`, from the right; the list ends where it cannot be read."""
    while (match := _LAST_ELEMENT.search(text)) is not None:
        found = _FOR.search(match[1])
        yield "" if found is None else found[1] or found[2] or ""
        text = text[: match.start()]


def node_peer(text: str) -> Peer | None:
    """An address as proxies write it, with a port or without; None: `unknown`, a made-up name, or no address at all."""
    bracketed, bare, port = None, text, None
    if (match := _NODE.fullmatch(text)) is not None:
        bracketed, bare, port = match.groups()
    try:
        return Peer(plain_address(ip_address(bracketed or bare)), int(port or 0))
    except ValueError:
        return None


PROXY_HEAD_BYTES = 16  # of a PROXY header, ahead of its addresses and TLVs
MAX_PROXY_BYTES = 4096  # of those; the format allows 65,535, proxies send a few hundred

_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_VERSION = 2
_LOCAL, _PROXY = 0, 1
_UNSPECIFIED, _INET, _INET6, _UNIX = range(4)
_ADDRESS_BYTES = {_UNSPECIFIED: 0, _INET: 12, _INET6: 36, _UNIX: 216}
_STREAM = 1


class ProxyProtocolError(Exception):
    """What came is no header, or one that is malformed."""


def num_behind_proxy_head(head: bytes) -> int:
    """How many bytes of addresses and TLVs follow the first PROXY_HEAD_BYTES of a PROXY header.

    Raises:
        ProxyProtocolError: it is none that is taken.
    """
    if not head.startswith(_SIGNATURE):
        raise ProxyProtocolError("it does not begin with the signature of version 2")
    (version, command), (family, transport) = divmod(head[12], 16), divmod(head[13], 16)
    length = int.from_bytes(head[14:16], "big")
    if version != _VERSION or command not in (_LOCAL, _PROXY):
        raise ProxyProtocolError(f"its version and command are 0x{head[12]:02x}")
    if length > MAX_PROXY_BYTES:
        raise ProxyProtocolError(f"it announces {length} bytes, and {MAX_PROXY_BYTES} are taken")
    if command == _PROXY:  # of a local connection, the family is not to be looked at
        if family != _UNSPECIFIED and (family not in _ADDRESS_BYTES or transport != _STREAM):
            raise ProxyProtocolError(f"its family and transport are 0x{head[13]:02x}")
        if length < _ADDRESS_BYTES[family]:
            raise ProxyProtocolError(f"{length} bytes hold no addresses of its family")
    return length


def proxied_client(head: bytes, block: bytes) -> Peer | None:
    """Whom the proxy speaks for; None: the connection's own peer is meant (a health check of the proxy's, mostly).

    Args:
        head: as num_behind_proxy_head has taken it; block: what follows it.
    """
    family = head[13] >> 4 if head[12] & 0xF == _PROXY else _UNSPECIFIED
    if family == _INET:
        return Peer(IPv4Address(block[:4]), int.from_bytes(block[8:10], "big"))
    if family == _INET6:
        return Peer(plain_address(IPv6Address(block[:16])), int.from_bytes(block[32:34], "big"))
    return Peer() if family == _UNIX else None


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
    DENIED: "--allow and --deny do not let it come",
    UNTRUSTED_PROXY: "a bind with proxy: takes connections from --trusted-proxies alone",
    PROXY_HEADER: "its PROXY protocol header is missing, malformed or late",
    HANDSHAKE: "the TLS handshake failed",
    SHUTDOWN: "the server is shutting down",
}


class Refusals:
    """
    Args:
        now: seconds, from anywhere.

    Attributes:
        counts: by reason.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(_EXPLANATIONS, 0))
        self._now = now
        self._told: dict[str, tuple[float, int]] = {}  # when a reason was told last, and its count then

    def add(self, reason: str, peer: Peer) -> None:
        """Count one. The first of a reason is told, and then one line a LOG_INTERVAL_S tells of all since."""
        self.counts[reason] += 1
        count, now = self.counts[reason], self._now()
        since, told = self._told.get(reason, (-LOG_INTERVAL_S, 0))
        if now - since < LOG_INTERVAL_S:
            return
        self._told[reason] = now, count
        number = "a connection" if count - told == 1 else f"{count - told} connections"
        level = logging.INFO if reason == HANDSHAKE else logging.WARNING  # health checks by TCP alone end there
        logger.log(level, "%s refused, the last from %s: %s", number, peer, _EXPLANATIONS[reason])


@dataclass(frozen=True, slots=True)
class ClientRules:
    """
    Args:
        allow: who may come; empty: everybody.
        deny: who may not, whatever `allow` says.
        trusted_proxies: networks, or UNIX for who comes over a Unix socket.
        forwarded_header: in which the proxies name their clients; None: in none.
        max_per_address: connections, or proxied requests, at once; IPv6 addresses count by their /64.
    """

    allow: Sequence[IpNetwork] = ()
    deny: Sequence[IpNetwork] = ()
    trusted_proxies: Sequence[IpNetwork | str] = ()
    forwarded_header: str | None = X_FORWARDED_FOR
    max_per_address: int = 4096


class ClientGate:
    """Who comes in passes `why_refused`, is counted by `enter`, and passes `leave` once."""

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
        """That are counted now."""
        return len(self._counts)

    def identify(self, peer: Peer) -> Peer:
        """The peer, known for a trusted proxy if it is one."""
        is_proxy = self._trusts_unix if peer.address is None else peer.address in self._proxies
        return replace(peer, is_proxy=True) if is_proxy else peer

    def client_of(self, proxy: Peer, headers: Headers) -> Peer:
        """For whom a trusted proxy sends a request: the nearest that is no proxy of ours, or the last that is known."""
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
        """The reason, as Refusals has it; None: it may come.

        Who comes over a Unix socket has no address: the file's permissions judge it. A proxy's own are not counted.
        """
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
