"""Counts what is called, where a test bounds work: counts are the same on every machine, times are not."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Self


class CallCounter:
    """Counts the functions entered within it.

    Args:
        is_counted: whether Python functions of this file are.
        calls: of them, by qualified name.
        num_builtin_calls: of functions written in C, made by those that are counted.
    """

    def __init__(self, is_counted: Callable[[str], bool]) -> None:
        self.calls: Counter[str] = Counter()
        self.num_builtin_calls = 0
        self._is_counted: Callable[[CodeType], bool] = functools.cache(lambda code: is_counted(code.co_filename))

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            if self._is_counted(frame.f_code):
                self.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call" and self._is_counted(frame.f_code):
            self.num_builtin_calls += 1


class InstructionCounter:
    """Counts the bytecode instructions executed within it: turns of loops and comprehensions, which make no calls, too.

    Args:
        is_counted: whether those of this file's functions are.
    """

    def __init__(self, is_counted: Callable[[str], bool]) -> None:
        self.num_instructions = 0
        self._is_counted: Callable[[CodeType], bool] = functools.cache(lambda code: is_counted(code.co_filename))

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[[FrameType, str, object], object] | None:
        if not self._is_counted(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, arg: object) -> object:
        self.num_instructions += event == "opcode"
        return self._count
