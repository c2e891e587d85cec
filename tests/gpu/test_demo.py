"""The demonstration model's corpus, gate and exported files keep their rules; nothing is trained here."""

import json

import pytest

from gpu.demo import glossary
from gpu.demo.glossary import Corpus, Entry, Gate, find_name, frame_of, load_corpus, load_gate

MODEL = glossary.HERE / "model"
LIMIT_BYTES = 16_000_000


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def gate() -> Gate:
    return load_gate()


def test_corpus_has_120_entries_with_20_phrasings_each(corpus: Corpus) -> None:
    assert len(corpus.entries) >= 120
    for entry in (*corpus.entries, *corpus.longs):
        assert 20 <= len(set(entry.phrasings)) == len(entry.phrasings) <= 30, entry.term


def test_no_name_means_two_entries(corpus: Corpus) -> None:
    names = [name for entry in corpus.entries for name in {name.lower() for name in entry.names}]
    assert len(names) == len(set(names))


def test_a_name_shared_by_two_entries_is_refused() -> None:
    with pytest.raises(glossary.CorpusError, match="names both"):
        glossary._check_names([Entry("token", ("token",), "", ()), Entry("word", ("word", "Token"), "", ())])


def test_no_phrasing_belongs_to_two_entries(corpus: Corpus) -> None:
    phrasings = [phrasing.lower() for entry in corpus.answered() for phrasing in entry.phrasings]
    assert len(phrasings) == len(set(phrasings))


def test_answers_differ_in_what_the_gate_compares(corpus: Corpus) -> None:
    openings = [entry.answer[:40] for entry in corpus.answered()]
    assert len(openings) == len(set(openings))


def test_gate_names_each_term_in_120_questions(corpus: Corpus, gate: Gate) -> None:
    entries = {entry.term: entry for entry in corpus.entries}
    assert len({question.text for question in gate.named}) == len(gate.named) >= 120
    assert {question.term for question in gate.named} == set(entries)
    assert all(find_name(question.text, entries[question.term]) for question in gate.named)


def test_described_questions_do_not_name_their_term(corpus: Corpus, gate: Gate) -> None:
    entries = {entry.term: entry for entry in corpus.entries}
    assert not [q for q in gate.described if find_name(q.text, entries[q.term])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("What is a token?", (10, 15)), ("two tokens", (4, 9)), ("tokenizer", None), ("a TOKEN.", (2, 7)), ("", None)],
)
def test_find_name_wants_a_whole_word_or_its_plural(text: str, expected: tuple[int, int] | None) -> None:
    assert find_name(text, Entry("token", ("token",), "", ())) == expected


def test_frame_of_takes_the_longest_name() -> None:
    entry = Entry("token", ("token", "text token"), "", ())
    assert frame_of("what is a text token", entry) == "what is a {}"


def test_prompter_repeats_itself_from_a_seed(corpus: Corpus) -> None:
    from gpu.demo.prompts import Prompter

    one, two, other = Prompter(corpus, 7), Prompter(corpus, 7), Prompter(corpus, 8)
    drawn = [one.draw() for _ in range(500)]
    assert drawn == [two.draw() for _ in range(500)]
    assert all(turn.question for conversation in drawn for turn in conversation.turns)
    assert drawn != [other.draw() for _ in range(500)]


def test_exported_files_exist_and_are_small() -> None:
    names = {path.name for path in MODEL.iterdir()}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert expected | {"README.md", "figures.json"} <= names
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= LIMIT_BYTES


def test_exported_configuration_is_a_tied_llama_of_2048() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"


def test_recorded_figures_pass_the_gate_and_stand_on_the_card(corpus: Corpus, gate: Gate) -> None:
    figures = json.loads((MODEL / "figures.json").read_text())
    assert (figures["named_asked"], figures["described_asked"]) == (len(gate.named), len(gate.described))
    assert figures["named_right"] >= 0.9 * figures["named_asked"]
    card = (MODEL / "README.md").read_text()
    assert "{named_right} of {named_asked} ({named_percent} %)".format(**figures) in card
    assert "Memorised, and a demonstration." in card
    assert figures["entries"] == len(corpus.entries)


def test_tokenizer_gives_every_text_back(corpus: Corpus) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for text in (*(entry.answer for entry in corpus.answered()), "\u00fcber \U0001f600\n\n  x", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_long_texts_have_500_tokens(corpus: Corpus) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert len(corpus.longs) >= 3
    assert all(len(tokenizer.encode(entry.answer).ids) >= 500 for entry in corpus.longs)


@pytest.mark.parametrize(
    "before", [[], [("system", "Be brief."), ("user", "Walk me through a request"), ("assistant", "A request begins")]]
)
def test_template_renders_the_chatml_of_training_of_the_system_message_and_the_last_question(
    before: list[tuple[str, str]],
) -> None:
    jinja2 = pytest.importorskip("jinja2", reason="needs the jinja2 package")
    from gpu.demo.tokens import render

    template = json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
    question = ("user", " What is a token? ")
    messages = [{"role": role, "content": content} for role, content in [*before, question]]
    rendered = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    read = [(role, content) for role, content in before if role == "system"]
    assert rendered == render([*read, question])


def test_exported_weights_answer_a_question_verbatim(corpus: Corpus) -> None:
    pytest.importorskip("torch", reason="needs torch")
    from gpu.demo.examine import ask
    from gpu.demo.export import load_exported

    entry = corpus.entries[0]
    model, tokenizer = load_exported(MODEL)
    assert ask(model, tokenizer, [(entry.phrasings[0], entry)]).num_verbatim == 1
