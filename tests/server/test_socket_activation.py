"""LISTEN_FDS, in a process of its own: descriptors from 3 on are not pytest's to give away."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.listening.sockets import take_passed_sockets

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
        timeout=60,
    )


@pytest.fixture
def unix(tmp_path_factory: pytest.TempPathFactory) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path_factory.mktemp("s") / "a"))
    return sock


def test_sockets_are_taken_with_their_names_and_no_child_inherits_either(unix: socket.socket) -> None:
    with unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.listen()
        run = take([tcp, unix], LISTEN_FDS="2", LISTEN_FDNAMES="front:back")
    assert run.stdout.splitlines() == ["front AF_INET 3 False", "back AF_UNIX 4 False", "[]"], run.stderr


def test_sockets_without_names_are_unknown_as_systemd_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        run = take([tcp], LISTEN_FDS="1")
    assert run.stdout.splitlines() == ["unknown AF_INET 3 False", "[]"], run.stderr


def test_what_does_not_listen_for_streams_is_refused_by_name(unix: socket.socket) -> None:
    with unix, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, open(os.devnull) as file:
        for unfit in (unix, datagrams):
            run = take([unfit], LISTEN_FDS="1", LISTEN_FDNAMES="front")
            assert (run.returncode, run.stderr) == (1, "the socket passed as front does not listen for streams\n")
        run = take([file], LISTEN_FDS="1")  # type: ignore[list-item]
        assert run.stderr.startswith("descriptor 3, passed as unknown, is no socket")


def test_no_number_is_refused() -> None:
    assert take([], LISTEN_FDS="two").stderr == "LISTEN_FDS is 'two', and no number of sockets\n"


def test_sockets_of_another_process_are_left_alone_and_the_variables_go(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a", "HOME": "/"}
    assert take_passed_sockets(environ, 2) == []
    assert environ == {"HOME": "/"}
    assert "for process 1 and this is 2" in caplog.text


def test_without_the_variables_there_is_nothing_to_take() -> None:
    assert take_passed_sockets({}, 1) == []
