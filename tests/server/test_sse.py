import json

from hypothesis import example, given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from server.wire import sse

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))  # lone surrogates too


def joined(text: str) -> str:
    """The text with surrogate pairs joined and lone ones replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(ANY_TEXT)
@example("\ud800")
@example("a\ud83d\ude00b")
@example("\r\n\u2028\u2029\x85\x0b\x0c\x1c data: [DONE]\n\n")
def test_any_text_comes_back_from_one_line(text: str) -> None:
    for line in (sse.json_string(text), sse.json_strings[text], sse.json_strings[text], sse.json_line(text)):
        assert len(line.decode().splitlines()) == 1
        assert json.loads(line) == joined(text)


@given(st.dictionaries(ANY_TEXT.map(joined), ANY_TEXT | st.integers(-(2**63), 2**63 - 1) | st.none()))
def test_any_object_comes_back_from_one_line(value: dict[str, object]) -> None:
    line = sse.json_line(value)
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {key: joined(item) if isinstance(item, str) else item for key, item in value.items()}


@given(st.lists(ANY_TEXT, max_size=5))
def test_a_parser_sees_as_many_events_as_were_written(texts: list[str]) -> None:
    stream = b"".join(sse.KEEP_ALIVE + sse.event(sse.json_string(text), "word") for text in texts) + sse.DONE
    events = list(SSEDecoder().iter_bytes(iter([stream])))
    assert [event.event for event in events] == ["word"] * len(texts) + [None]
    assert [event.json() for event in events[:-1]] == [joined(text) for text in texts]
    assert events[-1].data == "[DONE]"


def test_ordinary_text_is_not_blown_up_by_escapes() -> None:
    assert sse.json_string('a "é" \n') == '"a \\"é\\" \\n"'.encode()


def test_texts_are_remembered_if_short_and_not_without_end() -> None:
    strings = type(sse.json_strings)()
    for i in range(70_000):
        assert strings[f"{i}"] == b'"%d"' % i
    assert 0 < len(strings) <= 64 * 1024
    strings["x" * 33]
    assert "x" * 33 not in strings


def test_an_unnamed_event_has_no_event_line() -> None:
    assert sse.event(b"{}") == b"data: {}\n\n"
    assert sse.event(b"{}", "x.y") == b"event: x.y\ndata: {}\n\n"
