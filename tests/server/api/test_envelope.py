import json

import openai
import pytest

from core.errors import ContextLengthExceeded, ErrorKind, InvalidRequest, ServiceError
from core.types import FinishReason
from server.api.replies import STATUSES, WIRE_REASONS, cut_short, error_body, error_event, status_of
from tests.server.api.wire import read_events, sdk_reading


def test_every_kind_has_a_status_and_a_type() -> None:
    assert STATUSES.keys() == set(ErrorKind)
    statuses = {status for status, _ in STATUSES.values()}
    assert sorted(statuses) == [400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 499, 500, 502, 503, 504]


def test_the_envelope_is_openais() -> None:
    error = ContextLengthExceeded(2048, "the prompt has 3000 tokens", "messages")
    assert status_of(error) == 400
    assert json.loads(error_body(error)) == {
        "error": {
            "message": "This model's maximum context length is 2048 tokens. However, the prompt has 3000 tokens."
            " Shorten the prompt. (context_length_exceeded)",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (ErrorKind.INVALID_REQUEST, openai.BadRequestError),
        (ErrorKind.AUTHENTICATION, openai.AuthenticationError),
        (ErrorKind.PERMISSION, openai.PermissionDeniedError),
        (ErrorKind.NOT_FOUND, openai.NotFoundError),
        (ErrorKind.CONFLICT, openai.ConflictError),
        (ErrorKind.RATE_LIMITED, openai.RateLimitError),
        (ErrorKind.UNAVAILABLE, openai.InternalServerError),
        (ErrorKind.ENGINE, openai.InternalServerError),
    ],
)
def test_the_sdk_raises_its_own_error_with_our_code(kind: ErrorKind, raised: type[openai.APIStatusError]) -> None:
    error = ServiceError(kind, "Mend it.\n\nNow.", "some_code", "a.b")
    with sdk_reading(error_body(error), status_of(error)) as client, pytest.raises(raised) as caught:
        client.models.list()
    assert (caught.value.code, caught.value.param) == ("some_code", "a.b")
    assert "Mend it." in caught.value.message


def test_an_error_event_is_one_line() -> None:
    event = error_event(InvalidRequest("Line\nbreak\r\n\r\ndata: forged", "p"))
    ((name, data),) = read_events(event)
    assert name is None
    assert data["error"]["message"] == "Line\nbreak\r\n\r\ndata: forged"
    assert event.count(b"\n") == 2
    assert b"\r" not in event


@pytest.mark.parametrize(
    ("reason", "kind", "code"),
    [
        (FinishReason.CANCELLED, ErrorKind.CANCELLED, "request_cancelled"),
        (FinishReason.DEADLINE, ErrorKind.DEADLINE_EXCEEDED, "deadline_exceeded"),
        (FinishReason.ERROR, ErrorKind.ENGINE, "engine_error"),
    ],
)
def test_what_the_wire_has_no_word_for_is_an_error(reason: FinishReason, kind: ErrorKind, code: str) -> None:
    error = cut_short(reason)
    assert (error.kind, error.code) == (kind, code)
    assert reason not in WIRE_REASONS
