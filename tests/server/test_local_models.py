"""Which models are loaded: random histories of requests, loads, failures and deaths, in virtual time, by a seed."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import ServiceError, StartupError
from server import engine_loader, own_processes
from server.config import ServerConfig
from server.engine_loader import DEMO_DIRECTORY, keep_files, local_plan
from server.fork_server import _refusal, preload
from server.local_models import (
    FIRST_LATE_S,
    LEAST_LATE_S,
    NUM_UNANSWERED,
    PLANNING,
    STARTING,
    WATCH_EVERY_S,
    LocalModel,
    LocalModels,
    LocalPool,
    ModelState,
)
from server.observing.logs import NO_REQUEST, current_request_id
from server.own_processes import News, Plan, Processes, ProcessEvents, Refusal
from server.upstream.pool import LeadingBlocks
from server.upstream.settings import ModelSettings
from tests.server.virtual_loop import VirtualTimeLoop

MIB = 2**20
PROMPT = LeadingBlocks(1)
LOAD_S, PLAN_S, END_S = 1.0, 0.05, 0.1
NUM_REQUESTS = 40
NUM_HISTORIES = 40


HUNG: set[str] = set()  # models whose processes do not answer


@pytest.fixture(autouse=True)
def _probes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(pool: LocalPool) -> bool:
        return pool.settings.name not in HUNG

    monkeypatch.setattr(LocalPool, "answers", answers)
    HUNG.clear()


class SimulatedProcesses:
    """Stands where `Processes` is, and holds that no more memory is used than there is.

    Args:
        sizes: MiB of each model.
        failing: how likely a load fails, and how likely a process dies within ten seconds.
    """

    home = Path("/nowhere")
    is_ready = True

    def __init__(self, loop: VirtualTimeLoop, sizes: dict[str, int], bound: int, failing: float, seed: int = 0) -> None:
        self.loop, self.sizes, self.bound, self.failing = loop, sizes, bound, failing
        self.dice = random.Random(seed)
        self.running: dict[int, str] = {}  # by serial number, which is the process's id, too
        self.starts: list[str] = []
        self.models: LocalModels | None = None
        self.most = 0

    def start(self, listener: ProcessEvents) -> None:
        assert isinstance(listener, LocalModels)
        self.models = listener

    def plan(self, serial: int, config: ServerConfig, bounds: Mapping[str, int]) -> None:
        assert bounds["cpu"] == self.bound * MIB
        size = self.sizes[str(config.served_model_name)]
        fits = size <= self.bound
        told = Plan("cpu", size * MIB, MIB, 256, self.bound * MIB) if fits else Refusal("too large", "a smaller one")
        self._later(PLAN_S, News(serial, told))

    def serve(self, serial: int, config: ServerConfig) -> None:
        name = str(config.served_model_name)
        self.running[serial] = name
        self.starts.append(name)
        used = sum(self.sizes[one] for one in self.running.values())
        self.most = max(self.most, used)
        assert used <= self.bound, self.running
        self._later(0.01, News(serial, serial))
        if name in HUNG:
            return
        if self.dice.random() < self.failing:
            self.loop.call_later(LOAD_S / 2, self._end, serial, 9)
        else:
            self.loop.call_later(LOAD_S, self._notice, serial)
            if self.dice.random() < self.failing:
                self.loop.call_later(LOAD_S + 10 * self.dice.random(), self._end, serial, 9)

    def keep(self, config: ServerConfig) -> None: ...

    def kill(self, pid: int, number: signal.Signals) -> None:
        assert self.models is not None
        model = self.models._by_serial[pid]
        if number is signal.SIGKILL:
            assert self.running[pid] in HUNG
            self.loop.call_later(END_S, self._end, pid, 9)
            return
        assert number is signal.SIGTERM
        assert not model.num_inside, "a model with requests in it"
        self.loop.call_later(END_S, self._end, pid, 0)

    async def close(self) -> None:
        assert not self.running

    def _later(self, delay_s: float, news: News) -> None:
        assert self.models is not None
        self.loop.call_later(delay_s, self.models.on_news, news)

    def _notice(self, serial: int) -> None:
        if serial in self.running:
            assert self.models is not None
            self.models.on_news(News(serial, is_ready=True))

    def _end(self, serial: int, status: int) -> None:
        if self.running.pop(serial, None) is not None:
            assert self.models is not None
            self.models.on_news(News(serial, status=status))


def listed(paths: Mapping[str, str], keep: Mapping[str, float] = {}) -> ServerConfig:
    settings = tuple(ModelSettings(name=name, path=path, keep_alive=keep.get(name)) for name, path in paths.items())
    return ServerConfig(models=settings, own_models=tuple(ServerConfig(served_model_name=name) for name in paths))


def models_of(
    loop: VirtualTimeLoop, sizes: dict[str, int], bound: int, failing: float = 0.0, seed: int = 0, **keep: float
) -> tuple[LocalModels, SimulatedProcesses]:
    processes = SimulatedProcesses(loop, sizes, bound, failing, seed)
    config = replace(listed(dict.fromkeys(sizes, "/m"), keep), models_memory_bytes=bound * MIB)
    models = LocalModels(config, processes, loop)  # type: ignore[arg-type]
    models.start()
    return models, processes


async def ask(models: LocalModels, name: str, inside_s: float) -> str:
    """A request that takes so long once its model is loaded: how it ended."""
    pool: LocalPool = next(one for one in models.pools if one.settings.name == name)
    model: LocalModel = models.models[name]
    slot = pool.take_slot(PROMPT, 0, "local")
    try:
        await slot.granted
        await models.wait_awake(model, model.requests)
        assert model.state is ModelState.AWAKE
        await asyncio.sleep(inside_s)
        return "served"
    except ServiceError as error:
        return "refused" if (error.code, bool(error.retry_after_s)) == ("model_not_loaded", True) else repr(error)
    finally:
        slot.leave()


def run_history(seed: int, num_requests: int = NUM_REQUESTS) -> Counter[str]:
    """Every request ends once, within its own time and the turns of the others; and at the end nothing is left."""
    dice, loop = random.Random(seed), VirtualTimeLoop()
    sizes = {f"m{i}": dice.choice((10, 20, 30, 90, 200)) for i in range(dice.randint(2, 6))}
    models, processes = models_of(loop, sizes, 100, dice.choice((0.0, 0.1, 0.4)), seed)
    ends: Counter[str] = Counter()

    async def list_anew() -> None:
        """Entries change and go; the first stays, so that there is one to ask for."""
        await asyncio.sleep(60 * dice.random())
        names = [name for name in sizes if name == "m0" or dice.random() < 0.8]
        models.take(listed({name: f"/{dice.randrange(3)}" for name in names}))

    async def request() -> None:
        await asyncio.sleep(60 * dice.random())
        asking = loop.create_task(ask(models, dice.choice(list(models.models)), 8 * dice.random() ** 3))
        if dice.random() < 0.1:
            loop.call_later(3 * dice.random(), asking.cancel)
        try:
            ends[await asyncio.wait_for(asking, 1000)] += 1
        except asyncio.CancelledError:
            ends["left"] += 1

    async def run() -> None:
        changes = [list_anew() for _ in range(dice.randrange(4))]
        await asyncio.gather(*(request() for _ in range(num_requests)), *changes)
        await asyncio.sleep(400)
        assert all(one.is_asleep for one in models.models.values())
        assert not processes.running
        await models.close()

    try:
        loop.run(run())
    finally:
        loop.close()
    assert ends.total() == num_requests == sum(ends[one] for one in ("served", "refused", "left"))
    ends["loads"] = len(processes.starts)
    return ends


@pytest.mark.parametrize("seed", range(NUM_HISTORIES))
def test_random_histories_keep_the_bound_and_end_every_request(seed: int) -> None:
    run_history(seed)


def test_the_least_recently_used_idle_model_gives_way_and_one_that_always_stays_does_not() -> None:
    loop = VirtualTimeLoop()
    models, processes = models_of(loop, {"stays": 20, "a": 30, "b": 30, "c": 40, "large": 90}, 100, stays=-1)

    async def run() -> None:
        for name in ("a", "b", "a", "c"):
            assert await ask(models, name, 0.5) == "served"
        assert processes.starts == ["stays", "a", "b", "c"]
        assert sorted(processes.running.values()) == ["a", "c", "stays"]
        assert await ask(models, "large", 0.0) == "refused"
        assert "never stop" in str(models.models["large"].failure)
        await models.close()

    loop.run(run())
    loop.close()


def test_a_process_that_hangs_is_killed_and_the_next_request_starts_it_anew(caplog: pytest.LogCaptureFixture) -> None:
    loop = VirtualTimeLoop()
    models, processes = models_of(loop, {"a": 30, "b": 30}, 100, b=-1)

    async def run() -> None:
        inside = loop.create_task(ask(models, "a", 100.0))
        await asyncio.sleep(20)
        assert processes.starts == ["b", "a"]
        HUNG.add("a")
        await asyncio.sleep(NUM_UNANSWERED * WATCH_EVERY_S + 1)
        assert models.models["a"].is_asleep
        assert "the process of the model a has ended: it hung, and was killed" in caplog.text
        HUNG.clear()
        assert await ask(models, "a", 30.0) == await inside == "served"
        assert processes.starts == ["b", "a", "a"]
        await models.close()

    loop.run(run())
    loop.close()


def test_a_load_that_hangs_is_killed_by_what_loads_take_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = VirtualTimeLoop()
    models, _ = models_of(loop, {"a": 30}, 100, a=0)

    async def run() -> None:
        for limit_s in (FIRST_LATE_S, LEAST_LATE_S, FIRST_LATE_S):
            HUNG.add("a")
            begun_s = loop.time()
            assert [await one for one in [loop.create_task(ask(models, "a", 0.0)) for _ in "ab"]] == ["refused"] * 2
            assert 0 < loop.time() - begun_s - limit_s < 3, "it is read by then"
            assert caplog.text.count("its process ended: it hung, and was killed: it was not loaded after") == 1
            caplog.clear()
            HUNG.clear()
            await asyncio.sleep(5)  # then it is tried again
            if limit_s == FIRST_LATE_S:
                assert await ask(models, "a", 0.0) == "served"
                await asyncio.sleep(5)
            else:
                assert models.models["a"].load_s is None
        await models.close()

    loop.run(run())
    loop.close()


def test_the_fork_servers_end_is_told_as_its_own_and_refuses_no_model(caplog: pytest.LogCaptureFixture) -> None:
    loop = VirtualTimeLoop()
    models, processes = models_of(loop, {"a": 30}, 100)

    async def run() -> None:
        for _ in range(3):
            assert await ask(models, "a", 0.5) == "served"
            processes.running.clear()
            models.on_lost()
        assert processes.starts == ["a"] * 3
        assert "memory runs out" not in caplog.text
        assert caplog.text.count("of the model a has ended: the process that starts models has ended") == 3
        await models.close()

    loop.run(run())
    loop.close()


def test_a_changed_entry_is_another_model_once_the_old_one_has_answered() -> None:
    loop = VirtualTimeLoop()
    models, processes = models_of(loop, {"a": 30, "b": 30}, 100)

    async def run() -> None:
        old = loop.create_task(ask(models, "a", 9.0))
        await asyncio.sleep(2)
        assert await ask(models, "b", 0.0) == "served"
        models.take(listed({"a": "/new", "b": "/m"}))
        new = loop.create_task(ask(models, "a", 0.0))
        await asyncio.sleep(5)
        assert (list(processes.running.values()), new.done()) == (["a", "b"], False)
        assert (await old, await new, processes.starts) == ("served", "served", ["a", "b", "a"])
        a = models.models["a"]
        assert (a.num_loads, a.upstream.num_requests) == (2, 2), "counters go on"
        models.take(listed({"a": "/new"}))
        await asyncio.sleep(5)
        assert (list(processes.running.values()), list(models.models)) == (["a"], ["a"])
        await models.close()

    loop.run(run())
    loop.close()


def test_what_a_load_logs_is_of_the_request_that_asked_for_it_in_its_first_line_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "server.local_models")
    loop = VirtualTimeLoop()
    models, processes = models_of(loop, {"a": 60, "b": 60}, 100, a=1.0, b=1.0)
    ids: list[tuple[str, str]] = []
    monkeypatch.setattr(
        caplog.handler, "emit", lambda record: ids.append((record.getMessage(), current_request_id.get()))
    )

    async def run() -> None:
        for name in ("a", "b"):
            current_request_id.set(f"of {name}")
            assert not models.models[name].upstream.is_up
            assert models.stage_of(models.models[name]) == PLANNING
            assert await ask(models, name, 0.1) == "served"
            assert models.models[name].upstream.is_up
        await asyncio.sleep(5)
        processes.is_ready = False
        assert models.stage_of(models.models["a"]) == STARTING
        await models.close()

    loop.run(run())
    loop.close()
    of_requests = [message for message, of in ids if of != NO_REQUEST]
    assert of_requests == [f"the model {name} is requested" for name in ("a", "b")]
    assert len(ids) - len(of_requests) >= 6


def test_a_busy_model_gives_way_after_its_turn_and_gets_its_next() -> None:
    loop = VirtualTimeLoop()
    models, processes = models_of(loop, {"a": 60, "b": 60}, 100)
    ends: list[tuple[str, float]] = []

    async def stream(name: str, start_s: float, inside_s: float) -> None:
        await asyncio.sleep(start_s)
        assert await ask(models, name, inside_s) == "served"
        ends.append((name, round(loop.time())))

    async def run() -> None:
        await asyncio.gather(*(stream("a", i, 2.0) for i in range(30)), stream("b", 5.0, 1.0))
        await models.close()

    loop.run(run())
    loop.close()
    (b_s,) = [at for name, at in ends if name == "b"]
    assert 10 < b_s < 20
    assert processes.starts == ["a", "b", "a"]


def test_what_a_model_needs_beside_weights_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loader, "_kept", {})
    path = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = ServerConfig(model=path)
    for _ in range(2):
        assert engine_loader._read_model(config, path)[0].compiler is None
        keep_files(config)
        kept, _ = engine_loader._read_model(config, path)
        assert kept.compiler is not None
        assert engine_loader._read_model(config, path)[0] is kept
        assert engine_loader._read_model(replace(config, max_model_len=64), path)[0] is not kept
        os.utime(path / "config.json", ns=(1, 1))  # the ctime changes as well
    keep_files(config)
    assert len(engine_loader._kept) == 1, "those of older files go"
    shutil.rmtree(path)
    with pytest.raises(StartupError, match="does not exist"):
        engine_loader._read_model(config, path)


def test_a_model_that_needs_more_than_all_may_have_tells_what_they_have() -> None:
    config = ServerConfig(model=DEMO_DIRECTORY, device="cpu")
    with pytest.raises(StartupError, match=r"need .* 4.0 MiB free. All models have 4 MiB together. Fix: raise --model"):
        local_plan(config, {"cpu": 4 * MIB})


def test_a_broken_file_of_an_entry_is_told_by_the_entrys_fields(tmp_path: Path) -> None:
    directory = shutil.copytree(DEMO_DIRECTORY, tmp_path / "model")
    (weights := directory / "model.safetensors").write_bytes(b"broken")
    for path, fix in ((weights, f'path = "{directory}"'), (directory, "download the model again, or name another.")):
        with pytest.raises(StartupError) as raised:
            local_plan(ServerConfig(model=path, device="cpu"), {})
        assert _refusal(raised.value).fix == fix


def test_a_fork_server_starts_on_a_cpu_that_lacks_the_kernels_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels_of_other_cpus.py").write_text("raise RuntimeError('this kernel needs a CPU with avx512_bf16')")
    monkeypatch.syspath_prepend(tmp_path)
    preload(["no_such_extra", "kernels_of_other_cpus", "stat"])


def test_a_fork_server_that_compiles_kernels_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_busy(module: str, passed: int, *arguments: Any, **of_process: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "infinity"], pass_fds=(passed,), **of_process)

    monkeypatch.setattr(own_processes, "start_module", start_busy)

    async def end() -> None:
        loop = asyncio.get_running_loop()
        processes = Processes(tmp_path / "home", loop)
        models = LocalModels(listed({"a": "/m"}), processes, loop)
        models.start()
        models.models["a"].state = ModelState.LOADING
        server = processes._server
        await models.close()
        assert server is not None
        assert server.returncode == -signal.SIGKILL
        assert not processes.home.exists()

    asyncio.run(end())


def test_an_order_to_a_fork_server_that_has_just_ended_is_lost_with_it(tmp_path: Path) -> None:
    """The loop has not been told yet when the next request comes."""

    class Listener:
        def __init__(self) -> None:
            self.lost = asyncio.Event()

        def on_news(self, news: News) -> None: ...

        def on_lost(self) -> None:
            self.lost.set()

    async def ordered() -> None:
        processes, listener = Processes(tmp_path / "home", asyncio.get_running_loop()), Listener()
        processes.start(listener)
        server = processes._server
        assert server is not None
        server.kill()
        server.wait()
        processes.plan(1, ServerConfig(), {})
        async with asyncio.timeout(60):
            await listener.lost.wait()
        await processes.close()
        assert not processes.home.exists()

    asyncio.run(ordered())
