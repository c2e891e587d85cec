"""The engine client alone: slices, order, usage, ends, failures. The loop and the engine are lists."""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.detokenizer import TokenTable
from core.errors import ErrorKind, ServiceError
from core.types import (
    Cancel,
    Delta,
    EngineMark,
    EngineStats,
    FinishReason,
    Message,
    Pause,
    Request,
    Resume,
    SamplingParams,
    StepDelivery,
    Submit,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from server.backend import NEVER, ChoiceClock, ShortWay, TextTeller
from server.engine_client import SLICE_CONNECTIONS, SLICE_ROWS, EngineClient
from server.observing.exposition import Histogram
from server.request_handle import RequestHandle

LETTERS = TokenTable([b"a", b"b", b"c", b"d", b"\xc3", b"\xa9"])


class Connections:
    """Implements engine_client.Output: who has something to write, and a stroke in the journal for each flush."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.dirty: set[str] = set()

    @property
    def num_dirty(self) -> int:
        return len(self.dirty)

    def expect_flush(self) -> None:
        """Nothing is flushed but by flush_all."""

    def flush_all(self) -> None:
        self.dirty.clear()
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
        self.times_s: list[float] = []
        self.engine_marks: list[EngineMark] = []
        self.ends: list[tuple[Usage, str | None]] = []
        self.marked: list[tuple[int, int]] = []  # choices, and how many tokens they had
        self.clocks: defaultdict[int, ChoiceClock] = defaultdict(ChoiceClock)
        self._marks = marks or {}  # at how many to be asked again
        self._connections = connections or Connections()
        self._connection = connection

    def on_text(self, choice: int, text: str, now_s: float) -> None:
        assert text
        self.on_delta(choice, Delta(text=text, num_tokens=1), now_s)

    def teller(self, choice: int) -> TextTeller:
        return lambda text: self.on_text(choice, text, self.clocks[choice].last_s or 0.0)

    def short_way(self, choice: int) -> ShortWay:
        return ShortWay(self.teller(choice), self.clocks[choice])

    def on_delta(self, choice: int, delta: Delta, now_s: float) -> None:
        assert not self.ends
        self.deltas.append(delta)
        self.choices.append(choice)
        self.times_s.append(now_s)
        self.clocks[choice].last_s = now_s
        self._connections.journal.append(delta.text)
        self._connections.dirty.add(self._connection)

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


class Bench:
    """A client between two lists."""

    def __init__(self) -> None:
        self.posted: list[Message] = []
        self.connections = Connections()
        self.soon: deque[Callable[[], None]] = deque()
        self.clock = itertools.count(1)
        self.gaps = Histogram(())
        self.told: list[int] = []  # the journal's length when a delivery had been told in full
        self.client = EngineClient(
            self.posted.append,
            LETTERS,
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
        return self.client.submit(request, self.sinks[request_id], continues_text=True, first_choice=first_choice)

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


def test_delivery_is_handled_in_slices_with_a_flush_after_each() -> None:
    bench = Bench()
    bench.submit()
    bench.deliver(*[("r", 0, 0)] * (2 * SLICE_ROWS + 3))
    assert bench.journal == ["a"] * SLICE_ROWS + ["/"]
    bench.run_one()
    bench.run_one()
    assert not bench.soon
    assert bench.journal == (["a"] * SLICE_ROWS + ["/"]) * 2 + ["a"] * 3 + ["/"]
    assert bench.told == [2 * SLICE_ROWS + 5]  # once, before its last flush


@pytest.mark.parametrize(
    ("num_connections", "slices"),
    [
        (1, [64]),
        (2, [64]),
        (15, [64]),
        (16, [16, 16, 16, 16]),
        (17, [16, 16, 16, 16]),
        (64, [16, 16, 16, 16]),
    ],
)
def test_slice_ends_with_so_many_connections_or_rows(num_connections: int, slices: list[int]) -> None:
    """64 rows, of the connections in turn."""
    bench = Bench()
    for i in range(64):
        bench.submit(f"r{i}", connection=f"c{i % num_connections}")
    bench.deliver(*[(f"r{i}", 0, 0) for i in range(64)])
    bench.run()
    assert (SLICE_ROWS, SLICE_CONNECTIONS) == (64, 16)
    assert bench.slices == slices


def test_slice_goes_on_past_rows_that_share_a_connection() -> None:
    """What counts is connections: 30 rows of one, then each row of its own."""
    bench = Bench()
    owners = ["shared"] * 30 + [f"own {i}" for i in range(20)]
    for i, owner in enumerate(owners):
        bench.submit(f"r{i}", connection=owner)
    bench.deliver(*[(f"r{i}", 0, 0) for i in range(len(owners))])
    bench.run()
    assert bench.slices == [30 + SLICE_CONNECTIONS - 1, 5]


def test_connections_that_were_dirty_before_do_not_shorten_a_slice() -> None:
    bench = Bench()
    bench.submit()
    bench.connections.dirty |= {f"other {i}" for i in range(2 * SLICE_CONNECTIONS)}
    bench.deliver(*[("r", 0, 0)] * SLICE_ROWS)
    assert bench.slices == [SLICE_ROWS]


def test_all_of_a_slice_came_at_one_time() -> None:
    bench = Bench()
    bench.submit()
    bench.deliver(*[("r", 0, 0)] * (SLICE_ROWS + 2), chunks=(end(num_tokens=SLICE_ROWS + 2),))
    bench.run()
    assert bench.sinks["r"].times_s == [1.0] * SLICE_ROWS + [3.0] * 3


def test_deliveries_that_come_meanwhile_wait_for_their_turn() -> None:
    bench = Bench()
    bench.submit()
    bench.deliver(*[("r", 0, 0)] * (SLICE_ROWS + 8), num_steps=1)
    bench.deliver(("r", 0, 1), num_steps=2)
    assert bench.sinks["r"].text == "a" * SLICE_ROWS
    assert bench.client.stats.num_steps == 0
    bench.deliver(("r", 0, 2), chunks=(end(num_tokens=SLICE_ROWS + 10),), num_steps=3)
    bench.run()
    assert bench.sinks["r"].text == "a" * (SLICE_ROWS + 8) + "bc"
    assert bench.client.stats.num_steps == 3
    assert bench.sinks["r"].ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=SLICE_ROWS + 10), None)]
    assert len(bench.posted) == 1


@given(
    tokens=st.lists(st.integers(0, 5), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stop=st.sampled_from([(), ("ab",), ("abc", "é"), ("d", "cd")]),
    has_logprobs=st.booleans(),
)
def test_text_usage_and_counts_do_not_depend_on_the_grouping(
    tokens: list[int], cuts: list[int], stop: tuple[str, ...], has_logprobs: bool
) -> None:
    def outcome(cuts: list[int]) -> tuple[object, ...]:
        bench = Bench()
        bench.submit(stop=stop, num_logprobs=0 if has_logprobs else None)
        for start, stop_at in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            if has_logprobs:
                bench.deliver(chunks=tuple(map(with_logprob, tokens[start:stop_at])))
            else:
                bench.deliver(*(("r", 0, token_id) for token_id in tokens[start:stop_at]))
        bench.deliver(chunks=(end(num_tokens=len(tokens)),))
        bench.run()
        sink = bench.sinks["r"]
        ((usage, error),) = sink.ends
        assert error is None
        if has_logprobs:
            assert sum(delta.num_tokens for delta in sink.deltas) == usage.num_completion_tokens
        assert [delta.finish_reason for delta in sink.deltas[:-1]] == [None] * (len(sink.deltas) - 1)
        ids = [entry.token_id for delta in sink.deltas for entry in delta.logprobs or ()]
        assert ids == (tokens[: usage.num_completion_tokens] if has_logprobs else [])
        return sink.text, sink.deltas[-1].finish_reason, usage, bench.cancels

    assert outcome(sorted(min(cut, len(tokens)) for cut in cuts)) == outcome([])


def with_logprob(token_id: int) -> TokenChunk:
    entry = TokenLogprobs(token_id=token_id, logprob=-1.0)
    return TokenChunk(request_id="r", index=0, token_ids=(token_id,), logprobs=(entry,))


def test_what_is_told_of_a_prompt_goes_to_every_choice_that_goes_on() -> None:
    bench = Bench()
    bench.submit(num_sequences=3, first_choice=4, num_logprobs=0, num_prompt_logprobs=0)
    parts = [(TokenLogprobs(2, -1.0),), (TokenLogprobs(3, -2.0),)]
    bench.deliver(chunks=(TokenChunk(request_id="r", index=0, prompt_logprobs=parts[0]),))
    gone = end(FinishReason.CANCELLED, index=0, is_last=False)
    bench.deliver(chunks=(gone, TokenChunk(request_id="r", index=1, prompt_logprobs=parts[1])))
    sink = bench.sinks["r"]
    told = [(c, delta.prompt_logprobs) for c, delta in zip(sink.choices, sink.deltas, strict=True)]
    assert told == [(4, parts[0]), (5, parts[0]), (6, parts[0]), (4, ()), (5, parts[1]), (6, parts[1])]
    assert {delta.num_tokens for delta in sink.deltas} == {0}


def test_an_id_that_ends_a_sequence_is_told_apart_unless_a_stop_string_ends_it() -> None:
    for stop, last, wanted in (((), 0, 2), (("�",), 4, None)):
        bench = Bench()
        bench.submit(num_logprobs=0, stop=stop)
        bench.deliver(chunks=(with_logprob(last),))
        bench.deliver(chunks=(end(FinishReason.STOP, 2, stop_logprobs=TokenLogprobs(2, -1.0)),))
        delta = bench.sinks["r"].deltas[-1]
        assert delta.finish_reason is FinishReason.STOP
        assert (delta.stop_logprobs and delta.stop_logprobs.token_id) == wanted


def test_stop_string_tells_the_engine_what_was_kept_and_drops_the_rest() -> None:
    bench = Bench()
    bench.submit(stop=("bc",))
    bench.deliver(("r", 0, 0), ("r", 0, 1), ("r", 0, 2), ("r", 0, 3))
    assert bench.cancels == [Cancel("r", FinishReason.STOP, 0, 3)]
    bench.deliver(("r", 0, 3), chunks=(end(FinishReason.STOP, 5),))
    sink = bench.sinks["r"]
    assert (sink.text, sink.deltas[-1].finish_reason) == ("a", FinishReason.STOP)
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=3), None)]


def test_stop_string_that_a_broken_character_completes_is_the_reason() -> None:
    bench = Bench()
    bench.submit(stop=("b\ufffd",))
    bench.deliver(("r", 0, 0), ("r", 0, 1), ("r", 0, 4), chunks=(end(num_tokens=3),))
    sink = bench.sinks["r"]
    assert (sink.text, sink.deltas[-1].finish_reason) == ("a", FinishReason.STOP)


def test_each_sequence_of_a_request_ends_for_itself() -> None:
    bench = Bench()
    bench.submit(num_sequences=2, first_choice=4, stop=("b",))
    bench.deliver(("r", 0, 0), ("r", 1, 0), ("r", 0, 1), ("r", 1, 2))
    bench.deliver(("r", 1, 3), chunks=(end(FinishReason.STOP, 2, 0, is_last=False), end(num_tokens=3, index=1)))
    sink = bench.sinks["r"]
    said = list(zip(sink.choices, sink.deltas, strict=True))
    assert ["".join(delta.text for at, delta in said if at == choice) for choice in (4, 5)] == ["a", "acd"]
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=5), None)]


def test_a_sequence_tells_when_its_mark_is_reached_and_not_before() -> None:
    bench = Bench()
    bench.submit(num_sequences=2, first_choice=4, marks={0: 2, 2: 3})
    sink = bench.sinks["r"]
    assert sink.marked == [(4, 0), (5, 0)]
    bench.deliver(("r", 0, 0), ("r", 1, 0))
    assert sink.marked[2:] == []
    bench.deliver(
        ("r", 0, 4), chunks=(TokenChunk(request_id="r", index=1, token_ids=(0,)),)
    )  # also where the token has no text yet
    assert sink.marked[2:] == [(4, 2), (5, 2)]
    bench.deliver(("r", 0, 5), ("r", 0, 1))
    assert sink.marked[4:] == [(4, 3)]


def test_finish_ends_each_open_sequence_with_what_it_has_and_drops_the_rest() -> None:
    bench = Bench()
    handle = bench.submit(num_sequences=2, stop=("bc",))
    bench.deliver(("r", 0, 0), ("r", 0, 1), ("r", 1, 0), chunks=(end(num_tokens=1, index=1, is_last=False),))
    handle.finish(FinishReason.LENGTH, 0.0)
    handle.finish(FinishReason.LENGTH, 0.0)
    handle.cancel(FinishReason.CANCELLED)
    assert bench.cancels == [Cancel("r", FinishReason.LENGTH, 0, 2)]
    bench.deliver(("r", 0, 2), chunks=(end(FinishReason.LENGTH, 3),))
    sink = bench.sinks["r"]
    said = list(zip(sink.choices, sink.deltas, strict=True))
    assert "".join(delta.text for choice, delta in said if choice == 0) == "ab"  # the b was held back
    assert [delta.finish_reason for choice, delta in said if choice == 0][-1] is FinishReason.LENGTH
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=3), None)]


def test_cancel_is_posted_once_per_open_sequence_and_silences_them() -> None:
    bench = Bench()
    handle = bench.submit(num_sequences=2)
    bench.deliver(("r", 0, 0), ("r", 1, 0), ("r", 1, 0), chunks=(end(num_tokens=1, is_last=False),))
    handle.cancel(FinishReason.CANCELLED)
    handle.cancel(FinishReason.CANCELLED)
    assert bench.cancels == [Cancel("r", FinishReason.CANCELLED, 1, 2)]
    bench.deliver(("r", 1, 0), chunks=(end(FinishReason.CANCELLED, 3, 1),))
    sink = bench.sinks["r"]
    assert len(sink.deltas) == 4
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=3), None)]


def test_slow_and_quick_again_are_posted() -> None:
    bench = Bench()
    handle = bench.submit()
    handle.pause()
    handle.resume()
    assert isinstance(bench.posted[0], Submit)
    assert bench.posted[1:] == [Pause("r"), Resume("r")]


def test_error_of_any_sequence_comes_with_the_end() -> None:
    bench = Bench()
    bench.submit(num_sequences=2)
    bench.deliver(chunks=(end(FinishReason.ERROR, 0, 0, is_last=False, error="broken"),))
    assert not bench.sinks["r"].ends
    bench.deliver(("r", 1, 0), chunks=(end(num_tokens=1, index=1),))
    assert bench.sinks["r"].ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=1), "broken")]


def test_failure_ends_all_requests_after_what_was_delivered_before_it() -> None:
    bench = Bench()
    bench.submit("r")
    bench.submit("s")
    bench.submit("t")
    bench.deliver(*[("r", 0, 0)] * (SLICE_ROWS + 8), ("s", 0, 1))
    bench.deliver(("r", 0, 2), chunks=(end(num_tokens=SLICE_ROWS + 9),))
    bench.client.fail("The engine failed.")
    assert bench.sinks["r"].text == "a" * (SLICE_ROWS + 8) + "c"
    assert bench.sinks["r"].ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=SLICE_ROWS + 9), None)]
    assert bench.sinks["s"].text == "b"
    assert bench.sinks["s"].ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=1), "The engine failed.")]
    assert bench.sinks["t"].ends == [(Usage(num_prompt_tokens=0, num_completion_tokens=0), "The engine failed.")]
    assert bench.journal[-1] == "/"
    bench.run()
    bench.client.fail("The engine failed.")
    assert [len(sink.ends) for sink in bench.sinks.values()] == [1, 1, 1]


def test_news_after_the_failure_are_nobodys() -> None:
    bench = Bench()
    bench.submit()
    bench.client.fail("The engine failed.")
    bench.deliver(("r", 0, 0), chunks=(end(num_tokens=1),))
    bench.run()
    assert not bench.sinks["r"].deltas
    assert len(bench.sinks["r"].ends) == 1


def test_submit_after_the_failure_is_refused() -> None:
    bench = Bench()
    bench.client.fail("The engine failed.")
    with pytest.raises(ServiceError) as caught:
        bench.submit()
    assert (caught.value.kind, caught.value.code) == (ErrorKind.ENGINE, "engine_error")
    assert not bench.posted


def test_sink_that_raises_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.submit("r")
    bench.submit("s")

    def fail(choice: int, text: str, now_s: float) -> None:
        raise ZeroDivisionError

    bench.sinks["r"].on_text = fail  # type: ignore[method-assign]
    bench.deliver(("r", 0, 0), ("s", 0, 0), ("r", 0, 1))
    bench.deliver(("s", 0, 1), chunks=(end(FinishReason.ERROR, 1),))
    assert bench.sinks["s"].text == "ab"
    assert bench.cancels == [Cancel("r", FinishReason.ERROR, 0, 1)]
    ((_, error),) = bench.sinks["r"].ends
    assert error is not None
    assert "ZeroDivisionError" in caplog.text


def test_teller_that_raises_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.submit("r")
    bench.submit("s")

    def fail(text: str) -> None:
        raise ZeroDivisionError

    bench.sinks["r"].teller = lambda choice: fail  # type: ignore[method-assign]
    bench.deliver(("r", 0, 0), ("s", 0, 0), ("r", 0, 1), ("s", 0, 1), ("r", 0, 2))
    assert [sink.text for sink in bench.sinks.values()] == ["a", "ab"]
    assert bench.cancels == [Cancel("r", FinishReason.ERROR, 0, 2)]
    assert "ZeroDivisionError" in caplog.text


def test_teller_tells_what_stands_alone_and_the_detokenizer_the_rest() -> None:
    bench = Bench()
    handle = bench.submit(stop=("cd",))
    sink, told = bench.sinks["r"], []

    tell_on = sink.teller(0)

    def tell(text: str) -> None:
        told.append(text)
        tell_on(text)

    sink.teller = lambda choice: tell  # type: ignore[method-assign]
    for token_id in (0, 1, 4, 5, 0, 9, 2):  # a, b, half an é, the other half, a, an id that no token has, c
        bench.deliver(("r", 0, token_id))
    assert (sink.text, told) == ("abéa", ["b", "a"])
    assert (handle.num_tokens, handle.num_untold(0)) == (7, 2)
    bench.deliver(("r", 0, 1), ("r", 0, 1), ("r", 0, 2), ("r", 0, 3), ("r", 0, 0))
    assert (sink.text, told) == ("abéacbb", ["b", "a", "b"])
    assert bench.cancels == [Cancel("r", FinishReason.STOP, 0, 11)]


def test_gaps_are_those_between_the_texts_of_each_sequence() -> None:
    """On the short way; of a sequence that has just begun there is none, and the sink tells of all others itself."""
    bench = Bench()
    for request_id in "rst":
        bench.submit(request_id)
    bench.deliver(("r", 0, 0), ("s", 0, 0))
    bench.deliver(("s", 0, 0))
    bench.deliver(("s", 0, 0), ("r", 0, 0), ("t", 0, 0))
    bench.deliver(*[(request_id, 0, 0) for request_id in "rst"])
    times = {request_id: sink.times_s for request_id, sink in bench.sinks.items()}
    gaps = [after - before for come in times.values() for before, after in itertools.pairwise(come)]
    assert (bench.gaps.counts, bench.gaps.total) == ([len(gaps)], sum(gaps))
    assert len(gaps) == 6


def test_fault_in_a_slice_leaves_nothing_unwritten() -> None:
    bench = Bench()
    bench.submit("r")
    with pytest.raises(KeyError):
        bench.deliver(("r", 0, 0), ("nobody", 0, 0))
    assert bench.journal == ["a", "/"]


def test_text_that_leaves_something_held_is_not_followed_by_the_short_way() -> None:
    bench = Bench()
    bench.submit(stop=("aab",))
    bench.deliver(*[("r", 0, token_id) for token_id in (1, 0, 0, 0, 1)])
    assert bench.sinks["r"].text == "ba"
    assert bench.cancels == [Cancel("r", FinishReason.STOP, 0, 5)]


def test_sink_is_told_at_its_marks_on_the_short_way() -> None:
    bench = Bench()
    bench.submit(marks={0: 3, 3: 5})
    bench.deliver(*[("r", 0, 0)] * 9)
    assert bench.sinks["r"].marked == [(0, 0), (0, 3), (0, 5)]


class SinkThatCannotEnd(Sink):
    """A bug of ours in the last thing a request is told."""

    def on_end(self, usage: Usage, error: str | None) -> None:
        super().on_end(usage, error)
        raise ZeroDivisionError


def bench_with_a_sink_that_cannot_end() -> Bench:
    bench = Bench()
    bench.submit("s")
    bench.sinks["r"] = SinkThatCannotEnd()
    request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=9), arrival_s=0.0)
    bench.client.submit(request, bench.sinks["r"], continues_text=True)
    return bench


def test_sink_that_raises_at_its_end_leaves_the_deliveries_going(caplog: pytest.LogCaptureFixture) -> None:
    bench = bench_with_a_sink_that_cannot_end()
    bench.deliver(("s", 0, 0), chunks=(end(num_tokens=0), end(request_id="s", num_tokens=1)))
    assert [len(sink.ends) for sink in bench.sinks.values()] == [1, 1]
    bench.submit("t")
    bench.deliver(("t", 0, 1))
    assert bench.sinks["t"].text == "b"
    assert "ZeroDivisionError" in caplog.text


def test_failure_ends_the_neighbours_of_a_sink_that_raises_at_its_end() -> None:
    bench = bench_with_a_sink_that_cannot_end()
    bench.client.fail("The engine failed.")
    assert [len(sink.ends) for sink in bench.sinks.values()] == [1, 1]
    assert bench.journal[-1] == "/"
