"""The anthropic package, as its users have it, against a real server."""

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.core.tool_templates import TOOL_TEMPLATES
from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.replay import MODEL as PLAYED
from tests.e2e.replay import playing
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_tool_loops import ANSWER, QUESTION, TOOLS, calls_of, lead_of, play
from tests.server.running_server import run

GREEDY = {"temperature": 0}  # which the package has no argument for
MESSAGES: Any = [{"role": "user", "content": "What is a KV cache? 🙂"}]
TOOL: Any = {
    "name": "look_up",
    "description": "Looks up a word.",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 8}, "num": {"enum": [1, 2]}},
        "required": ["word", "num"],
        "additionalProperties": False,
    },
}

CITY_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
    for tool in TOOLS
]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def ask(client: Anthropic, **fields: Any) -> Any:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "extra_body": GREEDY}
    return client.messages.create(**asked | fields)


def test_a_stream_has_what_the_whole_answer_has(client: Anthropic) -> None:
    whole = ask(client, system="Answer briefly.")
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", MODEL, "max_tokens")
    assert whole.usage.output_tokens == 16
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "extra_body": GREEDY}
    with client.messages.stream(**asked, system="Answer briefly.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text != ""
    num = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert num == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 16)
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Answer briefly.")
    assert counted.input_tokens == num


def test_a_stop_sequence_is_told(client: Anthropic) -> None:
    text = ask(client).content[0].text
    answer = ask(client, stop_sequences=[text[3:5]])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[3:5])
    assert answer.content[0].text == text[: text.index(text[3:5])]


def test_models_and_errors_have_its_shapes(client: Anthropic) -> None:
    (model,) = client.models.list(limit=1)
    assert (model.type, model.id, model.display_name, model.lifecycle) == ("model", MODEL, MODEL, "active")
    assert client.models.retrieve(MODEL) == model
    assert client.models.list(after_id=MODEL).data == client.models.list(before_id=MODEL).data == []
    asks: list[tuple[Callable[[], Any], int]] = [
        (lambda: client.models.retrieve("none"), 404),
        (lambda: client.models.list(after_id="none"), 400),
        (lambda: client.messages.batches.list(), 404),
    ]
    for ask_for, status in asks:
        with pytest.raises(anthropic.APIStatusError) as refused:
            ask_for()
        assert refused.value.status_code == status
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["type"] == "error"
        assert refused.value.request_id


def test_a_forced_tool_is_called_and_its_result_taken(demo: ServerProcess) -> None:
    client = Anthropic(base_url=demo.url, api_key="unused", max_retries=0)
    model = client.models.list().data[0].id
    choice: Any = {"type": "tool", "name": "look_up"}
    called = ask(client, model=model, tools=[TOOL], tool_choice=choice, max_tokens=120)
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    assert (call.type, call.name, set(call.input)) == ("tool_use", "look_up", {"word", "num"})
    asked: Any = {"model": model, "messages": MESSAGES, "max_tokens": 120, "extra_body": GREEDY}
    with client.messages.stream(**asked, tools=[TOOL], tool_choice=choice) as stream:
        final = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [call.model_dump(exclude={"id"})]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "A store."}]}
    turns = [*MESSAGES, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    after = ask(client, model=model, messages=turns, tools=[TOOL])
    client.close()
    assert after.usage.cache_read_input_tokens > 0
    assert after.content


def test_errors_are_the_sdks_own(client: Anthropic, strict_server: ServerProcess) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    body: Any = bad.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["param"] == "messages[0].content[0].type"
    assert bad.value.request_id == body["request_id"]
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="other")
    for key, error in ((API_KEY, None), ("sk-wrong", anthropic.AuthenticationError)):
        with Anthropic(base_url=strict_server.url, api_key=key, max_retries=0) as keyed:
            if error is None:
                assert ask(keyed).content
            else:
                with pytest.raises(error):
                    ask(keyed)


@pytest.mark.parametrize("form", TOOL_TEMPLATES)
def test_a_loop_of_tools_whole_and_streamed_in_every_format(form: str) -> None:
    lead = lead_of(form)

    async def scene() -> None:
        async with playing(form, play(form, lead)) as running:
            url = f"http://127.0.0.1:{running.server.listener.port}"
            async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
                for streams in (False, True):
                    turns: list[Any] = [{"role": "user", "content": QUESTION["content"]}]
                    for is_last in (False, True):
                        asked: Any = {"model": PLAYED, "max_tokens": 500, "messages": turns, "tools": CITY_TOOLS}
                        if streams:
                            async with client.messages.stream(**asked) as stream:
                                answer = await stream.get_final_message()
                        else:
                            answer = await client.messages.create(**asked)
                        texts = [block.text for block in answer.content if block.type == "text"]
                        calls = [block for block in answer.content if block.type == "tool_use"]
                        named = [(call.name, call.input) for call in calls]
                        assert ("".join(texts), named) == ((ANSWER, []) if is_last else (lead, calls_of(form)))
                        assert answer.stop_reason == ("end_turn" if is_last else "tool_use")
                        found = {"get_weather": "21 degrees", "now": "noon"}
                        results = [
                            {"type": "tool_result", "tool_use_id": call.id, "content": found[call.name]}
                            for call in calls
                        ]
                        turns += [
                            {"role": "assistant", "content": answer.content},
                            {"role": "user", "content": results},
                        ]

    run(scene)


def test_a_coding_session_finds_what_it_has_sent_before() -> None:
    """Requests as a coding agent shapes them: a billing header that is another each time, marks, a beta's fields."""
    rules, shares = "You are a coding agent. " + "Read before you write, and run the tests. " * 250, []

    async def scene() -> None:
        async with playing("hermes", play("hermes", "I look.")) as running:
            url = f"http://127.0.0.1:{running.server.listener.port}"
            async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
                turns: list[Any] = [QUESTION]
                for i in range(3):
                    header = f"x-anthropic-billing-header: cc_version=2.1.{i}; cch={i * 7919:05x};"
                    mark: Any = {"cache_control": {"type": "ephemeral"}}
                    asked: Any = {
                        "model": PLAYED,
                        "max_tokens": 300,
                        "system": [{"type": "text", "text": header}, {"type": "text", "text": rules, **mark}],
                        "messages": [*turns[:-1], turns[-1]],
                        "tools": CITY_TOOLS,
                        "metadata": {"user_id": f"user_{i}"},
                    }
                    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
                    counted = await client.messages.count_tokens(
                        **{k: asked[k] for k in asked.keys() - {"max_tokens", "metadata"}}
                    )
                    async with client.messages.stream(**asked, extra_body=edits) as stream:
                        answer = await stream.get_final_message()
                    usage = answer.usage
                    assert usage.cache_creation_input_tokens == 0
                    cached = usage.cache_read_input_tokens or 0
                    assert usage.input_tokens + cached == counted.input_tokens
                    shares.append(cached / counted.input_tokens)
                    turns.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
                    calls = [block for block in answer.content if block.type == "tool_use"]
                    results = [{"type": "tool_result", "tool_use_id": one.id, "content": "21 degrees"} for one in calls]
                    turns.append({"role": "user", "content": results or "And tomorrow?"})

    run(scene)
    assert shares[0] == 0
    assert min(shares[1:]) >= 0.95, shares
