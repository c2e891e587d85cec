"""Models of a Hugging Face hub: lists those in this machine's cache, and fetches a missing one into it.

The cache is huggingface_hub's own (blobs/, snapshots/, refs/), so that other programs find the files. Only what is
served is fetched: JSON, templates, safetensors; never pickle or code. A file is downloaded as `*.incomplete`, from
where an earlier attempt stopped, and enters the cache once its size and hash are those that the hub lists.
huggingface_hub's own download starts again, and checks sizes alone. Thread: engine (at start), or main.
Source: huggingface.co/docs/hub/api.
"""

import difflib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from core.errors import ExitCode, StartupError
from server.commands.console import ReportProgress
from server.values import HubId, format_size, near_models

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

DEFAULT_REVISION = "main"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
REQUIRED = ("config.json", "tokenizer.json")
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TIMEOUT_S = 20.0  # for the hub's next byte
LEAST_SIMILARITY = 0.75  # of whole names: to share the organisation is not enough
LEAST_SIMILARITY_OF_ENDS = 0.6  # of names without the organisation
_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_SHARD = re.compile(r"[\w.-]+\.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hub:
    """Where models are looked for.

    Args:
        endpoint: URL, without a slash at its end.
        cache: the directory that huggingface_hub keeps models in.
        is_offline: look in the cache only, as HF_HUB_OFFLINE asks.
    """

    endpoint: str
    cache: Path
    token: str | None = None
    is_offline: bool = False

    def folder(self, model: HubId) -> Path:
        return self.cache / f"models--{model.repo.replace('/', '--')}"


class NotFetched(StartupError):
    """A model of the hub that is not cached, and that `serve` would fetch."""

    exit_code = ExitCode.MODEL


class HubRefusal(StartupError):
    """The hub cannot be reached, or answers with something else than what was asked for.

    Args:
        reason: a clause; also the cause, if none is given.
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
        """Source: git's object format for blobs; git-lfs for large files."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)


def environment_hub() -> Hub:
    """The hub that HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN (or a login's file) name.

    Raises:
        StartupError: a login's file cannot be read.
    """
    from huggingface_hub import constants, get_token

    try:
        token = get_token()
    except (OSError, UnicodeDecodeError) as error:
        cause = f"the hub's token in {constants.HF_TOKEN_PATH} cannot be read: {error}"
        raise StartupError(cause, "correct or remove that file, or name another directory: HF_HOME=DIR") from error
    return Hub(constants.ENDPOINT, Path(constants.HF_HUB_CACHE), token, constants.is_offline_mode())


# The cache.


def cached_models(hub: Hub) -> list[tuple[HubId, Path]]:
    """Models whose files are all in the cache, with their directories, by name."""
    found = []
    for folder in sorted(hub.cache.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        for reference in sorted(path for path in (folder / "refs").rglob("*") if path.is_file()):
            revision = reference.relative_to(folder / "refs").as_posix()
            model = HubId(name, None if revision == DEFAULT_REVISION else revision)
            if (snapshot := find_cached(hub, model)) is not None:
                found.append((model, snapshot))
    return found


def find_cached(hub: Hub, model: HubId) -> Path | None:
    """The directory of a model's files; None unless configuration, tokenizer and weights are all cached."""
    commit = revision = model.revision or DEFAULT_REVISION
    reference = hub.folder(model) / "refs" / revision
    try:
        if reference.is_file():
            commit = reference.read_text(encoding="ascii").strip()
        if not _COMMIT.fullmatch(commit):
            return None
        snapshot = hub.folder(model) / "snapshots" / commit
        weights = {SINGLE_FILE} if (snapshot / SINGLE_FILE).exists() else _shards_of(snapshot / INDEX_FILE)
    except (OSError, UnicodeDecodeError, StartupError):
        return None
    return snapshot if all((snapshot / name).exists() for name in (*REQUIRED, *weights)) else None


def cached(hub: Hub, model: HubId) -> Path:
    """As find_cached, for commands that fetch nothing.

    Raises:
        NotFetched: it is not cached, and `serve` would fetch it.
        StartupError: it is not cached, and HF_HUB_OFFLINE forbids `serve` to fetch it.
    """
    found = find_cached(hub, model)
    if found is not None:
        return found
    if hub.is_offline:
        raise _not_here_offline(hub, model)
    cause = f"model {model} is not in {hub.cache} yet: serve fetches it from {hub.endpoint}, this command does not"
    raise NotFetched(cause, _fix_with_near(hub, model, f"fetch it first: steploop models pull {model}"))


def _shards_of(index: Path) -> set[str]:
    """The files that an index names, and the index; none may be in another directory.

    Raises:
        OSError: it cannot be read.
        StartupError: it is not an index, or names files elsewhere.
    """
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        cause = f"{INDEX_FILE} of {index.parent} is not an index with a weight_map ({error})"
        raise StartupError(cause, "name another model", ExitCode.MODEL) from error
    odd = [name for name in names if not isinstance(name, str) or not _SHARD.fullmatch(name)]
    if odd or not names:
        cause = f"{INDEX_FILE} of {index.parent} names {odd or 'nothing'}, not safetensors of its own directory"
        raise StartupError(cause, "name another model", ExitCode.MODEL)
    return {*names, INDEX_FILE}


# Fetching.


def fetch(hub: Hub, model: HubId, report: ReportProgress) -> Path:
    """The directory of a model's files, after those that are not cached are fetched.

    If the hub cannot list a cached model, the cached files serve, with a warning.

    Args:
        report: called with (bytes done, bytes in all); never if nothing is missing.

    Raises:
        StartupError: not found, not reachable and not cached, not of a kind that is served, or not what its hash says.
    """
    found = find_cached(hub, model)
    if hub.is_offline:
        if found is None:
            raise _not_here_offline(hub, model)
        return found
    try:
        commit, files = _list_files(hub, model)
    except HubRefusal as error:
        if found is None:
            raise
        logger.warning("%s is served as %s has it; %s: %s", model, found, hub.endpoint, error.reason)
        return found
    try:
        return _fetch_commit(hub, model, commit, files, report)
    except OSError as error:
        cause = f"{model} cannot be stored in {hub.cache}: {error.strerror or error}"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room" if is_full or error.errno == errno.EFBIG else "make it writable"
        exit_code = ExitCode.TRANSIENT if is_full else ExitCode.MODEL
        raise StartupError(cause, f"{fix}, or name another directory: HF_HOME=DIR", exit_code) from error


def _fetch_commit(hub: Hub, model: HubId, commit: str, files: Mapping[str, HubFile], report: ReportProgress) -> Path:
    """Fetch a commit's missing files, then record the commit under the revision's name."""
    snapshot = hub.folder(model) / "snapshots" / commit
    weights = {SINGLE_FILE}
    if INDEX_FILE in files and SINGLE_FILE not in files:
        _place(hub, model, commit, [files[INDEX_FILE]], lambda done, total: None)
        weights = _shards_of(snapshot / INDEX_FILE)
    if missing := [name for name in (*REQUIRED, *sorted(weights)) if name not in files]:
        cause = f"{model} on {hub.endpoint} has no {', '.join(missing)}; it has {_shown(sorted(files))}"
        raise StartupError(cause, _fix_missing(model, files), ExitCode.MODEL)
    small = [name for name in files if name in REQUIRED or name in OPTIONAL or _TEMPLATE.fullmatch(name)]
    _place(hub, model, commit, [files[name] for name in (*small, *sorted(weights))], report)
    revision = model.revision or DEFAULT_REVISION
    if not _COMMIT.fullmatch(revision):
        reference = hub.folder(model) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    return snapshot


def _fix_missing(model: HubId, files: Mapping[str, HubFile]) -> str:
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    if gguf:
        return (
            f"download one of its GGUF files (hf download {model.repo} {gguf[0]} --local-dir .) and --model FILE.gguf"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        return "name a model with safetensors: pickled weights can run code, and are not read"
    return "name a model with safetensors and a tokenizer.json"


def _place(hub: Hub, model: HubId, commit: str, files: list[HubFile], report: ReportProgress) -> None:
    """Download the files into blobs/, and link to them from the commit's snapshot."""
    blobs, snapshot = hub.folder(model) / "blobs", hub.folder(model) / "snapshots" / commit
    blobs.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not _is_file_of(blobs / file.digest, file.size_bytes)]
    total = sum(file.size_bytes for file in missing)
    begun = sum(path.stat().st_size for file in missing if (path := _incomplete(blobs / file.digest)).is_file())
    if (needed := total - begun) > (free := shutil.disk_usage(blobs).free):
        cause = f"{model} needs {format_size(needed)} more in {hub.cache}, {format_size(free)} are free"
        raise StartupError(cause, "make room, or name another directory: HF_HOME=DIR", ExitCode.MODEL)
    done = 0
    for file in missing:
        url = f"{hub.endpoint}/{model.repo}/resolve/{commit}/{file.name}"
        _download(hub, model, url, blobs / file.digest, file, partial(_report_part, report, done, total))
        done += file.size_bytes
    for file in files:
        link, blob = snapshot / file.name, blobs / file.digest
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)  # a link to nowhere
            link.symlink_to(os.path.relpath(blob, link.parent))


def _report_part(report: ReportProgress, before: int, total: int, so_far: int) -> None:
    report(before + so_far, total)


def _is_file_of(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def _incomplete(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _download(hub: Hub, model: HubId, url: str, blob: Path, file: HubFile, report: Callable[[int], None]) -> None:
    """Fetch one file, from where an earlier attempt stopped.

    Reconnects when the connection breaks, as long as each attempt adds something.

    Args:
        report: called with the file's bytes so far.
    """
    import httpx2  # by whose errors huggingface_hub's session tells that a connection is not made, or breaks

    incomplete = _incomplete(blob)
    with incomplete.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            cause = f"{url} is being fetched by another process"
            raise StartupError(cause, "wait for it, then start again", ExitCode.MODEL) from error
        furthest = stream.tell()
        report(furthest)
        while stream.tell() < file.size_bytes:
            try:
                _receive(hub, model, url, stream, file, report)
                break
            except httpx2.RequestError as error:
                if stream.tell() <= furthest:
                    sizes = f"{format_size(stream.tell())} of {format_size(file.size_bytes)}"
                    cause = f"{url} stopped at {sizes}: {error or type(error).__name__}"
                    raise StartupError(
                        cause, "start again: the download continues from there", ExitCode.MODEL
                    ) from error
                furthest = stream.tell()
        stream.flush()
        with incomplete.open("rb") as whole:
            digest = hashlib.file_digest(whole, file.new_hash).hexdigest()
        if stream.tell() != file.size_bytes or digest != file.digest:
            incomplete.unlink()
            found = f"{stream.tell()} bytes, {digest}"
            cause = f"{url} is not what the hub lists: {found}; not {file.size_bytes}, {file.digest}"
            fix = "try again; if it happens again, the hub or a proxy on the way is broken"
            raise StartupError(cause, fix, ExitCode.MODEL)
        os.replace(incomplete, blob)


# What the hub says over HTTP.


def _list_files(hub: Hub, model: HubId) -> tuple[str, dict[str, HubFile]]:
    """The revision's commit, and its files by name.

    Raises:
        HubRefusal: it does not exist, or not for this token; or the hub cannot be reached, or is broken.
    """
    import httpx2
    from huggingface_hub import errors, get_session, hf_raise_for_status

    revision = (model.revision or DEFAULT_REVISION).replace("/", "%2F")
    url = f"{hub.endpoint}/api/models/{model.repo}/revision/{revision}"
    try:
        response = get_session().get(url, params={"blobs": "true"}, headers=_headers(hub), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
    except httpx2.RequestError as error:
        reason = f"cannot be reached ({error or type(error).__name__})"
        fix = "check the network and HF_ENDPOINT, or give a directory or a .gguf file"
        not_here = _not_here(hub, model, f", and {hub.endpoint} {reason}", fix)
        raise HubRefusal(reason, not_here.fix, not_here.cause) from error
    except errors.HfHubHTTPError as error:
        raise _refusal(hub, model, url, error, "try again later") from error
    try:
        listing = json.loads(response.content)
        files = [_hub_file(entry) for entry in listing["siblings"]]
        if not _COMMIT.fullmatch(listing["sha"]):
            raise ValueError(f"the commit {listing['sha']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubRefusal(f"{url} does not answer as a hub: {error}", "check HF_ENDPOINT") from error
    return listing["sha"], {file.name: file for file in files}


def _hub_file(entry: dict[str, Any]) -> HubFile:
    size_bytes = entry["size"]
    digest = (entry.get("lfs") or {}).get("sha256") or entry["blobId"]
    if not isinstance(size_bytes, int) or size_bytes < 0 or not _HASH.fullmatch(digest):
        raise ValueError(f"{entry['rfilename']} has the size {size_bytes!r} and the hash {digest!r}")
    return HubFile(str(entry["rfilename"]), size_bytes, digest)


def _receive(hub: Hub, model: HubId, url: str, stream: IO[bytes], file: HubFile, report: Callable[[int], None]) -> None:
    """Append the rest of a file to the stream; all of it, if the hub does not serve ranges.

    Raises:
        httpx2.RequestError: the connection is not made, or breaks.
        HubRefusal: this token may not read the file (the hub lists gated models for everyone), or the hub is broken.
    """
    from huggingface_hub import errors, get_session, hf_raise_for_status

    position = stream.tell()
    headers = _headers(hub) | {"accept-encoding": "identity"} | ({"range": f"bytes={position}-"} if position else {})
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        try:
            hf_raise_for_status(response)
        except errors.HfHubHTTPError as error:
            raise _refusal(
                hub, model, url, error, "try again later: the download continues where it stopped"
            ) from error
        if not response.headers.get("content-range", "").startswith(f"bytes {position}-"):
            stream.seek(0)
            stream.truncate()
        for chunk in response.iter_bytes():
            stream.write(chunk)
            report(stream.tell())
            if stream.tell() > file.size_bytes:
                return


def _headers(hub: Hub) -> dict[str, str]:
    return {"user-agent": "steploop"} | ({"authorization": f"Bearer {hub.token}"} if hub.token else {})


def _refusal(hub: Hub, model: HubId, url: str, error: "HfHubHTTPError", later: str) -> HubRefusal:
    """later: the fix if only the hub can change it."""
    from huggingface_hub import errors

    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        given = "the token given (HF_TOKEN) has not accepted them" if hub.token else "no token is given (HF_TOKEN)"
        fix = f"accept its terms at {hub.endpoint}/{model.repo}, and give that account's token: HF_TOKEN=hf_..."
        return HubRefusal(f"{model} is gated: the hub requires that its terms are accepted, and {given}", fix)
    if status == 403:
        fix = "give a token that may read it (HF_TOKEN=hf_...); if this one may, check the proxy or firewall on the way"
        return HubRefusal(f"{url} answered 403: this token or this address may not read it", fix)
    if isinstance(error, errors.RevisionNotFoundError):
        reason = f"{model.repo} has no revision {model.revision or DEFAULT_REVISION!r}"
    elif status in (401, 404):
        hidden = "it is hidden from the token given" if hub.token else "it is shown only with a token"
        reason = f"the hub has no such model, or {hidden} (HF_TOKEN)"
    else:
        return HubRefusal(f"{url} answered {status}", later)
    fix = "check the name, or give a directory or a .gguf file"
    not_here = _not_here(hub, model, f" and at {hub.endpoint}: {reason}", fix)
    return HubRefusal(reason, not_here.fix, not_here.cause)


# Messages about a missing model.


def _not_here_offline(hub: Hub, model: HubId) -> StartupError:
    fix = "unset HF_HUB_OFFLINE to fetch it, or give a directory or a .gguf file"
    return _not_here(hub, model, ", and HF_HUB_OFFLINE forbids downloads", fix)


def _not_here(hub: Hub, model: HubId, why: str, fix: str) -> StartupError:
    cause = f"model {model} is not in {hub.cache}{why}"
    return StartupError(cause, _fix_with_near(hub, model, fix), ExitCode.MODEL)


def _fix_with_near(hub: Hub, model: HubId, fix: str) -> str:
    """The fix, then similar names in the cache and on disk, or else what the cache has."""
    known = {str(found): found for found, _ in cached_models(hub)}
    by_end = {name.rpartition("/")[2].lower(): name for name in known}
    near = difflib.get_close_matches(str(model), known, 3, LEAST_SIMILARITY)
    wanted = model.repo.rpartition("/")[2].lower()
    near += [by_end[end] for end in difflib.get_close_matches(wanted, by_end, 3, LEAST_SIMILARITY_OF_ENDS)]
    near += map(str, near_models(Path(model.repo)))  # the name may have been meant as a path
    if near:
        return f"{fix}; did you mean {', '.join(dict.fromkeys(near))}?"
    return f"{fix}; the cache has {_shown(list(known)) if known else 'no model'}"


def _shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
