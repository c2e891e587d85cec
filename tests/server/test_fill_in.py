"""Texts between two others, through the whole server: the model's own marks around them, and its own ends."""

import json
from dataclasses import replace
from typing import Any

from core.tokenizer import Tokenizer
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
