"""The engine client and its requests' handles alone: slices, texts, usage, marks, ends. Loop and engine are lists."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ErrorKind, ServiceError
from core.types import (
    Cancel,
    FinishReason,
    Pause,
    Request,
    Resume,
    SamplingParams,
    Submit,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from server.engine_client import SLICE_CONNECTIONS, SLICE_ROWS
from tests.server.client_bench import ClientBench, Sink, end, with_logprob


def test_delivery_is_handled_in_slices_with_a_flush_after_each() -> None:
    bench = ClientBench()
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
    bench = ClientBench()
    for i in range(64):
        bench.submit(f"r{i}", connection=f"c{i % num_connections}")
    bench.deliver(*[(f"r{i}", 0, 0) for i in range(64)])
    bench.run()
    assert (SLICE_ROWS, SLICE_CONNECTIONS) == (64, 16)
    assert bench.slices == slices


def test_slice_goes_on_past_rows_that_share_a_connection() -> None:
    """What counts is connections: 30 rows of one, then each row of its own."""
    bench = ClientBench()
    owners = ["shared"] * 30 + [f"own {i}" for i in range(20)]
    for i, owner in enumerate(owners):
        bench.submit(f"r{i}", connection=owner)
    bench.deliver(*[(f"r{i}", 0, 0) for i in range(len(owners))])
    bench.run()
    assert bench.slices == [30 + SLICE_CONNECTIONS - 1, 5]


def test_writes_from_before_do_not_shorten_a_slice() -> None:
    bench = ClientBench()
    bench.submit()
    for i in range(2 * SLICE_CONNECTIONS):
        bench.connections.write(f"other {i}")
    bench.deliver(*[("r", 0, 0)] * SLICE_ROWS)
    assert bench.slices == [SLICE_ROWS]


def test_all_of_a_slice_came_at_one_time() -> None:
    bench = ClientBench()
    bench.submit()
    bench.deliver(*[("r", 0, 0)] * (SLICE_ROWS + 2), chunks=(end(num_tokens=SLICE_ROWS + 2),))
    bench.run()
    assert bench.sinks["r"].times_s == [1.0] * SLICE_ROWS + [3.0] * 3


def test_deliveries_that_come_meanwhile_wait_for_their_turn() -> None:
    bench = ClientBench()
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
        bench = ClientBench()
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


def test_gaps_are_those_between_the_texts_of_each_sequence() -> None:
    """Of a sequence that has just begun there is none."""
    bench = ClientBench()
    for request_id in "rst":
        bench.submit(request_id)
    bench.deliver(("r", 0, 0), ("s", 0, 0))
    bench.deliver(("s", 0, 0))
    bench.deliver(("s", 0, 0), ("r", 0, 0), ("t", 0, 0))
    bench.deliver(*[(request_id, 0, 0) for request_id in "rst"])
    times = {request_id: sink.times_s for request_id, sink in bench.sinks.items()}
    gaps = [(after or 0) - (before or 0) for come in times.values() for before, after in itertools.pairwise(come)]
    assert (bench.gaps.counts, bench.gaps.total) == ([len(gaps)], sum(gaps))
    assert len(gaps) == 6


def test_failure_ends_all_requests_after_what_was_delivered_before_it() -> None:
    bench = ClientBench()
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
    bench = ClientBench()
    bench.submit()
    bench.client.fail("The engine failed.")
    bench.deliver(("r", 0, 0), chunks=(end(num_tokens=1),))
    bench.run()
    assert not bench.sinks["r"].deltas
    assert len(bench.sinks["r"].ends) == 1


def test_submit_after_the_failure_is_refused() -> None:
    bench = ClientBench()
    bench.client.fail("The engine failed.")
    with pytest.raises(ServiceError) as caught:
        bench.submit()
    assert (caught.value.kind, caught.value.code) == (ErrorKind.ENGINE, "engine_error")
    assert not bench.posted


def test_fault_in_a_slice_costs_neither_its_other_rows_nor_the_steps_to_come(caplog: pytest.LogCaptureFixture) -> None:
    bench = ClientBench()
    bench.submit("r")
    bench.deliver(("nobody", 0, 0), ("r", 0, 0))
    assert bench.journal == ["a", "/"]
    bench.deliver(("r", 0, 0))
    assert bench.journal == ["a", "/"] * 2
    assert "a request that is not in progress" in caplog.text


class SinkThatCannotEnd(Sink):
    """A bug of ours in the last thing a request is told."""

    def on_end(self, usage: Usage, error: str | None) -> None:
        super().on_end(usage, error)
        raise ZeroDivisionError


def bench_with_a_sink_that_cannot_end() -> ClientBench:
    bench = ClientBench()
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


# A request's handle: texts, usage, marks, its one end, sinks that raise.


def test_what_is_told_of_a_prompt_goes_to_every_choice_that_goes_on() -> None:
    bench = ClientBench()
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
        bench = ClientBench()
        bench.submit(num_logprobs=0, stop=stop)
        bench.deliver(chunks=(with_logprob(last),))
        bench.deliver(chunks=(end(FinishReason.STOP, 2, stop_logprobs=TokenLogprobs(2, -1.0)),))
        delta = bench.sinks["r"].deltas[-1]
        assert delta.finish_reason is FinishReason.STOP
        assert (delta.stop_logprobs and delta.stop_logprobs.token_id) == wanted


def test_stop_string_tells_the_engine_what_was_kept_and_drops_the_rest() -> None:
    bench = ClientBench()
    bench.submit(stop=("bc",))
    bench.deliver(("r", 0, 0), ("r", 0, 1), ("r", 0, 2), ("r", 0, 3))
    assert bench.cancels == [Cancel("r", FinishReason.STOP, 0, 3)]
    bench.deliver(("r", 0, 3), chunks=(end(FinishReason.STOP, 5),))
    sink = bench.sinks["r"]
    assert (sink.text, sink.deltas[-1].finish_reason) == ("a", FinishReason.STOP)
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=3), None)]


def test_stop_string_that_a_broken_character_completes_is_the_reason() -> None:
    bench = ClientBench()
    bench.submit(stop=("b\ufffd",))
    bench.deliver(("r", 0, 0), ("r", 0, 1), ("r", 0, 4), chunks=(end(num_tokens=3),))
    sink = bench.sinks["r"]
    assert (sink.text, sink.deltas[-1].finish_reason) == ("a", FinishReason.STOP)


def test_each_sequence_of_a_request_ends_for_itself() -> None:
    bench = ClientBench()
    bench.submit(num_sequences=2, first_choice=4, stop=("b",))
    bench.deliver(("r", 0, 0), ("r", 1, 0), ("r", 0, 1), ("r", 1, 2))
    bench.deliver(("r", 1, 3), chunks=(end(FinishReason.STOP, 2, 0, is_last=False), end(num_tokens=3, index=1)))
    sink = bench.sinks["r"]
    said = list(zip(sink.choices, sink.deltas, strict=True))
    assert ["".join(delta.text for at, delta in said if at == choice) for choice in (4, 5)] == ["a", "acd"]
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=5), None)]


def test_a_sequence_tells_when_its_mark_is_reached_and_not_before() -> None:
    bench = ClientBench()
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
    bench = ClientBench()
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
    bench = ClientBench()
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
    bench = ClientBench()
    handle = bench.submit()
    handle.pause()
    handle.resume()
    assert isinstance(bench.posted[0], Submit)
    assert bench.posted[1:] == [Pause("r"), Resume("r")]


def test_error_of_any_sequence_comes_with_the_end() -> None:
    bench = ClientBench()
    bench.submit(num_sequences=2)
    bench.deliver(chunks=(end(FinishReason.ERROR, 0, 0, is_last=False, error="broken"),))
    assert not bench.sinks["r"].ends
    bench.deliver(("r", 1, 0), chunks=(end(num_tokens=1, index=1),))
    assert bench.sinks["r"].ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=1), "broken")]


def test_sink_that_raises_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = ClientBench()
    bench.submit("r")
    bench.submit("s")

    def fail(choice: int, text: str) -> None:
        raise ZeroDivisionError

    bench.sinks["r"].on_text = fail  # type: ignore[method-assign]
    bench.deliver(("r", 0, 0), ("s", 0, 0), ("r", 0, 1))
    bench.deliver(("s", 0, 1), chunks=(end(FinishReason.ERROR, 1),))
    assert bench.sinks["s"].text == "ab"
    assert bench.cancels == [Cancel("r", FinishReason.ERROR, 0, 1)]
    ((_, error),) = bench.sinks["r"].ends
    assert error is not None
    assert "ZeroDivisionError" in caplog.text


def test_writer_that_raises_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = ClientBench()
    bench.submit("r")
    bench.submit("s")

    def fail(text: str) -> None:
        raise ZeroDivisionError

    bench.sinks["r"].text_writer = lambda choice: fail  # type: ignore[method-assign]
    bench.deliver(("r", 0, 0), ("s", 0, 0), ("r", 0, 1), ("s", 0, 1), ("r", 0, 2))
    assert [sink.text for sink in bench.sinks.values()] == ["a", "ab"]
    assert bench.cancels == [Cancel("r", FinishReason.ERROR, 0, 2)]
    assert "ZeroDivisionError" in caplog.text


def test_writer_has_what_stands_alone_and_what_the_detokenizer_lets_go() -> None:
    bench = ClientBench()
    handle = bench.submit(stop=("cd",))
    sink, told = bench.sinks["r"], []

    write_on = sink.text_writer(0)

    def write(text: str) -> None:
        told.append(text)
        write_on(text)

    sink.text_writer = lambda choice: write  # type: ignore[method-assign]
    for token_id in (0, 1, 4, 5, 0, 9, 2):  # a, b, half an é, the other half, a, an id that no token has, c
        bench.deliver(("r", 0, token_id))
    assert (sink.text, told) == ("abéa", ["b", "é", "a"])
    assert (handle.num_tokens, handle.sequences[0].num_untold) == (7, 2)
    bench.deliver(("r", 0, 1), ("r", 0, 1), ("r", 0, 2), ("r", 0, 3), ("r", 0, 0))
    assert (sink.text, told) == ("abéacbb", ["b", "é", "a", "cb", "b"])
    assert bench.cancels == [Cancel("r", FinishReason.STOP, 0, 11)]


def test_text_that_leaves_something_held_is_followed_by_the_detokenizers() -> None:
    bench = ClientBench()
    bench.submit(stop=("aab",))
    bench.deliver(*[("r", 0, token_id) for token_id in (1, 0, 0, 0, 1)])
    assert bench.sinks["r"].text == "ba"
    assert bench.cancels == [Cancel("r", FinishReason.STOP, 0, 5)]


def test_sink_is_told_at_its_marks_of_texts_that_stand_alone() -> None:
    bench = ClientBench()
    bench.submit(marks={0: 3, 3: 5})
    bench.deliver(*[("r", 0, 0)] * 9)
    assert bench.sinks["r"].marked == [(0, 0), (0, 3), (0, 5)]
