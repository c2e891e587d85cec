"""Complete answers that wait for the peer's windows: how many are made, and that the others follow."""

import contextlib

import pytest

from tests.server.fakes import MemoryServer
from tests.server.raw_http2 import INITIAL_WINDOW, get, rst, settings, window_update, wire
from tests.server.raw_peer import MemoryPeer, respond


@pytest.mark.parametrize("ending", ["window", "reset"])
def test_answers_that_nobody_reads_keep_further_handlers_from_beginning(ending: str) -> None:
    streams = range(1, 513, 2)
    with contextlib.closing(MemoryServer(respond)) as server:
        peer = MemoryPeer(server)
        peer.feed(settings((INITIAL_WINDOW, 0)).encode(0))
        peer.feed(wire(get(b"/large", stream) for stream in streams))
        assert len(peer.seen.statuses) == 256 * 1024 // 10_000 + 1
        begun = tuple(peer.seen.statuses)
        if ending == "window":
            peer.feed(wire([window_update(2**24), *(window_update(10_000, stream) for stream in streams)]))
            assert peer.seen.statuses == dict.fromkeys(streams, 200)
            assert all(len(peer.seen.body(stream)) == 10_000 for stream in streams)
        else:
            peer.feed(wire(rst(stream=stream) for stream in begun[:10]))
            assert len(peer.seen.statuses) == len(begun) + 10
