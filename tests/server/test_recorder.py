"""Requests that are recorded, and run again: what is kept of them, and where their tokens differ."""

import dataclasses
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from core.errors import StartupError
from core.tool_detection import ToolStyle
from core.types import TokenChunk
from server.commands import replay
from server.config import ServerConfig
from server.observing.recorder import (
    FILES,
    LINE_BYTES,
    MAX_WAITING_BYTES,
    REPLAY_HEADER,
    RecordedRequest,
    Recorder,
    read_records,
)
from tests.server.simulated_server import (
    STREAM,
    SimulatedServer,
    answers,
    as_caller,
    chat,
    completion,
    keyed_tenant,
    request,
    serving,
)

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "user", "content": "step"}]
SAID: list[str] = []
MARK = f"{REPLAY_HEADER}: 1"
LATE = {"model": "small", "messages": MESSAGES, "n_predict": 100, "ignore_eos": True, "deadlines": {"total_ms": 300}}
LEFT = "left"  # the client leaves in mid-stream
CASES: dict[str, bytes] = {
    "sampled": chat(temperature=1.5, seed=None),
    "streamed": chat(**STREAM, n=2, temperature=1.0),
    "stopped": completion(max_tokens=60, stop=["e", "a"], temperature=1.0),
    "ended by its id": chat(max_tokens=60, ignore_eos=False, logit_bias={"0": 5}),
    "several prompts": completion(prompt=["The engine", "A block"], n=2, logprobs=1),
    "beams": completion(beam_width=3, n=2, seed=None, ignore_eos=False),
    "grammar": chat(guided_regex="[a-f]{3,9}", ignore_eos=False),
    "called": chat(tools=[TOOL], tool_choice="required", ignore_eos=False, max_tokens=60),
    "messages": request("POST", "/v1/messages", {"model": "small", "max_tokens": 9, "messages": MESSAGES, **STREAM}),
    "responses": request("POST", "/v1/responses", {"model": "small", "max_output_tokens": 9, "input": "step"}),
    "ollama": request("POST", "/api/chat", {"model": "small", "messages": MESSAGES, "options": {"num_predict": 9}}),
    "late": request("POST", "/v1/chat/completions", LATE),
    LEFT: completion(max_tokens=90, **STREAM),
}
# With fields that a replay changes, by their other names and where else they may lie
ANY_SEED, EARLY, MOST = {"temperature": 1.5, "seed": -1}, {"total_ms": 300}, {"num_predict": 100, "ignore_eos": True}
OLLAMA = {"model": "small", "prompt": "step"}
CHANGED: dict[str, bytes] = {
    "ollama, any seed": request("POST", "/api/generate", OLLAMA | {"options": {**ANY_SEED, "timings": True}}),
    "ollama, no seed": request("POST", "/api/generate", OLLAMA | {"options": {"temperature": 1.5, "seed": None}}),
    "any seed, by another name": completion(seed=None, random_seed=-1, temperature=1.5),
    "ollama, late": request("POST", "/api/generate", OLLAMA | {"options": ANY_SEED | MOST, "deadlines": EARLY}),
    "late, with least tokens": completion(max_tokens=100, min_tokens=90, deadlines=EARLY),
    "late, by another name": completion(max_tokens=None, max_new_tokens=100, deadlines=EARLY),
    "late, with a cut prompt": completion(
        prompt="step " * 60, max_tokens=99, context_policy="middle", deadlines={"total_ms": 600}
    ),
}


@contextmanager
def recording(tmp_path: Path, keeps_bodies: bool = True, **options: Any) -> Iterator[SimulatedServer]:
    with serving(**options) as server:
        recorder = Recorder(tmp_path, keeps_bodies, 2**30, 3600.0, lambda: 1e9)
        reader = server.generations.reader
        reader.records, server.generations.recorder = True, recorder
        reader.turns = None
        reader.defaults = _with_tools(reader.defaults)
        yield server
        recorder.close()


def _with_tools(defaults: Any) -> Any:
    return msgspec.structs.replace(defaults, tool_style=ToolStyle("hermes", False, 2))


def send_all(server: SimulatedServer) -> None:
    for name, data in (CASES | CHANGED).items():
        if name == LEFT:
            transport = server.send(data)
            server.run_until(lambda transport=transport: bool(transport.received))
            transport.reset()
            server.run()
        else:
            server.ask(data)


class SimulatedClient:
    """Stands for ChatClient, without a socket."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server

    @contextmanager
    def exchange(self, method: str, path: str, body: Any) -> Iterator[Any]:
        answer = self._server.ask(request(method, path, body))
        answer.status_code, answer.read = answer.status, lambda: answer.body  # type: ignore[attr-defined]
        yield answer


def rerun(records: list[RecordedRequest], capsys: pytest.CaptureFixture[str], is_forced: bool = False) -> Any:
    with serving() as server:
        server.generations.reader.turns = None
        server.generations.reader.defaults = _with_tools(server.generations.reader.defaults)
        code = replay._replay(SimulatedClient(server), records, is_forced)  # type: ignore[arg-type]
    return code, capsys.readouterr().out.splitlines()


def test_what_was_recorded_is_computed_again_token_by_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with recording(tmp_path) as server:
        send_all(server)
        ends = [chunk for one in server.delivered for chunk in one.chunks if chunk.finish_reason is not None]
    records = list(read_records(tmp_path, SAID.append))
    by_case = dict(zip(CASES | CHANGED, records, strict=True))
    assert [record.num_tokens for record in records] == [list(map(len, record.token_ids or ())) for record in records]
    assert all(record.seed is not None and record.body is not None for record in records)
    cut = {name: "deadline_exceeded" for name in by_case if "late" in name} | {LEFT: "client_gone"}
    assert {name: record.ended for name, record in by_case.items() if record.was_cut} == cut
    assert all(0 < by_case[name].num_tokens[0] < 90 for name in cut)
    assert len(by_case["several prompts"].num_tokens) == 4
    sampled = {(one.request_id, one.index): _ids_of(one) for one in ends}
    assert by_case["ended by its id"].token_ids == [sampled[by_case["ended by its id"].request_id, 0]]
    code, lines = rerun(records, capsys)
    assert (code, lines[-1]) == (0, f"{len(records)} same, 0 differs, 0 skipped")


def test_a_server_that_records_marks_replays_and_they_are_not_replayed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(tmp_path) as server:
        server.ask(completion())
        server.ask(request("POST", "/v1/completions", json.loads(completion().partition(b"\r\n\r\n")[2]), MARK))
    assert [record.is_replay for record in read_records(tmp_path, SAID.append)] == [False, True]
    replayed = list[RecordedRequest]()
    monkeypatch.setattr(replay, "asked_server", lambda *_: nullcontext(SimpleNamespace(headers={})))
    monkeypatch.setattr(replay, "_replay", lambda client, records, is_forced: replayed.extend(records))
    monkeypatch.setattr(replay, "take_interrupts", lambda: None)
    arguments = SimpleNamespace(records=[tmp_path], request=None, url="http://localhost:1", anyway=False)
    monkeypatch.setattr(replay, "check_url", lambda _: None)
    replay.run(arguments, ServerConfig())  # type: ignore[arg-type]
    assert [record.is_replay for record in replayed] == [False]
    assert capsys.readouterr().out == "1 records were made by replays and are skipped (--request ID replays one)\n"


def _ids_of(chunk: TokenChunk) -> list[int]:
    return [*chunk.answer_ids, *([] if chunk.stop_id is None else [chunk.stop_id])]


def test_replay_names_the_first_other_token_and_why_it_cannot_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recording(tmp_path) as server:
        server.ask(completion(n=2))
    (record,) = read_records(tmp_path, SAID.append)

    def but(**fields: Any) -> RecordedRequest:
        return msgspec.structs.replace(record, **fields)

    assert record.token_ids is not None
    first, second = record.token_ids
    cases = [
        (
            but(token_ids=[first, [*second[:5], 1, *second[6:]]]),
            1,
            f"choice 1, token 5 of 12: 1 recorded, {second[5]} now",
        ),
        (but(token_ids=[first[:-1], second]), 1, f"choice 0, token 11 of 11: none recorded, {first[11]} now"),
        (but(token_ids=[first[:-1], second], ended="client_gone"), 0, "same"),
        (but(body=None, token_ids=None), 9, "its body is not recorded"),
        (but(version="0"), 9, "another version: 0 recorded"),
        (but(model_digest="1", settings_digest="2"), 9, "another model: 1 recorded,  now, settings: 2 recorded"),
        (but(prompt_digest="0"), 9, "its prompt was tokenized differently"),
        (but(body='{"prompt": 7}'), 9, "refused with 400"),
    ]
    for changed, expected, said in cases:
        code, lines = rerun([changed], capsys)
        assert (code, said in lines[0]) == (expected, True), lines
    assert rerun([but(version="0"), record], capsys, is_forced=True)[0] == 0


def test_records_name_the_tenant_and_hold_neither_keys_nor_without_leave_what_was_said(tmp_path: Path) -> None:
    for keeps_bodies in (False, True):
        directory = tmp_path / str(keeps_bodies)
        with recording(directory, keeps_bodies, tenants=(keyed_tenant("acme", "sl-secret"),)) as server:
            server.ask(as_caller(chat(), "sl-secret"))
            server.ask(as_caller(chat(temperature=9), "sl-secret"))  # refused: nothing was computed
        (file,) = directory.glob("*.jsonl")
        text = file.read_text()
        (line,) = map(json.loads, text.splitlines())
        assert ("body" in line, "token_ids" in line, "prompt_digest" in line) == (keeps_bodies,) * 3
        assert (line["tenant"], line["num_tokens"], line["seed"], line["ended"]) == ("acme", [12], 7, "length")
        assert "secret" not in text
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


RECORD = RecordedRequest(
    **dict.fromkeys(("request_id", "at", "tenant", "path", "model", "ended"), "x"),
    **dict.fromkeys(("model_digest", "settings_digest", "version"), ""),
    seed=1,
    num_prompt_tokens=1,
    num_tokens=[1],
)


@dataclasses.dataclass
class Now:
    unix_s: float = 1e9

    def __call__(self) -> float:
        self.unix_s += 1e-3
        return self.unix_s


def test_files_are_bounded_by_size_and_age(tmp_path: Path) -> None:
    now = Now()
    recorder = Recorder(tmp_path, True, 8192, 800.0, now)
    (tmp_path / "requests-notes.jsonl").write_text("mine")
    for _ in range(200):
        recorder._write(RECORD, 0)
        sizes = [path.stat().st_size for path in tmp_path.glob("requests-2*")]
        assert sum(sizes) <= 8192
        assert max(sizes) <= 8192 // FILES
    assert len(list(tmp_path.glob("requests-2*"))) >= FILES
    now.unix_s += 200.0
    recorder._turn_over()
    recorder._write(RECORD, 0)
    now.unix_s += 700.0
    recorder._turn_over()
    assert len(list(read_records(next(iter(sorted(tmp_path.glob("requests-2*")))), SAID.append))) == 1
    now.unix_s += 101.0
    recorder._turn_over()
    assert [len(list(read_records(path, SAID.append))) for path in tmp_path.glob("requests-2*")] == [0]
    assert (tmp_path / "requests-notes.jsonl").exists()
    recorder.close()
    assert list(tmp_path.glob("requests-2*")) == []


def test_what_cannot_be_written_is_dropped_and_counted_and_a_cut_line_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, True, 2**30, 1e6)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda file, data: _write_half(recorder, data))
        recorder._write(RECORD, 0)
    recorder._write(RECORD, 0)
    assert (recorder.num_written, recorder.num_dropped) == (1, 1)
    assert "No space left" in caplog.text
    SAID.clear()
    assert len(list(read_records(tmp_path, SAID.append))) == 1
    assert [text.rpartition(": ")[2] for text in SAID] == ["its last line was cut short, and is left out"]
    recorder._put_bytes = MAX_WAITING_BYTES - LINE_BYTES
    recorder.put(RECORD)
    assert recorder.num_dropped == 2
    recorder.close()
    for name, text, said in (("none", None, "cannot be read"), ("bad", "{}\n", "no recorded request")):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(StartupError, match=said):
            list(read_records(tmp_path / name, SAID.append))


def _write_half(recorder: Recorder, data: memoryview) -> int:
    with recorder._path.open("ab") as file:
        file.write(data[: len(data) // 2])
    raise OSError(28, "No space left on device")


def test_a_directory_that_cannot_be_written_to_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot be recorded"):
        Recorder(tmp_path / "file" / "below", True, 2**30, 1e6)


def test_tokens_that_a_request_asks_for_come_with_its_timings_on_every_surface() -> None:
    with serving() as server:
        server.generations.reader.defaults = _with_tools(server.generations.reader.defaults)
        for name, data in CASES.items():
            head, _, body = data.partition(b"\r\n\r\n")
            path = head.split()[1].decode()
            asked = json.loads(body) | {"timings": {"tokens": True}}
            asked.pop("deadlines", None)
            transport = server.send(request("POST", path, asked))
            server.run()
            (answer,) = answers(bytes(transport.received))
            assert answer.status == 200, (name, answer.body)
            assert b'"token_ids":[[' in answer.body, name
            assert b'"settings_digest"' in answer.body, name
