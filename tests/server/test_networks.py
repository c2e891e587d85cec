"""Networks: what may be written, and what lies within."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.listening.clients import NetworkSet, network_value, proxy_value
from server.values import BadValueError


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
