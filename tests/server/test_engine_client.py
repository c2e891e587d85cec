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
    Resume,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from server.engine_client import SLICE_CONNECTIONS, SLICE_ROWS
from tests.server.client_bench import ClientBench, end, with_logprob


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
    ("connections", "slices"),
    [
        ([i % 15 for i in range(64)], [64]),
        ([i % 16 for i in range(64)], [16] * 4),
        (list(range(64)), [16] * 4),
        ([0] * 30 + list(range(1, 21)), [30 + SLICE_CONNECTIONS - 1, 5]),  # rows that share a connection are one write
    ],
)
def test_slice_ends_with_so_many_connections_or_rows(connections: list[int], slices: list[int]) -> None:
    bench = ClientBench()
    for i, connection in enumerate(connections):
        bench.submit(f"r{i}", connection=f"c{connection}")
    bench.deliver(*[(f"r{i}", 0, 0) for i in range(len(connections))])
    bench.run()
    assert (SLICE_ROWS, SLICE_CONNECTIONS) == (64, 16)
    assert bench.slices == slices


def test_writes_from_before_do_not_shorten_a_slice() -> None:
    bench = ClientBench()
    bench.submit()
    for i in range(2 * SLICE_CONNECTIONS):
        bench.connections.write(f"other {i}")
    bench.deliver(*[("r", 0, 0)] * SLICE_ROWS)
    assert bench.slices == [SLICE_ROWS]


def test_deliveries_that_come_meanwhile_wait_for_their_turn_and_each_slice_has_one_time() -> None:
    bench = ClientBench()
    bench.submit()
    bench.deliver(*[("r", 0, 0)] * (SLICE_ROWS + 8), num_steps=1)
    bench.deliver(("r", 0, 1), num_steps=2)
    assert bench.sinks["r"].text == "a" * SLICE_ROWS
    assert bench.client.stats.num_steps == 0
    bench.deliver(("r", 0, 2), chunks=(end(num_tokens=SLICE_ROWS + 10),), num_steps=3)
    bench.run()
    assert bench.sinks["r"].text == "a" * (SLICE_ROWS + 8) + "bc"
    assert bench.sinks["r"].times_s == [1.0] * SLICE_ROWS + [3.0] * 8 + [5.0] + [7.0] * 2
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


def test_failure_ends_all_requests_once_after_what_was_delivered_before_it_and_refuses_more() -> None:
    bench = ClientBench()
    for request_id in "rst":
        bench.submit(request_id)
    bench.deliver(*[("r", 0, 0)] * (SLICE_ROWS + 8), ("s", 0, 1))
    bench.deliver(("r", 0, 2), chunks=(end(num_tokens=SLICE_ROWS + 9),))
    bench.client.fail("The engine failed.")
    ends = {request_id: sink.ends for request_id, sink in bench.sinks.items()}
    assert bench.sinks["r"].text == "a" * (SLICE_ROWS + 8) + "c"
    assert ends["r"] == [(Usage(num_prompt_tokens=3, num_completion_tokens=SLICE_ROWS + 9), None)]
    assert bench.sinks["s"].text == "b"
    assert ends["s"] == [(Usage(num_prompt_tokens=3, num_completion_tokens=1), "The engine failed.")]
    assert ends["t"] == [(Usage(num_prompt_tokens=0, num_completion_tokens=0), "The engine failed.")]
    assert bench.journal[-1] == "/"
    bench.client.fail("The engine failed.")
    bench.deliver(("s", 0, 0), chunks=(end(num_tokens=1),))
    bench.run()
    assert bench.sinks["s"].text == "b"
    assert [len(sink.ends) for sink in bench.sinks.values()] == [1, 1, 1]
    with pytest.raises(ServiceError) as caught:
        bench.submit("u")
    assert (caught.value.kind, caught.value.code) == (ErrorKind.ENGINE, "engine_error")
    assert len(bench.posted) == 3


def test_fault_in_a_slice_costs_neither_its_other_rows_nor_the_steps_to_come(caplog: pytest.LogCaptureFixture) -> None:
    bench = ClientBench()
    bench.submit("r")
    bench.deliver(("nobody", 0, 0), ("r", 0, 0))
    assert bench.journal == ["a", "/"]
    bench.deliver(("r", 0, 0))
    assert bench.journal == ["a", "/"] * 2
    assert "a request that is not in progress" in caplog.text


def failing(*args: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_sink_that_raises_at_its_end_costs_no_other_request(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench = ClientBench()
    for request_id in "rst":
        bench.submit(request_id)
    bench.sinks["r"].on_end = failing  # type: ignore[method-assign]
    if fails:
        bench.client.fail("The engine failed.")
        assert bench.sinks["t"].ends[0][1] == "The engine failed."
    else:
        bench.deliver(("s", 0, 0), chunks=(end(num_tokens=0), end(request_id="s", num_tokens=1)))
        bench.deliver(("t", 0, 1))
        assert bench.sinks["t"].text == "b"
    assert len(bench.sinks["s"].ends) == 1
    assert bench.journal[-1] == "/"
    assert "ZeroDivisionError" in caplog.text


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


@pytest.mark.parametrize(
    ("stop", "ids", "text", "kept"),
    [
        ("bc", [0, 1, 2, 3], "a", 3),
        ("aab", [1, 0, 0, 0, 1], "ba", 5),  # the writer is followed by the detokenizer, which holds text back
        ("b\ufffd", [0, 1, 4], "a", None),  # a broken character completes it at the end
    ],
)
def test_stop_string_tells_the_engine_what_was_kept_and_drops_the_rest(
    stop: str, ids: list[int], text: str, kept: int | None
) -> None:
    bench = ClientBench()
    bench.submit(stop=(stop,))
    bench.deliver(*[("r", 0, token_id) for token_id in ids])
    assert bench.cancels == ([] if kept is None else [Cancel("r", FinishReason.STOP, 0, kept)])
    num_tokens = len(ids) if kept is None else kept
    bench.deliver(*([] if kept is None else [("r", 0, 3)]), chunks=(end(FinishReason.LENGTH, num_tokens),))
    sink = bench.sinks["r"]
    assert (sink.text, sink.deltas[-1].finish_reason) == (text, FinishReason.STOP)
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=num_tokens), None)]


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
    bench.submit(num_sequences=2, first_choice=4, marks={0: 2, 2: 3, 3: 6})
    sink = bench.sinks["r"]
    bench.deliver(("r", 0, 0), ("r", 1, 0))
    assert sink.marked == [(4, 0), (5, 0)]
    silent = TokenChunk(request_id="r", index=1, token_ids=(0,))
    bench.deliver(("r", 0, 4), chunks=(silent,))  # also where the token has no text yet
    assert sink.marked[2:] == [(4, 2), (5, 2)]
    bench.deliver(("r", 0, 5), *[("r", 0, 1)] * 6)
    assert sink.marked[4:] == [(4, 3), (4, 6)]


@pytest.mark.parametrize(
    ("ends", "reason", "text"),  # finish() tells the b that was held back, cancel() does not
    [(["finish", "finish", "cancel"], FinishReason.LENGTH, "ab"), (["cancel"] * 2, FinishReason.CANCELLED, "a")],
)
def test_finish_and_cancel_end_each_open_sequence_once_and_drop_the_rest(
    ends: list[str], reason: FinishReason, text: str
) -> None:
    bench = ClientBench()
    handle = bench.submit(num_sequences=2, stop=("bc",))
    handle.pause()
    handle.resume()
    assert bench.posted[1:] == [Pause("r"), Resume("r")]
    bench.deliver(("r", 0, 0), ("r", 0, 1), ("r", 1, 0), chunks=(end(num_tokens=1, index=1, is_last=False),))
    for name in ends:
        handle.finish(FinishReason.LENGTH, 0.0) if name == "finish" else handle.cancel(FinishReason.CANCELLED)
    assert bench.cancels == [Cancel("r", reason, 0, 2)]
    bench.deliver(("r", 0, 2), chunks=(end(reason, 3),))
    sink = bench.sinks["r"]
    told = [delta for choice, delta in zip(sink.choices, sink.deltas, strict=True) if choice == 0]
    assert "".join(delta.text for delta in told) == text
    assert (told[-1].finish_reason is reason) == (ends[0] == "finish")
    assert sink.ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=3), None)]


def test_error_of_any_sequence_comes_with_the_end() -> None:
    bench = ClientBench()
    bench.submit(num_sequences=2)
    bench.deliver(chunks=(end(FinishReason.ERROR, 0, 0, is_last=False, error="broken"),))
    assert not bench.sinks["r"].ends
    bench.deliver(("r", 1, 0), chunks=(end(num_tokens=1, index=1),))
    assert bench.sinks["r"].ends == [(Usage(num_prompt_tokens=3, num_completion_tokens=1), "broken")]


@pytest.mark.parametrize("at", ["on_text", "text_writer"])
def test_sink_that_raises_ends_its_request_alone(at: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = ClientBench()
    bench.submit("r")
    bench.submit("s")
    setattr(bench.sinks["r"], at, failing if at == "on_text" else lambda choice: failing)
    bench.deliver(("r", 0, 0), ("s", 0, 0), ("r", 0, 1), ("s", 0, 1), ("r", 0, 2))
    kept = 1 if at == "on_text" else 2
    bench.deliver(chunks=(end(FinishReason.ERROR, kept),))
    assert bench.sinks["s"].text == "ab"
    assert bench.cancels == [Cancel("r", FinishReason.ERROR, 0, kept)]
    ((_, error),) = bench.sinks["r"].ends
    assert error is not None
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
    assert (handle.num_tokens, handle.sequences[0].num_unreported) == (7, 2)
    bench.deliver(("r", 0, 1), ("r", 0, 1), ("r", 0, 2), ("r", 0, 3), ("r", 0, 0))
    assert (sink.text, told) == ("abéacbb", ["b", "é", "a", "cb", "b"])
    assert bench.cancels == [Cancel("r", FinishReason.STOP, 0, 11)]
