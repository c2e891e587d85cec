"""[[models]] of the TOML file: which models are started on demand, and which answer elsewhere. Frozen; any thread."""

import math
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from core.errors import StartupError
from server.values import BadValueError, duration_between, seconds_of, secret_value

SAMPLE = '[[models]] with name = "llama-70b" and upstreams = [{ url = "http://gpu1:8000" }]'
LOCAL_SAMPLE = '[[models]] with name = "qwen3-4b" and path = "/srv/qwen3-4b.gguf"'
ADAPTER_SAMPLE = '[[models]] with name = "sql", path = "/srv/sql-lora" and adapter_of = "qwen3-4b"'
FIELD_SAMPLES = {
    "adapter_of": 'adapter_of = "qwen3-4b"',
    "aliases": 'aliases = ["gpt-4o-mini"]',
    "fallbacks": 'fallbacks = ["qwen3-4b"]',
    "keep_alive": 'keep_alive = "10m"',
    "name": 'name = "qwen3-4b"',
    "path": 'path = "/srv/qwen3-4b.gguf"',
    "settings": "settings = { max_model_len = 16384 }",
    "upstreams": 'upstreams = [{ url = "http://gpu1:8000" }]',
}
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Label = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
_PATH = re.compile(r"/[!-~]*")
_TIMES = 'a time such as "10m", 0 (end at once) or -1 (stay)'
ELSEWHERE = (
    *("tokenizer", "protocol", "upstream_model", "api_key_file", "tls_ca", "tls_cert", "tls_key", "trusted"),
    *("silence_timeout", "health"),
)
SILENCE_S = 120.0  # of a stream; some think long, and say nothing
OWN_SILENCE_S = 25.0  # our own servers send a comment each 15 s


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server that answers for a model."""

    url: str  # http://HOST:PORT, https://HOST:PORT or unix:/PATH; a path before /v1 may follow
    weight: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1  # relative to the others'; 0: no requests, which drains it
    version: _Label | None = None  # of what it serves: a tenant stays with one
    region: _Label | None = None  # they are tried in the order in which they are first named

    def __post_init__(self) -> None:
        check_url(self.url)


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model, and who answers for it."""

    name: _Name  # that clients ask for
    path: _Name | None = None  # of a model on this machine, which a process of its own computes while it is asked for
    adapter_of: _Name | None = None  # the model that the adapter in `path` adapts; without one, its upstreams have it
    adapters: dict[str, str | None] = {}  # of this model, by name, with their paths: of other entries, in no file
    keep_alive: str | float | None = None  # of its process after a request: "10m"; 0: it ends at once; -1: it stays
    settings: dict[str, Any] = {}  # of its process, as the file's own: of the model and of the engine
    upstreams: Annotated[tuple[UpstreamSettings, ...], msgspec.Meta(max_length=256)] = ()  # that answer for it instead
    aliases: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)] = ()  # other names for it
    fallbacks: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=8)] = ()  # of this list, while it cannot answer
    upstream_model: _Name | None = None  # its name there; None: the same
    protocol: Literal["auto", "h2", "h1"] = "auto"  # h2: prior knowledge over http; auto: that, or else HTTP/1.1
    health: str = "/ready"  # answers 200 while the upstream takes requests
    silence_timeout: str | float | None = None  # a stream of which nothing comes for so long is broken off
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256  # in progress at each upstream; more wait here
    tokenizer: _Name | None = None  # a model's directory (weights not needed) or GGUF file; None: bytes are counted
    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=10**9)] | None = None  # shown, and its process's; None: unknown
    api_key_file: str | None = None  # holds the key towards the upstreams
    tls_ca: str | None = None  # of the upstreams; None: the system's
    tls_cert: str | None = None  # ours, towards them
    tls_key: str | None = None
    trusted: bool = False  # they are our own, for this gateway alone, and get each tenant's cache salt

    def __post_init__(self) -> None:
        for name in self.names:
            _refuse_controls("name", name)
        if self.adapter_of is not None:
            if other := self._beside(("name", "path", "adapter_of")):
                raise ValueError(f"{other} is not for adapters, which have a name, a path and adapter_of")
            return
        if self.path is not None:
            self._check_local()
            return
        if not self.upstreams:
            raise ValueError("path or upstreams is missing: the model's file, or the servers that run it")
        if self.keep_alive is not None or self.settings:
            raise ValueError("keep_alive and settings are for a model with a path, which this server starts itself")
        if not _PATH.fullmatch(self.health):
            raise ValueError(f"health is {self.health!r}, but must be a path such as /ready")
        _ = self.silence_s  # is checked
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key also needs tls_cert")
        if not self.has_tls and (self.tls_ca is not None or self.tls_cert is not None):
            raise ValueError("tls_ca and tls_cert are for https:// upstreams, and there is none")
        urls = [one.url for one in self.upstreams]
        if len(set(urls)) < len(urls):
            raise ValueError("an upstream is named twice")
        if not any(one.weight for one in self.upstreams):
            raise ValueError("no upstream has a weight above 0")

    def _check_local(self) -> None:
        if self.upstreams:
            raise ValueError("path and upstreams exclude each other: the model runs here, or elsewhere")
        here = [one.name for one in msgspec.structs.fields(self) if one.name not in ELSEWHERE]
        if elsewhere := self._beside(here):
            raise ValueError(f"{elsewhere} is for upstreams, and a model with a path has none")
        if self.keep_alive is not None:
            keep_alive_setting(self.keep_alive)

    def _beside(self, allowed: Container[str]) -> str | None:
        """A field that is set, and is none of these."""
        others = (one for one in msgspec.structs.fields(self) if one.name not in allowed and not one.required)
        is_set = (one.name for one in others if getattr(self, one.name) not in (one.default, {}))
        return next(is_set, None)

    def name_there(self, asked: str | None) -> str:
        """What its upstreams call it, or the adapter that is asked for."""
        return asked if asked in self.adapters else self.upstream_model or self.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases, *self.adapters)

    @property
    def silence_s(self) -> float:
        """Raises ValueError."""
        if self.silence_timeout is None:
            return OWN_SILENCE_S if self.trusted else SILENCE_S
        try:
            return duration_between(0.1, 86_400.0)(str(self.silence_timeout))
        except BadValueError as error:
            raise ValueError(f"silence_timeout is {self.silence_timeout!r}, but must be {error}") from None

    @property
    def has_tls(self) -> bool:
        return any(one.url.startswith("https:") for one in self.upstreams)

    def api_key(self) -> str | None:
        """Read anew with each start. Raises StartupError: the file cannot be read, or holds no key."""
        if self.api_key_file is None:
            return None
        try:
            return secret_value(Path(self.api_key_file).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError, BadValueError) as error:
            reason = getattr(error, "strerror", None) or "it contains no key of visible ASCII characters"
            cause = f"api_key_file {self.api_key_file} of the model {self.name} cannot be used: {reason}"
            raise StartupError(cause, "write the key alone into it") from error


def keep_alive_of(value: str | float) -> float:
    """Seconds, from "10m", "1h30m" or a number; infinite: any negative one, as Ollama has it. Raises ValueError."""
    if not isinstance(value, str):
        return value if value >= 0 else math.inf
    if (seconds := seconds_of(value.strip().removeprefix("-"))) is None:
        raise ValueError(f"keep_alive is {value!r}, but must be {_TIMES}")
    return math.inf if value.strip().startswith("-") else seconds


def keep_alive_setting(value: str | float) -> float:
    """Likewise, of a setting: of the negative ones, -1 alone. Raises ValueError."""
    seconds = keep_alive_of(value)
    if seconds == math.inf and str(value).strip() not in ("-1", "-1.0"):
        raise ValueError(f"keep_alive is {value!r}, but must be {_TIMES}")
    return seconds


def check_url(url: str) -> None:
    """Raises ValueError, which says what an upstream's URL is."""
    _refuse_controls("url", url)  # urlsplit drops some
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the url {url!r} is not valid: {error}") from None
    if parts.scheme == "unix" and parts.path.startswith("/") and not (parts.netloc or parts.query or parts.fragment):
        return
    is_plain = parts.username is None and not parts.query and not parts.fragment and url.isascii() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not is_plain:
        raise ValueError(f"the url {url!r} must be http://HOST:PORT, https://HOST:PORT or unix:/PATH")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"the url {url!r} must end before /v1: requests keep their paths")


def _refuse_controls(what: str, text: str) -> None:
    if not text.isprintable():
        raise ValueError(f"the {what} {text!r} has control characters")


def parse_models(tables: Any, path: Path) -> tuple[ModelSettings, ...]:
    """[[models]] of the TOML file at `path`. Raises StartupError, which names the model and the field."""
    if not isinstance(tables, list):
        raise StartupError(f"models in {path} is not a list of tables", SAMPLE)
    models = tuple(_parse_model(table, i, path) for i, table in enumerate(tables, 1))
    refuse_same_names([name for model in models for name in model.names], str(path))
    for model in models:
        for name in model.fallbacks:
            if name == model.name or name not in {one.name for one in models if one.adapter_of is None}:
                cause = (
                    f"the model {model.name!r} in {path} has the fallback {name!r}, which is not another of [[models]]"
                )
                raise StartupError(cause, "name another model of [[models]]")
    return models


def refuse_same_names(names: Sequence[str], place: str) -> None:
    """Raises StartupError if two models answer to one name."""
    for name in names:
        if names.count(name) > 1:
            cause = f"{place} has two models of the name {name!r}"
            raise StartupError(cause, "give each model and alias a name of its own")


def _parse_model(table: Any, number: int, path: Path) -> ModelSettings:
    try:
        if isinstance(table, Mapping) and "adapters" in table:
            raise msgspec.ValidationError("adapters is not a field: give each an entry of its own, with adapter_of")
        return msgspec.convert(table, ModelSettings)
    except msgspec.ValidationError as error:
        name = table.get("name") if isinstance(table, Mapping) else None
        cause = f"[[models]] number {number}{f', {name!r},' if isinstance(name, str) else ''} in {path}: {error}"
        raise StartupError(cause, _fix(str(error), table)) from error


def _fix(error: str, table: Any) -> str:
    """What to write instead: msgspec names the path of an unknown field, but not the known ones."""
    if "unknown field" not in error:
        field = re.match(r"\w+", error.rpartition("`$.")[2])
        whole = ADAPTER_SAMPLE if "adapter_of" in table else LOCAL_SAMPLE if "path" in table else SAMPLE
        return f"correct it, as in: {whole if field is None else FIELD_SAMPLES.get(field[0], whole)}"
    kind = UpstreamSettings if "upstreams" in error.rpartition("`$")[2] else ModelSettings
    above = "; the server's own settings stand above the first table" if kind is ModelSettings else ""
    known = ", ".join(one for one in kind.__struct_encode_fields__ if one != "adapters")
    return f"known: {known}{above}"
