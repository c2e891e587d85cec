"""The whole process but for its model: a real thread, real sockets, ports that the system chooses."""

import asyncio
import errno
import json
import os
import re
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import BadCheckpoint, ExitCode, StartupError
from core.kv_cache import BlockLabel
from server import __version__, process
from server.app import Load
from server.config import ServerConfig
from server.grammar_guard import GuardedCompiler
from server.ledger.usage import ModelPrice, Prices
from server.listening.sockets import TcpAddress
from server.loaded_engine import LoadedEngine
from server.process import Server
from tests.server.gateway import wait_until
from tests.server.running_server import LIMITS, Running, ask, closing, load_with, serving
from tests.server.simulated_server import MODEL, STREAM, Answer, chat, request, with_lines
from tests.server.test_metrics import samples_of

pytestmark = pytest.mark.usefixtures("_keep_interpreter_settings", "_keep_signal_handlers")


async def get(running: Running, path: str, *headers: str) -> Answer:
    return await ask(running.server, closing(request("GET", path, None, *headers)))


async def test_it_serves_from_ready_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PREPARE_AFTER_S", 0.0)
    async with serving() as running:
        server = running.server
        assert (await get(running, "/ready")).status == 200
        whole = await ask(server, closing(chat()))
        streamed = await ask(server, closing(chat(**STREAM)))
        assert (whole.status, whole.text()) == (200, streamed.text())
        assert whole.usage is not None
        assert streamed.usage == whole.usage | {"prompt_tokens_details": {"cached_tokens": 16}}, "the first one's block"
        card = (await get(running, "/v1/models")).json["data"][0]
        assert card["id"] == MODEL
        assert "demonstration" in card["description"]
        assert any(f":{server.listener.port}" in line for line in running.banner)
        with pytest.raises(StartupError, match="in use"):
            await Server(ServerConfig(port=server.listener.port), load_with(), print).run()
        compiler = server._app.generations.reader.make_compiler()
        assert isinstance(compiler, GuardedCompiler)
        await wait_until(lambda: bool(compiler._idle))  # a process that tries grammars waits for the first one
    assert not server._engine_thread._thread.is_alive()


async def test_while_it_loads_the_port_answers_with_the_stage() -> None:
    may_load, loading, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def load(*args: Any) -> LoadedEngine:
        args[2]("counting sheep")
        loop.call_soon_threadsafe(loading.set)
        may_load.wait()
        return load_with()(*args)

    running = Running(load, api_keys=("s3cret",))
    await loading.wait()
    key = "Authorization: Bearer s3cret"
    assert (await get(running, "/health")).status == 200
    for data in (request("GET", "/ready"), with_lines(chat(), key)):
        answer = await ask(running.server, closing(data))
        assert (answer.status, answer.json["error"]["code"]) == (503, "loading")
        assert "counting sheep" in answer.json["error"]["message"]
    routers = ("/model_info", "/server_info")
    assert [(await get(running, path)).status for path in routers] == [401, 401]
    assert [(await get(running, path, key)).status for path in routers] == [503, 503]
    may_load.set()
    await running.server.wait_ready()
    assert [(await get(running, path, key)).status for path in routers] == [200, 200]
    running.server.stop(0)
    assert await running.exit is ExitCode.OK


async def test_an_engine_that_cannot_be_loaded_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    def load_nothing(*args: Any) -> LoadedEngine:
        raise BadCheckpoint("There are no weights.", "bring some")

    def load_wrong(*args: Any) -> LoadedEngine:
        raise ZeroDivisionError

    running = Running(load_nothing)
    with pytest.raises(BadCheckpoint):
        await running.server.wait_ready()
    with pytest.raises(BadCheckpoint):
        await running.exit
    assert not running.banner
    assert await Running(load_wrong).exit is ExitCode.ENGINE
    assert "ZeroDivisionError" in caplog.text


async def test_an_engine_that_does_not_go_with_the_configuration_ends_the_process() -> None:
    running = Running(load_with(), aliases=(MODEL,))
    with pytest.raises(StartupError, match="two models of the name"):
        await running.server.wait_ready()
    with pytest.raises(StartupError, match="two models of the name"):
        await running.exit
    assert not running.banner
    assert not running.server._engine_thread._thread.is_alive()


async def test_prices_of_a_model_that_is_not_served_are_told_at_start_and_at_each_reload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def num_told() -> int:
        return sum("[prices] has the model 'nope'" in record.getMessage() for record in caplog.records)

    running = Running(load_with(), api_keys=("k",), prices=Prices((("nope", ModelPrice()),)))
    running.server.install_signal_handlers()
    await running.server.wait_ready()
    assert num_told() == 1
    os.kill(os.getpid(), signal.SIGHUP)
    while num_told() < 2:
        await asyncio.sleep(0)
    running.server.stop(0)
    await running.exit
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


async def test_load_is_told_on_request_to_haproxy_and_to_scrapers_without_a_key() -> None:
    agent = {"agent_check": TcpAddress("127.0.0.1", 0), "metrics_without_key": True}
    async with serving(api_keys=("k",), **agent) as running:
        for form, told in {
            "text": "TEXT named_metrics.kv_cache_usage_perc=0.",
            "JSON": 'JSON {"named_metrics":{"kv_cache_usage_perc":0.',
            "BIN": None,
        }.items():
            asked = with_lines(chat(), f"endpoint-load-metrics-format: {form}", "authorization: Bearer k")
            answer = await ask(running.server, closing(asked))
            assert answer.status == 200
            value = answer.headers.get("endpoint-load-metrics")
            assert value is None if told is None else value is not None and value.startswith(told)
        page = (await get(running, "/metrics")).body.decode()
        block, num = LIMITS.block_size, LIMITS.num_blocks
        assert f'vllm:cache_config_info{{model_name="{MODEL}",block_size="{block}",num_gpu_blocks="{num}"}} 1' in page
        assert (await get(running, "/v1/models")).status == 401
        assert running.server._agent is not None

        async def line() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.server._agent.port)  # type: ignore[union-attr]
            told = await reader.read()
            writer.close()
            return told

        assert re.fullmatch(rb"up ready (100|[5-9]\d)%\n", await line())
        running.server._readiness.is_stalled = True
        assert await line() == b"down #stalled\n"
        running.server._readiness.is_draining = True
        assert await line() == b"drain\n"
        running.server._readiness.is_draining = running.server._readiness.is_stalled = False


async def test_an_agents_address_that_is_taken_is_told() -> None:
    async with serving() as other:
        taken = Running(load_with(), agent_check=TcpAddress("127.0.0.1", other.server.listener.port))
        with pytest.raises(StartupError, match="is in use"):
            await taken.exit


@pytest.mark.parametrize(
    ("load", "weight"),
    [(Load(0, 0, 0.0, 0.0), 100), (Load(9, 9, 1.0, 1.0), 50), (Load(9, 3, 1.0, None), 25), (Load(9, 3, 1.0, 1e9), 1)],
)
def test_a_server_wants_less_of_its_weight_the_longer_requests_wait(load: Load, weight: int) -> None:
    assert load.weight == weight


async def test_routers_are_told_what_is_served_and_how_much_of_it() -> None:
    async with serving() as running:
        model = (await get(running, "/model_info")).json
        server = (await get(running, "/server_info")).json
        binds = [f"http://127.0.0.1:{running.server.listener.port}"]
        for older, path in {"/get_model_info": model, "/get_server_info": server}.items():
            assert (await get(running, older)).json == path
        assert (await get(running, "/health_generate")).status == 200
        assert (await get(running, "/is_sleeping")).json == {"is_sleeping": False}
        (load,) = (await get(running, "/v1/loads")).json["loads"]
        assert (load["num_running_reqs"], load["token_usage"], load["max_running_requests"]) == (
            0,
            0,
            LIMITS.max_sequences,
        )
    names = dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), MODEL)
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert model.items() >= (names | {"is_generation": True, "has_image_understanding": False}).items()
    assert {name: model[name] for name in kind} == kind
    assert model["max_model_len"] == LIMITS.max_model_len
    assert {name: server[name] for name in server if name in EXPECTED} == EXPECTED
    assert server["binds"] == binds


EXPECTED = {
    "served_model_name": MODEL,
    "version": __version__,
    "max_model_len": LIMITS.max_model_len,
    "context_length": LIMITS.max_model_len,
    "max_num_reqs": LIMITS.max_sequences,
    "max_running_requests": LIMITS.max_sequences,
    "max_total_tokens": LIMITS.num_blocks * LIMITS.block_size,
    "max_prefill_tokens": LIMITS.max_batch_tokens,
}


async def test_an_address_of_other_machines_without_keys_is_given_up_again() -> None:
    running = Running(load_with(), host="0.0.0.0")
    with pytest.raises(StartupError, match="callers are not authenticated"):
        await running.exit
    with socket.socket() as probe:  # nobody listens there any more
        assert probe.connect_ex(("127.0.0.1", running.server.listener.port)) == errno.ECONNREFUSED


async def test_page_of_metrics_knows_the_model_and_its_blocks_from_the_start() -> None:
    stored = [(slot, BlockLabel(slot + 1, (("", ""), bytes([slot])))) for slot in range(3)]
    async with serving(load_with(limits=replace(LIMITS, num_host_blocks=5), stored=stored)) as running:
        samples = samples_of((await get(running, "/metrics")).body)
        assert json.loads((await get(running, "/health")).body) == {"status": "ok"}
    label = f'model_name="{MODEL}"'
    assert samples[f"steploop_kv_blocks{{{label}}}"] == LIMITS.num_blocks  # before anything was computed
    assert samples[f"steploop_kv_host_blocks{{{label}}}"] == 5
    assert samples[f"steploop_kv_host_blocks_used{{{label}}}"] == 3  # what the process before has left
    assert samples[f"steploop_steps_total{{{label}}}"] == 0
    for reason in ("engine_error", "internal_error"):  # alerts see a failure as the rise of its counter
        assert samples[f'steploop_requests_failed_total{{{label},reason="{reason}"}}'] == 0


async def test_a_ledger_whose_directory_cannot_be_created_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError) as caught:
        Server(ServerConfig(port=0, ledger=tmp_path / "file" / "ledger.db"), load_with(), print)
    assert caught.value.cause.startswith(f"the ledger's directory {tmp_path / 'file'} does not exist and cannot be")
    assert "--ledger FILE" in caught.value.fix


async def test_an_alias_is_the_model_under_another_name_and_billed_as_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with serving(
        aliases=("gpt-4o-mini",), ledger=path, prices=Prices(((MODEL, ModelPrice(prompt=1)),))
    ) as running:
        listed = [model["id"] for model in (await get(running, "/v1/models")).json["data"]]
        assert listed == [MODEL, "gpt-4o-mini"]
        answers = [await ask(running.server, closing(chat(model=name))) for name in ("gpt-4o-mini", MODEL, None)]
        assert [answer.json["model"] for answer in answers] == ["gpt-4o-mini", MODEL, MODEL]
        assert len({answer.text() for answer in answers}) == 1
        assert (await ask(running.server, closing(chat(model="gpt-4o")))).status == 404
        usage = (await get(running, "/v1/usage?by=model")).json["data"]
    assert [(line["model"], line["requests"]) for line in usage] == [(MODEL, 3)]
