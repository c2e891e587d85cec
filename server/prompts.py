"""From a request's body to what the engine is asked: parsed, checked against text rules, templated, tokenized.

Nothing here waits. A long body is read on another thread (Generations.compute): what is here changes nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from core.chat_template import ChatTemplate, max_text_chars
from core.errors import ContextLengthExceeded, InvalidRequest, context_overflow
from core.tokenizer import Tokenizer
from core.types import Request, SamplingParams
from server.api.fields import ChatPrompt, GenerationCall, GenerationDefaults, IdsPrompt, Prompt, TextPrompt
from server.api.models import ServedModel, find_model
from server.api.replies import ReplyContext, Surface
from server.gate.identity import Caller
from server.gate.tenants import ANY_TIME, Tenant
from server.gate.text_rules import rule_book
from server.observing.timing import Stage, StageMarks


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call, and its prompts as ids."""

    call: GenerationCall
    prompts: list[tuple[int, ...]]

    @property
    def continues_text(self) -> bool:
        """What is said goes on with the prompt, rather than being a text of its own."""
        return not isinstance(self.call.prompts[0], ChatPrompt)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """The model, as the loop knows it: how bodies become requests, and how many tokens fit.

    Args:
        cards: what /v1/models shows, one per name.
        max_sequences: that the engine runs at once.
        fingerprint: of the model and of what computes it.
    """

    cards: tuple[ServedModel, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    max_sequences: int
    defaults: GenerationDefaults
    unix_clock: Callable[[], float]
    fingerprint: str = "fp_steploop"

    def cards_for(self, tenant: Tenant) -> tuple[ServedModel, ...]:
        """The models that it may use."""
        return tuple(card for card in self.cards if tenant.models is None or card.id in tenant.models)

    def prepare(self, surface: Surface, body: bytes, tenant: Tenant, marks: StageMarks) -> Prepared:
        """
        Args:
            marks: told of the stages that it passes.

        Raises:
            ServiceError: the body is not fit, or asks for what the tenant or the model does not allow.
        """

        def defaults_of(model: str | None) -> tuple[str, GenerationDefaults]:
            return find_model(self.cards_for(tenant), model).id, self.defaults

        marks.enter(Stage.VALIDATE)
        call = surface.parse(body, defaults_of)
        params = [_param(prompt, i, len(call.prompts)) for i, prompt in enumerate(call.prompts)]
        rules = rule_book(tenant.text_rules)
        if rules.on_answer and (param := call.tokens.param) is not None:
            message = f"{param} would tell what the operator's text rules may hold back. Leave it out."
            raise InvalidRequest(message, param, "unsupported_parameter")
        if rules.on_prompt or (call.echo and rules.on_answer):
            for param, prompt in zip(params, call.prompts, strict=True):
                rules.check_prompt(self._texts_of(prompt), param, is_echoed=call.echo)
        if call.num_sequences > self.max_sequences:
            raise InvalidRequest(f"n must be at most {self.max_sequences} on this server.", "n")
        prompts = [
            self._encode_checked(prompt, param, marks) for param, prompt in zip(params, call.prompts, strict=True)
        ]
        marks.enter(Stage.OFFLOAD)
        return Prepared(call, prompts)

    def encode(self, prompt: Prompt, param: str = "prompt", marks: StageMarks | None = None) -> tuple[int, ...]:
        """Whatever form a prompt has, as ids.

        Args:
            marks: told of the stages that it passes.

        Raises:
            InvalidRequest: its text is longer than any that fits the context, so that nobody need count its tokens.
        """
        match prompt:
            case IdsPrompt(ids):
                return ids
            case TextPrompt(text, adds_special_tokens):
                self._check_length(text, param)
                if marks is not None:
                    marks.enter(Stage.TOKENIZE)
                return tuple(self.tokenizer.encode(text, adds_special_tokens))
            case ChatPrompt(messages, field_name):
                now = datetime.fromtimestamp(self.unix_clock())
                if marks is not None:
                    marks.enter(Stage.TEMPLATE)
                text = self.chat_template.render(messages, now=now, param=field_name)
                if marks is not None:
                    marks.enter(Stage.TOKENIZE)
                return tuple(self.tokenizer.encode_chat(text))

    def _encode_checked(self, prompt: Prompt, param: str, marks: StageMarks) -> tuple[int, ...]:
        """
        Raises:
            InvalidRequest: the prompt has no token, or leaves no room for one.
        """
        ids = self.encode(prompt, param, marks)
        if not ids:
            raise InvalidRequest("The prompt is empty. Send at least one token.", param)
        if len(ids) >= self.max_model_len:
            raise ContextLengthExceeded(num_tokens=len(ids), limit=self.max_model_len, param=param)
        return ids

    def _check_length(self, text: str, param: str) -> None:
        limit = max_text_chars(self.max_model_len)
        if len(text) > limit:
            but = f"the prompt has {len(text)} characters, and at most {limit} could fit"
            message = context_overflow(self.max_model_len, but, "Shorten the prompt.")
            raise InvalidRequest(message, param, "context_length_exceeded")

    def _texts_of(self, prompt: Prompt) -> list[str]:
        """What it says, each field of a message by itself: of names and reasoning too, which templates may show."""
        if isinstance(prompt, ChatPrompt):
            return [text for message in prompt.messages for name, text in message.items() if name != "role"]
        return [prompt.text if isinstance(prompt, TextPrompt) else self.tokenizer.decode(prompt.ids)]

    def requests_of(self, prepared: Prepared, request_id: str, arrived_s: float, caller: Caller) -> list[Request]:
        """One for each prompt.

        Raises:
            InvalidRequest: min_tokens is more than the context leaves.
        """
        call, tenant = prepared.call, caller.tenant
        # The server's own deadline is no wish to be served before others
        asked_ttft_s = ANY_TIME.replaced_by(tenant.deadlines).narrowed_by(call.deadlines).ttft_s
        return [
            Request(
                request_id=f"{request_id}-{i}" if i else request_id,
                prompt_ids=ids,
                sampling=self._sampling(call, len(ids)),
                arrival_s=arrived_s,
                num_sequences=call.num_sequences,
                tenant=caller.sharing_name,
                share=tenant.share,
                priority=tenant.priority_of(call.priority),
                deadline_s=arrived_s + asked_ttft_s if asked_ttft_s < math.inf else None,
                tells_progress=call.is_stream and call.tells_queue and i == 0,
                cache_domain=tenant.cache_salt_domain,
                cache_salt=call.cache_salt,
            )
            for i, ids in enumerate(prepared.prompts)
        ]

    def _sampling(self, call: GenerationCall, num_prompt_tokens: int) -> SamplingParams:
        """The call's, with max_tokens cut to what the context leaves."""
        context, min_tokens = self.max_model_len, call.sampling.min_tokens
        max_tokens = min(call.sampling.max_tokens, context - num_prompt_tokens)
        if min_tokens > max(max_tokens, self.defaults.min_tokens):
            but = f"min_tokens is {min_tokens}, and the prompt of {num_prompt_tokens} leaves {max_tokens}"
            message = context_overflow(context, but, "Ask for fewer tokens, or shorten the prompt.")
            raise InvalidRequest(message, "min_tokens", "context_length_exceeded")
        return msgspec.structs.replace(call.sampling, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))

    def reply_context(self, prepared: Prepared, request_id: str) -> ReplyContext:
        call, prompts, tokenizer = prepared.call, tuple(prepared.prompts), self.tokenizer
        hides_special = call.sampling.skip_special_tokens

        def text_of(prompt: Prompt, ids: tuple[int, ...]) -> str:
            return prompt.text if isinstance(prompt, TextPrompt) else tokenizer.decode(ids, hides_special)

        texts = tuple(map(text_of, call.prompts, prompts)) if call.echo else ()
        return ReplyContext(
            reply_id=request_id,
            created_s=int(self.unix_clock()),
            model=call.model,
            unix_clock=self.unix_clock,
            fingerprint=self.fingerprint,
            token_str=tokenizer.text_of,
            token_bytes=tokenizer.bytes_of,
            prompt_lengths=tuple(map(len, prompts)),
            prompt_texts=texts,
            prompt_ids=prompts if call.echo or call.tokens.returns_ids else (),
            special_ids=tokenizer.special_ids if hides_special else frozenset(),
        )


def _param(prompt: Prompt, position: int, num_prompts: int) -> str:
    """The field that a prompt came in."""
    if isinstance(prompt, ChatPrompt):
        return prompt.param
    return "prompt" if num_prompts == 1 else f"prompt[{position}]"
