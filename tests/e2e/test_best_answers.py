"""The best of several answers over HTTP: beams, and best_of."""

from typing import Any

import pytest

from tests.e2e.raw_http import post
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_bad_input import CHAT, COMPLETIONS, RESPONSES, chat, completion, response

PROMPT = [7, 30, 51]


def sums(answer: Any) -> list[float]:
    """Of each choice's logprobs."""
    return [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]


def test_beams_find_likelier_answers_than_greedy_ones_on_every_surface(server: ServerProcess) -> None:
    asked = completion(prompt=PROMPT, max_tokens=6, ignore_eos=True, logprobs=0)
    greedy = post(server.port, COMPLETIONS, asked | {"temperature": 0}).json
    found = post(server.port, COMPLETIONS, asked | {"beam_width": 4, "n": 3}).json
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert sums(found) == sorted(sums(found), reverse=True)
    assert sums(found)[0] >= sums(greedy)[0]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (3, 4 * 6)
    alike = post(server.port, COMPLETIONS, asked | {"use_beam_search": True, "n": 4}).json
    assert [one["text"] for one in alike["choices"][:3]] == [one["text"] for one in found["choices"]]
    for path, body in ((CHAT, chat(max_tokens=5)), (RESPONSES, response(max_output_tokens=5))):
        answer = post(server.port, path, body | {"beam_width": 3}).json
        assert len(answer.get("choices", answer.get("output"))) == 1


def test_best_of_shows_the_likeliest_by_token(server: ServerProcess) -> None:
    asked = completion(prompt=PROMPT, max_tokens=6, seed=5, logprobs=0, temperature=1.5)
    all_of_them = post(server.port, COMPLETIONS, asked | {"n": 5}).json
    shown = post(server.port, COMPLETIONS, asked | {"best_of": 5, "n": 2}).json

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    best = sorted(all_of_them["choices"], key=mean, reverse=True)[:2]
    assert [one["text"] for one in shown["choices"]] == [one["text"] for one in best]
    assert shown["usage"] == all_of_them["usage"]
    assert "logprobs" in asked
    plain = post(server.port, COMPLETIONS, completion(prompt=PROMPT, max_tokens=3, best_of=2)).json
    assert plain["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 4, "stream": True}, "stream"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"beam_width": 9}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "beam_width"),
        ({"use_beam_search": True, "n": 9}, "n"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        *(
            ({name: value}, name)
            for name, value in {
                "temperature": 0.5,
                "top_p": 0.9,
                "presence_penalty": 1,
                "dry_multiplier": 1,
                "stop": "a",
                "logit_bias": {"5": 1},
                "speculation": True,
                "guided_regex": "a+",
            }.items()
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_beams_is_refused(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    beams = (
        {} if fields.keys() & {"best_of", "length_penalty", "early_stopping", "use_beam_search"} else {"beam_width": 2}
    )
    answer = post(server.port, COMPLETIONS, completion(prompt=PROMPT) | beams | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
