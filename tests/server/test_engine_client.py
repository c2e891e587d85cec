"""The engine client alone: slices, their order, gaps, failures. The loop and the engine are lists."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ErrorKind, ServiceError
from core.types import Request, SamplingParams, Usage
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
