"""Keys: which are taken, in which header, and what a refusal says."""

import pytest

from core.errors import ErrorKind, ServiceError
from server.auth import KeyAuthenticator
from server.messages import Headers, HttpRequest


def request(*headers: tuple[bytes, bytes]) -> HttpRequest:
    fields: Headers = headers
    return HttpRequest(stream_id=1, method="GET", path="/", query="", headers=fields, has_body=False)


def test_without_keys_everyone_may_ask() -> None:
    KeyAuthenticator(()).check(request())
    KeyAuthenticator(()).check(request((b"authorization", b"Bearer whatever")))


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer two"),
        (b"authorization", b"bEARER   two "),
        (b"x-api-key", b"two"),
    ],
)
def test_any_of_the_keys_is_taken_in_either_header(header: tuple[bytes, bytes]) -> None:
    KeyAuthenticator(("one", "two")).check(request(header))


def test_key_of_any_characters_is_compared_as_utf_8() -> None:
    KeyAuthenticator(("schlüssel",)).check(request((b"x-api-key", "schlüssel".encode())))


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Bearer"),),
        ((b"authorization", b"Bearer on"),),
        ((b"authorization", b"Bearer one two"),),
        ((b"authorization", b"Basic one"),),
        ((b"authorization", b"one"),),
        ((b"x-api-key", b"ONE"),),
        ((b"x-api-key", b""),),
        ((b"authorization", b"Bearer wrong"), (b"x-api-key", b"one")),
    ],
)
def test_everything_else_is_refused_without_repeating_it(headers: Headers) -> None:
    with pytest.raises(ServiceError) as caught:
        KeyAuthenticator(("one", "two")).check(request(*headers))
    assert (caught.value.kind, caught.value.code) == (ErrorKind.AUTHENTICATION, "invalid_api_key")
    words = caught.value.message.split()
    assert not {"on", "two", "ONE", "wrong"} & set(words)


def test_authenticator_does_not_hold_the_keys_themselves() -> None:
    assert b"s3cret" not in repr(vars(KeyAuthenticator(("s3cret",)))).encode()
