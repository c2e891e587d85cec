"""SIGTERM under load: every stream that has begun comes to its end or to an error event, over HTTP/1.1 and HTTP/2."""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from bench.raw_clients import END_STREAM, OPENING, frame, http1_request, http2_request, request_head
from core.errors import ExitCode
from server.wire.http2 import DATA, GOAWAY, HEADERS, RST_STREAM, SETTINGS
from tests.e2e.conftest import MODEL
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_client_storm import Line

PATH = "/v1/completions"
NUM_CLIENTS, NUM_STREAMS = 4, 6
DONE, DRAINING, REFUSED, UNANSWERED = "whole", "draining", "refused", "unanswered"
LIMIT_S = 300.0


class Clients:
    """Ask one request after the other until the server turns them away.

    Attributes:
        ends: how their requests ended; what is not one of the four above is broken.
        num_goaways: by the HTTP/2 connection.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.num_goaways: list[int] = []
        self.is_told = False  # the server has its signal: what is sent from here on may stay unanswered
        self._port, self._random = port, random.Random(seed)

    async def run(self) -> None:
        await asyncio.gather(*(self._ask_http1() for _ in range(NUM_CLIENTS)), *(self._ask_http2() for _ in range(2)))

    def _body(self) -> bytes:
        fields = {"model": MODEL, "prompt": "hi", "stream": True, "ignore_eos": True}
        return json.dumps(fields | {"max_tokens": self._random.randint(1, 60)}).encode()

    def _end(self, content: bytes) -> None:
        ends = {b"data: [DONE]": DONE, b'"code":"draining"': DRAINING}
        self.ends[next((end for mark, end in ends.items() if mark in content), f"broken: {content[-200:]!r}")] += 1

    async def _ask_http1(self) -> None:
        while True:
            sent_late, answered = self.is_told, False
            try:
                async with Line(self._port) as line:
                    while True:
                        sent_late, answered = self.is_told, False
                        await line.send(http1_request("POST", PATH, self._body()))
                        answer = await line.read_http1_answer()
                        answered = True
                        self._end(answer.body)
                        if answer.headers.get("connection") == "close":
                            break
            except (OSError, asyncio.IncompleteReadError) as error:
                partial = isinstance(error, asyncio.IncompleteReadError) and error.partial
                is_fair = sent_late and not partial and not answered
                self.ends[UNANSWERED if is_fair else f"broken: {error!r}"] += 1
                return

    async def _ask_http2(self) -> None:
        head, contents, next_id, last_id = request_head("POST", PATH), dict[int, bytes](), 1, 2**31 - 1
        self.num_goaways.append(0)
        place = len(self.num_goaways) - 1
        async with Line(self._port) as line:
            await line.send(OPENING)
            while contents or not self.num_goaways[place]:
                while len(contents) < NUM_STREAMS and not self.num_goaways[place]:
                    contents[next_id] = b""
                    await line.send(http2_request(next_id, head, self._body()))
                    next_id += 2
                kind, flags, stream_id, payload = await line.read_frame()
                if kind == SETTINGS and not flags:
                    await line.send(frame(SETTINGS, b"", 1))
                elif kind == GOAWAY:
                    self.num_goaways[place] += 1
                    last_id = int.from_bytes(payload[:4], "big")
                elif kind == DATA:
                    contents[stream_id] += payload
                if kind == RST_STREAM:
                    self.ends[REFUSED if int.from_bytes(payload, "big") == 7 else f"broken: reset {payload!r}"] += 1
                    del contents[stream_id]
                elif kind in (DATA, HEADERS) and flags & END_STREAM:
                    self._end(contents.pop(stream_id))
                for late in [one for one in contents if one > last_id]:
                    self.ends[REFUSED] += 1
                    del contents[late]
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    kind, *_ = await line.read_frame()
                    self.num_goaways[place] += kind == GOAWAY


@pytest.mark.slow
@pytest.mark.parametrize("grace", ["10s", "20ms"])
def test_sigterm_under_load_breaks_no_stream(spawn: Callable[..., ServerProcess], grace: str) -> None:
    server = spawn("--drain-timeout", grace)
    server.wait_ready()
    clients = Clients(server.port, seed=1)

    async def scenario() -> None:
        asking = asyncio.create_task(clients.run())
        while clients.ends[DONE] < 20:
            await asyncio.sleep(0)
        clients.is_told = True
        server.send_signal(signal.SIGTERM)
        await asking

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert server.wait_exit() == ExitCode.OK
    assert set(clients.ends) <= {DONE, DRAINING, REFUSED, UNANSWERED}, clients.ends
    assert clients.num_goaways == [2, 2]
    assert "Traceback" not in server.log
