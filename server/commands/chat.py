"""`steploop chat`: a conversation in the terminal, or one question for a pipe.

The answers come from a server that speaks /v1/chat/completions; where none is up, one is made in this very process, so
that there is one way to ask, not two. Thread: main, blocking.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import ssl
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import httpx2

from core.errors import ExitCode, StartupError
from server.banner import base_url, configured_url
from server.commands.console import take_interrupts
from server.commands.tls_trust import check_trust_flags, client_context, refused_certificate
from server.config import OPTIONS, ServerConfig
from server.values import did_you_mean, with_scheme

if TYPE_CHECKING:
    from server.process import Server

    Started = Future[tuple[asyncio.AbstractEventLoop, Server]]

Message = dict[str, str]
StartInThread = Callable[[ServerConfig], tuple[str, Callable[[], None]]]  # -> (url, stop)

FROM_STDIN = "-"  # -q -: the question comes from stdin
ANSWER_TIMEOUT_S = 600.0  # of silence; a server's own deadlines come first, and keep-alives every 15 s
PROBE_TIMEOUT_S = 2.0
READY_POLL_S = 0.25
# Of the settings, those of no concern to a server within this process, which nobody else reaches
_OF_OTHERS = ("server", "listening", "access", "ledger")
SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "system": (str, "what the model is told before the conversation"),
    "temperature": (float, "0 always takes the likeliest token; 1 samples as the model says"),
    "top_k": (int, "sample among the k likeliest tokens; 0: all"),
    "top_p": (float, "sample among the likeliest tokens that make up this share"),
    "min_p": (float, "leave out tokens below this share of the likeliest one's"),
    "max_tokens": (int, "longest answer"),
    "seed": (int, "the same seed gives the same answer"),
    "repetition_penalty": (float, "above 1: repeat less"),
    "presence_penalty": (float, "above 0: new words"),
    "frequency_penalty": (float, "above 0: fewer of the same words"),
    "stop": (str, "end the answer before this text"),
}
HELP = """\
/set              show the settings
/set KEY VALUE    change one; /set KEY alone takes it back
/stats            figures of the last answer
/clear            forget the conversation
/bye              leave (so does Ctrl-D)
Ctrl-C stops an answer. Settings:
""" + "\n".join(f"  {name:<20}{help}" for name, (_, help) in SETTINGS.items())
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
ReadLine = Callable[[], str]  # raises EOFError at the end, KeyboardInterrupt for Ctrl-C


def run(arguments: argparse.Namespace, config: ServerConfig) -> ExitCode:
    """With the server that is named or up, else with a model in this process.

    Raises:
        StartupError: arguments contradict one another, or there is nobody to talk to.
    """
    if arguments.url is not None and arguments.model is not None:
        raise StartupError("--url and --model are two different models", "give one of them", ExitCode.USAGE)
    question = read_question(arguments.question)
    if arguments.model is None:
        url = arguments.url or configured_url(config)
        check_trust_flags(arguments)
        is_asked = arguments.ca_file is not None or arguments.takes_any
        tls = client_context(arguments.ca_file, not arguments.takes_any) if is_asked else None
        key = config.api_keys[0] if config.api_keys else None
        backend = None if url is None else HttpChatBackend(url, key, tls=tls)
        if backend is not None and (arguments.url is not None or backend.is_up()):
            backend.wait_ready(_report)
            return _converse(backend, question)
    with serve_and_chat(config, start_in_thread, _report) as backend:
        return _converse(backend, question)


def read_question(text: str | None) -> str | None:
    """The one question to ask, from where the flag says; None: talk.

    Raises:
        StartupError: there is none, as from a variable of a script that was not filled in.
    """
    if text is None:
        return None
    question = sys.stdin.read() if text == FROM_STDIN else text
    if not question.strip():
        where = "stdin" if text == FROM_STDIN else "-q"
        fix = 'ask something, as in steploop chat -q "What is a KV cache?", or leave -q out to talk'
        raise StartupError(f"the question from {where} is empty", fix, ExitCode.USAGE)
    return question


def _converse(backend: "HttpChatBackend", question: str | None) -> ExitCode:
    has_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    conversation = Conversation(backend, sys.stdout, sys.stderr, has_colour)
    take_interrupts()
    if question is not None:
        conversation.ask(question)
    else:
        conversation.run(terminal_reader(), f"{backend.model} at {backend.url}; /help lists the commands")
    return ExitCode.OK


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Conversation:
    """What has been said and set so far.

    Args:
        out: the answers, and nothing else.
        err: everything said about them.
        has_colour: err is a terminal that wants colour.
    """

    def __init__(self, backend: "HttpChatBackend", out: TextIO, err: TextIO, has_colour: bool = False) -> None:
        self._backend = backend
        self._out = out
        self._err = err
        self._has_colour = has_colour
        self._is_terminal = out.isatty()
        self._messages: list[Message] = []
        self._settings: dict[str, Any] = {}

    def run(self, read_line: ReadLine, greeting: str = "") -> None:
        """Greet, then talk until /bye or the end of the input. A refused question is told, and forgotten."""
        while True:
            try:
                if greeting:  # within the try: from its first letter on, Ctrl-C is answered as it is at the prompt
                    self._tell(greeting)
                    greeting = ""
                line = read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._tell("\n/bye leaves")
                continue
            if line == "/bye":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def ask(self, question: str) -> None:
        """Put one question and write the answer as it comes, then a line of figures to err.

        Raises:
            StartupError: the server refused or broke off.
            KeyboardInterrupt: stopped; what had been said is kept in the conversation.
        """
        self._messages.append({"role": "user", "content": sendable(question)})
        pieces: list[str] = []
        try:
            self._write_answer(pieces)
        finally:
            if pieces:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self._messages.pop()
        self._tell_stats()

    def _turn(self, question: str) -> None:
        try:
            self.ask(question)
        except KeyboardInterrupt:
            self._tell("stopped")
            self._tell_stats()
        except StartupError as error:
            self._tell(f"error: {error.cause}\nfix: {error.fix}")

    def _write_answer(self, pieces: list[str]) -> None:
        system = self._settings.get("system")
        before: list[Message] = [{"role": "system", "content": sendable(system)}] if system else []
        params = {name: value for name, value in self._settings.items() if name != "system"}
        try:
            # closed at once, not when collected: until we leave, the server computes
            with contextlib.closing(self._backend.stream(before + self._messages, params)) as answer:
                for text in answer:
                    pieces.append(text)
                    self._out.write(harmless(text) if self._is_terminal else text)
                    self._out.flush()
        finally:
            if pieces and not pieces[-1].endswith("\n"):
                self._out.write("\n")
                self._out.flush()

    def _command(self, line: str) -> None:
        name, *words = line.split(maxsplit=2)
        match name, words:
            case "/help", []:
                self._tell(HELP)
            case "/stats", []:
                self._tell_stats()
            case "/clear", []:
                self._messages.clear()
                self._tell("forgotten")
            case "/set", _:
                self._set(words)
            case _:
                self._tell(
                    f"unknown command: {name}{did_you_mean(name, ['/help', '/set', '/stats', '/clear', '/bye'])}"
                )

    def _set(self, words: list[str]) -> None:
        if not words:
            shown = [f"{name} = {value!r}" for name, value in self._settings.items()]
            self._tell("\n".join(shown) or "all settings are the server's own; /help lists them")
            return
        key = words[0]
        if key not in SETTINGS:
            self._tell(f"unknown setting: {key}{did_you_mean(key, SETTINGS)}")
        elif len(words) == 1:
            self._settings.pop(key, None)
            self._tell(f"{key} is the server's own again")
        else:
            try:
                self._settings[key] = SETTINGS[key][0](words[1])
            except ValueError:
                self._tell(f"{key} must be a number: {SETTINGS[key][1]}")

    def _tell_stats(self) -> None:
        self._tell(str(self._backend.stats or "no answer yet"))

    def _tell(self, text: str) -> None:
        self._err.write(f"{DIM}{text}{PLAIN}\n" if self._has_colour else f"{text}\n")
        self._err.flush()


def sendable(text: str) -> str:
    """Text without lone surrogates, which typed bytes that are not UTF-8 become, and which JSON may not bear."""
    return text.encode("utf-8", "replace").decode()


def harmless(text: str) -> str:
    """A model's text for a terminal: control characters, which could drive it, are shown instead of obeyed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def terminal_reader() -> ReadLine:
    """Lines with a prompt and editing on a terminal; plain lines from a pipe."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing and history; not on every platform)
        return lambda: input(">>> ")

    def read() -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    return read


@dataclass(slots=True)
class ChatStats:
    """One answer in figures, as seen from here.

    Args:
        start_s: when the question was sent; first_s and last_s: when the first and the last text came.
        num_pieces: of text.
        usage: as the server counted; empty where it has not, as when the answer was stopped.
    """

    start_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_pieces: int = 0
    usage: Mapping[str, int] = field(default_factory=dict)

    def text_of(self, event: dict[str, Any], clock: Callable[[], float]) -> str:
        """A chunk's text, which is counted."""
        self.usage = event.get("usage") or self.usage
        text = "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())
        if text:
            self.last_s = clock()
            self.first_s = self.last_s if self.first_s is None else self.first_s
            self.num_pieces += 1
        return text

    def __str__(self) -> str:
        """`34 tokens after a prompt of 12: the first in 45 ms, then 67.8 tokens/s`"""
        if self.first_s is None:
            return "no answer yet"
        num = self.usage.get("completion_tokens", self.num_pieces)
        about = "" if "completion_tokens" in self.usage else "about "
        prompt = f" after a prompt of {self.usage['prompt_tokens']}" if "prompt_tokens" in self.usage else ""
        generation_s = self.last_s - self.first_s
        rate = f", then {(num - 1) / generation_s:.1f} tokens/s" if num > 1 and generation_s > 0 else ""  # of decoding
        return f"{about}{num} tokens{prompt}: the first in {(self.first_s - self.start_s) * 1000:.0f} ms{rate}"


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
        self._api_key = api_key
        self._tls = (tls or client_context()) if _scheme_of(self.url) == "https" else False
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
                status, body = response.status_code, response.read()
            if status != 503:
                return
            told_now = _error_message(body)
            if told_now != told:
                report(told_now)
                told = told_now
            self._sleep(READY_POLL_S)

    def stream(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[str, None, None]:
        """Give the answer's text in pieces. Closing the generator stops the answer at the server.

        Raises:
            StartupError: the server refused, or broke off.
        """
        question = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
        }
        self.stats = stats = ChatStats(self._clock())
        with self._exchange("POST", "/v1/chat/completions", question, ANSWER_TIMEOUT_S) as response:
            if response.status_code != 200:
                raise self._refusal(response.status_code, response.read())
            for event in self._events(response):
                if text := stats.text_of(event, self._clock):
                    yield text

    def _events(self, response: httpx2.Response) -> Iterator[dict[str, Any]]:
        """Chunks of the answer, up to [DONE].

        Raises:
            StartupError: an error event, or an end without [DONE].
        """
        try:
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise self._refusal(200, data.encode())
                yield event
        except (httpx2.TransportError, ValueError) as error:
            raise self._unreachable(f"broke off the answer ({error})") from error
        raise self._unreachable("broke off the answer")

    def _get_json(self, path: str) -> Any:
        with self._exchange("GET", path, None, PROBE_TIMEOUT_S) as response:
            status, body = response.status_code, response.read()
        if status != 200:
            raise self._refusal(status, body)
        try:
            return json.loads(body)
        except ValueError as error:
            raise self._unreachable("answers, but not as a model server") from error

    @contextlib.contextmanager
    def _exchange(self, method: str, path: str, body: Any, timeout_s: float) -> Generator[httpx2.Response, None, None]:
        """One request on a connection of its own, which is closed at the end, whatever that is."""
        headers = {} if self._api_key is None else {"authorization": f"Bearer {self._api_key}"}
        with (
            httpx2.Client(verify=self._tls, timeout=timeout_s, trust_env=False) as client,
            contextlib.ExitStack() as stack,
        ):
            try:
                exchange = client.stream(method, self.url + path, json=body, headers=headers)
                response = stack.enter_context(exchange)
            except httpx2.TransportError as error:
                if (refused := _certificate_error(error)) is not None:
                    raise refused_certificate(self.url, refused) from error
                raise self._unreachable(f"does not answer ({error})") from error
            yield response

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


@contextlib.contextmanager
def serve_and_chat(
    config: ServerConfig, start_in_thread: StartInThread, report: Callable[[str], None]
) -> Iterator[HttpChatBackend]:
    """Serve within this process, for this chat alone: on a free loopback port, with a key that nobody else has."""
    key = secrets.token_urlsafe(24)
    shared = [option.field_name for option in OPTIONS if option.section not in _OF_OTHERS]
    private = ServerConfig(
        **{name: getattr(config, name) for name in shared}, port=0, api_keys=(key,), log_level="error"
    )
    url, stop = start_in_thread(private)
    try:
        backend = HttpChatBackend(url, key)
        backend.wait_ready(report)
        yield backend
    finally:
        stop()


def start_in_thread(config: ServerConfig) -> tuple[str, Callable[[], None]]:
    """Serve in a thread of this process. Returns when the model is loaded.

    Returns: the server's URL, and what stops it and waits for its end.

    Raises:
        StartupError: what is wrong, and what to do.
    """
    import uvloop

    started: Started = Future()
    # daemon: Ctrl-C while it loads must not have to wait for it
    thread = threading.Thread(
        target=lambda: uvloop.run(_serve_until_stopped(config, started)), name="loop", daemon=True
    )
    thread.start()
    loop, server = started.result()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a broken engine has ended the server already
            loop.call_soon_threadsafe(server.stop, 0.0)
        thread.join()

    return base_url(config.host, server.listener.port), stop


async def _serve_until_stopped(config: ServerConfig, started: "Started") -> None:
    """Tells `started` of the server, or of why there is none."""
    from server.engine_loader import engine_loader
    from server.process import Server

    try:
        server = Server(config, engine_loader(config), lambda lines: None)
        await server.start()
        try:
            await server.wait_ready()
        except Exception:
            await server.wait_stopped()  # it has stopped itself: leave no socket behind
            raise
    except Exception as error:
        started.set_exception(error)
        return
    started.set_result((asyncio.get_running_loop(), server))
    await server.wait_stopped()


def _scheme_of(url: str) -> str:
    """
    Raises:
        StartupError: it is not a server's.
    """
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:  # brackets without an address, a port that is no number
        parts = httpx2.URL()
    if not parts.host or parts.scheme not in ("http", "https"):
        raise StartupError(f"{url!r} is not a server's URL", "--url http://127.0.0.1:8000", ExitCode.USAGE)
    return parts.scheme


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The one that an error comes from, if one does."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _error_message(body: bytes) -> str:
    """The message of an OpenAI-style envelope, or the beginning of whatever else it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "no reason given"
