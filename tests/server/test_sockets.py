"""Where to listen: what may be written, what systemd passes, what is opened and what is told of what cannot be."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from core.errors import ExitCode, StartupError
from server.listening.sockets import (
    Bind,
    ListeningSocket,
    PassedAddress,
    PassedSocket,
    TcpAddress,
    UnixAddress,
    bind_value,
    open_binds,
    take_passed_sockets,
)
from server.listening.sockets import unix_mode_value as mode_of
from server.values import BadValueError


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


@pytest.mark.parametrize(
    ("bind", "cause", "fix"),
    [
        ("192.0.2.1:0", "192.0.2.1 is not an address", "127.0.0.1"),  # TEST-NET-1, RFC 5737: nobody's
        ("no-such-host.invalid:0", "no-such-host.invalid does not resolve to an address", "127.0.0.1"),
        (f"{'x' * 70}.invalid:0", "x.invalid does not resolve to an address", "127.0.0.1"),
        ("unix:{0}/no/a", "{0}/no is not a directory", "mkdir -p {0}/no"),
    ],
)
def test_a_bind_that_cannot_be_had_is_told_and_none_is_left_open(
    directory: Path, bind: str, cause: str, fix: str
) -> None:
    with pytest.raises(StartupError, match=cause.format(directory)) as caught:
        open_binds([bind_value(f"unix:{directory / 'a'}"), bind_value(bind.format(directory))], [], 8)
    assert fix.format(directory) in caught.value.fix
    assert not (directory / "a").exists()


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
        for _ in range(2):  # the first attempt takes the only place in the queue
            assert "in use" in refusal(f"unix:{path}").cause
        assert path.exists()


def test_a_file_of_another_kind_stays(directory: Path) -> None:
    path = directory / "notes"
    path.write_text("mine")
    assert "is not a socket" in refusal(f"unix:{path}").cause
    assert path.read_text() == "mine"
    link = directory / "link"
    link.symlink_to(path)
    assert "is not a socket" in refusal(f"unix:{link}").cause


def test_a_file_that_another_server_has_put_there_meanwhile_stays(directory: Path) -> None:
    path = directory / "a"
    listening = open_unix(path)
    path.unlink()
    other = open_unix(path)
    listening.close()
    assert path.exists()
    other.close()
    assert not path.exists()


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
        assert "no socket named front (passed: back)" in error.cause
        assert "FileDescriptorName=front" in error.fix


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


REPOSITORY = Path(__file__).parents[2]
# Puts the descriptors given behind the names from 3 on, takes them, and tells what it has got
TAKE = """
import os, socket, sys
from core.errors import StartupError
given = [int(text) for text in sys.argv[1:]]
high = [os.dup2(number, 100 + index) for index, number in enumerate(given)]
for index, number in enumerate(high):
    os.dup2(number, 3 + index)
os.environ["LISTEN_PID"] = str(os.getpid())
from server.listening.sockets import take_passed_sockets
try:
    taken = take_passed_sockets(os.environ, os.getpid())
except StartupError as error:
    sys.exit(error.cause)
for one in taken:
    print(one.name, one.sock.family.name, one.sock.fileno(), os.get_inheritable(one.sock.fileno()))
print(sorted(name for name in os.environ if name.startswith("LISTEN_")))
"""


def take(sockets: Sequence[socket.socket], **environ: str) -> subprocess.CompletedProcess[str]:
    descriptors = [one.fileno() for one in sockets]
    return subprocess.run(
        [sys.executable, "-c", TAKE, *map(str, descriptors)],
        pass_fds=descriptors,
        env={"PATH": os.environ["PATH"], **environ},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def unix(tmp_path_factory: pytest.TempPathFactory) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path_factory.mktemp("s") / "a"))
    return sock


@pytest.mark.parametrize(
    ("environ", "taken"),
    [
        ({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "front:back"}, ["front AF_INET 3 False", "back AF_UNIX 4 False"]),
        ({"LISTEN_FDS": "1"}, ["unknown AF_INET 3 False"]),  # systemd's word for one without a name
        ({}, []),
    ],
)
def test_sockets_are_taken_with_their_names_and_no_child_inherits_them(
    unix: socket.socket, environ: dict[str, str], taken: list[str]
) -> None:
    with unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.listen()
        run = take([tcp, unix], **environ)
    assert run.stdout.splitlines() == [*taken, "[]"], run.stderr


def test_what_does_not_listen_for_streams_is_refused_by_name(unix: socket.socket) -> None:
    with unix, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, open(os.devnull) as file:
        for unfit in (unix, datagrams):
            run = take([unfit], LISTEN_FDS="1", LISTEN_FDNAMES="front")
            assert (run.returncode, run.stderr) == (1, "the socket passed as front does not listen for streams\n")
        run = take([file], LISTEN_FDS="1")  # type: ignore[list-item]
        assert run.stderr.startswith("descriptor 3, passed as unknown, is not a socket")
    assert take([], LISTEN_FDS="two").stderr == "LISTEN_FDS is 'two', which is not a number\n"


def test_sockets_of_another_process_are_left_alone_and_the_variables_go(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a", "HOME": "/"}
    assert take_passed_sockets(environ, 2) == []
    assert environ == {"HOME": "/"}
    assert "for process 1 and this is 2" in caplog.text


LIMIT = """
import resource, sys
from server.listening.sockets import allow_connections
soft, hard, number = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_connections(number)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "number", "limit", "warns"),
    [
        (256, 4096, 1024, "1280 4096", False),
        (2048, 4096, 1024, "2048 4096", False),
        (256, 1024, 1024, "1024 1024", True),
    ],
)
def test_limit_is_raised_as_far_as_is_needed_and_allowed(
    soft: int, hard: int, number: int, limit: str, warns: bool
) -> None:
    command = [sys.executable, "-c", LIMIT, str(soft), str(hard), str(number)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == limit, run.stderr
    assert ("may open 1024 files, too few for 1024 connections" in run.stderr) == warns
