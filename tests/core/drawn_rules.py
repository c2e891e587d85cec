"""Rules of a machine whose arguments are drawn from plain values: by hypothesis, or from a seed alone.

Hypothesis shrinks what fails, and takes longer to draw a step than the scheduler to make it. So long runs draw from a
seed, with nothing between the draws and the rules: run_seeded. What fails is told as the calls that led to it.
"""

import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import Invariant, initialize, precondition, rule

NUM_HISTORIES, NUM_STEPS = 10, 500  # of a seed; of a history
WEIGHTS = (0.0, 1.0, 1.0, 4.0)  # of a rule in one history: many faults are only found where something never happens

R = TypeVar("R", bound=Callable[..., None])


class Machine(Protocol):
    invariants: list[Invariant]

    def teardown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DrawnRule:
    """
    Args:
        values: of each argument.
        may: whether it can be called now.
        is_start: it is called once, before all others.
        is_vital: nothing comes of a history without it.
    """

    name: str
    values: dict[str, Seq[Any]]
    may: Callable[[Any], Any]
    is_start: bool
    is_vital: bool

    def draw(self, rng: random.Random) -> dict[str, Any]:
        return {name: values[int(rng.random() * len(values))] for name, values in self.values.items()}


def drawn_start(**values: Seq[Any]) -> Callable[[R], R]:
    """How a history begins, with one of these values for each argument; the first is the simplest."""

    def mark(function: R) -> R:
        begin = initialize(**_strategies(values))(function)
        return _with(begin, DrawnRule(function.__name__, values, may=_always, is_start=True, is_vital=True))

    return mark


def drawn_rule(may: Callable[[Any], Any] | None = None, is_vital: bool = False, **values: Seq[Any]) -> Callable[[R], R]:
    """What can happen where `may` holds of the machine, with one of these values for each argument."""

    def mark(function: R) -> R:
        happen = rule(**_strategies(values))(function)
        if may is not None:
            happen = precondition(may)(happen)
        return _with(happen, DrawnRule(function.__name__, values, may or _always, is_start=False, is_vital=is_vital))

    return mark


def run_seeded(seed: int, machine: type[Machine]) -> int:
    """Some long histories. Returns how many steps they had."""
    rng = random.Random(seed)
    for _ in range(NUM_HISTORIES):
        _run_history(machine, rng)
    return NUM_HISTORIES * NUM_STEPS


def _run_history(machine: type[Machine], rng: random.Random) -> None:
    made, calls = machine(), list[tuple[str, dict[str, Any]]]()

    def happen(drawn: DrawnRule) -> None:
        arguments = drawn.draw(rng)
        calls.append((drawn.name, arguments))
        getattr(made, drawn.name)(**arguments)
        for invariant in made.invariants:
            invariant.function(made)

    try:
        (begin,), rules = _rules_of(machine)
        weights = itertools.accumulate(rng.choice(WEIGHTS[drawn.is_vital :]) for drawn in rules)
        drawn_by_weight = _draw(rng, rules, list(weights))
        happen(begin)
        for _ in range(NUM_STEPS):
            happen(next(drawn for drawn in drawn_by_weight if drawn.may(made)))
        made.teardown()
    except BaseException as error:
        lines = (f"machine.{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})" for name, values in calls)
        error.add_note("\n".join([f"machine = {machine.__name__}()", *lines, "machine.teardown()"]))
        raise


def _draw(rng: random.Random, rules: Seq[DrawnRule], cumulative_weights: Seq[float]) -> Iterator[DrawnRule]:
    while True:
        yield from rng.choices(rules, cum_weights=cumulative_weights)


def _rules_of(machine: type[Machine]) -> tuple[list[DrawnRule], list[DrawnRule]]:
    """How it begins; what happens then, by name."""
    found = [member.drawn for _, member in inspect.getmembers(machine) if hasattr(member, "drawn")]
    return [drawn for drawn in found if drawn.is_start], [drawn for drawn in found if not drawn.is_start]


def _strategies(values: dict[str, Seq[Any]]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(choices) for name, choices in values.items()}


def _with(marked: Any, drawn: DrawnRule) -> Any:
    marked.drawn = drawn
    return marked


def _always(machine: Any) -> bool:
    return True
