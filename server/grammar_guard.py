"""Compiles grammars: tenants in turns, and each in a process of its own first, so that none harms others.

The grammar library recurses without a guard of its stack, and takes minutes and gigabytes for some short grammars. The
processes, one for each grammar that is compiled at a time, are started before they are needed, replaced when a grammar
takes too long, and end with ours. Threads: loop for the queue; those of compiling for the rest.
"""

import asyncio
import logging
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO

import msgspec

from core.constraints import GrammarSpec
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.grammar import SLICES, Grammar, GrammarCompiler, Vocabulary
from core.token_bytes import TokenBytes
from server.gate.turns import TenantTurns
from server.own_processes import start_module

logger = logging.getLogger(__name__)

MAX_COMPILE_S = 1.0  # a refusal comes within 2 s, also on a busy machine
MAX_CPU_S = 2  # of one that is compiled: after kill -9 of the server nothing else ends it
MAX_ANEW_S = 0.1  # of a thread's time: to compile again while answers wait, for one that needs it
START_S = 60.0  # to start Python and to read a vocabulary, on a busy machine
MAX_MEMORY_BYTES = 4 * 2**30  # of its address space
STACK_BYTES = 4 * 2**20  # half of what a thread of ours has: what passes here does not overflow that
MAX_QUEUED = 64  # of one tenant's, the one that is compiled among them
MAX_AT_ONCE = 2  # of different tenants: one whose grammars take long does not hold up the next one's
TRIED_SLICES = SLICES[0], SLICES[-1]  # as quick as all for a grammar's first masks, in 24 MiB less


class CompileQueue:
    """Has grammars compiled, one of a tenant's at a time, tenants in turns. Thread: loop."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, GrammarSpec], asyncio.Task[Grammar]] = {}
        self._num_queued = Counter[str]()
        self._turns = TenantTurns(MAX_AT_ONCE, 1)

    async def run(self, spec: GrammarSpec, tenant: str, work: Callable[[], Awaitable[Grammar]]) -> Grammar:
        """What `work` compiles in the tenant's turn; once for all requests of the tenant that wait for it.

        Raises:
            ServiceError: too many of the tenant's grammars wait already.
            InvalidRequest: as `work`.
        """
        key = (tenant, spec)
        if key not in self._tasks:
            if self._num_queued[tenant] >= MAX_QUEUED:
                message = (
                    f"{MAX_QUEUED} new grammars of your tenant are being compiled. Try again later, or reuse grammars."
                )
                raise ServiceError(ErrorKind.RATE_LIMITED, message, "too_many_grammars", spec.param, MAX_COMPILE_S)
            self._num_queued[tenant] += 1
            self._tasks[key] = asyncio.get_running_loop().create_task(self._in_turn(tenant, work))
            self._tasks[key].add_done_callback(partial(self._on_done, key))
        return await asyncio.shield(self._tasks[key])

    async def _in_turn(self, tenant: str, work: Callable[[], Awaitable[Grammar]]) -> Grammar:
        await self._turns.begin(tenant)
        try:
            return await work()
        finally:
            self._turns.end(tenant)

    def _on_done(self, key: tuple[str, GrammarSpec], task: asyncio.Task[Grammar]) -> None:
        del self._tasks[key]
        self._num_queued[key[0]] -= 1
        self._num_queued += Counter()  # without zeros
        if not task.cancelled():
            task.exception()  # marks it as retrieved, if whoever waited has left


class GrammarRefusal(msgspec.Struct, frozen=True):
    message: str
    param: str | None
    code: str | None


class GuardedCompiler(GrammarCompiler):
    """A compiler that has each grammar tried out before."""

    def __init__(
        self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]], most_tokens: int | None = None
    ) -> None:
        super().__init__(vocabulary, encode, most_tokens)
        self._files: list[IO[bytes]] = []  # the one with the vocabulary, once it is written
        self._starting = threading.Lock()
        self._ending = threading.Thread()  # the last process that was killed
        self._idle = deque[_Worker]()
        self._workers = set[_Worker]()
        self._keeps_spare = False  # once two grammars were compiled at a time: a process takes as much as a vocabulary
        weakref.finalize(self, _end_all, self._workers, self._files)

    def prepare(self) -> None:
        """Start a process, unless one is idle or there are as many as grammars are compiled at once."""
        with self._starting:
            try:
                if not self._idle and len(self._workers) < MAX_AT_ONCE:
                    self._idle.append(self._started())
            except OSError as error:
                logger.warning("no process for test compilations of grammars: %r", error)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequest: as GrammarCompiler; or it takes too long, or too much memory or stack."""
        refusal, is_tried = None, True
        try:
            refusal = self._try(spec)
        except OSError as error:
            logger.warning("a grammar is compiled without a test in a separate process: %r", error)
            is_tried = False
        if refusal is not None:
            raise InvalidRequest(refusal.message, refusal.param, refusal.code or "invalid_value")
        started_s = time.thread_time()
        grammar = self._compile_checked(spec) if is_tried else super().compile(spec)
        is_quick = time.thread_time() - started_s < MAX_ANEW_S
        return grammar if is_quick else replace(grammar, anew=None)

    def _try(self, spec: GrammarSpec) -> GrammarRefusal | None:
        """Raises OSError: the process cannot be started."""
        worker = self._taken()
        try:
            refusal = worker.refusal_of(spec)
        except OSError as error:
            self._end(worker)
            if not isinstance(error, TimeoutError | ConnectionError):
                raise
            message = f"{spec.param} is too complex: compiling it takes too long, or too much memory. Simplify it."
            return GrammarRefusal(message, spec.param, "grammar_too_complex")
        self._idle.append(worker)
        return refusal

    def _taken(self) -> "_Worker":
        """A process that runs; if two were needed before, another is ready, or starting, for the next grammar."""
        with self._starting:
            while self._idle:
                worker = self._idle.popleft()
                if worker.is_running:
                    break
                self._workers.discard(worker)
                worker.end()
            else:
                self._keeps_spare |= bool(self._workers)
                worker = self._started()
        if self._keeps_spare:
            self.prepare()
        return worker

    def _end(self, worker: "_Worker") -> None:
        with self._starting:
            self._workers.discard(worker)

        def replace_it() -> None:
            worker.end()
            self.prepare()

        # The refusal does not wait until its memory is free and another has started
        self._ending = threading.Thread(target=replace_it, daemon=True)
        self._ending.start()

    def _started(self) -> "_Worker":
        if not self._files:
            self._files.append(tempfile.TemporaryFile())  # noqa: SIM115
            self._files[0].write(msgspec.msgpack.encode(self._vocabulary, enc_hook=list))
            self._files[0].flush()
        worker = _Worker(self._files[0].fileno(), *(() if self.most_tokens is None else (str(self.most_tokens),)))
        self._workers.add(worker)
        return worker


class _Worker:
    """A process that tries grammars out.

    Args:
        vocabulary: a file with one.
        arguments: the most tokens of an answer, if they are known.
    """

    def __init__(self, vocabulary: int, *arguments: str) -> None:
        self._line, theirs = Pipe()
        streams = {"stdin": theirs.fileno(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with theirs:
            self._process = start_module(__name__, vocabulary, *arguments, **streams)
        self._is_ready = False

    def refusal_of(self, spec: GrammarSpec) -> GrammarRefusal | None:
        """
        Raises:
            TimeoutError, ConnectionError: the grammar took too long, or ended the process.
            OSError: the process did not start.
        """
        if not self._is_ready:
            try:
                self._answer(START_S)
            except (TimeoutError, ConnectionError) as error:
                raise OSError("the process that compiles grammars did not start") from error
            self._is_ready = True
        self._line.send_bytes(msgspec.msgpack.encode(spec))
        return msgspec.msgpack.decode(self._answer(MAX_COMPILE_S), type=GrammarRefusal | None)

    def _answer(self, within_s: float) -> bytes:
        if not self._line.poll(within_s):
            raise TimeoutError
        try:
            return self._line.recv_bytes()
        except (EOFError, OSError) as error:  # at the beginning of a message, and within one
            raise ConnectionError from error

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._line.close()
        self._process.wait()


def _end_all(workers: set[_Worker], files: list[IO[bytes]]) -> None:
    for worker in workers:
        worker.end()
    for file in files:
        file.close()


# The process.


def _serve(vocabulary_file: int, most_tokens: int | None, line: "Connection[bytes, bytes]") -> None:
    data = os.pread(vocabulary_file, os.fstat(vocabulary_file).st_size, 0)  # its offset is that of all
    vocabulary = msgspec.msgpack.decode(data, type=Vocabulary)
    vocabulary = msgspec.structs.replace(vocabulary, token_bytes=TokenBytes.of(vocabulary.token_bytes))
    del data
    by_bytes = {one: token_id for token_id, one in enumerate(vocabulary.token_bytes) if len(one) == 1}
    compiler = GrammarCompiler(
        vocabulary,
        lambda text: [by_bytes[one] for byte in text.encode() if (one := bytes([byte])) in by_bytes],
        most_tokens,
        TRIED_SLICES,
    )
    line.send_bytes(b"\xc0")
    while True:
        try:
            spec = msgspec.msgpack.decode(line.recv_bytes(), type=GrammarSpec)
        except (EOFError, ConnectionError):  # the server has ended
            return
        refusal = None
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MAX_CPU_S, resource.RLIM_INFINITY))
        try:
            compiler.compile(spec)
        except InvalidRequest as error:
            refusal = GrammarRefusal(error.message, error.param, error.code)
        line.send_bytes(msgspec.msgpack.encode(refusal))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    file, *given = map(int, sys.argv[1:])
    arguments = (file, given[0] if given else None, Connection(sys.stdin.fileno()))
    thread = threading.Thread(target=_serve, args=arguments, daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
