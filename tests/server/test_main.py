"""The process from its first line to its last: what --version loads, what Ctrl-C does, how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from server.__main__ import INTERRUPTED

ROOT = Path(__file__).parent.parent.parent
HEAVY = {"torch", "rich", "uvloop", "numpy", "asyncio", "jinja2", "tokenizers", "safetensors", "http.client", "email"}
SETTINGS = {"core.config", "server.config", "msgspec"}  # of no use to who asks for help or the version

# Ctrl-C is pressed where the module that the last word names begins to be imported
INTERRUPTING = """\
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from server.__main__ import run_process
run_process()
"""


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("words", ["--version", "--help", "serve --help", "chat --help", "doctor -h"])
def test_version_and_help_load_nothing_heavy(words: str) -> None:
    heavy = HEAVY | (SETTINGS if words.startswith("-") else set())
    done = python(
        f"import atexit, sys\natexit.register(lambda: print('LOADED', sorted({heavy!r} & set(sys.modules))))\n"
        "import runpy\nrunpy.run_module('server', run_name='__main__', alter_sys=True)",
        *words.split(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize(
    "module", ["server.cli", "core.config", "server.commands.versions", "asyncio", "uvloop", "server.app"]
)
def test_ctrl_c_during_imports_ends_the_process_without_a_word(module: str) -> None:
    done = python(INTERRUPTING, "serve", "--served-model-name", module)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


def test_ctrl_c_after_the_command_changes_nothing_any_more() -> None:
    code = (
        "import os, signal, sys, server.__main__, server.cli\n"
        "server.cli.main = lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and 3\n"
        "end = server.__main__.end_process\n"
        "server.__main__.end_process = lambda code: (os.kill(os.getpid(), signal.SIGINT), end(code))\n"
        "server.__main__.run_process()"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("has_thread", [False, True])
def test_process_ends_with_its_output_and_code_whatever_threads_do(has_thread: bool) -> None:
    start = "threading.Thread(target=threading.Event().wait, daemon=True).start()" if has_thread else "pass"
    done = python(
        "import atexit, threading\nfrom server.__main__ import end_process\n"
        f"{start}\natexit.register(print, 'the interpreter ended')\nprint('told')\nend_process(7)"
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == ["told"] + ["the interpreter ended"] * (not has_thread)
