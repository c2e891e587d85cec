"""What may be written of where to listen."""

import pytest

from server.listening.sockets import Bind, PassedAddress, TcpAddress, UnixAddress, bind_value
from server.listening.sockets import unix_mode_value as mode_of
from server.values import BadValueError


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("127.0.0.1:8000", Bind(TcpAddress("127.0.0.1", 8000))),
        ("[::1]:0", Bind(TcpAddress("::1", 0))),
        ("localhost:65535", Bind(TcpAddress("localhost", 65_535))),
        ("unix:/run/a.sock", Bind(UnixAddress("/run/a.sock"))),
        ("systemd:front", Bind(PassedAddress("front"))),
        ("proxy:[::]:443", Bind(TcpAddress("::", 443), takes_proxy=True)),
        ("plain:proxy:unix:/a", Bind(UnixAddress("/a"), takes_proxy=True, is_plain=True)),
        ("proxy:plain:systemd:a", Bind(PassedAddress("a"), takes_proxy=True, is_plain=True)),
    ],
)
def test_a_bind_is_what_is_written(text: str, bind: Bind) -> None:
    assert bind_value(text) == bind


@pytest.mark.parametrize(
    ("text", "proposal"),
    [
        ("::1:8000", "[::1]:8000"),
        ("[::1]", "[::1]:8000"),
        (":8000", "127.0.0.1:8000"),
        ("0.0.0.0", "0.0.0.0:8000"),
        ("8000", "127.0.0.1:8000"),
        ("a:65536", None),
        ("a:1e3", None),
        ("a:٣", None),
        ("", None),
        ("unix:", "unix:/run/steploop/http.sock"),
        ("unix:/run/", "unix:/run/steploop/http.sock"),
        ("systemd:", None),
        ("proxy:", None),
    ],
)
def test_what_is_no_bind_is_refused_with_one_that_may_be_meant(text: str, proposal: str | None) -> None:
    with pytest.raises(BadValueError) as caught:
        bind_value(text)
    assert caught.value.proposal == proposal


def test_a_socket_path_is_as_long_as_the_kernel_takes() -> None:
    longest = "/" + "x" * 106
    assert bind_value(f"unix:{longest}") == Bind(UnixAddress(longest))
    with pytest.raises(BadValueError, match=r"107 bytes.*108"):
        bind_value(f"unix:{longest}x")


@pytest.mark.parametrize(("text", "mode"), [("660", 0o660), ("0600", 0o600), (" 777 ", 0o777), ("0", 0)])
def test_permissions_are_octal(text: str, mode: int) -> None:
    assert mode_of(text) == mode


@pytest.mark.parametrize("text", ["", "rw", "68", "1777", "-1", "0o660"])
def test_what_are_no_permissions_is_refused(text: str) -> None:
    with pytest.raises(BadValueError, match="octal"):
        mode_of(text)
