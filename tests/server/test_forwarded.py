"""What proxies say of their clients, read from the right end: what a client makes up stands left of it."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.listening.clients import FORWARDED, X_FORWARDED_FOR, hops, node_peer
from server.wire.messages import Peer


def peer(address: str, port: int = 0) -> Peer:
    return Peer(ip_address(address), port)


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
    ) == [None, None, peer("192.0.2.60"), peer("2001:db8:cafe::17", 4711), peer("192.0.2.43")]
    assert forwarded() == []


@given(st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=60))
def test_whatever_a_client_sends_the_proxys_own_part_is_read(theirs: str) -> None:
    assert x_forwarded_for(f"{theirs}, 192.0.2.7")[0] == peer("192.0.2.7")
    assert forwarded(f"{theirs}, for=192.0.2.7")[0] == peer("192.0.2.7")
    assert forwarded(f'{theirs}, for="[2001:db8::7]:4242"')[0] == peer("2001:db8::7", 4242)


def test_no_more_hops_are_read_than_there_can_be_proxies() -> None:
    assert len(x_forwarded_for(", ".join(["192.0.2.7"] * 1000))) == 32
    assert len(forwarded(", ".join(["for=192.0.2.7"] * 1000))) == 32
