"""Fetches a model from a Hugging Face hub into its shared cache. Thread: engine (at start).

Only what is served is fetched: JSON, templates, safetensors; never pickle or code. A file goes on where an earlier
attempt stopped, and enters the cache once its size and hash are those the hub names; until then it is `*.incomplete`.
huggingface_hub's own download checks sizes alone and starts over.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from core.errors import ExitCode, StartupError
from server.commands.hub_cache import (
    DEFAULT_REVISION,
    INDEX_FILE,
    REQUIRED,
    SINGLE_FILE,
    Hub,
    find_cached,
    is_commit,
    not_here_offline,
    not_here_unreachable,
    shards_of,
    shown,
)
from server.commands.hub_client import HubFile, HubRefusal, chunks, list_files, transport_errors
from server.commands.progress import ReportBytes
from server.values import HubId, format_size

CHUNK_BYTES = 2**20
OPTIONAL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")

logger = logging.getLogger(__name__)


def fetch(hub: Hub, model: HubId, report: ReportBytes) -> Path:
    """The directory of a model's files, which are fetched where the cache does not have them.

    Where the hub does not list it, but the cache has it, that serves, with a warning.

    Args:
        report: called with (bytes done, bytes in all); never when nothing is missing.

    Raises:
        StartupError: not found, not reachable and not cached, not of a kind that is served, or not what its hash says.
    """
    found = find_cached(hub, model)
    if hub.is_offline:
        if found is None:
            raise not_here_offline(hub, model)
        return found
    try:
        commit, files = list_files(hub, model)
    except transport_errors() as error:
        if found is None:
            raise not_here_unreachable(hub, model, error) from error
        return _in_spite_of(f"cannot be reached ({error or type(error).__name__})", hub, model, found)
    except HubRefusal as error:
        if found is None:
            raise
        return _in_spite_of(f"does not list it: {error.reason}", hub, model, found)
    try:
        return _fetch_commit(hub, model, commit, files, report)
    except OSError as error:
        cause = f"{model} cannot be kept in {hub.cache}: {error.strerror or error}"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room" if is_full or error.errno == errno.EFBIG else "make it writable"
        exit_code = ExitCode.TRANSIENT if is_full else ExitCode.MODEL
        raise StartupError(cause, f"{fix}, or name another directory: HF_HOME=DIR", exit_code) from error


def _in_spite_of(reason: str, hub: Hub, model: HubId, found: Path) -> Path:
    logger.warning("%s is served as %s has it; %s %s", model, found, hub.endpoint, reason)
    return found


def _fetch_commit(hub: Hub, model: HubId, commit: str, files: Mapping[str, HubFile], report: ReportBytes) -> Path:
    """What is missing of a listed commit; the revision's name then leads to it."""
    snapshot = hub.folder(model) / "snapshots" / commit
    if INDEX_FILE in files and SINGLE_FILE not in files:
        _place(hub, model, commit, [files[INDEX_FILE]], lambda done, total: None)
        wanted = _wanted(hub, model, files, shards_of(snapshot / INDEX_FILE))
    else:
        wanted = _wanted(hub, model, files, {SINGLE_FILE})
    _place(hub, model, commit, wanted, report)
    revision = model.revision or DEFAULT_REVISION
    if not is_commit(revision):
        reference = hub.folder(model) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    return snapshot


def _wanted(hub: Hub, model: HubId, files: Mapping[str, HubFile], weights: set[str]) -> list[HubFile]:
    missing = [name for name in (*REQUIRED, *sorted(weights)) if name not in files]
    if missing:
        raise StartupError(
            f"{model} on {hub.endpoint} has no {', '.join(missing)}; it has {shown(sorted(files))}",
            _fix_missing(model, files),
            ExitCode.MODEL,
        )
    small = [name for name in files if name in REQUIRED or name in OPTIONAL or _TEMPLATE.fullmatch(name)]
    return [files[name] for name in (*small, *sorted(weights))]


def _fix_missing(model: HubId, files: Mapping[str, HubFile]) -> str:
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    if gguf:
        return (
            f"download one of its GGUF files (hf download {model.repo} {gguf[0]} --local-dir .) and --model FILE.gguf"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        return "name a model with safetensors: pickled weights can run code, and are not read"
    return "name a model with safetensors and a tokenizer.json"


# Into the cache.


def _place(hub: Hub, model: HubId, commit: str, files: list[HubFile], report: ReportBytes) -> None:
    folder = hub.folder(model)
    snapshot = folder / "snapshots" / commit
    missing = [file for file in files if not _is_placed(folder / "blobs" / file.digest, file)]
    total = sum(file.size_bytes for file in missing)
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    needed = total - sum(_here_bytes(folder / "blobs" / file.digest) for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        cause = f"{model} needs {format_size(needed)} more in {hub.cache}, {format_size(free)} are free"
        raise StartupError(cause, "make room, or name another directory: HF_HOME=DIR", ExitCode.MODEL)
    done = 0
    for file in missing:
        url = f"{hub.endpoint}/{model.repo}/resolve/{commit}/{file.name}"
        for position in _download(hub, model, url, folder / "blobs" / file.digest, file):
            report(done + position, total)
        done += file.size_bytes
    for file in files:
        _link(snapshot / file.name, folder / "blobs" / file.digest)


def _is_placed(blob: Path, file: HubFile) -> bool:
    return blob.is_file() and blob.stat().st_size == file.size_bytes


def _incomplete(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _here_bytes(blob: Path) -> int:
    """What earlier attempts have left of it."""
    incomplete = _incomplete(blob)
    return incomplete.stat().st_size if incomplete.is_file() else 0


def _link(link: Path, blob: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)  # it may lead nowhere
        link.symlink_to(os.path.relpath(blob, link.parent))


def _download(hub: Hub, model: HubId, url: str, blob: Path, file: HubFile) -> Iterator[int]:
    """Fetch one file, going on from what is there; gives the bytes that are there as it goes.

    A broken connection is made anew as long as each comes further than those before.
    """
    incomplete = _incomplete(blob)
    with _locked(incomplete, url) as stream:
        digest, position = _digest_so_far(stream, file)
        yield position
        reached = position
        while position < file.size_bytes:
            try:
                for chunk in chunks(hub, model, url, position):
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
            except transport_errors() as error:
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


def _stopped(url: str, position: int, file: HubFile, error: Exception) -> StartupError:
    sizes = f"{format_size(position)} of {format_size(file.size_bytes)}"
    cause = f"{url} stopped at {sizes}: {error or type(error).__name__}"
    return StartupError(cause, "start again: it goes on from there", ExitCode.MODEL)


def _not_as_listed(url: str, num_bytes: int, digest: str, file: HubFile) -> StartupError:
    cause = f"{url} is not what the hub lists: {num_bytes} bytes, {digest}; not {file.size_bytes}, {file.digest}"
    return StartupError(cause, "try again; if it stays so, the hub or something between is broken", ExitCode.MODEL)
