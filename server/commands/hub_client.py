"""What a Hugging Face hub says over HTTP: a model's files, their bytes, and its refusals. Thread: engine (at start).

Source: huggingface.co/docs/hub/api.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import ExitCode, StartupError
from server.commands.hub_cache import DEFAULT_REVISION, Hub, is_commit, not_found
from server.values import HubId

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

TIMEOUT_S = 20.0  # for the hub's next byte
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubRefusal(StartupError):
    """The hub answers, but not with what was asked for.

    Args:
        reason: what it says, as a clause; also the cause, where none is given.
    """

    exit_code = ExitCode.MODEL

    def __init__(self, reason: str, fix: str, cause: str | None = None) -> None:
        super().__init__(cause or reason, fix)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it.

    Args:
        digest: of the content: SHA-256 in hex, or git's SHA-1 of a small file.
    """

    name: str
    size_bytes: int
    digest: str

    def new_hash(self) -> Any:
        """Source: git's object format for blobs; git-lfs for the others."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)


def list_files(hub: Hub, model: HubId) -> tuple[str, dict[str, HubFile]]:
    """The revision's commit, and its files by name.

    Raises:
        HubRefusal: there is none, or not for this token; the hub is out of order, or it is no hub.
    """
    from huggingface_hub import errors, get_session, hf_raise_for_status

    revision = (model.revision or DEFAULT_REVISION).replace("/", "%2F")
    url = f"{hub.endpoint}/api/models/{model.repo}/revision/{revision}"
    try:
        response = get_session().get(url, params={"blobs": "true"}, headers=_headers(hub), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
    except errors.HfHubHTTPError as error:
        raise _refusal(hub, model, url, error, "try again later") from error
    try:
        listing = json.loads(response.content)
        files = [_hub_file(entry) for entry in listing["siblings"]]
        commit = listing["sha"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _odd_answer(url, error) from error
    if not is_commit(commit):
        raise _odd_answer(url, f"the commit {commit!r}")
    return commit, {file.name: file for file in files}


def chunks(hub: Hub, model: HubId, url: str, position: int) -> Iterator[bytes | None]:
    """A file's bytes from a position; None first where the hub begins at the start instead.

    Raises:
        HubRefusal: the file is not for this token (of gated models the hub shows the list to everybody), or the hub is
            out of order.
    """
    from huggingface_hub import errors, get_session, hf_raise_for_status

    headers = _headers(hub) | {"accept-encoding": "identity"}
    headers |= {"range": f"bytes={position}-"} if position else {}
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        try:
            hf_raise_for_status(response)
        except errors.HfHubHTTPError as error:
            raise _refusal(hub, model, url, error, "try again later: what has come is kept") from error
        if position and not response.headers.get("content-range", "").startswith(f"bytes {position}-"):
            yield None
        yield from response.iter_bytes()  # as they come: what has come is kept


def transport_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub's HTTP client raises for a connection that is not made, or breaks."""
    import httpx2

    return (httpx2.RequestError,)


def _headers(hub: Hub) -> dict[str, str]:
    return {"user-agent": "steploop"} | ({"authorization": f"Bearer {hub.token}"} if hub.token else {})


def _hub_file(entry: dict[str, Any]) -> HubFile:
    size_bytes = entry["size"]
    digest = (entry.get("lfs") or {}).get("sha256") or entry["blobId"]
    if not isinstance(size_bytes, int) or size_bytes < 0 or not _HASH.fullmatch(digest):
        raise ValueError(f"{entry['rfilename']} has the size {size_bytes!r} and the hash {digest!r}")
    return HubFile(str(entry["rfilename"]), size_bytes, digest)


def _refusal(hub: Hub, model: HubId, url: str, error: "HfHubHTTPError", later: str) -> HubRefusal:
    """
    Args:
        later: what to do where nothing but the hub can change it.
    """
    from huggingface_hub import errors

    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        given = "the token given (HF_TOKEN) is not of who did" if hub.token else "no token is given (HF_TOKEN)"
        fix = f"accept its terms at {hub.endpoint}/{model.repo}, and give the token of who did: HF_TOKEN=hf_..."
        return HubRefusal(f"{model} is gated: the hub wants its terms accepted, and {given}", fix)
    if status == 403:
        fix = "give a token that may read it (HF_TOKEN=hf_...), and check what lies between if it may"
        return HubRefusal(f"{url} answered 403: this token or this address may not read it", fix)
    if isinstance(error, errors.RevisionNotFoundError):
        reason = f"{model.repo} has no revision {model.revision or DEFAULT_REVISION!r}"
    elif status in (401, 404):
        hidden = "it is hidden from the token given" if hub.token else "it is shown only with a token"
        reason = f"there is none, or {hidden} (HF_TOKEN)"
    else:
        return HubRefusal(f"{url} answered {status}", later)
    missing = not_found(hub, model, reason)
    return HubRefusal(reason, missing.fix, missing.cause)


def _odd_answer(url: str, what: object) -> HubRefusal:
    return HubRefusal(f"{url} does not answer as a hub: {what}", "check HF_ENDPOINT")
