"""Reads a model's small files: configuration, tokenizer, chat template, recommended sampling.

They come from a Hugging Face directory, or from a GGUF file's metadata. Only JSON and templates are read: no pickle, no
code. gpu/weights.py reads the weights. Thread: main, or the engine's at start.
"""

import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.chat_template import ChatTemplate, ChatTemplateSyntaxError
from core.config import ModelConfig
from core.config_fields import BAD_FIELD_FIX, CONFIG_PREFIX
from core.config_json import (
    HEADLESS,
    architecture_of,
    num_scores_of,
    parse_model_config,
    stated_context,
    stated_fields,
    text_config,
)
from core.encoders import EncoderConfig, is_encoder, parse_encoder_config
from core.errors import ExitCode, StartupError
from core.gguf import GgufFile, parse_gguf
from core.gguf_model import FACTORS, config_of, generation_of, keys_of
from core.grammar import GrammarCompiler
from core.tokenizer import Tokenizer, UnsupportedTokenizer, named_special_tokens
from core.types import Pooling, PoolingKind
from server.api.decoding import range_of
from server.api.fields import POOLINGS, PoolingStyle, SamplingFields, tasks_of
from server.gguf_tokenizer import end_ids, tokenizer_files
from server.values import GGUF_SUFFIX, is_gguf, show_models

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
MODULES_FILE = "modules.json"
_RERANKER = re.compile("qwen3.*reranker", re.IGNORECASE)  # directories that say no more
_POOLING_MODES: dict[str, PoolingKind] = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "mean_tokens": "mean",
    "cls_token": "cls",
}
MAX_FILE_BYTES = 256 * 2**20  # the largest tokenizer.json known is 35 MB
MAX_ID = 2**31
MAX_DEPTH = 2  # below a directory of models: org/name
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")  # pickles are listed too, with the reason why they are not served
# Bounds of recommended values: those of requests, but top_k may be -1 for all, and top_p 0 for the likeliest token.
_BOUNDS = {name: range_of(SamplingFields, name) for name in ("temperature", "min_p", "repetition_penalty")} | {
    "top_p": (0, 1),
    "top_k": (-math.inf, math.inf),
}
_SAMPLING_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields of generation_config.json that are not supported, with the values that change nothing.
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


class BadModelFile(StartupError):
    exit_code = ExitCode.MODEL


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The content of a model directory or GGUF file.

    Args:
        path: the directory or the file.
        config: config.json, or its equivalent from the GGUF metadata.
        chat_template: without one in the model, rendering raises an error with a fix.
        recommended: generation_config.json's sampling: fields of server.api.fields.GenerationDefaults.
        eos_ids: each ends an answer.
        pooling: what its vectors are; None: it makes none.
        compiler: of grammars, where one is kept for a model that is loaded again.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    recommended: dict[str, Any]
    eos_ids: tuple[int, ...]
    pooling: PoolingStyle | None = None
    compiler: GrammarCompiler | None = None


def read_model_files(
    path: Path,
    context_limit: int | None = None,
    template_file: Path | None = None,
    allows_special_in_content: bool = False,
    pooling: str | None = None,
) -> ModelFiles:
    """Read a model directory, or a GGUF file's metadata.

    Args:
        context_limit: tokens; None: the model's own.
        template_file: a chat template to use instead of the model's.
        allows_special_in_content: messages may spell control tokens.
        pooling: of POOLINGS; None: what the model's files say.

    Raises:
        StartupError: a file is missing or broken, with what to do.
    """
    contents = _gguf_contents(path) if is_gguf(path) else _directory_contents(path, template_file is None)
    try:
        limit = context_limit or context_of(contents.config)
    except StartupError as error:
        raise _told_of(path, error, contents.keys) from error
    sources = contents.template_sources if template_file is None else {"default": _read_text(template_file)}
    special_tokens = named_special_tokens(contents.tokenizer_config)
    try:
        template = ChatTemplate(sources, special_tokens, limit, not allows_special_in_content)
    except ChatTemplateSyntaxError as error:
        raise BadModelFile(f"{template_file or path}: {error}", "correct it, or set --chat-template FILE") from error
    try:
        tokenizer = Tokenizer(
            contents.tokenizer_json,
            contents.tokenizer_config,
            contents.num_embeddings,
            template.sources.values(),
            template.user_turn(),
        )
    except UnsupportedTokenizer as error:
        where = path if is_gguf(path) else path / TOKENIZER_FILE
        fix = "download it again, or serve a model with a supported tokenizer"
        raise BadModelFile(f"{where}: {error}", fix) from error
    eos_ids = contents.eos_ids(tokenizer.eos_id)
    style = read_pooling(path, contents.config, tokenizer, pooling)
    return ModelFiles(path, contents.config, tokenizer, template, contents.recommended(), eos_ids, style)


def stamps_of(path: Path) -> tuple[tuple[object, ...], ...]:
    """What changes when a file of a model directory, or of its modules, or a GGUF file does.

    Raises:
        OSError: it is not there.
    """
    files = [path] if is_gguf(path) else sorted([*path.iterdir(), *path.glob("*/*.json")])
    told = [(str(file), file.stat()) for file in files]
    return tuple((name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in told)


def tasks_in(path: Path, pooling: str | None) -> tuple[str, ...]:
    """What a model does, by its files but the tokenizer; empty: they cannot be read, or it is not supported.

    Args:
        pooling: of POOLINGS; None: what the files say.
    """
    try:
        return tasks_of(read_pooling(path, read_model_config(path), None, pooling))
    except StartupError:  # told by its load
        return ()


def read_pooling(
    path: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None, asked: str | None
) -> PoolingStyle | None:
    """What a model makes of prompts, by its head, the files of sentence-transformers beside it, or as --pooling asks.

    Args:
        tokenizer: None: tokens of answers are not looked up.

    Raises:
        StartupError: they ask for what is not supported.
    """
    modules = [] if is_gguf(path) else _read_modules(path)
    kinds = {module.kind: module for module in modules}
    name, num_scores = architecture_of(config), num_scores_of(config)
    is_reranker = _RERANKER.search(path.resolve().name) is not None
    encodes = is_encoder(config)
    if asked == "cls" and not encodes:
        cause = "--pooling cls is for encoders: the first token of this model attends to no other"
        raise BadModelFile(cause, "--pooling last, or mean")
    usual: dict[str, Any] = {"num_dims": (config if encodes else stated_fields(config)).get("hidden_size") or 1}
    usual["max_tokens"] = _most_tokens(path) if modules or encodes else None
    if num_scores:
        if num_scores > 1:
            cause = f"{path} is a classifier with {num_scores} classes, which is not supported"
            raise BadModelFile(cause, "serve a model with one score: num_labels 1")
        usual |= {"is_sigmoid": _has_sigmoid(path, config), "has_template": is_reranker}
        kind: PoolingKind = "last"
        if encodes:
            kind = "mean" if encoder_of(config).head_pooling == "mean" else "cls"
        return PoolingStyle(pooling=Pooling(kind), **usual, scores="head")
    if "LogitScore" in kinds or (is_reranker and name.endswith("ForCausalLM") and not modules):
        ids: tuple[int, ...] = () if tokenizer is None else _answer_ids(path, kinds.get("LogitScore"), tokenizer)
        return PoolingStyle(pooling=Pooling("last", ids), **usual, scores="tokens", has_template=True)
    if not modules and asked is None:
        if encodes or name.endswith(HEADLESS):
            cause = f"{path} has no head to generate text, and no pooling configuration"
            raise BadModelFile(cause, "--pooling last, or mean, as the model was trained")
        return None
    if not modules:
        assert asked is not None, "it was looked at"
        is_alone = encodes or name.endswith(HEADLESS)
        return PoolingStyle(pooling=Pooling(POOLINGS[asked]), **usual, generates=not is_alone)
    if (unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}) or "Pooling" not in kinds:
        cause = f"{path / MODULES_FILE} has {', '.join(sorted(unknown)) or 'no Pooling'}, which is not supported"
        raise BadModelFile(cause, "serve a model that has only a transformer, pooling and a norm")
    given = _read_json(path / kinds["Pooling"].path / CONFIG_FILE)
    prompts = _read_json(path / "config_sentence_transformers.json", is_optional=True)
    return PoolingStyle(
        pooling=Pooling(POOLINGS[asked] if asked else _pooling_kind(path / kinds["Pooling"].path, given)),
        **usual,
        is_normalized="Normalize" in kinds,
        prompts={name: text for name, text in (prompts.get("prompts") or {}).items() if isinstance(text, str)},
        default_prompt=prompts.get("default_prompt_name"),
    )


def _answer_ids(path: Path, module: "_Module | None", tokenizer: Tokenizer) -> tuple[int, int]:
    """Of yes and no: the tokens that a reranker's score comes from."""
    given = {} if module is None else _read_json(path / module.path / CONFIG_FILE)
    yes: Any = given.get("true_token_id", tokenizer.id_of("yes"))
    no: Any = given.get("false_token_id", tokenizer.id_of("no"))
    if not (_is_id(yes, tokenizer.vocab_size) and _is_id(no, tokenizer.vocab_size)):
        raise BadModelFile(
            f"{path} has no single tokens for yes and no, which a reranker's score needs", "name another"
        )
    return yes, no


def _most_tokens(directory: Path) -> int | None:
    """What sentence-transformers cuts texts to."""
    most = _read_json(directory / "sentence_bert_config.json", is_optional=True).get("max_seq_length")
    return most if isinstance(most, int) and most > 0 else None


def _has_sigmoid(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether sentence-transformers' CrossEncoder applies it, as it does unless the model says otherwise."""
    given = config.get("sentence_transformers")
    named = given.get("activation_fn") if isinstance(given, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise BadModelFile(
            f"{path} applies {named} to its scores, which is not supported", "serve a model with Sigmoid or Identity"
        )
    return kind == "Sigmoid"


def _pooling_kind(directory: Path, given: Mapping[str, Any]) -> PoolingKind:
    """Of a Pooling's config.json: one mode by its name, or a switch for each."""
    switches = [name.removeprefix("pooling_mode_") for name, value in given.items() if value is True]
    named = given.get("pooling_mode")
    modes = switches if named is None else [named] if isinstance(named, str) else list(named)
    found = [_POOLING_MODES.get(mode) for mode in modes if mode != "include_prompt"]
    if len(found) != 1 or found[0] is None or given.get("include_prompt") is False:
        cause = f"{directory / CONFIG_FILE} sets {', '.join(map(str, modes))} pooling, which is not supported"
        raise BadModelFile(cause, f"--pooling {', '.join(POOLINGS)}, if that is what the model was trained for")
    return found[0]


class _Module(NamedTuple):
    kind: str  # Transformer, Pooling, Normalize ...
    path: str  # below the model's directory


def _read_modules(directory: Path) -> list[_Module]:
    """What sentence-transformers computes, in order; nothing if the model is not one of its own."""
    file = directory / MODULES_FILE
    if not file.exists():
        return []
    try:
        listed = json.loads(_read_text(file))
        found = [_Module(one["type"].rpartition(".")[2], one["path"]) for one in listed]
        if any(one.path != Path(one.path).name for one in found):
            raise ValueError("a module lies elsewhere")
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadModelFile(f"{file} is not a list of modules in this directory", "download it again") from error


def read_model_config(path: Path) -> dict[str, Any]:
    """config.json, or its equivalent from a GGUF file's metadata. Raises StartupError: it is missing or broken."""
    if not is_gguf(path):
        return _read_config(path)
    return _gguf_config(path)[1]


def _read_config(directory: Path) -> dict[str, Any]:
    """config.json; a model of sentence-transformers that embeds has no head, whatever it says."""
    config = _read_json(_existing_directory(directory) / CONFIG_FILE)
    name = architecture_of(config)
    if name and any(module.kind == "Pooling" for module in _read_modules(directory)):
        config["architectures"] = [name.replace("ForCausalLM", HEADLESS)]
    return config


def context_of(config: Mapping[str, Any]) -> int:
    """Tokens of context, as config.json states it."""
    return encoder_of(config).max_position if is_encoder(config) else stated_context(config)


def encoder_of(config: Mapping[str, Any]) -> EncoderConfig:
    """As parse_config, of an encoder."""
    return parse_encoder_config(config, num_scores_of(config))


def parse_config(path: Path, config: Mapping[str, Any], context: int | None = None) -> ModelConfig:
    """Parse what read_model_files or read_model_config read.

    Args:
        context: see parse_model_config.

    Raises:
        StartupError: as parse_model_config; it names the file, and a GGUF file's own keys.
    """
    try:
        return parse_model_config(config, context)
    except StartupError as error:
        raise _told_of(path, error, keys_of(_gguf_header(path)[0].metadata) if is_gguf(path) else {}) from error


def check_tokenizer(path: Path) -> None:
    """Raises StartupError: a model directory has none."""
    file = path / TOKENIZER_FILE
    if not is_gguf(path) and not file.is_file():
        raise BadModelFile(f"{file} is missing", _fix_missing(file))


@dataclass(frozen=True, slots=True)
class _Contents:
    """The files' contents, under the names that they have in a directory.

    Args:
        path: the directory or GGUF file.
        keys: names of fields -> a GGUF file's keys; empty for a directory.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tokenizer_json: str | Mapping[str, Any]
    template_sources: dict[str, str]
    keys: dict[str, str]

    @property
    def num_embeddings(self) -> int | None:
        """None: parse_config reports what is wrong with it."""
        try:
            found = (self.config if is_encoder(self.config) else stated_fields(self.config)).get("vocab_size")
        except StartupError:
            return None
        return found if isinstance(found, int) else None

    def recommended(self) -> dict[str, Any]:
        """The sampling that the model's makers recommend; greedy if they say do_sample: false.

        Raises:
            StartupError: a value is out of its range, or asks for what is not supported.
        """
        generation = self.generation_config
        found: dict[str, Any] = {}
        for name in _SAMPLING_NUMBERS:
            value = generation.get(name)
            if value is None:
                continue
            low, high = _BOUNDS[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not low <= value <= high or (name == "top_k" and value != int(value)):
                raise self._bad_default(name)
            found[name] = max(0, int(value)) if name == "top_k" else float(value)  # top_k: some write -1 for all
        if generation.get("do_sample") is False:
            found["temperature"] = 0.0
        for field, name, lowest in (("min_new_tokens", "min_tokens", 0), ("max_new_tokens", "max_tokens", 1)):
            if (value := generation.get(field)) is not None:
                if not _is_id(value, MAX_ID) or value < lowest:
                    raise self._bad_default(field)
                found[name] = value
        if suppressed_ids := self._suppressed_ids():
            found["suppressed_ids"] = suppressed_ids
        for name, neutral in _NEUTRAL.items():
            if generation.get(name) is not None and generation[name] not in neutral:
                raise BadModelFile(
                    f"{self.path}: {GENERATION_FILE} sets {name} = {str(generation[name])[:64]}, which is not"
                    " supported",
                    "remove it there: answers are then sampled without it",
                )
        return found

    def _suppressed_ids(self) -> tuple[int, ...]:
        """Tokens that are never sampled: suppress_tokens, and bad_words_ids of one token each."""
        suppressed = self.generation_config.get("suppress_tokens") or []
        words = self.generation_config.get("bad_words_ids") or []
        limit = self.num_embeddings or MAX_ID
        if not isinstance(suppressed, list) or not all(_is_id(token_id, limit) for token_id in suppressed):
            raise self._bad_default("suppress_tokens")
        if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
            raise self._bad_default("bad_words_ids")
        if any(len(word) > 1 for word in words):
            raise BadModelFile(
                f"{self.path}: {GENERATION_FILE}: bad_words_ids has words of several tokens, which are not supported",
                "remove them: only words of one token are supported",
            )
        if not all(_is_id(word[0], limit) for word in words):
            raise self._bad_default("bad_words_ids")
        return tuple(dict.fromkeys([*suppressed, *(word[0] for word in words)]))

    def _bad_default(self, name: str) -> StartupError:
        where = self.keys.get(name, f"{GENERATION_FILE}: {name}")
        value = repr(self.generation_config[name])[:64]
        return BadModelFile(f"{self.path}: {where} is {value}, which is out of its range", "correct or remove it there")

    def eos_ids(self, own_id: int | None) -> tuple[int, ...]:
        """generation_config.json's, or else config.json's, and the tokenizer's own; without ids beyond the vocabulary.

        Raises:
            StartupError: a file has something else in their place.
        """
        file, named = GENERATION_FILE, self.generation_config.get("eos_token_id")
        if named is None:
            file, named = CONFIG_FILE, text_config(self.config).get("eos_token_id")
        ids = [] if named is None else named if isinstance(named, list) else [named]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            cause = f"{self.path / file}: eos_token_id is {named!r}, neither an id nor a list of ids"
            raise BadModelFile(cause, "correct it there")
        own = [] if own_id is None else [own_id]
        return tuple(i for i in dict.fromkeys([*ids, *own]) if 0 <= i < (self.num_embeddings or math.inf))


def _is_id(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


# A directory.


def _directory_contents(directory: Path, has_template: bool) -> _Contents:
    config = _read_config(directory)
    generation = _read_json(directory / GENERATION_FILE, is_optional=True)
    tokenizer_config = _read_json(directory / TOKENIZER_CONFIG_FILE, is_optional=True)
    if "added_tokens_decoder" not in tokenizer_config:  # older models: special_tokens_map.json overrides it
        tokenizer_config |= _read_json(directory / "special_tokens_map.json", is_optional=True)
    tokenizer_json = _read_text(directory / TOKENIZER_FILE)
    sources = _template_sources(directory, tokenizer_config) if has_template else {}
    return _Contents(directory, config, generation, tokenizer_config, tokenizer_json, sources, {})


def _template_sources(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: from files, or else from tokenizer_config.json, as transformers looks for them."""
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = {file.stem: file for file in more} | {"default": directory / "chat_template.jinja"}
    if found := {name: _read_text(file) for name, file in files.items() if file.exists()}:
        return found
    return _named_templates(directory / TOKENIZER_CONFIG_FILE, tokenizer_config)


def _named_templates(where: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    def is_named(entry: Any) -> bool:
        return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)

    match tokenizer_config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case list(named) if all(is_named(entry) for entry in named):
            return {entry["name"]: entry["template"] for entry in named}
    cause = f"{where}: chat_template is neither a text nor a list of named ones"
    raise BadModelFile(cause, "--chat-template FILE")


def _existing_directory(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.exists():
        raise BadModelFile(f"{path} is a file, not a model directory", f"--model {path.parent}")
    raise BadModelFile(f"Model directory {path} does not exist", show_models(path.parent))


def _read_json(file: Path, is_optional: bool = False) -> dict[str, Any]:
    if is_optional and not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadModelFile(f"{file} is not JSON: {error}", "download it again") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{file} contains a {type(value).__name__}, not an object", "download it again")
    return value


def _read_text(file: Path) -> str:
    try:
        size_bytes = file.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            cause = f"{file} has {size_bytes} bytes, more than the {MAX_FILE_BYTES} of any known model"
            raise BadModelFile(cause, "check that it is what its name says")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BadModelFile(f"{file} is missing", _fix_missing(file)) from error
    except OSError as error:
        raise BadModelFile(f"{file} cannot be read: {error.strerror}", "check its permissions") from error
    except UnicodeDecodeError as error:
        raise BadModelFile(f"{file} is not UTF-8 text: {error}", "download it again") from error


def _fix_missing(file: Path) -> str:
    if file.name == CONFIG_FILE:
        return f"name a Hugging Face model directory, or a {GGUF_SUFFIX} file; {show_models(file.parent)}"
    if file.name == TOKENIZER_FILE and (file.parent / "tokenizer.model").exists():
        return (
            "only tokenizer.model is there: write tokenizer.json from it, with transformers: "
            f"AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})"
        )
    if file.name == TOKENIZER_FILE:
        return "tokenizer.json comes with the model's directory: download the whole of it again"
    return "check its name"


# A GGUF file.


def _gguf_contents(file: Path) -> _Contents:
    header, config = _gguf_config(file)
    try:
        tokenizer_json, tokenizer_config = tokenizer_files(header.metadata, config["vocab_size"])
        generation = {**generation_of(header.metadata), "eos_token_id": end_ids(header.metadata)}
    except StartupError as error:
        raise _told_of(file, error, {}) from error
    templates = _named_templates(file, tokenizer_config)
    return _Contents(file, config, generation, tokenizer_config, tokenizer_json, templates, keys_of(header.metadata))


def _gguf_config(file: Path) -> tuple[GgufFile, dict[str, Any]]:
    """The header, and the equivalent of config.json."""
    header, content = _gguf_header(file)
    factors = {}
    for name in FACTORS:
        tensor = header.tensors.get(name)
        if tensor is not None and tensor.format != "F32":
            raise BadModelFile(f"{name} is stored as {tensor.format}, not as F32", "use another file of the model")
        if tensor is not None:
            raw = content[tensor.offset :][: tensor.size_bytes]
            factors[name] = tuple(np.frombuffer(raw, "<f4").tolist())
    try:
        return header, config_of(header, factors)
    except StartupError as error:
        raise _told_of(file, error, {}) from error


def _gguf_header(file: Path) -> tuple[GgufFile, memoryview]:
    """The header, and the whole file, mapped."""
    try:
        with file.open("rb") as stream:
            content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as error:
        raise BadModelFile(f"{file} is empty", "download it again") from error
    except OSError as error:
        raise BadModelFile(f"{file} cannot be read: {error.strerror}", "check its permissions") from error
    return parse_gguf(content, str(file)), content


def _told_of(path: Path, error: StartupError, keys: Mapping[str, str]) -> StartupError:
    """The error with the name of the file, and with a GGUF file's keys in place of config.json's fields."""

    def with_keys(text: str) -> str:
        return re.sub(r"\w+", lambda match: keys.get(match[0], match[0]), text)

    is_field = error.cause.startswith(CONFIG_PREFIX)
    what = error.cause.removeprefix(CONFIG_PREFIX)
    if is_gguf(path):
        fix = "download it again, or name another." if error.fix == BAD_FIELD_FIX else with_keys(error.fix)
        return type(error)(f"{path}: {with_keys(what)}", fix, error.exit_code)
    return type(error)(f"{path / CONFIG_FILE if is_field else path}: {what}", error.fix, error.exit_code)


def models_below(path: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """What looks like a model by its name: GGUF files, and directories with config.json and weights."""
    if path.suffix.lower() == GGUF_SUFFIX and os.path.isfile(path):
        yield path
    elif os.path.isdir(path):
        if os.path.isfile(path / "config.json") and any(any(path.glob(name)) for name in WEIGHTS):
            yield path
        if depth >= 0:
            try:
                entries = sorted(path.iterdir())
            except OSError:  # not readable
                return
            for entry in entries:
                if not entry.name.startswith("."):
                    yield from models_below(entry, depth - 1)


def models_in(directory: Path) -> dict[str, Path]:
    """The models below a directory, by their paths in it: of a file, without its suffix."""
    found: dict[str, Path] = {}
    for path in models_below(directory):
        inner = path.relative_to(directory)
        name = str(inner.with_suffix("") if is_gguf(path) else inner)
        found.setdefault(path.name if name == "." else name, path)
    return found
