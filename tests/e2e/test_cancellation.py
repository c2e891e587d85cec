"""Leaving early: whoever goes, is stopped or is told to end gives everything back, and is counted right."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.raw_http import RawClient, ask, connected, post, post_bytes
from tests.e2e.server_process import ServerProcess

LONG_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True, "stream": True}


def first_event(client: RawClient) -> dict[str, Any]:
    """Read the head of a stream and its first event."""
    status, headers = client.read_head()
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    client.read_until(b"data: ")
    event: dict[str, Any] = json.loads(client.read_until(b"\n\n"))
    return event


def stream_events(client: RawClient) -> list[bytes]:
    """What is left of the stream, as events without their frames."""
    text = b"".join(client.read_chunks())
    return [event.removeprefix(b"data: ") for event in text.split(b"\n\n") if event]


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
def test_client_that_leaves_a_stream_or_a_whole_answer_frees_its_blocks(server: ServerProcess, leave: str) -> None:
    before = server.metrics()["steploop_disconnects_total"]
    with connected(server.port) as client:
        client.send(post_bytes("/v1/chat/completions", LONG_CHAT))
        first_event(client)
        server.wait_running(1)
        assert server.metrics()["steploop_kv_blocks_used"] > 0
        getattr(client, leave)()
        server.wait_quiet()
    assert server.metrics()["steploop_disconnects_total"] == before + 1
    with connected(server.port) as client:
        client.send(post_bytes("/v1/chat/completions", LONG_CHAT | {"stream": False, "n": 4}))
        server.wait_running(4)
        getattr(client, leave)()
    server.wait_quiet()


def test_delete_by_the_id_of_the_first_chunk_ends_the_stream_with_an_error_event(server: ServerProcess) -> None:
    with connected(server.port) as client:
        client.send(post_bytes("/v1/chat/completions", LONG_CHAT))
        request_id = first_event(client)["id"]
        deleted = ask(server.port, "DELETE", f"/v1/requests/{request_id}")
        assert (deleted.status, deleted.json) == (200, {"status": "cancelled"})
        rest = client.read_until(b"0\r\n\r\n")
        assert b'"code":"request_cancelled"' in rest
        assert b"[DONE]" not in rest
        assert client.is_kept_open()
    server.wait_quiet()
    again = ask(server.port, "DELETE", f"/v1/requests/{request_id}")
    assert (again.status, again.code) == (404, "request_not_found")


def test_name_that_a_client_gave_its_request_is_no_key_to_it(server: ServerProcess) -> None:
    with connected(server.port) as client:
        client.send(post_bytes("/v1/chat/completions", LONG_CHAT | {"stream": False}, headers=("x-request-id: mine",)))
        server.wait_running(1)
        assert ask(server.port, "DELETE", "/v1/requests/mine").status == 404, "others could guess it"


def test_stop_string_ends_the_sequence_and_counts_what_was_kept(server: ServerProcess) -> None:
    ask_for = {"model": MODEL, "prompt": "A step", "max_tokens": 40, "temperature": 0, "logprobs": 0}
    whole = post(server.port, "/v1/completions", ask_for).json["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    position = next(i for i in range(8, 40) if tokens[i].isalpha() and tokens[i] not in "".join(tokens[:i]))
    stopped = post(server.port, "/v1/completions", ask_for | {"stop": tokens[position], "max_tokens": 2000}).json
    choice = stopped["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole["text"][: whole["text"].index(tokens[position])]
    assert stopped["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    assert stopped["usage"]["completion_tokens"] in (position, position + 1)


def test_usage_of_a_stream_is_that_of_the_whole_answer(server: ServerProcess) -> None:
    chat = LONG_CHAT | {"max_tokens": 20, "n": 3}
    whole = post(server.port, "/v1/chat/completions", chat | {"stream": False}).json
    with connected(server.port) as client:
        client.send(post_bytes("/v1/chat/completions", chat | {"stream_options": {"include_usage": True}}))
        client.read_head()
        *_, last, done = stream_events(client)
    assert done == b"[DONE]"
    assert json.loads(last)["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 60
