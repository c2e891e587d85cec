"""Embeddings and scores of model directories, from the body to the answer, beside what transformers computes."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from core.errors import InvalidRequest, StartupError
from core.types import Message, Submit
from server.api import embeddings, scores
from server.api.fields import RequestLimits
from server.api.replies import Surface
from server.clock import Clock
from server.config import ServerConfig
from server.engine_client import Delta
from server.engine_loader import engine_loader
from server.gate.identity import LOCAL_CALLER
from server.generation import total_usage
from server.loaded_engine import prompt_reader
from server.model_files import tasks_in
from server.observing.timing import StageMarks
from server.prompts import RERANK_INSTRUCTION, RERANK_TEMPLATE
from tests.fakes import DeliveryLog
from tests.pooled_models import pooled, states_of, write_encoder, write_qwen3

TEXTS = ["hello", "the queue's head waits for blocks, and then it does not", "a", "what is said " * 9]
QUERY, DOCUMENTS = TEXTS[0], TEXTS[1:]


class Served:
    """A model directory, loaded as `serve` does it, and asked without a socket."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        given = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_memory_bytes": 2**22} | settings
        self._inbox, self._log = deque[Message](), DeliveryLog()
        loaded = engine_loader(ServerConfig(model=directory, **given))(self._inbox, self._log, lambda stage: None)  # type: ignore[arg-type]
        self._engine = loaded.engine
        self.reader = prompt_reader(loaded, Clock(lambda: 0.0, lambda: 0.0), RequestLimits())
        self._num_asked = 0

    def ask(self, surface: Surface, **body: Any) -> Any:
        marks = StageMarks(lambda: 0.0)
        prepared = self.reader.prepare(surface, json.dumps(body).encode(), LOCAL_CALLER.tenant, marks)
        self._num_asked += 1
        requests = self.reader.requests_of(prepared, f"r{self._num_asked}", 0.0, LOCAL_CALLER)
        self._inbox.extend(map(Submit, requests))
        while self._engine.step():
            pass
        reply = surface.whole(prepared.call, self.reader.reply_context(prepared, "r"))
        terminals = [self._log.terminal(request.request_id) for request in requests]
        for i, end in enumerate(terminals):
            reply.add(i, Delta(text="", num_tokens=0, finish_reason=end.finish_reason, pooled=end.pooled))
        return json.loads(reply.end(total_usage([end.usage for end in terminals if end.usage is not None]), {}))

    def ids(self, text: str, adds_special_tokens: bool = True) -> list[int]:
        return self.reader.tokenizer.encode(text, adds_special_tokens)


def check_embeddings(directory: Path, pooling: str, before: str = "") -> Served:
    served = Served(directory)
    for body in ({"input": TEXTS}, {"input": TEXTS, "truncate_prompt_tokens": 9}):
        answer = served.ask(embeddings.SURFACE, **body)
        for text, one in zip(TEXTS, answer["data"], strict=True):
            ids = served.ids(before + text)
            if len(ids) > 9 and len(body) > 1:
                ids = [*ids[: 9 - 1], ids[-1]]  # the end mark stays
            assert float(np.dot(one["embedding"], pooled(states_of(directory, ids), pooling))) > 0.99999
    return served


def test_a_decoder_of_sentence_transformers_embeds(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "search: ", "document": ""}, "default_prompt_name": "query"}
    model = write_qwen3(tmp_path / "last", "Qwen3Model", "lasttoken", config_sentence_transformers=prompts)
    served = check_embeddings(model, "lasttoken", "search: ")
    assert served.reader.cards[0].tasks == ("embed", "score")
    assert served.reader.cards[0].max_model_len == 128
    check_embeddings(write_qwen3(tmp_path / "mean", "Qwen3ForCausalLM", "mean_tokens"), "mean_tokens")
    ranked = served.ask(scores.RERANK, query=QUERY, documents=DOCUMENTS)["results"]
    vectors = [pooled(states_of(model, served.ids(text)), "lasttoken") for text in (f"search: {QUERY}", *DOCUMENTS)]
    for one in ranked:
        assert one["relevance_score"] == pytest.approx(float(vectors[0] @ vectors[1 + one["index"]]), abs=1e-4)


def test_qwen3_reranker_says_yes_or_no(tmp_path: Path) -> None:
    directory = write_qwen3(tmp_path / "Qwen3-Reranker-tiny", "Qwen3ForCausalLM")
    served = Served(directory)
    assert tasks_in(directory, None) == served.reader.cards[0].tasks == ("score",)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    yes, no = (served.reader.tokenizer.id_of(word) for word in ("yes", "no"))
    wanted = []
    for instruction, text in ((RERANK_INSTRUCTION, DOCUMENTS[0]), (RERANK_INSTRUCTION, DOCUMENTS[1]), ("x", "y")):
        body = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {text}"
        ids = served.ids(f"{RERANK_TEMPLATE[0]}{body}{RERANK_TEMPLATE[1]}", adds_special_tokens=False)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wanted.append(float(logits[[yes, no]].softmax(-1)[0]))
    answer = served.ask(scores.SCORE, text_1=QUERY, text_2=DOCUMENTS[:2])
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted[:2], abs=1e-4)
    told = served.ask(scores.SCORE, text_1=QUERY, text_2="y", instruction="x")
    assert told["data"][0]["score"] == pytest.approx(wanted[2], abs=1e-4)


def test_a_head_scores_pairs(tmp_path: Path) -> None:
    directory = write_qwen3(tmp_path / "score", "Qwen3ForSequenceClassification")
    served = Served(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64).eval()
    wanted = []
    for text in DOCUMENTS:
        ids = [*served.ids(QUERY, False), *served.ids(text)]
        with torch.inference_mode():
            wanted.append(float(model(torch.tensor([ids])).logits[0, 0].sigmoid()))
    answer = served.ask(scores.RERANK, query=QUERY, documents=[*DOCUMENTS[:-1], {"text": DOCUMENTS[-1]}], top_n=2)
    best = sorted(range(len(wanted)), key=lambda i: -wanted[i])[:2]
    assert [one["index"] for one in answer["results"]] == best
    found = [one["relevance_score"] for one in answer["results"]]
    assert found == pytest.approx([wanted[i] for i in best], abs=1e-4)
    assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[i] for i in best]
    with pytest.raises(InvalidRequest, match="characters"):
        served.ask(scores.RERANK, query="x" * 9000, documents=["y"] * 2000)
    bare = served.ask(scores.COHERE_RERANK, query=QUERY, documents=DOCUMENTS)
    assert all(one.keys() == {"index", "relevance_score"} for one in bare["results"])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"modules.json": [{"type": "x.Dense", "path": "2_Dense"}]}, "Dense"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "max_tokens"),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}}, "mean"),
        ({"modules.json": {"a": 1}}, "not a list of modules"),
        ({"modules.json": [{"type": "x.Pooling", "path": "../1_Pooling"}]}, "not a list of modules in this directory"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, change: dict[str, Any], cause: str) -> None:
    directory = write_qwen3(tmp_path / "model", "Qwen3Model", "mean_tokens")
    for name, content in change.items():
        if isinstance(content, list):
            content = json.loads((directory / name).read_text()) + content
        (directory / name).write_text(json.dumps(content))
    with pytest.raises(StartupError, match=cause):
        Served(directory)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("BertModel", "cls_token"), ("XLMRobertaModel", "mean_tokens"), ("ModernBertModel", "mean_tokens")],
)
def test_an_encoder_embeds(tmp_path: Path, kind: str, pooling: str) -> None:
    served = check_embeddings(write_encoder(tmp_path / "model", kind, pooling), pooling)
    assert served.reader.cards[0].tasks == ("embed", "score")
    together = served.ask(embeddings.SURFACE, input=TEXTS * 3)["data"]
    assert [one["index"] for one in together] == list(range(12))
    alone = served.ask(embeddings.SURFACE, input=TEXTS[1])["data"][0]["embedding"]
    assert together[5]["embedding"] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("kind", ["Bert", "XLMRoberta", "ModernBert"])
@pytest.mark.parametrize("is_identity", [False, True])
def test_an_encoders_head_scores_pairs(tmp_path: Path, kind: str, is_identity: bool) -> None:
    """BERT tells the texts of a pair apart; the others only by what is between them."""
    told = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}} if is_identity else {}
    directory = write_encoder(tmp_path / "model", f"{kind}ForSequenceClassification", **told)
    served = Served(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64).eval()
    wanted = []
    for text in DOCUMENTS:
        first, second = served.ids(QUERY), served.ids(text)
        ids = first + (second if kind == "XLMRoberta" else second[1:])
        if kind == "XLMRoberta":
            ids[len(first)] = first[-1]  # two ends between them
        types = [0] * len(first) + [int(kind == "Bert")] * (len(ids) - len(first))
        given = {"token_type_ids": torch.tensor([types])} if kind == "Bert" else {}
        with torch.inference_mode():
            logit = model(torch.tensor([ids]), **given).logits[0, 0]
        wanted.append(float(logit if is_identity else logit.sigmoid()))
    answer = served.ask(scores.SCORE, text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-4)
    cut = served.ask(scores.SCORE, text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=9)
    assert cut["usage"]["prompt_tokens"] <= 27


def test_encoders_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "model", "BertModel")
    with pytest.raises(StartupError, match="no pooling configuration"):
        Served(directory)
    assert Served(directory, pooling="cls").reader.cards[0].tasks == tasks_in(directory, "cls") == ("embed", "score")
    assert tasks_in(directory, None) == ()
    with pytest.raises(StartupError, match="not for encoders"):
        Served(directory, pooling="mean", quantize="int8")
    with pytest.raises(StartupError, match="is for encoders"):
        Served(write_qwen3(tmp_path / "decoder", "Qwen3ForCausalLM"), pooling="cls")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 113}))
    with pytest.raises(StartupError, match=r"intermediate.*asks for \[113, 64\]"):
        Served(directory, pooling="mean")
    (directory / "config.json").write_text(json.dumps(config | {"position_embedding_type": "relative_key"}))
    with pytest.raises(StartupError, match="position_embedding_type"):
        Served(directory, pooling="mean")
