"""Where `steploop chat` gets its answers: a server that speaks /v1/chat/completions. Thread: the main one, blocking.

`serve_and_chat` makes such a server in this very process when none is up, so that there is one way to ask, not two.
"""

import contextlib
import dataclasses
import http.client
import json
import secrets
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from core.errors import ExitCode, StartupError
from server.commands.tls_trust import client_context, refused_certificate
from server.config import ServerConfig
from server.gate.identity import WAYS
from server.values import with_scheme

Message = dict[str, str]
StartInThread = Callable[[ServerConfig], tuple[str, Callable[[], None]]]  # -> (url, stop)

ANSWER_TIMEOUT_S = 600.0  # of silence; a server's own deadlines come first, and keep-alives every 15 s
PROBE_TIMEOUT_S = 2.0
READY_POLL_S = 0.25
_PRIVATE: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "binds": (),
    "tls_cert": None,
    "tls_key": None,
    "tls_client_ca": None,
    "tls_client_auth": None,
    "trusted_proxies": (),
    "allow": (),
    "deny": (),
    "tenants": (),
    "keys_file": None,
    "jwks": None,
    "auth": WAYS,
    "log_level": "error",
}


@dataclass(frozen=True, slots=True)
class ChatStats:
    """One answer in figures, as seen from here.

    Args:
        ttft_s: from sending the question to the first text; None: there was none.
        generation_s: from the first text to the last.
        num_completion_tokens: as the server counted, or the number of pieces when the answer was stopped.
        is_exact: the server has counted.
    """

    ttft_s: float | None
    generation_s: float
    num_prompt_tokens: int | None
    num_completion_tokens: int
    is_exact: bool

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding alone: the first token is not counted, nor the time until it came."""
        has_rate = self.num_completion_tokens > 1 and self.generation_s > 0
        return (self.num_completion_tokens - 1) / self.generation_s if has_rate else None


class ChatBackend(Protocol):
    """Answers conversations, one at a time."""

    stats: ChatStats | None  # of the last answer, also of one that was stopped

    @property
    def model(self) -> str: ...

    def stream(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[str, None, None]:
        """Give the answer's text in pieces. Closing the generator stops the answer at the server.

        Raises:
            StartupError: the server refused, or broke off.
        """
        ...


class HttpChatBackend:
    """A server at a URL. One connection per answer: leaving it is how an answer is stopped.

    Args:
        tls: for https; None: what the system trusts.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = with_scheme(url).rstrip("/").removesuffix("/v1")
        self.stats: ChatStats | None = None
        self._host, self._port, self._base_path, self._is_tls = _split_url(self.url)
        self._api_key = api_key
        self._tls = (tls or client_context()) if self._is_tls else None
        self._clock = clock
        self._sleep = sleep
        self._model: str | None = None

    @property
    def model(self) -> str:
        """The first model that the server lists."""
        if self._model is None:
            listing = self._get_json("/v1/models")
            try:
                self._model = str(listing["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise self._unreachable("answers, but lists no model") from error
        return self._model

    def is_up(self) -> bool:
        """Something listens there."""
        try:
            with self._exchange("GET", "/health", None, PROBE_TIMEOUT_S):
                return True
        except StartupError:
            return False

    def wait_ready(self, report: Callable[[str], None]) -> None:
        """Wait while the server loads its model, telling each new stage once. Servers without /ready are ready."""
        told = None
        while True:
            with self._exchange("GET", "/ready", None, PROBE_TIMEOUT_S) as response:
                status, body = response.status, response.read()
            if status != 503:
                return
            told_now = _error_message(body)
            if told_now != told:
                report(told_now)
                told = told_now
            self._sleep(READY_POLL_S)

    def stream(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[str, None, None]:
        question = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
        }
        self.stats = None
        meter = _Meter(self._clock)
        try:
            with self._exchange("POST", "/v1/chat/completions", question, ANSWER_TIMEOUT_S) as response:
                if response.status != 200:
                    raise self._refusal(response.status, response.read())
                for event in self._events(response):
                    text = meter.text_of(event)
                    if text:
                        yield text
        finally:
            self.stats = meter.stats()

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Chunks of the answer, up to [DONE].

        Raises:
            StartupError: an error event, or an end without [DONE].
        """
        try:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise self._refusal(200, data)
                yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(f"broke off the answer ({error})") from error
        raise self._unreachable("broke off the answer")

    def _get_json(self, path: str) -> Any:
        with self._exchange("GET", path, None, PROBE_TIMEOUT_S) as response:
            status, body = response.status, response.read()
        if status != 200:
            raise self._refusal(status, body)
        try:
            return json.loads(body)
        except ValueError as error:
            raise self._unreachable("answers, but not as a model server") from error

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: Any, timeout_s: float
    ) -> Generator[http.client.HTTPResponse, None, None]:
        """One request on a connection of its own, which is closed at the end, whatever that is."""
        headers = {"content-type": "application/json"} if body is not None else {}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        content = None if body is None else json.dumps(body).encode()
        with contextlib.closing(self._connection(timeout_s)) as connection:
            try:
                connection.request(method, self._base_path + path, content, headers)
                response = connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                raise refused_certificate(self.url, error) from error
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(f"does not answer ({error})") from error
            with response:  # holds the socket too, when the server will close
                yield response

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)

    def _unreachable(self, what: str) -> StartupError:
        fix = "start a server (steploop serve), name another with --url, or chat in this process with --model DIR"
        return StartupError(f"{self.url} {what}", fix, ExitCode.UNREACHABLE)

    def _refusal(self, status: int, body: bytes) -> StartupError:
        fixes = {
            401: "--api-key KEY, or STEPLOOP_API_KEY in the environment",
            404: "name a model server with --url",
            400: "change what was asked: /set shows the parameters, /clear forgets the conversation",
        }
        fix = fixes.get(status, "try again, or look into the server's log")
        return StartupError(f"{self.url}: {_error_message(body)}", fix, ExitCode.UNREACHABLE)


class _Meter:
    """Counts one answer while it passes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s = clock()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._num_pieces = 0
        self._usage: dict[str, int] | None = None

    def text_of(self, event: dict[str, Any]) -> str:
        self._usage = event.get("usage") or self._usage
        text = "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())
        if text:
            self._last_s = self._clock()
            self._first_s = self._last_s if self._first_s is None else self._first_s
            self._num_pieces += 1
        return text

    def stats(self) -> ChatStats:
        usage = self._usage or {}
        return ChatStats(
            ttft_s=None if self._first_s is None else self._first_s - self._start_s,
            generation_s=0.0 if self._first_s is None else self._last_s - self._first_s,
            num_prompt_tokens=usage.get("prompt_tokens"),
            num_completion_tokens=usage.get("completion_tokens", self._num_pieces),
            is_exact="completion_tokens" in usage,
        )


@contextlib.contextmanager
def serve_and_chat(
    config: ServerConfig, start_in_thread: StartInThread, report: Callable[[str], None]
) -> Iterator[HttpChatBackend]:
    """Serve within this process, for this chat alone: on a free loopback port, with a key that nobody else has."""
    key = secrets.token_urlsafe(24)
    private = dataclasses.replace(config, **_PRIVATE, api_keys=(key,))
    url, stop = start_in_thread(private)
    try:
        backend = HttpChatBackend(url, key)
        backend.wait_ready(report)
        yield backend
    finally:
        stop()


def _split_url(url: str) -> tuple[str, int | None, str, bool]:
    """Host, port, path before /v1, and whether it is TLS."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # brackets without an address, a port that is no number
        host, port = None, None
    if host is None or parts.scheme not in ("http", "https"):
        raise StartupError(f"{url!r} is not a server's URL", "--url http://127.0.0.1:8000", ExitCode.USAGE)
    return host, port, parts.path, parts.scheme == "https"


def _error_message(body: bytes) -> str:
    """The message of an OpenAI-style envelope, or the beginning of whatever else it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "no reason given"
