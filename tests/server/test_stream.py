"""One exchange, on a connection that only records what it is asked."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from core.errors import ErrorKind, ServiceError
from server.wire.messages import Headers, HttpRequest, ResponseHead
from server.wire.stream import ClientDisconnected, HttpStream, StreamCarrier
from tests.server.virtual_loop import VirtualTimeLoop

OK = ResponseHead(200, ())


class Recorder(StreamCarrier):
    """A connection that writes nothing."""

    client = "192.0.2.7:4242"

    def __init__(self) -> None:
        self.calls: list[object] = []

    def start_body(self, stream: HttpStream) -> None:
        self.calls.append("start_body")

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        self.calls.append(head)

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        self.calls.append(data)

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        self.calls.append(("end", trailers))

    def call_once_written(self, stream: HttpStream, callback: Callable[[float], None]) -> None:
        callback(0.0)


def new_stream(headers: Headers = (), has_body: bool = True) -> tuple[HttpStream, Recorder]:
    recorder = Recorder()
    return HttpStream(HttpRequest(1, "POST", "/", "", headers, has_body), recorder), recorder


def start(loop: VirtualTimeLoop, work: Coroutine[Any, Any, bytes]) -> "asyncio.Task[bytes]":
    task = loop.create_task(work)
    loop.settle()
    return task


def test_body_is_joined_when_complete(loop: VirtualTimeLoop) -> None:
    stream, recorder = new_stream()
    stream.receive_body(b"he")
    task = start(loop, stream.read_body(5))
    assert stream.is_reading_body
    stream.receive_body(b"llo")
    loop.settle()
    assert not task.done()
    stream.complete_body()
    loop.settle()
    assert task.result() == b"hello"
    assert recorder.calls == ["start_body"]
    assert not stream.is_reading_body


def assert_fails(task: "asyncio.Task[bytes]", kind: ErrorKind) -> None:
    error = task.exception()
    assert isinstance(error, ServiceError)
    assert error.kind is kind


def test_declared_length_over_the_limit_fails_before_reading(loop: VirtualTimeLoop) -> None:
    stream, recorder = new_stream(((b"content-length", b"6"),))
    assert_fails(start(loop, stream.read_body(5)), ErrorKind.BODY_TOO_LARGE)
    assert recorder.calls == []


def test_complete_body_over_the_limit_fails(loop: VirtualTimeLoop) -> None:
    stream, _ = new_stream()
    stream.receive_body(b"hello!")
    stream.complete_body()
    assert_fails(start(loop, stream.read_body(5)), ErrorKind.BODY_TOO_LARGE)


def test_disconnect_ends_the_reading_and_tells_once(loop: VirtualTimeLoop) -> None:
    stream, _ = new_stream()
    told: list[str] = []
    stream.on_disconnect = lambda: told.append("gone")
    task = start(loop, stream.read_body(5))
    stream.disconnect()
    loop.settle()
    assert isinstance(task.exception(), ClientDisconnected)
    assert told == ["gone"]
    assert not stream.is_open


def test_reading_after_the_disconnect_raises(loop: VirtualTimeLoop) -> None:
    stream, _ = new_stream()
    stream.disconnect()
    assert isinstance(start(loop, stream.read_body(5)).exception(), ClientDisconnected)


def test_response_goes_to_the_connection_in_order() -> None:
    stream, recorder = new_stream()
    assert not stream.head_sent
    stream.send_head(OK)
    assert stream.head_sent
    stream.send(b"a")
    stream.end(((b"x", b"1"),))
    assert recorder.calls == [OK, b"a", ("end", ((b"x", b"1"),))]
    assert not stream.is_open


def test_what_is_sent_after_the_disconnect_is_dropped() -> None:
    stream, recorder = new_stream()
    stream.disconnect()
    stream.send_head(OK)
    stream.send(b"a")
    stream.end()
    assert recorder.calls == []
    assert not stream.head_sent
