"""An engine client with lists for the engine and the loop, sinks that keep what they are told, and chunks for them."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from core.detokenizer import TokenTable
from core.types import (
    Cancel,
    Delta,
    EngineMark,
    EngineStats,
    FinishReason,
    Message,
    Request,
    SamplingParams,
    StepDelivery,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from server.engine_client import EngineClient, RequestHandle
from server.gate.quota import NEVER
from server.observing.metrics import Histogram
from server.wire.messages import TextWriter

LETTERS = TokenTable([b"a", b"b", b"c", b"d", b"\xc3", b"\xa9"])


class Connections:
    """Implements engine_client.Output: who has something to write, and a stroke in the journal for each flush."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.num_writes = 0
        self._dirty: set[str] = set()

    def write(self, connection: str) -> None:
        if connection not in self._dirty:
            self._dirty.add(connection)
            self.num_writes += 1

    def flush_all(self) -> None:
        self._dirty.clear()
        self.journal.append("/")


class Sink:
    """Keeps what it is told, and writes it on a connection."""

    def __init__(
        self,
        connections: Connections | None = None,
        marks: dict[int, int] | None = None,
        connection: str = "the one",
    ) -> None:
        self.deltas: list[Delta] = []  # text that comes alone, too
        self.choices: list[int] = []  # whose they are
        self.engine_marks: list[EngineMark] = []
        self.ends: list[tuple[Usage, str | None]] = []
        self.marked: list[tuple[int, int]] = []  # choices, and how many tokens they had
        self.handle: RequestHandle | None = None
        self.times_s: list[float | None] = []  # when the last text of each delta's sequence came
        self._marks = marks or {}  # at how many to be asked again
        self._connections = connections or Connections()
        self._connection = connection

    def on_begin(self, choice: int, now_s: float) -> None:
        """Nothing to keep."""

    def on_text(self, choice: int, text: str) -> None:
        assert text
        self._keep(choice, Delta(text=text, num_tokens=1))

    def text_writer(self, choice: int) -> TextWriter:
        return lambda text: self.on_text(choice, text)

    def on_delta(self, choice: int, delta: Delta, now_s: float) -> None:
        self._keep(choice, delta)

    def _keep(self, choice: int, delta: Delta) -> None:
        assert not self.ends
        self.deltas.append(delta)
        self.choices.append(choice)
        if self.handle is not None:
            sequences = self.handle.sequences
            self.times_s.append(sequences[choice - sequences[0].choice].last_s)
        self._connections.journal.append(delta.text)
        self._connections.write(self._connection)

    def on_answer(self, choice: int, ids: Sequence[int], cut_text: str) -> None: ...

    def on_mark(self, choice: int, num_tokens: int) -> int:
        self.marked.append((choice, num_tokens))
        return self._marks.get(num_tokens, NEVER)

    def on_engine_mark(self, mark: EngineMark) -> None:
        self.engine_marks.append(mark)

    def on_end(self, usage: Usage, error: str | None) -> None:
        self.ends.append((usage, error))

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class ClientBench:
    """An engine client between two lists: what it posts, and callbacks of the loop."""

    def __init__(self) -> None:
        self.posted: list[Message] = []
        self.connections = Connections()
        self.soon: deque[Callable[[], None]] = deque()
        self.clock = itertools.count(1)
        self.gaps = Histogram(())
        self.told: list[int] = []  # the journal's length when a delivery had been told in full
        self.client = EngineClient(
            self.posted.append,
            self.connections,
            self.soon.append,
            lambda: float(next(self.clock)),
            lambda: self.told.append(len(self.journal)),
            self.gaps,
        )
        self.sinks: dict[str, Sink] = {}

    def submit(
        self,
        request_id: str = "r",
        num_sequences: int = 1,
        first_choice: int = 0,
        marks: dict[int, int] | None = None,
        connection: str = "the one",
        **sampling: object,
    ) -> RequestHandle:
        params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
        request = Request(
            request_id=request_id, prompt_ids=(1, 2, 3), sampling=params, arrival_s=0.0, num_sequences=num_sequences
        )
        self.sinks[request_id] = Sink(self.connections, marks, connection)
        sink = self.sinks[request_id]
        sink.handle = self.client.submit(request, sink, LETTERS, continues_text=True, first_choice=first_choice)
        return sink.handle

    def deliver(self, *rows: tuple[str, int, int], chunks: tuple[TokenChunk, ...] = (), num_steps: int = 1) -> None:
        ids, indexes, token_ids = ([row[i] for row in rows] for i in range(3))
        stats = EngineStats(num_steps=num_steps)
        self.client.deliver(StepDelivery(ids, indexes, token_ids, list(chunks), stats))  # type: ignore[arg-type]

    def run_one(self) -> None:
        self.soon.popleft()()

    def run(self) -> None:
        while self.soon:
            self.run_one()

    @property
    def journal(self) -> list[str]:
        return self.connections.journal

    @property
    def slices(self) -> list[int]:
        """How many rows each had."""
        return [len(rows) for rows in "".join(self.journal).split("/")[:-1]]

    @property
    def cancels(self) -> list[Cancel]:
        return [message for message in self.posted if isinstance(message, Cancel)]


def end(
    reason: FinishReason = FinishReason.LENGTH,
    num_tokens: int = 0,
    index: int = 0,
    is_last: bool = True,
    **fields: object,
) -> TokenChunk:
    usage = Usage(num_prompt_tokens=3, num_completion_tokens=num_tokens) if is_last else None
    chunk = {"request_id": "r", "index": index, "finish_reason": reason, "num_sequence_tokens": num_tokens}
    return TokenChunk(**{**chunk, "usage": usage, **fields})  # type: ignore[arg-type]


def with_logprob(token_id: int) -> TokenChunk:
    entry = TokenLogprobs(token_id=token_id, logprob=-1.0)
    return TokenChunk(request_id="r", index=0, token_ids=(token_id,), logprobs=(entry,))
