"""Where connections come in and what they may take, as the settings say."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from core.errors import StartupError
from server.config import OPTIONS, Option, ServerConfig
from server.config_sources import load_config
from server.listening.sockets import PassedSocket
from server.process import listener_config
from server.wire.limits import ConnectionLimits
from tests.server.fakes import MemoryServer
from tests.server.given_settings import refusal, sample_of
from tests.server.raw_http2 import ACK, get, priority, settings, wire
from tests.server.raw_peer import MemoryPeer, respond


def test_what_a_connection_may_take_is_by_default_what_the_protocols_default_to() -> None:
    assert ServerConfig().connection_limits == ConnectionLimits()


@pytest.mark.parametrize(
    "option", [one for one in OPTIONS if one.section == "limits of a connection"], ids=lambda option: option.name
)
def test_each_limit_of_a_connection_changes_something(option: Option) -> None:
    config = listener_config(load_config({option.field_name: sample_of(option)}, {}), None, ())
    assert config != listener_config(ServerConfig(), None, ())


def test_a_head_that_is_not_too_large_fits_however_it_is_packed() -> None:
    limits = load_config({"max_head_bytes": "100KiB"}, {}).connection_limits
    assert limits.http2.frames.header_block_bytes >= limits.head.head_bytes
    assert limits.http2.list_bytes > limits.head.head_bytes


@pytest.mark.parametrize("text", ["", "200", "200/s", "0+1/s", "200+20", "-1+1/s", "1+1e3/s", "1+1/min", "1.5+1/s"])
def test_a_rate_is_a_burst_and_a_rate(text: str) -> None:
    message = str(refusal({"max_resets": text}, {}))
    assert "200+20/s: 200 at once, and 20 more each second" in message


@pytest.mark.parametrize(
    ("field", "too_little"), [("max_settings", "1+9/s"), ("max_settings_entries", "7"), ("max_empty_frames", "15")]
)
def test_no_limit_on_frames_is_less_than_any_client_sends(field: str, too_little: str) -> None:
    assert too_little in str(refusal({field: too_little}, {}))


def test_least_limits_on_frames_let_a_client_be_served() -> None:
    least = load_config({"max_settings": "2+0/s", "max_settings_entries": "8", "max_empty_frames": "16"}, {})
    server = MemoryServer(respond, least.connection_limits)
    peer = MemoryPeer(server)
    peer.send(wire([settings(flags=ACK), *[priority(stream=stream) for stream in range(3, 13, 2)], get()]))
    assert peer.seen.statuses == {1: 200}
    server.close()


def addresses(config: ServerConfig, passed: Sequence[PassedSocket] = ()) -> list[str]:
    return [str(bind.address) for bind in config.all_binds(passed)]


@contextlib.contextmanager
def passed_sockets(*families: int) -> Iterator[list[PassedSocket]]:
    """As systemd would pass them under one name."""
    with contextlib.ExitStack() as stack:
        yield [PassedSocket(stack.enter_context(socket.socket(family)), "front") for family in families]


def test_binds_stand_instead_of_the_default_and_beside_what_is_given() -> None:
    two = {"binds": ["127.0.0.1:1", "unix:/a"]}
    assert addresses(load_config({}, {})) == ["127.0.0.1:8000"]
    assert addresses(load_config(two, {})) == ["127.0.0.1:1", "unix:/a"]
    assert addresses(load_config(two | {"port": "2"}, {})) == ["127.0.0.1:2", "127.0.0.1:1", "unix:/a"]
    assert addresses(load_config(two, {"STEPLOOP_HOST": "::1"})) == ["[::1]:8000", "127.0.0.1:1", "unix:/a"]
    with passed_sockets(socket.AF_INET) as passed:
        assert addresses(load_config({}, {}), passed) == []
        assert addresses(load_config({"port": "2"}, {}), passed) == ["127.0.0.1:2"]


@pytest.mark.parametrize(
    ("bind", "trusted", "is_refused"),
    [
        ("proxy:127.0.0.1:1", (), True),
        ("proxy:127.0.0.1:1", ("unix",), True),
        ("proxy:unix:/a", ("127.0.0.1",), True),
        ("proxy:127.0.0.1:1", ("127.0.0.1",), False),
        ("proxy:unix:/a", ("unix",), False),
        ("proxy:systemd:front", (), True),
        ("proxy:systemd:front", ("unix",), False),
        ("proxy:systemd:front", ("127.0.0.1",), False),
        ("127.0.0.1:1", (), False),
    ],
)
def test_a_bind_for_proxies_needs_one_that_is_trusted(bind: str, trusted: tuple[str, ...], is_refused: bool) -> None:
    flags: dict[str, str | list[str]] = {"binds": [bind]}
    config = load_config(flags | ({"trusted_proxies": list(trusted)} if trusted else {}), {})
    if not is_refused:
        assert addresses(config) == [bind.removeprefix("proxy:")]
        return
    with pytest.raises(StartupError, match="accepts only trusted proxies") as caught:
        config.all_binds()
    assert caught.value.fix.startswith("--trusted-proxies ")


@pytest.mark.parametrize(
    ("families", "trusted", "fix"),
    [
        ((socket.AF_UNIX,), ["127.0.0.1"], "--trusted-proxies unix"),
        ((socket.AF_UNIX,), ["unix"], None),
        ((socket.AF_INET,), ["unix"], "--trusted-proxies 127.0.0.1, or the network that the proxy is in"),
        ((socket.AF_INET,), ["127.0.0.1"], None),
        ((socket.AF_UNIX, socket.AF_INET), ["127.0.0.1"], "--trusted-proxies unix for a Unix socket; else 127.0.0.1"),
        ((socket.AF_UNIX, socket.AF_INET), ["127.0.0.1", "unix"], None),
    ],
)
def test_a_passed_socket_for_proxies_needs_one_that_can_reach_it(
    families: tuple[int, ...], trusted: list[str], fix: str | None
) -> None:
    config = load_config({"binds": ["proxy:systemd:front"], "trusted_proxies": trusted}, {})
    with passed_sockets(*families) as passed:
        if fix is None:
            assert addresses(config, passed) == ["systemd:front"]
            return
        with pytest.raises(StartupError, match="no --trusted-proxies can reach it") as caught:
            config.all_binds(passed)
        assert caught.value.fix.startswith(fix)


def test_nobody_takes_all_connections_alone_unless_they_are_few() -> None:
    caps = {number: ServerConfig(max_connections=number).client_rules.max_per_address for number in (8, 64, 1024)}
    assert caps == {8: 8, 64: 56, 1024: 896}
    assert ServerConfig(max_connections_per_address=5).client_rules.max_per_address == 5
    assert ServerConfig(forwarded_header="none").client_rules.forwarded_header is None


def test_limits_are_documented_with_their_defaults() -> None:
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| ")]
    documented = {
        flag.strip(" `"): default.strip()
        for _, flags, defaults, _ in rows[1:]
        for flag, default in zip(flags.split(";"), defaults.split(";"), strict=True)
    }
    by_flag = {option.flag: option for option in OPTIONS if option.section.startswith("limits")}
    assert by_flag.keys() <= documented.keys()
    for flag, default in documented.items():
        option = by_flag[flag]
        assert option.default is None or option.show(option.default) == default
