"""What every generating surface (chat, completions, responses) is to a generation: a parser, and writers of answers.

A surface knows JSON and nothing else: no sockets, no engine, no clock. Parsing is strict where a field would change the
output and lenient where the field is unknown (docs/api.md). Thread: loop.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import msgspec

from core.errors import ServiceError
from core.types import Delta, FinishReason, SamplingParams, TokenLogprobs, Usage
from server.gate.tenants import ANY_TIME, Deadlines
from server.wire.messages import TextFrame

UNLIMITED_TOKENS = 2**31 - 1  # max_tokens when the request names none: it is cut to the context


class TextPrompt(msgspec.Struct, frozen=True):
    text: str
    adds_special_tokens: bool = True  # as the model wants them around a raw text


class IdsPrompt(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]


class ChatPrompt(msgspec.Struct, frozen=True):
    """Messages for the chat template: content already flattened to one string per message.

    Args:
        param: the request's field that they came in.
    """

    messages: tuple[dict[str, Any], ...]
    param: str = "messages"


# Of ours, in a whole answer or a stream's last chunk: "timings" on request, "steploop" where there is something to say
Extras = dict[str, Any]
Prompt = TextPrompt | IdsPrompt | ChatPrompt


class TokenWishes(msgspec.Struct, frozen=True):
    """What an answer tells of single tokens.

    Args:
        num_logprobs: with each token, of so many that were likeliest; None: none.
        num_prompt_logprobs: likewise of the prompt's, in vLLM's form.
        returns_ids: of the prompt, and of what is said.
        counts_usage: in each chunk of a stream.
    """

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    returns_ids: bool = False
    counts_usage: bool = False

    @property
    def param(self) -> str | None:
        """The field that asks for any of it."""
        asked = {
            "logprobs": self.num_logprobs is not None,
            "prompt_logprobs": self.num_prompt_logprobs is not None,
            "return_token_ids": self.returns_ids,
            "stream_options.continuous_usage_stats": self.counts_usage,
        }
        return next((name for name, is_asked in asked.items() if is_asked), None)


class RequestLimits(msgspec.Struct, frozen=True):
    """What one request may ask for. Evaluation comes in batches, with n for pass@k and a list of stop strings."""

    num_choices: int = 64
    num_prompts: int = 256
    num_stops: int = 16
    num_logit_biases: int = 300
    num_top_logprobs: int = 20


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What the model's generation_config.json says, and the limits that the parser checks against."""

    vocab_size: int  # width of the logits: logit_bias ids and stop ids stay below it
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int = UNLIMITED_TOKENS
    suppressed_ids: tuple[int, ...] = ()  # never sampled, whatever a request asks
    limits: RequestLimits = RequestLimits()


# By the model's name, None: the one that there is; gives its name, too. Raises for one that the caller may not use
DefaultsOf = Callable[[str | None], tuple[str, GenerationDefaults]]


class GenerationCall(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request of any surface. Choice p * num_sequences + i is sequence i of prompt p."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    num_sequences: int = 1
    cache_salt: str = ""  # prompts are cached for the same salt only
    priority: int | None = None  # the class it asks for: higher goes first; None: its tenant's
    deadlines: Deadlines = ANY_TIME  # that it asks for
    is_stream: bool = False
    includes_usage: bool = False  # stream_options.include_usage
    wants_timings: bool = False
    tells_queue: bool = False  # comments on its place in the queue and its prefill, of a stream
    echo: bool = False  # completions: the prompt comes before the text
    tokens: TokenWishes = TokenWishes()
    wire: Any = None  # the surface's own parsed struct, for what its answer repeats (responses echoes its parameters)
    unknown_fields: tuple[str, ...] = ()  # of the body's top level; ignored, but counted


class ReplyContext(msgspec.Struct, frozen=True):
    """What an answer needs beside the call.

    Args:
        reply_id: unique; the surface puts its own prefix before it ("chatcmpl-").
        created_s: unix time.
        unix_clock: tells it.
        fingerprint: of what computes the answer: another one may say other tokens for the same seed.
        token_str: id to text, and to its bytes, for logprobs.
        prompt_lengths: in tokens, one per prompt.
        prompt_texts: of completions with echo, one per prompt; prompt_ids: likewise, as they were computed, and where
            they are asked for.
        special_ids: of the tokens that no text shows.
    """

    reply_id: str
    created_s: int
    model: str
    unix_clock: Callable[[], float]
    fingerprint: str
    token_str: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    prompt_lengths: tuple[int, ...] = ()
    prompt_texts: tuple[str, ...] = ()
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    special_ids: Set[int] = frozenset()


class Choice(msgspec.Struct):
    """One finished choice of an answer that is not streamed. Logprobs are as Delta has them."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    stop_logprobs: TokenLogprobs | None = None
    prompt_logprobs: "PromptLogprobs | None" = None


class PromptLogprobs(Protocol):
    """What an answer that is not streamed says of its prompt, put into its form as it comes: a long one takes long."""

    def add_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """The next of the prompt's tokens after its first."""
        ...


class StreamReply(Protocol):
    """Writes one streamed answer as SSE bytes. Each call returns whole events, or b"" for none."""

    def start(self) -> bytes:
        """What comes before the first delta. Called once, when the head goes out."""
        ...

    def text(self, choice: int, text: str) -> bytes:
        """Of newly sampled tokens, with nothing else to tell of them; not empty."""
        ...

    def text_frame(self, choice: int) -> TextFrame | None:
        """The hot path: what text() puts around the text's JSON string; None: that changes."""
        ...

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Text that comes with logprobs, or with the choice's end."""
        ...

    def end(self, usage: Usage, extras: Extras) -> bytes:
        """After the last delta of all choices, up to and including the stream's own end mark.

        Args:
            extras: stand in its last chunk.
        """
        ...

    def error(self, error: ServiceError) -> bytes:
        """Instead of end(): the stream breaks off here."""
        ...


class Surface(Protocol):
    """One way of asking for tokens."""

    def parse(self, body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
        """
        Args:
            defaults_of: asked before any field is held against what the model is.

        Raises:
            InvalidRequest: with `param`, the path of the field to mend.
            ServiceError: what defaults_of raises.
        """
        ...

    def stream_reply(self, call: GenerationCall, context: ReplyContext) -> StreamReply: ...

    def prompt_logprobs(self, call: GenerationCall, context: ReplyContext, choice: int) -> PromptLogprobs | None:
        """Of a choice of an answer that is not streamed, where they are asked for."""
        ...

    def whole_reply(
        self,
        call: GenerationCall,
        context: ReplyContext,
        choices: Sequence[Choice],
        usage: Usage,
        extras: Extras,
    ) -> bytes: ...
