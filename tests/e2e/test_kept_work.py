"""Stored responses, files and batches by the openai package and the command line, against a real server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.polling import wait_for
from tests.e2e.server_process import ServerProcess, ready_server

LINE_BODY = {"model": MODEL, "prompt": "x", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def keeping(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("keeping")
    flags = ("--ledger", str(directory / "ledger.db"), "--store-responses", "1d", "--files", str(directory / "files"))
    with ready_server(directory, small_model, *flags) as server:
        yield server


@pytest.fixture
def client(keeping: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{keeping.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def write_lines(path: Path, num: int, **body: Any) -> Path:
    lines = (
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": LINE_BODY | body} for i in range(num)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_responses_go_on_and_are_deleted(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input="What is a step?", **asked)
    *_, last = client.responses.create(input="And then?", previous_response_id=first.id, stream=True, **asked)
    second = last.response
    assert (second.previous_response_id, second.store) == (first.id, True)
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    shown = client.responses.retrieve(second.id)
    assert shown.output_text == second.output_text
    (item,) = client.responses.input_items.list(second.id).data
    assert item.type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.create(input="And then?", previous_response_id=second.id, **asked)


def test_a_batch_from_file_to_answers(client: OpenAI, tmp_path: Path) -> None:
    with write_lines(tmp_path / "in.jsonl", 5).open("rb") as opened:
        file = client.files.create(
            file=opened, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"k": "v"}
    )
    wait_for(lambda: client.batches.retrieve(made.id).status == "completed", lambda: "the batch")
    batch = client.batches.retrieve(made.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.error_file_id) == (5, 5, None)
    assert client.batches.list(limit=1).data[0].id == made.id
    assert batch.output_file_id is not None
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).iter_lines()]
    alone = client.completions.create(**LINE_BODY)  # type: ignore[call-overload]
    assert [one["custom_id"] for one in answers] == [f"c{i}" for i in range(5)]
    assert {one["response"]["body"]["choices"][0]["text"] for one in answers} == {alone.choices[0].text}
    assert {one.id for one in client.files.list()} >= {file.id, batch.output_file_id}
    assert client.files.delete(file.id).deleted
    assert client.batches.cancel(made.id).status == "completed"


def run_batch(file: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "server", "batch", str(file), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("is_remote", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_command_goes_on_after_an_interruption(
    keeping: ServerProcess, small_model: Path, tmp_path: Path, is_remote: bool
) -> None:
    num = 120  # so many that none is quick enough to end before it is interrupted
    file = write_lines(tmp_path / "in.jsonl", num, max_tokens=64)
    flags = ("--url", keeping.url) if is_remote else ("--model", str(small_model))
    state = tmp_path / "in.jsonl.steploop" / "state.json"
    first = run_batch(file, *flags)
    wait_for(lambda: state.exists() and b"batch_" in state.read_bytes(), lambda: "the batch")
    first.send_signal(signal.SIGINT)
    told = first.communicate(timeout=300)[1]
    assert first.returncode == 130, told
    second = run_batch(file, *flags)
    out, told = second.communicate(timeout=120)
    assert (second.returncode, out.splitlines()) == (0, [str(tmp_path / "in.output.jsonl")]), told
    assert f"completed: {num} answered, 0 failed" in told
    answers = [json.loads(text) for text in (tmp_path / "in.output.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [f"c{i}" for i in range(num)]
    assert not state.exists()
