"""Keys and values that were copied to the host, or kept in files, say what computed ones say."""

import errno
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config_json import parse_model_config
from core.engine import Engine
from core.errors import ExitCode, StartupError
from core.kv_cache import BlockCopies
from core.scheduler import Scheduler
from core.types import ClearCache, Message, Request, SamplingParams, Submit
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from gpu.kv_cache import KVCache
from gpu.kv_store import SUFFIX, HostMemory
from gpu.runner import ModelRunner
from gpu.streams import Streams
from tests.fakes import DeliveryLog, FakeClock
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.late_streams import LateStreams
from tests.gpu.test_kv_directory import wait_written
from tests.oracle import read_config

NUM_TOKENS = 6
PROMPTS = [random.Random(i).choices(range(3, 300), k=k) for i, k in enumerate((70, 52, 64, 90))]
HOST = replace(ENGINE, kv_offload_bytes=2 * 1024**2)
NUM_BLOCKS = 8  # on the device: one prompt at a time


class Served:
    """An engine over a runner with little room, stepped by hand."""

    def __init__(self, runner: ModelRunner, num_blocks: int = NUM_BLOCKS) -> None:
        runner.limits = replace(runner.limits, num_blocks=num_blocks)
        stored = runner.offload.stored if runner.offload is not None else ()
        self.log = DeliveryLog()
        self.scheduler = Scheduler(runner.limits, (), seeds=lambda: 0, stored=stored)
        self._inbox: deque[Message] = deque()
        self.engine = Engine(self.scheduler, runner, FakeClock(), self._inbox, self.log, runner.offload)

    def clear(self) -> None:
        self._inbox.append(ClearCache())
        assert not self.engine.step()

    def ask(self, name: str, prompt: list[int], tenant: str = "") -> tuple[list[int], int]:
        """Its tokens, and how many of the prompt's were cached."""
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=name, prompt_ids=tuple(prompt), sampling=sampling, arrival_s=0.0, cache_domain=tenant
        )
        self._inbox.append(Submit(request))
        while self.engine.step():
            pass
        usage = self.log.terminal(name).usage
        assert usage is not None
        return self.log.tokens(name), usage.num_cached_tokens


@pytest.fixture(scope="module")
def directory(model_directory: Callable[[str], Path]) -> Path:
    return model_directory("llama3")


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    plain = Served(open_runner(directory))
    return [plain.ask(str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]


def test_restored_blocks_give_the_tokens_of_computed_ones(directory: Path, expected: list[list[int]]) -> None:
    served = Served(open_runner(directory, HOST))
    for turn in range(2):
        answers = ask_all(served, f"{turn}.")
        assert [tokens for tokens, _ in answers] == expected
    assert [cached for _, cached in answers] == [64, 48, 48, 80]
    stats = served.scheduler.stats()
    assert stats.num_restored_blocks == (64 + 48 + 48 + 80) // 16
    assert stats.num_offloaded_blocks >= stats.num_restored_blocks


def test_blocks_in_8_bits_are_restored_with_the_tokens_that_they_gave(directory: Path, tmp_path: Path) -> None:
    """From host memory, and after a restart."""
    plain = ask_all(Served(open_runner(directory, replace(ENGINE, kv_dtype="int8"))), "plain.")
    kept = replace(HOST, kv_dtype="int8", kv_offload_dir=str(tmp_path))
    for _ in range(2):
        served = Served(open_runner(directory, kept))
        for turn in range(2):
            answers = ask_all(served, f"{turn}.")
            assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in plain]
        assert [cached for _, cached in answers] == [64, 48, 48, 80]
        served.engine.close()


@pytest.mark.skipif(not cpu_flags() >= NEEDED_FLAGS, reason="needs a CPU with AVX2")
@pytest.mark.parametrize("change", [{"kv_dtype": "auto"}, {"activations": "bf16"}, {"deterministic": True}])
def test_a_server_that_computes_otherwise_reads_none_of_it(
    change: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    kept = replace(HOST, kv_dtype="int8", activations="int8", kv_offload_dir=str(tmp_path))
    num_stored = []
    for engine in (kept, kept, replace(kept, **change)):
        served = Served(runner := open_runner(directory, engine))
        assert runner.offload is not None
        num_stored.append(len(runner.offload.stored))
        ask_all(served)
        served.engine.close()
    assert num_stored[0] == num_stored[2] == 0 < num_stored[1]


def test_restored_blocks_of_latent_attention_do_too(model_directory: Callable[[str], Path]) -> None:
    plain, served = (Served(open_runner(model_directory("deepseek_v3"), engine)) for engine in (ENGINE, HOST))
    expected = ask_all(plain, "plain.")
    for turn in range(2):
        answers = ask_all(served, f"{turn}.")
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    assert all(num_cached for _, num_cached in answers)


def test_copies_go_behind_what_was_sent_and_come_before_what_is(directory: Path) -> None:
    """A device does them late: neither the host nor a block that is overwritten meanwhile may notice."""
    config = parse_model_config(read_config(directory))
    with torch.inference_mode():
        cache, streams = KVCache(config, 6, torch.float32, torch.device("cpu")), LateStreams()
        memory = HostMemory(config, 3, cache, streams)
        cache.tensors[0].normal_(generator=torch.Generator().manual_seed(0))
        before = cache.tensors[0].clone()
        ticket = memory.copy(BlockCopies(offloads={2: 4, 0: 1}, restores={5: 2}))
        assert torch.equal(cache.tensors[0], before)  # nothing has happened yet
        streams.current.run(lambda: cache.tensors[0].index_fill_(2, torch.tensor([1, 4]), 0.0))
        assert ticket.wait_s() == 2.0  # one piece of work out, one back
        assert torch.equal(memory.tensor[2], before[:, :, 4].flatten())
        assert torch.equal(memory.tensor[0], before[:, :, 1].flatten())
        assert torch.equal(cache.tensors[0][:, :, 5], before[:, :, 4])
        assert streams.for_good_bytes == [3 * memory.block_bytes]
        assert streams.pinned_bytes == []  # of a pool that rounds up
        streams.finish()
        assert not cache.tensors[0][:, :, [1, 4]].any()


def test_another_tenant_finds_nothing_on_the_host(directory: Path) -> None:
    served = Served(open_runner(directory, HOST))
    for i, prompt in enumerate(PROMPTS):
        served.ask(f"a{i}", prompt, "a")
    assert served.ask("b", PROMPTS[0], "b")[1] == 0
    assert served.ask("a", PROMPTS[0], "a")[1] == 64


def ask_all(served: Served, name: str = "") -> list[tuple[list[int], int]]:
    return [served.ask(f"{name}{i}", prompt) for i, prompt in enumerate(PROMPTS)]


def fill(directory: Path, kept: Path) -> None:
    """A server's life: it answers, and ends."""
    served, _ = restart(directory, kept)
    ask_all(served)
    served.engine.close()


def restart(directory: Path, kept: Path) -> tuple[Served, ModelRunner]:
    runner = open_runner(directory, replace(HOST, kv_offload_dir=str(kept)))
    return Served(runner), runner


def test_a_restarted_server_finds_the_prompts_of_the_one_before(
    directory: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    fill(directory, kept)
    for _ in range(2):  # what was loaded is kept for the next but one too
        served, _ = restart(directory, kept)
        answers = ask_all(served)
        assert [tokens for tokens, _ in answers] == expected
        assert [cached for _, cached in answers] == [64, 48, 48, 80]
        served.engine.close()
    assert {file.stat().st_mode & 0o777 for file in kept.iterdir()} == {0o600}
    assert kept.stat().st_mode & 0o777 == 0o700
    assert len(list(kept.glob(f"*{SUFFIX}"))) >= 15


def test_hot_prefix_is_found_after_a_restart_though_the_host_was_full(directory: Path, tmp_path: Path) -> None:
    block_bytes = open_runner(directory).limits.block_bytes
    engine = replace(HOST, kv_offload_bytes=6 * block_bytes, kv_offload_dir=str(tmp_path))
    served = Served(open_runner(directory, engine), num_blocks=12)
    hot, cold = PROMPTS[0][:32], PROMPTS[3] + PROMPTS[1]
    served.ask("first", hot + [5])
    served.ask("cold", cold)
    assert served.ask("back", hot + [6])[1] == 32  # from the host, and found on the device from now on
    for i in range(6):
        assert served.ask(f"hot {i}", hot + random.Random(50 + i).choices(range(3, 300), k=20))[1] == 32
    served.engine.close()
    served = Served(open_runner(directory, engine))
    assert served.ask("again", hot + [7])[1] == 32
    served.engine.close()


def test_of_a_chain_with_a_damaged_block_the_beginning_is_served(
    directory: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    served, _ = restart(directory, tmp_path)
    served.ask("a", PROMPTS[0])
    served.engine.close()
    oldest_first = sorted(tmp_path.glob(f"*{SUFFIX}"), key=lambda file: int(file.stem.partition("-")[2], 16))
    assert len(oldest_first) == 4
    raw = oldest_first[2].read_bytes()
    oldest_first[2].write_bytes(raw[:-100] + b"damage" + raw[-94:])
    served, _ = restart(directory, tmp_path)
    assert served.ask("a", PROMPTS[0]) == (expected[0], 32)
    served.engine.close()


def test_files_of_other_weights_are_never_served(
    directory: Path, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    fill(directory, tmp_path)
    other = model_directory("qwen2")
    served, runner = restart(other, tmp_path)
    assert runner.offload is not None
    assert runner.offload.stored == []
    served.engine.close()


def test_a_cleared_cache_is_deleted_at_once_and_for_good(directory: Path, tmp_path: Path) -> None:
    """Also if the process is killed then, and though nothing is asked any more."""
    served, runner = restart(directory, tmp_path)
    ask_all(served)
    assert runner.offload is not None
    assert runner.offload.directory is not None
    wait_written(runner.offload.directory)
    assert list(tmp_path.glob(f"*{SUFFIX}"))
    served.clear()
    wait_written(runner.offload.directory)
    assert not list(tmp_path.glob(f"*{SUFFIX}"))
    served.engine.close()
    assert not list(tmp_path.glob(f"*{SUFFIX}"))


def test_all_that_lies_in_host_memory_has_room_in_the_directory_within_its_bytes(
    directory: Path, tmp_path: Path
) -> None:
    """Though each file is larger than its block."""
    host_bytes = 6 * open_runner(directory).limits.block_bytes
    for limit_bytes in (None, 50_000):
        path = tmp_path / str(limit_bytes)
        engine = replace(HOST, kv_offload_bytes=host_bytes, kv_offload_dir=str(path), kv_offload_dir_bytes=limit_bytes)
        served = Served(open_runner(directory, engine))
        ask_all(served)
        served.engine.close()
        sizes = [file.stat().st_size for file in path.glob(f"*{SUFFIX}")]
        assert len(sizes) == 6 if limit_bytes is None else 0 < sum(sizes) <= limit_bytes


def test_a_second_process_is_told_that_the_directory_is_taken(directory: Path, tmp_path: Path) -> None:
    served, _ = restart(directory, tmp_path)
    with pytest.raises(StartupError, match="Another process") as raised:
        restart(directory, tmp_path)
    assert raised.value.exit_code == ExitCode.TRANSIENT
    served.engine.close()


def test_directory_that_cannot_be_cleared_of_strange_files_is_told_with_its_fix(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tmp_path / f"strange{SUFFIX}"
    strange.write_bytes(b"not ours")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StartupError, match=f"{strange}: Operation not permitted") as caught:
        restart(directory, tmp_path)
    assert "--kv-offload-dir" in caught.value.fix


def test_too_little_memory_for_a_block_is_refused_with_the_least_that_helps(directory: Path) -> None:
    with pytest.raises(StartupError, match="at least 1MiB"):
        open_runner(directory, replace(HOST, kv_offload_bytes=100))


def test_memory_that_the_driver_does_not_pin_is_told_with_its_fix(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(streams: Streams, size_bytes: int) -> torch.Tensor:
        raise RuntimeError("out of memory (2)")

    monkeypatch.setattr(Streams, "pinned_for_good", refuse)
    with pytest.raises(StartupError, match=r"cannot be pinned for the device: out of memory \(2\)") as caught:
        open_runner(directory, HOST)
    assert (caught.value.fix, caught.value.exit_code) == ("less --kv-offload-memory.", ExitCode.MEMORY)
