"""The limit of open files, as the process has it: asked of the system and put back."""

import logging
import resource
from collections.abc import Iterator

import pytest

from server.descriptors import SPARE_DESCRIPTORS, make_room_for_connections


@pytest.fixture(autouse=True)
def _keep_limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def lower_soft_limit(value: int) -> int:
    """The hard limit, which stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (value, hard))
    return hard


def test_low_soft_limit_is_raised_to_what_the_connections_need() -> None:
    lower_soft_limit(512)
    make_room_for_connections(600)
    assert soft_limit() == 600 + SPARE_DESCRIPTORS


def test_limit_that_is_high_enough_stays() -> None:
    lower_soft_limit(4000)
    make_room_for_connections(600)
    assert soft_limit() == 4000


def test_hard_limit_below_the_need_is_reached_and_told_with_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    hard = lower_soft_limit(512)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("needs a hard limit of open files")
    with caplog.at_level(logging.WARNING):
        make_room_for_connections(hard)
    assert soft_limit() == hard
    (message,) = caplog.messages
    assert f"{hard} connections are allowed, but this process may open {hard} files only" in message
    assert f"--max-connections {hard - SPARE_DESCRIPTORS}" in message


def test_hard_limit_that_is_just_enough_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    hard = lower_soft_limit(512)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("needs a hard limit of open files")
    make_room_for_connections(hard - SPARE_DESCRIPTORS)
    assert soft_limit() == hard
    assert not caplog.messages
