"""Who may come, at what address, and for whom a proxy speaks: networks, forwarded fields, the PROXY protocol."""

import struct
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.proxy_protocol import check
from server.listening.clients import (
    DENIED,
    FORWARDED,
    MAX_PER_ADDRESS,
    MAX_PROXY_BYTES,
    PROXY_HEAD_BYTES,
    UNIX,
    X_FORWARDED_FOR,
    ClientGate,
    ClientRules,
    NetworkSet,
    ProxyProtocolError,
    hops,
    network_value,
    node_peer,
    num_behind_proxy_head,
    proxied_client,
    proxy_value,
)
from server.values import BadValueError
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


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        (" 192.0.2.7 ", "192.0.2.7/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("10.0.0.0/255.0.0.0", "10.0.0.0/8"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("::1", "::1/128"),
        ("::/0", "::/0"),
        ("::ffff:192.0.2.7", "192.0.2.7/32"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
    ],
)
def test_a_network_is_what_is_written(text: str, network: str) -> None:
    assert network_value(text) == proxy_value(text) == ip_network(network)


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "10.0.0", "example.com", "unixx", "10.0.0.0/8/8", "::1::"])
def test_what_is_none_is_refused(text: str) -> None:
    for parse in (network_value, proxy_value):
        with pytest.raises(BadValueError, match="a network or an address"):
            parse(text)


def test_bits_behind_the_prefix_are_refused_with_the_network_that_may_be_meant() -> None:
    with pytest.raises(BadValueError, match="bits behind") as caught:
        network_value("10.1.2.3/8")
    assert caught.value.proposal == "10.0.0.0/8"


def test_only_proxies_may_be_at_a_unix_socket() -> None:
    assert proxy_value("unix") == "unix"
    with pytest.raises(BadValueError):
        network_value("unix")


def test_an_empty_set_is_false_and_holds_nobody() -> None:
    assert not NetworkSet([])
    assert ip_address("::1") not in NetworkSet([])


ADDRESSES = st.builds(IPv4Address, st.integers(0, 2**32 - 1)) | st.builds(IPv6Address, st.integers(0, 2**128 - 1))
NETWORKS = ADDRESSES.flatmap(
    lambda address: st.integers(0, address.max_prefixlen).map(
        lambda bits: ip_network(f"{address}/{bits}", strict=False)
    )
)


@given(st.lists(NETWORKS, max_size=8), ADDRESSES)
def test_a_set_holds_what_its_networks_hold(networks: list, address: IPv4Address | IPv6Address) -> None:
    inside = [network.network_address for network in networks] + [network.broadcast_address for network in networks]
    for one in (address, *inside):
        assert (one in NetworkSet(networks)) == any(one in network for network in networks)


def forwarded(*values: str) -> list[Peer | None]:
    return list(hops(tuple((b"forwarded", value.encode("latin-1")) for value in values), FORWARDED))


def x_forwarded_for(*values: str) -> list[Peer | None]:
    return list(hops(tuple((b"x-forwarded-for", value.encode("latin-1")) for value in values), X_FORWARDED_FOR))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("192.0.2.7", peer("192.0.2.7")),
        ("192.0.2.7:4242", peer("192.0.2.7", 4242)),
        ("2001:db8::7", peer("2001:db8::7")),
        ("[2001:db8::7]", peer("2001:db8::7")),
        ("[2001:db8::7]:4242", peer("2001:db8::7", 4242)),
        ("::ffff:192.0.2.7", peer("192.0.2.7")),
        ("unknown", None),
        ("_hidden", None),
        ("", None),
        ("192.0.2.7:", None),
        ("192.0.2.256", None),
        ("[192.0.2.7", None),
        ("example.com", None),
        ("192.0.2.7 10.0.0.1", None),
    ],
)
def test_a_node_is_an_address_or_unknown(text: str, found: Peer | None) -> None:
    assert node_peer(text) == found


def test_x_forwarded_for_is_read_from_the_nearest_over_all_its_fields() -> None:
    assert x_forwarded_for("192.0.2.1, 192.0.2.2", "unknown,192.0.2.3") == [
        peer("192.0.2.3"),
        None,
        peer("192.0.2.2"),
        peer("192.0.2.1"),
    ]
    assert x_forwarded_for() == []


def test_forwarded_is_read_with_quotes_and_other_parameters() -> None:
    assert forwarded(
        'for=192.0.2.43, For="[2001:db8:cafe::17]:4711"',
        "proto=https;for=192.0.2.60 ; by=203.0.113.43",
        'for=unknown, by="a, for=192.0.2.9"',
    ) == [
        None,
        None,
        peer("192.0.2.60"),
        peer("2001:db8:cafe::17", 4711),
        peer("192.0.2.43"),
    ]
    assert forwarded() == []


@given(st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=60))
def test_whatever_a_client_sends_the_proxys_own_part_is_read(theirs: str) -> None:
    assert x_forwarded_for(f"{theirs}, 192.0.2.7")[0] == peer("192.0.2.7")
    assert forwarded(f"{theirs}, for=192.0.2.7")[0] == peer("192.0.2.7")
    assert forwarded(f'{theirs}, for="[2001:db8::7]:4242"')[0] == peer("2001:db8::7", 4242)


def test_no_more_hops_are_read_than_there_can_be_proxies() -> None:
    assert len(x_forwarded_for(", ".join(["192.0.2.7"] * 1000))) == 32
    assert len(forwarded(", ".join(["for=192.0.2.7"] * 1000))) == 32


SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
TCP4 = IPv4Address("192.0.2.7").packed + IPv4Address("198.51.100.1").packed + struct.pack(">HH", 4242, 443)
TCP6 = IPv6Address("2001:db8::7").packed + IPv6Address("2001:db8::1").packed + struct.pack(">HH", 4242, 443)
UNIX_ADDRESSES = b"/client".ljust(108, b"\0") + b"/server".ljust(108, b"\0")
TLVS = b"\x01\x00\x02h2" + b"\x03\x00\x04\0\0\0\0" + b"\x04\x00\x00"


def header(block: bytes, family: int, command: int = 0x21, length: int | None = None) -> bytes:
    return SIGNATURE + struct.pack(">BBH", command, family, len(block) if length is None else length) + block


# What a header is, and what is read of it
HEADERS = {
    "tcp4": (header(TCP4, 0x11), Peer(IPv4Address("192.0.2.7"), 4242)),
    "tcp6": (header(TCP6, 0x21), Peer(IPv6Address("2001:db8::7"), 4242)),
    "tcp4 in tcp6": (
        header(IPv6Address("::ffff:192.0.2.7").packed + TCP6[16:], 0x21),
        Peer(IPv4Address("192.0.2.7"), 4242),
    ),
    "unix": (header(UNIX_ADDRESSES, 0x31), Peer()),
    "unspecified": (header(b"", 0x00), None),
    "unspecified with what may be skipped": (header(TCP4, 0x00), None),
    "unspecified over streams": (header(b"", 0x01), None),
    "local": (header(b"", 0x00, 0x20), None),
    "local with addresses": (header(TCP4, 0x11, 0x20), None),
    "local of a family nobody knows": (header(b"xyz", 0xFF, 0x20), None),
    "tcp4 with tlvs": (header(TCP4 + TLVS, 0x11), Peer(IPv4Address("192.0.2.7"), 4242)),
    "tcp6 with tlvs": (header(TCP6 + TLVS, 0x21), Peer(IPv6Address("2001:db8::7"), 4242)),
    "longest": (header(TCP4.ljust(MAX_PROXY_BYTES, b"\0"), 0x11), Peer(IPv4Address("192.0.2.7"), 4242)),
}
# What is refused, by its first PROXY_HEAD_BYTES
REFUSED = {
    "http": b"GET / HTTP/1.1\r\n",
    "version 1": b"PROXY TCP4 192.0.2.7 ",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03abcdef",
    "signature broken at its end": SIGNATURE[:11] + b"\r" + b"\x21\x11\x00\x0c" + TCP4,
    "version 3": header(TCP4, 0x11, 0x31),
    "version 1 in binary": header(TCP4, 0x11, 0x11),
    "another command": header(TCP4, 0x11, 0x22),
    "datagrams": header(TCP4, 0x12),
    "no transport": header(TCP4, 0x10),
    "a family nobody knows": header(TCP4, 0x41),
    "too long": header(TCP4, 0x11, length=MAX_PROXY_BYTES + 1),
    "as long as can be": header(TCP4, 0x11, length=65_535),
    "local and too long": header(b"", 0x00, 0x20, length=MAX_PROXY_BYTES + 1),
    "tcp4 cut short": header(TCP4[:-1], 0x11),
    "tcp6 with addresses of tcp4": header(TCP4, 0x21),
    "unix cut short": header(UNIX_ADDRESSES[:-1], 0x31),
}


def client_of(data: bytes) -> tuple[Peer | None, bytes]:
    """Whom the header names, and what comes behind it."""
    head = data[:PROXY_HEAD_BYTES]
    end = PROXY_HEAD_BYTES + num_behind_proxy_head(head)
    return proxied_client(head, data[PROXY_HEAD_BYTES:end]), data[end:]


@pytest.mark.parametrize("name", HEADERS)
def test_header_says_who_the_client_is_and_ends_where_it_says(name: str) -> None:
    data, client = HEADERS[name]
    assert client_of(data + b"GET / HTTP/1.1\r\n") == (client, b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_header_is_refused(name: str) -> None:
    with pytest.raises(ProxyProtocolError):
        num_behind_proxy_head(REFUSED[name][:PROXY_HEAD_BYTES])


@given(st.binary(min_size=4, max_size=400))
def test_any_header_is_refused_or_names_someone(data: bytes) -> None:
    check(SIGNATURE + data)
