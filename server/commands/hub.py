"""Fetches a model from a Hugging Face hub into its shared cache. Thread: engine (at start).

Only what is served is fetched: JSON, templates, safetensors; never pickle or code. A file goes on where an earlier
attempt stopped, and enters the cache once its size and hash are those the hub names; until then it is `*.incomplete`.
huggingface_hub's own download checks sizes alone and starts over. The cache has its layout (blobs/, snapshots/, refs/),
so that its other users find the files.
"""

import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from core.errors import ExitCode, StartupError
from server.commands.progress import ReportBytes
from server.values import HubId, format_size, near_models

DEFAULT_REVISION = "main"
TIMEOUT_S = 20.0  # for the hub's next byte
CHUNK_BYTES = 2**20
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
REQUIRED = ("config.json", "tokenizer.json")
OPTIONAL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_SHARD = re.compile(r"[\w.-]+\.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Hub:
    """Where models are looked for.

    Args:
        endpoint: URL, without a slash at its end.
        cache: the directory that huggingface_hub keeps models in.
        is_offline: look in the cache only.
    """

    endpoint: str
    cache: Path
    token: str | None = None
    is_offline: bool = False


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


def environment_hub(is_offline: bool = False) -> Hub:
    """The hub that HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN (or a login's file) name."""
    from huggingface_hub import constants, get_token

    offline = is_offline or constants.is_offline_mode()
    return Hub(constants.ENDPOINT, Path(constants.HF_HUB_CACHE), get_token(), offline)


def fetch(hub: Hub, model: HubId, report: ReportBytes) -> Path:
    """The directory of a model's files, which are fetched where the cache does not have them.

    Args:
        report: called with (bytes done, bytes in all); never when nothing is missing.

    Raises:
        StartupError: not found, not reachable and not cached, not of a kind that is served, or not what its hash says.
    """
    if hub.is_offline:
        return _cached(hub, model, "nothing is fetched now (HF_HUB_OFFLINE, --estimate, doctor)")
    try:
        commit, files = _list_files(hub, model)
        folder = hub.cache / f"models--{model.repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit
        if INDEX_FILE in files and SINGLE_FILE not in files:
            _place(hub, model, commit, [files[INDEX_FILE]], lambda done, total: None)
            wanted = _wanted(hub, model, files, _shards(snapshot / INDEX_FILE))
        else:
            wanted = _wanted(hub, model, files, {SINGLE_FILE})
        _place(hub, model, commit, wanted, report)
        revision = model.revision or DEFAULT_REVISION
        if not _COMMIT.fullmatch(revision):
            reference = folder / "refs" / revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)
        return snapshot
    except _transport_errors() as error:
        return _cached(hub, model, f"{hub.endpoint} cannot be reached ({error or type(error).__name__})")
    except OSError as error:
        cause = f"{model} cannot be kept in {hub.cache}: {error.strerror or error}"
        raise StartupError(cause, "make it writable, or name another: HF_HOME=DIR", ExitCode.MODEL) from error


def cached_models(hub: Hub) -> list[tuple[HubId, Path]]:
    """Models whose files are all in the cache, with their directories, by name."""
    found = []
    for folder in sorted(hub.cache.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        for reference in sorted(path for path in (folder / "refs").rglob("*") if path.is_file()):
            revision = reference.relative_to(folder / "refs").as_posix()
            snapshot = folder / "snapshots" / reference.read_text().strip()
            if _is_complete(snapshot):
                found.append((HubId(name, None if revision == DEFAULT_REVISION else revision), snapshot))
    return found


# What the hub has.


def _list_files(hub: Hub, model: HubId) -> tuple[str, dict[str, HubFile]]:
    """The revision's commit, and its files by name.

    Source: huggingface.co/docs/hub/api, GET /api/models/{repo}/revision/{revision}.
    """
    from huggingface_hub import errors, get_session, hf_raise_for_status

    revision = (model.revision or DEFAULT_REVISION).replace("/", "%2F")
    url = f"{hub.endpoint}/api/models/{model.repo}/revision/{revision}"
    try:
        response = get_session().get(url, params={"blobs": "true"}, headers=_headers(hub), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
    except errors.GatedRepoError as error:
        fix = f"accept its terms at {hub.endpoint}/{model.repo}, and give the token of who did: HF_TOKEN=hf_..."
        raise StartupError(f"{model} is gated: the hub wants its terms accepted", fix, ExitCode.MODEL) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 404):
            raise _not_found(hub, model, "there is none, or it is shown only with a token (HF_TOKEN)") from error
        cause = f"{url} answered {error.response.status_code}"
        raise StartupError(cause, "try again later", ExitCode.MODEL) from error
    try:
        listing = json.loads(response.content)
        files = [_hub_file(entry) for entry in listing["siblings"]]
        commit = listing["sha"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _odd_answer(url, error) from error
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _odd_answer(url, f"the commit {commit!r}")
    return commit, {file.name: file for file in files}


def _hub_file(entry: dict[str, Any]) -> HubFile:
    size_bytes = entry["size"]
    digest = (entry.get("lfs") or {}).get("sha256") or entry["blobId"]
    if not isinstance(size_bytes, int) or size_bytes < 0 or not _HASH.fullmatch(digest):
        raise ValueError(f"{entry['rfilename']} has the size {size_bytes!r} and the hash {digest!r}")
    return HubFile(str(entry["rfilename"]), size_bytes, digest)


def _wanted(hub: Hub, model: HubId, files: Mapping[str, HubFile], weights: set[str]) -> list[HubFile]:
    missing = [name for name in (*REQUIRED, *sorted(weights)) if name not in files]
    if missing:
        raise StartupError(
            f"{model} on {hub.endpoint} has no {', '.join(missing)}; it has {_shown(sorted(files))}",
            _fix_missing(files),
            ExitCode.MODEL,
        )
    small = [name for name in files if name in REQUIRED or name in OPTIONAL or _TEMPLATE.fullmatch(name)]
    return [files[name] for name in (*small, *sorted(weights))]


def _fix_missing(files: Mapping[str, HubFile]) -> str:
    if any(name.endswith(".gguf") for name in files):
        return "download one of its GGUF files, and --model FILE.gguf"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        return "name a model with safetensors: pickled weights can run code, and are not read"
    return "name a model with safetensors and a tokenizer.json"


def _shards(index: Path) -> set[str]:
    """The files that an index names, all of its own directory."""
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


# Into the cache.


def _place(hub: Hub, model: HubId, commit: str, files: list[HubFile], report: ReportBytes) -> None:
    folder = hub.cache / f"models--{model.repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    missing = [file for file in files if not _is_placed(folder / "blobs" / file.digest, file)]
    total = sum(file.size_bytes for file in missing)
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if total > free:
        cause = f"{model} needs {format_size(total)} in {hub.cache}, {format_size(free)} are free"
        raise StartupError(cause, "make room, or name another directory: HF_HOME=DIR", ExitCode.MODEL)
    done = 0
    for file in missing:
        url = f"{hub.endpoint}/{model.repo}/resolve/{commit}/{file.name}"
        for position in _download(hub, url, folder / "blobs" / file.digest, file):
            report(done + position, total)
        done += file.size_bytes
    for file in files:
        _link(snapshot / file.name, folder / "blobs" / file.digest)


def _is_placed(blob: Path, file: HubFile) -> bool:
    return blob.is_file() and blob.stat().st_size == file.size_bytes


def _link(link: Path, blob: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)  # it may lead nowhere
        link.symlink_to(os.path.relpath(blob, link.parent))


def _download(hub: Hub, url: str, blob: Path, file: HubFile) -> Iterator[int]:
    """Fetch one file, going on from what is there; gives the bytes that are there as it goes.

    A broken connection is made anew as long as each comes further than those before.
    """
    incomplete = blob.with_name(f"{blob.name}.incomplete")
    with _locked(incomplete, url) as stream:
        digest, position = _digest_so_far(stream, file)
        yield position
        reached = position
        while position < file.size_bytes:
            try:
                for chunk in _chunks(hub, url, position):
                    if chunk is None:  # from the start after all
                        digest, position = file.new_hash(), 0
                        stream.seek(0)
                        stream.truncate()
                        continue
                    position += len(chunk)
                    if position > file.size_bytes:
                        break
                    stream.write(chunk)
                    digest.update(chunk)
                    yield position
            except _transport_errors() as error:
                if position <= reached:
                    raise _stopped(url, position, file, error) from error
                reached = position
            else:
                break
        stream.flush()
        if position != file.size_bytes or digest.hexdigest() != file.digest:
            incomplete.unlink()
            raise _not_as_listed(url, position, digest.hexdigest(), file)
        os.replace(incomplete, blob)


@contextmanager
def _locked(incomplete: Path, url: str) -> Iterator[IO[bytes]]:
    with incomplete.open("a+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            cause = f"{url} is being fetched by another process"
            raise StartupError(cause, "wait for it, then start again", ExitCode.MODEL) from error
        yield stream


def _digest_so_far(stream: IO[bytes], file: HubFile) -> tuple[Any, int]:
    """Of what an earlier attempt left; the stream stands behind it."""
    stream.seek(0)
    digest, position = file.new_hash(), 0
    while chunk := stream.read(CHUNK_BYTES):
        digest.update(chunk)
        position += len(chunk)
    return digest, position


def _chunks(hub: Hub, url: str, position: int) -> Iterator[bytes | None]:
    """The file's bytes from a position; None first where the hub begins at the start instead."""
    from huggingface_hub import errors, get_session, hf_raise_for_status

    headers = _headers(hub) | {"accept-encoding": "identity"}
    headers |= {"range": f"bytes={position}-"} if position else {}
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        try:
            hf_raise_for_status(response)
        except errors.HfHubHTTPError as error:
            cause = f"{url} answered {response.status_code}"
            raise StartupError(cause, "try again later: what has come is kept", ExitCode.MODEL) from error
        if position and not response.headers.get("content-range", "").startswith(f"bytes {position}-"):
            yield None
        yield from response.iter_bytes()  # as they come: what has come is kept


def _headers(hub: Hub) -> dict[str, str]:
    return {"user-agent": "steploop"} | ({"authorization": f"Bearer {hub.token}"} if hub.token else {})


def _transport_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub's HTTP client raises for a connection that is not made, or breaks."""
    import httpx2

    return (httpx2.RequestError,)


# What is here already.


def _cached(hub: Hub, model: HubId, reason: str) -> Path:
    folder = hub.cache / f"models--{model.repo.replace('/', '--')}"
    revision = model.revision or DEFAULT_REVISION
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    if _is_complete(folder / "snapshots" / commit):
        return folder / "snapshots" / commit
    raise _not_found(hub, model, reason)


def _is_complete(snapshot: Path) -> bool:
    """It has the configuration, a tokenizer and all of the weights."""
    names = set(REQUIRED)
    if not (snapshot / SINGLE_FILE).exists():
        if not (snapshot / INDEX_FILE).exists():
            return False
        try:
            names |= _shards(snapshot / INDEX_FILE)
        except StartupError:
            return False
    return all((snapshot / name).exists() for name in names)


def _not_found(hub: Hub, model: HubId, reason: str) -> StartupError:
    known = {str(found): found for found, _ in cached_models(hub)}
    by_end = {name.rpartition("/")[2].lower(): name for name in known}
    wanted = model.repo.rpartition("/")[2].lower()
    near = difflib.get_close_matches(str(model), known, 3, 0.6)
    near += [by_end[end] for end in difflib.get_close_matches(wanted, by_end, 3, 0.6)]
    near += map(str, near_models(Path(model.repo)))  # it may have been meant as a path
    cause = f"model {model} is not here: looked for it in {hub.cache} and at {hub.endpoint}: {reason}"
    if near:
        return StartupError(cause, f"did you mean {', '.join(dict.fromkeys(near))}?", ExitCode.MODEL)
    listed = f"; the cache has {_shown(list(known))}" if known else "; the cache has no model"
    return StartupError(cause, f"check the name, or give a directory or a .gguf file{listed}", ExitCode.MODEL)


def _stopped(url: str, position: int, file: HubFile, error: Exception) -> StartupError:
    sizes = f"{format_size(position)} of {format_size(file.size_bytes)}"
    cause = f"{url} stopped at {sizes}: {error or type(error).__name__}"
    return StartupError(cause, "start again: it goes on from there", ExitCode.MODEL)


def _not_as_listed(url: str, num_bytes: int, digest: str, file: HubFile) -> StartupError:
    cause = f"{url} is not what the hub lists: {num_bytes} bytes, {digest}; not {file.size_bytes}, {file.digest}"
    return StartupError(cause, "try again; if it stays so, the hub or something between is broken", ExitCode.MODEL)


def _odd_answer(url: str, what: object) -> StartupError:
    return StartupError(f"{url} does not answer as a hub: {what}", "check HF_ENDPOINT", ExitCode.MODEL)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
