"""Who may come, and for whom a proxy speaks."""

from ipaddress import ip_address, ip_network

import pytest

from server.listening.clients import DENIED, FORWARDED, MAX_PER_ADDRESS, UNIX, ClientGate, ClientRules
from server.wire.messages import ClientCertificate, Peer


def peer(address: str, port: int = 0) -> Peer:
    return Peer(ip_address(address), port)


def gate(**rules: object) -> ClientGate:
    """Networks as text."""
    return ClientGate(
        ClientRules(
            **{
                name: tuple(one if one == UNIX else ip_network(one) for one in value)
                if isinstance(value, tuple)
                else value
                for name, value in rules.items()
            }
        )
    )


@pytest.mark.parametrize(
    ("allow", "deny", "address", "may_come"),
    [
        ((), (), "192.0.2.7", True),
        (("10.0.0.0/8",), (), "10.255.255.255", True),
        (("10.0.0.0/8",), (), "11.0.0.0", False),
        (("10.0.0.0/8",), (), "::1", False),
        ((), ("10.0.0.0/8",), "10.0.0.0", False),
        ((), ("10.0.0.0/8",), "9.255.255.255", True),
        (("10.0.0.0/8",), ("10.6.0.0/16",), "10.6.0.1", False),
        (("10.6.0.0/16",), ("10.0.0.0/8",), "10.6.0.1", False),
        (("2001:db8::/32",), (), "2001:db8::1", True),
    ],
)
def test_deny_wins_over_allow(allow: tuple[str, ...], deny: tuple[str, ...], address: str, may_come: bool) -> None:
    reason = gate(allow=allow, deny=deny).why_refused(peer(address))
    assert reason == (None if may_come else DENIED)


def test_who_comes_over_a_unix_socket_is_judged_by_its_permissions() -> None:
    assert gate(allow=("10.0.0.0/8",), max_per_address=1).why_refused(Peer()) is None


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("2001:db8::1", "2001:db8::ffff:0:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("0.0.0.1", "::1", False),
    ],
)
def test_addresses_are_counted_ipv6_by_its_64(first: str, second: str, are_one: bool) -> None:
    counting = gate(max_per_address=1)
    counting.enter(peer(first, 1))
    assert counting.why_refused(peer(second, 2)) == (MAX_PER_ADDRESS if are_one else None)
    counting.leave(peer(first, 1))
    assert counting.why_refused(peer(second, 2)) is None
    assert counting.num_addresses == 0


def test_a_proxy_is_not_counted_but_denied_like_anybody() -> None:
    trusting = gate(trusted_proxies=("192.0.2.0/24",), allow=("10.0.0.0/8",), max_per_address=1)
    proxy = trusting.identify(peer("192.0.2.7"))
    assert proxy.is_proxy
    trusting.enter(proxy)
    assert trusting.num_addresses == 0
    assert trusting.why_refused(proxy) == DENIED, "a request without the header must not pass the list"
    trusting.leave(proxy)


def test_only_named_networks_are_trusted_and_unix_by_name() -> None:
    assert not gate(trusted_proxies=(UNIX,)).identify(peer("127.0.0.1")).is_proxy
    assert gate(trusted_proxies=(UNIX,)).identify(Peer()).is_proxy
    assert not gate(trusted_proxies=("127.0.0.0/8",)).identify(Peer()).is_proxy


PROXY = Peer(ip_address("192.0.2.7"), 99, is_proxy=True)


@pytest.mark.parametrize(
    ("value", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("6.6.6.6, 10.0.0.1", "10.0.0.1"),
        ("6.6.6.6, 10.0.0.1, 192.0.2.8", "10.0.0.1"),
        ("192.0.2.9, 192.0.2.8", "192.0.2.9"),
        ("6.6.6.6, unknown, 192.0.2.8", "192.0.2.8"),
        ("6.6.6.6, unknown", "192.0.2.7:99"),
        ("", "192.0.2.7:99"),
    ],
)
def test_the_client_is_the_nearest_that_is_no_proxy_of_ours(value: str, client: str) -> None:
    trusting = gate(trusted_proxies=("192.0.2.0/24",))
    assert str(trusting.client_of(PROXY, ((b"x-forwarded-for", value.encode()),))) == client


def test_only_the_header_that_the_proxies_set_is_believed() -> None:
    headers = ((b"forwarded", b"for=10.0.0.1"), (b"x-forwarded-for", b"10.0.0.2"))
    trusted = ("192.0.2.0/24",)
    assert str(gate(trusted_proxies=trusted).client_of(PROXY, headers)) == "10.0.0.2"
    assert str(gate(trusted_proxies=trusted, forwarded_header=FORWARDED).client_of(PROXY, headers)) == "10.0.0.1"
    assert gate(trusted_proxies=trusted, forwarded_header=None).client_of(PROXY, headers) == PROXY


def test_a_proxys_certificate_stays_the_requests() -> None:
    shown = ClientCertificate("CN=proxy")
    proxy = Peer(ip_address("192.0.2.7"), 99, is_proxy=True, certificate=shown)
    client = gate(trusted_proxies=("192.0.2.0/24",)).client_of(proxy, ((b"x-forwarded-for", b"10.0.0.1"),))
    assert client == Peer(ip_address("10.0.0.1"), certificate=shown)
