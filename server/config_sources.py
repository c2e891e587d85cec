"""Merges settings from flags, environment and TOML file, and explains what is wrong with one. Thread: main.

Flags win over the environment, the environment over the file, the file over the defaults.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from core.errors import ExitCode, StartupError
from server.config import ENVIRONMENT_PREFIX, OPTIONS, Option, ServerConfig
from server.gate.tenants import parse_tenants
from server.ledger.usage import parse_prices
from server.observing.slo import parse_slo
from server.upstream.settings import ModelSettings, parse_models
from server.values import BadValueError, MissingPathError, NamedPath, did_you_mean

_TOML_KINDS: dict[type, str] = {list: "a list", dict: "a table"}
FLAG_AS_KEY = "max_queue = 8 for --max-queue 8"
TENANTS, PRICES, SLO, MODELS = "tenants", "prices", "slo", "models"  # the file's tables
_BY_KEY = {option.toml_key: option for option in OPTIONS if option.in_file}
_OF_THE_LIST = ("model", "served_model_name", "alias", "models_dir", "models_memory", "keep_alive", "lora", "lora_dir")
_OF_AN_ENGINE = [one for one in OPTIONS if one.section in ("model", "engine")]
_OF_MODELS = [  # settings that an entry of [[models]] may have for its process
    one.toml_key for one in _OF_AN_ENGINE if one.toml_key not in _OF_THE_LIST
]
_BY_FIELD = {option.field_name: option for option in OPTIONS}


class Given(NamedTuple):
    """A value, and the flag, variable or key of the file that set it."""

    value: Any
    origin: str


def load_config(
    flags: Mapping[str, str | list[str]],
    environ: Mapping[str, str],
    finds_models: bool = True,
    only: Sequence[str] | None = None,
) -> ServerConfig:
    """Merge the sources into one configuration.

    Args:
        flags: by field name, only those given; text as typed.
        environ: of the process; names without STEPLOOP_ are ignored.
        finds_models: False: neither [[models]] nor settings of models and of the engine are read: files may be away.
        only: fields and tables that are read, whatever is wrong with others; None: all.

    Raises:
        StartupError: a setting is unknown, malformed or out of range, or the file cannot be read.
    """
    unread: set[str] = set() if finds_models else {MODELS, *_names(_OF_AN_ENGINE)}
    read = None if only is None else {*only, *_names(_BY_FIELD[one] for one in only if one in _BY_FIELD)}

    def is_read(name: str) -> bool:
        return name not in unread and (read is None or name in read)

    given = _from_environment({name: text for name, text in environ.items() if is_read(name)})
    given |= {name: _parse(_BY_FIELD[name], text, _BY_FIELD[name].flag) for name, text in flags.items()}
    tables: dict[str, Any] = {}
    if (config_file := given.get("config_file")) is not None:
        path = config_file.value
        content = {key: value for key, value in _read_toml(path).items() if is_read(key)}
        tables["tenants"] = parse_tenants(content.pop(TENANTS, []), path)
        tables["models"] = parse_models(content.pop(MODELS, []), path)
        tables["slo"] = parse_slo(content.pop(SLO, {}), path)
        tables["prices"] = parse_prices(content.pop(PRICES, {}), path)
        given = _from_file(content, path) | given
    values = {name: one.value for name, one in given.items()}
    origins = tuple((name, one.origin) for name, one in given.items())
    config = ServerConfig(**values, **tables, origins=origins)
    return _with_own_models(config, config_file.value if config_file else None) if finds_models else config


def _names(options: Iterable[Option]) -> set[str]:
    """In the environment and in the file."""
    return {name for one in options for name in (one.variable, one.toml_key)}


def _with_own_models(config: ServerConfig, path: Path | None) -> ServerConfig:
    """With the models of --models-dir, and with the settings of each model's own process.

    Raises:
        StartupError: a model is missing, or one of its settings cannot be used.
    """
    models = [one for one in config.models if one.adapter_of is None]
    if config.models_dir is not None:
        from server.model_files import models_in  # imports numpy and tokenizers, which few commands need

        named = {name for one in models for name in one.names}
        found = {name: str(at) for name, at in models_in(config.models_dir).items() if name not in named}
        if not found and not named:
            cause = f"{config.models_dir} has no model: no GGUF file, and no directory with config.json and weights"
            raise StartupError(cause, "name a directory of models, or fetch one into it", ExitCode.MODEL)
        models += [ModelSettings(name=name, path=at) for name, at in found.items()]
    adapters = [one for one in config.models if one.adapter_of is not None]  # of none that the list names
    for i, model in enumerate(models):
        of_model = [one for one in adapters if one.adapter_of == model.name]
        for one in of_model:
            if (model.path is None) != (one.path is None):
                cause = f"the adapter {one.name!r} in {path} "
                cause += "has no path" if one.path is None else "has a path, but upstreams serve its model"
                fix = "set path for the adapter if its model has a path, and only then"
                raise StartupError(cause, fix)
        models[i] = structs.replace(model, adapters={one.name: one.path for one in of_model})
    adapters = [one for one in adapters if not any(one.name in model.adapters for model in models)]
    config = replace(config, models=tuple(models))
    config = replace(config, loras=(*config.loras, *_own_adapters(config, adapters, path)))
    if config.takes_adapters and not config.has_engine:
        cause = "--lora and --lora-dir apply to the model in this process, and there is none"
        raise StartupError(cause, "--model, or adapter_of with the name of one of [[models]]")
    own = tuple(_own_model(config, model, path) for model in models if model.path is not None)
    origins = dict(config.origins)
    unused = tuple(
        f"{origins[name]} has no effect: it is for models that start on request, and there is none"
        for name in ("models_memory_bytes", "keep_alive_s")
        if name in origins and not own
    )
    return replace(config, models=tuple(models), own_models=own, warnings=config.warnings + unused)


def _own_adapters(config: ServerConfig, adapters: Sequence[ModelSettings], path: Path | None) -> list[NamedPath]:
    """Raises StartupError: one is of another model, or its directory is missing."""
    if not adapters:
        return []
    from server.engine_loader import served_name  # imports what few commands need

    own = (served_name(config), *config.aliases) if config.has_engine else ()
    for one in adapters:
        if one.adapter_of not in own:
            known = ", ".join((*own, *(model.name for model in config.models)))
            cause = f"the adapter {one.name!r} in {path} has adapter_of {one.adapter_of!r}, which is none of: {known}"
            raise StartupError(cause, "adapter_of = the name of one of them")
    return [_adapter(one.name, one.path, path) for one in adapters]


def _adapter(name: str, directory: str | None, path: Path | None) -> NamedPath:
    if directory is None:
        cause = f"the adapter {name!r} in {path} has no path"
        raise StartupError(cause, "path = the directory that PEFT has written")
    found: NamedPath = _parse_one(_BY_FIELD["loras"], f"{name}={directory}", f"the adapter {name!r} in {path}")
    return found


def _own_model(config: ServerConfig, model: ModelSettings, path: Path | None) -> ServerConfig:
    origin = f"path of the model {model.name!r} in {path}"
    assert model.path is not None
    source = _parse_one(_BY_FIELD["model"], model.path, origin, "path")
    unknown = [key for key in model.settings if key not in _OF_MODELS]
    if unknown:
        known = f"known: {', '.join(_OF_MODELS)}"
        cause = (
            f"the model {model.name!r} in {path} has the setting {unknown[0]!r}{did_you_mean(unknown[0], _OF_MODELS)}"
        )
        raise StartupError(cause, known)
    given = model.settings if model.max_model_len is None else {"max_model_len": model.max_model_len} | model.settings
    settings = {name: one.value for name, one in _from_file(given, path or Path()).items()}
    settings["loras"] = tuple(_adapter(name, str(at), path) for name, at in model.adapters.items())
    process = config.process_of(model, source, settings)
    process.to_engine_config()  # refuses contradictions
    return process


def wanted_log_format(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """--log-format from the same sources, for reporting an error in the other settings; None: not given."""

    def typed(flag: str) -> str | None:
        values = [word for before, word in pairwise(argv) if before == flag]
        values += [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]
        return values[-1] if values else None

    found = typed("--log-format") or environ.get(f"{ENVIRONMENT_PREFIX}LOG_FORMAT")
    path = Path(typed("--config") or environ.get(f"{ENVIRONMENT_PREFIX}CONFIG", ""))
    if found is None and path.is_file():
        with suppress(OSError):  # the file may not be TOML: look for the line
            text = path.read_text(errors="replace")
            found = (re.findall(r"""(?m)^\s*log_format\s*=\s*["'](\w+)["']""", text) or [None])[0]
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    by_variable = {option.variable: option for option in _BY_FIELD.values()}
    values = {}
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        option = by_variable.get(variable)
        if option is None:
            fix = f"use a name that `steploop serve --help-all` lists, or unset it: unset {variable}"
            raise _unknown("environment variable", variable, by_variable, fix)
        text = environ[variable]
        values[option.field_name] = _parse(option, text.split(",") if option.is_list else text, variable)
    return values


def _from_file(table: Mapping[str, Any], path: Path) -> dict[str, Given]:
    values = {}
    for key, value in table.items():
        option = _BY_KEY.get(key)
        if option is None and isinstance(value, dict):
            known = f"[[{TENANTS}]], [[{MODELS}]], [{PRICES}] and [{SLO}]"
            fix = f"remove the line [{key}]: only {known} are tables; settings stand above them, as in port = 8080"
            raise StartupError(f"{path} has a table, [{key}]", fix)
        if option is None:
            fix = f"remove it, or name a flag of those that `steploop serve --help-all` lists: {FLAG_AS_KEY}"
            raise _unknown(f"key in {path}", key, _BY_KEY, fix)
        values[option.field_name] = _parse(option, _toml_text(option, value, path), f"{key} in {path}")
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # takes 7 ms; most commands read no file

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise StartupError(f"{path} is not TOML: {error}", "save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        line = _bad_line(path, str(error))
        fix = _line_fix(line) or 'write settings as key = value, text in quotes: port = 8080, kv_memory = "2GiB"'
        raise StartupError(f"{path} is not TOML: {error}", fix) from error
    except OSError as error:
        cause = f"{path} cannot be read: {error.strerror}"
        raise StartupError(cause, f"make it readable: chmod u+r {path}") from error


def _bad_line(path: Path, error: str) -> str:
    """The line that tomllib's message names, or the last."""
    number = re.search(r"\(at line (\d+),", error)
    lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    return lines[min(int(number[1]), len(lines)) - 1] if number else lines[-1]


def _line_fix(line: str) -> str | None:
    """What to write instead of `drain_timeout = 60s` or `port: 8000`; None: its meaning is unclear."""
    match = re.fullmatch(r"\s*([\w-]+)\s*[=:]\s*([^\"'\[\]{}#]+?)\s*(#.*)?", line)
    option = None if match is None else _BY_KEY.get(match[1].replace("-", "_"))
    if match is None or option is None or option.is_secret:
        return None
    value = match[2] if re.fullmatch(r"\d+|true|false", match[2]) else f'"{match[2]}"'
    mended = f"{option.toml_key} = {value}"
    return f"{option.toml_key} is set twice: remove one" if mended == line else f"write that line as {mended}"


def _toml_text(option: Option, value: Any, path: Path) -> str | list[str]:
    """A TOML value as the text that a flag would have.

    Raises:
        StartupError: the value is of a kind that no setting has.
    """
    if isinstance(value, bool) and option.is_switch:
        return str(value)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return [str(value)] if option.is_list else str(value)
    if option.is_list and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    shown = str(value).lower() if isinstance(value, bool) else _TOML_KINDS.get(type(value), "a date or time")
    expected = "a list of texts" if option.is_list else "a text in quotes"
    if not option.is_list:
        try:
            option.parse(str(value))  # if the option takes it as text, only the quotes are missing
        except BadValueError as error:
            expected = error.expected
    cause = f"{option.toml_key} in {path} is {shown}: it must be {expected}"
    raise StartupError(cause, _fix(option, None))


def _parse(option: Option, text: str | list[str], origin: str) -> Given:
    if isinstance(text, list):
        return Given(tuple(_parse_one(option, item, origin) for item in text), origin)
    return Given(_parse_one(option, text, origin), origin)


def _parse_one(option: Option, text: str, origin: str, field: str | None = None) -> Any:
    """field: of the entry of [[models]] that has it; None: it is a setting of the server."""
    try:
        return option.parse(text)
    except BadValueError as error:
        is_model = option.field_name == "model" and isinstance(error, MissingPathError)
        shown = "a value that is not shown" if option.is_secret else f"{text!r}"
        raise StartupError(
            f"{origin} is {shown}: it must be {error.expected}",
            _fix(option, error.proposal)
            if field is None
            else f"{field} = {error.proposal or 'org/name, FILE.gguf or DIRECTORY'}",
            ExitCode.MODEL if is_model else ExitCode.CONFIGURATION,
        ) from error


def _fix(option: Option, proposal: str | None) -> str:
    if proposal is not None:
        return f"{option.flag} {proposal}"
    flag = option.flag if option.is_switch else f"{option.flag} {option.metavar}"
    ways = [flag, f"{option.variable}={option.metavar}"]
    if option.in_file:
        ways.append(f"{option.toml_key} in the TOML file")
    return f"{', '.join(ways[:-1])} or {ways[-1]}: {option.help}"


def _unknown(kind: str, name: str, known: Mapping[str, Option], fix: str) -> StartupError:
    return StartupError(f"unknown {kind}: {name}{did_you_mean(name, known)}", fix)
