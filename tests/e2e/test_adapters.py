"""A server of a model and its adapters: mixed, loaded and unloaded while it answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_files import save_adapter
from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.raw_http import RawAnswer, ask, connected, post, post_bytes
from tests.e2e.server_process import ServerProcess, ready_server

PROMPT = "A KV cache keeps the keys and values of every token computed, so that a decode step computes one token alone."
MOST = 6


@pytest.fixture(scope="module")
def loras(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loras")
    for i in range(4):
        save_adapter(directory / str(i), small_model, seed=i, r=4 * (i + 1), size=0.5)
    save_adapter(directory / "wide", small_model, r=32)
    (directory / "out").symlink_to(small_model)
    return directory


@pytest.fixture(scope="module")
def process(small_model: Path, loras: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("server")
    flags = ("--lora", f"first={loras / '0'}", "--lora-dir", str(loras), "--max-loras", str(MOST), "--api-key", API_KEY)
    with ready_server(home, small_model, *flags, "--ledger", str(home / "ledger.db")) as server:
        yield server


@pytest.fixture
def server(process: ServerProcess) -> Iterator[ServerProcess]:
    """With the adapter of --lora alone, before and after the test, and quiet."""
    yield process
    for card in models(process):
        if card["id"] not in (MODEL, "first"):
            assert unload(process, card["id"]).status == 200
    process.wait_quiet(API_KEY)


def models(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(server.port, "GET", "/v1/models", api_key=API_KEY).json["data"]
    return found


def load(server: ServerProcess, name: str, path: str, **more: Any) -> RawAnswer:
    asked = {"lora_name": name, "lora_path": path, **more}
    return post(server.port, "/v1/load_lora_adapter", asked, API_KEY)


def unload(server: ServerProcess, name: str) -> RawAnswer:
    return post(server.port, "/v1/unload_lora_adapter", {"lora_name": name}, API_KEY)


def completed(server: ServerProcess, model: str, **more: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}
    answer = post(server.port, "/v1/completions", asked, API_KEY)
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


def text_of(server: ServerProcess, model: str, **more: Any) -> str:
    text: str = completed(server, model, **more)["choices"][0]["text"]
    return text


def test_each_is_a_model_of_its_own_and_says_the_same_in_company(server: ServerProcess) -> None:
    for i in range(1, 4):
        answer = load(server, f"l{i}", str(i))
        assert (answer.status, answer.body) == (200, f"Success: LoRA adapter 'l{i}' added successfully.".encode())
    names = [MODEL, "first", "l1", "l2", "l3"]
    assert [(one["id"], one.get("parent"), one.get("root")) for one in models(server)] == [
        (MODEL, None, None),
        ("first", MODEL, "0"),
        *((f"l{i}", MODEL, str(i)) for i in range(1, 4)),
    ]
    alone = {name: text_of(server, name) for name in names}
    assert len(set(alone.values())) == 5
    with ThreadPoolExecutor(10) as pool:
        crowd = list(pool.map(lambda name: (name, text_of(server, name)), names * 4))
    assert crowd == [(name, alone[name]) for name in names * 4]
    assert text_of(server, "l2", prompt=PROMPT[:40]) == text_of(server, "l2", prompt=PROMPT[:40], speculation=False)
    forms = {"structured_outputs": {"regex": "(yes|no), (one|two|three)"}, "ignore_eos": False}
    assert text_of(server, "l1", **forms).startswith(("yes, ", "no, "))
    unnamed = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = post(server.port, "/v1/completions", unnamed, API_KEY).json
    assert (answer["model"], answer["choices"][0]["text"]) == (MODEL, alone[MODEL])


def test_requests_under_way_finish_and_new_ones_find_no_model(server: ServerProcess) -> None:
    assert load(server, "leaving", "1").status == 200
    streaming = {"model": "leaving", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with connected(server.port) as client:
        client.send(post_bytes("/v1/completions", {**streaming, "stream": True, "stream_options": {}}, (), API_KEY))
        client.read_until(b"data: ")
        assert b'running_lora_adapters="leaving"' in ask(server.port, "GET", "/metrics", api_key=API_KEY).body
        assert unload(server, "leaving").status == 200
        answer = post(server.port, "/v1/completions", streaming, API_KEY)
        assert (answer.status, answer.code) == (404, "model_not_found")
        rest = client.read_until(b"data: [DONE]")
    assert rest.count(b'"finish_reason":"length"') == 1
    assert unload(server, "leaving").status == 404
    server.wait_quiet(API_KEY)


def test_an_unloaded_one_gives_its_place_back_with_its_last_request(server: ServerProcess) -> None:
    """Each would take a place for ever, were it held until the garbage collector looks."""
    streaming = {"model": "passing", "prompt": PROMPT, "max_tokens": 40, "stream": True, "ignore_eos": True}
    for how in ("whole", "streamed", "unloaded midway") * 2 + ("whole", "streamed"):
        assert (answer := load(server, "passing", "1")).status == 200, (how, answer)
        if how == "whole":
            completed(server, "passing")
        else:
            with connected(server.port) as client:
                client.send(post_bytes("/v1/completions", streaming, (), API_KEY))
                client.read_until(b"data: ")
                if how == "unloaded midway":
                    assert unload(server, "passing").status == 200
                client.read_until(b"data: [DONE]")
        if how != "unloaded midway":
            assert unload(server, "passing").status == 200
        server.wait_quiet(API_KEY)
    lines = ask(server.port, "GET", "/v1/usage?by=model", api_key=API_KEY).json["data"]
    assert {line["model"]: line["requests"] for line in lines}["passing"] == 8


def test_a_name_with_other_weights_finds_nothing_cached_and_the_same_weights_do(server: ServerProcess) -> None:
    def cached(name: str) -> int:
        found: int = completed(server, name, prompt=PROMPT[2:])["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert load(server, "changing", "2").status == 200
    assert (cached("changing"), cached("changing") > 0) == (0, True)
    assert load(server, "changing", "3", load_inplace=True).status == 200
    assert cached("changing") == 0
    assert unload(server, "changing").status == 200
    assert load(server, "another name", "2").status == 200
    assert cached("another name") > 0


def test_what_cannot_be_loaded_is_refused(server: ServerProcess, small_model: Path, loras: Path) -> None:
    cases = [
        ("first", "1", {}, 400, "lora_name", "load_inplace"),
        (MODEL, "1", {}, 400, "lora_name", "another model"),
        (MODEL, "1", {"load_inplace": True}, 400, "lora_name", "another model"),
        ("a", str(small_model), {}, 400, "lora_path", "below the operator's --lora-dir"),
        ("a", "..", {}, 400, "lora_path", "below the operator's"),
        ("a", "out", {}, 400, "lora_path", "below the operator's"),
        ("a", ".", {}, 400, "lora_path", "below the operator's"),
        ("a", "x\0y", {}, 400, "lora_path", "below the operator's"),
        ("a", "nowhere", {}, 400, "lora_path", "adapter_config.json cannot be read"),
        ("a", "wide", {}, 400, "lora_path", "--max-lora-rank"),
        ("", "1", {}, 400, "lora_name", "1 to 256 characters"),
        ("n" * 257, "1", {}, 400, "lora_name", "1 to 256 characters"),
        *((name, "1", {}, 400, "lora_name", "printable") for name in ("a/b\n", "a\x1b[2J", "\u202ea", " ", "a ")),
    ]
    for name, path, more, status, param, says in cases:
        error = (answer := load(server, name, path, **more)).error
        assert (answer.status, error["param"]) == (status, param), (name, path, answer)
        assert says in error["message"]
    for i in range(MOST - 1):
        assert load(server, f"n{i}", str(loras / "1")).status == 200
    assert (answer := load(server, "more", "1")).status == 409
    assert answer.code == "lora_limit"
    assert load(server, "n0", "2", load_inplace=True).status == 200
    assert ask(server.port, "POST", "/v1/load_lora_adapter", b"{}").status == 401
