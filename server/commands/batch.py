"""`steploop batch FILE`: runs a file of requests, and writes the answers beside it. Thread: main, blocking.

Over /v1/batches of the server of --url, or of one in this process, which keeps its files beside FILE until the end. The
batch's id is kept beside FILE, too: after Ctrl-C, or a crash, the same command goes on.
"""

import argparse
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from core.errors import ExitCode, StartupError
from server.commands.chat import ChatClient, asked_server, check_url
from server.commands.console import progress, take_interrupts
from server.config import GiB, ServerConfig

POLL_S = 0.5
OVER = ("completed", "failed", "expired", "cancelled")
SOME_FAILED = 1  # the exit code
INTERRUPTED = 130  # as shells report SIGINT


class _State(msgspec.Struct):
    """What goes on after an interruption.

    Args:
        key: of the server in this process: the batch's lines are asked with it.
    """

    url: str | None = None
    batch_id: str | None = None
    key: str = ""


class _Body(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    url: str
    body: _Body


def run(arguments: argparse.Namespace, config: ServerConfig) -> int:
    """Raises StartupError: the file is none of requests, or the server cannot be reached or started, or refuses."""
    check_url(arguments)
    file: Path = arguments.file
    endpoint, models = _read(file)
    beside = file.with_name(f"{file.name}.steploop")  # the state, and the files of a server in this process
    state = _load(beside, arguments.url)
    take_interrupts()
    try:
        if state.url is None:
            _save(beside, state)
        room = {"max_file_bytes": 2 * GiB, "max_files_bytes": 2**50}
        with asked_server(arguments, config, models, state.key, files=beside / "files", **room) as client:
            if state.batch_id is None:
                state.batch_id = _create(client, file, endpoint, arguments.window)
                _save(beside, state)
            batch = _wait(client, state.batch_id)
            written = _write(client, batch, file)
    except KeyboardInterrupt:
        print("\nstopped: the same command continues", file=sys.stderr)
        return INTERRUPTED
    shutil.rmtree(beside)
    counts = batch["request_counts"]
    for error in (batch["errors"] or {"data": []})["data"]:
        print(error["message"], file=sys.stderr)
    print(f"{batch['status']}: {counts['completed']} answered, {counts['failed']} failed", file=sys.stderr)
    for path in written:
        print(path)
    return ExitCode.OK if batch["status"] == "completed" and not counts["failed"] else SOME_FAILED


def _read(file: Path) -> tuple[str, set[str]]:
    """The endpoint of the file's first line, and the models that its lines name."""
    try:
        with file.open("rb") as opened:
            lines = [msgspec.json.decode(text, type=_Line) for text in opened if text.strip()]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        cause = f"{file} cannot be read as a file of requests: {error}"
        raise StartupError(cause, "docs/api.md shows the format of a line", ExitCode.USAGE) from error
    if not lines:
        raise StartupError(f"{file} has no lines", "docs/api.md shows the format of a line", ExitCode.USAGE)
    return lines[0].url, {line.body.model for line in lines if line.body.model is not None}


def _load(beside: Path, url: str | None) -> _State:
    try:
        state = msgspec.json.decode((beside / "state.json").read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError):
        return _State(url, key=secrets.token_urlsafe(24))
    if state.url != url:
        where = "in this process" if state.url is None else f"by {state.url}"
        raise StartupError(f"the file is being answered {where}", f"continue there, or remove {beside}", ExitCode.USAGE)
    return state


def _save(beside: Path, state: _State) -> None:
    """Whole, and for its owner alone."""
    beside.mkdir(mode=0o700, exist_ok=True)
    new = beside / "state.new"
    new.write_bytes(msgspec.json.encode(state))
    os.replace(new, beside / "state.json")


def _create(client: ChatClient, file: Path, endpoint: str, window: str) -> str:
    with file.open("rb") as opened:
        form = {"data": {"purpose": "batch"}, "files": {"file": (file.name, opened, "application/jsonl")}}
        uploaded = client.document("POST", "/v1/files", **form)
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
    return str(client.document("POST", "/v1/batches", json=body)["id"])


def _wait(client: ChatClient, batch_id: str) -> dict[str, Any]:
    with progress(sys.stderr, "lines") as report:
        while True:
            batch: dict[str, Any] = client.document("GET", f"/v1/batches/{batch_id}")
            counts = batch["request_counts"]
            if counts["total"]:
                report(counts["completed"] + counts["failed"], counts["total"])
            if batch["status"] in OVER:
                return batch
            time.sleep(POLL_S)


def _write(client: ChatClient, batch: dict[str, Any], file: Path) -> list[Path]:
    """The answers and the errors, beside the file."""
    written = []
    for kind in ("output", "error"):
        if (file_id := batch[f"{kind}_file_id"]) is None:
            continue
        path = file.with_name(f"{file.stem}.{kind}{file.suffix}")
        client.save(f"/v1/files/{file_id}/content", path)
        written.append(path)
    return written
