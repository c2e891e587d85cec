"""A request's name as its client gave it. Ours is the identity everywhere: theirs repeat, and can be guessed."""

import re

from server.wire.messages import HttpRequest

_SANE = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")


def client_request_id(request: HttpRequest) -> str | None:
    """The client's x-request-id, if it is one that can stand in headers, logs and files."""
    theirs = request.header(b"x-request-id")
    return None if theirs is None or not _SANE.fullmatch(theirs) else theirs.decode()
