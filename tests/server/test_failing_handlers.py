"""Handlers of the real connection that fail, before their answer and in it."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.memory_connection import (
    GET,
    STREAMED,
    Serve,
    error_of,
)


async def raise_before_the_head(stream: HttpStream) -> None:
    raise RuntimeError("broken")


async def forget_to_answer(stream: HttpStream) -> None:
    pass


async def send_a_split_head(stream: HttpStream) -> None:
    stream.send_head(ResponseHead(200, ((b"x", b"a\r\nb"),)))


async def raise_in_mid_stream(stream: HttpStream) -> None:
    stream.send_head(STREAMED)
    raise RuntimeError("broken")


async def forget_to_end(stream: HttpStream) -> None:
    stream.send_head(STREAMED)


async def fall_short(stream: HttpStream) -> None:
    stream.send_head(ResponseHead(200, ((b"content-length", b"2"),)))
    stream.send(b"a")
    stream.end()


@pytest.mark.parametrize("handler", [raise_before_the_head, forget_to_answer, send_a_split_head])
def test_failed_handler_is_answered_with_500_and_logged(
    serve: Serve, handler: Callable[[HttpStream], object], caplog: pytest.LogCaptureFixture
) -> None:
    transport = serve(handler).exchange(GET)
    assert error_of(transport) == (500, "internal_error")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_handler_that_awaits_something_cancelled_aborts(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    assert serve(handler).exchange(GET).was_aborted


@pytest.mark.parametrize("handler", [raise_before_the_head, forget_to_answer])
def test_path_of_a_request_whose_handler_failed_is_not_logged(
    serve: Serve, handler: Callable[[HttpStream], object], caplog: pytest.LogCaptureFixture
) -> None:
    serve(handler).exchange(GET.replace(b"/", b"/v1/requests/sl-abcdefghPLANTED", 1))
    assert "handler" in caplog.text
    assert "PLANTED" not in caplog.text


@pytest.mark.parametrize("handler", [raise_in_mid_stream, forget_to_end, fall_short])
def test_handler_that_fails_after_its_head_aborts(
    serve: Serve, handler: Callable[[HttpStream], object], caplog: pytest.LogCaptureFixture
) -> None:
    transport = serve(handler).exchange(GET)
    assert transport.was_aborted
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_failing_handler_is_told_of_the_end_once(serve: Serve) -> None:
    told: list[str] = []

    async def handler(stream: HttpStream) -> None:
        stream.on_disconnect = lambda: told.append("gone")
        raise RuntimeError("broken")

    serve(handler).exchange(GET)
    assert told == ["gone"]
