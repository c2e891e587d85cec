"""Grammars that would end or block the server are tried out in a process of its own, which ends instead."""

import os
from typing import Any

import pytest

from core.constraints import GrammarKind, GrammarSpec, client_grammar, json_schema, regex
from core.errors import InvalidRequest
from server import grammar_guard
from server.grammar_guard import GuardedCompiler

BYTES = [bytes([byte]) for byte in range(256)]


def compiler() -> GuardedCompiler:
    return GuardedCompiler([*BYTES, b"<end>"], [256], [256], lambda text: list(text.encode()))


def chain(num: int) -> GrammarSpec:
    """Past the checks of core/constraints.py."""
    rules = "\n".join(f'a{i}: "x" a{i + 1}' for i in range(num))
    return GrammarSpec(GrammarKind.LARK, f'start: a0\n{rules}\na{num}: "y"', "guided_grammar")


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


def test_refusals_are_the_librarys() -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler().compile(client_grammar("start: nowhere", "guided_grammar"))
    assert refused.value.param == "guided_grammar"
    assert "nowhere" in refused.value.message


def test_without_a_second_process_grammars_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_process(*args: Any, **options: Any) -> Any:
        raise PermissionError("no more processes")

    monkeypatch.setattr(grammar_guard.subprocess, "Popen", no_process)
    assert compiler().compile(regex("ab", "guided_regex")).start().num_accepted == 0
    assert "no more processes" in caplog.text


def test_the_process_ends_with_its_compiler() -> None:
    guarded = compiler()
    guarded.compile(regex("a", "guided_regex"))
    process = guarded._process
    assert process is not None
    del guarded
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
