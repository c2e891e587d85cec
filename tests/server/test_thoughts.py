"""Thoughts, through the whole server: apart from the answer, counted, however their tokens are cut."""

import json
import random
import re
import sqlite3
from contextlib import closing
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from core.constraints import regex
from core.thought_grammar import AfterThought
from core.thoughts import ThoughtStart
from core.tool_detection import ThoughtStyle
from server.ledger.store import Grouping
from server.ledger.usage import UsageQuery, read_usage
from server.loaded_engine import compiler_of, vocabulary_of
from tests.server.simulated_server import EOS_ID, Answer, chat, request
from tests.server.thinking_server import TOKENIZER, ids_of, thinking

EVENT_TYPE: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def ask_for(**fields: Any) -> bytes:
    return chat(**{"max_tokens": 200, "ignore_eos": False, "seed": 1} | fields)


def message_of(answer: Answer) -> dict[str, Any]:
    """Streamed or whole: what the message has."""
    if answer.headers["content-type"] == "application/json":
        message = answer.json["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert message.get("reasoning") == message.get("reasoning_content")
        return {"thought": message.get("reasoning") or "", "text": message["content"] or "", "calls": calls}
    found: dict[str, Any] = {"thought": "", "text": "", "calls": []}
    for event in answer.events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            found["thought"] += delta.get("reasoning", "")
            found["text"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    found["calls"].append({"name": call["function"]["name"], "arguments": ""})
                found["calls"][-1]["arguments"] += call["function"]["arguments"] if "id" not in call else ""
    return found


def cuts_of(text: str) -> list[list[int]]:
    """Its tokens: as the tokenizer has them, character by character, and at random places."""
    rng, pieces = random.Random(len(text)), [""]
    for char in text:
        if rng.random() < 0.4:
            pieces.append("")
        pieces[-1] += char
    return [ids_of(text), *([one for piece in some for one in ids_of(piece)] for some in (text, pieces))]


def num_thought_tokens(ids: list[int], end: str) -> int:
    """Tokens up to the one that completes the text that ends the thought."""
    texts = (TOKENIZER.decode(ids[:num], skip_special_tokens=False) for num in range(len(ids) + 1))
    return next((num for num, text in enumerate(texts) if end in text), len(ids))


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now"}}]
THINK, END = "</think>", "<|end|>"
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"


@pytest.mark.parametrize(
    ("template", "fields", "text", "thought", "said"),
    [
        ("qwen3", {}, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("qwen3", {}, "Yes <think>.", "", "Yes <think>."),
        ("qwen3", OFF, "<think> Yes.", "", "<think> Yes."),
        ("r1", {}, "hm, é\n</think>\n\nYes.", "hm, é", "Yes."),
        ("r1", {}, "hm and no end", "hm and no end", ""),
        ("harmony", {}, HARMONY, "hm", "Yes"),
    ],
)
def test_a_thought_is_apart_from_the_answer_and_counted(
    template: str, fields: dict[str, Any], text: str, thought: str, said: str
) -> None:
    with thinking(template) as server:
        for ids in cuts_of(text)[: 1 if template == "harmony" else 3]:
            for more in ({}, STREAM, {"logprobs": True}, STREAM | {"logprobs": True}, {"stop": ["Nothing"]}):
                answer = server.ask(ask_for(**fields, **more), ids)
                assert message_of(answer) == {"thought": thought, "text": said, "calls": []}
                assert answer.finish_reason() == "stop"
                expected = num_thought_tokens(ids, END if template == "harmony" else THINK) if thought else 0
                usage = answer.usage
                assert usage["completion_tokens"] == len(ids) + 1
                assert usage["completion_tokens_details"]["reasoning_tokens"] == expected
                if not (said or more):
                    assert answer.json["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_an_answer_cut_off_in_its_thought_counts_what_came(max_tokens: int) -> None:
    ids = ids_of("<think>\nhm, so\n</think>\n\nYes, no.")
    end = num_thought_tokens(ids, THINK)
    with thinking() as server:
        whole, streamed = (server.ask(ask_for(max_tokens=max_tokens, **more), ids) for more in ({}, STREAM))
        assert message_of(whole) == message_of(streamed)
        for answer in (whole, streamed):
            assert answer.finish_reason() == "length"
            details = answer.usage["completion_tokens_details"]
            assert details["reasoning_tokens"] == min(max_tokens, end)


def test_a_thought_behind_a_preamble_is_counted() -> None:
    thought, preamble = HARMONY[: HARMONY.index(END)] + END, "<|start|>assistant<|channel|>commentary<|message|>Now."
    ids = ids_of(f"{thought}{preamble}{END}<|start|>assistant{HARMONY}")
    with thinking("harmony") as server:
        for more in ({}, STREAM, {"stop": ["Nothing"]}):
            answer = server.ask(ask_for(**more), ids)
            assert message_of(answer) == {"thought": "hmhm", "text": "Now.Yes", "calls": []}
            details = answer.usage["completion_tokens_details"]
            assert details["reasoning_tokens"] == 2 * len(ids_of(thought)) + len(ids_of("<|start|>assistant"))
        metrics = server.server.ask(request("GET", "/metrics"), "GET").body.decode()
        num = 3 * details["reasoning_tokens"]
        assert re.search(rf"^steploop_reasoning_tokens_total{{.*}} {num}$", metrics, re.MULTILINE)


def test_a_call_within_the_thought_is_thought_and_one_behind_it_a_call() -> None:
    text = f"<think>\nmaybe {CALL}?\n</think>\n\nSo:\n{CALL}"
    with thinking() as server:
        for ids in cuts_of(text):
            for more in ({}, STREAM):
                answer = server.ask(ask_for(tools=TOOLS, tool_choice="auto", **more), ids)
                found = message_of(answer)
                assert (found["thought"], found["text"]) == (f"maybe {CALL}?", "So:")
                assert found["calls"] == [{"name": "now", "arguments": "{}"}]
                assert answer.finish_reason() == "tool_calls"


@pytest.mark.parametrize("text", ["<think>a b</think>\n\na b c", "a b c", "<b c"])
def test_stop_strings_are_searched_behind_the_thought(text: str) -> None:
    with thinking() as server:
        for ids in cuts_of(text):
            for stop in ("b", "<b", "think"):
                answer = server.ask(ask_for(stop=[stop]), ids)
                expected = text.rpartition("\n")[2]
                assert message_of(answer)["text"] == expected.partition(stop)[0]
                assert message_of(answer)["thought"] == ("a b" if "</think>" in text else "")


def test_completions_are_text_as_it_comes() -> None:
    body = {"model": "small", "prompt": "x", "max_tokens": 50}
    with thinking("r1") as server:
        answer = server.ask(request("POST", "/v1/completions", body), "hm</think>Yes")
        assert answer.text() == "hm</think>Yes"
        assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 1}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_has_the_thought_as_an_item_of_its_own(is_streamed: bool, more: dict[str, Any]) -> None:
    body = {"model": "small", "input": "x", "max_output_tokens": 50, "stream": is_streamed} | more
    with thinking("r1") as server:
        for ids in cuts_of("hm\n</think>\n\nYes"):
            answer = server.ask(request("POST", "/v1/responses", body), ids)
            events = [(event["type"], event) for event in answer.events] if is_streamed else []
            response = events[-1][1]["response"] if is_streamed else answer.json
            thought, message = response["output"]
            assert (thought["type"], message["type"]) == ("reasoning", "message")
            assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
            assert message["content"][0]["text"] == "Yes"
            assert bool(message["content"][0]["logprobs"]) == bool(more)
            details = response["usage"]["output_tokens_details"]
            assert details["reasoning_tokens"] == num_thought_tokens(ids, THINK)
            if is_streamed:
                check_events(events, thought, message)


def check_events(events: list[tuple[str, Any]], thought: Any, message: Any) -> None:
    """Items one after the other, each begun, told, and done as the final response has it."""
    for _, event in events:
        EVENT_TYPE.validate_python(event)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    for item, name, text in ((thought, "reasoning_text", "hm"), (message, "output_text", "Yes")):
        own = [
            (kind, event)
            for kind, event in events
            if item["id"] in (event.get("item_id"), event.get("item", {}).get("id"))
        ]
        assert [kind for kind, _ in own if "delta" not in kind] == [
            "response.output_item.added",
            "response.content_part.added",
            f"response.{name}.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert "".join(event["delta"] for kind, event in own if kind == f"response.{name}.delta") == text
        assert own[-1][1]["item"] == item


SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def check_valid(text: str) -> None:
    found = json.loads(text)
    assert (0 <= found["id"] <= 99, found["kind"] in "ab", len(found)) == (True, True, 2)


@pytest.mark.parametrize("template", ["qwen3", "r1", "harmony"])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_ends_at_its_budget_and_a_valid_answer_follows(template: str, budget: int) -> None:
    with thinking(template) as server:
        for seed in range(4):
            fields = {"thinking_token_budget": budget, "guided_json": SCHEMA, "seed": seed}
            script = ids_of("<|channel|>analysis<|message|>" + "hm" * 20) if template == "harmony" else None
            whole, streamed = (server.ask(ask_for(**fields, **more), script) for more in ({}, STREAM))
            assert message_of(whole) == message_of(streamed)
            assert whole.finish_reason() == streamed.finish_reason() == "stop"
            check_valid(message_of(whole)["text"])
            num = whole.usage["completion_tokens_details"]["reasoning_tokens"]
            # R1's prompt has begun the thought; under Qwen 3's the model may, in any tokens of its marker
            markers = {"r1": (1,), "qwen3": (-budget, *range(2, 9)), "harmony": (num_header() + 1,)}[template]
            assert num - budget in markers


def num_header() -> int:
    return len(ids_of("<|channel|>analysis<|message|>"))


@pytest.mark.parametrize("num", [0, 3, 100])
def test_a_budget_holds_the_thought_alone(num: int) -> None:
    text = "one two three four</think>\n\nYes, and a long answer."
    with thinking("r1") as server:
        for ids in cuts_of(text):
            answer = server.ask(ask_for(thinking_token_budget=num), ids)
            natural, details = num_thought_tokens(ids, THINK), answer.usage["completion_tokens_details"]
            end = ids_of(THINK)
            is_cut = num < natural - (len(ids_of("</think>")) if ids == ids_of(text) else 0)
            if is_cut:
                assert details["reasoning_tokens"] <= num + len(end)
                thought = TOKENIZER.decode(ids[:num])
                assert message_of(answer)["thought"] == thought.partition("<")[0].rstrip("\n")
            else:
                assert details["reasoning_tokens"] == natural
                assert message_of(answer)["text"] == "Yes, and a long answer."


@pytest.mark.parametrize(
    ("template", "lead", "thought"),
    [
        ("qwen3", "<think>\n{not json\n</think>\n\n", "{not json"),
        ("qwen3", "", ""),
        ("r1", "{not json\n</think>\n\n", "{not json"),
        ("r1", "a</think>", "a"),
        ("harmony", "<|channel|>analysis<|message|>{no<|end|><|start|>assistant<|channel|>final<|message|>", "{no"),
    ],
)
def test_what_holds_an_answer_begins_where_the_thought_ends(template: str, lead: str, thought: str) -> None:
    said = '{"id": 7, "kind": "b"}'
    with thinking(template) as server:
        for ids in cuts_of(lead + said)[: 1 if template == "harmony" else 3]:
            for more in ({}, STREAM):
                found = message_of(server.ask(ask_for(guided_json=SCHEMA, **more), ids))
                assert found == {"thought": thought, "text": said, "calls": []}
                found = message_of(server.ask(ask_for(guided_regex="[xy]{3}", **more), lead + "xyzz"))
                assert found["thought"] == thought
                assert re.fullmatch("[xy]{3}", found["text"])


def test_a_held_answer_may_spell_marks() -> None:
    """As text, in other tokens: they do not end the message."""
    lead, said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>", '"a<|end|>b"'
    with thinking("harmony") as server:
        for more in ({}, STREAM):
            ids = [*ids_of(lead), *chain.from_iterable(map(ids_of, said))]
            found = message_of(server.ask(ask_for(guided_json={"type": "string"}, **more), ids))
            assert found == {"thought": "hm", "text": said, "calls": []}


PICK = [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA, "strict": True}}, *TOOLS]
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
PREAMBLE = f"{THOUGHT}<|channel|>commentary<|message|>Now.<|end|><|start|>assistant"
TO_PICK = " to=functions.pick<|channel|>commentary json<|message|>"
WHOLE = '{"id": 7, "kind": "a"}'


def check_calls(found: dict[str, Any]) -> None:
    ((name, arguments),) = ((one["name"], one["arguments"]) for one in found["calls"])
    check_valid(arguments) if name == "pick" else json.loads(arguments)
    assert found["text"] == ""


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": "auto"}, {"response_format": FORM}])
@pytest.mark.parametrize("budget", [0, 3, None])
def test_channels_are_held(fields: dict[str, Any], budget: int | None) -> None:
    """Of a model that writes anything, and of one that begins an answer which may not go on so."""
    rambles = "<|channel|>analysis<|message|>" + "hm" * 20 + THOUGHT.partition("hm")[2]
    scripts = [None, rambles + "<|channel|>analysis<|message|>x" + TO_PICK + "{", "<|channel|>final<|message|>No."]
    scripts += [THOUGHT + TO_PICK + '{"id": "7"}', "<|channel|>commentary to=functions.none <|constrain|>x", "No."]
    with thinking("harmony") as server:
        for seed, script in enumerate(scripts[(budget is None) :]):
            asked = {"tools": PICK, "thinking_token_budget": budget, "seed": seed, "parallel_tool_calls": False}
            whole, streamed = (server.ask(ask_for(**asked | fields | more), script) for more in ({}, STREAM))
            found = message_of(whole)
            assert found == message_of(streamed)
            reason = whole.finish_reason()
            if reason == "length":
                assert None in (budget, script)  # what is free has no end
            elif reason == "tool_calls":
                check_calls(found)
            else:
                assert (reason, fields == {"tool_choice": "required"}) == ("stop", False)
                if "response_format" in fields:
                    check_valid(found["text"])
            if budget is not None and found["thought"]:
                assert len(ids_of(found["thought"])) <= max(budget, 1)


@pytest.mark.parametrize(
    ("lead", "fields", "expected"),
    [
        ("", {}, ("tool_calls", WHOLE, None)),
        ("", {"stop": ["d"]}, ("stop", '{"i', "d")),
        ("", {"stop": ["}"]}, ("stop", WHOLE[:-1], "}")),
        ("", {"stop": ["pick", "json", "comm"]}, ("tool_calls", WHOLE, None)),
        (THOUGHT, {"stop": ["hm", "assistant", "functions"]}, ("tool_calls", WHOLE, None)),
        (THOUGHT, {"stop": ["7"]}, ("stop", '{"id": ', "7")),
        (PREAMBLE, {"stop": ["functions", "assistant", "json", "<|start|>"]}, ("tool_calls", WHOLE, None)),
        (PREAMBLE, {"stop": [": "]}, ("stop", '{"id"', ": ")),
        ("", {"stop": ["f", "="], "max_tokens": 12}, ("length", None, None)),
        (THOUGHT, {"stop": ["f", "="], "max_tokens": 40}, ("length", None, None)),
        (PREAMBLE, {"stop": ["f", "="], "max_tokens": 65}, ("length", None, None)),
    ],
)
def test_a_call_in_channels_that_is_cut_says_so(
    lead: str, fields: dict[str, Any], expected: tuple[str, str | None, str | None]
) -> None:
    """And a stop string is none in a message's header, which no client sees."""
    choices = ["auto"] if lead == PREAMBLE else ["auto", "required"]  # a required call has no preamble
    with thinking("harmony") as server:
        for choice, more in product(choices, ({}, STREAM)):
            asked = ask_for(tools=PICK, tool_choice=choice, **fields, **more)
            answer = server.ask(asked, [*ids_of(lead + TO_PICK + WHOLE), *ids_of("<|call|>")])
            found = message_of(answer)
            assert found["calls"] == ([] if expected[1] is None else [{"name": "pick", "arguments": expected[1]}])
            events = [one for one in answer.events if isinstance(one, dict)] if more else [answer.json]
            ended = [one for event in events for one in event["choices"] if one["finish_reason"]]
            assert [(one["finish_reason"], one["stop_reason"]) for one in ended] == [(expected[0], expected[2])]
            assert found["text"] == ("Now." if lead == PREAMBLE else "")


def test_an_answer_in_channels_that_goes_on_with_a_message_has_no_call() -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It is"}]
    asked = {"messages": messages, "continue_final_message": True, "tools": PICK}
    with thinking("harmony") as server:
        found = message_of(server.ask(ask_for(**asked), " so.<|end|><|start|>assistant" + TO_PICK))
        assert (found["text"][:4], found["calls"]) == (" so.", [])
        refused = server.ask(ask_for(**asked, tool_choice="required"), "")
        assert (refused.status, refused.json["error"]["param"]) == (400, "tool_choice")


def test_a_required_call_follows_the_thought() -> None:
    with thinking() as server:
        answer = server.ask(ask_for(tools=TOOLS, tool_choice="required"), f"<think>\nNo {CALL}\n</think>\n\n{CALL}")
        assert message_of(answer)["thought"] == f"No {CALL}"
        assert message_of(answer)["calls"] == [{"name": "now", "arguments": "{}"}]
        held = server.ask(ask_for(tools=TOOLS, tool_choice="required", **OFF), "No.")
        assert message_of(held)["calls"] == [{"name": "now", "arguments": "{}"}]


def test_a_thought_that_is_left_out_is_counted() -> None:
    text = "hm\n</think>\n\nYes."
    with thinking("r1") as server:
        for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
            for more in ({}, STREAM):
                answer = server.ask(ask_for(**fields, **more), text)
                assert message_of(answer) == {"thought": "", "text": "Yes.", "calls": []}
                assert b"hm" not in answer.body
                details = answer.usage["completion_tokens_details"]
                assert details["reasoning_tokens"] == num_thought_tokens(ids_of(text), THINK)
        refused = server.ask(ask_for(include_reasoning=False, logprobs=True), text)
        assert (refused.status, refused.json["error"]["param"]) == (400, "logprobs")


def test_states_of_thoughts_roll_back() -> None:
    vocabulary = vocabulary_of(ThoughtStyle("think", None, False), TOKENIZER, (EOS_ID,))
    grammar = compiler_of(TOKENIZER, (EOS_ID,)).compile(regex("[ab<]{9}", "p"))
    text = "<think>\na b</think>\n\nab<aaaaaa"
    for ids in cuts_of(text):
        state, masks = AfterThought(vocabulary, ThoughtStart.FREE, grammar).start(), []
        for token_id in ids:
            mask = np.zeros(grammar.num_words, np.int32)
            state.fill_mask(mask)
            assert mask.view(np.uint32)[token_id // 32] >> token_id % 32 & 1
            masks.append(mask)
            state.accept(token_id)
        assert state.is_complete
        for num in range(1, len(ids) + 1):
            state.roll_back(1)
            mask = np.zeros(grammar.num_words, np.int32)
            state.fill_mask(mask)
            assert (mask == masks[len(ids) - num]).all()


QUESTION: Any = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("template", "content", "end", "script", "thought", "said"),
    [
        ("qwen3", "It is ", "</think>\n\nIt is ", "so.", "", "so."),
        ("qwen3", "  It is", "</think>\n\n  It is", " so.", "", " so."),
        ("qwen3", "", "</think>\n\n", "<think>", "", "<think>"),
        ("qwen3", "<think>\nhm", "<think>\nhm", ", so\n</think>\n\nYes.", ", so", "Yes."),
        ("r1", "It is", "assistant\nIt is", " so.", "", " so."),
        ("harmony", "It is", "<|channel|>final<|message|>It is", " so.", "", " so."),
    ],
)
def test_a_last_message_is_continued(
    template: str, content: str, end: str, script: str, thought: str, said: str
) -> None:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    with thinking(template) as server:
        fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        tokens = server.server.ask(request("POST", "/tokenize", fields | {"model": "small"})).json["tokens"]
        assert TOKENIZER.decode(tokens, skip_special_tokens=False).endswith(end)
        marked = {"messages": [QUESTION, messages[1] | {"prefix": True}]}
        for asked in (fields, fields | STREAM, marked):
            answer = server.ask(ask_for(**asked, return_token_ids=True), script)
            assert message_of(answer) == {"thought": thought, "text": said, "calls": []}
            if not asked.get("stream"):
                assert answer.json["prompt_token_ids"] == tokens


HELD = '{"id": 7, "kind": "b"}'


@pytest.mark.parametrize(
    ("template", "content", "script", "thought"),
    [
        *(("qwen3", HELD[:at], HELD[at:], "") for at in (0, 1, 3, 8, 21)),
        ("qwen3", ' {\n  "id": 4', '2, "id": 3}', ""),
        ("qwen3", '{"id":', None, ""),
        ("qwen3", '<think>\nhm\n</think>\n\n{"id": ', None, ""),
        ("qwen3", "<think>\n{", ' so\n</think>\n\nno {"id": 1}', " so"),
        ("harmony", '{"id": 4', "<|end|><|start|>assistant" + TO_PICK, ""),
    ],
)
def test_a_continued_message_is_held_from_where_it_is(
    template: str, content: str, script: str | None, thought: str
) -> None:
    held = {"response_format": FORM}, {"guided_json": SCHEMA}, {"response_format": FORM, "tools": TOOLS}
    marked = {"messages": [QUESTION, {"role": "assistant", "content": content, "prefix": True}]}
    begun = "" if thought else content.rpartition("</think>")[2]
    with thinking(template) as server:
        for fields in held[: 2 if template == "harmony" else 3]:
            whole, streamed = (
                message_of(server.ask(ask_for(**marked, **fields, **more), script)) for more in ({}, STREAM)
            )
            assert whole == streamed
            assert (whole["thought"], whole["calls"]) == (thought, [])
            check_valid(begun + whole["text"])


@pytest.mark.parametrize("content", ["It is", '{"id": 100', "{}", HELD + " "])
def test_a_continued_message_that_may_not_begin_so_is_refused(content: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    with thinking() as server:
        answer = server.ask(ask_for(messages=messages, continue_final_message=True, guided_json=SCHEMA), "")
        assert (answer.status, answer.json["error"]["param"]) == (400, "messages[1]")
        assert "guided_json" in answer.json["error"]["message"]


@pytest.mark.parametrize("template", ["qwen3", "r1"])
def test_an_end_of_the_thought_that_is_cut_is_left_out(template: str) -> None:
    lead = "<think>\n" if template == "qwen3" else ""
    with thinking(template) as server:
        for num in range(len("\n</think>")):
            text = lead + "a < b" + "\n</think>"[:num]
            ids = [one for char in text for one in ids_of(char)]
            for more in ({}, STREAM):
                found = message_of(server.ask(ask_for(max_tokens=len(ids), **more), ids))
                assert found == {"thought": "a < b" + ("\n" if num == 1 else ""), "text": "", "calls": []}


@pytest.mark.parametrize(
    "form", [{"response_format": FORM}, {"guided_regex": "[xy]{3}"}, {"guided_choice": ["xx", "yy"]}]
)
def test_channels_without_tools_have_thoughts_and_what_is_held(form: dict[str, Any]) -> None:
    scripts = [THOUGHT + TO_PICK + '{"id": 7}', THOUGHT + "<|channel|>commentary<|message|>So.<|end|>", "No.", None]
    with thinking("harmony") as server:
        for seed, script in enumerate(scripts):
            asked = {**form, "thinking_token_budget": 3, "seed": seed}
            whole, streamed = (message_of(server.ask(ask_for(**asked, **more), script)) for more in ({}, STREAM))
            assert whole == streamed
            assert whole["calls"] == []
            check_valid(whole["text"]) if "response_format" in form else re.fullmatch("[xy]{2,3}", whole["text"])


def test_a_thought_that_is_used_up_within_a_character_writes_it_first() -> None:
    """The grammar of channels takes no mark behind a part of one."""
    crab = "\U0001f980"
    num = len(ids_of(crab))
    assert num > 1
    with thinking("harmony") as server:
        for budget in range(1, 2 * num + 1):
            thought = ids_of("<|channel|>analysis<|message|>" + 9 * crab)
            whole = server.ask(ask_for(response_format=FORM, thinking_token_budget=budget), thought)
            assert whole.status == 200
            assert message_of(whole)["thought"] == crab * -(-budget // num)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "messages[0]"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [QUESTION | {"prefix": True}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": "a", "partial": True}, QUESTION]}, "messages[0].partial"),
    ],
)
def test_what_cannot_be_continued_is_refused(fields: dict[str, Any], param: str) -> None:
    with thinking() as server:
        answer = server.ask(ask_for(**fields), "")
        assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_a_prompt_without_its_end_is_what_the_messages_are() -> None:
    with thinking() as server:
        body = {"model": "small", "messages": [QUESTION], "add_generation_prompt": False}
        tokens = server.server.ask(request("POST", "/tokenize", body)).json["tokens"]
        assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "<|im_start|>user\nx<|im_end|>\n"


def test_the_ledger_has_the_tokens_of_the_thought_and_takes_rows_of_before(tmp_path: Path) -> None:
    path, text = tmp_path / "ledger.db", "hm\n</think>\n\nYes."
    with thinking("r1", ledger=path) as server:
        server.ask(ask_for(n=2), text)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT reasoning_tokens, completion_tokens FROM requests").fetchall() == [
            (2 * num_thought_tokens(ids_of(text), THINK), 2 * (len(ids_of(text)) + 1))
        ]
        database.execute("ALTER TABLE requests DROP COLUMN reasoning_tokens")
        database.execute("ALTER TABLE requests DROP COLUMN context")
        database.execute("DROP TABLE responses")
        database.execute("PRAGMA user_version = 1")
        database.commit()
    with thinking("r1", ledger=path, first_id=2) as server:
        server.ask(ask_for(), text)
    (line,) = read_usage(path, UsageQuery(Grouping.MODEL))
    assert (line.requests, line.reasoning_tokens) == (2, num_thought_tokens(ids_of(text), THINK))
