"""Compiles grammars: tenants in turns, and each in a process of its own first, so that none harms others.

The grammar library recurses without a guard of its stack, and takes minutes and gigabytes for some short grammars. The
process is started with the first grammar, is ended and replaced when a grammar takes too long, and ends with ours.
Threads: loop for the queue; that of compiling, one at a time, for the rest.
"""

import asyncio
import contextlib
import logging
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from core.constraints import GrammarSpec
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.grammar import Grammar, GrammarCompiler

logger = logging.getLogger(__name__)

MAX_COMPILE_S = 1.5  # a refusal comes within 2 s
START_S = 60.0  # to start Python and to read a vocabulary, on a busy machine
MAX_MEMORY_BYTES = 4 * 2**30  # of its address space
STACK_BYTES = 4 * 2**20  # half of what a thread of ours has: what passes here does not overflow that
MAX_QUEUED = 64  # of one tenant's, the one that is compiled among them
_LENGTH_BYTES = 8


class CompileQueue:
    """Has one grammar compiled at a time, tenants in turns. Thread: loop."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, GrammarSpec], asyncio.Task[Grammar]] = {}
        self._num_queued = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first
        self._is_taken = False

    async def run(self, spec: GrammarSpec, tenant: str, work: Callable[[], Awaitable[Grammar]]) -> Grammar:
        """What `work` compiles in the tenant's turn; once for all requests of the tenant that wait for it.

        Raises:
            ServiceError: too many of the tenant's grammars wait already.
            InvalidRequest: as `work`.
        """
        key = (tenant, spec)
        if key not in self._tasks:
            if self._num_queued[tenant] >= MAX_QUEUED:
                message = f"{MAX_QUEUED} new grammars of yours are being compiled. Retry when they are, or reuse them."
                raise ServiceError(ErrorKind.RATE_LIMITED, message, "too_many_grammars", spec.param, MAX_COMPILE_S)
            self._num_queued[tenant] += 1
            self._tasks[key] = asyncio.get_running_loop().create_task(self._in_turn(tenant, work))
            self._tasks[key].add_done_callback(partial(self._on_done, key))
        return await asyncio.shield(self._tasks[key])

    async def _in_turn(self, tenant: str, work: Callable[[], Awaitable[Grammar]]) -> Grammar:
        if self._is_taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            await turn
        self._is_taken = True
        try:
            return await work()
        finally:
            self._is_taken = bool(self._waiting)
            if self._waiting:
                tenant, waiting = next(iter(self._waiting.items()))
                del self._waiting[tenant]
                if not (turn := waiting.popleft()).done():  # cancelled as the loop ends
                    turn.set_result(None)
                if waiting:  # behind the other tenants
                    self._waiting[tenant] = waiting

    def _on_done(self, key: tuple[str, GrammarSpec], task: asyncio.Task[Grammar]) -> None:
        del self._tasks[key]
        self._num_queued[key[0]] -= 1
        self._num_queued += Counter()  # without zeros
        if not task.cancelled():
            task.exception()  # marks it as retrieved, if whoever waited has left


class Vocabulary(msgspec.Struct, frozen=True):
    """Args: as GrammarCompiler's."""

    token_bytes: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]


class Refusal(msgspec.Struct, frozen=True):
    message: str
    param: str | None
    code: str | None


class GuardedCompiler(GrammarCompiler):
    """A compiler that has each grammar tried out before."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Collection[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]],
        most_tokens: int | None = None,
    ) -> None:
        super().__init__(token_bytes, special_ids, eos_ids, encode, most_tokens)
        self._vocabulary = Vocabulary(list(token_bytes), list(special_ids), list(eos_ids))
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GuardedCompiler] | None = None

    def compile(self, spec: GrammarSpec) -> Grammar:
        """
        Raises:
            InvalidRequest: as GrammarCompiler; or it takes too long, or too much memory or stack.
        """
        try:
            refusal = self._try(spec)
        except OSError as error:
            logger.warning("grammars are compiled without being tried out in a process of its own: %r", error)
            refusal = None
        if refusal is not None:
            raise InvalidRequest(refusal.message, refusal.param, refusal.code or "invalid_value")
        return super().compile(spec)

    def _try(self, spec: GrammarSpec) -> Refusal | None:
        """
        Raises:
            OSError: the process cannot be started.
        """
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, msgspec.msgpack.encode(spec))
            return msgspec.msgpack.decode(_read_by(process.stdout, MAX_COMPILE_S), type=Refusal | None)
        except (TimeoutError, EOFError, BrokenPipeError):
            self._stop()
            message = f"{spec.param} is too complex: compiling it takes too long, or too much memory. Simplify it."
            return Refusal(message, spec.param, "grammar_too_complex")

    def _started(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parent.parent)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": root},
            start_new_session=True,  # a terminal's Ctrl-C is for the server
        )
        self._process, self._end = process, weakref.finalize(self, _ended, process)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, msgspec.msgpack.encode(self._vocabulary))
            _read_by(process.stdout, START_S)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self._stop()
            raise OSError("the process that compiles grammars did not start") from error
        return process

    def _stop(self) -> None:
        assert self._end is not None
        self._end()
        self._process = None


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    process.wait()


def _write(stream: IO[bytes], data: bytes) -> None:
    left = memoryview(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    while left:
        left = left[stream.write(left) or 0 :]
    stream.flush()


def _read_by(stream: IO[bytes], within_s: float) -> bytes:
    """
    Raises:
        TimeoutError, EOFError
    """
    until_s = time.monotonic() + within_s
    data, wanted = b"", _LENGTH_BYTES
    while len(data) < wanted:
        ready, _, _ = select.select([stream], [], [], max(0.0, until_s - time.monotonic()))
        if not ready:
            raise TimeoutError
        more = os.read(stream.fileno(), wanted - len(data))
        if not more:
            raise EOFError
        data += more
        if wanted == len(data) == _LENGTH_BYTES:
            wanted += int.from_bytes(data, "big")
    return data[_LENGTH_BYTES:]


# The process.


def _serve(source: IO[bytes], target: IO[bytes]) -> None:
    def next_message() -> bytes:
        size = int.from_bytes(source.read(_LENGTH_BYTES), "big")
        return source.read(size)

    vocabulary = msgspec.msgpack.decode(next_message(), type=Vocabulary)
    by_bytes = {data: token_id for token_id, data in enumerate(vocabulary.token_bytes)}
    compiler = GrammarCompiler(
        vocabulary.token_bytes,
        vocabulary.special_ids,
        vocabulary.eos_ids,
        lambda text: [by_bytes[one] for byte in text.encode() if (one := bytes([byte])) in by_bytes],
    )
    _write(target, b"\xc0")
    while message := next_message():
        spec = msgspec.msgpack.decode(message, type=GrammarSpec)
        refusal = None
        try:
            compiler.compile(spec)
        except InvalidRequest as error:
            refusal = Refusal(error.message, error.param, error.code)
        _write(target, msgspec.msgpack.encode(refusal))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer), daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
