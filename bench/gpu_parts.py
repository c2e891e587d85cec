"""What the parts of bench.gpu_check are made of: cases, the rows that they give, and what they share.

A part is a list of cases, what matters most first. They run one after the other in a process of their own
(bench/gpu_worker.py), which is started anew behind one that has taken the device down with it; those that time nothing
in several. A case leans on no other but through Context.state.
"""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch

from bench.results import Cell
from bench.work import Speed

T = TypeVar("T")

OK, BELOW, WRONG, FAILED, SKIPPED, LEFT_OUT = "ok", "below target", "wrong", "failed", "skipped", "left out"
FAULTS = (WRONG, FAILED, BELOW, LEFT_OUT)  # what makes the check fail; skipped is what cannot be here


class Row(msgspec.Struct, frozen=True):
    """A line of a table.

    Args:
        table: its title.
        cells: by column; the tables' columns are those that their rows have, in the order of their coming.
        verdict: of those above; "" where nothing is judged.
        note: of a fault its last line, otherwise what explains a figure.
    """

    table: str
    cells: dict[str, Cell]
    verdict: str = ""
    note: str = ""


class Job(msgspec.Struct, frozen=True):
    """What a part runs on.

    Args:
        module: of the part: its cases(is_quick, is_device) lists them.
        device: "cpu" or "cuda".
        cases: names of those that are still to be run.
        state: what earlier cases have left, as Context.state.
    """

    module: str
    device: str
    is_quick: bool
    cases: tuple[str, ...] = ()
    state: dict[str, Any] = {}


@dataclass(slots=True)
class Context:
    """What a case is given.

    Args:
        state: what JSON can hold, for the cases behind this one: it outlives the process.
    """

    device: torch.device
    is_quick: bool
    state: dict[str, Any] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)

    @property
    def is_device(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_speed(self) -> bool:
        """Whether this run has found its ceilings."""
        return "speed" in self.state

    @property
    def speed(self) -> Speed:
        """The ceilings of this run: its first case's.

        Raises:
            LookupError: it has found none.
        """
        found = self.state.get("speed")
        if found is None:
            raise LookupError("no ceilings were measured in this run")
        return Speed(found["read_bytes_per_s"], found["flops"])

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What is made by the first case that asks for it, and kept until another key is asked for: models are big."""
        if key not in self._kept:
            self.drop()
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

    def drop(self) -> None:
        """Give back what is kept."""
        self._kept.clear()
        gc.collect()
        if self.is_device:
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Case:
    """
    Args:
        run: gives rows; what it raises is a row as well.
        limit_s: after which it is given up.
        table: of a row that tells how it failed.
        is_alone: no other runs in its process after it: it leaves memory behind that nobody can give back.
        is_shared: it times nothing and needs little memory: others may use the device beside it.
    """

    name: str
    run: Callable[[Context], Iterable[Row]]
    limit_s: float
    table: str
    is_alone: bool = False
    is_shared: bool = False


def last_line(error: BaseException) -> str:
    """What an error says, in a line: the last one, which of CUDA's and of the compilers' tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
