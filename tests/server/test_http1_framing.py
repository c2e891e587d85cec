"""What HTTP/1.1 bytes mean: our reading of each case in the table, and that no proxy reads it otherwise.

nginx and haproxy run as they are installed. What one of them refuses is no difference: it never comes through.
"""

from pathlib import Path

import pytest
import uvloop

from fuzz import http1
from tests.server.framing_cases import LAST, Case, Understood, load_cases, noted
from tests.server.framing_mutants import mutants
from tests.server.framing_peers import PROXIES, Forwarded, installed, understood_by_proxy, understood_by_us

CASES = load_cases()
LEAST_CASES = 300
NUM_MUTANTS = 5_000

each_theme = pytest.mark.parametrize("theme", dict.fromkeys(case.theme for case in CASES))


def cases_of(theme: str) -> list[Case]:
    return [case for case in CASES if case.theme == theme]


def test_table_is_as_large_as_promised() -> None:
    assert len({case.sent for case in CASES}) >= LEAST_CASES


@pytest.fixture(scope="module")
def ours() -> dict[str, Understood]:
    return uvloop.run(understood_by_us(CASES))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_server_understands_or_refuses(case: Case, ours: dict[str, Understood]) -> None:
    assert ours[case.name] == case.expected


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if installed(name) is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    return name


@pytest.fixture(scope="module")
def forwarded(proxy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Forwarded]:
    """What the proxy made of every case, and we behind it."""
    return uvloop.run(understood_by_proxy(proxy, CASES, tmp_path_factory.mktemp(proxy)))


@each_theme
def test_no_proxy_frames_differently_what_we_accept(theme: str, forwarded: dict[str, Forwarded]) -> None:
    found = {case.name: difference(case.expected, forwarded[case.name].by_proxy) for case in cases_of(theme)}
    assert not {name: text for name, text in found.items() if text}


def difference(ours: Understood, theirs: Understood) -> str:
    """What of our requests is not theirs; nothing where one of us refuses what the other takes."""
    num_common = min(len(ours.requests), len(theirs.requests))
    if theirs.requests[:num_common] != ours.requests[:num_common]:
        return f"it sees {theirs.requests}, we {ours.requests}"
    if len(theirs.requests) > num_common and ours.end == "waits":
        return f"it sees {theirs.requests}, where we wait"
    if len(ours.requests) > num_common and theirs.end == "waits":
        return f"it waits, where we see {ours.requests}"
    return ""


@each_theme
def test_behind_a_proxy_we_understand_what_it_sends(theme: str, forwarded: dict[str, Forwarded]) -> None:
    """Never another request; and only those are missing that we have refused."""
    for case in cases_of(theme):
        check_chain(case, forwarded[case.name])


def check_chain(case: Case, forwarded: Forwarded) -> None:
    sent, understood = forwarded.by_proxy, forwarded.understood
    rest = iter(sent.requests)
    assert all(request in rest for request in understood), (case, forwarded)
    if sent.end == "end":
        assert understood == sent.requests, (case, forwarded)


def test_no_proxy_frames_mutants_differently(proxy: str, tmp_path: Path) -> None:
    cases = mutants(CASES, NUM_MUTANTS, seed=20_000, read=lambda data: read(data, len(data)))
    forwarded = uvloop.run(understood_by_proxy(proxy, cases, tmp_path))
    for case in cases:
        assert not difference(case.expected, forwarded[case.name].by_proxy), (case, forwarded[case.name])
        check_chain(case, forwarded[case.name])
    num_agreed = sum(case.expected == forwarded[case.name].by_proxy for case in cases if case.expected.end == "end")
    assert num_agreed > NUM_MUTANTS / 20, "most are refused, but not all"


def test_no_client_of_a_proxy_gets_a_tunnel_through_it(forwarded: dict[str, Forwarded]) -> None:
    """haproxy hands on an upgrade to h2c; what it then passes, it does not see."""
    upgrades = [case.name for case in CASES if case.expected.end == "101"]
    assert upgrades
    for name in upgrades:
        assert forwarded[name].by_proxy.end == "end"
        assert "garbage" not in forwarded[name].by_proxy.requests


def read(data: bytes, step: int) -> Understood:
    """What the protocol alone makes of the bytes, so many in each read."""
    reading = http1.read(data, step)
    requests = tuple(
        noted(message.head.method, f"{message.head.path}?{message.head.query}", message.body)
        for message in reading.messages
        if message.is_complete
    )
    is_last = requests[-1:] == (LAST,) and reading.end == "closed"
    return Understood(requests, "end" if is_last else reading.end or "waits")


@each_theme
@pytest.mark.parametrize("step", [1, 7, 2**20])
def test_protocol_alone_understands_the_same_however_the_bytes_are_split(theme: str, step: int) -> None:
    for case in cases_of(theme):
        if case.expected.end != "101":  # which the connection decides
            assert read(case.sent, step) == case.expected, case.name
