"""`steploop chat`: a conversation in the terminal, or one question for a pipe. Thread: main, blocking.

Answers come over HTTP from a server's /v1/chat/completions. If no server is up, chat starts one in this process.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
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

Message = dict[str, str]
ReadLine = Callable[[], str]  # raises EOFError at the end, KeyboardInterrupt for Ctrl-C
StartInThread = Callable[[ServerConfig], tuple[str, Callable[[], None]]]  # -> (url, stop)

FROM_STDIN = "-"  # -q -: the question comes from stdin
ANSWER_TIMEOUT_S = 600.0  # of silence: the server's deadlines are shorter, and it sends keep-alives every 15 s
PROBE_TIMEOUT_S = 2.0
READY_POLL_S = 0.25
# Sections of settings that a private server ignores
_FOR_OTHER_CLIENTS = ("server", "listening", "access", "ledger", "files and batches")
SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "system": (str, "instructions for the model before the conversation"),
    "temperature": (float, "0 always takes the likeliest token; 1 samples from the model's distribution"),
    "top_k": (int, "sample among the k likeliest tokens; 0: all"),
    "top_p": (float, "sample among the likeliest tokens that have this probability together"),
    "min_p": (float, "leave out tokens below this fraction of the likeliest one's probability"),
    "max_tokens": (int, "longest answer"),
    "seed": (int, "the same seed gives the same answer"),
    "repetition_penalty": (float, "above 1: repeat less"),
    "presence_penalty": (float, "above 0: new words"),
    "frequency_penalty": (float, "above 0: fewer of the same words"),
    "stop": (str, "end the answer before this text"),
}
COMMANDS = {
    "/set": "show the settings",
    "/set KEY VALUE": "change one; /set KEY alone resets it",
    "/stats": "figures of the last answer",
    "/clear": "forget the conversation",
    "/bye": "leave (so does Ctrl-D)",
}
HELP = "\n".join(
    [f"{command:<18}{text}" for command, text in COMMANDS.items()]
    + ["Ctrl-C stops an answer. Settings:"]
    + [f"  {name:<20}{text}" for name, (_, text) in SETTINGS.items()]
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
FIXES = {  # of a refusal, by its status
    400: "change the question: /set shows the parameters, /clear forgets the conversation",
    401: "--api-key KEY, or STEPLOOP_API_KEY in the environment",
    404: "name a model server with --url",
}


def run(arguments: argparse.Namespace, config: ServerConfig) -> ExitCode:
    """Talk to the server that is named or up, else to one in this process.

    Raises:
        StartupError: arguments contradict one another, or the server cannot be reached or started.
    """
    check_url(arguments)
    question = _read_question(arguments.question)
    url = None if arguments.model is not None else arguments.url or configured_url(config)
    if url is not None:
        try:
            client = ready_client(url, arguments, config)
        except StartupError:
            if arguments.url is not None:
                raise
        else:
            return _converse(client, question)
    with private_server(config, start_in_thread) as client:
        return _converse(client, question)


def _read_question(text: str | None) -> str | None:
    """The question that -q names; None: talk."""
    if text is None:
        return None
    question = sys.stdin.read() if text == FROM_STDIN else text
    if not question.strip():  # as from a script's variable that was not filled in
        where = "stdin" if text == FROM_STDIN else "-q"
        fix = 'ask something, as in steploop chat -q "What is a KV cache?", or leave -q out to talk'
        raise StartupError(f"the question from {where} is empty", fix, ExitCode.USAGE)
    return question


def _converse(client: "ChatClient", question: str | None) -> ExitCode:
    has_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    conversation = Conversation(client, sys.stdout, sys.stderr, has_colour)
    take_interrupts()
    if question is not None:
        conversation.ask(question)
    else:
        conversation.run(_terminal_reader(), f"{client.model} at {client.url}; /help lists the commands")
    return ExitCode.OK


def _terminal_reader() -> ReadLine:
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


class Conversation:
    """The messages and settings so far.

    Args:
        out: gets the answers, and nothing else.
        err: gets everything else.
        has_colour: err is a terminal that shows colour.
    """

    def __init__(self, client: "ChatClient", out: TextIO, err: TextIO, has_colour: bool = False) -> None:
        self._client = client
        self._out = out
        self._err = err
        self._has_colour = has_colour
        self._messages: list[Message] = []
        self._settings: dict[str, Any] = {}

    def run(self, read_line: ReadLine, greeting: str = "") -> None:
        """Greet, then talk until /bye or the end of the input. A refused question is reported and forgotten."""
        while True:
            try:
                if greeting:  # within the try: Ctrl-C during the greeting is handled as it is at the prompt
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
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self.ask(line)
            except KeyboardInterrupt:
                self._tell("stopped")
                self._tell_stats()
            except StartupError as error:
                self._tell(f"error: {error.cause}\nfix: {error.fix}")

    def ask(self, question: str) -> None:
        """Ask one question and write the answer as it comes, then a line of figures to err.

        Raises:
            StartupError: the server refused or broke off.
            KeyboardInterrupt: stopped; the conversation keeps the part of the answer that has come.
        """
        params = dict(self._settings)
        system = params.pop("system", None)
        before: list[Message] = [{"role": "system", "content": sendable(system)}] if system else []
        asked = {"role": "user", "content": sendable(question)}
        is_terminal = self._out.isatty()
        pieces: list[str] = []
        try:
            # closed at once, not when garbage is collected: the server computes until we leave
            with contextlib.closing(self._client.stream([*before, *self._messages, asked], params)) as answer:
                for text in answer:
                    pieces.append(text)
                    self._out.write(harmless(text) if is_terminal else text)
                    self._out.flush()
        finally:
            if pieces:
                self._messages += [asked, {"role": "assistant", "content": "".join(pieces)}]
                self._out.write("" if pieces[-1].endswith("\n") else "\n")
                self._out.flush()
        self._tell_stats()

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
            case "/set", []:
                shown = [f"{name} = {value!r}" for name, value in self._settings.items()]
                self._tell("\n".join(shown) or "all settings are the server's own; /help lists them")
            case "/set", [key, *_] if key not in SETTINGS:
                self._tell(f"unknown setting: {key}{did_you_mean(key, SETTINGS)}")
            case "/set", [key]:
                self._settings.pop(key, None)
                self._tell(f"{key} is the server's own again")
            case "/set", [key, value]:
                try:
                    self._settings[key] = SETTINGS[key][0](value)
                except ValueError:
                    self._tell(f"{key} must be a number: {SETTINGS[key][1]}")
            case _:
                self._tell(f"unknown command: {name}{did_you_mean(name, ['/help', *COMMANDS])}")

    def _tell_stats(self) -> None:
        self._tell(str(self._client.stats or "no answer yet"))

    def _tell(self, text: str) -> None:
        self._err.write(f"{DIM}{text}{PLAIN}\n" if self._has_colour else f"{text}\n")
        self._err.flush()


def sendable(text: str) -> str:
    """Text without lone surrogates: input that is not UTF-8 has them, JSON may not."""
    return text.encode("utf-8", "replace").decode()


def harmless(text: str) -> str:
    """Text with control characters escaped, so that a model cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


@dataclass(slots=True)
class AnswerStats:
    """One answer in figures, as measured here.

    Args:
        start_s: when the question was sent.
        times_s: when each piece of text came.
        usage: as the server counted; empty if it has not, as when the answer was stopped.
    """

    start_s: float
    times_s: list[float] = field(default_factory=list)
    usage: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """`34 tokens after a prompt of 12: the first in 45 ms, then 67.8 tokens/s`"""
        if not self.times_s:
            return "no answer yet"
        num = self.usage.get("completion_tokens", len(self.times_s))
        about = "" if "completion_tokens" in self.usage else "about "
        prompt = f" after a prompt of {self.usage['prompt_tokens']}" if "prompt_tokens" in self.usage else ""
        first_s, last_s = self.times_s[0], self.times_s[-1]
        rate = f", then {(num - 1) / (last_s - first_s):.1f} tokens/s" if num > 1 and last_s > first_s else ""
        return f"{about}{num} tokens{prompt}: the first in {(first_s - self.start_s) * 1000:.0f} ms{rate}"


class ChatClient:
    """A server at a URL. Each answer has its own connection: closing it stops the answer.

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
        """Raises StartupError: it is not a server's URL."""
        self.url = with_scheme(url).rstrip("/").removesuffix("/v1")
        try:
            parts = httpx2.URL(self.url)
        except httpx2.InvalidURL:  # brackets without an address, a port that is no number
            parts = httpx2.URL()
        if not parts.host or parts.scheme not in ("http", "https"):
            raise StartupError(f"{self.url!r} is not a server's URL", "--url http://127.0.0.1:8000", ExitCode.USAGE)
        self.stats: AnswerStats | None = None
        self.headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._tls = (tls or client_context()) if parts.scheme == "https" else False
        self._clock = clock
        self._sleep = sleep
        self._model: str | None = None

    @property
    def model(self) -> str:
        """The first model that the server lists."""
        if self._model is None:
            try:
                self._model = str(self.document("GET", "/v1/models", None, PROBE_TIMEOUT_S)["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise self._unreachable("answers, but lists no model") from error
        return self._model

    def wait_ready(self, report: Callable[[str], None]) -> None:
        """Wait while the server loads its model; report each new stage once. A server without /ready is ready.

        Raises:
            StartupError: no server answers.
        """
        reported = None
        while True:
            with self.exchange("GET", "/ready", None, PROBE_TIMEOUT_S) as response:
                body = response.read()
            if response.status_code != 503:
                return
            if (stage := _error_message(body)) != reported:
                report(stage)
                reported = stage
            self._sleep(READY_POLL_S)

    def stream(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[str, None, None]:
        """Give the answer's text in pieces. Closing the generator stops the answer at the server.

        Raises:
            StartupError: the server refused, sent an error event, or broke off before [DONE].
        """
        question = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
        }
        self.stats = stats = AnswerStats(self._clock())
        with self.exchange("POST", "/v1/chat/completions", question, ANSWER_TIMEOUT_S) as response:
            if response.status_code != 200:
                raise self.refusal(response.status_code, response.read())
            for event in self._events(response):
                stats.usage = event.get("usage") or stats.usage
                choices = event.get("choices") or ()
                if text := "".join((choice.get("delta") or {}).get("content") or "" for choice in choices):
                    stats.times_s.append(self._clock())
                    yield text

    def _events(self, response: httpx2.Response) -> Iterator[dict[str, Any]]:
        try:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise self.refusal(200, data.encode())
                    yield event
        except (httpx2.TransportError, ValueError) as error:
            raise self._unreachable(f"broke off the answer ({error})") from error
        raise self._unreachable("broke off the answer")

    def document(self, *request: Any, **content: Any) -> Any:
        """The JSON of a whole answer, to a request as `exchange` takes it. Raises StartupError: it is refused."""
        with self.exchange(*request, **content) as response:
            body = response.read()
        if response.status_code != 200:
            raise self.refusal(response.status_code, body)
        return json.loads(body)

    def save(self, path: str, file: Path) -> None:
        """Write a whole answer's body to a file. Raises StartupError: it is refused or breaks off; there is no file."""
        new = file.with_name(file.name + ".new")
        with self.exchange("GET", path) as response:
            if response.status_code != 200:
                raise self.refusal(response.status_code, response.read())
            try:
                with new.open("wb") as opened:
                    for piece in response.iter_bytes():
                        opened.write(piece)
            except httpx2.TransportError as error:
                new.unlink()
                raise self._unreachable(f"broke off the answer ({error})") from error
        os.replace(new, file)

    @contextlib.contextmanager
    def exchange(
        self, method: str, path: str, json: Any = None, timeout_s: float = ANSWER_TIMEOUT_S, **form: Any
    ) -> Generator[httpx2.Response, None, None]:
        """One request on its own connection, which is closed at the end.

        Args:
            form: instead of JSON: data and files, as httpx2 takes them.
        """
        with contextlib.ExitStack() as stack:
            try:
                response = stack.enter_context(
                    httpx2.stream(
                        method,
                        self.url + path,
                        json=json,
                        **form,
                        headers=self.headers,
                        verify=self._tls,
                        timeout=timeout_s,
                        trust_env=False,
                    )
                )
            except httpx2.TransportError as error:
                if (refused := _certificate_error(error)) is not None:
                    raise refused_certificate(self.url, refused) from error
                raise self._unreachable(f"does not answer ({error})") from error
            yield response

    def _unreachable(self, what: str) -> StartupError:
        fix = "start a server (steploop serve), or name one with --url"
        return StartupError(f"{self.url} {what}", fix, ExitCode.UNREACHABLE)

    def refusal(self, status: int, body: bytes) -> StartupError:
        fix = FIXES.get(status, "try again, or look into the server's log")
        return StartupError(f"{self.url}: {_error_message(body)}", fix, ExitCode.UNREACHABLE)


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The certificate error among an error's causes."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _error_message(body: bytes) -> str:
    """The message of an OpenAI-style error body, or the beginning of any other body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "no reason given"


def check_url(arguments: argparse.Namespace) -> None:
    """Raises StartupError: --url beside --model, or without the https that other flags are about."""
    if arguments.url is not None and arguments.model is not None:
        raise StartupError("--url and --model are two different models", "give one of them", ExitCode.USAGE)
    check_trust_flags(arguments)


def client_of(url: str, arguments: argparse.Namespace, config: ServerConfig) -> ChatClient:
    is_asked = arguments.ca_file is not None or arguments.takes_any
    tls = client_context(arguments.ca_file, not arguments.takes_any) if is_asked else None
    return ChatClient(url, config.api_keys[0] if config.api_keys else None, tls=tls)


def ready_client(url: str, arguments: argparse.Namespace, config: ServerConfig) -> ChatClient:
    """Raises StartupError: no server answers."""
    client = client_of(url, arguments, config)
    client.wait_ready(lambda stage: print(stage, file=sys.stderr, flush=True))
    return client


@contextlib.contextmanager
def asked_server(
    arguments: argparse.Namespace, config: ServerConfig, models: set[str], key: str | None = None, **own: Any
) -> Iterator[ChatClient]:
    """The server of --url; without it one in this process, whose model has all these names.

    Args:
        key, own: see private_server.
    """
    if arguments.url is not None:
        yield ready_client(arguments.url, arguments, config)
        return
    from server.engine_loader import served_name

    others = models - {served_name(config), *(lora.name for lora in config.loras)}
    config = replace(config, aliases=tuple(sorted({*config.aliases, *others})))
    with private_server(config, start_in_thread, key, **own) as client:
        yield client


@contextlib.contextmanager
def private_server(
    config: ServerConfig, start: StartInThread, key: str | None = None, **own: Any
) -> Iterator[ChatClient]:
    """Serve in this process for this command alone: on a free loopback port, with a new key.

    Args:
        own: settings that are not the configuration's.
    """
    key = key or secrets.token_urlsafe(24)
    shared = [option.field_name for option in OPTIONS if option.section not in _FOR_OTHER_CLIENTS]
    settings = {name: getattr(config, name) for name in shared}
    url, stop = start(ServerConfig(**settings, port=0, api_keys=(key,), log_level="error", **own))
    try:
        yield ChatClient(url, key)
    finally:
        stop()


def start_in_thread(config: ServerConfig) -> tuple[str, Callable[[], None]]:
    """Serve in a thread of this process. Returns when the model is loaded.

    Returns: the server's URL, and a function that stops it and waits for its end.

    Raises:
        StartupError: what is wrong, and what to do.
    """
    import uvloop

    started: Future[tuple[asyncio.AbstractEventLoop, Server]] = Future()
    # daemon: Ctrl-C while the model loads must not wait for it
    thread = threading.Thread(target=lambda: uvloop.run(_serve(config, started)), name="loop", daemon=True)
    thread.start()
    loop, server = started.result()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the engine failed and ended the server
            loop.call_soon_threadsafe(server.stop, 0.0)
        thread.join()

    return base_url(config.host, server.listener.port), stop


async def _serve(config: ServerConfig, started: "Future[tuple[asyncio.AbstractEventLoop, Server]]") -> None:
    from server.engine_loader import engine_loader
    from server.process import Server

    try:
        server = Server(config, engine_loader(config), lambda lines: None)
        await server.start()
        try:
            await server.wait_ready()
        except Exception:
            await server.wait_stopped()  # it stops itself; wait until its socket is closed
            raise
    except Exception as error:
        started.set_exception(error)
        return
    started.set_result((asyncio.get_running_loop(), server))
    await server.wait_stopped()
