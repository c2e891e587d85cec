"""Clients that misbehave beside clients that do not, against a server process.

`python -m tests.e2e.test_client_storm 2500` is a longer one than the test.

Over real sockets, with clocks of 1 to 2 s for stalls, heads, bodies and idle connections. Two dozen clients of one
tenant do at random whatever goes wrong: windows of 0 to 64 KiB that open late or never, resets, cut uploads, deadlines
of 1 ms to 1 s, pipelining, dribbles, garbage; one more asks for 200 streams on a connection whose windows stay shut.
Those of another tenant just ask. Each of their requests is answered whole, whatever runs beside it; afterwards nothing
is held for anybody, and the log has no traceback.
"""

import argparse
import asyncio
import hashlib
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hpack import Decoder, Encoder, NeverIndexedHeaderTuple

from bench.raw_clients import END_HEADERS, END_STREAM, HEADER_BYTES, frame, http2_request
from server.ledger.store import RowState
from server.wire.http2_frames import DATA, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, WINDOW_UPDATE
from tests.e2e.raw_http import RawAnswer, connected, post_bytes, request_bytes
from tests.e2e.server_process import ServerProcess, ready_server
from tests.server.inline_ledger import rows
from tests.server.tiny_model import write_tiny_model

MODEL = "tiny"  # its directory's name
NUM_MISBEHAVING, NUM_WELL_BEHAVED = 24, 8
NUM_SHUT_STREAMS = 200
STALL_S = 1.5
CLOCKS = ("--stall-timeout", "1500ms", "--head-timeout", "1s", "--body-timeout", "1s", "--idle-timeout", "2s")
ANSWER_TIMEOUT_S = 30.0  # after which a request hangs; with the attack beside it one takes 0.1 s, or 1 s
TOKENS_PER_DAY = 10**9
ADMIN_KEY, GOOD_KEY, BAD_KEY = "operator", "good", "bad"
CHAT = "/v1/chat/completions"
WINDOW_SETTING = 4
CANCEL_CODE = (8).to_bytes(4, "big")
MOST_WINDOW = (2**30).to_bytes(4, "big")

Script = Iterator[tuple[bytes, float]]


def chat_body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "step"}
    return {"model": MODEL, "messages": [message], "max_tokens": max_tokens, "ignore_eos": True} | fields


def head(key: str) -> bytes:
    pairs = {":method": "POST", ":scheme": "http", ":authority": "a", ":path": CHAT, "authorization": f"Bearer {key}"}
    return Encoder().encode([NeverIndexedHeaderTuple(*pair) for pair in pairs.items()])


def chat_frames(key: str, body: dict[str, Any], stream_id: int) -> bytes:
    return http2_request(stream_id, head(key), json.dumps(body).encode())


def opening(window: int) -> bytes:
    """Of a connection whose streams have such windows, and which is wide open itself."""
    settings = WINDOW_SETTING.to_bytes(2, "big") + window.to_bytes(4, "big")
    return PREFACE + frame(SETTINGS, settings) + frame(WINDOW_UPDATE, MOST_WINDOW)


class Line:
    """One connection of a client, which ends with the `async with`, by FIN or by RST."""

    def __init__(self, port: int, receive_buffer_bytes: int | None = None) -> None:
        self.is_reset = False
        self._port = port
        self._receive_buffer_bytes = receive_buffer_bytes

    async def __aenter__(self) -> "Line":
        sock = socket.socket()
        sock.setblocking(False)
        if self._receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
            self._reader, self._writer = await asyncio.open_connection(sock=sock)
        except BaseException:
            sock.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.is_reset:
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read(self, num_bytes: int = 65_536) -> bytes:
        """Some bytes.

        Raises:
            ConnectionError: there are no more.
        """
        data = await self._reader.read(num_bytes)
        if not data:
            raise ConnectionError("the server has closed")
        return data

    async def read_for(self, seconds: float, num_bytes: int = 65_536) -> bytes:
        """What comes until then, or until the end."""
        received = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    received += await self.read(num_bytes)
        return received

    async def read_http1_answer(self) -> RawAnswer:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        fields = dict(line.split(": ", 1) for line in lines[1:])
        if "content-length" in fields:
            body = await self._reader.readexactly(int(fields["content-length"]))
        else:
            body = b""
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                body += await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            await self._reader.readexactly(2)
        return RawAnswer(int(lines[0].split(" ")[1]), fields, body)

    async def read_frame(self) -> tuple[int, int, int, bytes]:
        """Its kind, flags, stream and payload."""
        start = await self._reader.readexactly(HEADER_BYTES)
        payload = await self._reader.readexactly(int.from_bytes(start[:3], "big"))
        return start[3], start[4], int.from_bytes(start[5:9], "big"), payload


class ClientStorm:
    """The clients of one run.

    Attributes:
        done: what the misbehaving have done, by name.
        told: how the requests of the well-behaved ended.
    """

    def __init__(self, port: int, seed: int, num_requests: int) -> None:
        self.done: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self._port = port
        self._random = random.Random(seed)
        self._left = num_requests

    async def run(self) -> None:
        """Until as many well-behaved requests have been asked."""
        misbehaving = [asyncio.create_task(self._misbehave()) for _ in range(NUM_MISBEHAVING)]
        misbehaving.append(asyncio.create_task(self._attack()))
        await asyncio.gather(*(self._behave(i % 2 == 0) for i in range(NUM_WELL_BEHAVED)))
        for task in misbehaving:
            task.cancel()
        for ended in await asyncio.gather(*misbehaving, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise AssertionError("a client has a fault of its own") from ended

    # Those who behave

    async def _behave(self, speaks_http2: bool) -> None:
        ask = self._ask_http2 if speaks_http2 else self._ask_http1
        while self._left > 0:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await ask()
            except TimeoutError:
                self._tell("hung")
            except (OSError, asyncio.IncompleteReadError) as error:
                self._tell(f"broke off: {error!r}")

    def _tell(self, end: str) -> None:
        self._left -= 1
        self.told[end] += 1

    def _wish(self) -> dict[str, Any]:
        return chat_body(self._random.randint(1, 24), stream=self._random.random() < 0.7)

    async def _ask_http1(self) -> None:
        """A few, on one connection."""
        async with Line(self._port) as line:
            for _ in range(self._random.randint(1, 3)):
                body = self._wish()
                await line.send(post_bytes(CHAT, body, api_key=GOOD_KEY))
                answer = await line.read_http1_answer()
                self._tell(_judge(answer.status, answer.body, body))

    async def _ask_http2(self) -> None:
        body, status, content, is_over = self._wish(), 0, b"", False
        decoder = Decoder()
        async with Line(self._port) as line:
            await line.send(opening(2**30) + chat_frames(GOOD_KEY, body, 1))
            while not is_over:
                kind, flags, stream_id, payload = await line.read_frame()
                if kind == SETTINGS and not flags:
                    await line.send(frame(SETTINGS, b"", 1))
                elif kind in (RST_STREAM, GOAWAY):
                    raise ConnectionError(f"frame {kind}: {payload!r}")
                elif kind == HEADERS:
                    status = status or int(dict(decoder.decode(payload))[":status"])
                elif kind == DATA:
                    content += payload
                is_over = stream_id == 1 and kind in (DATA, HEADERS) and bool(flags & END_STREAM)
        self._tell(_judge(status, content, body))

    # Those who do not

    async def _misbehave(self) -> None:
        ways = (self._shut_windows, self._shut_windows, self._hurry, self._hurry, self._reset_streams, self._cut_upload)
        ways += (self._cut_http2_upload, self._pipeline, self._read_nothing, self._dribble, self._talk_nonsense)
        ways += (self._break_framing,)
        while True:
            way = self._random.choice(ways)
            receives_little = way in (self._read_nothing, self._pipeline) and self._random.random() < 0.7
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):  # they are cut off, as they deserve
                async with Line(self._port, 4096 if receives_little else None) as line:
                    for data, seconds in way(self._random):
                        async with asyncio.timeout(STALL_S):
                            await line.send(data)
                        if way == self._read_nothing:
                            await asyncio.sleep(seconds)
                        else:
                            await line.read_for(seconds, 64 if receives_little else 65_536)
                    line.is_reset = self._random.random() < 0.5
            self.done[way.__name__.strip("_").replace("_", " ")] += 1

    async def _attack(self) -> None:
        """All that a connection may ask for, whose windows never open."""
        while True:
            async with Line(self._port) as line:
                streams = range(1, 2 * NUM_SHUT_STREAMS, 2)
                body = chat_body(40, stream=True)
                with suppress(OSError):
                    await line.send(opening(0) + b"".join(chat_frames(BAD_KEY, body, one) for one in streams))
                    await line.read_for(2 * STALL_S)
            self.done["200 streams with shut windows"] += 1

    # Each gives what to send, and for how many seconds to read then.

    def _shut_windows(self, draw: random.Random) -> Script:
        streams = range(1, 2 * draw.randint(1, 20), 2)
        frames = [chat_frames(BAD_KEY, chat_body(draw.randint(1, 150), stream=True), one) for one in streams]
        data = opening(draw.choice((0, 0, 1, 100, 1000, 16_384, 65_535))) + b"".join(frames)
        yield data, draw.random() * 2 * STALL_S
        for one in streams:
            if draw.random() < 0.5:
                more = frame(WINDOW_UPDATE, draw.randint(1, 65_535).to_bytes(4, "big"), 0, one)
                yield more + frame(SETTINGS, WINDOW_SETTING.to_bytes(2, "big") + bytes(4)), draw.random() * 0.1

    def _reset_streams(self, draw: random.Random) -> Script:
        yield opening(draw.choice((0, 100, 2**30))), 0.0
        for one in range(1, 2 * draw.randint(2, 60), 2):
            body = chat_body(draw.randint(1, 100), stream=draw.random() < 0.8)
            yield chat_frames(BAD_KEY, body, one), draw.random() * 0.02
            if draw.random() < 0.8:
                yield frame(RST_STREAM, CANCEL_CODE, 0, one), 0.0

    def _cut_upload(self, draw: random.Random) -> Script:
        data = post_bytes(CHAT, chat_body(20, stream=True, user="u" * draw.choice((1, 30_000))), api_key=BAD_KEY)
        yield data[: draw.randrange(len(data))], draw.random() * 2.5

    def _cut_http2_upload(self, draw: random.Random) -> Script:
        content = json.dumps(chat_body(20, stream=True)).encode()
        yield opening(draw.choice((0, 2**30))), 0.0
        for one in range(1, 2 * draw.randint(1, 8), 2):
            part = content[: draw.randrange(1, len(content))]
            flags = END_STREAM if draw.random() < 0.2 else 0
            sent = frame(HEADERS, head(BAD_KEY), END_HEADERS, one) + frame(DATA, part, flags, one)
            yield sent[: draw.randrange(len(sent))] if draw.random() < 0.1 else sent, 0.0
        yield b"", draw.random() * 2.5

    def _hurry(self, draw: random.Random) -> Script:
        deadlines = {draw.choice(("total_ms", "ttft_ms", "inter_token_ms")): draw.choice((1, 2, 5, 20, 100, 1000))}
        body = chat_body(draw.randint(1, 150), stream=draw.random() < 0.7, deadlines=deadlines)
        if draw.random() < 0.5:
            yield post_bytes(CHAT, body, api_key=BAD_KEY), draw.random()
        else:
            streams = range(1, 2 * draw.randint(1, 10), 2)
            data = b"".join(chat_frames(BAD_KEY, body, one) for one in streams)
            yield opening(draw.choice((0, 1000, 2**30))) + data, draw.random()

    def _pipeline(self, draw: random.Random) -> Script:
        data = post_bytes(CHAT, chat_body(draw.randint(1, 40), stream=draw.random() < 0.5), api_key=BAD_KEY)
        yield data * draw.randint(2, 60), draw.random() * 2 * STALL_S

    def _read_nothing(self, draw: random.Random) -> Script:
        body = chat_body(200, n=draw.choice((1, 4)), stream=True)
        yield post_bytes(CHAT, body, api_key=BAD_KEY), draw.random() * 2 * STALL_S

    def _dribble(self, draw: random.Random) -> Script:
        data = post_bytes(CHAT, chat_body(5, stream=True), api_key=BAD_KEY)
        while data:
            size = draw.randint(1, 20)
            yield data[:size], draw.random() * 0.1
            data = data[size:]

    def _talk_nonsense(self, draw: random.Random) -> Script:
        begins = draw.choice((b"", b"GET / HTTP/1.1\r\n", PREFACE))
        yield begins + draw.randbytes(draw.randint(1, 2000)), draw.random() * 2.5

    def _break_framing(self, draw: random.Random) -> Script:
        yield opening(2**30) + chat_frames(BAD_KEY, chat_body(60, stream=True), 1), draw.random() * 0.2
        kind, flags, stream_id = draw.randrange(12), draw.randrange(256), draw.choice((0, 1, 2, 3, 2**31 - 1))
        yield frame(kind, draw.randbytes(draw.choice((0, 4, 5, 8, 100))), flags, stream_id), draw.random()


def _judge(status: int, content: bytes, body: dict[str, Any]) -> str:
    if status != 200:
        return f"{status}: {content[:200]!r}"
    if body["stream"]:
        is_whole = content.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in content
    else:
        is_whole = json.loads(content)["usage"]["completion_tokens"] == body["max_tokens"]
    return "whole" if is_whole else f"not whole: {content[-200:]!r}"


def write_config(directory: Path) -> Path:
    """Of a ledger, and of two tenants whose tokens of the day are many, and counted."""
    tenants = (
        f'[[tenants]]\nname = "{key}"\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
        f"limits = {{ tokens_per_day = {TOKENS_PER_DAY} }}\n"
        for key in (GOOD_KEY, BAD_KEY)
    )
    path = directory / "steploop.toml"
    path.write_text("\n".join([f'ledger = "{directory}/ledger.db"', f'api_key = ["{ADMIN_KEY}"]', *tenants]))
    return path


def tokens_left(server: ServerProcess, key: str) -> int:
    """Of the tenant's day, with nothing of it reserved for the one who asks."""
    with connected(server.port) as client:
        client.send(post_bytes("/tokenize", {"model": MODEL, "prompt": "a"}, api_key=key))
        return int(client.read_answer().headers["x-ratelimit-remaining-tokens"])


def check_nothing_is_left(server: ServerProcess, directory: Path) -> None:
    """No block, no stream, no connection, no token of a quota; every request of the ledger settled, and once."""
    server.wait_quiet(ADMIN_KEY)
    with connected(server.port) as client:
        client.send(request_bytes("GET", "/admin/requests", api_key=ADMIN_KEY))
        assert client.read_answer().json["running"] == []
    left = {key: tokens_left(server, key) for key in (GOOD_KEY, BAD_KEY)}
    for sign in ("Traceback", "Error:", "exception"):
        assert sign not in server.log, server.log[server.log.index(sign) - 2000 :][:4000]
    server.process.terminate()
    assert server.wait_exit() == 0
    found = rows(directory / "ledger.db")
    assert {row.state for row in found} == {RowState.SETTLED}
    used = Counter[str]()
    for row in found:
        used[row.tenant] += row.counted_tokens
    assert used == {key: TOKENS_PER_DAY - num_left for key, num_left in left.items()}


def run_storm(directory: Path, num_requests: int, seed: int) -> ClientStorm:
    """A server, the storm, and what must hold after it."""
    model = directory / MODEL
    write_tiny_model(model)
    with ready_server(directory / "server", model, "--config", str(write_config(directory)), *CLOCKS) as server:
        storm = ClientStorm(server.port, seed, num_requests)
        asyncio.run(storm.run())
        if set(storm.told) == {"whole"}:
            check_nothing_is_left(server, directory)
        else:
            print(server.log.count("Traceback"), "tracebacks; the first:")
            print(server.log[server.log.find("Traceback") :][:3000])
    return storm


@pytest.mark.slow
def test_well_behaved_requests_are_whole_whatever_runs_beside_them(tmp_path: Path) -> None:
    storm = run_storm(tmp_path, 250, seed=1)
    assert set(storm.told) == {"whole"}
    assert storm.told["whole"] >= 250
    assert storm.done["200 streams with shut windows"] >= 1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.test_client_storm", description=__doc__)
    parser.add_argument("num_requests", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        storm = run_storm(Path(directory), arguments.num_requests, arguments.seed)
    for name, count in [*storm.done.most_common(), *storm.told.most_common()]:
        print(f"{count:9} {name}")
    print(f"{time.monotonic() - start_s:.0f} s")
    return 0 if set(storm.told) == {"whole"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
