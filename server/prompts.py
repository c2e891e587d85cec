"""From a request's body to the engine's requests: parse, check text rules, apply the chat template, tokenize.

Nothing here waits or changes state: a long body is processed on another thread (Generations.compute).
"""

import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from core.chat_template import ChatTemplate, max_text_chars
from core.constraints import GrammarKind
from core.context_policy import Budgets, Document, Message, Policy, select
from core.detokenizer import TokenTable
from core.errors import ContextLengthExceeded, ErrorKind, InvalidRequest, ServiceError
from core.grammar import Grammar, GrammarCompiler
from core.marked_text import MarkedText
from core.repetition import Breakers
from core.thought_grammar import AfterThought, ThoughtVocabulary
from core.thoughts import ThoughtFollower, ThoughtStart, follower, thought_start
from core.tokenizer import Tokenizer
from core.tool_detection import ThoughtStyle, ToolStyle
from core.tool_formats import HARMONY, THOUGHTS, markers_of, thought_markers_of
from core.tool_grammar import harmony_answers
from core.turns import Begun, Domain, TurnMemory
from core.types import Adapter, Pooling, Request, SamplingParams
from server.api.fields import (
    UNLIMITED_TOKENS,
    ChatPrompt,
    ContextWishes,
    GenerationCall,
    GenerationDefaults,
    IdsPrompt,
    MixedPrompt,
    PairPrompt,
    Prompt,
    TextPrompt,
)
from server.api.models import ServedModel
from server.api.reasoning import answer_parser
from server.api.replies import ReplyContext, Surface
from server.api.tools import call_constraint
from server.gate.identity import Caller
from server.gate.tenants import ANY_TIME, Tenant
from server.gate.text_rules import RuleBook, rule_book
from server.observing.timing import Stage, StageMarks

# Qwen3-Reranker's, as its model card has them: around a pair, and what counts as an answer
RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
IDENTITY = ("model_digest", "settings_digest", "version")
UNASKED_TOKENS = 1024  # of an answer whose length is not asked for, that a prompt which is cut leaves free
MOST_ECHOED = (
    1 << 19
)  # logprobs of prompts that are written for more than one answer: a quarter of a second of the loop
_END_MARK = "\ufdd0"  # behind a message that is continued, to find where it ends; no text has it


Computed = tuple[str | None, tuple[int, ...]]  # a prompt's ids, of a chat with its rendered text


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call, its prompts as token ids, the text of its answers' tokens, and its grammar.

    Args:
        context: what the context policy removed from its prompts; None: there is no policy.
        remember: called with the ids of each of its answers, and the text that a stop string cut off its end.
        poolings: of each prompt, if the call wants vectors.
    """

    call: GenerationCall
    prompts: list[tuple[int, ...]]
    table: TokenTable
    grammar: Grammar | AfterThought | None = None
    prediction_ids: tuple[int, ...] = ()
    remember: Callable[[Sequence[int], str], None] | None = None
    adapter: Adapter | None = None
    breakers: Breakers | None = None
    poolings: tuple[Pooling, ...] = ()
    context: dict[str, Any] | None = None

    @property
    def tells_tokens(self) -> bool:
        """Tokens are streamed one by one, so the first has its own deadline."""
        return self.call.beams is None

    @property
    def continues_text(self) -> bool:
        """The output continues the prompt's text, instead of starting a new one."""
        prompt = self.call.prompts[0]
        return not isinstance(prompt, ChatPrompt) or prompt.continues_last


@dataclass(slots=True, eq=False)
class PromptReader:
    """The model as the loop knows it: how bodies become requests, and how many tokens fit.

    Args:
        cards: what /v1/models shows, one per name, the model's own first; replaced as adapters come and go.
        max_sequences: that the engine runs at once.
        make_compiler: for the model's vocabulary; takes a while at the first call.
        thoughts: of that vocabulary; None: the model does not reason.
        fingerprint: of the model and the software and hardware that run it ...
        identity: ... by its parts: see identity_of.
        records: requests are recorded, so each needs a known seed.
        turns: of chats, with the ids that they were computed as; None: each chat is tokenized from its text alone.
    """

    cards: tuple[ServedModel, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    max_sequences: int
    defaults: GenerationDefaults
    unix_clock: Callable[[], float]
    make_compiler: Callable[[], GrammarCompiler]
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    fingerprint: str = "fp_steploop"
    identity: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(IDENTITY, ""))
    records: bool = False
    thoughts: ThoughtVocabulary | None = None
    turns: TurnMemory | None = None
    _template_ids: list[list[int]] | None = None  # of RERANK_TEMPLATE

    def cards_for(self, tenant: Tenant) -> tuple[ServedModel, ...]:
        """The models that the tenant may use."""
        return usable(self.cards, tenant)

    def prepare(self, surface: Surface, body: bytes, tenant: Tenant, marks: StageMarks) -> Prepared:
        """Parse and tokenize a request's body.

        Args:
            marks: records the stages.

        Raises:
            ServiceError: the body is invalid, or the tenant or the model does not allow it.
        """
        marks.enter(Stage.VALIDATE)
        cards = self.cards_for(tenant)  # once: others may load and unload adapters meanwhile

        def defaults_of(model: str | None) -> tuple[str, GenerationDefaults]:
            found = find_model(cards, model)
            check_task(found, surface.does)
            return found.id, self.defaults

        call = self._seeded(self._held(surface.parse(body, defaults_of)))
        num, name = len(call.prompts), call.prompts_param
        prompts = [(prompt, _param(prompt, i, num, name)) for i, prompt in enumerate(call.prompts)]
        self._check_rules(call, prompts, rule_book(tenant.text_rules))
        _check_sequences(call, self.max_sequences)
        domain = tenant.cache_salt_domain, call.cache_salt
        poolings: tuple[Pooling, ...] = ()
        context = None
        if call.pooling is not None:
            marks.enter(Stage.TOKENIZE)
            made, pooling = [self._encode_pooled(*one, call) for one in prompts], call.pooling.pooling
            computed: list[Computed] = [(None, ids) for ids, _ in made]
            poolings = tuple(
                msgspec.structs.replace(pooling, second_from=second) if second else pooling for _, second in made
            )
        else:
            computed, context = self._fit(call, prompts, tenant, partial(self._computed, marks=marks, domain=domain))
        marks.enter(Stage.OFFLOAD)
        ids, text = [ids for _, ids in computed], computed[0][0]
        _check_echo(call, ids)
        call = _with_thought_start(call, text)
        return Prepared(
            call,
            ids,
            self._table_of(call),
            prediction_ids=self._predicted(call),
            remember=None if text is None else self._rememberer(call, text, ids[0], domain),
            adapter=find_model(cards, call.model).adapter,
            breakers=self._breakers(call.sampling),
            poolings=poolings,
            context=context,
        )

    def _check_rules(self, call: GenerationCall, prompts: Sequence[tuple[Prompt, str]], rules: RuleBook) -> None:
        """
        Args:
            prompts: each with its field of the request.

        Raises:
            ServiceError: a prompt breaks the tenant's text rules, or the call requests tokens that would bypass
                them.
        """
        if rules.on_answer and (param := call.tokens.param) is not None:
            message = f"{param} would show text that the operator's text rules may withhold. Leave it out."
            raise InvalidRequest(message, param, "unsupported_parameter")
        if rules.on_prompt or (call.echo and rules.on_answer):
            for prompt, param in prompts:
                rules.check_prompt(self._texts_of(prompt), param, is_echoed=call.echo)

    def _fit(
        self,
        call: GenerationCall,
        prompts: Sequence[tuple[Prompt, str]],
        tenant: Tenant,
        compute: Callable[[Prompt, str], Computed],
    ) -> tuple[list[Computed], dict[str, Any] | None]:
        """Compute the prompts, by the context policy of the call or tenant; and what a policy removed."""
        wishes = call.context or ContextWishes(type=tenant.context_policy)
        if wishes == ContextWishes():
            return [compute(*one) for one in prompts], None
        fitted = [self._fitted(*one, wishes, call.sampling.max_tokens, compute) for one in prompts]
        dropped = [
            {"prompt": i} | one if len(fitted) > 1 else one for i, (_, some) in enumerate(fitted) for one in some
        ]
        computed = [one for one, _ in fitted]
        num_kept = sum(len(ids) for _, ids in computed)
        return computed, {"policy": wishes.type, "dropped": dropped, "kept_tokens": num_kept}

    def _rememberer(
        self, call: GenerationCall, text: str, ids: tuple[int, ...], domain: Domain
    ) -> Callable[[Sequence[int], str], None] | None:
        """Prepared.remember for a chat."""
        if self.turns is None or not self.turns.keeps_answers:
            return None
        may_think = call.thought is not None and call.thought.start is ThoughtStart.FREE
        num_unshown = None if call.tools is None else partial(_num_unshown, call)
        return partial(self.turns.add, Begun(domain, text, np.array(ids, np.int32), may_think, num_unshown))

    def _breakers(self, sampling: SamplingParams) -> Breakers | None:
        return self.tokenizer.breakers(sampling.dry_sequence_breakers) if sampling.dry_multiplier > 0 else None

    def count(self, call: GenerationCall, tenant: Tenant) -> int:
        """The tokens of the prompts that the call would compute; of prompts that no policy makes fit, all.

        Raises: as encode.
        """
        domain = tenant.cache_salt_domain, call.cache_salt
        wishes = call.context or ContextWishes(type=tenant.context_policy)
        if wishes != ContextWishes():
            compute = partial(self._computed, marks=StageMarks(self.unix_clock), domain=domain)
            most, param = call.sampling.max_tokens, call.prompts_param
            with suppress(ContextLengthExceeded):
                return sum(len(self._fitted(one, param, wishes, most, compute)[0][1]) for one in call.prompts)
        return sum(len(self.encode(one, domain=domain)) for one in call.prompts)

    def _computed(self, prompt: Prompt, param: str, marks: StageMarks, domain: Domain) -> Computed:
        """Raises: as _rendered and _encode_checked."""
        text = self._rendered(prompt, marks) if isinstance(prompt, ChatPrompt) else None
        return text, self._encode_checked(prompt, param, text, marks, domain)

    def _fitted(
        self,
        prompt: Prompt,
        param: str,
        wishes: ContextWishes,
        max_tokens: int,
        compute: Callable[[Prompt, str], Computed],
    ) -> tuple[Computed, list[dict[str, Any]]]:
        """As much of a prompt as fits with its answer, tokenized; and what was removed.

        Args:
            max_tokens: of the answer, which gets at most half of the context.

        Raises: as _computed, for the whole prompt, if even its shortest form does not fit.
        """
        most = self.max_model_len
        room = most - min(max_tokens, most // 2 if max_tokens < UNLIMITED_TOKENS else min(most // 4, UNASKED_TOKENS))
        whole, error = None, None
        try:
            whole = compute(prompt, param)
        except ContextLengthExceeded as exceeded:
            error = exceeded
        limits = wishes.limits
        if whole is not None and len(whole[1]) <= room and limits == Budgets():
            return whole, []
        if isinstance(prompt, ChatPrompt):

            def changed(messages: Sequence[Message], documents: Sequence[Document]) -> ChatPrompt:
                return msgspec.structs.replace(prompt, messages=tuple(messages), documents=tuple(documents))

            def fits(messages: Sequence[Message], documents: Sequence[Document]) -> bool:
                try:
                    return len(compute(changed(messages, documents), param)[1]) <= room
                except ContextLengthExceeded:
                    return False

            found = select(wishes.type, limits, prompt.messages, prompt.documents, fits, self._num_tokens, room)
            if found is not None:
                return compute(changed(found.messages, found.documents), param), found.dropped
        elif wishes.type is Policy.MIDDLE and not (isinstance(prompt, TextPrompt) and prompt.suffix is not None):
            ids = self.encode(prompt, param)
            if (num_lost := len(ids) - room) > 0:
                start = room // 2
                kept = (*ids[:start], *ids[start + num_lost :])
                return (None, kept), [{"tokens": [start, start + num_lost]}]
        if error is not None:
            raise error
        assert whole is not None, "it was computed, or could not be"
        return whole, []

    def _num_tokens(self, text: str) -> int:
        """An estimate, so that a long text is not tokenized only to be removed."""
        if len(text) > max_text_chars(self.max_model_len):
            return len(text) // 4
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def _predicted(self, call: GenerationCall) -> tuple[int, ...]:
        """The ids of the predicted answer, as many as the context allows."""
        text = call.prediction[: max_text_chars(self.max_model_len)]
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)[: self.max_model_len]) if text else ()

    def _table_of(self, call: GenerationCall) -> TokenTable:
        """The text that the answer's tokens have: with what its parsers read."""
        if not call.sampling.skip_special_tokens:
            return self.tokenizer.full_table
        thought, tools = call.thought, call.tools
        return self.table_with(thought.style if thought else None, tools.style if tools else None)

    def table_with(self, thought: ThoughtStyle | None, tools: ToolStyle | None) -> TokenTable:
        """The text of tokens, special ones by name where a parser of such thoughts or calls looks for them."""
        names = frozenset[str]() if tools is None else markers_of(tools.format)
        return self.tokenizer.table_showing(names if thought is None else names | thought_markers_of(thought.name))

    def _seeded(self, call: GenerationCall) -> GenerationCall:
        """With a new seed, if the answer or a record reports it and the request has none."""
        if not (call.wants_timings or self.records) or call.sampling.seed is not None:
            return call
        sampling = msgspec.structs.replace(call.sampling, seed=secrets.randbits(63))
        return msgspec.structs.replace(call, sampling=sampling)

    def _held(self, call: GenerationCall) -> GenerationCall:
        """With what holds its calls, or all of Harmony's messages."""
        prompt, constraint = call.prompts[0], call.constraint
        continues_text = isinstance(prompt, ChatPrompt) and prompt.continues_last
        if call.tools is None:
            is_harmony = call.thought is not None and call.thought.style.name == HARMONY
            if constraint is None or continues_text or not is_harmony:
                return call
            frame = harmony_answers((), self.special_tokens, self.eos_ids, final="@answer", param=constraint.param)
            return msgspec.structs.replace(call, constraint=replace(constraint, frame=frame))
        constraint = call_constraint(call.tools, self.special_tokens, self.eos_ids, call.constraint, continues_text)
        return msgspec.structs.replace(call, constraint=constraint)

    def encode(self, prompt: Prompt, param: str = "prompt", domain: Domain | None = None) -> tuple[int, ...]:
        """The ids of a prompt in any form.

        Args:
            domain: whose chats it may continue.

        Raises:
            InvalidRequest: its text is too long to fit the context, which is known without tokenizing it.
        """
        if isinstance(prompt, IdsPrompt):
            return prompt.ids
        if isinstance(prompt, PairPrompt):
            return self._encode_pair(prompt, param)[0]
        if isinstance(prompt, MixedPrompt):
            self._check_length("".join(part for part in prompt.parts if isinstance(part, str)), param)
            each = (
                self.tokenizer.encode(part, add_special_tokens=i == 0) if isinstance(part, str) else part
                for i, part in enumerate(prompt.parts)
            )
            return tuple(chain.from_iterable(each))
        if isinstance(prompt, TextPrompt):
            self._check_length("".join([prompt.text, prompt.suffix or "", *chain(*prompt.extra)]), param)
            if prompt.suffix is not None:
                return self._encode_around(prompt, prompt.suffix)
            return tuple(self.tokenizer.encode(prompt.text, prompt.adds_special_tokens))
        return self._encode_chat(self._rendered(prompt), domain)

    def _encode_chat(self, text: str, domain: Domain | None) -> tuple[int, ...]:
        if self.turns is None or domain is None:
            return tuple(self.tokenizer.encode_chat(text))
        return tuple(self.turns.encode(text, domain))

    def _encode_around(self, prompt: TextPrompt, suffix: str) -> tuple[int, ...]:
        ids = self.tokenizer.encode_around(prompt.text, suffix, prompt.adds_special_tokens, prompt.extra)
        if ids is None:
            message = "This model has no fill-in-the-middle tokens. Name another, or complete a text without a suffix."
            raise InvalidRequest(message, prompt.suffix_param, "unsupported_parameter")
        return tuple(ids)

    def _rendered(self, prompt: ChatPrompt, marks: StageMarks | None = None) -> str:
        """The prompt's text, rendered by the chat template."""
        if marks is not None:
            marks.enter(Stage.TEMPLATE)
        if prompt.documents and not self.chat_template.shows_documents:
            message = "This model's chat template shows no documents. Put their text into a message."
            raise InvalidRequest(message, "documents", "unsupported_parameter")
        messages = prompt.messages
        if prompt.continues_last:
            last = messages[-1]
            messages = (*messages[:-1], last | {"content": last["content"] + _END_MARK})
        text = self.chat_template.render(
            messages,
            now=datetime.fromtimestamp(self.unix_clock()),
            tools=prompt.tools or None,
            documents=prompt.documents or None,
            template_kwargs=prompt.template_kwargs,
            param=prompt.param,
            add_generation_prompt=prompt.begins_answer,
        )
        if not prompt.continues_last:
            return text
        if (end := text.rfind(_END_MARK)) < 0:
            where = prompt.last_param
            raise InvalidRequest(f"{where} cannot be continued: the model's chat template leaves it out.", where)
        return text[:end]

    def _encode_checked(
        self, prompt: Prompt, param: str, text: str | None, marks: StageMarks, domain: Domain
    ) -> tuple[int, ...]:
        """
        Args:
            text: of a chat, rendered.

        Raises:
            InvalidRequest: the prompt has no token.
            ContextLengthExceeded: it leaves no room for a token of output.
        """
        if not isinstance(prompt, IdsPrompt):
            marks.enter(Stage.TOKENIZE)
        ids = self.encode(prompt, param) if text is None else self._encode_chat(text, domain)
        if not ids:
            raise InvalidRequest("The prompt is empty. Send at least one token.", param)
        if len(ids) >= self.max_model_len:
            but = f"the prompt has {len(ids)} tokens"
            if len(ids) == self.max_model_len:
                but += ", which leaves none for an answer"
            raise ContextLengthExceeded(self.max_model_len, but, param)
        return ids

    def _encode_pooled(self, prompt: Prompt, param: str, call: GenerationCall) -> tuple[tuple[int, ...], int]:
        """The ids of a prompt that may fill the context, truncated at its end if the call wants that.

        Returns: also Pooling.second_from.

        Raises:
            InvalidRequest: it has no token, or is too long.
        """
        context, asked = self.max_model_len, call.truncate_to
        most = None if asked is None else context if asked < 0 else min(asked, context)
        second_from = 0
        if isinstance(prompt, PairPrompt):
            ids, second_from = self._encode_pair(prompt, param, most)
        else:
            ids = self.encode(prompt, param) if most is None else self._encode_cut(prompt, most)
        if len(ids) > context:
            but = f"{param} has {len(ids)} tokens"
            raise ContextLengthExceeded(context, but, param, "Shorten it, or send truncate_prompt_tokens: -1.")
        if not ids:
            raise InvalidRequest(f"{param} has no token. Send at least one.", param)
        return ids, second_from

    def _encode_cut(self, prompt: Prompt, most: int) -> tuple[int, ...]:
        """Like encode, with at most this many tokens; the model's special tokens around a text stay."""
        if not isinstance(prompt, TextPrompt):
            return self.encode(prompt)[:most]
        text = prompt.text[: max_text_chars(most)]
        whole = self.tokenizer.encode(text, prompt.adds_special_tokens)
        if len(whole) <= most:
            return tuple(whole)
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        num_added = len(whole) - len(plain)
        first = next((at for at in range(num_added) if whole[at:][: len(plain)] == plain), num_added)
        kept = max(0, most - num_added)
        return tuple((whole[: first + kept] + whole[first + len(plain) :])[:most])

    def _encode_pair(self, prompt: PairPrompt, param: str, most: int | None = None) -> tuple[tuple[int, ...], int]:
        """The ids of two texts, and where the second one begins, if the model distinguishes them.

        Args:
            most: number of ids; of a longer pair, the longer text is truncated; None: neither is.
        """
        style = self.defaults.pooling
        assert style is not None, "only models that score are given pairs"
        limit = max_text_chars(self.max_model_len)
        first, second = prompt.first, prompt.second
        if most is None:
            self._check_length(first + second, param)
        else:
            first, second = first[:limit], second[:limit]
        if not style.has_template:
            return self.tokenizer.encode_pair(first, second, most)
        if self._template_ids is None:
            self._template_ids = [self.tokenizer.encode(part, add_special_tokens=False) for part in RERANK_TEMPLATE]
        before, after = self._template_ids
        told = RERANK_INSTRUCTION if prompt.instruction is None else prompt.instruction
        text = f"<Instruct>: {told}\n<Query>: {first}\n<Document>: {second}"
        ids = self.tokenizer.encode_chat(MarkedText(text))
        room = len(ids) if most is None else max(0, most - len(before) - len(after))
        return (*before, *ids[:room], *after), 0

    def _check_length(self, text: str, param: str) -> None:
        limit = max_text_chars(self.max_model_len)
        if len(text) > limit:
            but = f"the prompt has {len(text)} characters, and at most {limit} could fit"
            raise ContextLengthExceeded(self.max_model_len, but, param)

    def _texts_of(self, prompt: Prompt) -> list[str]:
        """The prompt's text, each field of a message by itself: templates may show names and reasoning, too."""
        if isinstance(prompt, ChatPrompt):
            texts = [text for message in prompt.messages for name, text in message.items() if name != "role"]
            texts += prompt.documents
            return [text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in texts]
        if isinstance(prompt, PairPrompt):
            return [prompt.first, prompt.second, prompt.instruction or ""]
        if isinstance(prompt, TextPrompt):
            return [prompt.text, *([prompt.suffix] if prompt.suffix else ()), *chain(*prompt.extra)]
        return [self.tokenizer.decode(self.encode(prompt))]

    def requests_of(self, prepared: Prepared, request_id: str, arrived_s: float, caller: Caller) -> list[Request]:
        """The engine's requests, one for each prompt.

        Raises:
            InvalidRequest: min_tokens is more than the context allows.
        """
        call, tenant = prepared.call, caller.tenant
        # Only deadlines of tenants and requests move a request forward in the queue, not the server's own
        asked_ttft_s = ANY_TIME.replaced_by(tenant.deadlines).narrowed_by(call.deadlines).ttft_s
        return [
            Request(
                request_id=f"{request_id}-{i}" if i else request_id,
                prompt_ids=ids,
                sampling=self._sampling(call, len(ids)),
                arrival_s=arrived_s,
                num_sequences=call.num_computed,
                beams=call.beams,
                tenant=caller.sharing_name,
                share=tenant.share,
                priority=caller.priority_of(call.priority),
                deadline_s=arrived_s + asked_ttft_s if asked_ttft_s < math.inf else None,
                tells_progress=call.is_stream and call.tells_queue and i == 0,
                cache_domain=tenant.cache_salt_domain,
                cache_salt=call.cache_salt,
                adapter=prepared.adapter,
                grammar=prepared.grammar,
                breakers=prepared.breakers,
                speculates=call.speculates,
                prediction_ids=prepared.prediction_ids,
                tells_answer=prepared.remember is not None or self.records or call.tokens.tells_sampled,
                pooling=prepared.poolings[i] if prepared.poolings else None,
            )
            for i, ids in enumerate(prepared.prompts)
        ]

    def _sampling(self, call: GenerationCall, num_prompt_tokens: int) -> SamplingParams:
        """The call's sampling parameters, with max_tokens cut to what the context leaves."""
        context, min_tokens = self.max_model_len, call.sampling.min_tokens
        max_tokens = min(call.sampling.max_tokens, context - num_prompt_tokens)
        if min_tokens > max(max_tokens, self.defaults.min_tokens):
            but = f"min_tokens is {min_tokens}, and the prompt of {num_prompt_tokens} leaves {max_tokens}"
            raise ContextLengthExceeded(context, but, "min_tokens", "Ask for fewer tokens, or shorten the prompt.")
        prompt, stop_ids = call.prompts[0], call.sampling.stop_token_ids
        if isinstance(prompt, TextPrompt) and prompt.suffix is not None and not call.sampling.ignore_eos:
            stop_ids = (*stop_ids, *self.tokenizer.fill_end_ids)
        own = {"max_tokens": max_tokens, "min_tokens": min(min_tokens, max_tokens), "stop_token_ids": stop_ids}
        return msgspec.structs.replace(call.sampling, **own)

    def held(self, prepared: Prepared, grammar: Grammar | None) -> Prepared:
        """With what holds the answers: a grammar begins where their thought ends.

        Args:
            grammar: compiled, of the call's constraint.

        Raises:
            InvalidRequest: the answer continues a message that the grammar does not allow as a start.
        """
        thought = prepared.call.thought
        held: Grammar | AfterThought | None = grammar
        if self.thoughts is None or thought is None or thought.start is ThoughtStart.CLOSED:
            return replace(prepared, grammar=self._after_begun(prepared.call, grammar))
        if grammar is not None or thought.most_tokens is not None:
            held = AfterThought(self.thoughts, thought.start, grammar, thought.most_tokens)
        return replace(prepared, grammar=held)

    def _after_begun(self, call: GenerationCall, grammar: Grammar | None) -> Grammar | None:
        """What holds the rest of a message that the answer goes on with."""
        prompt, spec = call.prompts[0], call.constraint
        if not isinstance(prompt, ChatPrompt) or not prompt.continues_last or grammar is None or spec is None:
            return grammar
        if spec.param == "tools":  # it holds calls, and no text
            return grammar
        text = prompt.messages[-1]["content"]
        if call.thought is not None and call.thought.style.name != HARMONY:
            text = text.rpartition(THOUGHTS[call.thought.style.name].end)[2]
        begun = text if spec.kind is GrammarKind.REGEX else text.lstrip()  # templates trim it, and JSON may be indented
        if (rest := grammar.after(self.tokenizer.encode(begun, add_special_tokens=False))) is None:
            message = f"{spec.param} allows no answer that begins with {prompt.last_param}. Change one of them."
            raise InvalidRequest(message, prompt.last_param)
        return rest

    def surface_of(self, surface: Surface) -> Surface:
        return surface

    def follow_thought(self, call: GenerationCall) -> ThoughtFollower | None:
        """The tracker of the reasoning in one of its answers."""
        if call.thought is None:
            return None
        return follower(call.thought.style.name, call.thought.start, self.tokenizer.bytes_of)

    def reply_context(self, prepared: Prepared, request_id: str) -> ReplyContext:
        call, prompts, tokenizer = prepared.call, tuple(prepared.prompts), self.tokenizer
        adapter, identity = prepared.adapter, dict(self.identity)
        if adapter is not None:
            identity["model_digest"] += f"+{adapter.digest[:16]}"
        hides_special = call.sampling.skip_special_tokens

        def text_of(prompt: Prompt, ids: tuple[int, ...]) -> str:
            return prompt.text if isinstance(prompt, TextPrompt) else tokenizer.decode(ids, hides_special)

        texts = tuple(map(text_of, call.prompts, prompts)) if call.echo else ()
        return ReplyContext(
            reply_id=request_id,
            created_s=int(self.unix_clock()),
            model=call.model,
            unix_clock=self.unix_clock,
            fingerprint=self.fingerprint if adapter is None else f"{self.fingerprint}_{adapter.digest[:12]}",
            token_str=tokenizer.text_of,
            token_bytes=tokenizer.bytes_of,
            prompt_lengths=tuple(map(len, prompts)),
            prompt_texts=texts,
            prompt_ids=prompts if call.echo or call.tokens.returns_ids else (),
            special_ids=tokenizer.special_ids if hides_special else frozenset(),
            identity=identity,
            context=prepared.context,
        )


def _check_sequences(call: GenerationCall, most: int) -> None:
    """
    Raises:
        InvalidRequest: more sequences than run at once; or best_of or beams with a parameter that does not allow
            them.
    """
    is_search = call.beams is not None
    chosen = "beam_width" if is_search else "best_of"
    if call.num_computed > most:
        param = "n" if call.num_computed == call.num_sequences else chosen
        raise InvalidRequest(f"{param} must be at most {most} on this server.", param)
    if call.is_stream and (is_search or call.num_computed > call.num_sequences):
        raise InvalidRequest(f"{chosen} cannot stream: the best answers are known only at the end.", "stream")
    if is_search:
        _check_beams(call)


def _check_echo(call: GenerationCall, ids: Sequence[tuple[int, ...]]) -> None:
    """Raises InvalidRequest: writing the prompts' logprobs once for each of their answers would hold everybody up."""
    if not call.echo or call.tokens.num_logprobs is None or call.num_sequences == 1:
        return
    num = call.num_sequences * sum(map(len, ids)) * (1 + call.tokens.num_logprobs)
    if num > MOST_ECHOED:
        message = (
            f"The prompt's logprobs, once for each of n answers, would be {num:,} numbers of at most {MOST_ECHOED:,}."
        )
        raise InvalidRequest(f"{message} Send n: 1, shorter prompts or fewer logprobs.", "n")


def _check_beams(call: GenerationCall) -> None:
    """Raises InvalidRequest: something holds the answer, which no beam search follows, or drafts it."""
    held = None if call.constraint is None else "tools" if call.tools is not None else call.constraint.param
    if call.thought is not None and call.thought.most_tokens is not None:
        held = held or "thinking_token_budget"
    if param := held or ("prediction" if call.prediction else None):
        raise InvalidRequest(f"{param} cannot be combined with beams. Leave one of them out.", param)
    if call.sampling.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1 with beams.", "max_tokens")


def _num_unshown(call: GenerationCall, text: str) -> int:
    """As Begun.num_unshown."""
    parser = answer_parser(call.thought, call.tools, call.constraint)
    assert parser is not None, "the call has tools"
    parser.feed(text)
    parser.close(is_cut=True)
    return parser.num_unshown


def _with_thought_start(call: GenerationCall, text: str | None) -> GenerationCall:
    """text: of its prompt, where that is a chat."""
    if call.thought is None or text is None:
        return call
    prompt, turn = call.prompts[0], None
    if isinstance(prompt, ChatPrompt) and prompt.continues_last:
        begun = prompt.messages[-1]["content"].lstrip()  # templates trim the beginning
        turn = text.rfind(begun) if begun else len(text)
    start = thought_start(call.thought.style.name, text, turn)
    return msgspec.structs.replace(call, thought=msgspec.structs.replace(call.thought, start=start))


def usable(models: Iterable[ServedModel], tenant: Tenant) -> tuple[ServedModel, ...]:
    """The models that the tenant may use, by each name: a permitted model includes all its names."""
    allowed = tenant.models
    return tuple(one for one in models if allowed is None or one.id in allowed or one.name in allowed)


def find_model(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model that a request names.

    Args:
        models: those that its caller may use.
        name: None: the only model that is not an adapter, by its own name.

    Raises:
        InvalidRequest: no name, and several models.
        ServiceError: none of the models has that name; the message lists them.
    """
    if name is None:
        models = [model for model in models if model.parent is None] or models
    if name is None and len({model.name for model in models}) > 1:
        names = ", ".join(model.id for model in models)
        raise InvalidRequest(f"model is missing. Served: {names}.", "model", "missing_required_parameter")
    for model in models:
        if name is None or model.id == name:
            return model
    what = "There is no model" if name is None else f"There is no model {name[:64]!r}"
    if models:
        message = f"{what} here. Served: {', '.join(model.id for model in models)}."
    else:
        message = (
            f"{what} that you may use: your tenant may use none of the models that are served here. Ask the operator."
        )
    raise ServiceError(ErrorKind.NOT_FOUND, message, "model_not_found", "model")


def check_task(model: ServedModel, asked: str) -> None:
    """Raises InvalidRequest: the model does something else."""
    if asked in model.tasks:
        return
    is_given = model.tasks[0]
    makes = {"generate": "generates text", "embed": "makes embeddings", "score": "scores texts by a query"}[is_given]
    paths = {"generate": "/v1/chat/completions", "embed": "/v1/embeddings", "score": "/v1/rerank or /v1/score"}
    message = f"The model {model.id!r} {makes}, and nothing else. Use it with {paths[is_given]}, or name another model"
    if is_given == "generate":
        message += "; its operator can enable embeddings with --pooling last or mean"
    raise InvalidRequest(f"{message}.", "model", "unsupported_model")


def own_name(models: Sequence[ServedModel], name: str) -> str:
    """The model's own name, whichever of its names was requested."""
    return next((model.name for model in models if model.id == name), name)  # an adapter may have been unloaded


def _param(prompt: Prompt, position: int, num_prompts: int, name: str) -> str:
    """The request's field that a prompt came in. name: of a text's."""
    if isinstance(prompt, ChatPrompt):
        return prompt.param
    return name if num_prompts == 1 else f"{name}[{position}]"
