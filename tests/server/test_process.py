"""The whole process but for its model: a real thread, real sockets, ports that the system chooses."""

import asyncio
import errno
import json
import os
import signal
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from core.errors import BadCheckpoint, ExitCode, StartupError
from core.kv_cache import BlockLabel
from server import __version__
from server.config import ServerConfig
from server.ledger.usage import ModelPrice, Prices
from server.loaded_engine import LoadedEngine
from server.process import Server
from tests.server.running_server import LIMITS, Running, ask, closing, load_with, on_loop
from tests.server.simulated_server import MODEL, STREAM, chat, request
from tests.server.test_metrics import samples_of

pytestmark = pytest.mark.usefixtures("_keep_interpreter_settings", "_keep_signal_handlers")


@on_loop
async def test_it_serves_from_ready_to_stop() -> None:
    running = Running(load_with())
    server = running.server
    await server.wait_ready()
    assert (await ask(server, closing(request("GET", "/ready")))).status == 200
    whole = await ask(server, closing(chat()))
    streamed = await ask(server, closing(chat(**STREAM)))
    assert (whole.status, whole.text()) == (200, streamed.text())
    assert whole.usage is not None
    assert streamed.usage == whole.usage | {"prompt_tokens_details": {"cached_tokens": 16}}, "the first one's block"
    card = (await ask(server, closing(request("GET", "/v1/models")))).json["data"][0]
    assert card["id"] == MODEL
    assert "demonstration" in card["description"]
    assert any(f":{server.listener.port}" in line for line in running.banner)
    server.stop(5)
    assert await running.exit is ExitCode.OK
    assert not server._engine_thread._thread.is_alive()


@on_loop
async def test_while_it_loads_the_port_answers_with_the_stage() -> None:
    may_load = threading.Event()
    loop = asyncio.get_running_loop()
    loading = asyncio.Event()

    def load(*args: Any) -> LoadedEngine:
        args[2]("counting sheep")
        loop.call_soon_threadsafe(loading.set)
        may_load.wait()
        return load_with()(*args)

    running = Running(load)
    await loading.wait()
    assert (await ask(running.server, closing(request("GET", "/health")))).status == 200
    for data in (request("GET", "/ready"), chat()):
        answer = await ask(running.server, closing(data))
        assert (answer.status, answer.json["error"]["code"]) == (503, "loading")
        assert "counting sheep" in answer.json["error"]["message"]
    may_load.set()
    await running.server.wait_ready()
    assert (await ask(running.server, closing(chat()))).status == 200
    running.server.stop(0)
    assert await running.exit is ExitCode.OK


@on_loop
async def test_model_that_cannot_be_loaded_is_a_start_up_error() -> None:
    def load(*args: Any) -> LoadedEngine:
        raise BadCheckpoint("There are no weights.", "bring some")

    running = Running(load)
    with pytest.raises(BadCheckpoint):
        await running.server.wait_ready()
    with pytest.raises(BadCheckpoint):
        await running.exit
    assert not running.banner


@on_loop
async def test_fault_in_loading_is_an_engine_failure(caplog: pytest.LogCaptureFixture) -> None:
    def load(*args: Any) -> LoadedEngine:
        raise ZeroDivisionError

    assert await Running(load).exit is ExitCode.ENGINE
    assert "ZeroDivisionError" in caplog.text


@on_loop
async def test_address_in_use_is_a_start_up_error_before_anything_is_loaded() -> None:
    running = Running(load_with())
    await running.server.wait_ready()
    port = running.server.listener.port
    second = Server(ServerConfig(port=port), load_with(), print)
    with pytest.raises(StartupError):
        await second.run()
    running.server.stop(0)
    await running.exit


@on_loop
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


@on_loop
async def test_routers_are_told_what_is_served_and_how_much_of_it() -> None:
    running = Running(load_with())
    await running.server.wait_ready()
    model = (await ask(running.server, closing(request("GET", "/model_info")))).json
    server = (await ask(running.server, closing(request("GET", "/server_info")))).json
    running.server.stop(0)
    await running.exit
    assert (model["model_path"], model["tokenizer_path"], model["served_model_name"]) == (MODEL, MODEL, MODEL)
    assert (model["model_type"], model["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (model["is_generation"], model["has_image_understanding"]) == (True, False)
    assert (server["served_model_name"], server["version"]) == (MODEL, __version__)
    assert model["max_model_len"] == server["max_model_len"] == server["context_length"] == LIMITS.max_model_len
    assert server["max_num_reqs"] == server["max_running_requests"] == LIMITS.max_sequences
    assert server["max_total_tokens"] == LIMITS.num_blocks * LIMITS.block_size
    assert server["max_prefill_tokens"] == LIMITS.max_batch_tokens
    assert server["binds"] == [f"http://127.0.0.1:{running.server.listener.port}"]


@pytest.mark.parametrize("path", ["/model_info", "/server_info"])
@on_loop
async def test_routers_need_the_key_and_a_model_that_is_loaded(path: str) -> None:
    may_load = threading.Event()

    def load(*args: Any) -> LoadedEngine:
        may_load.wait()
        return load_with()(*args)

    running = Running(load, api_keys=("s3cret",))
    await asyncio.sleep(0)  # until it listens
    while not running.server.listener.port:
        await asyncio.sleep(0)
    assert (await ask(running.server, closing(request("GET", path)))).status == 401
    key = "Authorization: Bearer s3cret"
    assert (await ask(running.server, closing(request("GET", path, None, key)))).status == 503
    may_load.set()
    await running.server.wait_ready()
    assert (await ask(running.server, closing(request("GET", path, None, key)))).status == 200
    running.server.stop(0)
    await running.exit


@on_loop
async def test_an_address_of_other_machines_without_keys_is_given_up_again() -> None:
    running = Running(load_with(), host="0.0.0.0")
    with pytest.raises(StartupError, match="callers are not authenticated"):
        await running.exit
    with socket.socket() as probe:  # nobody listens there any more
        assert probe.connect_ex(("127.0.0.1", running.server.listener.port)) == errno.ECONNREFUSED


@on_loop
async def test_page_of_metrics_knows_the_model_and_its_blocks_from_the_start() -> None:
    stored = [(slot, BlockLabel(slot + 1, (("", ""), bytes([slot])))) for slot in range(3)]
    running = Running(load_with(limits=replace(LIMITS, num_host_blocks=5), stored=stored))
    await running.server.wait_ready()
    page = await ask(running.server, closing(request("GET", "/metrics")))
    samples = samples_of(page.body)
    label = f'model_name="{MODEL}"'
    assert samples[f"steploop_kv_blocks{{{label}}}"] == LIMITS.num_blocks  # before anything was computed
    assert samples[f"steploop_kv_host_blocks{{{label}}}"] == 5
    assert samples[f"steploop_kv_host_blocks_used{{{label}}}"] == 3  # what the process before has left
    assert samples[f"steploop_steps_total{{{label}}}"] == 0
    for reason in ("engine_error", "internal_error"):  # alerts see a failure as the rise of its counter
        assert samples[f'steploop_requests_failed_total{{{label},reason="{reason}"}}'] == 0
    assert json.loads((await ask(running.server, closing(request("GET", "/health")))).body) == {"status": "ok"}
    running.server.stop(0)
    await running.exit
