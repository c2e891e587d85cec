"""A gateway before three servers, each in a process of its own: clients that leave, and a server that is killed."""

import asyncio
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import ask, post_bytes
from tests.e2e.server_process import GAUGES, ServerProcess, ready_server

NUM_CANCELS = 100
NUM_CLIENTS, NUM_REQUESTS, NUM_BEFORE_KILL = 16, 60, 20


class Told(NamedTuple):
    """What a client got: the status, tokens by the usage or else by events, and the code of an error event."""

    status: int
    num_tokens: int
    error: str | None


def streaming(max_tokens: int) -> bytes:
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": "big", "prompt": "def step(plan):", "max_tokens": max_tokens, **options}
    return post_bytes("/v1/completions", body, ("connection: close",))


async def told(port: int) -> Told:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(streaming(48))
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")]
    events = [json.loads(line) for line in lines]
    error = next((one["error"]["code"] for one in events if "error" in one), None)
    assert (error is None) == (b"data: [DONE]" in body)
    counted = sum(1 for one in events if one.get("choices") and one["choices"][0]["text"])
    usage = next((one["usage"]["completion_tokens"] for one in events if one.get("usage")), counted)
    return Told(int(head.split(b" ", 2)[1]), usage, error)


async def leave(port: int, dice: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(streaming(200))
    await reader.read(dice.choice((0, 1, 1000, 4000)))
    writer.transport.abort()


async def at_once(num: int, num_all: int, work: Callable[[int], object]) -> None:
    turns = iter(range(num_all))

    async def take_turns() -> None:
        for turn in turns:
            await work(turn)  # type: ignore[misc]

    await asyncio.gather(*(take_turns() for _ in range(num)))


@pytest.mark.slow
def test_cancels_free_the_upstreams_and_a_killed_one_loses_no_request_before_its_first_byte(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    upstreams = [spawn() for _ in range(3)]
    for upstream in upstreams:
        upstream.wait_ready()
    urls = ", ".join(f'{{ url = "{one.url}" }}' for one in upstreams)
    config = tmp_path / "gateway.toml"
    config.write_text(f'[[models]]\nname = "big"\nupstream_model = "{MODEL}"\nupstreams = [{urls}]\n')
    flags = ("--config", str(config), "--ledger", str(tmp_path / "ledger.db"))
    with ready_server(tmp_path / "gateway", None, *flags) as gateway:
        port, dice = gateway.port, random.Random(5)
        asyncio.run(at_once(NUM_CLIENTS, NUM_CANCELS, lambda turn: leave(port, dice)))
        for upstream in upstreams:
            shown: dict[str, float] = {}

            def is_quiet(upstream: ServerProcess = upstream, shown: dict[str, float] = shown) -> bool:
                shown.update(upstream.metrics())
                return not any(shown[name] for name in GAUGES)

            wait_for(is_quiet, lambda shown=shown: f"a quiet upstream, with {shown}")  # type: ignore[misc]

        def billed() -> int:
            lines = ask(port, "GET", "/v1/usage?by=model").json["data"]
            return sum(line["completion_tokens"] for line in lines)

        wait_for(lambda: not ask(port, "GET", "/admin/requests").json["running"], lambda: "a quiet gateway")
        before = billed()
        answers: list[Told] = []

        async def take(turn: int) -> None:
            if turn == NUM_BEFORE_KILL:
                upstreams[1].send_signal(signal.SIGKILL)
            answers.append(await told(port))

        asyncio.run(at_once(NUM_CLIENTS, NUM_REQUESTS, take))
        assert {one.status for one in answers} == {200}
        assert {one.error for one in answers} <= {None, "upstream_error"}
        assert sum(one.error is not None for one in answers) <= NUM_CLIENTS
        num_tokens = sum(one.num_tokens for one in answers)
        wait_for(
            lambda: billed() - before == num_tokens, lambda: f"{num_tokens} in the ledger, not {billed() - before}"
        )
