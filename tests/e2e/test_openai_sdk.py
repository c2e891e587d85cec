"""The openai package, as its users have it, against a real server."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.server_process import ServerProcess
from tests.server.running_server import load_with, run, serving
from tests.server.simulated_server import MODEL as SERVED
from tests.server.test_embeddings import STYLE, vector_of

MESSAGES: Any = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a KV cache? 🙂"},
]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0} | fields)


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6} | fields)


def respond(client: OpenAI, **fields: Any) -> Any:
    asked = {"model": MODEL, "input": "What is a step?", "max_output_tokens": 16, "temperature": 0}
    return client.responses.create(**asked | fields)


def test_chat_stream_has_what_the_whole_answer_has(client: OpenAI) -> None:
    whole = chat(client, max_tokens=24)
    assert (whole.object, whole.model, whole.choices[0].finish_reason) == ("chat.completion", MODEL, "length")
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    with chat(client, max_tokens=24, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content != ""
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_stream_helper_takes_two_choices(client: OpenAI) -> None:
    stop_token_ids = list(range(260, 324))  # frequent: the helper fails by itself on answers that end by length
    extra = {"min_tokens": 4, "stop_token_ids": stop_token_ids}
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2, seed=1, extra_body=extra) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.finish_reason == "stop" and choice.message.content for choice in answer.choices)


def test_two_choices_differ_and_are_counted_together(client: OpenAI) -> None:
    answer = chat(client, max_tokens=16, n=2, seed=3, temperature=1)
    assert len({choice.message.content for choice in answer.choices}) == 2
    assert answer.usage.completion_tokens == 32


def test_same_seed_gives_the_same_answer_whatever_runs_beside_it(client: OpenAI) -> None:
    def ask(seed: int) -> str:
        text: str = chat(client, max_tokens=24, temperature=1.5, seed=seed).choices[0].message.content
        return text

    alone = ask(7)
    with chat(client, max_tokens=2000, temperature=None, stream=True) as neighbour:
        next(iter(neighbour))
        assert ask(7) == alone != ask(8)


def test_logprobs_spell_the_answer(client: OpenAI) -> None:
    choice = chat(client, max_tokens=10, logprobs=True, top_logprobs=3).choices[0]
    assert len(choice.logprobs.content) == 10
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes, "greedy takes the likeliest"


def test_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = complete(client, "A step", max_tokens=24).choices[0].text
    stop = whole[6:8]
    cut = complete(client, "A step", max_tokens=24, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    with complete(client, "A step", max_tokens=24, stop=[stop], stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == cut.text


def test_completions_take_all_four_forms_of_a_prompt(client: OpenAI, server: ServerProcess) -> None:
    text = complete(client, "The cache").choices[0].text
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "The cache"}).json()["tokens"]
    assert complete(client, ids).choices[0].text == text
    several = complete(client, ["The cache", "A step"], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == text
    assert {choice.text for choice in complete(client, [ids, ids]).choices} == {text}
    assert complete(client, "The cache", echo=True).choices[0].text == "The cache" + text
    logprobs = complete(client, "The cache", logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 6


def test_responses_answer_whole_and_stream_in_the_full_order_of_events(client: OpenAI) -> None:
    whole = respond(client)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 16
    with respond(client, stream=True) as stream:
        events = list(stream)
    assert list(dict.fromkeys(event.type for event in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""


class Answer(BaseModel):
    name: str = Field(max_length=8)
    number: int = Field(ge=0, le=99)
    kind: Literal["a", "b"]


def test_answers_in_a_form_are_parsed_by_the_package(client: OpenAI) -> None:
    """Of random weights, whole and streamed, in chat and in responses."""
    fields: Any = {"model": MODEL, "temperature": 1, "seed": 3}
    messages: Any = [{"role": "user", "content": "Hi"}]
    whole = client.chat.completions.parse(messages=messages, response_format=Answer, max_tokens=200, **fields)
    assert isinstance(whole.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(messages=messages, response_format=Answer, max_tokens=200, **fields) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
    del fields["seed"]
    response = client.responses.parse(input="Hi", text_format=Answer, max_output_tokens=200, **fields)
    assert isinstance(response.output_parsed, Answer)
    with client.responses.stream(input="Hi", text_format=Answer, max_output_tokens=200, **fields) as events:
        assert isinstance(events.until_done().get_final_response().output_parsed, Answer)


def test_errors_are_the_packages_own_with_code_and_field(client: OpenAI, strict_server: ServerProcess) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "steploop"
    with pytest.raises(openai.NotFoundError) as absent:
        client.models.retrieve("absent")
    with pytest.raises(openai.NotFoundError, match=MODEL) as unknown:
        chat(client, model="absent")
    with pytest.raises(openai.BadRequestError) as hot:
        chat(client, temperature=9)
    with pytest.raises(openai.BadRequestError) as heard:
        chat(client, modalities=["audio"])
    with (
        OpenAI(base_url=f"{strict_server.url}/v1", api_key="sk-other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert [(caught.value.code, caught.value.param) for caught in (unknown, hot, heard)] == [
        ("model_not_found", "model"),
        ("invalid_value", "temperature"),
        ("unsupported_parameter", "modalities"),
    ]
    assert (absent.value.code, refused.value.code) == ("model_not_found", "invalid_api_key")
    with OpenAI(base_url=f"{strict_server.url}/v1", api_key=API_KEY, max_retries=0) as owner:
        assert owner.models.list().data[0].id == MODEL


def test_sixteen_streams_at_once_each_get_their_own_greedy_answer(server: ServerProcess) -> None:
    prompts = [f"Question {i}" for i in range(16)]

    async def stream_text(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0, stream=True)
        async with stream:
            return "".join([chunk.choices[0].text async for chunk in stream])

    async def stream_all() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            together = await asyncio.gather(*(stream_text(client, prompt) for prompt in prompts))
            return together, [await stream_text(client, prompt) for prompt in prompts[:4]]

    together, alone = asyncio.run(stream_all())
    assert all(together)
    assert together[:4] == alone


def test_special_tokens_are_shown_where_they_are_asked_for(client: OpenAI, server: ServerProcess) -> None:
    eos = httpx.get(f"{server.url}/tokenizer_info").json()["eos_token"]
    asked = {"prompt": eos, "add_special_tokens": False}
    (eos_id,) = httpx.post(f"{server.url}/tokenize", json=asked).json()["tokens"]
    for skips, text in ((True, ""), (False, eos * 2)):
        extra = {"ignore_eos": True, "skip_special_tokens": skips}
        answer = complete(client, "a", max_tokens=2, logit_bias={str(eos_id): 100}, extra_body=extra)
        assert answer.choices[0].text == text


def test_an_overflow_has_the_words_that_client_libraries_look_for(client: OpenAI) -> None:
    """LangChain: the code. LiteLLM: OpenAI's sentence. Of too many tokens, of too many characters, of responses."""
    for text in ("hi " * 3000, "hi " * 60_000):
        for ask, field in ((chat, {"messages": [{"role": "user", "content": text}]}), (respond, {"input": text})):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, **field)
            assert caught.value.code == "context_length_exceeded"
            assert "This model's maximum context length is 2048 tokens. However, " in caught.value.message
            assert "context_length_exceeded" in caught.value.message
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 2048 tokens"):
            complete(client, text)


def test_what_lm_eval_asks_is_answered(client: OpenAI, server: ServerProcess) -> None:
    """A batch of prompts as ids, their logprobs with one token more; a dozen stop strings; the version, for routers."""
    prompts = [[5 + i, 6, 7, 8] for i in range(256)]
    answer = complete(client, prompts, max_tokens=1, logprobs=1, echo=True, seed=1234)
    assert [choice.index for choice in answer.choices] == list(range(256))
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == 5
    stop = [f"{i}:" for i in range(16)]
    assert len(complete(client, "a", n=64, max_tokens=2, stop=stop).choices) == 64
    assert httpx.get(f"{server.url}/version").json().keys() == {"version"}


def test_embeddings_in_both_forms_and_each_kind_of_input() -> None:
    async def scene() -> None:
        async with serving(load_with(pooling=STYLE)) as running:
            url = f"http://127.0.0.1:{running.server.listener.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                for given in ("hello", ["hello", "there you are"], [5, 6], [[5, 6], [7]]):
                    for fields in ({}, {"encoding_format": "float"}, {"encoding_format": "base64", "dimensions": 3}):
                        found = await client.embeddings.create(model=SERVED, input=given, **fields)  # type: ignore[call-overload]
                        texts: Any = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
                        assert [one.index for one in found.data] == list(range(len(texts)))
                        for one, text in zip(found.data, texts, strict=True):
                            read = one.embedding
                            if isinstance(read, str):  # asked for as base64, it stays that
                                read = np.frombuffer(base64.b64decode(read), "<f4").tolist()
                            assert read == pytest.approx(vector_of(text, len(read)), abs=1e-6)
                        assert found.usage.total_tokens == found.usage.prompt_tokens > 0
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.embeddings.create(model=SERVED, input="", dimensions=3)
                assert refused.value.param == "input"

    run(scene)
