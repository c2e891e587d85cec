"""A model directory's small files, as the loop's side needs them: configuration, tokenizer, chat template, defaults.

Read once, at start, on the main thread. Only JSON and templates: no pickle, no code from the model directory. The
weights are the engine's (gpu/weights.py).
"""

import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.chat_template import ChatTemplate, ChatTemplateSyntaxError
from core.errors import ExitCode, StartupError
from core.tokenizer import Tokenizer, UnsupportedTokenizer

MAX_FILE_BYTES = 256 * 2**20  # the largest tokenizer.json known is 35 MB


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """generation_config.json's sampling, for requests that leave it open. None: the model has no say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model directory says.

    Args:
        path: the directory.
        config: config.json, as it is.
        chat_template: renders, or refuses with what to do where the model has none.
        eos_ids: any of them ends an answer.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    defaults: GenerationDefaults
    eos_ids: tuple[int, ...]


def read_model_files(path: Path, context_limit: int | None = None, template_file: Path | None = None) -> ModelFiles:
    """Read a model directory.

    Args:
        context_limit: tokens; None: the model's own, max_position_embeddings.
        template_file: a chat template to use instead of the model's.

    Raises:
        StartupError: what is missing or broken, by name, and what to do.
    """
    directory = _existing_directory(path)
    config = _read_json(directory / "config.json")
    generation = _read_json(directory / "generation_config.json", is_optional=True)
    tokenizer_config = _read_tokenizer_config(directory)
    tokenizer = _read_tokenizer(directory, tokenizer_config)
    limit = context_limit or _context_of(config, directory)
    template = _read_template(directory, tokenizer_config, tokenizer, limit, template_file)
    eos_ids = _eos_ids(directory, config, generation, tokenizer)
    return ModelFiles(directory, config, tokenizer, template, _defaults(directory, generation), eos_ids)


def _existing_directory(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.exists():
        raise StartupError(f"{path} is a file, not a model directory", f"--model {path.parent}", ExitCode.MODEL)
    raise StartupError(f"Model directory {path} does not exist", _near(path), ExitCode.MODEL)


def _near(path: Path) -> str:
    """What lies where the path breaks off, the likeliest first."""
    parent = path.parent
    name = path.name
    while not parent.is_dir():
        name, parent = parent.name, parent.parent
    try:
        entries = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        return f"make {parent} readable ({error.strerror})"
    by_case = {entry.lower(): entry for entry in entries}
    if found := [by_case[match] for match in difflib.get_close_matches(name.lower(), by_case, n=3, cutoff=0.5)]:
        return f"did you mean {', '.join(str(parent / entry) for entry in found)}?"
    listed = ", ".join(entries[:5]) or "nothing"
    return f"name a directory with config.json; {parent} has {listed}{', ...' if len(entries) > 5 else ''}"


def _read_text(file: Path) -> str:
    try:
        size_bytes = file.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise StartupError(
                f"{file} has {size_bytes} bytes, over the {MAX_FILE_BYTES} of any model known",
                "check that it is what its name says",
                ExitCode.MODEL,
            )
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise StartupError(f"{file} is missing", _fix_missing(file), ExitCode.MODEL) from error
    except OSError as error:
        raise StartupError(
            f"{file} cannot be read: {error.strerror}", "check its permissions", ExitCode.MODEL
        ) from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{file} is not UTF-8 text: {error}", "download it again", ExitCode.MODEL) from error


def _fix_missing(file: Path) -> str:
    if file.name == "tokenizer.json" and (file.parent / "tokenizer.model").exists():
        return (
            "only tokenizer.model is there: write tokenizer.json from it, with transformers: "
            f"AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})"
        )
    return f"give a complete Hugging Face model directory; {_near(file)}"


def _read_json(file: Path, is_optional: bool = False) -> dict[str, Any]:
    if is_optional and not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise StartupError(f"{file} is not JSON: {error}", "download it again", ExitCode.MODEL) from error
    if not isinstance(value, dict):
        raise StartupError(f"{file} holds a {type(value).__name__}, not an object", "download it again", ExitCode.MODEL)
    return value


def _read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; before it listed all added tokens, special_tokens_map.json had the last word."""
    config = _read_json(directory / "tokenizer_config.json", is_optional=True)
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read_json(directory / "special_tokens_map.json", is_optional=True)}


def _read_tokenizer(directory: Path, tokenizer_config: dict[str, Any]) -> Tokenizer:
    file = directory / "tokenizer.json"
    text = _read_text(file)
    try:
        return Tokenizer(text, tokenizer_config)
    except UnsupportedTokenizer as error:
        raise StartupError(
            f"{file}: {error}", "download it again, or serve a model with a supported tokenizer", ExitCode.MODEL
        ) from error


def _context_of(config: dict[str, Any], directory: Path) -> int:
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or limit <= 0:
        cause = f"{directory / 'config.json'} has max_position_embeddings {limit!r}, not a count of tokens"
        raise StartupError(cause, "--max-model-len N", ExitCode.MODEL)
    return limit


def _read_template(
    directory: Path, tokenizer_config: dict[str, Any], tokenizer: Tokenizer, limit: int, template_file: Path | None
) -> ChatTemplate:
    if template_file is not None:
        sources = {"default": _read_text(template_file)}
    else:
        sources = _template_sources(directory, tokenizer_config)
    try:
        return ChatTemplate(sources, tokenizer.special_tokens, limit)
    except ChatTemplateSyntaxError as error:
        where = template_file or directory
        raise StartupError(f"{where}: {error}", "mend it, or give --chat-template FILE", ExitCode.MODEL) from error


def _template_sources(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """By name, from the newer places to the older, as transformers looks: files first, then tokenizer_config.json."""
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = {file.stem: file for file in more} | {"default": directory / "chat_template.jinja"}
    if found := {name: _read_text(file) for name, file in files.items() if file.exists()}:
        return found
    match tokenizer_config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case list(named) if all(_is_named_template(entry) for entry in named):
            return {entry["name"]: entry["template"] for entry in named}
    cause = f"{directory / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named ones"
    raise StartupError(cause, "--chat-template FILE", ExitCode.MODEL)


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _defaults(directory: Path, generation: dict[str, Any]) -> GenerationDefaults:
    """What the model's makers recommend; greedy where they say do_sample: false."""
    found: dict[str, Any] = {}
    for name in GenerationDefaults.__slots__:
        value = generation.get(name)
        if value is None:
            continue
        if not _is_number(value) or (name == "top_k" and value != int(value)) or (name != "top_k" and value < 0):
            cause = f"{directory / 'generation_config.json'}: {name} is {value!r}, which it cannot be"
            raise StartupError(cause, f"mend or remove {name} there", ExitCode.MODEL)
        found[name] = max(0, int(value)) if name == "top_k" else float(value)  # some write -1 for all
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return GenerationDefaults(**found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _eos_ids(
    directory: Path, config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """generation_config.json's, else config.json's, and the tokenizer's own beside them."""
    named = generation.get("eos_token_id")
    if named is None:
        named = config.get("eos_token_id")
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        cause = f"{directory}: eos_token_id is {named!r}, neither an id nor a list of ids"
        raise StartupError(cause, "mend it in generation_config.json", ExitCode.MODEL)
    own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return tuple(dict.fromkeys([*ids, *own]))
