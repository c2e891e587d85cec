"""Embeddings and reranking beside sentence-transformers: `python -m bench.embeddings`, with sentence-transformers.

Random models of known shapes. The server's process and sentence-transformers in this one take turns on the same texts
and cores; a ratio is of one such pair. The server is asked over HTTP, with one request of all texts, and with many
requests of one text each; sentence-transformers sorts the texts by length and pads batches of 32. A reranker scores
the same texts as documents of one query, beside a CrossEncoder. Where others keep the
machine busy, --cpu-time with --threads 1 counts what both processes compute, and not what they wait.
"""

import argparse
import base64
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from bench.kit import Flag, Found, bench, cpu_times, free_port, running, serve_command
from bench.load import CannotRun
from bench.results import Cell, table_of
from bench.speculative import interval

NUM_WORDS = 30_000
SHAPES = {"MiniLM-L6": (384, 6, 12, 1536), "bge-base": (768, 12, 12, 3072)}  # hidden, layers, heads, intermediate
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
QUERY = " ".join(f"w{number}" for number in range(10))
Floats = np.ndarray[Any, np.dtype[np.float32]]


def write_model(directory: Path, shape: str, scores: bool = False, positions: int = 512) -> Path:
    """A directory of sentence-transformers: mean pooling, normalised; or a reranker, with one score of a pair."""
    hidden, layers, heads, inner = SHAPES[shape]
    words = [*SPECIAL, *(f"w{number}" for number in range(NUM_WORDS))]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(name, words.index(name)) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ends)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        initializer_range=0.05,
        num_labels=1,  # type: ignore[call-arg]  # of PretrainedConfig
    )
    model = transformers.BertForSequenceClassification if scores else transformers.BertModel
    model(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    parts = ("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize")
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(parts)
    ]
    (directory / "1_Pooling").mkdir()
    files: dict[str, Any] = {
        "tokenizer_config": {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]", "model_max_length": positions},
    }
    if not scores:
        pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
        files |= {"modules": listed, "1_Pooling/config": pooling}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def make_texts(count: int, median: int, most: int) -> list[str]:
    """Of lengths as passages have them: log-normal."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(median), 0.7, count), 3, most).astype(int)
    return [" ".join(f"w{word}" for word in generator.integers(NUM_WORDS, size=length)) for length in lengths]


def _asked(port: int, path: str, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise CannotRun(f"The server answers {content}", "look at its log")
    return content


def ask(port: int, texts: Sequence[str]) -> Floats:
    """Their vectors."""
    found = _asked(port, "/v1/embeddings", {"input": list(texts), "encoding_format": "base64"})["data"]
    return np.array([np.frombuffer(base64.b64decode(one["embedding"]), np.float32) for one in found])


def rank(port: int, texts: Sequence[str]) -> Floats:
    """Their scores as documents of QUERY."""
    body = {"query": QUERY, "documents": list(texts), "return_documents": False}
    found = {one["index"]: one["relevance_score"] for one in _asked(port, "/v1/rerank", body)["results"]}
    return np.array([found[i] for i in range(len(texts))], np.float32)


def _embedding_peer(directory: Path, dtype: str) -> Callable[[Sequence[str]], Floats]:
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(directory), device="cpu", model_kwargs={"dtype": dtype})

    def encode(texts: Sequence[str]) -> Floats:
        found: Floats = (
            peer.encode(texts, batch_size=32, show_progress_bar=False, convert_to_tensor=True).float().numpy()
        )
        return found

    return encode


def _ranking_peer(directory: Path, dtype: str) -> Callable[[Sequence[str]], Floats]:
    from sentence_transformers import CrossEncoder

    peer = CrossEncoder(str(directory), device="cpu", model_kwargs={"dtype": dtype})

    def predict(texts: Sequence[str]) -> Floats:
        pairs = [(QUERY, text) for text in texts]
        found: Floats = (
            peer.predict(pairs, batch_size=32, show_progress_bar=False, convert_to_tensor=True).float().numpy()
        )
        return found

    return predict


@dataclass(frozen=True, slots=True)
class _Task:
    """
    Args:
        ask: the server, about some texts.
        peer: of a model's directory and type.
        likeness: a name, and what it is of our values and theirs.
    """

    ask: Callable[[int, Sequence[str]], Floats]
    peer: Callable[[Path, str], Callable[[Sequence[str]], Floats]]
    likeness: tuple[str, Callable[[Floats, Floats], float]]


TASKS = {
    "embeddings": _Task(ask, _embedding_peer, ("least cosine", lambda one, other: float((one * other).sum(1).min()))),
    "rerank": _Task(rank, _ranking_peer, ("most difference", lambda one, other: float(abs(one - other).max()))),
}


def measure(arguments: argparse.Namespace) -> Found:
    rows: dict[str, list[dict[str, Cell]]] = {name: [] for name in arguments.tasks}
    texts = make_texts(arguments.texts, arguments.median, arguments.most)
    for name, shape in ((name, shape) for name in arguments.tasks for shape in arguments.shapes):
        for ours, theirs in (pair.split(":") for pair in arguments.dtypes):
            with tempfile.TemporaryDirectory() as home:
                directory, port = write_model(Path(home) / shape, shape, scores=name == "rerank"), free_port()
                try:
                    peer = TASKS[name].peer(directory, theirs)
                except ImportError as error:
                    raise CannotRun("sentence-transformers is not here", "pip install sentence-transformers") from error
                own = ("--dtype", ours, "--threads", str(arguments.threads), "--max-batch-tokens", "2048")
                torch.set_num_threads(arguments.threads)
                with running(serve_command(port, "--model", str(directory), *own), port, "/ready") as pid:
                    turns = _Turns(TASKS[name], port, peer, texts, arguments, pid)
                    rows[name] += _pairs(turns, arguments, {"model": shape, "ours": ours, "theirs": theirs})
    timed = "CPU time of the processes" if arguments.cpu_time else "clock"
    title = f"{len(texts)} texts, {arguments.pairs} pairs, by the {timed}"
    tables = [table_of(f"{name[0].upper()}{name[1:]}: {title}", rows[name]) for name in rows]
    return Found(tables, {"median words": arguments.median, "threads": arguments.threads})


@dataclass(frozen=True, slots=True)
class _Turns:
    task: _Task
    port: int
    peer: Callable[[Sequence[str]], Floats]
    texts: list[str]
    arguments: argparse.Namespace
    pid: int  # the server's

    def ours_s(self, pool: ThreadPoolExecutor | None) -> float:
        """pool: of clients that ask for a text each; None: one request."""

        def now_s() -> float:
            return cpu_times(self.pid).total_s if self.arguments.cpu_time else time.perf_counter()

        started_s = now_s()
        if pool is None:
            self.task.ask(self.port, self.texts)
        else:
            list(pool.map(lambda text: self.task.ask(self.port, [text]), self.texts))
        return now_s() - started_s

    def theirs_s(self) -> float:
        clock = time.process_time if self.arguments.cpu_time else time.perf_counter
        started_s = clock()
        self.peer(self.texts)
        return clock() - started_s


def _pairs(turns: _Turns, arguments: argparse.Namespace, named: dict[str, Cell]) -> list[dict[str, Cell]]:
    texts, (likeness, of) = turns.texts, turns.task.likeness
    alike = of(turns.task.ask(turns.port, texts), turns.peer(texts))
    found = {"one request": list[tuple[float, float]](), f"{arguments.at_once} at once": list[tuple[float, float]]()}
    with ThreadPoolExecutor(arguments.at_once) as pool:
        turns.ours_s(pool)  # warms up
        for _ in range(arguments.pairs):
            for kind, pairs in found.items():
                pairs.append((turns.ours_s(None if kind == "one request" else pool), turns.theirs_s()))
    rows = list[dict[str, Cell]]()
    for kind, pairs in found.items():
        ratios = [their_s / our_s for our_s, their_s in pairs]
        low, high = interval(ratios)
        our_s, their_s = (statistics.median(one) for one in zip(*pairs, strict=True))
        speeds = {"texts/s": len(texts) / our_s, "theirs, texts/s": len(texts) / their_s}
        rows.append(
            {
                **named,
                "asked by": kind,
                **speeds,
                "ratio": statistics.median(ratios),
                "from": low,
                "to": high,
                likeness: alike,
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


FLAGS = (
    Flag("--tasks", tuple(TASKS), "to compare", more={"nargs": "+", "choices": tuple(TASKS)}),
    Flag("--shapes", tuple(SHAPES), "of models", quick=("MiniLM-L6",), more={"nargs": "+", "choices": tuple(SHAPES)}),
    Flag(
        "--dtypes",
        ("float32:float32", "bfloat16:float32", "bfloat16:bfloat16"),
        "ours:theirs; float32 is sentence-transformers' own choice",
        quick=("float32:float32",),
        more={"nargs": "+"},
    ),
    Flag("--texts", 192, "of each turn", quick=8),
    Flag("--median", 40, "words of a text"),
    Flag("--most", 250, "words of a text"),
    Flag("--at-once", 16, "requests of one text", quick=2),
    Flag("--pairs", 7, "of turns", quick=2),
    Flag("--threads", 2, "of each"),
    Flag("--cpu-time", None, "of both processes, instead of the clock", more={"action": "store_true"}),
)
main = bench("embeddings", __doc__, measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
