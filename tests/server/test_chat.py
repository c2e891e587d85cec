"""`steploop chat` against a peer on a real socket: answers, figures, stopping, refusals."""

import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.errors import ExitCode, StartupError
from server.commands.chat import SETTINGS, AnswerStats, ChatClient, Conversation, ReadLine, harmless, private_server
from server.config import ServerConfig
from server.gate.identity import WAYS
from server.gate.tenants import Tenant
from tests.server.chat_peer import ANSWER, Peer, running_peer


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running_peer() as server:
        yield server


def typed(*lines: str | type[BaseException]) -> ReadLine:
    """Reads these lines; a type is raised."""
    waiting = iter([*lines, EOFError])

    def read() -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    return read


def client_of(peer: Peer) -> ChatClient:
    ticks = itertools.count()
    return ChatClient(peer.url, clock=lambda: next(ticks) * 0.5, sleep=lambda duration_s: None)


def talk(peer: Peer, *lines: str | type[BaseException]) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    Conversation(client_of(peer), out, err).run(typed(*lines))
    return out.getvalue(), err.getvalue()


def contents(peer: Peer) -> list[list[str]]:
    return [[message["content"] for message in question["messages"]] for question in peer.asked]


def test_answer_goes_to_out_and_figures_to_err(peer: Peer) -> None:
    out, err = io.StringIO(), io.StringIO()
    Conversation(client_of(peer), out, err).ask("What is a KV cache?")
    assert out.getvalue() == "KV cache\n"
    # the clock ticks once at the start and once per piece of text: 0.0, 0.5, 1.0, 1.5
    assert err.getvalue() == "3 tokens after a prompt of 7: the first in 500 ms, then 2.0 tokens/s\n"
    assert peer.asked == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is a KV cache?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_a_conversation_sends_what_was_said_before(peer: Peer) -> None:
    talk(peer, "one", "two", "/clear", "three", "/bye", "never asked")
    assert contents(peer) == [["one"], ["one", "KV cache", "two"], ["three"]]


def test_settings_are_sent_and_can_be_taken_back(peer: Peer) -> None:
    talk(peer, "/set temperature 0.5", "/set max_tokens 9", "/set system Be brief.", "one", "/set max_tokens", "two")
    first, second = peer.asked
    assert (first["temperature"], first["max_tokens"]) == (0.5, 9)
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "system" not in first
    assert "max_tokens" not in second
    assert second["temperature"] == 0.5


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temprature 1", "did you mean temperature?"),
        ("/set top_k many", "top_k must be a number"),
        ("/set", "server's own"),
        ("/stat", "did you mean /stats?"),
        ("/stats", "no answer yet"),
        ("/clear", "forgotten"),
        *(("/help", name) for name in SETTINGS),
        (KeyboardInterrupt, "\n/bye leaves\n"),
    ],
)
def test_commands_are_answered_here_not_sent(line: str | type[BaseException], told: str, peer: Peer) -> None:
    out, err = talk(peer, line)
    assert told in err
    assert (out, peer.asked) == ("", [])


class StopsAtSecondPiece(io.StringIO):
    """Output at which Ctrl-C is pressed."""

    def write(self, text: str) -> int:
        if text == " ca":
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_stops_the_answer_at_the_server_and_the_conversation_goes_on(peer: Peer) -> None:
    peer.ends_answer = False
    peer.chunks = ANSWER[:4]
    err = io.StringIO()
    conversation = Conversation(client_of(peer), StopsAtSecondPiece(), err)
    conversation.run(typed("one"))
    assert peer.client_left.wait(10)
    assert err.getvalue().startswith("stopped\nabout 2 tokens")
    peer.ends_answer, peer.chunks = True, ANSWER[:3] + ANSWER[-1:]
    conversation.run(typed("two"))
    assert contents(peer)[1] == ["one", "KV ca", "two"]


def test_a_refused_question_is_told_and_forgotten(peer: Peer) -> None:
    peer.refusal = (400, b'{"error": {"message": "temperature must be 0 to 2", "param": "temperature"}}')
    conversation = Conversation(client_of(peer), io.StringIO(), err := io.StringIO())
    conversation.run(typed("one"))
    assert "error: " in err.getvalue()
    assert "temperature must be 0 to 2" in err.getvalue()
    peer.refusal = None
    conversation.run(typed("two"))
    assert contents(peer)[1] == ["two"]


@pytest.mark.parametrize(("status", "fix"), [(401, "--api-key"), (400, "/set"), (404, "--url"), (503, "try again")])
def test_refusals_say_what_to_do(status: int, fix: str, peer: Peer) -> None:
    peer.refusal = (status, b"not json")
    with pytest.raises(StartupError) as caught:
        list(client_of(peer).stream([], {}))
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    assert "not json" in caught.value.cause
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ([b'data: {"error": {"message": "engine broke", "code": "engine_error"}}\n\n'], "engine broke"),
        ([], "broke off"),
    ],
)
def test_an_answer_that_does_not_end_is_an_error(last: list[bytes], cause: str, peer: Peer) -> None:
    peer.chunks = [*ANSWER[:4], *last]
    answer = client_of(peer).stream([], {})
    assert [next(answer), next(answer)] == ["KV", " ca"]
    with pytest.raises(StartupError, match=cause):
        next(answer)


def test_a_file_is_saved_whole_or_not_at_all(peer: Peer, tmp_path: Path) -> None:
    file, client = tmp_path / "in.output.jsonl", client_of(peer)
    peer.refusal = 503, b'{"error": {"message": "draining"}}'
    with pytest.raises(StartupError, match="draining"):
        client.save("/v1/files/1/content", file)
    peer.refusal, peer.missing_bytes = (200, b'{"custom_id": '), 10
    with pytest.raises(StartupError, match="broke off the answer"):
        client.save("/v1/files/1/content", file)
    assert not list(tmp_path.iterdir())
    peer.missing_bytes = 0
    client.save("/v1/files/1/content", file)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b'{"custom_id": ']


def test_loading_is_waited_for_and_each_stage_told_once(peer: Peer) -> None:
    peer.stages = ["loading weights", "loading weights", "warming up"]
    told: list[str] = []
    client_of(peer).wait_ready(told.append)
    assert told == ["loading weights", "warming up"]


def test_where_no_server_answers_chat_says_how_to_start_one() -> None:
    with Peer() as closed:
        url = closed.url
    with pytest.raises(StartupError) as caught:
        ChatClient(url).wait_ready(lambda stage: None)
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    assert "steploop serve" in caught.value.fix


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://[::1", "http://a:port", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(StartupError) as caught:
        ChatClient(url)
    assert caught.value.exit_code == ExitCode.USAGE


def test_url_may_lack_its_scheme_and_end_in_v1(peer: Peer) -> None:
    for suffix in ("", "/", "/v1", "/v1/"):
        assert ChatClient(peer.url.removeprefix("http://") + suffix).model == "tiny"


def test_in_process_server_is_private_and_stopped_after(peer: Peer) -> None:
    started: list[ServerConfig] = []
    stopped: list[bool] = []

    def start(config: ServerConfig) -> tuple[str, Callable[[], None]]:
        started.append(config)
        return peer.url, lambda: stopped.append(True)

    config = ServerConfig(
        host="0.0.0.0", port=8000, max_sequences=4,
        tenants=(Tenant(name="acme"),), keys_file=Path("/nowhere/keys.json"), auth=("jwt",),
    )  # fmt: skip
    with private_server(config, start) as client:
        assert "".join(client.stream([], {})) == "KV cache"
        assert not stopped
    assert stopped == [True]
    private = started[0]
    assert (private.host, private.port, private.max_sequences) == ("127.0.0.1", 0, 4)
    assert (private.tenants, private.keys_file, private.jwks, private.auth) == ((), None, None, WAYS)
    assert peer.keys == [f"Bearer {started[0].api_keys[0]}"]


def test_text_is_fit_for_where_it_goes(peer: Peer) -> None:
    assert harmless("a\x1b[2Jb\tc\nd\x07é") == "a\\x1b[2Jb\tc\nd\\x07é", "a model does not control the terminal"
    talk(peer, "caf\udce9")
    assert contents(peer) == [["caf?"]], "typed bytes that are not UTF-8 are replaced"
    stats = AnswerStats(start_s=1.0, times_s=[1.0451], usage={"completion_tokens": 1})
    assert str(stats) == "1 tokens: the first in 45 ms", "one token has no rate"
