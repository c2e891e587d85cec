"""Who may ask. Today: API keys from the configuration, or none at all on loopback. Thread: loop."""

from hashlib import sha256
from hmac import compare_digest

from core.errors import ErrorKind, ServiceError
from server.messages import HttpRequest


class KeyAuthenticator:
    """Accepts `Authorization: Bearer KEY` and `x-api-key: KEY` for the configured keys; everyone when there are none.

    Keys are held as SHA-256 digests: a look-up by digest tells nothing of a key by its timing (THREATS.md).
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = {digest: digest for digest in (sha256(key.encode()).digest() for key in keys)}

    def check(self, request: HttpRequest) -> None:
        """
        Raises:
            ServiceError: authentication; the key is missing or unknown.
        """
        if not self._digests:
            return
        key = _presented_key(request)
        if key is None:
            raise _refusal("No API key was sent. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        digest = sha256(key).digest()
        if not compare_digest(self._digests.get(digest, b""), digest):
            raise _refusal("The API key is not known here. Check the key, or ask the operator for one.")


def _presented_key(request: HttpRequest) -> bytes | None:
    authorization = request.header(b"authorization")
    if authorization is not None and authorization[:7].lower() == b"bearer ":
        return authorization[7:].strip()
    return request.header(b"x-api-key")


def _refusal(message: str) -> ServiceError:
    return ServiceError(ErrorKind.AUTHENTICATION, message, "invalid_api_key")
