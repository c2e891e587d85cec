"""What is left out of a prompt that does not fit, and what never is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.context_policy import Budgets, Policy, Selection, select

Messages = list[dict[str, Any]]
NO_BUDGETS = Budgets()


def turn(words: int, calls: int = 0) -> Messages:
    """A question, calls with their results, and an answer."""
    made: Messages = [{"role": "user", "content": "q " * words}]
    for i in range(calls):
        made.append({"role": "assistant", "content": "", "tool_calls": [{"id": f"c{i}", "function": {"name": "f"}}]})
        made += [{"role": "tool", "tool_call_id": f"c{i}", "content": "r " * words} for _ in range(1 + i % 2)]
    return [*made, {"role": "assistant", "content": "a " * words}]


def size_of(messages: Any, documents: Any = ()) -> int:
    return sum(1 + one["content"].count(" ") for one in messages) + sum(1 + one["text"].count(" ") for one in documents)


def selected(
    policy: Policy, messages: Messages, documents: Any = (), room: int = 100, budgets: Budgets = NO_BUDGETS
) -> Selection | None:
    def fits(some: Any, others: Any) -> bool:
        return size_of(some, others) <= room

    return select(policy, budgets, messages, documents, fits, lambda text: text.count(" "), room)


@given(
    st.sampled_from([Policy.DROP_OLDEST_TURNS, Policy.MIDDLE]),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=8),
    st.integers(0, 5),
    st.integers(10, 300),
)
def test_turns_go_whole_and_system_and_the_last_message_stay(
    policy: Policy, sizes: list[tuple[int, int]], at: int, room: int
) -> None:
    messages: Messages = [one for words, calls in sizes for one in turn(words, calls)][:-1]
    messages.insert(min(at, len(messages) - 1), {"role": "system", "content": "be kind"})
    found = selected(policy, messages, room=room)
    if found is None:
        return
    assert size_of(found.messages) <= room
    gone = [one["message"] for one in found.dropped]
    assert found.messages == [one for i, one in enumerate(messages) if i not in gone]
    assert {"role": "system", "content": "be kind"} in found.messages
    assert found.messages[-1] is messages[-1]
    assert [one["role"] for one in found.dropped] == [messages[i]["role"] for i in gone]
    open_ids: set[str] = set()
    for one in found.messages:  # a result follows its call
        open_ids |= {call["id"] for call in one.get("tool_calls", ())}
        assert one["role"] != "tool" or one["tool_call_id"] in open_ids
        open_ids = set() if one["role"] == "user" else open_ids
    others = [one for one in found.messages if one["role"] != "system"]
    assert others[0]["role"] == "user"
    if size_of(messages) <= room:
        assert gone == []
    if policy is Policy.MIDDLE and len(sizes) > 1 and gone:
        assert others[0] is next(one for one in messages if one["role"] == "user")


def test_no_more_goes_than_has_to_but_for_the_cache() -> None:
    """While a chat grows, what stays begins at the same place for a while."""
    starts = []
    messages: Messages = []
    for _ in range(60):
        messages += turn(5)
        found = selected(Policy.DROP_OLDEST_TURNS, messages, room=100)
        assert found is not None
        starts.append(len(found.dropped))
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert len(set(starts)) < 20  # of 52 turns that do not fit


@pytest.mark.parametrize(
    ("scores", "room", "dropped"),
    [
        ([3, 1, 2], 65, ["d1"]),
        ([3, 1, 2], 45, ["d1", "d2"]),
        ([1, 1, 1], 65, ["d2"]),  # the last of equals
        ([None, 5, "x"], 65, ["d2"]),
        ([3, 1, 2], 15, None),
    ],
)
def test_the_lowest_documents_go(scores: list[Any], room: int, dropped: list[str] | None) -> None:
    documents = [{"id": f"d{i}", "score": one, "text": "w " * 20} for i, one in enumerate(scores)]
    found = selected(Policy.DROP_LOWEST_DOCUMENTS, turn(20)[:1], documents, room + 1)
    assert (found and [one["document"] for one in found.dropped]) == dropped


def test_parts_have_budgets_of_their_own() -> None:
    documents = [{"id": i, "score": i, "text": "w " * 10} for i in range(5)]
    messages = [*turn(10), *turn(10), *turn(10)[:1]]
    found = selected(Policy.ERROR, messages, documents, 1000, Budgets(turns=35, documents=20))
    assert found is not None
    assert [one["id"] for one in found.documents] == [3, 4]
    assert [one["message"] for one in found.dropped[:2]] == [0, 1]
    assert len(found.messages) == 3
    assert selected(Policy.ERROR, messages, documents, 60, Budgets(documents=20)) is None  # not even then
    whole = selected(Policy.ERROR, messages, documents, 1000)
    assert whole is not None
    assert whole.dropped == []


def test_a_chat_of_long_turns_keeps_what_fits() -> None:
    messages = [*turn(30), *turn(30), *turn(30), *turn(30)[:1]]
    found = selected(Policy.DROP_OLDEST_TURNS, messages, room=100)
    assert found is not None
    assert len(found.messages) == 3


def test_the_middle_of_a_first_turn_goes_last() -> None:
    messages = [*turn(10, calls=6), *turn(10), *turn(10)[:1]]
    found = selected(Policy.MIDDLE, messages, room=70)
    assert found is not None
    assert (found.messages[0], found.messages[-1]) == (messages[0], messages[-1])
    assert {one["message"] for one in found.dropped} >= {1, 2, *range(len(turn(10, calls=6)), len(messages) - 1)}
