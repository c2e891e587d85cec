"""`steploop chat`: a conversation in the terminal, or one question for a pipe. Knows no HTTP; asks a ChatBackend.

Thread: main, blocking.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TextIO

from core.errors import StartupError
from server.commands.chat_client import ChatBackend, ChatStats, Message
from server.values import did_you_mean

SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "system": (str, "what the model is told before the conversation"),
    "temperature": (float, "0 always takes the likeliest token; 1 draws as the model says"),
    "top_k": (int, "draw among the k likeliest tokens; 0: all"),
    "top_p": (float, "draw among the likeliest tokens that make up this share"),
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


class Conversation:
    """What has been said and set so far.

    Args:
        out: the answers, and nothing else.
        err: everything said about them.
        has_colour: err is a terminal that wants colour.
    """

    def __init__(self, backend: ChatBackend, out: TextIO, err: TextIO, has_colour: bool = False) -> None:
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
        self._tell(stats_line(self._backend.stats))

    def _tell(self, text: str) -> None:
        self._err.write(f"{DIM}{text}{PLAIN}\n" if self._has_colour else f"{text}\n")
        self._err.flush()


def stats_line(stats: ChatStats | None) -> str:
    """`34 tokens after a prompt of 12: the first in 45 ms, then 67.8 tokens/s`"""
    if stats is None or stats.ttft_s is None:
        return "no answer yet"
    about = "" if stats.is_exact else "about "
    prompt = "" if stats.num_prompt_tokens is None else f" after a prompt of {stats.num_prompt_tokens}"
    rate = "" if stats.tokens_per_s is None else f", then {stats.tokens_per_s:.1f} tokens/s"
    return f"{about}{stats.num_completion_tokens} tokens{prompt}: the first in {stats.ttft_s * 1000:.0f} ms{rate}"


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
