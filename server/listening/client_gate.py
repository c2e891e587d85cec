"""Who may come, how often at once, and for whom a trusted proxy speaks. Thread: loop.

The real client counts. Where it comes itself, or a PROXY header names it, the connection is judged; where a trusted
proxy names it in a header of each request, the request is, and the proxy's connection is not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from server.listening.forwarded import X_FORWARDED_FOR, hops
from server.listening.networks import UNIX, IpNetwork, NetworkSet
from server.listening.refusals import DENIED, MAX_PER_ADDRESS
from server.wire.messages import Headers
from server.wire.peer import IPV6_SITE_BITS, Peer


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
