"""The demonstration model's tokenizer: trained on its corpus, and ChatML around a conversation.

Owns no state. A conversation becomes ids piece by piece at special tokens, where no merge crosses, so the ids are those
that a server gets from the rendered text.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpu.demo.glossary import Corpus, Entry
from gpu.demo.prompts import Conversation

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
# The model reads the system message and the last question: behind earlier turns, a long text above all, it loses the
# thread.
CHAT_TEMPLATE = (
    "{% set question = namespace(at=0) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set question.at = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' or loop.index0 >= question.at %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if not loop.first or message['content'] | trim %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FIRST_TOKENS = 10  # of an answer: by then its entry is decided
LATER_ANSWERS_WEIGHT = 0.3  # of the other tokens of a whole answer, in the loss


@dataclass(frozen=True)
class Sample:
    """ids, and for each id the weight of predicting it; 0 for a question's."""

    ids: list[int]
    weights: list[float]


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every text has ids, and ids give the same text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n"] * 10_000  # so that each role is one token
    texts = [text for e in corpus.answered() for text in (*[e.answer] * 8, *e.names, *e.phrasings)]
    lower_case = [phrasing.lower() for entry in corpus.answered() for phrasing in entry.phrasings]
    tokenizer.train_from_iterator([*roles, *texts, *lower_case], trainer)
    return tokenizer


def render(messages: list[tuple[str, str]]) -> str:
    """The ChatML of (role, content) pairs, up to where the assistant's answer begins; as training has it."""
    turns = "".join(f"{IM_START}{role}\n{content.strip()}{IM_END}\n" for role, content in messages)
    return f"{turns}{IM_START}assistant\n"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return int(number)


class Encoder:
    """Conversations to samples; an entry's answer is encoded once."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus) -> None:
        self.tokenizer = tokenizer
        end = token_id(tokenizer, IM_END)
        self.answers = {e.term: [*self.encode(e.answer), end] for e in corpus.answered()}

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def answer(self, entry: Entry) -> list[int]:
        return self.answers[entry.term]

    def sample(self, conversation: Conversation) -> Sample:
        ids: list[int] = []
        weights: list[float] = []
        opening = [("system", conversation.system)] if conversation.system else []
        for index, turn in enumerate(conversation.turns):
            # After an earlier answer's <|im_end|> the template goes on with a line end.
            text = ("\n" if index else "") + render([*opening, ("user", turn.question)])
            question, answer = self.encode(text), self.answer(turn.entry)
            if not turn.is_whole:
                answer = answer[:FIRST_TOKENS]
            ids += question + answer
            weights += [0.0] * len(question)
            weights += [1.0 if at < FIRST_TOKENS else LATER_ANSWERS_WEIGHT for at in range(len(answer))]
            opening = []
        return Sample(ids, weights)
