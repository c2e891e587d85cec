"""llama-server's surfaces, and texts between two others: the model's own marks around them, and its own ends."""

import json
from dataclasses import replace
from itertools import chain
from typing import Any

from core.tokenizer import Tokenizer
from server.api.models import ServerCard
from server.generation import Generations
from tests.core.small_tokenizers import byte_level
from tests.server.simulated_server import SimulatedServer, completion, refusal_of, request

MARKS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|fim_pad|>"]


def mark(served: Generations, *more: str) -> Tokenizer:
    """Let the model have marks."""
    marked = byte_level()
    marked.add_special_tokens([*MARKS, *more])
    own, tokenizer = served.known_own, Tokenizer(marked.to_str())
    served.own = own._replace(reader=replace(own.reader, tokenizer=tokenizer))
    return tokenizer


def test_a_suffix_is_put_behind_the_models_marks(server: SimulatedServer) -> None:
    refused = server.ask(completion(prompt="a", suffix="b"))
    assert (refusal_of(refused)[0], refused.json["error"]["param"]) == (400, "suffix")
    mark(server.generations)
    plain = server.ask(completion(prompt="a", max_tokens=2)).json
    filled = server.ask(completion(prompt="a", suffix="b", max_tokens=2)).json
    assert filled["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 4  # three marks, and b


def infill(**fields: Any) -> bytes:
    return request("POST", "/infill", {"input_prefix": "def f(", "input_suffix": "): pass"} | fields)


def test_an_editor_fills_in_with_other_files_before(server: SimulatedServer) -> None:
    refused = server.ask(infill())
    assert (refusal_of(refused)[0], refused.json["error"]["param"]) == (400, "input_suffix")
    mark(server.generations)
    editor = {"n_predict": 3, "samplers": ["top_k"], "t_max_predict_ms": 9, "cache_prompt": True, "n_indent": 4}
    alone = server.ask(infill(**editor)).json
    assert (alone["stop"], alone["stop_type"], alone["tokens_predicted"]) == (True, "limit", 3)
    assert alone["timings"]["prompt_n"] == alone["tokens_evaluated"]
    extra = [{"filename": "a.py", "text": "x = 1"}]
    fields = ["content", "timings/predicted_n", "nothing/there"]
    shown = server.ask(infill(**editor, input_extra=extra, response_fields=fields)).json
    assert shown.keys() == {"content", "timings/predicted_n"}
    events = [
        json.loads(line[6:]) for line in server.ask(infill(stream=True, n_predict=3)).body.decode().split("\n\n")[:-1]
    ]
    assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
    for bad, param in (
        ({"input_suffix": None}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"n": 2}, "n"),
        ({"stream": True, "response_fields": ["content"]}, "response_fields"),
        ({"input_prefix": "a" * 200}, "input_prefix"),
    ):
        assert server.ask(infill(**bad)).json["error"]["param"] == param


def test_files_come_under_the_models_marks(server: SimulatedServer) -> None:
    files = [("a.py", "x"), ("b.py", "y")]
    plain = mark(server.generations).encode_around("p", "s", True, files)
    marked = mark(server.generations, "<file_sep>", "<repo_name>")
    found = marked.encode_around("p", "s", True, files)
    assert plain is not None
    assert found is not None
    assert "--- snippet ---" in marked.decode(plain, skip_special_tokens=False)
    expected = "<repo_name>myproject\n<file_sep>a.py\nx<file_sep>b.py\ny<file_sep>filename\n"
    expected += "<fim_prefix>p<fim_suffix>s<fim_middle>"
    assert marked.decode(found, skip_special_tokens=False).endswith(expected)


def test_files_that_spell_marks_have_none(server: SimulatedServer) -> None:
    spelling = [("<file_sep>", "<|fim_pad|>"), ("b", "<repo_name>")]
    for more in ((), ("<file_sep>", "<repo_name>")):
        marked = mark(server.generations, *more)
        plain, found = (
            marked.encode_around(*texts, False, files)
            for texts, files in ((("a", "b"), [("a", "b"), ("b", "c")]), (("<fim_middle>", "<|im_end|>"), spelling))
        )
        assert plain is not None
        assert found is not None
        control, written = ([one for one in ids if one in marked.special_ids] for ids in (plain, found))
        assert written == control
        shown = marked.decode(found, skip_special_tokens=False)
        assert "<fim_prefix><fim_middle><fim_suffix><|im_end|><fim_middle>" in shown


def test_a_completion_says_what_llama_servers_does(server: SimulatedServer) -> None:
    """Each token with its id and its likeliest neighbours, where they are asked for: the same streamed and whole."""
    plain = server.ask(completion(prompt="The engine", max_tokens=5)).json
    ids = server.ask(request("POST", "/tokenize", {"prompt": "The engine"})).json["tokens"]
    for prompt in ("The engine", ids):
        asked = {"prompt": prompt, "n_predict": 5, "seed": 7, "ignore_eos": True, "n_probs": 2, "return_tokens": True}
        whole = server.ask(request("POST", "/completion", asked)).json
        assert (whole["content"], whole["tokens_predicted"]) == (plain["choices"][0]["text"], 5)
        assert [one["id"] for one in whole["completion_probabilities"]] == whole["tokens"]
        assert [len(one["top_logprobs"]) for one in whole["completion_probabilities"]] == [2] * 5
        lines = server.ask(request("POST", "/completion", asked | {"stream": True})).body.decode().split("\n\n")[:-1]
        events = [json.loads(line[6:]) for line in lines]
        for field in ("content", "tokens", "completion_probabilities"):
            told = [one[field] for one in events if field in one]
            assert ("".join(told) if field == "content" else list(chain.from_iterable(told))) == whole[field]
    mixed = [ids[0], "".join(map(server.generations.reader.tokenizer.text_of, ids[1:])), *ids[:2]]
    for prompt, same in (([ids], ids), (["The engine"], ids), (mixed, [*ids, *ids[:2]])):
        asked = {"n_predict": 5, "seed": 7}
        one, other = (server.ask(request("POST", "/completion", asked | {"prompt": p})).json for p in (prompt, same))
        assert one["content"] == other["content"]
        assert one["tokens_evaluated"] == other["tokens_evaluated"] == len(same)
    for bad, param in (
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ["a", [1, 2]]}, "prompt"),
        ({"n_probs": 99}, "n_probs"),
        ({"prompt": [-1]}, "prompt[0]"),
    ):
        assert server.ask(request("POST", "/completion", {"prompt": "a"} | bad)).json["error"]["param"] == param
    nothing = server.ask(request("POST", "/completion", {"prompt": "a", "n_predict": 0, "beam_width": 2}))
    assert "at least 1" in nothing.json["error"]["message"]


def test_no_token_more_than_the_prompt(server: SimulatedServer) -> None:
    """It is computed, and the next request finds it."""
    prompt = "The engine waits for blocks, and then it does not. " * 3
    first = server.ask(request("POST", "/completion", {"prompt": prompt, "n_predict": 0})).json
    assert (first["content"], first["tokens_predicted"], first["stop_type"]) == ("", 0, "limit")
    streamed = server.ask(request("POST", "/completion", {"prompt": prompt, "n_predict": 0, "stream": True}))
    assert b'"stop":true' in streamed.body
    again = server.ask(request("POST", "/completion", {"prompt": prompt, "n_predict": 1})).json
    assert again["tokens_cached"] >= first["tokens_evaluated"] - server.limits.block_size
    server.check_idle()


def test_props_and_slots_tell_what_clients_look_for(server: SimulatedServer) -> None:
    (model,) = server.generations.reader.cards
    numbers = {"max_sequences": 8, "max_batch_tokens": 16, "num_kv_tokens": 256, "speculates": True}
    server.app.card = ServerCard(model=model, model_type=None, architectures=(), version="1", **numbers)
    props = server.ask(request("GET", "/props"), "GET").json
    assert props["default_generation_settings"]["n_ctx"] == server.limits.max_model_len
    assert "<|im_start|>" in props["chat_template"]
    assert "/" not in props["model_path"]
    transport = server.send(completion(max_tokens=30))
    server.step()
    slots = server.ask(request("GET", "/slots"), "GET").json
    assert len(slots) == props["total_slots"]
    assert [one["id"] for one in slots if one["is_processing"]] == [0]
    assert all(one["speculative"] for one in slots)
    transport.feed_eof()
    server.loop.settle()
