"""The openai package, as its users have it, against a real server."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.server_process import ServerProcess

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a KV cache? 🙂"},
]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_chat_answer_has_text_and_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_chat_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
    with client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_helper_takes_two_choices(client: OpenAI) -> None:
    stop_token_ids = list(range(260, 324))  # frequent: the helper fails by itself on answers that end by length
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, n=2, seed=1, extra_body={"min_tokens": 4, "stop_token_ids": stop_token_ids}
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.finish_reason == "stop" and choice.message.content for choice in answer.choices)


def test_two_choices_differ_and_are_counted_together(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, n=2, seed=3, temperature=1)
    assert len({choice.message.content for choice in answer.choices}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


def test_same_seed_gives_the_same_answer_whatever_runs_beside_it(client: OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=24, temperature=1.5, seed=seed
        )
        return answer.choices[0].message.content

    alone = ask(7)
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2000, stream=True) as neighbour:
        next(iter(neighbour))
        assert ask(7) == alone
        assert ask(8) != alone


def test_logprobs_spell_the_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=10, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 10
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode(errors="replace")
    assert spelled == answer.choices[0].message.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes, "greedy takes the likeliest"


def test_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="A step", max_tokens=24, temperature=0).choices[0].text
    stop = whole[6:8]
    cut = client.completions.create(model=MODEL, prompt="A step", max_tokens=24, temperature=0, stop=stop)
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    with client.completions.create(
        model=MODEL, prompt="A step", max_tokens=24, temperature=0, stop=[stop], stream=True
    ) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == cut.choices[0].text


def test_completions_take_all_four_forms_of_a_prompt(client: OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="The cache", max_tokens=6, temperature=0)
    tokenized = client.post("../tokenize", body={"prompt": "The cache"}, cast_to=dict[str, object])
    ids = [int(token_id) for token_id in tokenized["tokens"]]  # type: ignore[attr-defined]
    of_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    assert of_ids.choices[0].text == text.choices[0].text
    several = client.completions.create(model=MODEL, prompt=["The cache", "A step"], max_tokens=6, temperature=0, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == text.choices[0].text
    of_lists = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=6, temperature=0)
    assert {choice.text for choice in of_lists.choices} == {text.choices[0].text}


def test_echo_puts_the_prompt_before_the_text(client: OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="The cache", max_tokens=6, temperature=0)
    echoed = client.completions.create(model=MODEL, prompt="The cache", max_tokens=6, temperature=0, echo=True)
    assert echoed.choices[0].text == "The cache" + plain.choices[0].text


def test_old_logprobs_have_one_entry_per_token(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The cache", max_tokens=6, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 6


def test_responses_answer_whole(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="What is a step?", max_output_tokens=16, temperature=0)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens == 16


def test_responses_stream_in_the_full_order_of_events(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="What is a step?", max_output_tokens=16, temperature=0)
    with client.responses.create(
        model=MODEL, input="What is a step?", max_output_tokens=16, temperature=0, stream=True
    ) as stream:
        events = list(stream)
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
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
    assert text == whole.output_text


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "steploop"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("absent")
    assert caught.value.code == "model_not_found"


def test_unknown_model_is_not_found_and_says_what_is_served(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
        client.chat.completions.create(model="absent", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_bad_field_is_a_bad_request_naming_it(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "response_format")


def test_wrong_key_is_an_authentication_error(strict_server: ServerProcess) -> None:
    with (
        OpenAI(base_url=f"{strict_server.url}/v1", api_key="sk-other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"
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
            alone = [await stream_text(client, prompt) for prompt in prompts[:4]]
            return together, alone

    together, alone = asyncio.run(stream_all())
    assert all(together)
    assert together[:4] == alone


def test_special_tokens_are_shown_where_they_are_asked_for(client: OpenAI, server: ServerProcess) -> None:
    eos = httpx.get(f"{server.url}/tokenizer_info").json()["eos_token"]
    asked = {"prompt": eos, "add_special_tokens": False}
    (eos_id,) = httpx.post(f"{server.url}/tokenize", json=asked).json()["tokens"]
    texts = [
        client.completions.create(
            model=MODEL,
            prompt="a",
            max_tokens=2,
            logit_bias={str(eos_id): 100},
            temperature=0,
            extra_body={"ignore_eos": True, "skip_special_tokens": skips},
        )
        .choices[0]
        .text
        for skips in (True, False)
    ]
    assert texts == ["", eos * 2]


def test_an_overflow_says_the_words_that_client_libraries_look_for(client: OpenAI) -> None:
    """LangChain: the code. LiteLLM: OpenAI's sentence. Of too many tokens, of too many characters, of responses."""
    for text in ("hi " * 3000, "hi " * 60_000):
        with pytest.raises(openai.BadRequestError) as of_chat:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])
        with pytest.raises(openai.BadRequestError) as of_completion:
            client.completions.create(model=MODEL, prompt=text)
        with pytest.raises(openai.BadRequestError) as of_response:
            client.responses.create(model=MODEL, input=text)
        for caught in (of_chat, of_completion, of_response):
            assert caught.value.code == "context_length_exceeded"
            assert "This model's maximum context length is 2048 tokens. However, " in caught.value.message
            assert "context_length_exceeded" in caught.value.message


def test_what_lm_eval_asks_is_answered(client: OpenAI, server: ServerProcess) -> None:
    """A batch of prompts as ids, their logprobs with one token more; a dozen stop strings; the version, for routers."""
    prompts = [[5 + i, 6, 7, 8] for i in range(256)]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    assert [choice.index for choice in answer.choices] == list(range(256))
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == 5
    stop = [f"{i}:" for i in range(16)]
    many = client.completions.create(model=MODEL, prompt="a", n=64, max_tokens=2, stop=stop)
    assert len(many.choices) == 64
    assert httpx.get(f"{server.url}/version").json().keys() == {"version"}
