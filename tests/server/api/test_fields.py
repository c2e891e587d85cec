"""Through the chat surface: the fields are the same on all of them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from core.errors import InvalidRequest
from core.types import BANNED, SamplingParams
from server.api import chat, completions, llama_server, responses
from server.api.fields import UNLIMITED_TOKENS, GenerationDefaults, RequestLimits, checked_ids
from server.config_sources import load_config
from server.gate.tenants import Deadlines
from tests.server.api import wire
from tests.server.api.wire import VOCAB_SIZE

WRONG_DEADLINES: list[tuple[Any, str]] = [
    ({"ttft_ms": 0}, "deadlines.ttft_ms"),
    ({"total_ms": 1e12}, "deadlines.total_ms"),
    ({"inter_token_ms": "5"}, "deadlines.inter_token_ms"),
    ({"ttft": 5}, "deadlines.ttft"),
    (5, "deadlines"),
]
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def sampling(**fields: Any) -> SamplingParams:
    return wire.parse(chat.SURFACE, **ASK, **fields).sampling


def param(**fields: Any) -> str | None:
    return wire.refusal(chat.SURFACE, **ASK, **fields).param


def test_silence_means_the_models_defaults() -> None:
    assert sampling() == SamplingParams(max_tokens=UNLIMITED_TOKENS, temperature=0.6, top_k=20, top_p=0.9)
    assert sampling(temperature=None, stop=None, logit_bias=None, n=None) == sampling()


def test_the_models_bounds_of_answers_hold_where_the_request_has_none() -> None:
    defaults = GenerationDefaults(vocab_size=100, min_tokens=5, max_tokens=20)

    def of(**asked: Any) -> tuple[int, int]:
        body = json.dumps({"model": "m", **ASK, **asked}).encode()
        found = chat.SURFACE.parse(body, lambda _: ("tiny", defaults)).sampling
        return found.min_tokens, found.max_tokens

    assert of() == (5, 20)
    assert of(max_tokens=3) == (3, 3)
    assert of(min_tokens=0, max_tokens=40) == (0, 40)


def test_no_token_is_penalised_within_a_window_of_none() -> None:
    silent = sampling()
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 1, "dry_multiplier": 2, "dry_base": 1.75}
    assert sampling(**penalties, repeat_last_n=0, dry_penalty_last_n=0) == structs.replace(silent, dry_penalty_last_n=0)
    assert sampling(repeat_last_n=64) == silent
    assert sampling(repeat_last_n=64, presence_penalty=1).repeat_last_n == 64
    assert sampling(dry_multiplier=1).dry_sequence_breakers == ("\n", ":", '"', "*")


def test_what_the_model_suppresses_is_never_sampled_whatever_is_asked() -> None:
    body = json.dumps({"model": "m", **ASK, "logit_bias": {"7": 100, "8": 1}}).encode()
    defaults = GenerationDefaults(vocab_size=100, suppressed_ids=(7, 9))
    biases = dict(chat.SURFACE.parse(body, lambda _: ("tiny", defaults)).sampling.logit_bias)
    assert biases == {7: BANNED, 8: 1, 9: BANNED}


def test_llama_servers_completions_take_any_bias_and_ban_the_ends_that_they_ignore() -> None:
    defaults = GenerationDefaults(vocab_size=100, end_ids=(2, 3))

    def biases(**fields: Any) -> dict[int, float]:
        body = json.dumps({"prompt": "a", **fields}).encode()
        return dict(llama_server.COMPLETION.parse(body, lambda _: ("m", defaults)).sampling.logit_bias)

    assert biases(logit_bias=[[7, -1e300], [3, 9]], ignore_eos=True) == {7: -1e9, 3: BANNED, 2: BANNED}
    assert biases(logit_bias={"7": -250.5}, ignore_eos=False) == {7: -250.5}
    assert sampling(ignore_eos=True).logit_bias == ()


def test_biases_come_as_pairs_too() -> None:
    assert sampling(logit_bias=[[7, 2.5], [7, 1], [8, 1], [8, False]]).logit_bias == ((7, 3.5), (8, BANNED))
    assert sampling(logit_bias={"8": False}).logit_bias == ((8, BANNED),)
    assert sampling(logit_bias=[]).logit_bias == ()
    assert param(logit_bias=[[VOCAB_SIZE, 1]]) == f"logit_bias[{VOCAB_SIZE}]"
    assert param(logit_bias=[[7.5, 1]]) == "logit_bias[7.5]"
    assert param(logit_bias=[[7]]) == "logit_bias[0]"
    assert param(logit_bias=[["Hello", 1]]) == "logit_bias[0][0]"


def test_every_field_arrives() -> None:
    assert sampling(
        temperature=1,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"7": 2, "0": -100},
        min_tokens=3,
        max_tokens=9,
        seed=5,
        stop=["a", "b"],
        stop_token_ids=[0, VOCAB_SIZE - 1],
        ignore_eos=True,
    ) == SamplingParams(
        max_tokens=9,
        temperature=1.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias=((7, 2.0), (0, -100.0)),
        min_tokens=3,
        seed=5,
        stop=("a", "b"),
        stop_token_ids=(0, VOCAB_SIZE - 1),
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", (0, 2), (-0.01, 2.01, 2**70)),
        ("top_p", (0, 1), (-0.001, 1.001)),
        ("top_k", (-1, 0, 2**63 - 1), (-2, 2**63)),
        ("min_p", (0, 1), (-0.1, 1.1)),
        ("typical_p", (0, 1), (-0.1, 1.1)),
        ("top_n_sigma", (-1, 0, 1.5), (-2, 1001)),
        ("xtc_probability", (0, 1), (-0.1, 1.1)),
        ("xtc_threshold", (0, 0.6), (-0.1, 1.1)),
        ("dry_multiplier", (0, 100), (-1, 101)),
        ("dry_base", (1, 100), (0.9, 101)),
        ("dry_allowed_length", (0, 9), (-1, 2**31)),
        ("dry_penalty_last_n", (-1, 0, 64), (-2,)),
        ("dry_sequence_breakers", (["a"] * 16, ["x" * 40]), ([], ["a"] * 17)),
        ("repeat_last_n", (-1, 0, 64), (-2,)),
        ("presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
        ("repetition_penalty", (0.01, 1, 100), (0, -1, 101)),
        ("n", (1, 64), (0, 65, -1, 2**64)),
        ("seed", (-(2**63), 2**64 - 1), (-(2**63) - 1, 2**64)),
        ("max_tokens", (1, 2**63 - 1), (0, -1, 2**63)),
        ("max_completion_tokens", (1, 2**63 - 1), (0, -1, 2**63)),
        ("min_tokens", (0, 10), (-1, UNLIMITED_TOKENS + 1)),
        ("stop", ("a", [], ["a"] * 16, "x" * 1024), ("", ["a"] * 17, "x" * 1025)),
        ("stop_token_ids", ([], [0]), ([0] * 65,)),
        (
            "logit_bias",
            ({}, {"0": 100}, {str(i): 1 for i in range(300)}),
            ({str(i): 1 for i in range(301)},),
        ),
    ],
)
def test_a_range_holds_to_its_ends(name: str, inside: tuple[Any, ...], outside: tuple[Any, ...]) -> None:
    for value in inside:
        sampling(**{name: value})
    for value in outside:
        assert param(**{name: value}) == name


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [1, VOCAB_SIZE]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, f"logit_bias[{VOCAB_SIZE}]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias[-1]"),
        ({"logit_bias": {"07": 1}}, "logit_bias[07]"),
        ({"logit_bias": {"\u0667": 1}}, "logit_bias[\u0667]"),
        ({"logit_bias": {"x" * 99: 1}}, f"logit_bias[{'x' * 32}]"),
        ({"logit_bias": {"1": 2, "5": True, "6": True}}, "logit_bias[5]"),
        ({"logit_bias": [[1, True]]}, "logit_bias[1]"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias[1]"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], expected: str) -> None:
    assert param(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"context_policy": "all"}, "context_policy must be one of error, drop_oldest_turns, "),
        ({"context_policy": {"type": "all"}}, "context_policy.type must be one of error, drop_oldest_turns, "),
        ({"early_stopping": "maybe"}, "early_stopping must be one of true, false, never, not 'maybe'."),
        ({"prediction": {"type": "x", "content": "a"}}, "prediction.type must be content, not 'x'."),
    ],
)
def test_a_refusal_names_the_values_that_there_are(fields: dict[str, Any], expected: str) -> None:
    assert wire.refusal(chat.SURFACE, **ASK, **fields).message.startswith(expected)


def test_tools_that_are_not_functions_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    foreign = [{"type": "web_search"}, {"type": "code_interpreter"}, {"type": "web_search"}]
    for surface, ask in ((chat.SURFACE, ASK), (responses.SURFACE, {"input": "Hi"})):
        dropped = wire.parse(surface, **ask, tools=foreign)
        assert (dropped.prompts, dropped.tools) == (wire.parse(surface, **ask).prompts, None)
        assert caplog.messages == ["tools that are not functions were dropped: web_search, code_interpreter"]
        caplog.clear()
        refused = wire.refusal(surface, **ask, tools=[*foreign, {"type": "function"}]).param
        assert refused == ("tools[0].function" if surface is chat.SURFACE else "tools[0].name")
        caplog.clear()


def test_a_tools_name_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    wire.parse(chat.SURFACE, **ASK, tools=[{"type": "a\nERROR " + "b" * 99}])
    (message,) = caplog.messages
    assert message.endswith("a\\nERROR\\x20" + "b" * 24)


@pytest.mark.parametrize("tools", [[{}], [{"type": 1}], ["web_search"], {"type": "web_search"}, [{"type": "function"}]])
def test_tools_that_may_be_functions_are_refused(tools: Any) -> None:
    error = wire.refusal(completions.SURFACE, prompt="Hi", tools=tools)
    assert (error.param, error.code) == ("tools", "unsupported_parameter")
    assert error.message.endswith("Leave it out, or send [].")
    assert str(wire.refusal(chat.SURFACE, **ASK, tools=tools).param).startswith("tools")


def test_a_refusal_says_what_is_supported() -> None:
    error = wire.refusal(completions.SURFACE, prompt="Hi", tool_choice="required")
    assert error.message.endswith('Leave it out, or send "none", or send "auto".')


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        *(({"top_k": k}, {"top_k": 0}) for k in (-1, 0, VOCAB_SIZE, 2**60)),  # no limit
        ({"temperature": 1e-30}, {"temperature": 0.0}),  # the division would overflow
        *(({"seed": seed}, {"seed": seed % 2**64}) for seed in (0, -2, 2**64 - 1)),
        ({"seed": -1}, {"seed": None}),  # as of other servers
    ],
)
def test_odd_values_are_read_as_the_sampler_takes_them(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampling(**asked) == structs.replace(sampling(), **expected)


@pytest.mark.parametrize(
    ("name", "default", "taken", "wrong"),
    [
        ("cache_salt", "", {"é" * 256: "é" * 256}, {"": "", "s" * 257: "", 5: ""}),
        ("priority", None, {-4: -4}, {5: "", -5: "", 0.5: "", "high": ""}),
    ],
)
@pytest.mark.parametrize(
    ("surface", "ask"),
    [(chat.SURFACE, ASK), (completions.SURFACE, {"prompt": "Hi"}), (responses.SURFACE, {"input": "Hi"})],
)
def test_what_all_surfaces_share_arrives_from_each(
    surface: Any, ask: dict[str, Any], name: str, default: Any, taken: dict[Any, Any], wrong: dict[Any, str]
) -> None:
    for value in ({}, {name: None}):
        assert getattr(wire.parse(surface, **ask, **value), name) == default
    for value, expected in taken.items():
        assert getattr(wire.parse(surface, **ask, **{name: value}), name) == expected
    for value in wrong:
        assert wire.refusal(surface, **ask, **{name: value}).param == name
    limits = {"ttft_ms": 250, "total_ms": None}
    assert wire.parse(surface, **ask, deadlines=limits).deadlines == Deadlines(ttft_s=0.25)
    for deadlines, param in WRONG_DEADLINES:
        assert wire.refusal(surface, **ask, deadlines=deadlines).param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["messages", "model", "temperature", "stop", "logit_bias", "n"]), JSON)
def test_any_json_in_a_field_is_parsed_or_refused_by_name(name: str, value: object) -> None:
    try:
        call = wire.parse(chat.SURFACE, **ASK | {name: value})
    except InvalidRequest as error:
        named = error.param
    else:
        named = name
        assert 0 <= call.sampling.temperature <= 2
        assert 1 <= call.num_sequences <= 64
    assert named is not None
    assert named.startswith(name)


@pytest.mark.parametrize(
    ("field", "known"), [("deadlines", "ttft_ms, inter_token_ms, total_ms"), ("timings", "queue, tokens")]
)
def test_an_unknown_name_in_a_field_of_ours_is_told_the_known_ones(field: str, known: str) -> None:
    error = wire.refusal(chat.SURFACE, **ASK, **{field: {"ttft": 5}})
    assert (error.message, error.param) == (f"There is no {field}.ttft. {field} may have {known}.", f"{field}.ttft")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 3}, "n"),
        ({"prompt": ["a"] * 3}, "prompt"),
        ({"stop": ["~"] * 3}, "stop"),
        ({"logit_bias": {"1": 0, "2": 0, "3": 0}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_what_one_request_may_ask_for_is_the_operators_to_say(asked: dict[str, object], param: str) -> None:
    body = json.dumps({"model": "m", "prompt": "a"} | asked).encode()

    def parse(limits: RequestLimits) -> None:
        completions.SURFACE.parse(body, lambda _: ("m", GenerationDefaults(vocab_size=100, limits=limits)))

    names = {f"max_{name}": "2" for name in ("choices", "prompts", "stops", "logit_biases", "top_logprobs")}
    parse(load_config(names | dict.fromkeys(names, "3"), {}).request_limits)
    with pytest.raises(InvalidRequest) as caught:
        parse(load_config(names, {}).request_limits)
    assert caught.value.param == param


@pytest.mark.parametrize("ids", [[10], [-1], [2**64]])
def test_ids_beyond_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_ids([9, *ids], "tokens", 10)
    assert caught.value.param == "tokens[1]"
