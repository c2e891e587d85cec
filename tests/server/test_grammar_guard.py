"""Grammars that would end or block the server are tried out in a process of its own, which ends instead."""

import asyncio
import os
import signal
from typing import Any

import pytest

from core import grammar
from core.client_grammars import client_grammar
from core.constraints import GrammarKind, GrammarSpec, json_schema, regex
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.grammar import Grammar, Vocabulary
from server import grammar_guard
from server.grammar_guard import MAX_AT_ONCE, MAX_QUEUED, CompileQueue, GuardedCompiler

BYTES = [bytes([byte]) for byte in range(256)]


def compiler() -> GuardedCompiler:
    return GuardedCompiler(Vocabulary([*BYTES, b"<end>"], [256], [256]), lambda text: list(text.encode()))


def chain(num: int) -> GrammarSpec:
    """A grammar of ours: past the checks of clients'."""
    rules = "\n".join(f'a{i}: "x" a{i + 1}' for i in range(num))
    return GrammarSpec(GrammarKind.TAGGED, f'start: a0\n{rules}\na{num}: "y"', "guided_grammar")


def test_a_grammar_that_crashes_the_library_is_refused_and_the_next_one_is_compiled() -> None:
    guarded = compiler()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="guided_grammar is too complex") as refused:
            guarded.compile(chain(100_000))
        assert refused.value.code == "grammar_too_complex"
        assert guarded.compile(regex("ab", "guided_regex")).start().num_accepted == 0


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = compiler()
    guarded.compile(regex("a", "guided_regex"))
    monkeypatch.setattr(grammar_guard, "MAX_COMPILE_S", 0.0)  # nothing is ready at once
    with pytest.raises(InvalidRequest, match="takes too long"):
        guarded.compile(json_schema({"type": "integer", "multipleOf": 999_983}, "guided_json"))


def test_a_process_that_nobody_ends_compiles_for_some_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = compiler()
    monkeypatch.setattr(grammar_guard, "MAX_COMPILE_S", 120.0)  # a server that was killed does not look at its watch
    guarded.prepare()
    (worker,) = guarded._workers
    with pytest.raises(InvalidRequest, match="takes too long"):
        guarded.compile(json_schema({"type": "integer", "multipleOf": 8_888_881}, "guided_json"))
    assert worker._process.wait(120) == -signal.SIGXCPU


def test_refusals_are_the_librarys() -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler().compile(client_grammar("start: nowhere", "guided_grammar"))
    assert refused.value.param == "guided_grammar"
    assert "nowhere" in refused.value.message


def test_what_keeps_the_gil_for_long_runs_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(grammar, "check_client_grammar", checked.append)  # in this process
    guarded = compiler()
    with pytest.raises(InvalidRequest, match="more than 500 rules"):
        guarded.compile(client_grammar('start: "a"\n' + 'a: "b"\n' * 500, "guided_grammar"))
    assert guarded.compile(client_grammar('start: "a"', "guided_grammar")).start().num_accepted == 0
    assert not checked


def test_without_a_second_process_grammars_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_process(*args: Any, **options: Any) -> Any:
        raise PermissionError("no more processes")

    monkeypatch.setattr(grammar_guard, "start_module", no_process)
    assert compiler().compile(regex("ab", "guided_regex")).start().num_accepted == 0
    assert "no more processes" in caplog.text


def test_the_process_ends_with_its_compiler() -> None:
    guarded = compiler()
    guarded.compile(regex("a", "guided_regex"))
    assert len(guarded._workers) == 1  # nobody has needed two at once
    taken = [guarded._taken() for _ in range(MAX_AT_ONCE)]
    guarded._idle.append(taken.pop())
    guarded._taken()
    processes = [worker._process for worker in guarded._workers]
    assert len(processes) == MAX_AT_ONCE
    del guarded
    for process in processes:
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_process_is_ready_before_the_first_grammar_and_after_one_has_ended() -> None:
    """A grammar that is refused does not wait for one to start, and one that was killed refuses nobody's grammar."""
    guarded = compiler()
    guarded.prepare()
    (first,) = guarded._idle
    with pytest.raises(InvalidRequest, match="too complex"):
        guarded.compile(chain(100_000))
    guarded._ending.join()
    assert first._process.returncode is not None
    (second,) = guarded._idle
    assert guarded._workers == {second}
    second._process.kill()
    second._process.wait()
    assert guarded.compile(regex("ab", "guided_regex")).start().num_accepted == 0
    assert second not in guarded._workers


def test_tenants_compile_in_turns_each_grammar_once_and_not_without_bound() -> None:
    """A tenant that floods the queue delays itself: another waits for one grammar at most."""
    order: list[str] = []

    async def asked(queue: CompileQueue, tenant: str, name: str) -> Grammar:
        async def compiled() -> Grammar:
            order.append(f"{tenant}{name}")
            await asyncio.sleep(0)
            if name == "broken":
                raise InvalidRequest("broken")
            return Grammar(matcher=None, num_words=len(order))  # type: ignore[arg-type]

        return await queue.run(regex(name, "p"), tenant, compiled)

    async def ask_all() -> None:
        queue = CompileQueue()
        names = [*map(str, range(MAX_QUEUED - 1)), "broken"]
        flood = [asyncio.ensure_future(asked(queue, "flood", name)) for name in names]
        same = asyncio.ensure_future(asked(queue, "flood", "1"))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as refused:
            await asked(queue, "flood", "more")
        assert (refused.value.kind, refused.value.retry_after_s is not None) == (ErrorKind.RATE_LIMITED, True)
        gone = asyncio.ensure_future(asked(queue, "other", "gone"))
        light = [asyncio.ensure_future(asked(queue, tenant, name)) for tenant in ("light", "other") for name in "ab"]
        await asyncio.sleep(0)
        gone.cancel()
        found = await asyncio.gather(*flood, same, *light, gone, return_exceptions=True)
        assert found[1] is found[MAX_QUEUED]
        assert isinstance(found[MAX_QUEUED - 1], InvalidRequest)
        assert not queue._tasks
        await asked(queue, "flood", "more")

    asyncio.run(ask_all())
    assert all(order.index(name) < 12 for name in ("othergone", "othera", "otherb", "lighta", "lightb"))
    assert len(order) == len(set(order)) == MAX_QUEUED + 6
