"""Comparing servers: mixed loads against a small server, how peers are found, the tables, and the GGUF file."""

import asyncio
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.beside import Abandoned, Beside, abandon_prefill, send_beside
from bench.kit import DidNotStart, free_port, running
from bench.load import CannotRun, LoadConfig
from bench.make_model import (
    LLAMA_8B,
    MIXES,
    MOE_1B,
    QWEN2_05B,
    CannotConvert,
    make_model,
    stored_bytes_a_weight,
    write_gguf,
)
from bench.peers import (
    LLAMA,
    PARTS,
    STEPLOOP,
    TRANSFORMERS,
    Load,
    Missing,
    PeerBench,
    PeerServer,
    compare_in_turn,
    find_server,
)
from gpu.checkpoint import GgufReader, open_checkpoint
from gpu.parameters import interleave_halves
from tests.test_bench_load import num_words, write_chunk, write_whole
from tests.test_bench_models import TINY

LONG_WORDS = 100


class TurnServer:
    """Streams go on by turns; while a long prompt is computed nobody else does.

    Args:
        is_endless: a long prompt is computed until its client leaves.
    """

    def __init__(self, is_endless: bool) -> None:
        self._is_endless = is_endless
        self.port = 0
        self.num_left = 0
        self.lengths: list[int] = []
        self._is_free = asyncio.Event()
        self._is_free.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await self._answer(json.loads(await reader.readexactly(length)), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        size = num_words(request)
        self.lengths.append(size)
        if request["messages"][0]["content"].startswith("refuse"):
            write_whole(writer, "500 Internal Server Error", {})
            return
        if size > LONG_WORDS and request["max_tokens"] == 1:
            await self._prefill(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(request["max_tokens"]):
            await self._is_free.wait()
            self._event(writer, {"choices": [{"delta": {"content": "word "}}]})
            await writer.drain()
            await asyncio.sleep(0)
        self._event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"prompt_tokens": size}})
        write_chunk(writer, b"data: [DONE]\n\n")
        write_chunk(writer, b"")

    async def _prefill(self, reader: asyncio.StreamReader) -> None:
        self._is_free.clear()
        if self._is_endless:
            await reader.read()  # returns once the client has left
            self.num_left += 1
        else:
            for _ in range(20):
                await asyncio.sleep(0)
        self._is_free.set()

    def _event(self, writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
        write_chunk(writer, b"data: " + json.dumps(fields).encode() + b"\n\n")


def against_turns(
    measure: Callable[[LoadConfig], Awaitable[Any]], is_endless: bool = False, **settings: Any
) -> tuple[TurnServer, Any]:
    async def run() -> tuple[TurnServer, Any]:
        turns = TurnServer(is_endless)
        server = await asyncio.start_server(turns.serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            config = LoadConfig(
                host="127.0.0.1", port=port, model="m", concurrency=1, prompt_tokens=30, max_tokens=4, timeout_s=30.0
            )
            return turns, await measure(replace(config, **settings))

    return asyncio.run(run())


def test_streams_are_measured_while_the_long_prompt_is_computed() -> None:
    turns, stalled = against_turns(lambda config: send_beside(config, 3, 400, 1, 0.0, 2048))
    assert isinstance(stalled, Beside)
    assert stalled.num_long_tokens == 400
    assert stalled.long_ttft_s.count == 1
    assert stalled.inter_token_s.count >= 3  # each stream went on afterwards
    assert turns.lengths[-4:] == [30, 30, 30, 400]


def test_a_short_prompt_follows_a_client_that_left() -> None:
    turns, abandoned = against_turns(lambda config: abandon_prefill(config, 400), is_endless=True)
    assert isinstance(abandoned, Abandoned)
    assert abandoned.alone_s > 0
    assert abandoned.next_s > 0
    assert turns.lengths[-3:] == [30, 400, 30]
    assert turns.num_left == 1


def test_refused_streams_are_no_measurement() -> None:
    with pytest.raises(CannotRun, match="http_500"):
        against_turns(lambda config: send_beside(config, 2, 400, 1, 0.0, 2048), prompt_tokens=None, prompt="refuse")


def test_a_server_that_ends_did_not_start() -> None:
    with pytest.raises(DidNotStart, match="ended with 3"), running([sys.executable, "-c", "exit(3)"], free_port()):
        pytest.fail("it has ended")


def test_servers_are_started_over_the_same_directory(tmp_path: Path) -> None:
    steploop = find_server(STEPLOOP, tmp_path, 2, 8192, tmp_path)
    assert isinstance(steploop, PeerServer)
    command = steploop.command_at(81)
    assert command[3:6] == ["serve", "--model", str(tmp_path)]
    assert command[-6:] == ["--threads", "2", "--host", "127.0.0.1", "--port", "81"]
    assert steploop.ignores_eos


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, word in ((LLAMA, "make peers"), (TRANSFORMERS, "accelerate")):
        with pytest.raises(Missing, match=word):
            find_server(name, tmp_path, None, 8192, tmp_path)


def test_a_server_that_does_not_start_is_a_failure_and_a_gap_in_the_tables(tmp_path: Path) -> None:
    server = PeerServer("a", [sys.executable, "-c", "exit(3)"], "m", "/health", True)
    peer = PeerBench(server, Load(), lambda num_streams: 1.0)
    with (tmp_path / "log").open("wb") as log:
        peer.run(PARTS[:-1], log)
    assert (peer.closed, peer.beside) == ([], {"server": "a"})
    assert len(peer.failures) == 1
    assert "ended with 3" in peer.failures[0]


class Steady:
    """A peer whose requests take these times in turn: the first token after 1 s."""

    def __init__(self, name: str, ends_s: list[float]) -> None:
        self.name, self._ends_s = name, ends_s

    @contextmanager
    def up(self, log: Any) -> Iterator[Callable[..., Any]]:
        yield lambda *load: SimpleNamespace(
            end_to_end_s=SimpleNamespace(p50=self._ends_s.pop(0)), ttft_s=SimpleNamespace(p50=1.0)
        )


def test_servers_are_compared_in_turn_by_the_median_of_ratios() -> None:
    load = Load((4,), num_output=11, rounds=3)
    peers: list[Any] = [Steady("a", [2, 3, 6, 1, 1, 1]), Steady("b", [3, 11, 11, 1, 1, 1])]
    decode, prefill = compare_in_turn(*peers, load, io.BytesIO())
    assert (decode["a"], decode["b"]) == (5, 1)
    assert (decode["ratio"], decode["least"], decode["greatest"], decode["TTFT"]) == (2, 2, 5, 1)
    assert (prefill["tokens in"], prefill["a"], prefill["ratio"]) == (512, 512, 1)


@pytest.mark.parametrize("preset", [QWEN2_05B, LLAMA_8B])
def test_a_gguf_file_holds_the_same_numbers(preset: dict[str, Any], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: make peers")
    make_model({**preset, **TINY, "head_dim": 8, "rope_scaling": None}, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(found) == len(weights)
    up = torch.from_numpy(found["blk.1.ffn_up.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(up, weights["model.layers.1.mlp.up_proj.weight"])
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    expected = interleave_halves(query, 8) if preset is LLAMA_8B else query
    assert torch.equal(torch.from_numpy(found["blk.0.attn_q.weight"].data.copy()).view(torch.bfloat16), expected)
    assert torch.equal(torch.from_numpy(found["output_norm.weight"].data.copy()), weights["model.norm.weight"].float())


@pytest.mark.parametrize("mix", MIXES[1:])
def test_a_quantised_file_has_the_mixs_formats(mix: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make peers")
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 32}
    make_model({**QWEN2_05B, **TINY, **wide, "num_attention_heads": 8}, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf", mix)
    tensors = open_checkpoint(tmp_path / "model.gguf").tensors
    matrices = [found for found in tensors.values() if len(found.shape) > 1]
    formats = {"Q4_K_M": {"Q4_K", "Q6_K"}, "Q4_0": {"Q4_0", "Q6_K"}}.get(mix, {mix})
    assert {found.format for found in matrices} == formats
    numbers, num_bytes = sum(math.prod(found.shape) for found in matrices), sum(found.size_bytes for found in matrices)
    assert stored_bytes_a_weight(tmp_path / "model", mix) == pytest.approx(num_bytes / numbers)
    with GgufReader(tmp_path / "model.gguf") as reader:
        embedding = reader.get_tensor("model.embed_tokens.weight")
    assert not embedding[:3].any()
    assert 0.002 < embedding[3:].std() < 0.05


@pytest.mark.parametrize(
    ("preset", "changes", "cause"),
    [
        (LLAMA_8B, {"head_dim": 8}, "rope_scaling"),
        (MOE_1B, {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}, "Qwen3Moe"),
    ],
)
def test_models_that_gguf_is_not_written_for_are_named(
    preset: dict[str, Any], changes: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make peers")
    make_model({**preset, **TINY, **changes}, tmp_path / "model")
    with pytest.raises(CannotConvert, match=cause):
        write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PR_SET_PDEATHSIG")
def test_what_is_bound_ends_with_who_started_it() -> None:
    """The pipe has no writer left when both are gone: killed outright, the one that starts has no time to end it."""
    reader, writer = os.pipe()
    lasts = f"import os, signal; os.write({writer}, b'up'); signal.pause()"
    starts = (
        "import subprocess, sys, signal; from bench.kit import bound\n"
        f"subprocess.Popen(bound([sys.executable, '-c', {lasts!r}]), pass_fds=({writer},), start_new_session=True)\n"
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", starts], pass_fds=(writer,)) as parent:
        os.close(writer)
        assert os.read(reader, 10) == b"up"
        parent.kill()
    assert os.read(reader, 10) == b""
    os.close(reader)
