"""A Hugging Face hub's cache on this machine: which models it has, and what is said of one that it has not.

Its layout is huggingface_hub's (blobs/, snapshots/, refs/), whose other users find the files. Thread: engine (at
start), or main.
"""

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from core.errors import ExitCode, StartupError
from server.values import HubId, near_models

DEFAULT_REVISION = "main"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
REQUIRED = ("config.json", "tokenizer.json")
LEAST_SIMILARITY = 0.75  # of a whole name to the one that may have been meant: the organisation alone is not enough
LEAST_SIMILARITY_OF_ENDS = 0.6  # without the organisation
_SHARD = re.compile(r"[\w.-]+\.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")


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
    """A model of the hub that is not here, and that `serve` would fetch."""

    exit_code = ExitCode.MODEL


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
        raise StartupError(cause, "mend or remove that file, or name another directory: HF_HOME=DIR") from error
    return Hub(constants.ENDPOINT, Path(constants.HF_HUB_CACHE), token, constants.is_offline_mode())


def cached_models(hub: Hub) -> list[tuple[HubId, Path]]:
    """Models whose files are all in the cache, with their directories, by name."""
    found = []
    for folder in sorted(hub.cache.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        for reference in sorted(path for path in (folder / "refs").rglob("*") if path.is_file()):
            revision = reference.relative_to(folder / "refs").as_posix()
            model = HubId(name, None if revision == DEFAULT_REVISION else revision)
            snapshot = find_cached(hub, model)
            if snapshot is not None:
                found.append((model, snapshot))
    return found


def find_cached(hub: Hub, model: HubId) -> Path | None:
    """The directory of a model's files where they are all in the cache: configuration, tokenizer, weights."""
    revision = model.revision or DEFAULT_REVISION
    reference = hub.folder(model) / "refs" / revision
    commit = _commit_of(reference) if reference.is_file() else revision
    if commit is None or not _COMMIT.fullmatch(commit):
        return None
    snapshot = hub.folder(model) / "snapshots" / commit
    return snapshot if _is_complete(snapshot) else None


def cached(hub: Hub, model: HubId) -> Path:
    """As find_cached, for commands that fetch nothing.

    Raises:
        NotFetched: it is not all there, and `serve` would fetch it.
        StartupError: it is not all there, and nothing is to be fetched.
    """
    found = find_cached(hub, model)
    if found is not None:
        return found
    if hub.is_offline:
        raise not_here_offline(hub, model)
    cause = f"model {model} is not in {hub.cache} yet: serve fetches it from {hub.endpoint}, this command does not"
    raise NotFetched(cause, _fix_with_near(hub, model, f"fetch it first: steploop serve --model {model}"))


def not_here_offline(hub: Hub, model: HubId) -> StartupError:
    cause = f"model {model} is not here: looked for it in {hub.cache}, and HF_HUB_OFFLINE forbids to fetch it"
    fix = "unset HF_HUB_OFFLINE to fetch it, or give a directory or a .gguf file"
    return StartupError(cause, _fix_with_near(hub, model, fix), ExitCode.MODEL)


def not_here_unreachable(hub: Hub, model: HubId, error: Exception) -> StartupError:
    cause = (
        f"model {model} is not here: looked for it in {hub.cache}, "
        f"and {hub.endpoint} cannot be reached ({error or type(error).__name__})"
    )
    fix = "check the network and HF_ENDPOINT, or give a directory or a .gguf file"
    return StartupError(cause, _fix_with_near(hub, model, fix), ExitCode.MODEL)


def not_found(hub: Hub, model: HubId, reason: str) -> StartupError:
    """The hub does not show it, and the cache has it not."""
    cause = f"model {model} is not here: looked for it in {hub.cache} and at {hub.endpoint}: {reason}"
    return StartupError(
        cause, _fix_with_near(hub, model, "check the name, or give a directory or a .gguf file"), ExitCode.MODEL
    )


def shards_of(index: Path) -> set[str]:
    """The files that an index names, all of its own directory, and itself.

    Raises:
        StartupError: it is no index, or names files elsewhere.
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


def shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def is_commit(text: object) -> bool:
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def _commit_of(reference: Path) -> str | None:
    try:
        return reference.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _is_complete(snapshot: Path) -> bool:
    names = set(REQUIRED)
    if not (snapshot / SINGLE_FILE).exists():
        if not (snapshot / INDEX_FILE).exists():
            return False
        try:
            names |= shards_of(snapshot / INDEX_FILE)
        except StartupError:
            return False
    return all((snapshot / name).exists() for name in names)


def _fix_with_near(hub: Hub, model: HubId, otherwise: str) -> str:
    """What may have been meant, of the cache and of the paths here; or what to do, and what the cache has."""
    known = {str(found): found for found, _ in cached_models(hub)}
    by_end = {name.rpartition("/")[2].lower(): name for name in known}
    near = difflib.get_close_matches(str(model), known, 3, LEAST_SIMILARITY)
    wanted = model.repo.rpartition("/")[2].lower()
    near += [by_end[end] for end in difflib.get_close_matches(wanted, by_end, 3, LEAST_SIMILARITY_OF_ENDS)]
    near += map(str, near_models(Path(model.repo)))  # it may have been meant as a path
    if near:
        return f"{otherwise}; did you mean {', '.join(dict.fromkeys(near))}?"
    return f"{otherwise}; the cache has {shown(list(known)) if known else 'no model'}"
