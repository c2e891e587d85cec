"""A simulated server whose model thinks: its template writes thoughts, its runner replays what a test has written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as with_fields

from core.chat_template import ChatTemplate
from core.tokenizer import Tokenizer
from server.loaded_engine import compiler_of, thought_style_of, tool_style_of, vocabulary_of
from server.prompts import PromptReader
from tests.core.chat_templates import QWEN3
from tests.core.small_tokenizers import byte_level, for_chats
from tests.core.tool_templates import HARMONY
from tests.server.simulated_engine import LogprobRunner
from tests.server.simulated_server import EOS_ID, LIMITS, SimulatedServer, serving

HARMONY_TOKENS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
_BACKEND = for_chats(byte_level())
_BACKEND.add_special_tokens(HARMONY_TOKENS)
TOKENIZER = Tokenizer(_BACKEND.to_str())

# As DeepSeek-R1 and QwQ have it: the prompt opens the thought, and earlier thoughts are left out
R1 = """\
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1] if message.role == 'assistant' else message.content %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
_LIMITS = replace(LIMITS, vocab_size=TOKENIZER.vocab_size, num_blocks=128, max_model_len=400)
TEMPLATES = {"qwen3": QWEN3, "r1": R1, "harmony": HARMONY}


class ScriptedRunner(LogprobRunner):
    """Samples the tokens of a script, then the end; under a mask the next one that it allows.

    Where other tokens were forced than the script has, it goes on with their text.
    """

    script: Sequence[int] | None = ()  # None: at random

    def _sample_row(self, slot: int, length: int) -> int:
        if self.script is None:
            return super()._sample_row(slot, length)
        own, rest = list(self._prefix(slot, length))[self._starts[slot].num_prompt_tokens :], list(self.script)
        if rest[: len(own)] == own:
            rest = rest[len(own) :]
        elif (text := _text(rest)).startswith(_text(own)):
            rest = ids_of(text[len(_text(own)) :])
        else:
            rest = rest[len(own) :]
        return rest[0] if rest else EOS_ID


def _text(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


class ThinkingServer:
    """
    Attributes:
        runner: write its script before a request.
    """

    def __init__(self, server: SimulatedServer, runner: ScriptedRunner, template: str) -> None:
        self.server, self.runner = server, runner
        reader, chat_template = server.generations.reader, ChatTemplate({"default": template}, {}, 400)
        styles: dict[str, Any] = {
            "tool_style": tool_style_of(chat_template),
            "thought_style": thought_style_of(chat_template),
        }
        made = PromptReader(
            cards=reader.cards,
            tokenizer=TOKENIZER,
            chat_template=chat_template,
            max_model_len=reader.max_model_len,
            max_sequences=reader.max_sequences,
            defaults=with_fields(reader.defaults, vocab_size=TOKENIZER.vocab_size, **styles),
            unix_clock=reader.unix_clock,
            make_compiler=lambda: compiler_of(TOKENIZER, (EOS_ID,)),
            special_tokens={TOKENIZER.str_of(token_id): token_id for token_id in TOKENIZER.special_ids},
            eos_ids=(EOS_ID,),
            thoughts=vocabulary_of(styles["thought_style"], TOKENIZER, (EOS_ID,)),
        )
        server.generations.own = server.generations.known_own._replace(reader=made)

    def ask(self, data: bytes, script: str | Sequence[int] | None) -> Any:
        """The answer, of a model that says the script; None: anything."""
        self.runner.script = ids_of(script) if isinstance(script, str) else script
        return self.server.ask(data)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def thinking(template: str = "qwen3", **arguments: Any) -> Any:
    """A context manager, like serving()."""
    return _thinking(TEMPLATES[template], arguments)


@contextmanager
def _thinking(template: str, arguments: dict[str, Any]) -> Iterator[ThinkingServer]:
    made: list[ScriptedRunner] = []

    def runner(*parts: Any) -> ScriptedRunner:
        made.append(ScriptedRunner(*parts))
        return made[0]

    with serving(limits=_LIMITS, runner=runner, **arguments) as server:
        yield ThinkingServer(server, made[0], template)
