"""How likely a prompt is, over HTTP, as evaluation harnesses ask for it: echo with logprobs, and 0 or 1 token drawn."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.completion_choice import Logprobs

from tests.e2e.server_process import ServerProcess, ready_server

MODEL = "steploop-demo"
TEXT = "A token is a piece of text, é or 日, and a step computes some. Tokens wait for blocks, and blocks for tokens."
QUESTION = "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ready_server(
        tmp_path_factory.mktemp("demo"), None, "--max-batch-tokens", "16"
    ) as server:  # prompts come in chunks
        yield server


@pytest.fixture
def client(demo: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def score(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    fields = {"max_tokens": 0, "logprobs": 2, "temperature": 0, "echo": True} | fields
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def logprobs_of(answer: Any) -> Any:
    return answer.choices[0].logprobs


def ids_of(demo: ServerProcess, text: str) -> list[int]:
    tokens: list[int] = httpx.post(f"{demo.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def test_without_a_token_to_draw_the_prompt_comes_back_scored(client: openai.OpenAI, demo: ServerProcess) -> None:
    answer = score(client, TEXT)
    choice, logprobs = answer.choices[0], logprobs_of(answer)
    num_tokens = len(ids_of(demo, TEXT))
    assert num_tokens > 32  # in three chunks at least
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert counts == (num_tokens, 0, num_tokens)
    assert {len(getattr(logprobs, name)) for name in LISTS} == {num_tokens}
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    scored = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))
    for token, logprob, top in scored[1:]:
        assert top[token] == logprob <= 0
        assert 2 <= len(top) <= 3
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert TEXT.startswith(token, offset) or token.startswith("bytes:")  # it ends or begins amid a character


def test_what_it_says_is_as_likely_when_it_is_read(client: openai.OpenAI) -> None:
    """The logprobs of drawn tokens, and those of the same tokens in a prompt that was computed in chunks."""
    said = score(client, QUESTION, max_tokens=30)
    read = score(client, said.choices[0].text)
    assert len(said.choices[0].text) > len(QUESTION) + 60
    of_said, of_read = logprobs_of(said), logprobs_of(read)
    assert (of_read.tokens, of_read.text_offset) == (of_said.tokens, of_said.text_offset)
    # A prompt's tiles round otherwise than tokens one by one, which shows in float32
    assert of_read.token_logprobs[1:] == pytest.approx(of_said.token_logprobs[1:], abs=1e-4)
    for of_token, of_same in zip(of_read.top_logprobs[1:], of_said.top_logprobs[1:], strict=True):
        assert of_token == pytest.approx(of_same, abs=1e-3)


def test_harnesses_leave_the_drawn_token_out(client: openai.OpenAI, demo: ServerProcess) -> None:
    """As lm-eval does it: what counts is all behind the context but the last."""
    context, goes_on = "What is a KV", " cache?"
    ids = ids_of(demo, context) + ids_of(demo, goes_on)
    first = len(ids_of(demo, context))
    logprobs = logprobs_of(score(client, [ids], max_tokens=1, logprobs=1, seed=1234))
    assert len(logprobs.token_logprobs) == len(ids) + 1
    alone = logprobs_of(score(client, ids, max_tokens=0)).token_logprobs
    assert sum(logprobs.token_logprobs[first:-1]) == pytest.approx(sum(alone[first:]))


def test_an_end_that_has_no_text_stands_in_the_lists(client: openai.OpenAI, demo: ServerProcess) -> None:
    """Or who leaves the last token out would leave one of the prompt's out."""
    num_tokens = len(ids_of(demo, TEXT))
    first = logprobs_of(score(client, TEXT, max_tokens=1))
    (drawn,) = ids_of(demo, first.tokens[-1])[-1:]
    answer = score(client, TEXT, max_tokens=5, extra_body={"stop_token_ids": [drawn]})
    logprobs = logprobs_of(answer)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert {len(getattr(logprobs, name)) for name in LISTS} == {num_tokens + 1}
    assert logprobs == first
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_every_form_of_a_prompt_says_the_same_streamed_or_not(
    client: openai.OpenAI, demo: ServerProcess, max_tokens: int
) -> None:
    texts = [TEXT, "Hi"]
    alone = [score(client, text, max_tokens=max_tokens) for text in texts]
    wanted = [answer.choices[0] for answer in alone]
    ids = [ids_of(demo, text) for text in texts]
    for prompt in (texts, ids):
        answer = score(client, prompt, max_tokens=max_tokens, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice in answer.choices:
            one = wanted[choice.index // 2]
            assert (choice.text, choice.logprobs, choice.finish_reason) == (one.text, one.logprobs, one.finish_reason)
            assert answer.usage.completion_tokens == 2 * sum(one.usage.completion_tokens for one in alone)
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert streamed(client, prompt, max_tokens) == [(one.text, one.logprobs) for one in wanted]


def streamed(client: openai.OpenAI, prompt: Any, max_tokens: int) -> list[tuple[str, Logprobs]]:
    """(text, logprobs) of each choice, put together from the chunks."""
    texts, lists = ["", ""], [Logprobs(**{name: [] for name in LISTS}) for _ in range(2)]
    stream = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, logprobs=2, temperature=0, echo=True, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name in LISTS:
                getattr(lists[choice.index], name).extend(getattr(choice.logprobs, name))
    return list(zip(texts, lists, strict=True))


def test_what_another_request_has_computed_does_not_count_as_read(client: openai.OpenAI) -> None:
    """Scored prompts leave in the cache what others take from there, and take nothing."""
    text = f"Some text that nobody else asks about. {TEXT}"
    scored = [score(client, text) for _ in range(2)]
    assert logprobs_of(scored[0]) == logprobs_of(scored[1])
    plain = score(client, text, logprobs=None)
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].text == text

    def num_cached(answer: Any) -> int:
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [num_cached(answer) for answer in scored] == [0, 0]
    assert num_cached(plain) > 0
