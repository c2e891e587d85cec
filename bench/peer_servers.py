"""The servers that bench.peers compares: how each is started over one model directory, and what it takes.

A server that is not installed is None, with the reason: it is said and left out, never guessed at.
"""

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.gguf_file import CannotConvert, write_gguf
from gpu.device import num_physical_cores

STEPLOOP, TRANSFORMERS, LLAMA = "steploop", "transformers serve", "llama-server"
SERVERS = (STEPLOOP, TRANSFORMERS, LLAMA)
LLAMA_SLOTS = 32  # as many streams as the widest load has
LLAMA_CONTEXT = 32_768  # over all slots


@dataclass(frozen=True, slots=True)
class PeerServer:
    """One server, ready to start.

    Args:
        command: without host and port.
        model: the name that its requests bear.
        ignores_eos: it takes ignore_eos; one that does not gets models that never end by themselves (make_model).
    """

    name: str
    command: Sequence[str]
    model: str
    ready_path: str
    ignores_eos: bool
    environment: Mapping[str, str] = field(default_factory=dict)

    def command_at(self, port: int) -> list[str]:
        return [*self.command, "--host", "127.0.0.1", "--port", str(port)]


@dataclass(frozen=True, slots=True)
class Missing:
    """A server that cannot be measured here."""

    name: str
    reason: str


def find_server(
    name: str, directory: Path, threads: int | None, max_model_len: int, scratch: Path
) -> PeerServer | Missing:
    """How to start the server called `name` (of SERVERS) over this model.

    Args:
        threads: compute threads; None: each server's own choice, and all physical cores for llama.cpp.
        scratch: where the model is written anew for a server that needs another format.

    Raises:
        BadCheckpoint, OSError: the model's files.
    """
    if name == STEPLOOP:
        return _steploop(directory, threads, max_model_len)
    if name == TRANSFORMERS:
        return _transformers(directory, threads)
    return _llama(directory, threads or num_physical_cores(), scratch)


def _steploop(directory: Path, threads: int | None, max_model_len: int) -> PeerServer:
    command = [sys.executable, "-m", "server", "serve", "--model", str(directory), "--log-level", "warning"]
    command += ["--max-model-len", str(max_model_len)]
    if threads is not None:
        command += ["--threads", str(threads)]
    return PeerServer(STEPLOOP, command, directory.resolve().name, "/v1/models", True)


def _transformers(directory: Path, threads: int | None) -> PeerServer | Missing:
    needed = ("transformers", "accelerate", "fastapi", "uvicorn", "openai")
    absent = [package for package in needed if importlib.util.find_spec(package) is None]
    if absent:
        return Missing(TRANSFORMERS, f"not installed: {', '.join(absent)}; make peers installs them")
    script = Path(sys.executable).with_name("transformers")
    command = [str(script), "serve", str(directory), "--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"]
    threads_set = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment = {"HF_HUB_OFFLINE": "1", **threads_set}
    return PeerServer(TRANSFORMERS, command, str(directory), "/health", False, environment)


def _llama(directory: Path, threads: int, scratch: Path) -> PeerServer | Missing:
    found = shutil.which("llama-server") or shutil.which("llama-server", path=str(Path(sys.executable).parent))
    if found is None:
        return Missing(LLAMA, "llama-server is not on PATH; make peers builds it")
    file = scratch / "model.gguf"
    try:
        write_gguf(directory, file)
    except CannotConvert as error:
        return Missing(LLAMA, str(error))
    command = [found, "--model", str(file), "--alias", directory.name]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(LLAMA_SLOTS), "--ctx-size", str(LLAMA_CONTEXT), "--kv-unified"]
    return PeerServer(LLAMA, command, directory.name, "/health", True)
