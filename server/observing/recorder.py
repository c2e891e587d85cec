"""Keeps requests in files, one JSON object a line, so that `steploop replay` can run them again.

A line has what repeats an answer: the seed, digests of the model and the settings, the version. Bodies and tokens are
in it only where the operator asks for them; headers, and with them keys, never are. Files are their owner's alone,
bounded together by size and age. Thread: loop for Recorder.put; a thread of its own writes, and what it cannot keep up
with is dropped and counted.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from core.errors import ExitCode, StartupError

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 2**20  # of records that are not written yet
FILES = 8  # at least, that the bounds are divided into: the oldest file goes as a whole
MOST_FILE_BYTES = 64 * 2**20
LOOK_S = 600.0  # how often files are looked at that are too old
LINE_BYTES = 512  # about, without body and tokens
PATTERN = "requests-*.jsonl"
REPLAY_HEADER = "x-steploop-replay"  # of the requests of `steploop replay`
_STAMP = "%Y%m%dT%H%M%S.%fZ"


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line: one generation that the engine has computed some of.

    Args:
        at: when it ended, ISO 8601.
        model: as it was asked for.
        ended: the finish reasons of its choices; or the code of the error that ended it, or "client_gone".
        num_tokens: of each sequence, ids that end it included.
        body: as it came; None: bodies are not kept.
        prompt_digest: see digest_of; None as body.
        token_ids: of each sequence, which are num_tokens; None as body.
        is_replay: of a recorded request, which is not to be replayed once more.
    """

    request_id: str
    at: str
    tenant: str
    path: str
    model: str
    model_digest: str
    settings_digest: str
    version: str
    seed: int | None
    ended: str
    num_prompt_tokens: int
    num_tokens: list[int]
    body: str | None = None
    prompt_digest: str | None = None
    token_ids: list[list[int]] | None = None
    is_replay: bool = False

    @property
    def was_cut(self) -> bool:
        """It ended for a reason that another run of it need not meet."""
        return not set(self.ended.split(",")) <= {"stop", "length", "tool_calls"}


def digest_of(prompts: Any) -> str:
    """Of the prompts as they were computed, which are sequences of token ids."""
    found = sha256()
    for ids in prompts:
        found.update(len(ids).to_bytes(8, "little") + np.asarray(ids, np.int32).tobytes())
    return found.hexdigest()[:16]


class Recorder:
    """Writes requests into the files of a directory.

    Args:
        keeps_bodies: and tokens.
        most_bytes: of all its files.
        keep_s: of each line.
        unix: seconds since 1970.
    """

    def __init__(
        self, directory: Path, keeps_bodies: bool, most_bytes: int, keep_s: float, unix: Callable[[], float] = time.time
    ) -> None:
        """Raises StartupError: the directory cannot be made, or written to."""
        self.keeps_bodies = keeps_bodies
        self.num_written = 0
        self._num_refused = self._num_failed = 0  # counted by the loop, and by the thread
        self._directory, self._most_bytes, self._keep_s, self._unix = directory, most_bytes, keep_s, unix
        self._executor = ThreadPoolExecutor(1, "recorder")
        self._put_bytes = self._taken_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._path, self._file = directory, -1
        self._file_bytes, self._file_ends_s = 0, 0.0
        try:
            directory.mkdir(0o700, parents=True, exist_ok=True)
            self._begin_file()
        except OSError as error:
            cause = f"requests cannot be recorded in {directory}: {error.strerror or error}"
            raise StartupError(cause, "--record DIR, that this user can write", ExitCode.TRANSIENT) from error

    def put(self, record: RecordedRequest) -> None:
        """Write it in its turn, unless too much waits."""
        size_bytes = LINE_BYTES + len(record.body or "") + 8 * sum(record.num_tokens)
        if self._put_bytes - self._taken_bytes + size_bytes > MAX_WAITING_BYTES:
            self._num_refused += 1
            self._warn("the disk is too slow")
            return
        self._put_bytes += size_bytes
        self._executor.submit(self._write, record, size_bytes)

    @property
    def num_dropped(self) -> int:
        return self._num_refused + self._num_failed

    def watch_age(self, loop: asyncio.AbstractEventLoop) -> None:
        """Delete what is too old from now on, though nothing comes to be written."""
        self._executor.submit(self._turn_over)
        self._timer = loop.call_later(LOOK_S, self.watch_age, loop)

    def close(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
        self._executor.shutdown()
        os.close(self._file)
        if not self._file_bytes:
            self._path.unlink(missing_ok=True)

    # Thread: the recorder's own, from here on; at start the loop's.

    def _write(self, record: RecordedRequest, size_bytes: int) -> None:
        try:
            line = memoryview(msgspec.json.encode(record) + b"\n")
            if self._file_bytes + len(line) > self._most_file_bytes or self._unix() >= self._file_ends_s:
                self._begin_file()
            self._file_bytes += len(line)
            while line:
                line = line[os.write(self._file, line) :]
            self.num_written += 1
        except OSError as error:
            self._num_failed += 1
            self._file_ends_s = 0.0  # the line may be cut: the next one begins a file
            self._warn(error.strerror or str(error))
        finally:
            self._taken_bytes += size_bytes

    def _turn_over(self) -> None:
        try:
            if self._file_bytes and self._unix() >= self._file_ends_s:
                self._begin_file()
            else:
                self._drop_old()
        except OSError as error:
            logger.warning("old requests in %s cannot be deleted: %s", self._directory, error)

    def _warn(self, why: str) -> None:
        if self.num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th...
            logger.warning("%d requests are not recorded in %s: %s", self.num_dropped, self._directory, why)

    @property
    def _most_file_bytes(self) -> int:
        return min(MOST_FILE_BYTES, self._most_bytes // FILES)

    def _begin_file(self) -> None:
        now_s = self._unix()
        stamp = datetime.fromtimestamp(now_s, UTC).strftime(_STAMP)
        path = self._directory / PATTERN.replace("*", f"{stamp}-{os.getpid()}")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._path, self._file, self._file_bytes, self._file_ends_s = path, file, 0, now_s + self._keep_s / FILES
        self._drop_old()

    def _drop_old(self) -> None:
        """Delete the oldest files, so that the one that is written fits beside the others."""
        now_s, num_bytes = self._unix(), self._most_file_bytes
        for path in sorted(self._directory.glob(PATTERN), reverse=True):
            if path == self._path:
                continue
            try:
                num_bytes += path.stat().st_size
                if num_bytes > self._most_bytes or _begun_s(path) + self._keep_s < now_s:
                    path.unlink()
            except (OSError, ValueError):  # another server's, or no file of ours
                continue


def _begun_s(path: Path) -> float:
    stamp = path.stem.removeprefix("requests-").rpartition("-")[0]
    return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC).timestamp()


def read_records(path: Path, say: Callable[[str], None]) -> Iterator[RecordedRequest]:
    """The requests of a file, or of a directory's files, in order.

    Args:
        say: told of a line that was cut short.

    Raises:
        StartupError: there is no such file, or a line is none of ours.
    """
    fix, files = "name a file of --record, or its directory", sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    for file in files:
        try:
            with file.open("rb") as lines:
                for line in lines:
                    yield msgspec.json.decode(line, type=RecordedRequest)
        except OSError as error:
            raise StartupError(f"{file} cannot be read: {error.strerror}", fix) from error
        except msgspec.DecodeError as error:
            if not line.endswith(b"\n"):  # the process was killed while it wrote it
                say(f"{file}: its last line was cut short, and is left out")
                continue
            raise StartupError(f"{file} has a line that is no recorded request: {error}", fix) from error
