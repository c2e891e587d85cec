"""What pages of other origins may do: by the headers that browsers judge by."""

import pytest

from server.gate.cross_origin import origin_value
from server.values import BadValueError
from tests.server.simulated_server import STREAM, Answer, SimulatedServer, chat, request, with_lines

APP = "https://app.example.com"
PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type")


def with_origin(data: bytes, origin: str = APP) -> bytes:
    return with_lines(data, f"Origin: {origin}")


def ask(data: bytes, method: str = "POST", origins: tuple[str, ...] = (APP,), keys: tuple[str, ...] = ()) -> Answer:
    server = SimulatedServer(origins=origins, keys=keys)
    answer = server.ask(data, method)
    server.close()
    return answer


def cors_names(answer: Answer) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control-") or name == "vary"}


@pytest.mark.parametrize("fields", [{}, STREAM, {"messages": []}], ids=["whole", "streamed", "refused"])
def test_allowed_origin_may_read_every_kind_of_answer(fields: dict[str, object]) -> None:
    answer = ask(with_origin(chat(**fields)))
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["access-control-expose-headers"] == "*"
    assert answer.headers["vary"] == "origin"


def test_allowed_origin_may_read_what_the_connection_refuses() -> None:
    data = with_origin(request("POST", "/v1/completions", b"{}")).replace(b"Content-Length: 2", b"Content-Length: 1e9")
    assert ask(data).status == 400
    big = with_origin(request("POST", "/v1/completions", b" " * 100_001))
    assert ask(big).headers["access-control-allow-origin"] == APP


@pytest.mark.parametrize(
    "origin", ["https://app.example.com:444", "http://app.example.com", "https://evil.com", "null"]
)
def test_other_origin_may_read_nothing(origin: str) -> None:
    assert cors_names(ask(with_origin(chat(), origin))) == {"vary"}
    assert ask(with_origin(request("OPTIONS", "/v1/models", None, *PREFLIGHT), origin), "OPTIONS").status == 405


def test_nothing_is_said_where_nothing_is_allowed() -> None:
    assert cors_names(ask(with_origin(chat()), origins=())) == set()
    assert ask(with_origin(request("OPTIONS", "/v1/models", None, *PREFLIGHT)), "OPTIONS", origins=()).status == 405


def test_any_origin_may_read_where_all_are_allowed() -> None:
    answer = ask(with_origin(chat()), origins=("*",))
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "vary" not in answer.headers


def test_preflight_needs_no_key_and_names_what_was_asked_for() -> None:
    answer = ask(with_origin(request("OPTIONS", "/v1/chat/completions", None, *PREFLIGHT)), "OPTIONS", keys=("s3cret",))
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert ask(with_origin(chat()), keys=("s3cret",)).status == 401, "the request itself does"


def test_plain_options_is_no_preflight() -> None:
    assert ask(with_origin(request("OPTIONS", "/v1/models")), "OPTIONS").status == 405


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("https://app.example.com", APP),
        ("https://App.Example.com:443/", APP),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
    ],
)
def test_origins_are_taken_as_browsers_send_them(text: str, origin: str) -> None:
    assert origin_value(text) == origin


@pytest.mark.parametrize(
    ("text", "proposal"),
    [
        ("app.example.com", "https://app.example.com"),
        ("https://app.example.com/chat", APP),
        ("https://a:b@app.example.com", None),
        ("https://app.example.com:http", None),
        ("ftp://app.example.com", None),
        ("", None),
    ],
)
def test_what_is_no_origin_is_refused_with_one_that_may_be_meant(text: str, proposal: str | None) -> None:
    with pytest.raises(BadValueError) as caught:
        origin_value(text)
    assert caught.value.proposal == proposal
