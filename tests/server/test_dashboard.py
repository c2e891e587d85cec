"""The dashboard: who may look, what its stream shows and to how many, and what protects its page."""

import json
import re
import subprocess
import sys
from base64 import b64decode
from ipaddress import ip_address
from pathlib import Path
from struct import iter_unpack
from typing import Any

import pytest

from core.types import EngineStats, Watch
from core.watch import STATES
from server.dashboard import ASK_S, DIRECTORY, FILES, PROTECTION
from server.gate.cross_origin import is_operators
from server.gate.identity import Scope
from server.observing.live import COLUMNS, MAX_POINTS, MAX_VIEW_S, MAX_VIEWERS, POINT_S, TICK_S, History, quantile_ms
from server.observing.metrics import Metrics
from server.wire.messages import HttpRequest, Peer
from tests.server.fakes import OPERATOR, PEER
from tests.server.running_server import LIMIT_S, ask, closing, open_with
from tests.server.running_server import serving as running
from tests.server.simulated_server import (
    STREAM,
    SimulatedServer,
    as_caller,
    completion,
    keyed_tenant,
    refusal_of,
    request,
    serving,
    the_answer,
    with_lines,
)
from tests.server.test_gate import all_routes

LIVE = request("GET", "/dashboard/live")
KEY = "s3cret"
PAGE_CHECKS = Path(sys.prefix) / "page" / "node_modules"  # axe-core, typescript, uplot
needs_page_checks = pytest.mark.skipif(not PAGE_CHECKS.is_dir(), reason="needs axe, tsc and uPlot of npm: make page")


def look(server: SimulatedServer, peer_reads: bool = True) -> Any:
    return server.send(as_caller(LIVE, KEY), peer_reads)


def frames_of(transport: Any) -> list[Any]:
    return the_answer(transport).events


@pytest.mark.parametrize(
    ("peer", "fields", "trusts_proxies", "expected"),
    [
        ("127.0.0.1", {}, False, True),
        ("127.8.9.1", {"host": "127.8.9.1:80"}, False, True),
        ("::1", {"host": "[::1]:8000"}, False, True),
        ("127.0.0.1", {"host": "LOCALHOST:8000"}, False, True),
        ("127.0.0.1", {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, False, True),
        ("127.0.0.1", {"sec-fetch-site": "none"}, False, True),
        ("192.0.2.7", {}, False, False),
        (None, {}, False, False),  # a Unix socket: proxies use them
        ("127.0.0.1", {}, True, False),
        ("127.0.0.1", {"host": "evil.example:8000"}, False, False),  # DNS rebinding
        ("127.0.0.1", {"host": "localhost.evil.example"}, False, False),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example"}, False, False),
        ("127.0.0.1", {"host": "a.localhost"}, False, False),
        ("127.0.0.1", {"host": ""}, False, False),
        ("127.0.0.1", {"host": None}, False, False),
        ("127.0.0.1", {"forwarded": "for=192.0.2.7"}, False, False),
        ("127.0.0.1", {"x-forwarded-for": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"x-forwarded-host": "a.example"}, False, False),
        ("127.0.0.1", {"x-forwarded-proto": ""}, False, False),
        ("127.0.0.1", {"x-real-ip": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"true-client-ip": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"cf-connecting-ip": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"via": "1.1 proxy"}, False, False),
        ("127.0.0.1", {"client-ip": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"fastly-client-ip": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"x-originating-ip": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"x-envoy-external-address": "192.0.2.7"}, False, False),
        ("127.0.0.1", {"cdn-loop": "cdn"}, False, False),
        ("127.0.0.1", {"x-recipient": "1"}, False, True),
        ("127.0.0.1", {"origin": "http://evil.example"}, False, False),
        ("127.0.0.1", {"origin": "http://localhost:3000"}, False, False),
        ("127.0.0.1", {"origin": "null"}, False, False),
        ("127.0.0.1", {"sec-fetch-site": "cross-site"}, False, False),
        ("127.0.0.1", {"sec-fetch-site": "same-site"}, False, False),
    ],
)
def test_without_a_key_it_is_for_the_operators_own_browser_alone(
    peer: str | None, fields: dict[str, str | None], trusts_proxies: bool, expected: bool
) -> None:
    named = {"host": "localhost:8000"} | fields
    headers = tuple((name.encode(), value.encode()) for name, value in named.items() if value is not None)
    asked = HttpRequest(stream_id=1, method="GET", path="/", query="", headers=headers, has_body=False)
    assert is_operators(asked, Peer(None if peer is None else ip_address(peer)), trusts_proxies) is expected


def test_two_hosts_are_none() -> None:
    headers = ((b"host", b"localhost"), (b"host", b"localhost"))
    asked = HttpRequest(stream_id=1, method="GET", path="/", query="", headers=headers, has_body=False)
    assert not is_operators(asked, Peer(ip_address("127.0.0.1")), False)


def test_without_keys_every_operators_route_is_guarded_so() -> None:
    routes = [(method, path) for path, method, route in all_routes() if route.scope is Scope.ADMIN]
    assert len(routes) >= 10
    with serving() as server:
        for method, path in routes:
            asked = request(method, path, None if method == "GET" else {})
            for peer, data in (
                (PEER, asked),
                (OPERATOR, asked.replace(b"Host: localhost", b"Host: evil.example")),
                (OPERATOR, with_lines(asked, "X-Forwarded-For: 192.0.2.7")),
                (OPERATOR, asked.replace(b"HTTP/1.1", b"HTTP/1.0")),  # nginx, with nothing but proxy_pass
                (OPERATOR, with_lines(asked, "Origin: http://evil.example")),
            ):
                server.network.peer = peer
                assert refusal_of(server.ask(data, method)) == (403, "permission_denied"), (method, path)


def test_others_need_a_key_with_the_right_admin() -> None:
    with serving(keys=(KEY,), tenants=(keyed_tenant("acme"),)) as server:
        for data, expected in (
            (LIVE, (401, "invalid_api_key")),
            (as_caller(LIVE, "wrong"), (401, "invalid_api_key")),
            (as_caller(LIVE, "acme"), (403, "permission_denied")),
        ):
            assert refusal_of(server.ask(data, "GET")) == expected
        assert the_answer(look(server)).status == 200


async def test_the_operators_browser_sees_a_server_without_keys_and_does_not_hold_up_its_end() -> None:
    async with running() as one:
        reader, writer = await open_with(one.server, LIVE)
        await reader.readuntil(b"data: {")
        assert (await ask(one.server, closing(LIVE.replace(b"Host: localhost", b"Host: a")))).status == 403
        one.server.stop(LIMIT_S)
        assert (await reader.read()).endswith(b"\r\n0\r\n\r\n")
        writer.close()
        await one.exit


@pytest.mark.parametrize("path", ["/", *FILES, "/dashboard/live"])
def test_each_answer_of_the_page_is_protected(path: str) -> None:
    with serving() as server:
        answer = server.ask(request("GET", path, None, "Accept: text/html,*/*;q=0.8"), "GET")
        assert answer.status == (403 if path.endswith("live") else 200)
        fields = answer.headers
        assert all(fields[name.decode()] == value.decode() for name, value in PROTECTION)
        assert fields["cache-control"] == "no-store"
        assert b"style=" not in answer.body
        if not path.endswith("uplot.js"):  # whose banner names its origin
            assert re.findall(rb"(?<!\w)https?://(?!www\.w3\.org/2000/svg|127\.0\.0\.1|localhost)", answer.body) == []


def test_the_page_is_small() -> None:
    assert sum(one.stat().st_size for one in DIRECTORY.iterdir()) <= 200 * 1024
    assert {one.name for one in DIRECTORY.iterdir()} == {*FILES.values(), "uplot.LICENSE"}


@needs_page_checks
def test_each_module_has_the_types_that_it_says(tmp_path: Path) -> None:
    options = {
        "allowJs": True, "checkJs": True, "noEmit": True, "strict": True, "noUnusedLocals": True, "target": "es2023",
        "module": "esnext", "moduleResolution": "bundler", "lib": ["es2023", "dom", "dom.iterable"],
        "typeRoots": [str(PAGE_CHECKS)], "types": ["uplot"], "allowUmdGlobalAccess": True,
        "paths": {"/dashboard/*": [f"{DIRECTORY}/*"]},
    }  # fmt: skip
    modules = [str(one) for one in DIRECTORY.glob("*.js") if one.name != "uplot.js"]

    def check(*files: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "files": files}))
        command = ["node", PAGE_CHECKS / "typescript" / "bin" / "tsc", "-p", tmp_path]
        return subprocess.run(command, capture_output=True, text=True)

    done = check(*modules)
    assert (done.returncode, done.stdout) == (0, "")
    (wrong := tmp_path / "wrong.js").write_text('import { time } from "/dashboard/elements.js";\ntime("a second");\n')
    assert "wrong.js(2,6): error TS2345" in check(*modules, str(wrong)).stdout, "it does check"


@needs_page_checks
def test_uplot_is_as_its_authors_have_published_it() -> None:
    published = PAGE_CHECKS / "uplot"
    for name, theirs in (("js", "dist/uPlot.iife.min.js"), ("css", "dist/uPlot.min.css"), ("LICENSE", "LICENSE")):
        assert (DIRECTORY / f"uplot.{name}").read_bytes() == (published / theirs).read_bytes()


def test_each_file_that_the_tour_names_exists() -> None:
    named = re.findall(r'file: "([^"]+)"', (DIRECTORY / "tour.js").read_text())
    assert len(set(named)) == 15
    assert [one for one in named if not (DIRECTORY.parents[1] / one).is_file()] == []


def test_others_than_browsers_are_told_that_the_server_runs() -> None:
    with serving() as server:
        for method, said in (("GET", b"steploop is running"), ("HEAD", b"")):
            answer = server.ask(request(method, "/"), method)
            assert (answer.status, answer.body, answer.headers["vary"]) == (200, said, "accept")
            assert answer.headers["content-type"].startswith("text/plain")


def test_the_stream_shows_requests_as_they_go_and_nothing_of_what_they_say() -> None:
    with serving(keys=(KEY,)) as server:
        for _ in range(9):  # for eight slots
            server.send(as_caller(completion(prompt="The engine", max_tokens=40, **STREAM), KEY))
        viewer = look(server)
        server.run_for(2 * TICK_S)
        first, *_, last = frames_of(viewer)
        assert (first["columns"], first["state"], first["num_requests"]) == (list(COLUMNS), "ready", 9)
        assert "columns" not in last
        assert {one["state"] for one in last["requests"]} == {"decode", "queue"}
        running_ones = [one for one in last["requests"] if one["state"] == "decode"]
        (waiting,) = [one for one in last["requests"] if one["state"] == "queue"]
        assert waiting["position"] == 0
        assert all(one["num_tokens"] and one["tokens_per_s"] > 0 for one in running_ones)
        gone = running_ones[0]["id"]
        cancelled = server.send(as_caller(request("DELETE", f"/admin/requests/{gone}"), KEY))
        server.run_for(10)
        assert the_answer(cancelled).status == 200
        events = frames_of(viewer)
        ended = [one for event in events for one in event["ended"]]
        assert sorted(one["id"] for one in ended) == sorted(one["id"] for one in last["requests"])
        assert {one["id"]: one["reason"] for one in ended if one["reason"] != "length"} == {gone: "request_cancelled"}
        assert events[-1]["requests"] == []
        assert b"engine" not in viewer.received.split(b"\r\n\r\n", 1)[1]


def test_refused_requests_are_among_those_that_are_over_one_a_second_of_a_kind() -> None:
    with serving(keys=(KEY,)) as server:
        viewer = look(server)
        for fields in ({"model": "none"}, {"model": "none"}, {"temperature": -1}):
            asked = with_lines(completion(prompt="The engine", **fields), "X-Request-Id: mine")
            assert the_answer(server.send(as_caller(asked, KEY))).status >= 400
        server.ask(with_lines(completion(prompt="The engine"), "Authorization: Bearer wrong"))
        server.run_for(2 * TICK_S)
        ended = [one for event in frames_of(viewer) for one in event["ended"]]
        assert [(one["status"], one["reason"], one["alias"]) for one in ended] == [
            (404, "model_not_found", "mine"),
            (400, "invalid_value", "mine"),
        ]


def test_steps_and_blocks_are_told_while_somebody_looks_and_the_engine_is_asked_for_nothing_else() -> None:
    with serving(keys=(KEY,)) as server:
        asked = as_caller(completion(prompt="The engine", max_tokens=40), KEY)
        server.ask(asked)
        assert not any(isinstance(message, Watch) for message in server.posted)
        viewer = look(server)
        server.ask(asked)
        server.run_for(3 * ASK_S)
        events = frames_of(viewer)
        steps = [step for event in events for step in event["steps"]]
        assert (sum(step[1] for step in steps), sum(step[2] for step in steps)) == (
            3,
            39,
        )  # the rest of the prompt was cached
        assert all(step[3] > 0 for step in steps)
        maps = [found for event in events for found in event["blocks"]]
        assert 1 <= len(maps) < len(events)  # only where it differs
        last = maps[-1]
        cells = [cell & 7 for (cell,) in iter_unpack("<H", b64decode(last["cells"]))]
        assert (len(cells), STATES[max(cells)]) == (64, "cached")
        assert {name for _, name in last["owners"]} == {"others", "local"}
        viewer.reset()
        num_asked = sum(isinstance(message, Watch) for message in server.posted)
        server.ask(asked)
        server.run_for(10 * ASK_S)
        assert sum(isinstance(message, Watch) for message in server.posted) == num_asked


def test_a_frame_is_made_once_for_all_viewers_and_none_while_nobody_looks() -> None:
    with serving(keys=(KEY,)) as server:
        live = server.app.live
        assert live is not None
        server.loop.advance(100)
        assert live.num_frames == 0
        viewers = [look(server) for _ in range(10)]
        before = live.num_frames
        server.run_for(4.1)
        assert live.num_frames - before == round(4 / TICK_S)
        bodies = {bytes(one.received).split(b"data: ")[-1] for one in viewers}
        assert len(bodies) == 1
        for one in viewers:
            one.reset()
        server.loop.settle()
        assert server.loop.next_timer() is None


def test_a_viewer_who_does_not_read_is_sent_no_more_and_dropped() -> None:
    with serving(keys=(KEY,)) as server:
        live = server.app.live
        assert live is not None
        sizes = []
        for _ in range(MAX_POINTS):
            live.history.take()
        stuck, reads = look(server, peer_reads=False), look(server)
        for _ in range(8):
            server.run_for(5)
            sizes.append(stuck.get_write_buffer_size())
        assert max(sizes) < 200_000
        assert stuck.is_lost
        assert len(frames_of(reads)) > 100


def test_more_viewers_are_refused_and_each_asks_again_in_time() -> None:
    with serving(keys=(KEY,)) as server:
        viewers = [look(server) for _ in range(MAX_VIEWERS)]
        assert refusal_of(the_answer(look(server))) == (429, "too_many_viewers")
        server.run_for(MAX_VIEW_S + 1)
        assert all(the_answer(one).is_complete for one in viewers)
        assert the_answer(look(server)).status == 200


def test_the_stream_ends_where_the_server_drains_or_its_key_is_revoked() -> None:
    for is_revoked in (False, True):
        with serving(keys=(KEY,)) as server:
            viewer = look(server)
            if is_revoked:
                server.app.has_revoked = lambda caller: True  # type: ignore[method-assign]
            else:
                server.readiness.is_draining = True
            server.run_for(2 * TICK_S)
            assert the_answer(viewer).is_complete


def test_history_keeps_an_hour_of_rates_and_of_times_of_the_last_minute() -> None:
    now, metrics, tokens = [0.0], Metrics(), [0]
    stats = lambda: EngineStats(num_blocks=10, num_used_blocks=5, num_generated_tokens=tokens[0])  # noqa: E731
    history = History(metrics, stats, lambda: now[0], lambda: 1000 + now[0])
    for i in range(MAX_POINTS + 30):
        now[0] += POINT_S
        tokens[0] += 50
        if i < MAX_POINTS:
            metrics.count_first_token(0.05, "m")
        history.take()
    num_ever, points = history.points.since(0)
    assert (len(points), num_ever) == (MAX_POINTS, MAX_POINTS + 30)
    first, last = (dict(zip(COLUMNS, points[i], strict=True)) for i in (0, -1))
    assert (last["at"], last["tokens_out_per_s"], last["kv_used"]) == (1000 + now[0], 10.0, 0.5)
    assert first["ttft_p50_ms"] == 60
    assert last["ttft_p50_ms"] is None
    assert history.points.since(MAX_POINTS + 29) == (num_ever, points[-1:])
    assert history.points.since(MAX_POINTS + 30) == (num_ever, [])


def test_quantiles_lie_on_a_line_within_their_bucket() -> None:
    bounds = (0.1, 0.2, 0.4)
    assert quantile_ms(bounds, (0, 0, 0, 0), 0.5) is None
    assert quantile_ms(bounds, (0, 10, 0, 0), 0.5) == 150
    assert quantile_ms(bounds, (10, 0, 10, 0), 0.95) == 380
    assert quantile_ms(bounds, (0, 0, 0, 3), 0.5) == 400
