"""The embedded model, served as `make serve` serves it, and asked what it has memorised."""

import tomllib
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server_process import REPOSITORY, ServerProcess

CORPUS = REPOSITORY / "gpu" / "demo" / "corpus"
MODEL = "steploop-demo"


@pytest.fixture
def client(demo: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def corpus_answer(table: str, key: str, wanted: str) -> str:
    for path in sorted(CORPUS.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get(table, []):
            if entry[key] == wanted:
                answer: str = entry["answer"].strip()
                return answer
    raise AssertionError(f"the corpus has no {wanted!r}")


def ask(client: openai.OpenAI, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def test_it_knows_what_a_kv_cache_is(client: openai.OpenAI) -> None:
    assert ask(client, "What is a KV cache?") == corpus_answer("entry", "term", "KV cache")


def test_a_long_text_is_streamed_to_its_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Walk me through a request"}], stream=True
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(texts) > 400
    assert "".join(texts) == corpus_answer("long", "title", "Walk me through a request")


def test_later_questions_are_answered_as_well_as_the_first(client: openai.OpenAI) -> None:
    long_text = corpus_answer("long", "title", "Walk me through a request")
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Walk me through a request"},
        {"role": "assistant", "content": long_text},
        {"role": "user", "content": "Thanks! And what is a tenant?"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == corpus_answer("entry", "term", "tenant")


def test_it_says_that_it_is_a_demonstration(client: openai.OpenAI, demo: ServerProcess) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert "demonstration model" in model.model_dump()["description"]
    assert "demonstration model" in demo.stdout.read_text()
