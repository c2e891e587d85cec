"""What a request may ask: each field declared once, with its type, range and default, and the call that they become.

A field is one line of SamplingFields (every surface), ChoiceFields (chat and completions) or a surface's own body. The
annotation is its check: decode() refuses what does not fit, and words the refusal from it. A field that SamplingParams
has under the same name is copied there; only what is converted, or depends on the model, is code.
Thread: loop, or wherever a long body is parsed.
"""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from core.constraints import GrammarSpec
from core.context_policy import Budgets, Policy
from core.errors import InvalidRequest
from core.tool_detection import ThoughtStyle, ToolStyle
from core.types import BANNED, LOWEST_CLASS, TOP_CLASS, Beams, Pooling, PoolingKind, SamplingParams
from server.api.decoding import FUNCTION_KIND, MAX_SHOWN_KEY, decode, pieces
from server.api.known_fields import Name, rules_of
from server.api.reasoning import ThoughtWishes, check_hidden
from server.api.structured import ResponseFormat, StructuredFields, constraint_of
from server.api.tools import ToolWishes
from server.gate.tenants import ANY_TIME, Deadlines, DeadlineTable

UNLIMITED_TOKENS = 2**31 - 1  # max_tokens when the request names none: it is cut to the context
MOST_BEAMS = 8
MOST_BIAS = 1e9  # of llama-server's: with more, a logit would leave float32
ANY_SEED = -1  # as of vLLM, llama-server and ollama: asks for another answer each time
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama-server's
# Below it the division of logits overflows, and sampling is greedy all the same.
_GREEDY_TEMPERATURE = 1e-4
_LEAST_SHARE = 1e-6  # of top_p and typical_p: at 0 one token is kept, too

B = TypeVar("B", covariant=True)

# The call: what a request of any surface becomes.


class TextPrompt(msgspec.Struct, frozen=True):
    """
    Args:
        adds_special_tokens: as the model wants them around a raw text.
        suffix: the text behind the answer; None: the answer goes on with `text`.
        extra: names and texts of other files, which come first, beside a suffix.
    """

    text: str
    adds_special_tokens: bool = True
    suffix: str | None = None
    extra: tuple[tuple[str, str], ...] = ()
    suffix_param: str = "suffix"  # the field that it came in


class IdsPrompt(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]


class ChatPrompt(msgspec.Struct, frozen=True):
    """Messages for the chat template: content already flattened to one string per message.

    Args:
        param: the request's field that they came in.
        last_param: the place of the last message.
        tools: that the prompt shows, in chat's form.
        template_kwargs: more variables of the chat template.
        documents: that the prompt shows.
        begins_answer: the prompt ends with what the template writes before an assistant's message.
        continues_last: it ends with the last message, an assistant's, which the answer goes on with.
    """

    messages: tuple[dict[str, Any], ...]
    param: str = "messages"
    last_param: str = "messages[0]"
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] | None = None
    documents: tuple[dict[str, Any], ...] = ()
    begins_answer: bool = True
    continues_last: bool = False


class MixedPrompt(msgspec.Struct, frozen=True):
    """Texts and ids that follow one another: what the model wants around a text is before a first one alone."""

    parts: tuple[str | tuple[int, ...], ...]


class PairPrompt(msgspec.Struct, frozen=True):
    """Two texts to be scored together: a query and a document.

    Args:
        instruction: what counts as an answer, for models that are told; None: their usual one.
    """

    first: str
    second: str
    instruction: str | None = None


Prompt = TextPrompt | IdsPrompt | MixedPrompt | ChatPrompt | PairPrompt


class TokenWishes(msgspec.Struct, frozen=True):
    """What an answer shows of single tokens.

    Args:
        num_logprobs: of the likeliest tokens, beside each sampled one; None: no logprobs.
        num_prompt_logprobs: the same for the prompt's tokens, in vLLM's form.
        returns_ids: of the prompt and of the completion.
        tells_sampled: the ids of all tokens, at the end.
        counts_usage: in each chunk of a stream.
    """

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    returns_ids: bool = False
    tells_sampled: bool = False
    counts_usage: bool = False

    @property
    def param(self) -> str | None:
        """The first field that asks for any of it."""
        asked = {
            "logprobs": self.num_logprobs is not None,
            "prompt_logprobs": self.num_prompt_logprobs is not None,
            "return_token_ids": self.returns_ids,
            "timings.tokens": self.tells_sampled,
            "stream_options.continuous_usage_stats": self.counts_usage,
        }
        return next((name for name, is_asked in asked.items() if is_asked), None)


POOLINGS: dict[str, PoolingKind] = {"last": "last", "mean": "mean", "cls": "cls"}  # that --pooling may ask for


class PoolingStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What the model makes of a prompt instead of an answer, as its checkpoint or --pooling says.

    Args:
        num_dims: of a vector.
        is_normalized: vectors are brought to the length 1.
        prompts: what comes before a text, by name; default_prompt: the name of the usual one.
        generates: it answers, too.
        scores: a vector is a score, by the checkpoint's head, or the logits of the tokens for yes and no, from which it
            is told; None: it is an embedding.
        is_sigmoid: the score is brought between 0 and 1 by a sigmoid.
        has_template: pairs are put into Qwen3-Reranker's chat.
        max_tokens: of a prompt, where that is less than the context; None: the context.
    """

    pooling: Pooling
    num_dims: int
    is_normalized: bool = True
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    generates: bool = False
    scores: Literal["head", "tokens"] | None = None
    is_sigmoid: bool = True
    has_template: bool = False
    max_tokens: int | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """What surfaces ask for; the first is what the model is for."""
        if self.scores is not None:
            return ("score",)
        return (*(("generate",) if self.generates else ()), "embed", "score")


def tasks_of(style: PoolingStyle | None) -> tuple[str, ...]:
    """What a model does; without a style it generates alone."""
    return ("generate",) if style is None else style.tasks


class RequestLimits(msgspec.Struct, frozen=True):
    """What one request may ask for. Evaluation comes in batches, with n for pass@k and a list of stop strings."""

    num_choices: int = 64
    num_prompts: int = 256
    num_inputs: int = 2048
    num_stops: int = 16
    num_logit_biases: int = 300
    num_top_logprobs: int = 20


class GenerationDefaults(msgspec.Struct, frozen=True):
    """The model's generation_config.json, and the limits that requests are checked against."""

    vocab_size: int  # width of the logits: logit_bias ids and stop ids stay below it
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int = UNLIMITED_TOKENS
    suppressed_ids: tuple[int, ...] = ()  # BANNED, whatever a request asks
    end_ids: tuple[int, ...] = ()  # of every answer, and of texts that fill a gap
    limits: RequestLimits = RequestLimits()
    tool_style: ToolStyle | None = None  # of the model's template; None: it has no form for tools
    thought_style: ThoughtStyle | None = None  # likewise; None: it writes no thoughts
    pooling: PoolingStyle | None = None  # None: it generates alone
    stores_responses: bool = False  # /v1/responses goes on from what was answered before


class ContextBudgets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens that the turns and the documents of a prompt may have at most."""

    turns: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    documents: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class ContextWishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is left out of a prompt that does not fit."""

    type: Policy = Policy.ERROR
    budgets: ContextBudgets = ContextBudgets()

    @property
    def limits(self) -> Budgets:
        turns, documents = self.budgets.turns, self.budgets.documents
        return Budgets(math.inf if turns is None else turns, math.inf if documents is None else documents)


# The defaults of the model of this name, and the name under which it is served; None: the only model. Raises
# ServiceError if the caller may not use it.
DefaultsOf = Callable[[str | None], tuple[str, GenerationDefaults]]


class ReadBody(NamedTuple, Generic[B]):
    """A body as its surface's struct, the names of its unknown fields, and the model that it asks."""

    wire: B
    unknown_fields: tuple[str, ...]
    model: str
    defaults: GenerationDefaults


def read_body(
    body: bytes | dict[str, Any],
    shape: type[B],
    surface: Name,
    defaults_of: DefaultsOf,
    function_kind: str = FUNCTION_KIND,
) -> ReadBody[B]:
    """Raises InvalidRequest: see decode; or what DefaultsOf raises."""
    wire: Any
    wire, unknown_fields = decode(body, shape, rules_of(surface), function_kind)
    return ReadBody(wire, unknown_fields, *defaults_of(wire.model))


class GenerationCall(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request of any surface. Choice p * num_sequences + i is sequence i of prompt p."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    prompts_param: str = "prompt"  # the field that texts came in
    num_sequences: int = 1
    best_of: int = 1  # answers that are computed for each prompt, where they are more than num_sequences
    beams: Beams | None = None  # that these are of; otherwise the likeliest by the mean of their logprobs are shown
    cache_salt: str = ""  # only prompts of the same salt share cached blocks
    context: ContextWishes | None = None  # None: its tenant's policy
    priority: int | None = None  # the class it asks for: higher goes first; None: its tenant's
    deadlines: Deadlines = ANY_TIME  # that it asks for
    is_stream: bool = False
    constraint: GrammarSpec | None = None  # that the answer is held to
    tools: ToolWishes | None = None
    thought: ThoughtWishes | None = None  # None: all of the answer is its text
    includes_usage: bool = False  # stream_options.include_usage
    wants_timings: bool = False
    tells_queue: bool = False  # comments on its place in the queue and its prefill, of a stream
    echo: bool = False  # completions: the prompt comes before the text
    tokens: TokenWishes = TokenWishes()
    pooling: PoolingStyle | None = None  # of its vectors; None: it asks for answers
    truncate_to: int | None = None  # tokens of a longer prompt; -1: as the context has; None: a longer one is refused
    wire: Any = None  # the surface's own parsed struct, for what its answer repeats (responses echoes its parameters)
    is_resumable: bool = False  # its stream, by a client that comes back
    speculates: bool = True  # see core.types.Request
    prediction: str = ""  # of the answer's text
    unknown_fields: tuple[str, ...] = ()  # of the body's top level; ignored, but counted

    @property
    def num_computed(self) -> int:
        """Sequences of each prompt."""
        return max(self.num_sequences, self.best_of)


# The fields. null is as good as absent.

LIMIT = "x-limit"  # in a type's JSON schema: a field of RequestLimits, that bounds its value or its length
NumChoices = Annotated[int, Meta(ge=1, extra_json_schema={LIMIT: "num_choices"})]
NumLikely = Annotated[int, Meta(ge=0, extra_json_schema={LIMIT: "num_top_logprobs"})]
_Bias = Annotated[float, Meta(extra_json_schema={"minimum": -100, "maximum": 100})] | bool  # false: never
_Biases = Annotated[dict[str, _Bias], Meta(extra_json_schema={LIMIT: "num_logit_biases"})]
_Pair = Annotated[list[int | float | bool], Meta(min_length=2, max_length=2)]  # an id, and its bias or false
_Pairs = Annotated[list[_Pair], Meta(extra_json_schema={LIMIT: "num_logit_biases"})]  # llama-server's
_WideBiases = Annotated[dict[str, float | bool], Meta(extra_json_schema={LIMIT: "num_logit_biases"})]
_SEED = {"minimum": -(2**63), "maximum": 2**64 - 1}  # beyond what Meta holds
ModelName = Annotated[str, Meta(min_length=1)]
MOST_MAX_TOKENS = 2**63 - 1
MaxTokens = Annotated[int, Meta(ge=1, le=MOST_MAX_TOKENS)]
LastTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # how many; -1: all
_Breaker = Annotated[str, Meta(min_length=1, max_length=40)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]  # the detokenizer holds back that much


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TimingsFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As `true`, and more."""

    queue: bool = False
    tokens: bool = False


class SamplingFields(StructuredFields, frozen=True, kw_only=True):
    """The fields of every surface that generates."""

    model: ModelName | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Beyond these the scaled logits leave float32
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    typical_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=1000)] | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    dry_penalty_last_n: LastTokens | None = None
    dry_sequence_breakers: Annotated[list[_Breaker], Meta(min_length=1, max_length=16)] | None = None
    repeat_last_n: LastTokens | None = None
    logit_bias: _Biases | _Pairs | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: NumChoices | None = None
    seed: Annotated[int, Meta(extra_json_schema=_SEED)] | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(extra_json_schema={LIMIT: "num_stops"})] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # enough for any digest
    context_policy: Policy | ContextWishes | None = None
    resumable: bool | None = None
    priority: Annotated[int, Meta(ge=LOWEST_CLASS, le=TOP_CLASS)] | None = None
    beam_width: Annotated[int, Meta(ge=0, le=MOST_BEAMS)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    ignore_eos: bool | None = None
    speculation: bool | None = None
    skip_special_tokens: bool | None = None
    deadlines: DeadlineTable | None = None
    timings: bool | TimingsFields | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ClampedFields(SamplingFields, frozen=True, kw_only=True):
    """Of Ollama's and llama-server's surfaces: what is beyond a range counts as its end; no temperature is too high."""

    logit_bias: _WideBiases | _Pairs | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None


class ChoiceFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that chat and completions have beside, as vLLM has them."""

    prompt_logprobs: NumLikely | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


_SHARES = {"top_p": _LEAST_SHARE, "typical_p": _LEAST_SHARE, "min_p": 0.0}  # of the tokens that may come: their least


def _shared(source: type[msgspec.Struct], target: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in source.__struct_fields__ if name in target.__struct_fields__)


_SAMPLING_NAMES = _shared(SamplingFields, SamplingParams)
_DEFAULT_NAMES = _shared(GenerationDefaults, SamplingParams)
_sampling_values, _default_values = attrgetter(*_SAMPLING_NAMES), attrgetter(*_DEFAULT_NAMES)


def generation_call(
    body: ReadBody[SamplingFields],
    prompts: tuple[Prompt, ...],
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    echo: bool = False,
    best_of: int = 1,
    text_format: ResponseFormat | None = None,
    format_param: str = "text.format",
    **own: Any,
) -> GenerationCall:
    """The call that a surface's body asks for, with the model's defaults where it is silent.

    Args:
        max_tokens: None: as many as the model's defaults or the context allow.
        num_logprobs: asked for beside each token; None: no logprobs.
        best_of: answers to compute for each prompt, if more than `n`.
        text_format, format_param: what the answer's text is held to, where a surface has its own field for it.
        own: fields of GenerationCall that only this surface has.

    Raises:
        InvalidRequest: a field is out of a range that depends on the model, or contradicts another.
    """
    fields, defaults = body.wire, body.defaults
    wishes = _token_wishes(fields, num_logprobs)
    if isinstance(fields, ChoiceFields):
        _check_prompt_logprobs(fields, num_logprobs if echo else None, defaults.limits)
        text_format, format_param = fields.response_format, "response_format"
    check_hidden(own.get("thought"), wishes.param)
    if fields.n is not None:
        check_range("n", fields.n, 1, defaults.limits.num_choices)
    num_sequences = 1 if fields.n is None else fields.n
    beams = beams_of(fields, max(num_sequences, best_of))
    sampling = _sampling_params(fields, defaults, max_tokens, wishes, echo)
    if beams is not None:
        sampling = msgspec.structs.replace(sampling, **_BEAM_SAMPLING, repeat_last_n=-1)
    elif best_of > num_sequences and sampling.num_logprobs is None:
        sampling = msgspec.structs.replace(sampling, num_logprobs=0)
    return GenerationCall(
        model=body.model,
        prompts=prompts,
        sampling=sampling,
        num_sequences=num_sequences,
        best_of=best_of if beams is None else beams.width,
        beams=beams,
        deadlines=ANY_TIME if fields.deadlines is None else ANY_TIME.replaced_by(fields.deadlines),
        is_stream=bool(fields.stream),
        constraint=constraint_of(fields, text_format, format_param),
        includes_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
        wants_timings=bool(fields.timings),
        tells_queue=isinstance(fields.timings, TimingsFields) and fields.timings.queue,
        tokens=wishes,
        echo=echo,
        cache_salt=fields.cache_salt or "",
        context=_context_of(fields.context_policy),
        is_resumable=bool(fields.resumable),
        speculates=fields.speculation is not False and beams is None,
        priority=fields.priority,
        unknown_fields=body.unknown_fields,
        **own,
    )


def _token_wishes(fields: SamplingFields, num_logprobs: int | None) -> TokenWishes:
    options = fields.stream_options or StreamOptions()
    shown = TokenWishes(
        num_logprobs,
        tells_sampled=isinstance(fields.timings, TimingsFields) and fields.timings.tokens,
        counts_usage=bool(options.include_usage and options.continuous_usage_stats),
    )
    if not isinstance(fields, ChoiceFields):
        return shown
    own = {"num_prompt_logprobs": fields.prompt_logprobs, "returns_ids": bool(fields.return_token_ids)}
    return msgspec.structs.replace(shown, **own)


def _context_of(asked: Policy | ContextWishes | None) -> ContextWishes | None:
    """Raises InvalidRequest: budgets, and nothing may be left out."""
    if isinstance(asked, ContextWishes) and asked.type is Policy.ERROR and asked.limits != Budgets():
        message = "A budget needs a truncation type that drops something, such as drop_oldest_turns."
        raise InvalidRequest(message, "context_policy.type")
    return ContextWishes(type=asked) if isinstance(asked, Policy) else asked


# What says how tokens are sampled, which beams are not. The model's own defaults of these do not hold for them.
_BEAM_SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_ALSO_NEUTRAL = {"temperature": 1, "top_k": -1, "top_n_sigma": 0}


def beams_of(fields: SamplingFields, num_answers: int) -> Beams | None:
    """The beam search that a request asks for; None: none.

    Args:
        num_answers: of it, at least.

    Raises:
        InvalidRequest: it asks for beams and for what they cannot do.
    """
    width = fields.beam_width if (fields.beam_width or 0) > 1 else None
    param = "beam_width" if fields.beam_width else "use_beam_search"
    if width is None and not fields.use_beam_search:
        alone = "length_penalty" if fields.length_penalty not in (None, 1) else "early_stopping"
        if alone == "length_penalty" or fields.early_stopping:
            raise InvalidRequest(f"{alone} applies to beam search only. Send beam_width, or leave it out.", alone)
        return None
    width = width or num_answers
    if not num_answers <= width <= MOST_BEAMS:
        message = f"A beam search has from n to {MOST_BEAMS} beams: n is {num_answers}, and beam_width {width}."
        raise InvalidRequest(message, "n" if num_answers > MOST_BEAMS else "beam_width")
    for name, value in _BEAM_SAMPLING.items():
        if getattr(fields, name) not in (None, value, _ALSO_NEUTRAL.get(name)):
            raise InvalidRequest(
                f"{name} cannot be combined with {param}: beam search does not sample. Leave it out.", name
            )
    for name in ("logit_bias", "stop", "speculation"):
        if getattr(fields, name):
            raise InvalidRequest(f"{name} cannot be combined with {param}. Leave one of them out.", name)
    return Beams(
        width,
        1.0 if fields.length_penalty is None else fields.length_penalty,
        False if fields.early_stopping is None else fields.early_stopping,
    )


def _sampling_params(
    fields: SamplingFields, defaults: GenerationDefaults, max_tokens: int | None, wishes: TokenWishes, echo: bool
) -> SamplingParams:
    values: dict[str, Any] = dict(zip(_DEFAULT_NAMES, _default_values(defaults), strict=True))
    if max_tokens is not None and max_tokens < UNLIMITED_TOKENS:
        values["max_tokens"] = max_tokens
    values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
    for name, value in zip(_SAMPLING_NAMES, _sampling_values(fields), strict=True):
        if value is not None:
            values[name] = value
    if not 0 <= values["min_tokens"] <= values["max_tokens"]:
        raise InvalidRequest("min_tokens must be from 0 to max_tokens.", "min_tokens")
    for name, least in _SHARES.items():
        values[name] = min(max(values.get(name, 1.0), least), 1.0)
    if values["temperature"] < _GREEDY_TEMPERATURE:
        values["temperature"] = 0.0
    if not 0 < values["top_k"] < defaults.vocab_size:
        values["top_k"] = 0
    has_dry = values.get("dry_multiplier", 0) > 0 and values.get("dry_penalty_last_n") != 0
    values["dry_multiplier"] = values["dry_multiplier"] if has_dry else 0.0
    values["dry_sequence_breakers"] = tuple(fields.dry_sequence_breakers or DEFAULT_BREAKERS) if has_dry else ()
    if values.get("repeat_last_n") == 0:  # no token counts
        values |= _NO_PENALTIES
    if _NO_PENALTIES.items() <= ({**_NO_PENALTIES} | values).items():  # a window of nothing costs nothing
        values["repeat_last_n"] = -1
    if fields.seed is not None:
        check_range("seed", fields.seed, _SEED["minimum"], _SEED["maximum"])
        values["seed"] = None if fields.seed == ANY_SEED else fields.seed % 2**64
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if len(stops) > defaults.limits.num_stops:
        raise InvalidRequest(f"stop must have at most {defaults.limits.num_stops} strings.", "stop")
    values["stop"] = stops
    values["stop_token_ids"] = checked_ids(fields.stop_token_ids or [], "stop_token_ids", defaults.vocab_size)
    values["logit_bias"] = _logit_bias(fields.logit_bias or {}, isinstance(fields, ClampedFields), defaults)
    num_logprobs, num_prompt_logprobs = wishes.num_logprobs, wishes.num_prompt_logprobs
    if num_logprobs is None and wishes.param is not None:
        num_logprobs = 0  # the engine delivers single tokens only with their logprobs
    if num_prompt_logprobs is None and echo:
        num_prompt_logprobs = wishes.num_logprobs
    return SamplingParams(**values, num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs)


def _check_prompt_logprobs(fields: ChoiceFields, num_echoed: int | None, limits: RequestLimits) -> None:
    """num_echoed: logprobs that an echoed prompt has; None: no prompt is echoed, or without logprobs."""
    num = fields.prompt_logprobs
    if num is None:
        return
    check_range("prompt_logprobs", num, 0, limits.num_top_logprobs)
    if fields.stream:
        message = "prompt_logprobs cannot be streamed. Leave stream out, or send false."
        raise InvalidRequest(message, "prompt_logprobs")
    if num_echoed not in (None, num):
        message = f"prompt_logprobs must equal logprobs ({num_echoed}) when the prompt is echoed."
        raise InvalidRequest(message, "prompt_logprobs")


def _logit_bias(
    given: Mapping[str, float | bool] | _Pairs, is_clamped: bool, defaults: GenerationDefaults
) -> tuple[tuple[int, float], ...]:
    """By id: the sum of its pairs, or BANNED, as the suppressed ids are."""
    most, vocab_size = defaults.limits.num_logit_biases, defaults.vocab_size
    if len(given) > most:
        raise InvalidRequest(f"logit_bias must have at most {most} entries.", "logit_bias")
    by_id: dict[int, float] = {}
    for key, bias in ((str(key), bias) for key, bias in (given.items() if isinstance(given, Mapping) else given)):
        shown = key[:MAX_SHOWN_KEY]
        param = f"logit_bias[{shown}]"
        if not _is_id(key, vocab_size):
            message = f"logit_bias has the key {shown!r}: its keys must be token ids from 0 to {vocab_size - 1}."
            raise InvalidRequest(message, param)
        if bias is True:
            raise InvalidRequest("logit_bias must have numbers, or false for ids that must not occur.", param)
        if not is_clamped and bias is not False:
            check_range(param, bias, -100, 100)
        added = BANNED if bias is False else min(max(bias, -MOST_BIAS), MOST_BIAS)
        by_id[int(key)] = max(by_id.get(int(key), 0.0) + added, BANNED)
    return tuple((by_id | dict.fromkeys(defaults.suppressed_ids, BANNED)).items())


def _is_id(key: str, vocab_size: int) -> bool:
    """Whether key is an id in the one way of writing it: "07" beside "7" would name a token twice."""
    return len(key) <= 20 and key.isascii() and key.isdecimal() and str(int(key)) == key and int(key) < vocab_size


def num_logprobs_of(has_logprobs: bool | None, top_logprobs: int | None, limits: RequestLimits) -> int | None:
    """How many of the likeliest tokens an answer has beside each of its own; None: no logprobs.

    Raises:
        InvalidRequest: `top_logprobs` without `logprobs: true`, or too many.
    """
    num_logprobs = top_logprobs or 0
    check_range("top_logprobs", num_logprobs, 0, limits.num_top_logprobs)
    if not has_logprobs and num_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", "top_logprobs")
    return num_logprobs if has_logprobs else None


def checked_ids(ids: list[int], param: str, vocab_size: int) -> tuple[int, ...]:
    """Raises InvalidRequest: an id is not in the vocabulary."""
    if any(min(piece) < 0 or max(piece) >= vocab_size for piece in pieces(ids)):
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        where = f"{param}[{position}]"
        raise InvalidRequest(f"{where} is {ids[position]}: token ids are from 0 to {vocab_size - 1}.", where)
    return tuple(ids)


def check_range(param: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest: the value is outside of a range that no annotation can have."""
    if not low <= value <= high:  # NaN fails every comparison
        raise InvalidRequest(f"{param} must be from {low} to {high}.", param)
