"""The loaded engine, and what clients and operators see of it. Thread: loop, at start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import structs

from core.chat_template import ChatTemplate
from core.engine import Engine
from core.grammar import GrammarCompiler, Vocabulary
from core.marked_text import MarkedText
from core.plan import RunnerLimits
from core.thought_grammar import ThoughtVocabulary
from core.tokenizer import Tokenizer
from core.tool_detection import ThoughtStyle, ToolStyle, detect, detect_thought
from core.tool_formats import ANY_FORMAT
from core.turns import TurnMemory
from core.types import Adapter, EngineStats, StepDelivery
from server import __version__
from server.api.fields import GenerationDefaults, RequestLimits, tasks_of
from server.api.models import ServedModel, ServerCard, adapter_card
from server.api.replies import Surface
from server.clock import Clock
from server.engine_thread import Inbox
from server.grammar_guard import GuardedCompiler
from server.model_files import ModelFiles, context_of, read_model_files
from server.prompts import PromptReader
from server.relay import CountTokens

DEMONSTRATION = "demonstration model: it has memorised a glossary of LLM serving and knows nothing else"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was loaded, for the banner and the API.

    Args:
        model_digest: of its weights.
        settings: that an answer's tokens may depend on.
        weights_bytes: in memory; quantization: of the layers' matrices; None: they are as dtype says.
        has_mtp: the model's own head drafts.
    """

    model_name: str
    is_demonstration: bool
    num_parameters: int
    dtype: str
    device: str
    device_reason: str
    kv_size_bytes: int
    context_origin: str
    limits: RunnerLimits
    tasks: tuple[str, ...] = ("generate",)
    model_digest: str = ""
    settings: tuple[object, ...] = ()
    weights_bytes: int = 0
    quantization: str | None = None
    has_mtp: bool = False


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready to step.

    Args:
        stats: the scheduler's, before its first step.
        adapters: of --lora, by name, each with its card's root.
        read_adapter: reads another one, on any thread; None: the engine takes none.
    """

    engine: Engine
    files: ModelFiles
    facts: EngineFacts
    stats: EngineStats
    adapters: tuple[tuple[str, str, Adapter], ...] = ()
    read_adapter: Callable[[Path], Adapter] | None = None


# Runs on the engine thread: (inbox, deliver, report_stage) -> engine
LoadEngine = Callable[[Inbox, Callable[[StepDelivery], None], Callable[[str], None]], LoadedEngine]


def prompt_reader(
    loaded: LoadedEngine,
    clock: Clock,
    request_limits: RequestLimits,
    tool_format: str = ANY_FORMAT,
    aliases: Sequence[str] = (),
    stores_responses: bool = False,
) -> PromptReader:
    """The reader of prompts for the model that is served."""
    facts, files, limits = loaded.facts, loaded.files, loaded.facts.limits
    style, max_model_len = files.pooling, limits.max_model_len
    if style is not None and style.max_tokens is not None:
        max_model_len = min(max_model_len, style.max_tokens)
    card = ServedModel(
        id=facts.model_name,
        created_s=int(clock.unix()),
        max_model_len=max_model_len,
        description=DEMONSTRATION if facts.is_demonstration else None,
        tasks=tasks_of(style),
    )
    adapters = [adapter_card(card, *one) for one in loaded.adapters]
    # Made now: the library keeps the GIL for half a second with a vocabulary of 152,000, and requests would wait
    compiler = files.compiler or compiler_of(files.tokenizer, files.eos_ids, GuardedCompiler)
    compiler.most_tokens = limits.max_model_len
    tools, thought = tool_style_of(files.chat_template, tool_format), thought_style_of(files.chat_template)
    identity = identity_of(loaded, tool_format)
    reader = PromptReader(
        cards=(card, *(structs.replace(card, id=alias, alias_of=card.id) for alias in aliases), *adapters),
        tokenizer=files.tokenizer,
        chat_template=files.chat_template,
        max_model_len=max_model_len,
        max_sequences=min(limits.max_sequences, limits.max_batch_tokens),
        defaults=GenerationDefaults(
            vocab_size=limits.vocab_size,
            limits=request_limits,
            tool_style=tools,
            thought_style=thought,
            pooling=style,
            stores_responses=stores_responses,
            end_ids=tuple(dict.fromkeys((*files.eos_ids, *files.tokenizer.fill_end_ids))),
            **files.recommended,
        ),
        unix_clock=clock.unix,
        special_tokens={files.tokenizer.str_of(token_id): token_id for token_id in files.tokenizer.special_ids},
        eos_ids=files.eos_ids,
        make_compiler=lambda: compiler,
        fingerprint=_fingerprint(loaded, identity),
        identity=identity,
        turns=TurnMemory(files.tokenizer),
        thoughts=None if thought is None else vocabulary_of(thought, files.tokenizer, files.eos_ids),
    )
    for offered in (None, tools):
        reader.table_with(thought, offered)  # made now: requests find it
    return reader


def token_counter(path: Path, context: int | None, clock: Clock, request_limits: RequestLimits) -> CountTokens:
    """What makes token ids of prompts for a model that is computed elsewhere.

    Args:
        path: of its files; weights are not needed.

    Raises:
        StartupError: see read_model_files.
    """
    files = read_model_files(path, context)
    styles = tool_style_of(files.chat_template), thought_style_of(files.chat_template)
    defaults = GenerationDefaults(
        vocab_size=files.tokenizer.vocab_size,
        limits=request_limits,
        tool_style=styles[0],
        thought_style=styles[1],
        pooling=files.pooling,
        **files.recommended,
    )
    most = context or context_of(files.config)
    reader = PromptReader((), files.tokenizer, files.chat_template, most, 1, defaults, clock.unix, _no_grammar)

    def count(surface: Surface, body: bytes) -> list[tuple[int, ...]]:
        return [reader.encode(one) for one in surface.parse(body, lambda model: (model or "", defaults)).prompts]

    return count


def _no_grammar() -> GrammarCompiler:
    raise AssertionError("it only counts")


def tool_style_of(template: ChatTemplate, tool_format: str = ANY_FORMAT) -> ToolStyle | None:
    """How the model writes calls; None: its template has no form for them that is known.

    Args:
        tool_format: as the setting names it.
    """

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return template.render(messages, now=datetime.min, tools=tools, add_generation_prompt=False)

    return detect(render, None if tool_format == ANY_FORMAT else tool_format)


def thought_style_of(template: ChatTemplate) -> ThoughtStyle | None:
    """How the model thinks before it answers, by its template; None: it does not, or in a way that is not known."""

    def render(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return template.render(messages, now=datetime.min, template_kwargs=variables)

    return detect_thought(render)


def vocabulary_of(thought: ThoughtStyle, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> ThoughtVocabulary:
    """What the model's thoughts begin and end with, for a model whose answers end with any of these ids."""
    return ThoughtVocabulary(
        thought.name, tokenizer.full_table.token_bytes, partial(tokenizer.encode, add_special_tokens=False), eos_ids
    )


def compiler_of(
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    kind: type[GrammarCompiler] = GrammarCompiler,
    most_tokens: int | None = None,
) -> GrammarCompiler:
    """For a model whose answers end with any of these ids, and have at most so many tokens."""

    def encode(text: str) -> list[int]:
        """As an answer writes a text: a control token's name is text there."""
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return token_ids if tokenizer.special_ids.isdisjoint(token_ids) else tokenizer.encode_chat(MarkedText(text))

    return kind(
        Vocabulary(tokenizer.full_table.token_bytes, sorted(tokenizer.special_ids), [*eos_ids]), encode, most_tokens
    )


def _fingerprint(loaded: LoadedEngine, identity: Mapping[str, str]) -> str:
    """system_fingerprint: changes with the weights, what computes them and how, and the version; not with a name."""
    return f"fp_{sha256(repr((loaded.facts.device, sorted(identity.items()))).encode()).hexdigest()[:12]}"


def _digest_of(facts: EngineFacts, files: ModelFiles) -> str:
    """Of the weights, and of what config.json says of them."""
    return sha256(repr((facts.model_digest, files.config)).encode()).hexdigest()


def identity_of(loaded: LoadedEngine, tool_format: str = ANY_FORMAT) -> dict[str, str]:
    """What an answer's tokens depend on beside its request and its seed, as `timings` and records tell it."""
    facts, files = loaded.facts, loaded.files
    template, text = files.chat_template, (files.tokenizer.digest, files.chat_template.marks_content)
    settings = facts.dtype, facts.settings, template.sources, files.recommended, files.eos_ids, tool_format, *text
    return {
        "model_digest": _digest_of(facts, files)[:16],
        "settings_digest": sha256(repr(settings).encode()).hexdigest()[:16],
        "version": __version__,
    }


def server_card(model: ServedModel, loaded: LoadedEngine, binds: tuple[str, ...], speculates: bool) -> ServerCard:
    """The server's description for routers."""
    limits, config = loaded.facts.limits, loaded.files.config
    return ServerCard(
        model=model,
        model_type=config.get("model_type"),
        architectures=tuple(config.get("architectures") or ()),
        version=__version__,
        max_sequences=limits.max_sequences,
        max_batch_tokens=limits.max_batch_tokens,
        num_kv_tokens=limits.num_blocks * limits.block_size,
        speculates=speculates and limits.max_drafts > 0,
        binds=binds,
        num_parameters=loaded.facts.num_parameters,
        size_bytes=loaded.facts.weights_bytes,
        digest=_digest_of(loaded.facts, loaded.files),
        file_format=(file_format := "gguf" if loaded.files.path.is_file() else "safetensors"),
        precision=loaded.facts.quantization or (loaded.facts.dtype if file_format == "safetensors" else ""),
    )
