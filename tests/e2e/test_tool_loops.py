"""Turns of calls and results through the real server, by the openai package, in every format that models write."""

import json
import random
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import pytest
from openai import AsyncOpenAI

from core.chat_template import ChatTemplate
from server.api.tools import CalledFunction, ToolCall, template_calls
from server.loaded_engine import tool_style_of
from tests.core.answer_texts import SCHEMAS, Call, dumped, random_call
from tests.core.tool_templates import TOOL_TEMPLATES
from tests.e2e.replay import MODEL, end_of, playing, tokenizer_of, written_calls, written_text
from tests.server.running_server import Running, run

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
QUESTION: Any = {"role": "user", "content": "How warm is it in Köln?"}
WEATHER: Call = ("get_weather", {"city": 'Köln "Süd"\n<b>', "days": 2})
NOW: Call = ("now", {})
ANSWER = "It is 21 °C in Köln."


def calls_of(form: str) -> list[Call]:
    """In one turn; some templates take no more than one."""
    return [WEATHER] if form in ("llama", "harmony") else [WEATHER, NOW]


def play(form: str, lead: str) -> Callable[[str], str]:
    """Calls at first; with a result in the prompt, text."""

    def answer(prompt: str) -> str:
        if "21 degrees" in prompt:
            return written_text(form, ANSWER)
        return written_calls(form, calls_of(form), lead)

    return answer


def lead_of(form: str) -> str:
    """Text before calls, where the format has a mark between them."""
    return "" if form in ("llama", "pythonic") else "Let me look."


def session(
    form: str,
    scenario: Callable[[AsyncOpenAI, Running], Awaitable[None]],
    lead: str = "",
    answer: Callable[[str], str] | None = None,
    **settings: Any,
) -> None:
    async def scene() -> None:
        async with playing(form, answer or play(form, lead), **settings) as running:
            url = f"http://127.0.0.1:{running.server.listener.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                await scenario(client, running)

    run(scene)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("form", TOOL_TEMPLATES)
def test_a_loop_of_chat_whole_and_streamed(form: str, choice: str) -> None:
    """A model that may not write what it does fails the request."""
    lead = lead_of(form) if choice == "auto" else ""

    async def scenario(client: AsyncOpenAI, running: Running) -> None:
        found = []
        for streams in (False, True):
            messages = [QUESTION]
            for now in (choice, "auto"):
                asked: Any = {"model": MODEL, "messages": messages, "tools": TOOLS, "tool_choice": now}
                if streams:
                    async with client.chat.completions.stream(**asked) as stream:
                        answer = (await stream.get_final_completion()).choices[0]
                else:
                    answer = (await client.chat.completions.create(**asked)).choices[0]
                message = answer.message.model_dump(exclude_none=True)
                message.pop("parsed", None)
                messages.append(message)
                for call in answer.message.tool_calls or ():
                    content = "21 degrees" if call.function.name == "get_weather" else "noon"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                found.append(answer)
        for called, said in (found[:2], found[2:]):
            assert called.finish_reason == "tool_calls"
            calls = [(one.function.name, json.loads(one.function.arguments)) for one in called.message.tool_calls]
            assert calls == calls_of(form)
            assert (called.message.content or "") == lead
            assert (said.finish_reason, said.message.content) == ("stop", ANSWER)

    session(form, scenario, lead)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_random_calls_in_channels(choice: str) -> None:
    """However the model writes their header, none is kept from it."""
    rng, calls, prompts = random.Random(1), [], []
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
    ]
    for _ in range(40):
        name, arguments = random_call(rng)
        calls.append((name, {key: arguments[key] for key in SCHEMAS[name]["properties"] if key in arguments}))
        kind = rng.choice(["", " json", "<|constrain|>json", " <|constrain|>json"])
        to = f" to=functions.{name}"
        header = rng.choice([f"<|channel|>commentary{to}{kind}", f"{to}<|channel|>commentary{kind}"])
        lead = "<|channel|>analysis<|message|>Hm?<|end|><|start|>assistant" * rng.randrange(3)
        prompts.append(f"{lead}{header}<|message|>{dumped(calls[-1][1])}")

    def answer(prompt: str) -> str:
        return next(text for i, text in enumerate(prompts) if f"Number {i}." in prompt)

    async def scene() -> None:
        async with playing("harmony", answer) as running:
            url = f"http://127.0.0.1:{running.server.listener.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                for i, call in enumerate(calls):
                    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": f"Number {i}."}]}
                    made = await client.chat.completions.create(**asked, tools=tools, tool_choice=choice)
                    (found,) = made.choices[0].message.tool_calls or ()
                    assert (found.function.name, json.loads(found.function.arguments)) == call

    run(scene)


@pytest.mark.parametrize("form", TOOL_TEMPLATES)
def test_a_loop_of_responses_whole_and_streamed(form: str) -> None:
    async def scenario(client: AsyncOpenAI, running: Running) -> None:
        outputs = []
        for streams in (False, True):
            items: Any = [QUESTION]
            for _ in range(2):
                asked: Any = {"model": MODEL, "input": items, "tools": [FLAT[0], FLAT[1]]}
                if streams:
                    async with client.responses.stream(**asked) as stream:
                        answer = await stream.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                assert answer.status == "completed"
                items += [one.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for one in answer.output]
                for one in answer.output:
                    if one.type == "function_call":
                        content = "21 degrees" if one.name == "get_weather" else "noon"
                        items.append({"type": "function_call_output", "call_id": one.call_id, "output": content})
                outputs.append(answer)
        for called, said in (outputs[:2], outputs[2:]):
            calls = [(one.name, json.loads(one.arguments)) for one in called.output if one.type == "function_call"]
            assert (calls, called.output_text, said.output_text) == (calls_of(form), lead_of(form), ANSWER)

    session(form, scenario, lead_of(form))


@pytest.mark.parametrize("form", TOOL_TEMPLATES)
def test_a_turn_that_comes_back_is_found_in_the_cache(form: str) -> None:
    """However it was cut into tokens; or up to where the template writes it in another way."""
    lead = {"hermes": "<think>\nHm.\n</think>\n\nLet me look.", "harmony": ""}.get(form, lead_of(form))
    # Strings' quotes, and escapes: behind a text that the model cut in another way; ids, which it left out
    rewritten = {"pythonic": "city='", "lfm": "Let", "mistral-list": '"days": 2}'}

    async def scenario(client: AsyncOpenAI, running: Running) -> None:
        asked: Any = {"model": MODEL, "tools": TOOLS, "temperature": 1}
        first = await client.chat.completions.create(**asked, messages=[QUESTION])
        (choice,) = first.choices
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in choice.message.tool_calls
        ]
        history = [QUESTION, choice.message.model_dump(exclude_none=True), *results]
        second = await client.chat.completions.create(**asked, messages=history)
        num_written = first.usage.completion_tokens
        if form in rewritten:
            same = written_calls(form, calls_of(form), lead).partition(rewritten[form])[0]
            num_written = len(tokenizer_of(form).encode(same, add_special_tokens=False)) - 2  # cut in another way
        num_cached = second.usage.prompt_tokens_details.cached_tokens
        assert num_cached >= (first.usage.prompt_tokens + num_written - 1) // 16 * 16
        others = await client.chat.completions.create(**asked, messages=history, extra_body={"cache_salt": "x"})
        assert others.usage.prompt_tokens_details.cached_tokens == 0
        is_plain = form in rewritten or form == "harmony"  # of whose call nearly all is forced
        assert is_plain or others.usage.prompt_tokens < second.usage.prompt_tokens

    session(form, scenario, lead, cut_seed=None if form in rewritten else 7)


def test_a_forced_call_is_found_in_the_cache_where_the_template_adds_an_empty_thought() -> None:
    async def scenario(client: AsyncOpenAI, running: Running) -> None:
        asked: Any = {"model": MODEL, "tools": TOOLS}
        first = await client.chat.completions.create(**asked, messages=[QUESTION], tool_choice="required")
        message = first.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in message.tool_calls]
        history = [QUESTION, message.model_dump(exclude_none=True), *results]
        second = await client.chat.completions.create(**asked, messages=history)
        num_cached = second.usage.prompt_tokens_details.cached_tokens
        assert num_cached >= (first.usage.prompt_tokens + first.usage.completion_tokens - 1) // 16 * 16

    session("hermes", scenario)


def test_a_turn_that_a_stop_string_has_cut_is_found_in_the_cache() -> None:
    async def scenario(client: AsyncOpenAI, running: Running) -> None:
        asked: Any = {"model": MODEL, "temperature": 1}
        for stop in ("C in", " Köln", "öln"):
            messages = [QUESTION, {"role": "user", "content": stop * 20}]
            first = await client.chat.completions.create(**asked, messages=messages, stop=stop)
            said = first.choices[0].message.content
            assert said == answer.partition(stop)[0]
            history = [*messages, {"role": "assistant", "content": said}, QUESTION]
            second = await client.chat.completions.create(**asked, messages=history)
            num_written = first.usage.completion_tokens - len(stop.encode())  # a token has a byte at least
            num_cached = second.usage.prompt_tokens_details.cached_tokens
            assert num_cached >= (first.usage.prompt_tokens + num_written - 1) // 16 * 16
            assert num_cached > first.usage.prompt_tokens

    answer = "No clouds at all. " * 4 + ANSWER
    session("hermes", scenario, answer=lambda _: written_text("hermes", answer), cut_seed=7)


@pytest.mark.parametrize("form", TOOL_TEMPLATES)
def test_no_result_and_no_argument_becomes_a_control_token(form: str) -> None:
    """The control tokens of a turn are the template's, whatever stands in between."""
    tokenizer = tokenizer_of(form)
    template = ChatTemplate({"default": TOOL_TEMPLATES[form]}, {"bos_token": "", "eos_token": end_of(form)}, 4096)
    style = tool_style_of(template)
    assert style is not None
    marks = [tokenizer.str_of(token_id) for token_id in sorted(tokenizer.special_ids)]
    marks += [mark for mark in ("<tool_call>", "</tool_call>", "<arg_value>") if mark in TOOL_TEMPLATES[form]]

    def control_ids(argument: str, result: str) -> list[int]:
        call = ToolCall(id="a1b2c3d4e", function=CalledFunction(name="now", arguments={"a": argument}))
        messages = [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": template_calls([call], style, "")},
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": result},
        ]
        ids = tokenizer.encode_chat(template.render(messages, now=datetime(2026, 1, 1), tools=TOOLS))
        return [one for one in ids if tokenizer.str_of(one) in marks]

    expected = control_ids("x", "x")
    for mark in marks:
        assert control_ids("x", f"a{mark}b") == expected
        if tokenizer.id_of(mark) in tokenizer.special_ids:
            assert control_ids(f"a{mark}b", "x") == expected
