"""A model's small files, as the loop's side needs them: configuration, tokenizer, chat template, defaults.

A Hugging Face directory holds them, or a GGUF file's metadata. Read once, at start, on the main thread. Only JSON and
templates: no pickle, no code from the model directory. The weights are the engine's (gpu/weights.py).
"""

import json
import math
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.chat_template import ChatTemplate, ChatTemplateSyntaxError
from core.config import ModelConfig, parse_model_config, stated_context
from core.config_fields import BAD_FIELD_FIX, CONFIG_PREFIX
from core.errors import ExitCode, StartupError
from core.gguf import SUFFIX as GGUF_SUFFIX
from core.gguf import GgufFile, parse_gguf
from core.gguf_model import ROPE_FACTORS, config_of, end_ids, generation_of, keys_of, tokenizer_files
from core.tokenizer import Tokenizer, UnsupportedTokenizer, named_special_tokens
from server.api.decoding import range_of
from server.api.fields import SamplingFields
from server.values import show_models

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
# Of recommended values: as of requests; but -1 or more stands for no top_k, and a top_p of 0 for the likeliest token.
_BOUNDS = {name: range_of(SamplingFields, name) for name in ("temperature", "min_p", "repetition_penalty")} | {
    "top_p": (0, 1),
    "top_k": (-math.inf, math.inf),
}
_SAMPLING_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# generation_config.json's fields that change what is sampled, and are not built, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "stop_strings": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}
MAX_FILE_BYTES = 256 * 2**20  # the largest tokenizer.json known is 35 MB


class BadModelFile(StartupError):
    exit_code = ExitCode.MODEL


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model directory, or a GGUF file, says.

    Args:
        path: the directory or the file.
        config: config.json, as it is, or as it would be.
        chat_template: renders, or refuses with what to do where the model has none.
        recommended: generation_config.json's sampling: values of fields of server.api.fields.GenerationDefaults.
        eos_ids: any of them ends an answer.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    recommended: dict[str, Any]
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Contents:
    """The files' contents, as a directory's names have them.

    Args:
        keys: names of fields -> what a GGUF file calls them; empty: it is a directory.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tokenizer_json: str
    template_sources: dict[str, str]
    keys: dict[str, str]


def is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and os.path.isfile(path)


def read_model_files(
    path: Path,
    context_limit: int | None = None,
    template_file: Path | None = None,
    allows_special_in_content: bool = False,
) -> ModelFiles:
    """Read a model directory, or a GGUF file's metadata.

    Args:
        context_limit: tokens; None: the model's own.
        template_file: a chat template to use instead of the model's.
        allows_special_in_content: what messages spell as a control token is one.

    Raises:
        StartupError: what is missing or broken, by name, and what to do.
    """
    has_template = template_file is None
    contents = _gguf_contents(path) if is_gguf(path) else _directory_contents(_existing_directory(path), has_template)
    limit = context_limit or _context_of(path, contents)
    sources = contents.template_sources if template_file is None else {"default": _read_text(template_file)}
    special_tokens = named_special_tokens(contents.tokenizer_config)
    template = _template(sources, template_file or path, special_tokens, limit, not allows_special_in_content)
    return ModelFiles(
        path,
        contents.config,
        tokenizer := _tokenizer(path, contents, template),
        template,
        _recommended(path, contents),
        _eos_ids(path, contents, tokenizer),
    )


def read_model_config(path: Path) -> dict[str, Any]:
    """config.json alone, or what it would say of a GGUF file.

    Raises:
        StartupError: it is missing or broken.
    """
    if not is_gguf(path):
        return _read_json(_existing_directory(path) / "config.json")
    return _gguf_config(path)[1]


def parse_config(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    """What read_model_files or read_model_config found, understood.

    Raises:
        StartupError: as parse_model_config; it names the file, and a GGUF file's own keys.
    """
    try:
        return parse_model_config(config)
    except StartupError as error:
        raise _told_of(path, error, keys_of(_gguf_header(path)[0].metadata) if is_gguf(path) else {}) from error


def check_tokenizer(path: Path) -> None:
    """
    Raises:
        StartupError: a model directory has none.
    """
    file = path / TOKENIZER_FILE
    if not is_gguf(path) and not file.is_file():
        raise BadModelFile(f"{file} is missing", _fix_missing(file))


def _directory_contents(directory: Path, has_template: bool) -> _Contents:
    config = _read_json(directory / "config.json")
    generation = _read_json(directory / GENERATION_FILE, is_optional=True)
    tokenizer_config = _read_tokenizer_config(directory)
    tokenizer_json = _read_text(directory / "tokenizer.json")
    sources = _template_sources(directory, tokenizer_config) if has_template else {}
    return _Contents(config, generation, tokenizer_config, tokenizer_json, sources, {})


def _gguf_contents(file: Path) -> _Contents:
    header, config = _gguf_config(file)
    try:
        tokenizer_json, tokenizer_config = tokenizer_files(header.metadata, config["vocab_size"])
        generation = {**generation_of(header.metadata), "eos_token_id": end_ids(header.metadata)}
    except StartupError as error:
        raise _told_of(file, error, {}) from error
    templates = _named_templates(file, tokenizer_config)
    return _Contents(config, generation, tokenizer_config, tokenizer_json, templates, keys_of(header.metadata))


def _gguf_header(file: Path) -> tuple[GgufFile, memoryview]:
    """And the whole file."""
    content = _mapped(file)
    return parse_gguf(content, str(file)), content


def _gguf_config(file: Path) -> tuple[GgufFile, dict[str, Any]]:
    """The header, and what config.json would say."""
    header, content = _gguf_header(file)
    try:
        return header, config_of(header, _rope_factors(header, content))
    except StartupError as error:
        raise _told_of(file, error, {}) from error


def _told_of(path: Path, error: StartupError, keys: Mapping[str, str]) -> StartupError:
    """The error of a field with the file that it is in.

    Args:
        keys: as _Contents has them; a field that is not among them keeps its name.
    """

    def in_its_words(text: str) -> str:
        return re.sub(r"\w+", lambda match: keys.get(match[0], match[0]), text)

    is_field = error.cause.startswith(CONFIG_PREFIX)
    what = error.cause.removeprefix(CONFIG_PREFIX)
    if is_gguf(path):
        fix = "download it again, or name another." if error.fix == BAD_FIELD_FIX else in_its_words(error.fix)
        return type(error)(f"{path}: {in_its_words(what)}", fix, error.exit_code)
    return type(error)(f"{path / CONFIG_FILE if is_field else path}: {what}", error.fix, error.exit_code)


def _mapped(file: Path) -> memoryview:
    try:
        with file.open("rb") as stream:
            return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as error:
        raise BadModelFile(f"{file} is empty", "download it again") from error
    except OSError as error:
        cause = f"{file} cannot be read: {error.strerror}"
        raise BadModelFile(cause, "check its permissions") from error


def _rope_factors(header: GgufFile, content: memoryview) -> tuple[float, ...] | None:
    found = header.tensors.get(ROPE_FACTORS)
    if found is None:
        return None
    if found.format != "F32":
        cause = f"{ROPE_FACTORS} is stored as {found.format}, not as F32"
        raise BadModelFile(cause, "use another file of the model")
    return tuple(np.frombuffer(content[found.offset :][: found.size_bytes], "<f4").tolist())


def _existing_directory(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.exists():
        raise BadModelFile(f"{path} is a file, not a model directory", f"--model {path.parent}")
    raise BadModelFile(f"Model directory {path} does not exist", show_models(path.parent))


def _read_text(file: Path) -> str:
    try:
        size_bytes = file.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise BadModelFile(
                f"{file} has {size_bytes} bytes, over the {MAX_FILE_BYTES} of any model known",
                "check that it is what its name says",
            )
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BadModelFile(f"{file} is missing", _fix_missing(file)) from error
    except OSError as error:
        raise BadModelFile(f"{file} cannot be read: {error.strerror}", "check its permissions") from error
    except UnicodeDecodeError as error:
        raise BadModelFile(f"{file} is not UTF-8 text: {error}", "download it again") from error


def _fix_missing(file: Path) -> str:
    if file.name == "config.json":
        return f"name a Hugging Face model directory, or a {GGUF_SUFFIX} file; {show_models(file.parent)}"
    if file.name == "tokenizer.json" and (file.parent / "tokenizer.model").exists():
        return (
            "only tokenizer.model is there: write tokenizer.json from it, with transformers: "
            f"AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})"
        )
    if file.name == "tokenizer.json":
        return "tokenizer.json comes with the model's directory: download the whole of it again"
    return "check its name"


def _read_json(file: Path, is_optional: bool = False) -> dict[str, Any]:
    if is_optional and not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadModelFile(f"{file} is not JSON: {error}", "download it again") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{file} holds a {type(value).__name__}, not an object", "download it again")
    return value


def _read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; before it listed all added tokens, special_tokens_map.json had the last word."""
    config = _read_json(directory / "tokenizer_config.json", is_optional=True)
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read_json(directory / "special_tokens_map.json", is_optional=True)}


def _context_of(path: Path, contents: _Contents) -> int:
    try:
        return stated_context(contents.config)
    except StartupError as error:
        raise _told_of(path, error, contents.keys) from error


def _num_embeddings(config: Mapping[str, Any]) -> int | None:
    """None: parse_config will say what is wrong with it."""
    found = config.get("vocab_size")
    return found if isinstance(found, int) else None


def _template(
    sources: dict[str, str], where: Path, special_tokens: dict[str, str], limit: int, marks_content: bool
) -> ChatTemplate:
    try:
        return ChatTemplate(sources, special_tokens, limit, marks_content)
    except ChatTemplateSyntaxError as error:
        raise BadModelFile(f"{where}: {error}", "mend it, or give --chat-template FILE") from error


def _tokenizer(path: Path, contents: _Contents, template: ChatTemplate) -> Tokenizer:
    try:
        return Tokenizer(
            contents.tokenizer_json,
            contents.tokenizer_config,
            _num_embeddings(contents.config),
            template.sources.values(),
            template.user_turn(),
        )
    except UnsupportedTokenizer as error:
        where = path if is_gguf(path) else path / "tokenizer.json"
        raise BadModelFile(
            f"{where}: {error}", "download it again, or serve a model with a supported tokenizer"
        ) from error


def _template_sources(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """By name, from the newer places to the older, as transformers looks: files first, then tokenizer_config.json."""
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = {file.stem: file for file in more} | {"default": directory / "chat_template.jinja"}
    if found := {name: _read_text(file) for name, file in files.items() if file.exists()}:
        return found
    return _named_templates(directory / "tokenizer_config.json", tokenizer_config)


def _named_templates(where: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    match tokenizer_config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case list(named) if all(_is_named_template(entry) for entry in named):
            return {entry["name"]: entry["template"] for entry in named}
    cause = f"{where}: chat_template is neither a text nor a list of named ones"
    raise BadModelFile(cause, "--chat-template FILE")


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _recommended(path: Path, contents: _Contents) -> dict[str, Any]:
    """What the model's makers recommend; greedy where they say do_sample: false.

    Raises:
        StartupError: they recommend what no request may ask for.
    """
    generation = contents.generation_config
    found: dict[str, Any] = {}
    for name in _SAMPLING_NUMBERS:
        value = generation.get(name)
        if value is None:
            continue
        if not _is_number(value) or (name == "top_k" and value != int(value)) or not _is_within(_BOUNDS[name], value):
            raise _bad_default(path, contents, name)
        found[name] = max(0, int(value)) if name == "top_k" else float(value)  # some write -1 for all
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    for name, lowest in (("min_tokens", 0), ("max_tokens", 1)):
        field = name.replace("_", "_new_")
        if (value := generation.get(field)) is not None:
            if not _is_id(value, 2**31) or value < lowest:
                raise _bad_default(path, contents, field)
            found[name] = value
    if suppressed_ids := _suppressed_ids(path, contents):
        found["suppressed_ids"] = suppressed_ids
    for name, neutral in _NEUTRAL.items():
        if generation.get(name) is not None and generation[name] not in neutral:
            raise BadModelFile(
                f"{path}: {GENERATION_FILE} asks for {name} = {str(generation[name])[:64]}, which is not supported",
                "remove it there: answers are then sampled without it",
            )
    return found


def _suppressed_ids(path: Path, contents: _Contents) -> tuple[int, ...]:
    """What is never to be sampled: suppress_tokens, and bad_words_ids of one token each."""
    suppressed = contents.generation_config.get("suppress_tokens") or []
    words = contents.generation_config.get("bad_words_ids") or []
    limit = _num_embeddings(contents.config) or 2**31
    if not isinstance(suppressed, list) or not all(_is_id(token_id, limit) for token_id in suppressed):
        raise _bad_default(path, contents, "suppress_tokens")
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise _bad_default(path, contents, "bad_words_ids")
    if any(len(word) > 1 for word in words):
        raise BadModelFile(
            f"{path}: {GENERATION_FILE}: bad_words_ids has words of several tokens, which are not supported",
            "leave words of one token there, or none",
        )
    if not all(_is_id(word[0], limit) for word in words):
        raise _bad_default(path, contents, "bad_words_ids")
    return tuple(dict.fromkeys([*suppressed, *(word[0] for word in words)]))


def _bad_default(path: Path, contents: _Contents, name: str) -> StartupError:
    where = contents.keys.get(name, f"{GENERATION_FILE}: {name}")
    value = repr(contents.generation_config[name])[:64]
    return BadModelFile(f"{path}: {where} is {value}, which is out of its range", "correct or remove it there")


def _is_id(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _is_within(bounds: tuple[float, float], value: float) -> bool:
    return bounds[0] <= value <= bounds[1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _eos_ids(path: Path, contents: _Contents, tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json's, else config.json's, and the tokenizer's own beside them; those that can be sampled."""
    file, named = GENERATION_FILE, contents.generation_config.get("eos_token_id")
    if named is None:
        file, named = CONFIG_FILE, contents.config.get("eos_token_id")
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        cause = f"{path / file}: eos_token_id is {named!r}, neither an id nor a list of ids"
        raise BadModelFile(cause, "mend it there")
    own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    num_ids = _num_embeddings(contents.config)
    return tuple(i for i in dict.fromkeys([*ids, *own]) if i >= 0 and (num_ids is None or i < num_ids))
