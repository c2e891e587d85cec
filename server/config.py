"""What the operator can set, as one table: the fields of ServerConfig. Flags, environment and TOML all come from it.

A setting called some-name is the flag --some-name, the variable STEPLOOP_SOME_NAME and the TOML key some_name.
Flags win over the environment, the environment over the file, the file over the defaults. Read once, at start.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from core.config import EngineConfig
from core.errors import ExitCode, StartupError
from server.values import (
    BadValueError,
    HubId,
    MissingPathError,
    choice_of,
    count_between,
    did_you_mean,
    duration_between,
    existing_file,
    format_duration,
    format_size,
    model_source,
    secret_value,
    size_between,
    text_value,
)

ENVIRONMENT_PREFIX = "STEPLOOP_"
GiB = 2**30
MiB = 2**20
KiB = 2**10


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table.

    Args:
        field_name: in ServerConfig; its unit is part of it.
        name: what operators write, with dashes.
        parse: from text; raises BadValueError.
        group: its heading in --help.
        show: the default, as the help says it.
        is_list: the flag may be repeated, the variable holds commas, the TOML value is a list.
        is_secret: its value is never printed.
        in_file: may stand in the TOML file.
    """

    field_name: str
    name: str
    parse: Callable[[str], Any]
    default: Any
    metavar: str
    help: str
    group: str
    show: Callable[[Any], str]
    is_list: bool
    is_secret: bool
    in_file: bool

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.replace("-", "_").upper()

    @property
    def toml_key(self) -> str:
        return self.name.replace("-", "_")


def _option(
    name: str,
    parse: Callable[[str], Any],
    metavar: str,
    help: str,
    *,
    group: str,
    show: Callable[[Any], str] = str,
    is_list: bool = False,
    is_secret: bool = False,
    in_file: bool = True,
) -> dict[str, Any]:
    row = {"name": name, "parse": parse, "metavar": metavar, "help": help, "group": group, "show": show}
    return {**row, "is_list": is_list, "is_secret": is_secret, "in_file": in_file}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings, parsed and in range. None: chosen at start, from the model or by measurement."""

    model: Path | HubId | None = field(
        default=None,
        metadata=_option(
            "model",
            model_source,
            "MODEL",
            "Hugging Face directory (config.json, *.safetensors, tokenizer.json), GGUF file, or org/name[@revision] to"
            " fetch from a hub; without it the embedded demonstration model is served",
            group="model",
        ),
    )
    served_model_name: str | None = field(
        default=None,
        metadata=_option(
            "served-model-name",
            text_value,
            "NAME",
            "the name clients ask for (default: the directory's, file's or hub's name)",
            group="model",
        ),
    )
    chat_template: Path | None = field(
        default=None,
        metadata=_option(
            "chat-template", existing_file, "FILE", "Jinja template, instead of the model's own", group="model"
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_option(
            "max-model-len",
            count_between(16, 10_000_000),
            "TOKENS",
            "context of a sequence, prompt and answer together (default: the model's own)",
            group="model",
        ),
    )
    device: str = field(
        default="auto",
        metadata=_option("device", choice_of("auto", "cpu", "cuda"), "NAME", "auto, cpu or cuda", group="engine"),
    )
    dtype: str = field(
        default="auto",
        metadata=_option(
            "dtype",
            choice_of("auto", "bfloat16", "float16", "float32"),
            "TYPE",
            "of weights and KV cache: auto, bfloat16, float16 or float32",
            group="engine",
        ),
    )
    kv_memory_bytes: int | None = field(
        default=None,
        metadata=_option(
            "kv-memory",
            size_between(MiB, 2**44),
            "SIZE",
            "memory for the KV cache, such as 2GiB (default: from what is free)",
            group="engine",
        ),
    )
    max_batch_tokens: int = field(
        default=512,
        metadata=_option(
            "max-batch-tokens", count_between(16, 1_000_000), "TOKENS", "computed in one step", group="engine"
        ),
    )
    max_sequences: int = field(
        default=64,
        metadata=_option(
            "max-sequences", count_between(1, 65_536), "COUNT", "sequences that run at once", group="engine"
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_option(
            "threads",
            count_between(1, 4096),
            "COUNT",
            "compute threads on a CPU (default: measured, by the tokens of a step)",
            group="engine",
        ),
    )
    config_file: Path | None = field(
        default=None,
        metadata=_option("config", existing_file, "FILE", "TOML file with settings", group="server", in_file=False),
    )
    host: str = field(
        default="127.0.0.1",
        metadata=_option("host", text_value, "ADDRESS", "address to listen on; 0.0.0.0 or :: for all", group="server"),
    )
    port: int = field(
        default=8000, metadata=_option("port", count_between(0, 65_535), "PORT", "0 takes a free one", group="server")
    )
    api_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=_option(
            "api-key",
            secret_value,
            "KEY",
            "a key that clients must show; may be repeated. Other users of the machine can read flags: prefer"
            " STEPLOOP_API_KEY (several parted by commas)",
            group="server",
            is_list=True,
            is_secret=True,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=_option(
            "log-level",
            choice_of("debug", "info", "warning", "error"),
            "LEVEL",
            "debug, info, warning or error",
            group="server",
        ),
    )
    log_format: str = field(
        default="text",
        metadata=_option("log-format", choice_of("text", "json"), "FORMAT", "text or json", group="server"),
    )
    max_body_bytes: int = field(
        default=8 * MiB,
        metadata=_option(
            "max-body",
            size_between(KiB, GiB),
            "SIZE",
            "a larger request body gets 413",
            group="limits",
            show=format_size,
        ),
    )
    max_connections: int = field(
        default=1024,
        metadata=_option("max-connections", count_between(1, 1_000_000), "COUNT", "open at once", group="limits"),
    )
    max_queue: int = field(
        default=1024,
        metadata=_option(
            "max-queue",
            count_between(1, 1_000_000),
            "COUNT",
            "requests that wait or run; more get 503",
            group="limits",
        ),
    )
    head_timeout_s: float = field(
        default=10.0,
        metadata=_option(
            "head-timeout",
            duration_between(0.1, 3600),
            "TIME",
            "for a request's head, from its first byte",
            group="limits",
            show=format_duration,
        ),
    )
    body_timeout_s: float = field(
        default=30.0,
        metadata=_option(
            "body-timeout",
            duration_between(0.1, 3600),
            "TIME",
            "for a request's body",
            group="limits",
            show=format_duration,
        ),
    )
    idle_timeout_s: float = field(
        default=75.0,
        metadata=_option(
            "idle-timeout",
            duration_between(0.1, 86_400),
            "TIME",
            "a connection without a request is closed",
            group="limits",
            show=format_duration,
        ),
    )
    stall_timeout_s: float = field(
        default=30.0,
        metadata=_option(
            "stall-timeout",
            duration_between(0.1, 3600),
            "TIME",
            "a reader that takes nothing for so long loses its stream",
            group="limits",
            show=format_duration,
        ),
    )
    drain_timeout_s: float = field(
        default=60.0,
        metadata=_option(
            "drain-timeout",
            duration_between(0, 86_400),
            "TIME",
            "running requests may finish for so long after SIGTERM",
            group="limits",
            show=format_duration,
        ),
    )

    def to_engine_config(self) -> EngineConfig:
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            kv_memory_bytes=self.kv_memory_bytes,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            threads=self.threads,
        )


def _row(config_field: Field[Any]) -> Option:
    assert config_field.default is not MISSING
    return Option(field_name=config_field.name, default=config_field.default, **config_field.metadata)


OPTIONS: tuple[Option, ...] = tuple(_row(config_field) for config_field in fields(ServerConfig))
_BY_FIELD = {option.field_name: option for option in OPTIONS}


def load_config(flags: Mapping[str, str | list[str]], environ: Mapping[str, str]) -> ServerConfig:
    """Merge the sources into one configuration.

    Args:
        flags: by field name, only those given; text as typed.
        environ: of the process; names without STEPLOOP_ are ignored.

    Raises:
        StartupError: a setting is unknown, malformed or out of range, or the file cannot be read.
    """
    values = _from_environment(environ) | _from_flags(flags)
    config_file = values.get("config_file")
    if config_file is not None:
        values = _from_file(config_file) | values
    return ServerConfig(**values)


def _from_flags(flags: Mapping[str, str | list[str]]) -> dict[str, Any]:
    return {name: _parse(_BY_FIELD[name], text, _BY_FIELD[name].flag) for name, text in flags.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    by_variable = {option.variable: option for option in OPTIONS}
    values = {}
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        option = by_variable.get(variable)
        if option is None:
            raise _unknown("environment variable", variable, by_variable, f"or unset it: unset {variable}")
        text = environ[variable]
        values[option.field_name] = _parse(option, text.split(",") if option.is_list else text, variable)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    by_key = {option.toml_key: option for option in OPTIONS if option.in_file}
    values = {}
    for key, value in _read_toml(path).items():
        option = by_key.get(key)
        if option is None:
            raise _unknown(f"key in {path}", key, by_key, "or remove it")
        values[option.field_name] = _parse(option, _toml_text(option, value, path), f"{key} in {path}")
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # 7 ms, which --help need not pay

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(
            f"{path} is not TOML: {error}",
            'write settings as key = value, text in quotes: port = 8080, kv_memory = "2GiB"',
            ExitCode.CONFIGURATION,
        ) from error
    except OSError as error:
        cause = f"{path} cannot be read: {error.strerror}"
        raise StartupError(cause, f"make it readable: chmod u+r {path}", ExitCode.CONFIGURATION) from error


def _toml_text(option: Option, value: Any, path: Path) -> str | list[str]:
    """A TOML value as the text that the other sources would hold; what is no setting's kind is refused."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return [str(value)] if option.is_list else str(value)
    if option.is_list and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    wanted = "a list of texts" if option.is_list else "a text or a number"
    raise StartupError(
        f"{option.toml_key} in {path} is {type(value).__name__}: it must be {wanted}",
        f"{option.toml_key} = ...  ({option.help})",
        ExitCode.CONFIGURATION,
    )


def _parse(option: Option, text: str | list[str], origin: str) -> Any:
    try:
        if isinstance(text, list):
            return tuple(option.parse(item) for item in text)
        return option.parse(text)
    except BadValueError as error:
        is_model = option.field_name == "model" and isinstance(error, MissingPathError)
        shown = "a value that is not shown" if option.is_secret else f"{text!r}"
        raise StartupError(
            f"{origin} is {shown}: it must be {error.expected}",
            _fix(option, error.proposal),
            ExitCode.MODEL if is_model else ExitCode.CONFIGURATION,
        ) from error


def _fix(option: Option, proposal: str | None) -> str:
    if proposal is not None:
        return f"{option.flag} {proposal}"
    ways = f"{option.flag} {option.metavar}, {option.variable}={option.metavar}, or {option.toml_key} in the TOML file"
    return f"{ways}: {option.help}"


def _unknown(kind: str, name: str, known: Mapping[str, Option], alternative: str) -> StartupError:
    cause = f"unknown {kind}: {name}{did_you_mean(name, known)}"
    return StartupError(cause, f"use a name that `steploop serve --help` lists, {alternative}", ExitCode.CONFIGURATION)
