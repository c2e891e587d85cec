"""What known prefixes save, and host memory over a restart: `python -m bench.prefix --model DIR`.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP. What /v1/messages/
count_tokens takes is this thread's CPU time, from the body to the answer.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import msgspec

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import MODEL, Flag, Found, bench
from bench.make_model import CHAT_TEMPLATE, make_tokenizer
from bench.results import Cell, Table, table_of
from core.chat_template import ChatTemplate
from core.config import BLOCK_SIZE, EngineConfig
from core.grammar import GrammarCompiler
from core.tokenizer import Tokenizer
from core.turns import TurnMemory
from gpu.checkpoint import open_checkpoint
from gpu.kv_store import KVOffload
from gpu.runner import ModelRunner
from server.api import messages
from server.api.fields import GenerationDefaults
from server.api.models import ServedModel
from server.gate.tenants import Tenant
from server.prompts import PromptReader
from server.routes import counting

CACHED_SHARE = 0.95  # of the prompt
COUNTED_VOCAB = 32_000
COUNT = counting(messages.parse_count, messages.count_reply)


def ask(streams: Streams, prompt_ids: Sequence[int], max_tokens: int = 1) -> tuple[float, list[int], int]:
    """One request alone: seconds to its first token, its tokens, and how many of its prompt were cached."""
    name = streams.submit(prompt_ids, max_tokens)
    streams.run()
    return streams.ttft_s(name), streams.tokens[name], streams.cached_tokens[name]


def _beside_cold(title: str, found: dict[str, tuple[float, int]]) -> Table:
    """found: by the prompt, its TTFT in seconds and its cached tokens."""
    cold_s = found["cold"][0]
    rows: list[dict[str, Cell]] = [
        {"prompt": name, "cached tokens": cached, "TTFT ms": ttft_s * 1e3, "share of cold": ttft_s / cold_s}
        for name, (ttft_s, cached) in found.items()
    ]
    return table_of(title, rows)


def measure_ttft(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    """A long prompt that nobody has sent before, and others that begin as it does."""
    streams, num_common = Streams(runner), int(arguments.prompt * CACHED_SHARE)
    cold, warm, num_cached = [], [], 0
    for _ in range(arguments.repeats):
        prompt = streams.prompt(arguments.prompt)
        cold.append(ask(streams, prompt)[0])
        other = prompt[:num_common] + streams.prompt(arguments.prompt - num_common)
        warm_s, _, num_cached = ask(streams, other)
        warm.append(warm_s)
    found = {"cold": (statistics.median(cold), 0), "cached": (statistics.median(warm), num_cached)}
    return _beside_cold(f"Time to the first token of a prompt of {arguments.prompt}", found)


def measure_restart(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    """The long prompt: cold, from host memory, and in the first moments of a process that finds a warm directory.

    The model stays loaded: what a restart takes beside is the loading of the weights.
    """
    limits, block_bytes = runner.limits, runner.limits.block_bytes
    checkpoint = open_checkpoint(arguments.model, runner.config.packing)

    def opened(directory: str) -> tuple[Streams, KVOffload]:
        """Host memory for some long prompts, with a directory; as a process that starts would have it."""
        size_bytes = 8 * (arguments.prompt // BLOCK_SIZE + 2) * block_bytes
        runner.open_offload(EngineConfig(kv_offload_bytes=size_bytes, kv_offload_dir=directory), checkpoint)
        store: KVOffload | None = runner.offload
        assert store is not None
        return Streams(runner, store=store, stored=store.stored), store

    with TemporaryDirectory() as directory:
        streams, _ = opened(directory)
        prompt, *others = (streams.prompt(arguments.prompt) for _ in range(5))
        ask(streams, others.pop())
        cold = ask(streams, prompt)
        for other in others:  # more than the device has room for
            ask(streams, other)
        from_host = ask(streams, prompt)
        started_s = time.perf_counter()
        streams.engine.close()  # as the server does when it ends
        closed_s = time.perf_counter()
        warm, store = opened(directory)
        loaded_s = time.perf_counter()
        restarted = ask(warm, prompt)
        num_stored = len(store.stored)
        warm.engine.close()
    runner.offload, runner.limits = None, limits
    title = (
        f"A prompt of {arguments.prompt} over a restart: {closed_s - started_s:.2f} s to write what was not yet,"
        f" {loaded_s - closed_s:.2f} s to read {num_stored} blocks of {block_bytes} bytes and the model's digest"
    )
    found = {"cold": cold, "from host memory": from_host, "after a restart": restarted}
    return _beside_cold(title, {name: (ttft_s, cached) for name, (ttft_s, _, cached) in found.items()})


def measure_count(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    """A chat of --count tokens for the first time, again, as it goes on, and where it leaves another way."""
    tokenizer, most = Tokenizer(make_tokenizer(COUNTED_VOCAB).to_str(), templates=[CHAT_TEMPLATE]), 2 * arguments.count
    turns, template = TurnMemory(tokenizer), ChatTemplate({"default": CHAT_TEMPLATE}, {}, most)
    card, tenant = ServedModel(id=MODEL, created_s=0, max_model_len=most), Tenant(name="bench")
    defaults = GenerationDefaults(vocab_size=COUNTED_VOCAB)
    reader = PromptReader((card,), tokenizer, template, most, 1, defaults, time.time, _none, turns=turns)
    rng, taken = random.Random(0), dict[str, list[float]]()

    def say(num_tokens: int, role: str = "user") -> dict[str, str]:
        return {"role": role, "content": tokenizer.decode(rng.choices(range(COUNTED_VOCAB), k=num_tokens))}

    def count(name: str, said: list[dict[str, str]]) -> None:
        body = msgspec.json.encode({"messages": said})
        began_s = time.thread_time()
        COUNT(reader, reader.cards, tenant, body)
        taken.setdefault(name, []).append(time.thread_time() - began_s)
        turns.learn()

    for _ in range(arguments.repeats):
        chat = [say(300, role) for _ in range(arguments.count // 600) for role in ("user", "assistant")]
        count("for the first time", [*chat, say(20)])
        count("again", [*chat, say(20)])
        count("its next turn", [*chat, say(20), say(300, "assistant"), say(20)])
        count("another way from its middle on", [*chat[: len(chat) // 2], say(300), say(20)])
    rows: list[dict[str, Cell]] = [
        {"chat": name, "CPU ms": statistics.median(each_s) * 1e3, "most ms": max(each_s) * 1e3}
        for name, each_s in taken.items()
    ]
    return table_of(f"count_tokens of a chat of {arguments.count} tokens", rows)


def _none() -> GrammarCompiler:
    raise AssertionError("it only counts")


PARTS = {"ttft": measure_ttft, "restart": measure_restart, "count": measure_count}


def _measure(arguments: argparse.Namespace) -> Found:
    longest = arguments.prompt + 1 + BLOCK_SIZE
    runner = open_model(arguments, 2 * longest, max_model_len=longest, max_sequences=1)
    tables = [PARTS[part](runner, arguments) for part in arguments.parts]
    name = "-".join(["prefix", *arguments.parts] if len(tables) < len(PARTS) else ["prefix"])
    return Found(tables, shown_model(arguments, runner), name=name)


FLAGS = (
    *MODEL_FLAGS,
    Flag("--prompt", 4096, "tokens", 128),
    Flag("--count", 32_768, "tokens of the chat that is counted", 1200),
    Flag("--repeats", 3, "of each prompt", 1),
    Flag("--parts", tuple(PARTS), "to measure", more={"nargs": "+", "choices": tuple(PARTS)}),
)
main = bench("prefix", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
