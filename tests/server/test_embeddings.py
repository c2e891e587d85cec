"""/v1/embeddings and Ollama's, through the whole server: what is accepted, what comes back, who is billed what."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.simulation import pooled_vector
from core.types import Pooling
from server.api.fields import PoolingStyle
from server.gate.tenants import Limits
from server.ledger.store import RowState
from tests.server.inline_ledger import rows
from tests.server.simulated_server import (
    MODEL,
    TOKENIZER,
    SimulatedServer,
    as_caller,
    chat,
    keyed_tenant,
    refusal_of,
    request,
    serving,
)

STYLE = PoolingStyle(pooling=Pooling("last"), num_dims=8, generates=True)


def let_pool(server: SimulatedServer, style: PoolingStyle = STYLE, num_inputs: int = 2048) -> None:
    own = server.generations.known_own
    limits = msgspec.structs.replace(own.reader.defaults.limits, num_inputs=num_inputs)
    defaults = msgspec.structs.replace(own.reader.defaults, pooling=style, limits=limits)
    cards = tuple(msgspec.structs.replace(card, tasks=style.tasks) for card in own.reader.cards)
    server.generations.own = own._replace(reader=replace(own.reader, cards=cards, defaults=defaults))


def embed(**fields: Any) -> bytes:
    return request("POST", "/v1/embeddings", {"model": MODEL, "input": "hello"} | fields)


def vector_of(text: str | list[int], dimensions: int = 8, is_normalized: bool = True) -> list[float]:
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    vector = np.frombuffer(pooled_vector(np.array(ids, np.int32).tobytes()), np.float32)[:dimensions].astype(np.float64)
    found: list[float] = (vector / np.linalg.norm(vector) if is_normalized else vector).tolist()
    return found


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        (["hello", "there you are"], ["hello", "there you are"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [8]], [[5, 6], [8]]),
        (["hello", [8]], ["hello", [8]]),
    ],
)
def test_every_form_of_input_has_a_vector_each(server: SimulatedServer, given: Any, texts: list[Any]) -> None:
    let_pool(server)
    answer = server.ask(embed(input=given)).json
    assert [one["index"] for one in answer["data"]] == list(range(len(texts)))
    for one, text in zip(answer["data"], texts, strict=True):
        assert one["embedding"] == pytest.approx(vector_of(text), abs=1e-6)
    num_tokens = sum(len(TOKENIZER.encode(text)) if isinstance(text, str) else len(text) for text in texts)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"]) == (num_tokens, num_tokens, 0)
    cut = server.ask(embed(input=given, dimensions=3, encoding_format="base64")).json["data"]
    numbers = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in cut]
    assert numbers == [pytest.approx(vector_of(text, 3), abs=1e-6) for text in texts]
    server.check_idle()


def test_prompts_of_the_model_come_before_a_text(server: SimulatedServer) -> None:
    prompts = {"query": "search: ", "document": ""}
    let_pool(server, msgspec.structs.replace(STYLE, prompts=prompts, default_prompt="document", is_normalized=False))
    for name, before in ((None, ""), ("query", "search: "), ("document", "")):
        found = server.ask(embed(prompt_name=name)).json["data"][0]["embedding"]
        assert found == pytest.approx(vector_of(before + "hello", is_normalized=False))
    refused = server.ask(embed(prompt_name="quest"))
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt_name")
    assert "query, document" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": [[3], [99999]]}, "input[1][0]"),
        ({"input": ["a"] * 5}, "input"),
        ({"input": None}, "input"),
        ({"dimensions": 9}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": ["a", "x " * 400]}, "input[1]"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_field(
    server: SimulatedServer, fields: dict[str, Any], param: str
) -> None:
    let_pool(server, num_inputs=4)
    refused = server.ask(embed(**fields))
    assert (refused.status, refused.json["error"]["param"]) == (400, param)
    server.check_idle()


def test_a_text_that_is_too_long_is_cut_if_it_may_be(server: SimulatedServer) -> None:
    let_pool(server)
    most, text = server.limits.max_model_len, "x y " * 400
    whole = TOKENIZER.encode(text)
    assert refusal_of(server.ask(embed(input=text))) == (400, "context_length_exceeded")
    for asked, kept in ((-1, most), (7, 7), (10**6, most)):
        for given in (text, whole):
            answer = server.ask(embed(input=given, truncate_prompt_tokens=asked)).json
            assert answer["usage"]["prompt_tokens"] == kept
            assert answer["data"][0]["embedding"] == pytest.approx(vector_of(whole[:kept]), abs=1e-6)
    filled = server.ask(embed(input=whole[:most])).json  # it needs no room for a token more
    assert filled["usage"]["prompt_tokens"] == most
    server.check_idle()


def test_models_do_what_they_are_for(server: SimulatedServer) -> None:
    for asked in (embed(), request("POST", "/v1/rerank", {"query": "a", "documents": ["b"]})):
        refused = server.ask(asked)
        assert refusal_of(refused) == (400, "unsupported_model")
        assert "--pooling" in refused.json["error"]["message"]
    let_pool(server, msgspec.structs.replace(STYLE, generates=False))
    assert server.ask(embed()).status == 200
    refused = server.ask(chat())
    assert refusal_of(refused) == (400, "unsupported_model")
    assert "/v1/embeddings" in refused.json["error"]["message"]
    (card,) = server.ask(request("GET", "/v1/models"), "GET").json["data"]
    assert card["tasks"] == ["embed", "score"]


def test_ollamas_clients_get_their_form(server: SimulatedServer) -> None:
    let_pool(server)
    answer = server.ask(request("POST", "/api/embed", {"model": f"{MODEL}:latest", "input": ["hello", "x " * 400]}))
    assert answer.json["model"] == MODEL
    assert answer.json["embeddings"][0] == pytest.approx(vector_of("hello"), abs=1e-6)
    assert answer.json["prompt_eval_count"] == len(TOKENIZER.encode("hello")) + server.limits.max_model_len
    old = server.ask(request("POST", "/api/embeddings", {"model": MODEL, "prompt": "hello"})).json
    assert old == {"embedding": answer.json["embeddings"][0]}
    long = {"model": MODEL, "input": "x " * 400, "truncate": False}
    assert server.ask(request("POST", "/api/embed", long)).status == 400
    assert server.ask(request("POST", "/api/embed", {"model": MODEL})).status == 400


def test_prompt_tokens_are_billed_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    tenant = keyed_tenant("acme", "key", limits=Limits(tokens_per_day=30))
    with serving(tenants=(tenant,), ledger=path) as server:
        let_pool(server)
        answer = server.ask(as_caller(embed(input=[[4] * 12, [5] * 8]), "key"))
        assert answer.json["usage"]["total_tokens"] == 20
        (row,) = rows(path)
        assert (row.prompt_tokens, row.completion_tokens, row.path) == (20, 0, "/v1/embeddings")
        assert row.state is RowState.SETTLED
        assert server.ask(as_caller(embed(input=[7] * 12), "key")).status == 429


def test_a_client_that_leaves_and_a_deadline_end_it(server: SimulatedServer) -> None:
    let_pool(server)
    transport = server.send(embed(input=[[4] * 200] * 40))
    server.run_for(0.05)
    transport.abort()
    server.run()
    server.check_idle()
    late = server.ask(embed(input=[[4] * 200] * 40, deadlines={"total_ms": 50}))
    assert refusal_of(late) == (504, "deadline_exceeded")
    server.check_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 5}, "documents"),
        ("/v2/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
        ("/score", {"text_2": "b"}, "text_1"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_field(
    server: SimulatedServer, path: str, body: dict[str, Any], param: str
) -> None:
    let_pool(server, num_inputs=4)
    refused = server.ask(request("POST", path, body))
    assert (refused.status, refused.json["error"]["param"]) == (400, param)
    server.check_idle()


def test_scores_of_embeddings_are_their_cosines(server: SimulatedServer) -> None:
    let_pool(server)
    texts = ["hello", "there you are", "hello"]
    cosines = [float(np.dot(vector_of("hello"), vector_of(text))) for text in texts]
    ranked = server.ask(request("POST", "/v2/rerank", {"query": "hello", "documents": texts, "top_n": 2})).json
    assert [one["index"] for one in ranked["results"]] == [0, 2]
    assert ranked["meta"]["tokens"]["input_tokens"] == ranked["usage"]["prompt_tokens"] > 0
    for body in ({"text_1": "hello", "text_2": texts}, {"queries": ["hello"] * 3, "documents": texts}):
        told = server.ask(request("POST", "/score", body)).json
        assert [one["score"] for one in told["data"]] == pytest.approx(cosines, abs=1e-6)
