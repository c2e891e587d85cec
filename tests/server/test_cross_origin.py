"""What pages of other origins may do: by the headers that browsers judge by."""

import pytest

from server.gate.cross_origin import origin_value
from server.gate.identity import make_directory
from server.gate.tenants import Tenant
from server.values import BadValueError
from server.wire.messages import ClientCertificate, Peer
from tests.server.simulated_server import (
    STREAM,
    Answer,
    SimulatedServer,
    as_caller,
    chat,
    refusal_of,
    request,
    serving,
    with_lines,
)

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


REBOUND = "evil.example:8000"


@pytest.mark.parametrize(
    ("method", "host", "lines", "expected"),
    [
        ("POST", "localhost", ["Origin: http://localhost"], 200),  # the server's own page
        ("POST", "localhost", ["Origin: http://localhost", "Sec-Fetch-Site: same-origin"], 200),
        ("POST", "192.168.1.5:8000", ["Origin: http://192.168.1.5:8000"], 200),
        ("POST", "[fd00::5]:8000", ["Origin: http://[fd00::5]:8000"], 200),
        ("POST", "gpu-box:8000", ["Origin: http://gpu-box:8000"], 200),
        ("POST", "gpu-box.local:8000", ["Origin: http://gpu-box.local:8000"], 200),
        ("POST", "llm.example.com", ["Origin: https://llm.example.com"], 200),  # a certificate has its name
        ("POST", "127.0.0.1:8000", ["Origin: https://llm.example.com", "Sec-Fetch-Site: same-origin"], 200),  # a proxy
        ("POST", "localhost:8000", ["Origin: chrome-extension://abcdef"], 200),
        ("POST", "localhost:8000", ["Origin: app://obsidian.md", "Sec-Fetch-Site: cross-site"], 200),
        ("POST", REBOUND, ["User-Agent: curl/8.5.0"], 200),
        ("POST", REBOUND, ["Accept-Language: *", "Sec-Fetch-Mode: cors", "User-Agent: node"], 200),
        ("GET", REBOUND, ["Accept-Language: *", "Sec-Fetch-Mode: cors", "User-Agent: node"], 200),
        ("GET", REBOUND, [], 200),
        ("GET", "gpu-box.local:8000", ["Accept-Language: de"], 200),
        (
            "GET",
            "localhost",
            ["Accept-Language: de", "Sec-Fetch-Site: cross-site"],
            200,
        ),  # a link; nobody else reads it
        ("GET", "localhost", ["Origin: http://evil.example"], 200),
        ("GET", "app.example.com", ["Accept-Language: de"], 200),  # --cors-origin names it
        ("POST", "localhost", [f"Origin: {APP}"], 200),
        ("POST", "localhost", [f"Origin: {APP}", "Sec-Fetch-Site: cross-site"], 200),
        ("POST", "localhost", ["Origin: http://evil.example"], 403),
        ("POST", "localhost", ["Origin: http://evil.example", "Sec-Fetch-Site: cross-site"], 403),
        ("POST", "localhost:8000", ["Origin: http://localhost:3000", "Sec-Fetch-Site: same-site"], 403),
        ("POST", "localhost:8000", ["Origin: http://localhost:3000"], 403),
        ("POST", "localhost", ["Origin: null"], 403),
        ("POST", "localhost", ["Sec-Fetch-Site: cross-site"], 403),
        ("POST", REBOUND, [f"Origin: http://{REBOUND}"], 403),
        ("GET", REBOUND, ["Accept-Language: de", "User-Agent: what the page says"], 403),
        ("GET", "127.0.0.1.evil.example", ["Accept-Language: de"], 403),
        ("GET", "1.2.3.4.5", ["Accept-Language: de"], 403),
    ],
)
def test_without_keys_no_page_of_others_asks(method: str, host: str, lines: list[str], expected: int) -> None:
    asked = chat() if method == "POST" else request("GET", "/v1/models")
    asked = with_lines(asked.replace(b"Host: localhost", b"Host: " + host.encode()), *lines)
    with serving(origins=(APP,)) as server:
        answer = server.ask(asked, method)
        assert answer.status == expected
        if expected == 403:
            assert refusal_of(answer)[1] == "permission_denied"
            assert "--cors-origin" in answer.json["error"]["message"]
            assert not server.posted
    with serving(keys=("s3cret",)) as server:
        assert server.ask(as_caller(asked, "s3cret"), method).status == 200, "who has a key, has it"
    with serving(origins=("*",)) as server:
        assert server.ask(asked, method).status == 200


def test_a_certificate_that_the_browser_shows_by_itself_lets_no_page_in() -> None:
    tenant = Tenant(name="router", certificates=("DNS:router.example",))
    for lines, expected in ([], 200), (["Origin: http://evil.example"], 403):
        with serving() as server:
            server.gate.authenticator.directory = make_directory((tenant,))
            server.network.peer = Peer(certificate=ClientCertificate("CN=router", (("DNS", "router.example"),)))
            assert server.ask(with_lines(chat(), *lines)).status == expected


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
