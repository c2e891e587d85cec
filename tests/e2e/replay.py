"""A server whose model plays a part: all of it is real, but that a script says what the model writes.

There is one such model for each format of tool calls. What it writes is a function of its prompt, as text with control
tokens, so that clients may go through turns of their own.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from core.chat_template import ChatTemplate
from core.engine import Engine
from core.plan import Int32Array, RunnerLimits, StepPlan
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.tokenizer import Tokenizer
from core.tool_formats import FORMATS, markers_of
from core.types import StepDelivery
from server.api.fields import PoolingStyle
from server.engine_thread import Inbox
from server.loaded_engine import EngineFacts, LoadedEngine
from server.model_files import ModelFiles
from tests.core.answer_texts import RENDER, Call
from tests.core.small_tokenizers import byte_level
from tests.core.tool_templates import TOOL_TEMPLATES
from tests.server.running_server import CONFIG, Running, serving

MODEL = "played"
Play = Callable[[str], str]  # prompt -> answer

_ENDS = {"hermes": "<|im_end|>", "llama": "<|eot_id|>", "harmony": "<|call|>"}
_TURNS = ["<|end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|return|>", "<|system|>", "<|user|>"]
_TURNS += ["<|assistant|>", "<|tool|>"]


def end_of(form: str) -> str:
    """The token that ends an answer."""
    return _ENDS.get(form, "<|end|>")


def tokenizer_of(form: str) -> Tokenizer:
    """Marks in `<|...|>` or brackets are special tokens, as those models have them; others are added tokens."""
    made = byte_level()
    marks = sorted(markers_of(form) - {'"', "'", '"""', "'''", ")", "(", "}", "{", "call:", ">"})
    special = [mark for mark in marks if mark.startswith(("<|", "[", "<start_function", "<end_function"))]
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in [*_TURNS, *special]])
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks if mark not in special])
    return Tokenizer(made.to_str(), {"eos_token": end_of(form)}, templates=[TOOL_TEMPLATES[form]])


class Player(SimulatedRunner):
    """Writes, token by token, what `play` says of the prompt that is in its KV.

    With a seed it cuts the text between marks otherwise than the tokenizer does, as a sampled model may.
    """

    tokenizer: Tokenizer
    play: Play
    end_id: int
    marks: frozenset[int]
    cut_seed: int | None = None

    def sample(self, ticket: StepPlan, masks: Int32Array | None = None) -> None:
        rows = iter(() if masks is None else masks)
        self._masks = {int(ticket.slots[row]): next(rows) for row in ticket.masked_rows}
        super().sample(ticket, masks)

    def _sample_row(self, slot: int, length: int) -> int:
        num_prompt_tokens = self._starts[slot].num_prompt_tokens
        ids = list(self._prefix(slot, length))
        prompt, written = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
        answer = self.play(self.tokenizer.decode(prompt, skip_special_tokens=False))
        if self.cut_seed is not None:
            return self._oddly_cut(answer.encode(), written, self._masks.get(slot))
        rest = self._ids(answer)
        if rest[: len(written)] == written:
            rest = rest[len(written) :]
        else:  # other tokens, of the same text
            so_far = self.tokenizer.decode(written, skip_special_tokens=False)
            assert answer.startswith(so_far), f"it was made to write {so_far!r} of {answer!r}"
            rest = self._ids(answer[len(so_far) :])
        token_id = rest[0] if rest else self.end_id
        mask = self._masks.get(slot)
        if not _allows(mask, token_id):
            raise AssertionError(f"{self.tokenizer.str_of(token_id)!r} is not allowed after {written} of {answer!r}")
        return token_id

    def _oddly_cut(self, answer: bytes, written: list[int], mask: Int32Array | None) -> int:
        """A mark, or any allowed token that begins what comes before the next one."""
        so_far = b"".join(map(self.tokenizer.bytes_of, written))
        assert answer.startswith(so_far), f"it was made to write {so_far!r} of {answer!r}"
        left = answer[len(so_far) :]
        names = {self.tokenizer.bytes_of(one): one for one in self.marks}
        begun = re.match(
            b"(?=(%b))?(.*?)(?=%b|$)" % ((b"|".join(map(re.escape, sorted(names, reverse=True))),) * 2), left, re.DOTALL
        )
        assert begun is not None
        if not left or begun[1]:
            return names[begun[1]] if left else self.end_id
        table = enumerate(self.tokenizer.full_table.token_bytes)
        able = [one for one, data in table if data and begun[2].startswith(data) and _allows(mask, one)]
        return random.Random(f"{self.cut_seed} {len(written)}").choice(able)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _allows(mask: Int32Array | None, token_id: int) -> bool:
    return mask is None or bool((int(mask[token_id // 32]) >> token_id % 32) & 1)


def playing(
    form: str, play: Play, cut_seed: int | None = None, pooling: PoolingStyle | None = None, **settings: Any
) -> AbstractAsyncContextManager[Running]:
    """A server of a model that writes calls in this format."""
    tokenizer = tokenizer_of(form)
    end_id = tokenizer.id_of(end_of(form))
    assert end_id is not None
    limits = RunnerLimits(2048, 16, 8, 256, 16_384, tokenizer.vocab_size)

    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        clock = SimulatedClock()
        runner = Player(limits, CostModel(), clock)
        runner.tokenizer, runner.play, runner.end_id = tokenizer, play, end_id
        marks = {tokenizer.id_of(mark) for mark in markers_of(form)}
        runner.marks, runner.cut_seed = tokenizer.special_ids | {one for one in marks if one is not None}, cut_seed
        special = {"bos_token": "<|begin|>", "eos_token": end_of(form)}
        template = ChatTemplate({"default": TOOL_TEMPLATES[form]}, special, limits.max_model_len)
        files = ModelFiles(Path("/"), CONFIG, tokenizer, template, {"temperature": 0.0}, (end_id,), pooling)
        facts = EngineFacts(MODEL, True, 1000, "float32", "cpu", "played", 4096, "the model's own", limits)
        scheduler = Scheduler(limits, (end_id,), lambda: 1)
        return LoadedEngine(Engine(scheduler, runner, clock, inbox, deliver), files, facts, scheduler.stats())

    return serving(load, **settings)


def written_calls(form: str, calls: Sequence[Call], text: str = "") -> str:
    """What a model of that format writes for them."""
    if form == "harmony":
        lead = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant" if text else ""
        ((name, arguments),) = calls
        return f"{lead} to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}"
    return text + (FORMATS[form].before if text else "") + RENDER[form](calls)


def written_text(form: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if form == "harmony" else text


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
