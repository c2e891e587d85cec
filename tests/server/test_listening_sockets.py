"""The sockets that are opened, and what is told of those that cannot be."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import ExitCode, StartupError
from server.listening.sockets import (
    Bind,
    ListeningSocket,
    PassedSocket,
    TcpAddress,
    UnixAddress,
    bind_value,
    open_binds,
)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its path is short enough for sockets."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def opened() -> Iterator[list[ListeningSocket]]:
    """What a test adds to it is closed."""
    sockets: list[ListeningSocket] = []
    yield sockets
    for one in sockets:
        one.close()


def open_unix(path: Path, mode: int = 0o660) -> ListeningSocket:
    (found,) = open_binds([Bind(UnixAddress(str(path)))], [], 8, mode)
    return found


def refusal(bind: str, passed: tuple[PassedSocket, ...] = ()) -> StartupError:
    with pytest.raises(StartupError) as caught:
        open_binds([bind_value(bind)], passed, 8)
    assert caught.value.exit_code == ExitCode.PORT
    return caught.value


def test_several_binds_are_opened_and_each_knows_its_port(opened: list[ListeningSocket], directory: Path) -> None:
    binds = [bind_value("127.0.0.1:0"), bind_value("proxy:127.0.0.1:0"), bind_value(f"unix:{directory / 'a'}")]
    opened += open_binds(binds, [], 8)
    assert [one.bind for one in opened] == binds
    for one in opened[:2]:
        assert isinstance(one.address, TcpAddress)
        socket.create_connection((one.address.host, one.address.port)).close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(directory / "a"))


def test_when_one_cannot_be_had_none_is_left_open(directory: Path) -> None:
    binds = [bind_value(f"unix:{directory / 'a'}"), bind_value("192.0.2.1:0")]  # TEST-NET-1, RFC 5737: nobody's
    with pytest.raises(StartupError, match=r"192\.0\.2\.1 is not an address"):
        open_binds(binds, [], 8)
    assert not (directory / "a").exists()


def test_a_name_nobody_has_is_told() -> None:
    for name in ("no-such-host.invalid", f"{'x' * 70}.invalid"):
        error = refusal(f"{name}:0")
        assert f"{name} does not resolve to an address" in error.cause
        assert "127.0.0.1" in error.fix


def test_a_sockets_file_has_its_mode_from_the_first_and_goes_with_it(directory: Path) -> None:
    path = directory / "a"
    former = os.umask(0o077)
    try:
        listening = open_unix(path, 0o666)
    finally:
        assert os.umask(former) == 0o077
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    listening.close()
    assert not path.exists()


def test_the_file_of_a_server_that_was_killed_is_replaced(directory: Path, opened: list[ListeningSocket]) -> None:
    path = directory / "a"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    opened.append(open_unix(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_servers_file_stays_also_when_its_queue_is_full(directory: Path) -> None:
    path = directory / "a"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen(0)
        assert "in use" in refusal(f"unix:{path}").cause  # and whoever tried has taken the only place
        assert "in use" in refusal(f"unix:{path}").cause
        assert path.exists()


def test_a_file_of_another_kind_stays(directory: Path) -> None:
    path = directory / "notes"
    path.write_text("mine")
    assert "is no socket" in refusal(f"unix:{path}").cause
    assert path.read_text() == "mine"
    link = directory / "link"
    link.symlink_to(path)
    assert "is no socket" in refusal(f"unix:{link}").cause


def test_a_file_that_another_server_has_put_there_meanwhile_stays(directory: Path) -> None:
    path = directory / "a"
    listening = open_unix(path)
    path.unlink()
    other = open_unix(path)
    listening.close()
    assert path.exists()
    other.close()
    assert not path.exists()


def test_a_missing_directory_is_told_with_the_command_that_makes_it(directory: Path) -> None:
    error = refusal(f"unix:{directory}/no/a")
    assert error.cause == f"{directory}/no is not a directory"
    assert error.fix == f"mkdir -p {directory}/no"


def test_passed_sockets_are_served_named_or_not_and_their_files_stay(
    directory: Path, opened: list[ListeningSocket]
) -> None:
    unix, tcp = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
    unix.bind(str(directory / "a"))
    unix.listen()
    passed = [PassedSocket(unix, "front"), PassedSocket(tcp, "back")]
    opened += open_binds([bind_value("proxy:systemd:back")], passed, 8)
    assert [(one.bind.takes_proxy, one.address) for one in opened] == [
        (True, TcpAddress("127.0.0.1", tcp.getsockname()[1])),
        (False, UnixAddress(str(directory / "a"))),
    ]
    assert all(not one.sock.getblocking() for one in opened)
    for one in opened:
        one.close()
    assert (directory / "a").exists()


def test_a_passed_socket_without_a_file_is_shown_as_systemd_writes_it(opened: list[ListeningSocket]) -> None:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"\0steploop test {os.getpid()}")
    unix.listen()
    opened += open_binds([], [PassedSocket(unix, "front")], 8)
    assert str(opened[0].address) == f"unix:@steploop test {os.getpid()}"


def test_a_name_that_systemd_has_not_passed_is_told(opened: list[ListeningSocket]) -> None:
    assert "passed: none at all" in refusal("systemd:front").cause
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        error = refusal("systemd:front", (PassedSocket(tcp, "back"),))
        assert "no socket called front (passed: back)" in error.cause
        assert "FileDescriptorName=front" in error.fix
