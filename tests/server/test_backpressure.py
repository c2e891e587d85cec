"""A reader that stops, in virtual time: it stops its own decode and nobody else's, and loses nothing but its turn.

The same over each way in which a peer can stop: a socket that is not read, and HTTP/2 windows that are shut. Real
sockets are in test_backpressure_sockets.py, uploads nobody reads in test_connection_peers.py and
test_http2_exchanges.py.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol

import pytest
from h2.errors import ErrorCodes

from core.plan import RunnerLimits
from core.types import Pause, Resume
from server.wire.limits import ConnectionLimits
from tests.server.fakes import MemoryServer
from tests.server.http2_client import INITIAL_WINDOW, Http2Client, fields
from tests.server.simulated_server import STREAM, TOKENIZER, Answer, SimulatedServer, answers, chat

LIMITS = RunnerLimits(1024, 4, 16, 32, 600, TOKENIZER.vocab_size)
STALL_S = ConnectionLimits().stall_s
LONG: dict[str, Any] = {"max_tokens": 500, **STREAM}
POST = fields(method="POST", path="/v1/chat/completions")
UNSENT_BYTES = ConnectionLimits().unsent_bytes
STEP_BYTES = 1024  # more than what one step says in a stream


@contextmanager
def serving() -> Iterator[SimulatedServer]:
    """A server whose end is checked: nothing is held for anybody."""
    with closing(SimulatedServer(limits=LIMITS)) as server:
        yield server


def body_of(request: bytes) -> bytes:
    return request.partition(b"\r\n\r\n")[2]


class Reader(Protocol):
    """A client of one stream that has stopped reading before its first byte."""

    def read_on(self) -> None: ...

    def answer(self) -> Answer: ...

    def is_cut_off(self) -> bool: ...

    def num_held(self) -> int:
        """Bytes of the answer that the server holds for it."""
        ...


class Http1Reader:
    def __init__(self, server: SimulatedServer) -> None:
        self._transport = server.send(chat(**LONG), peer_reads=False)

    def read_on(self) -> None:
        self._transport.peer_reads = True
        self._transport.peer_read()

    def answer(self) -> Answer:
        (answer,) = answers(bytes(self._transport.received))
        return answer

    def is_cut_off(self) -> bool:
        return self._transport.was_aborted

    def num_held(self) -> int:
        return self._transport.get_write_buffer_size()


class Http2Reader:
    """Its request is answered on one connection with whatever else `client` asks."""

    def __init__(
        self, server: MemoryServer, settings: dict[int, int] | None = None, stops_reading: bool = False
    ) -> None:
        self.client = Http2Client(server, reads=False, settings=settings)
        self.client.h2.increment_flow_control_window(2**24)  # of the connection: the stream's own is the limit
        self.stream_id = self.client.request(POST, body_of(chat(**LONG)))
        self.client.transport.peer_reads = not stops_reading

    def read_on(self) -> None:
        self.client.transport.peer_reads = True
        self.client.transport.peer_read()
        self.client.exchange()
        self.client.h2.increment_flow_control_window(2**24, self.stream_id)
        self.client.exchange()

    def answer(self) -> Answer:
        self.client.exchange()
        response = self.client.responses[self.stream_id]
        return Answer(response.status, response.headers, response.body, response.is_complete)

    def is_cut_off(self) -> bool:
        self.client.exchange()
        return self.client.responses[self.stream_id].reset == ErrorCodes.CANCEL

    def num_held(self) -> int:
        transport = self.client.transport
        (exchanges,) = (
            connection._exchanges for connection in self._connections() if connection._transport is transport
        )
        return transport.get_write_buffer_size() + exchanges._responses.num_unsent(self.stream_id)

    def _connections(self) -> Any:
        return self.client._server.listener._connections


def zero_window(server: SimulatedServer) -> Http2Reader:
    return Http2Reader(server.network, {INITIAL_WINDOW: 0})


def window_that_fills(server: SimulatedServer) -> Http2Reader:
    return Http2Reader(server.network, {INITIAL_WINDOW: 20_000})


def http2_socket(server: SimulatedServer) -> Http2Reader:
    return Http2Reader(server.network, {INITIAL_WINDOW: 2**24}, stops_reading=True)


READERS = {
    "HTTP/1.1 socket": Http1Reader,
    "HTTP/2 socket": http2_socket,
    "HTTP/2 zero window": zero_window,
    "HTTP/2 window that fills": window_that_fills,
}
every_reader = pytest.mark.parametrize("make", READERS.values(), ids=READERS.keys())


def steps_until_paused(server: SimulatedServer) -> int:
    """Compute until the engine has been told to pause; the number of steps delivered when the mark was passed."""
    while not any(isinstance(message, Pause) for message in server.posted):
        assert server.step(), "nothing was left to compute before the mark was passed"
    return len(server.delivered)


def num_steps_with(server: SimulatedServer, request_id: str, since: int) -> int:
    return sum(request_id in delivery.request_ids for delivery in server.delivered[since:])


def undisturbed_text() -> str:
    with serving() as server:
        answer = server.ask(chat(**LONG))
        assert answer.usage["completion_tokens"] == 500
        return answer.text()


@every_reader
def test_reader_that_stops_costs_at_most_two_steps_past_the_mark_and_keeps_its_blocks(make: Any) -> None:
    with serving() as server:
        reader = make(server)
        neighbour = server.send(chat(**LONG))
        mark = steps_until_paused(server)
        num_blocks_at_mark = server.stats.num_used_blocks
        server.run()  # to the neighbour's end
        assert num_steps_with(server, "r1", mark) <= 2
        assert num_steps_with(server, "r2", mark) > 100
        assert server.stats.num_paused == 1
        assert server.stats.num_preemptions == 0
        assert 0 < server.stats.num_used_blocks < num_blocks_at_mark  # the paused one's, without the neighbour's
        (answer,) = answers(bytes(neighbour.received))
        assert answer.text() == undisturbed_text()
        reader.read_on()
        server.run()


@every_reader
def test_what_is_held_for_a_reader_that_stopped_is_bounded_and_does_not_grow(make: Any) -> None:
    with serving() as server:
        reader = make(server)
        steps_until_paused(server)
        server.run()
        num_held = reader.num_held()
        assert UNSENT_BYTES < num_held <= UNSENT_BYTES + 2 * STEP_BYTES
        server.ask(chat(**LONG))
        server.run_for(STALL_S / 2)
        assert reader.num_held() == num_held
        reader.read_on()
        server.run()


@every_reader
def test_text_is_whole_and_the_same_once_it_is_read_on(make: Any) -> None:
    with serving() as server:
        reader = make(server)
        steps_until_paused(server)
        server.run_for(STALL_S / 2)
        reader.read_on()
        server.run()
        answer = reader.answer()
        assert any(isinstance(message, Resume) for message in server.posted)
        assert (answer.is_complete, answer.text()) == (True, undisturbed_text())
        assert answer.usage["completion_tokens"] == 500


@every_reader
def test_reader_without_progress_is_cut_off_and_its_blocks_are_free(make: Any) -> None:
    with serving() as server:
        reader = make(server)
        steps_until_paused(server)
        server.run_for(STALL_S + 1)
        if make is http2_socket:  # it does not read a reset either: its connection is closed
            assert reader.client.transport.was_aborted
        else:
            assert reader.is_cut_off()
        assert server.metrics.num_disconnects == 1
        assert server.terminals("r1") == 1
        server.check_idle()


@every_reader
def test_drain_waits_for_a_reader_that_stopped_no_longer_than_its_grace(make: Any) -> None:
    with serving() as server:
        make(server)
        steps_until_paused(server)
        drain = server.loop.create_task(server.network.listener.drain(grace_s=5))
        server.run_for(4.9)
        assert not drain.done()
        server.run_for(1.2)
        assert drain.done()
        server.check_idle()


def test_stalled_stream_leaves_the_others_of_its_connection_alone() -> None:
    with serving() as server:
        reader = zero_window(server)
        steps_until_paused(server)
        before = ask_beside(server, reader.client)
        server.run_for(STALL_S + 1)
        assert reader.is_cut_off()
        after = ask_beside(server, reader.client)
        assert before["choices"] == after["choices"] == server.ask(chat()).json["choices"]


def ask_beside(server: SimulatedServer, client: Http2Client) -> Any:
    """The answer to another request of the same connection, whose window is opened."""
    stream_id = client.request(POST, body_of(chat()))
    client.h2.increment_flow_control_window(2**20, stream_id)
    client.exchange()
    server.run()
    client.exchange()
    assert client.responses[stream_id].is_complete
    return json.loads(client.responses[stream_id].body)


def test_paused_streams_of_all_kinds_slow_nobody() -> None:
    """As many steps as without them."""
    with serving() as server:
        server.ask(chat(**LONG))
        num_steps_alone = server.stats.num_steps
    with serving() as server:
        readers = [make(server) for make in READERS.values()]
        server.run()
        assert server.stats.num_paused == len(readers)
        before = server.stats.num_steps
        answer = server.ask(chat(**LONG))
        assert answer.text() == undisturbed_text()
        assert server.stats.num_steps - before == num_steps_alone
        for reader in readers:
            reader.read_on()
        server.run()
        assert {reader.answer().text() for reader in readers} == {answer.text()}
