"""Which of a chat's messages and documents are left out, where not all of them fit: what a request's policy says.

System messages and the last message stay, and a tool's result never stays without its call. What is left out is told,
never silent. No I/O. Thread: any.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = Mapping[str, Any]
Document = Mapping[str, Any]

_STAYING = ("system", "developer")


class Policy(StrEnum):
    """What becomes of a prompt that does not fit."""

    ERROR = "error"
    DROP_OLDEST_TURNS = "drop_oldest_turns"
    DROP_LOWEST_DOCUMENTS = "drop_lowest_documents"
    MIDDLE = "middle"  # the first turn and the newest ones stay; of a text its two ends


@dataclass(frozen=True, slots=True)
class Budgets:
    """Tokens that a part of the prompt may have at most, whether or not all of it fits."""

    turns: float = math.inf
    documents: float = math.inf


@dataclass(frozen=True, slots=True)
class Selection:
    """What stays.

    Args:
        dropped: what does not, as the answer tells it.
    """

    messages: Sequence[Message]
    documents: Sequence[Document]
    dropped: list[dict[str, Any]] = field(default_factory=list)


Fits = Callable[[Sequence[Message], Sequence[Document]], bool]


def select(
    policy: Policy,
    budgets: Budgets,
    messages: Sequence[Message],
    documents: Sequence[Document],
    fits: Fits,
    num_tokens: Callable[[str], int],
    room: int,
) -> Selection | None:
    """The most of a prompt that the policy leaves.

    Args:
        fits: whether a prompt of these does; what is a part of one that fits does, too.
        num_tokens: of a text, about.
        room: in tokens, for the whole prompt.

    Returns: None: it does not fit, whatever the policy leaves out.
    """
    left_out = _over(budgets.documents, _lowest_first(documents), [num_tokens(_text_of(one)) for one in documents])
    units = _units(messages, keeps_first=policy is Policy.MIDDLE)
    sizes = [sum(num_tokens(_text_of(messages[i])) for i in unit) for unit in units] if budgets.turns < math.inf else []
    rest = _size_of_rest(messages, units, num_tokens) if sizes else 0
    over = len(_over(budgets.turns - rest, range(len(sizes)), sizes))

    def selected(num_units: int, num_documents: int) -> Selection:
        gone = {i for unit in units[:num_units] for i in unit}
        lost = {*left_out, *_lowest_first(documents)[:num_documents]}
        return Selection(
            [one for i, one in enumerate(messages) if i not in gone],
            [one for i, one in enumerate(documents) if i not in lost],
            [{"message": i, "role": messages[i].get("role")} for i in sorted(gone)]
            + [{"document": documents[i].get("id", i)} for i in sorted(lost)],
        )

    def is_enough(num_units: int, num_documents: int) -> bool:
        one = selected(num_units, num_documents)
        return fits(one.messages, one.documents)

    if is_enough(over, 0):
        return selected(over, 0)
    match policy:
        case Policy.DROP_OLDEST_TURNS | Policy.MIDDLE:
            num = _least(over, len(units), lambda count: is_enough(count, 0))
            return None if num is None else selected(_at_step(num, units, messages, room), 0)
        case Policy.DROP_LOWEST_DOCUMENTS:
            num = _least(0, len(documents), lambda count: is_enough(over, count))
            return None if num is None else selected(over, num)
    return None


def _units(messages: Sequence[Message], keeps_first: bool) -> list[list[int]]:
    """What may be left out, one after another, as the places of its messages: whole turns, a user's message and what
    answers it, then the calls of the last turn, each with its results, and those of a first turn that stays."""
    turns: list[list[int]] = []
    for i, message in enumerate(messages):
        if message.get("role") in _STAYING:
            continue
        begins = message.get("role") == "user" and (i == 0 or messages[i - 1].get("role") != "user")
        if begins or not turns:
            turns.append([])
        turns[-1].append(i)
    if not turns:
        return []
    first = _rounds(turns[0], messages) if keeps_first and len(turns) > 1 else []
    return turns[1 if keeps_first else 0 : -1] + _rounds(turns[-1], messages)[:-1] + first


def _rounds(turn: Sequence[int], messages: Sequence[Message]) -> list[list[int]]:
    """What follows a turn's question: each of the assistant's messages with the results of its calls."""
    rounds: list[list[int]] = []
    for i in turn:
        if messages[i].get("role") == "assistant":
            rounds.append([])
        if rounds:
            rounds[-1].append(i)
    return rounds


def _at_step(num: int, units: Sequence[Sequence[int]], messages: Sequence[Message], room: int) -> int:
    """As many units or more: the same ones while a chat grows by a quarter of the room, so that the cache has the rest.
    Of what could stay, a third does at least.

    Args:
        room: in tokens of about four bytes.
    """
    step, end, ends = room, 0, list[int]()
    for unit in units:
        end += sum(len(_text_of(messages[i]).encode("utf-8", "surrogatepass")) for i in unit)
        ends.append(end)
    goal, least_kept = -(-ends[num - 1] // step) * step, (ends[-1] - ends[num - 1]) / 3
    more = next((count + 1 for count in range(num - 1, len(units)) if ends[count] >= goal), num)
    return more if ends[-1] - ends[more - 1] >= least_kept else num


def _lowest_first(documents: Sequence[Document]) -> list[int]:
    """Their places by score; without one they go first, and of equals the last."""

    def score(i: int) -> float:
        found = documents[i].get("score")
        return -math.inf if isinstance(found, bool) or not isinstance(found, int | float) else found

    return sorted(range(len(documents)), key=lambda i: (score(i), -i))


def _over(budget: float, order: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The first of them that have to go, so that the others have no more tokens than the budget."""
    total, gone = sum(sizes), list[int]()
    for i in order:
        if total <= budget:
            break
        total -= sizes[i]
        gone.append(i)
    return gone


def _size_of_rest(messages: Sequence[Message], units: Sequence[Sequence[int]], num_tokens: Callable[[str], int]) -> int:
    """Tokens of the turns that stay in any case."""
    able = {i for unit in units for i in unit}
    staying = (one for i, one in enumerate(messages) if i not in able and one.get("role") not in _STAYING)
    return sum(num_tokens(_text_of(one)) for one in staying)


def _least(low: int, high: int, is_enough: Callable[[int], bool]) -> int | None:
    """The least number above `low` that is enough; None: not even `high` is."""
    if high <= low or not is_enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _text_of(value: Any) -> str:
    """All the text in a message or document."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = [one for key, one in value.items() if key != "role"]
    if isinstance(value, list | tuple):
        return " ".join(filter(None, map(_text_of, value)))
    return ""
