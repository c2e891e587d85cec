"""The report: facts, what stands in the way, and the exit code that follows."""

import io
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import ExitCode, NotEnoughMemory, StartupError
from server.banner import DRAFTS
from server.commands.doctor import (
    Section,
    exit_code,
    print_report,
    quality_section,
    serving_section,
    try_bind,
    version_section,
)
from server.commands.hub import NotFetched
from server.config import ServerConfig
from server.config_sources import load_config
from server.engine_loader import DEMO_DIRECTORY, Fact, machine_facts, plan_facts
from server.listening.sockets import Bind, TcpAddress, bind_value
from tests.server.given_settings import typed
from tests.server.tiny_model import CONTEXT, write_tiny_model

FREE_PORT = Bind(TcpAddress(port=0))
PLAN = (Fact("model", "[red]odd[/red], LlamaForCausalLM"), Fact("in all", "94 MiB of 20 GiB free"))


def raising(error: StartupError) -> tuple[Fact, ...]:
    raise error


def report(*sections: Section) -> str:
    stream = io.StringIO()
    print_report(sections, stream)
    return stream.getvalue()


def test_plan_says_where_each_figure_is_from(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    words = ["serve", "--model", str(tmp_path / "tiny"), "--device", "cpu", "--kv-memory", "4MiB"]
    names = ["model", "parameters", "device", "context", "tools", "thoughts", "weights", "activations", "KV cache"]
    rest = ["attention", "matmuls", "drafts", "CUDA graphs", "in all"]
    facts = {fact.name: fact.value for fact in plan_facts(load_config(typed(*words), {}))}
    assert facts["context"] == f"{CONTEXT:,} tokens: the model's own"
    assert facts["drafts"] == DRAFTS
    assert list(facts) == [*names, *rest]
    words += ["--kv-offload-memory", "1GiB", "--kv-offload-dir", "/var/cache/kv"]
    facts = {fact.name: fact.value for fact in plan_facts(load_config(typed(*words), {}))}
    assert list(facts) == [*names, "host memory", "KV files", *rest]
    assert facts["host memory"] == "1 GiB for prompts that the KV cache evicts"
    assert facts["KV files"] == "in /var/cache/kv: evicted prompts, for the next start"


def test_a_model_that_serve_would_fetch_is_no_error() -> None:
    missing = NotFetched("model org/tiny is not in the cache yet", "fetch it first")
    section = serving_section(lambda: raising(missing), [FREE_PORT])
    assert exit_code([section]) == ExitCode.OK
    assert "model org/tiny is not in the cache yet" in report(section)


def test_a_healthy_report_ends_with_yes_and_zero_and_shows_values_as_they_are_not_as_markup() -> None:
    sections = (version_section(), serving_section(lambda: PLAN, [FREE_PORT]))
    assert exit_code(sections) == ExitCode.OK
    text = report(*sections)
    assert "[red]odd[/red]" in text
    assert "\x1b" not in text
    assert text.splitlines()[-1] == "serve would start"


def test_each_error_is_told_once_with_its_fix_and_the_first_decides_the_code() -> None:
    memory = NotEnoughMemory("KV cache: need 5.0 GiB for 32768 tokens, 2.1 GiB free.", "--max-model-len 13700")
    too_old = version_section(lambda name: "4.1.0" if name == "hpack" else "99")
    assert exit_code([too_old]) == ExitCode.VERSION
    sections = (
        version_section(lambda name: None if name == "torch" else "99"),
        serving_section(lambda: raising(memory), [FREE_PORT]),
    )
    assert exit_code(sections) == ExitCode.VERSION
    assert exit_code(sections[1:]) == ExitCode.MEMORY
    text = report(*sections)
    assert f"error: torch is not installed\nfix: {sys.executable} -m pip install torch\n" in text
    assert text.count("fix: --max-model-len 13700\n") == 1
    assert text.splitlines()[-1] == "serve would refuse to start"


def test_quality_that_cannot_be_measured_keeps_no_server_from_starting() -> None:
    memory = NotEnoughMemory("Weights need 4.0 GiB as bfloat16, 2.1 GiB free.", "measure where more memory is free")

    def find() -> Iterator[Fact]:
        yield Fact("test text", "900 tokens")
        raise memory

    sections = (serving_section(lambda: PLAN, [FREE_PORT]), quality_section(find))
    assert exit_code(sections) == ExitCode.OK
    assert [fact.name for fact in sections[1].facts] == ["test text", "not measured"]
    text = report(*sections)
    assert "2.1 GiB free. Fix: measure where" in " ".join(text.replace("│", "").split())
    assert text.splitlines()[-1] == "serve would start"


def test_threads_measured_before_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpu.tune.measured_here", lambda choice, model: {"896 x 4864, bfloat16": "1; 2 from 8 tokens a step"}
    )
    facts = [(fact.name.strip(), fact.value) for fact in machine_facts(load_config({"device": "cpu"}, {}))]
    assert ("measured", "1; 2 from 8 tokens a step: 896 x 4864, bfloat16") in facts


def test_an_address_that_cannot_be_listened_on_is_told_before_serve_finds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address in (TcpAddress(port=port), TcpAddress("192.0.2.1", 0)):  # TEST-NET-1, RFC 5737: nobody's
            with pytest.raises(StartupError) as caught:
                try_bind(Bind(address))
            assert caught.value.exit_code == ExitCode.PORT
            assert address.host in caught.value.cause


def test_each_bind_is_tried_where_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    assert try_bind(bind_value(f"proxy:unix:{path}")) == f"unix:{path} is free"
    assert not path.exists()
    assert try_bind(FREE_PORT) == "127.0.0.1, on a free port"
    assert try_bind(bind_value("systemd:front")) == "systemd:front, passed by systemd"


@pytest.mark.parametrize(
    ("architecture", "token", "why"), [("Lfm2", "", "recurrent layers"), ("Llama", "x", "token 5 is")]
)
def test_a_draft_model_that_does_not_go_with_the_model_is_refused(
    tmp_path: Path, architecture: str, token: str, why: str
) -> None:
    """From its files alone: there are no weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIRECTORY / name, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    if token:
        words = tokenizer["model"]["vocab"]
        first, second = (next(word for word, i in words.items() if i == number) for number in (5, 6))
        words[first], words[second] = 6, 5
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DEMO_DIRECTORY / "config.json").read_text())
    config |= {"architectures": [f"{architecture}ForCausalLM"], "model_type": architecture.lower()}
    config |= {"full_attn_idxs": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=why):
        plan_facts(ServerConfig(draft=tmp_path))
