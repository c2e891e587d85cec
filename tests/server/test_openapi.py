"""/openapi.json and /docs: every route is told of, as it is."""

import json
from typing import Any

import msgspec
import pytest
import schemathesis

from server.api.fields import LIMIT, RequestLimits
from server.dashboard import FILES
from server.routes import ROUTES
from tests.server.simulated_server import request, serving

TOLD = [
    (path, method, route, route.operation)
    for path, methods in ROUTES.items()
    for method, route in methods.items()
    if route.operation is not None
]


@pytest.fixture(scope="module")
def document() -> Any:
    with serving() as server:
        server.app.request_limits = RequestLimits(num_choices=3)
        return json.loads(server.ask(request("GET", "/openapi.json"), "GET").body)


def test_the_document_is_valid(document: Any) -> None:
    schemathesis.openapi.from_dict(document).validate()


def test_each_route_is_told_of_but_for_the_page() -> None:
    untold = {path for path, methods in ROUTES.items() for one in methods.values() if not one.operation}
    assert untold == {"/", *FILES, "/dashboard/live"}


def test_each_has_its_right_and_its_errors(document: Any) -> None:
    for path, method, route, _ in TOLD:
        shown = document["paths"][path][method.lower()]
        rights = {right for one in shown["security"] for rights in one.values() for right in rights}
        assert rights == ({route.scope.value} if route.scope else set())
        assert ("401" in shown["responses"]) == (route.scope is not None)
    messages, chat = (document["paths"][one]["post"] for one in ("/v1/messages", "/v1/chat/completions"))
    assert "529" in messages["responses"]
    assert chat["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorDocument")


def test_what_operators_and_clients_ask_about_requests_is_told_field_by_field(document: Any) -> None:
    for path, method, _, one in TOLD:
        if path.startswith(("/admin/", "/v1/requests/")):
            assert one.answer != dict[str, Any], (method, path)
    schemas = document["components"]["schemas"]
    tenant = next(schemas[name] for name in schemas if name.endswith("TenantState"))
    assert {"name", "class", "limits", "keys", "used"} <= tenant["properties"].keys()
    assert "http2_error" not in schemas[next(name for name in schemas if name.endswith("ToldRequest"))]["required"]


def test_each_example_is_taken() -> None:
    examples = [(one.example, one.body) for *_, one in TOLD if one.body and not isinstance(one.body, tuple)]
    assert len(examples) > 20
    for example, body in examples:
        msgspec.convert({name: one for name, one in example.items() if name != "n_predict"}, body)


def test_a_body_has_the_bounds_that_are_checked_and_what_becomes_of_other_fields(document: Any) -> None:
    (name,) = (name for name in document["components"]["schemas"] if name.endswith("chat.ChatBody"))
    body = document["components"]["schemas"][name]
    assert body["required"] == ["messages"]
    assert body["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert body["x-aliases"]["max_new_tokens"] == "max_tokens"
    for field, bounds in {
        "n": {"type": "integer", "minimum": 1, "maximum": 3},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    }.items():
        assert body["properties"][field]["anyOf"][0] == bounds
    assert body["properties"]["stop"]["anyOf"][1]["maxItems"] == 16
    assert body["properties"]["logit_bias"]["anyOf"][0]["maxProperties"] == 300
    assert LIMIT not in json.dumps(document)
    assert body["x-refused"]["mirostat"] == [0]
    assert "rid" in body["x-no-effect"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("OPTIONS", "/v1/batches/b/cancel", "POST"),
        ("POST", "/v1/batches/b", "GET, HEAD"),
        ("DELETE", "/v1/files/f/content", "GET, HEAD"),
        ("PUT", "/v1/files/f", "GET, HEAD, DELETE"),
        ("DELETE", "/v1/requests/r/stream", "GET, HEAD"),
        ("DELETE", "/v1/responses/r/input_items", "GET, HEAD"),
        ("DELETE", "/v1/models/org/name", "GET, HEAD"),
    ],
)
def test_each_path_with_a_name_in_it_has_its_own_methods(method: str, path: str, allowed: str) -> None:
    with serving() as server:
        answer = server.ask(request(method, path), method)
        assert (answer.status, answer.headers["allow"]) == (405, allowed)


def test_who_has_it_is_told_so() -> None:
    with serving() as server:
        first = server.ask(request("GET", "/openapi.json"), "GET")
        tag = first.headers["etag"]
        assert first.headers["cache-control"] == "no-cache"
        for known, status in ((tag, 304), (f'"a", W/{tag}', 304), ('"a"', 200)):
            answer = server.ask(request("GET", "/openapi.json", None, f"If-None-Match: {known}"), "GET")
            assert (answer.status, answer.headers["etag"]) == (status, tag)
