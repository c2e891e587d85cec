"""The dashboard in Chromium: what a person sees and does, with the answers of a real server."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from server.engine_loader import DEMO_NAME
from server.gate.identity import Scope, create_key
from tests.e2e.conftest import API_KEY, MODEL, start_server
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import post
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_clients import needs
from tests.server.test_dashboard import PAGE_CHECKS, needs_page_checks

LONG = {"model": MODEL, "prompt": "What is a step?", "max_tokens": 1900, "ignore_eos": True, "stream": True}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
MARKUP = "<img src=x onerror=document.title=1>"
TENANTS = """
keys_file = "{keys}"
[slo]
ttft_p50_ms = 0.01
[prices."*"]
completion = 1000
[[tenants]]
name = "acme"
limits = {{ tokens_per_minute = 100_000, money_per_day = 0.02 }}
[[tenants]]
name = "operators"
"""
ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PICTURED = ("server", "server-phone", "request-dark", "playground", "tour", "switches")  # in README.md and docs/
CTRL, SHIFT = 2, 8
CANCEL = "(button => button && (button.click(), true))(document.querySelector('#running button:not(.link)'))"
FAILURES = "Runtime.exceptionThrown", "Log.entryAdded"


class Browser:
    """A page of Chromium, driven over a pair of pipes by the DevTools protocol.

    Attributes:
        failures: that the page's console has told: exceptions, and what the policy has blocked.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.failures: list[Any] = []
        self._commands, self._answers, self._num_sent = commands, answers, 0
        self._session: dict[str, str] = {}
        self._unread = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session["sessionId"] = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params} | self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._num_sent:
                assert "error" not in told, (method, told)
                return told["result"]
            if told.get("method") in FAILURES:
                self.failures.append(told["params"])

    def _read(self) -> Any:
        while b"\0" not in self._unread:
            data = os.read(self._answers, 65536)
            assert data, "the browser has ended"
            self._unread += data
        line, self._unread = self._unread.split(b"\0", 1)
        return json.loads(line)

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str) -> None:
        wait_for(lambda: self.evaluate(expression), lambda: f"{expression}\n{self.text}\n{self.failures}")

    @property
    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def press(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            more: dict[str, Any] = {"text": text} if text and kind == "keyDown" else {}
            more |= {"windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def tab_to(self, places: str, modifiers: int = 0) -> None:
        """Press Tab until the focus is at one of the places."""
        for _ in range(200):
            self.press("Tab", 9, modifiers=modifiers)
            if self.evaluate(f"document.activeElement.matches({places!r})"):
                return
        raise AssertionError(f"Tab does not lead to {places}")

    def look_like(self, width: int, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=width < 600
        )

    def save(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("Page.captureScreenshot")["data"]))


def type_into(page: Browser, place: str, text: str) -> None:
    page.evaluate(f"document.getElementById({place!r}).focus()")
    page.call("Input.insertText", text=text)


@contextmanager
def browsing(directory: Path, *flags: str) -> Iterator[Browser]:
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    command = shlex.join(("chromium", *FLAGS, *flags, f"--user-data-dir={directory}/chromium"))
    shell = f"exec {command} 3<&{read_commands} 4>&{write_answers}"
    passed = read_commands, write_answers
    with subprocess.Popen(["bash", "-c", shell], pass_fds=passed, stderr=subprocess.DEVNULL) as process:
        for one in passed:
            os.close(one)
        try:
            yield Browser(commands, answers)
        finally:
            process.terminate()
            os.close(commands)
            os.close(answers)


@contextmanager
def asking(server: ServerProcess, body: Mapping[str, Any] = LONG, key: str = API_KEY) -> Iterator[None]:
    """A stream that goes on until it is cancelled."""
    thread = threading.Thread(target=post, args=(server.port, "/v1/completions", body, key))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.slow
@needs("chromium", "chromium")
def test_an_operator_signs_in_sees_a_request_cancels_it_and_looks_at_its_stages(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = spawn("--api-key", API_KEY)
    server.wait_ready()
    with browsing(tmp_path) as page:
        page.look_like(1280, "light")
        page.call("Page.navigate", url=f"{server.url}/dashboard")
        page.wait("document.activeElement.id === 'key'")
        page.failures.clear()  # that the first look was refused
        page.call("Input.insertText", text=API_KEY)
        page.press("Enter", 13, "\r")
        page.wait("document.getElementById('state').textContent === 'ready'")
        assert "None yet." in page.text
        with asking(server):
            page.wait("document.querySelector('#running button:not(.link)') !== null")
            page.wait("[...document.querySelectorAll('#running td')].some(one => one.textContent === 'decode')")
            page.evaluate("document.querySelector('#running button:not(.link)').focus()")
            page.press(" ", 32, " ")
        page.wait("document.querySelector('#ended tbody').innerText.includes('request_cancelled')")
        assert "is cancelled" in page.text
        page.evaluate("document.querySelector('#ended button').click()")
        page.wait("document.querySelectorAll('#stages tr').length > 5")
        page.wait("!document.getElementById('why').hidden")
        page.evaluate("document.getElementById('why').focus()")
        page.press(" ", 32, " ")
        page.wait("document.getElementById('verdict').textContent.includes('.')")
        page.look_like(1280, "dark")
        page.press("Escape", 27)
        page.wait("!document.getElementById('detail').open")
        page.look_like(390, "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert "What is a step" not in page.evaluate("document.documentElement.outerHTML")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie].join()") == "0,0,"
        assert page.failures == []


@pytest.mark.slow
@needs("chromium", "chromium")
def test_an_operator_looks_into_the_engine_and_manages_keys_limits_and_budgets_by_keyboard(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    now, keys, config = datetime.now(UTC), tmp_path / "keys.json", tmp_path / "tenants.toml"
    config.write_text(TENANTS.format(keys=keys))
    admin, _ = create_key(keys, now, "operators", scopes=(Scope.ADMIN,))
    acme, _ = create_key(keys, now, "acme", label=MARKUP)
    server = spawn("--config", str(config), "--served-model-name", MARKUP)
    server.wait_ready()

    def ask() -> int:
        body = LONG | {"model": MARKUP, "max_tokens": 17, "stream": False}
        return post(server.port, "/v1/completions", body, acme).status

    with browsing(tmp_path) as page:

        def press_button(label: str) -> None:
            page.wait(f"document.querySelector('[aria-label^={json.dumps(label)}]') !== null")
            page.evaluate(f"document.querySelector('[aria-label^={json.dumps(label)}]').focus()")
            page.press("Enter", 13, "\r")
            page.wait("document.getElementById('choice').open")

        def confirm() -> None:
            page.evaluate("document.getElementById('choice-yes').focus()")
            page.press("Enter", 13, "\r")
            page.wait("!document.getElementById('choice').open")

        page.look_like(1280, "light")
        page.call("Page.navigate", url=f"{server.url}/dashboard")
        page.wait("document.activeElement.id === 'key'")
        page.failures.clear()
        type_into(page, "key", admin)
        page.press("Enter", 13, "\r")
        page.wait("document.getElementById('block').textContent.includes('free')")
        assert ask() == 200
        page.wait("document.getElementById('promises').innerText.includes('✗ missed')")
        page.wait(
            "[...document.querySelectorAll('#tiles .kept .bad')].some((one) => one.innerText.startsWith('✗ p50 ≤'))"
        )
        page.evaluate("location.hash = 'tour'")
        page.wait("document.getElementById('tour').hidden === false")
        page.evaluate("document.getElementById('switch').value = 'prefix_cache'")
        page.evaluate("document.getElementById('simulate').requestSubmit()")
        page.wait("document.querySelectorAll('#runs rect.answers').length === 32")
        page.evaluate("document.getElementById('switches-title').scrollIntoView()")
        page.evaluate("location.hash = ''")
        page.wait("document.getElementById('step').textContent.includes('median')")
        page.evaluate("document.getElementById('steps').focus()")
        page.press("ArrowLeft", 37)
        page.wait("document.getElementById('step').textContent.includes('decoded tokens in')")
        page.wait("document.getElementById('block').textContent.includes(' cached')")
        page.evaluate("document.getElementById('blocks').focus()")
        page.wait("/Block 0: cached, prefix \\d+, of acme/.test(document.getElementById('block').textContent)")
        assert "offloaded" in page.evaluate("document.getElementById('states').innerText")
        page.evaluate("document.getElementById('by-tenant').click()")
        page.wait("/free.*acme/.test(document.getElementById('states').innerText)")
        page.wait("document.getElementById('tenants').innerText.includes('0.017 of 0.02, 85 %')")
        assert ask() == 429
        press_button("Change the limits of acme")
        page.evaluate("document.querySelector('[name=money_per_day]').value = 1")
        page.evaluate("document.querySelector('[name=\"each_key:_tokens_per_day\"]').value = 12345")
        confirm()
        page.wait("document.getElementById('tenants').innerText.includes('0.017 of 1')")
        page.wait("document.getElementById('tenants').innerText.includes(' of 12,345')")
        assert ask() == 200
        type_into(page, "find-tenant", "OPER")
        page.wait("!document.getElementById('tenants').innerText.includes('acme')")
        assert "operators" in page.evaluate("document.getElementById('tenants').innerText")
        page.evaluate("document.getElementById('find-tenant').value = ''")
        page.evaluate("document.getElementById('find-tenant').dispatchEvent(new Event('input'))")
        page.wait("document.getElementById('new-tenant').value === 'acme'")
        type_into(page, "new-label", MARKUP)
        page.press("Enter", 13, "\r")
        page.wait("document.activeElement.id === 'created-key'")
        created = page.evaluate("document.getElementById('created-key').value")
        assert post(server.port, "/v1/completions", LONG | {"model": MARKUP, "max_tokens": 1}, created).status == 200
        press_button(f"Revoke the key {created[:11]}")
        confirm()
        page.wait("document.getElementById('tenants-told').textContent.includes('is revoked')")
        assert post(server.port, "/v1/completions", LONG, created).status == 401
        page.evaluate("document.querySelector('#ended button').click()")
        page.wait("document.getElementById('beside').innerText.includes('None.')")
        page.press("Escape", 27)
        with asking(server, LONG | {"model": MARKUP}, acme):
            page.wait("Number(document.querySelector('#running tbody tr').cells[6]?.textContent) > 17 && " + CANCEL)
        page.wait("document.querySelector('#ended tbody').innerText.includes('request_cancelled')")
        page.wait("Number(document.getElementById('moment').max) > 0")
        page.evaluate("document.getElementById('moment').focus()")
        page.press("Home", 36)
        page.wait("document.getElementById('seen').textContent !== 'now'")
        first = page.evaluate("document.querySelector('#tiles p').innerText")
        assert f"Requests per second: {first}; " in page.evaluate("document.getElementById('moment').ariaValueText")
        page.evaluate("document.getElementById('moment').blur()")
        page.wait("document.getElementById('seen').textContent === 'now'")
        type_into(page, "search", "ACME")
        page.wait("document.getElementById('num-ended').textContent === '5 of 5'")
        type_into(page, "search", "x")
        page.wait("document.getElementById('ended').innerText.includes('No request matches.')")
        page.look_like(390, "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert MARKUP in page.text
        assert page.evaluate("[document.title, document.images.length].join()") == "steploop,0"
        assert "What is a step" not in page.evaluate("document.documentElement.outerHTML")
        assert page.failures == []


@pytest.mark.slow
@needs("chromium", "chromium")
def test_a_visitor_asks_stops_and_forks_by_keyboard_runs_the_code_that_is_shown_and_takes_the_tour(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    now, keys, config = datetime.now(UTC), tmp_path / "keys.json", tmp_path / "tenants.toml"
    config.write_text(f'keys_file = "{keys}"\n[[tenants]]\nname = "acme"\n')
    key, _ = create_key(keys, now, "acme")  # without the right admin
    server = spawn("--config", str(config), "--served-model-name", MARKUP, model=None)
    server.wait_ready()
    with browsing(tmp_path) as page:

        def told(place: str, expression: str) -> None:
            page.wait(f"(text => {expression})(document.getElementById({place!r}).innerText)")

        def parameter(name: str, value: str) -> None:
            page.evaluate(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")

        page.look_like(1280, "light")
        page.call("Page.navigate", url=f"{server.url}/dashboard#playground")
        page.wait("document.activeElement.id === 'key'")
        type_into(page, "key", key)
        page.press("Enter", 13, "\r")
        page.wait("document.getElementById('chat-model').value !== ''")
        page.failures.clear()  # that others than operators do not see the server
        parameter("max_tokens", "1500")
        parameter("ignore_eos", "true")
        parameter("temperature", "0")
        type_into(page, "chat-system", MARKUP)
        page.evaluate("document.querySelector('#chat [type=submit]').focus()")
        page.press("Enter", 13, "\r")
        page.wait("document.querySelectorAll('#chat-choices .token').length > 20")
        told("chat-told", "/tokens, [0-9.]+ tokens\\/s/.test(text)")
        assert page.evaluate("document.getElementById('chat-told').ariaLive") == "off"  # a number a token
        page.evaluate("document.getElementById('chat-stop').focus()")
        page.press("Enter", 13, "\r")
        told("chat-told", "text.startsWith('Stopped after')")
        assert page.evaluate("document.getElementById('chat-told').ariaLive") is None
        told("chat-stages", "text.includes('prefill') && text.includes('settle')")

        parameter("max_tokens", "24")
        page.evaluate("document.getElementById('chat').requestSubmit()")
        told("chat-told", "/^24 tokens, .* ended by length/.test(text)")
        told("chat-stages", "text.includes('last flush')")
        page.evaluate("document.querySelector('#chat-choices .token').focus()")
        page.press("ArrowRight", 39)
        page.press("ArrowRight", 39)
        told("token-about", "/^Token 3, .*entropy at least \\d/.test(text)")
        text = page.evaluate(
            "[...document.querySelectorAll('#chat-choices .token')].slice(0, 2).map(one => one.textContent).join('')"
        )
        page.press("Enter", 13, "\r")
        page.wait("document.querySelector('#alternatives :focus') !== null")
        page.press("Enter", 13, "\r")
        page.wait("document.querySelector('#chat-choices .given') !== null")
        assert page.evaluate("document.querySelector('.given').textContent").startswith(text)
        told("chat-told", "/^24 tokens, .* ended by length/.test(text)")
        told("code", "text.includes('continue_final_message')")

        page.evaluate("document.getElementById('chat').requestSubmit()")
        told("chat-told", "/^24 tokens, .* ended by length/.test(text)")
        answer = page.evaluate("document.getElementById('chat-whole').textContent")
        for kind, command in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
            page.evaluate(f"document.getElementById('code-kind').value = {kind!r}")
            page.evaluate("document.getElementById('code-kind').dispatchEvent(new Event('change'))")
            code = page.evaluate("document.getElementById('code').textContent")
            assert key not in code
            ran = subprocess.run(
                [*command, code], env=os.environ | {"API_KEY": key}, capture_output=True, check=True, timeout=30
            )
            printed = ran.stdout.decode()
            if kind == "curl":
                events = (json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {"))
                choices = [choice for event in events for choice in event["choices"]]
                printed = "".join(choice["delta"].get("content", "") for choice in choices)
            assert printed == answer

        parameter("response_format", "{")
        page.evaluate("document.getElementById('chat').requestSubmit()")
        assert page.evaluate("document.querySelector('#chat details').open")
        parameter("response_format", '{"type": "nothing"}')
        page.evaluate(
            "document.querySelector('[name=response_format]').dispatchEvent(new Event('input', {bubbles: true}))"
        )
        page.evaluate("document.getElementById('chat').requestSubmit()")
        told("chat-told", "text.includes('response_format')")
        page.failures.clear()  # that it was refused
        assert page.evaluate("document.getElementById('chat-whole').textContent") == answer, "what was there stays"

        parameter("response_format", "")
        parameter("stop", answer[20:24])
        page.evaluate("document.getElementById('chat').requestSubmit()")
        told("chat-told", "text.includes('ended by stop')")
        assert page.evaluate("document.getElementById('chat-whole').textContent") == answer[:20]
        cut = "[...document.querySelectorAll('.token:not(.beyond)')].map((one) => one.textContent).join('')"
        assert answer[:20].startswith(page.evaluate(cut))
        assert page.evaluate("document.querySelector('.token.beyond') !== null")
        page.evaluate("document.getElementById('chat-reply').click()")
        assert page.evaluate("document.getElementById('chat-turns').innerText").endswith(f"Model: {answer[:20]}")
        page.call("Input.insertText", text="And a KV cache?")
        page.evaluate("document.getElementById('chat').requestSubmit()")
        told("chat-told", "/^24 tokens, .* ended by length/.test(text)")
        told("code", 'text.includes(\'"role": "assistant"\') && text.includes("And a KV cache?")')
        page.evaluate("document.getElementById('chat-anew').click()")
        told("code", 'text.includes("And a KV cache?") && text.includes("assistant") === false')

        page.evaluate("document.getElementById('to-tour').focus()")
        page.press("Enter", 13, "\r")
        page.wait("document.getElementById('tour').hidden === false")
        told("tour-stages", "text.includes('core/kv_cache.py')")  # before any number is known
        page.evaluate("document.getElementById('tour-send').focus()")
        page.press("Enter", 13, "\r")
        told("tour-told", "/through 15 stages, in /.test(text)")
        told("tour-stages", "/24 tokens, one in [0-9.]+ ms/.test(text) && text.includes('core/kv_cache.py')")
        page.failures.clear()
        page.evaluate("document.getElementById('simulate').requestSubmit()")
        told("simulate-told", "text.includes('admin')")  # operators alone run simulations
        page.failures.clear()
        page.evaluate("document.querySelector('.skip').click()")
        page.wait("document.activeElement.id === 'main'")
        assert not page.evaluate("document.getElementById('tour').hidden")
        page.look_like(390, "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("[document.title, document.images.length].join()") == "steploop,0"
        assert page.failures == []


@pytest.mark.slow
@needs("chromium", "chromium")
def test_the_keyboard_alone_leads_everywhere_and_a_reload_keeps_the_hour(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = spawn(model=None)
    server.wait_ready()
    times = "(document.getElementById('moment').focus(), document.getElementById('seen').textContent)"
    with browsing(tmp_path) as page:
        page.look_like(1280, "light")
        page.call("Page.navigate", url=f"{server.url}/")
        page.wait("Number(document.getElementById('moment').max) >= 1")
        page.tab_to("#moment")
        page.press("Home", 36)
        page.wait("document.getElementById('seen').textContent !== 'now'")
        first = page.evaluate(times)
        page.call("Page.navigate", url=f"{server.url}/dashboard")
        page.wait("Number(document.getElementById('moment').max) >= 1")
        page.tab_to("#moment")
        page.press("Home", 36)
        page.wait("document.getElementById('seen').textContent !== 'now'")
        assert page.evaluate(times) == first

        page.tab_to("#to-playground", SHIFT)
        page.press("Enter", 13, "\r")
        page.wait("document.getElementById('chat-model').value !== ''")
        page.tab_to("#chat-user")
        page.press("Enter", 13, "\r", CTRL)
        page.wait("document.getElementById('chat-told').innerText.includes('ended by')")
        page.tab_to(".token")
        page.press("ArrowRight", 39)
        page.press("Enter", 13, "\r")
        page.press("Enter", 13, "\r")
        page.wait("document.querySelector('#chat-choices .given') !== null")
        page.wait("document.getElementById('chat-told').innerText.includes('ended by')")
        page.tab_to("#to-server", SHIFT)
        page.press("Enter", 13, "\r")
        page.tab_to("#ended button")
        page.press("Enter", 13, "\r")
        page.wait("!document.getElementById('why').hidden")
        page.tab_to("#why")
        page.press("Enter", 13, "\r")
        page.wait("document.getElementById('verdict').textContent.includes('.')")
        page.press("Escape", 27)
        page.wait("document.activeElement.matches('#ended button')")
        with asking(server, LONG | {"model": DEMO_NAME}):
            page.wait("document.querySelector('#running button:not(.link)') !== null")
            page.tab_to("#running button:not(.link)", SHIFT)
            page.press("Enter", 13, "\r")
        page.wait("document.getElementById('told').innerText.includes('is cancelled')")
        assert page.failures == []


# A Blob has no media type, so that browsers ask nobody before they send it
BODY = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1})
ASK = f'fetch(URL, {{method: "POST", mode: MODE, body: new Blob([{json.dumps(BODY)}])}})'


@pytest.mark.slow
@needs("chromium", "chromium")
def test_without_keys_no_page_of_another_site_asks_neither_across_origins_nor_by_a_name_that_leads_here(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = spawn()
    server.wait_ready()
    own, rebound = (f"http://{name}:{server.port}" for name in ("127.0.0.1", "evil.example"))
    with browsing(tmp_path, "--host-resolver-rules=MAP evil.example 127.0.0.1") as page:

        def status(origin: str, url: str, mode: str = "cors") -> Any:
            """Of what a page of the origin asks; 0: it is not told."""
            page.call("Page.navigate", url=f"{origin}/health")
            page.wait("document.readyState === 'complete'")
            post_it, get_it = ASK.replace("URL", json.dumps(url)).replace("MODE", json.dumps(mode)), f"fetch({url!r})"
            asked = post_it if url.endswith("completions") else get_it
            told = page.call("Runtime.evaluate", expression=f"{asked}.then(one => one.status)", awaitPromise=True)
            return told["result"].get("value")

        assert status(own, f"{own}/v1/completions") == 200
        assert status(own, f"{own}/v1/models") == 200
        assert status(rebound, f"{rebound}/v1/models") == 403
        assert status(rebound, f"{rebound}/v1/completions") == 403
        assert status(f"http://localhost:{server.port}", f"{own}/v1/completions", "no-cors") == 0
        wait_for(lambda: server.log.count("POST /v1/completions 403") == 2, lambda: server.log_tail)
        assert server.log.count("POST /v1/completions 200") == 1


AXE = """axe.run().then((told) => { window.found = told.violations.map((one) =>
    [one.id, ...one.nodes.map((node) => `${node.html}: ${node.failureSummary}`)]) })"""
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))))"
VIEWED = """
keys_file = "{keys}"
[slo]
ttft_p95_ms = 2000
latency_p95_ms = 400
[prices."*"]
completion = 50
[[tenants]]
name = "acme"
limits = {{ requests_per_minute = 600, money_per_day = 2 }}
[[tenants]]
name = "globex"
share = 2
[[tenants]]
name = "operators"
"""
OTHERS_ASK = ("What is continuous batching?", "Walk me through a request", "What is a KV cache?")


def views_of(page: Browser, spawn: Callable[..., ServerProcess], directory: Path, num_points: int) -> Iterator[str]:
    """Go through all views of a server with some traffic. Yields each one's name, once it is there.

    Args:
        num_points: of the hour, at least, that the server's view shows.
    """
    now, keys, config = datetime.now(UTC), directory / "keys.json", directory / "tenants.toml"
    config.write_text(VIEWED.format(keys=keys))
    admin, _ = create_key(keys, now, "operators", label="on call", scopes=(Scope.ADMIN, Scope.INFERENCE))
    others = [create_key(keys, now, tenant, label="CI")[0] for tenant in ("acme", "globex")]
    server = spawn("--config", str(config), model=None)
    server.wait_ready()
    has_seen = threading.Event()

    def ask_until_seen(key: str) -> None:
        for i in count():
            prompt = OTHERS_ASK[i % len(OTHERS_ASK)] * (1 + i % 7)
            post(server.port, "/v1/completions", {"model": DEMO_NAME, "prompt": prompt, "max_tokens": 150}, key)
            if has_seen.is_set():
                return

    def go(path: str) -> None:
        page.call("Page.navigate", url=f"{server.url}{path}")
        page.wait("document.readyState === 'complete'")

    def click(place: str) -> None:
        page.wait(f"document.querySelector({place!r}) !== null")
        page.evaluate(f"document.querySelector({place!r}).click()")

    page.look_like(1280, "light")
    go("/dashboard")
    page.wait("document.activeElement.id === 'key'")
    yield "login"
    type_into(page, "key", admin)
    page.press("Enter", 13, "\r")
    page.wait("document.getElementById('state').textContent === 'ready'")
    with asking(server, LONG | {"model": DEMO_NAME}, admin), ThreadPoolExecutor() as pool:
        try:
            for one in 2 * others:
                pool.submit(ask_until_seen, one)
            for shown in (
                "document.getElementById('block').textContent.includes(' used')",
                "document.getElementById('step').textContent.includes('median')",
                "document.querySelector('#running button:not(.link)') !== null",
                "document.getElementById('promises').innerText.includes('missed')",
                f"Number(document.getElementById('moment').max) >= {num_points}",
            ):
                page.wait(shown)
            yield "server"
        finally:
            has_seen.set()
            page.evaluate("document.querySelector('#running button:not(.link)')?.click()")
    page.wait("document.getElementById('num-running').textContent === '0'")
    page.evaluate("document.getElementById('tenants-title').scrollIntoView()")
    yield "tenants"
    click("#ended tr:nth-child(3) button")
    page.wait("!document.getElementById('why').hidden")
    click("#why")
    page.wait("document.getElementById('verdict').textContent.includes('.')")
    yield "request"
    page.press("Escape", 27)
    click("[aria-label^='Change the limits of acme']")
    page.wait("document.getElementById('choice').open")
    yield "limits"
    page.press("Escape", 27)

    page.evaluate("location.hash = 'playground'")
    page.wait("document.getElementById('chat-model').value !== ''")
    page.evaluate("document.querySelector('[name=max_tokens]').value = 40")
    page.evaluate("document.getElementById('chat').requestSubmit()")
    page.wait("document.getElementById('chat-stages').innerText.includes('last flush')")
    page.evaluate("document.querySelectorAll('#chat-choices .token')[5].focus()")
    page.wait("document.querySelector('#alternatives button') !== null")
    yield "playground"
    click("#chat summary")
    yield "parameters"
    page.evaluate("location.hash = 'tour'")
    click("#tour-send")
    page.wait("document.querySelectorAll('#tour-stages .numbers').length === 15")
    page.evaluate("scrollTo(0, 0)")
    yield "tour"
    page.evaluate("document.getElementById('switch').value = 'overload'")
    page.evaluate("document.querySelector('[name=num_requests]').value = 40")
    page.evaluate("document.getElementById('simulate').requestSubmit()")
    page.wait("document.querySelectorAll('#runs rect.refused').length > 2")
    page.evaluate("document.getElementById('simulate').scrollIntoView()")
    yield "switches"
    go("/docs#post_v1_chat_completions")
    page.wait("document.querySelector('#post_v1_chat_completions[open] pre') !== null")
    yield "api"


@pytest.mark.slow
@needs("chromium", "chromium")
@needs_page_checks
def test_axe_finds_nothing_on_any_view_light_or_dark_wide_or_narrow(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    axe = (PAGE_CHECKS / "axe-core" / "axe.min.js").read_text()
    checked = []
    with browsing(tmp_path) as page:
        for view in views_of(page, spawn, tmp_path, 2):
            if page.evaluate("typeof axe") != "object":
                page.evaluate(axe)
            for scheme, width in product(("light", "dark"), (1280, 390)):
                page.look_like(width, scheme)
                page.evaluate(f"delete window.found; {AXE}")
                page.wait("window.found !== undefined")
                assert page.evaluate("found") == [], (view, scheme, width)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, scheme)
                checked.append(view)
    assert len(checked) == 10 * 4
    assert {one.split("-")[0] for one in PICTURED} <= set(checked)


def test_the_pictures_of_the_docs_are_those_that_make_screenshots_takes() -> None:
    texts = [one.read_text() for one in (ROOT / "README.md", *PICTURES.parent.glob("*.md"))]
    shown = re.findall(r"pictures/([\w-]+)\.png\)", "".join(texts))
    assert sorted(set(shown)) == sorted(PICTURED) == sorted(one.stem for one in PICTURES.iterdir())


@pytest.mark.slow
@needs("chromium", "chromium")
def test_the_page_of_the_api_shows_each_route(spawn: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = spawn("--api-key", API_KEY)
    server.wait_ready()
    with browsing(tmp_path) as page:
        page.look_like(1280, "light")
        page.call("Page.navigate", url=f"{server.url}/docs#post_v1_chat_completions")
        page.wait("document.querySelector('#post_v1_chat_completions[open] pre') !== null")
        assert page.evaluate("document.querySelectorAll('details[id]').length") > 70
        for told in ("authorization: Bearer $KEY", "temperature", "≤ 2", "text/event-stream", "mirostat", "too large"):
            assert told in page.evaluate("document.getElementById('post_v1_chat_completions').textContent"), told
        page.evaluate("document.querySelectorAll('#routes > section > details').forEach((one) => { one.open = true })")
        page.wait("document.querySelectorAll('details[id] pre').length > 70")
        page.evaluate("document.getElementById('search').focus()")
        page.call("Input.insertText", text="mirostat_no_such")
        page.wait("document.getElementById('state').textContent.startsWith('0 of')")
        page.look_like(360, "dark")
        page.evaluate("document.getElementById('search').value = 'files'")
        page.evaluate("document.getElementById('search').dispatchEvent(new Event('input'))")
        page.wait("document.body.scrollWidth <= innerWidth")
        assert not page.failures


def main(argv: Sequence[str]) -> int:
    """Take pictures of each view: light, dark, and as a phone shows it."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.test_dashboard", description=main.__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=PICTURES)
    parser.add_argument("--all", action="store_true", help="not only those that README.md and docs/ show")
    arguments = parser.parse_args(argv)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    started: list[ServerProcess] = []

    def spawn(*flags: str, model: Path | None = None) -> ServerProcess:
        started.append(start_server(scratch / "server", model, *flags))
        return started[-1]

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        try:
            with browsing(scratch) as page:
                for view in views_of(page, spawn, scratch, 9):  # 45 s
                    for end, width, scheme in ("", 1280, "light"), ("-dark", 1280, "dark"), ("-phone", 390, "light"):
                        if arguments.all or view + end in PICTURED:
                            page.look_like(width, scheme)
                            page.call("Runtime.evaluate", expression=DRAWN, awaitPromise=True)
                            page.save(arguments.directory / f"{view}{end}.png")
        finally:
            for server in started:
                server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
