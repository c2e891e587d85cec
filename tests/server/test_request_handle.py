"""A request's handle, on an engine client of its own: texts, usage, marks, its one end, sinks that raise."""

import pytest

from core.types import Cancel, FinishReason, Pause, Resume, Submit, TokenChunk, TokenLogprobs, Usage
from tests.server.client_bench import ClientBench, end, with_logprob


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
