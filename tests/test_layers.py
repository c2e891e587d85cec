"""The rule of the house, held over the syntax trees: server → core ← gpu, and what each layer may import at all."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
WIRING = {"server/__main__.py", "server/cli.py", "server/engine_loader.py"}  # the only files that import both sides

FORBIDDEN = {
    "server": {"gpu", "bench", "tests", "torch", "triton", "transformers"},
    "gpu": {"server", "bench", "tests", "asyncio", "uvloop", "h11", "h2", "msgspec", "transformers"},
}

# core decides and does no I/O: it may import what does none, and of some modules only the names given.
CORE_MODULES = {"core", "jinja2", "llguidance", "msgspec", "numpy", "tokenizers"} | {
    *(
        "__future__",
        "abc",
        "array",
        "bisect",
        "collections",
        "contextlib",
        "contextvars",
        "copy",
        "dataclasses",
        "decimal",
    ),
    *("enum", "fractions", "functools", "hashlib", "heapq", "hmac", "itertools", "json", "math", "operator", "re"),
    *("string", "struct", "types", "typing", "unicodedata", "weakref", "zlib"),
}
CORE_PARTS = {"codecs": {"getincrementaldecoder"}, "logging": {"getLogger"}, "sys": {"maxsize"}}
# With `from`, and not renamed
CORE_IMPORTED_NAMES = {**CORE_PARTS, "datetime": {"datetime"}, "urllib.parse": {"quote", "unquote"}}
CORE_FORBIDDEN_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
# of the libraries above: files, the network, randomness and clocks
CORE_FORBIDDEN_ATTRIBUTES = {
    *("load", "save", "savez", "loadtxt", "savetxt", "genfromtxt", "fromfile", "tofile", "memmap", "random"),
    *("from_file", "from_pretrained", "FileSystemLoader", "PackageLoader", "ModuleLoader", "FileSystemBytecodeCache"),
    *("read_text", "write_text", "read_bytes", "write_bytes", "today", "utcnow"),
}


def files_of(layer: str) -> list[Path]:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files, f"no files under {layer}/"
    return files


def imported_modules(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}: name the layer"
            found.append((node.lineno, node.module or ""))
    return found


@pytest.mark.parametrize("layer", sorted(FORBIDDEN))
def test_layer_imports_only_what_it_may(layer: str) -> None:
    crossings = []
    for path in files_of(layer):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("gpu/demo/"):
            continue
        forbidden = FORBIDDEN[layer] - ({"gpu", "bench"} if name in WIRING else set())  # torch after gpu's settings
        for line, module in imported_modules(ast.parse(path.read_text())):
            if module.split(".")[0] in forbidden:
                crossings.append(f"{name}:{line} imports {module}")
    assert not crossings


@pytest.mark.parametrize(("folder", "others"), [("wire", {"values", "clock"}), ("listening", {"wire", "values"})])
def test_what_lies_next_to_the_sockets_knows_nothing_of_what_is_asked(folder: str, others: set[str]) -> None:
    found = {
        (path.name, module)
        for path in files_of(f"server/{folder}")
        for _, module in imported_modules(ast.parse(path.read_text()))
        if module.startswith("server.") and module.split(".")[1] not in others | {folder}
    }
    assert not found


def core_faults(source: str) -> list[str]:
    """What core may not do, by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            faults = [alias.name for alias in node.names if not may_import(alias)]
        elif isinstance(node, ast.ImportFrom):
            faults = [alias.name for alias in node.names if not may_import_from(node.module or "", alias)]
        elif isinstance(node, ast.Name):
            faults = [node.id] if node.id in CORE_FORBIDDEN_BUILTINS else []
        elif isinstance(node, ast.Attribute):
            faults = [node.attr] if not may_use(node) else []
        else:
            continue
        found += [f"{node.lineno}: {fault}" for fault in faults]
    return found


def may_import(alias: ast.alias) -> bool:
    return alias.name.split(".")[0] in CORE_MODULES or (alias.name in CORE_PARTS and alias.asname is None)


def may_import_from(module: str, alias: ast.alias) -> bool:
    if module in CORE_IMPORTED_NAMES:
        return alias.name in CORE_IMPORTED_NAMES[module] and alias.asname is None
    names = {*module.split("."), alias.name}
    return module.split(".")[0] in CORE_MODULES and not names & CORE_FORBIDDEN_ATTRIBUTES


def may_use(attribute: ast.Attribute) -> bool:
    owner = attribute.value.id if isinstance(attribute.value, ast.Name) else ""
    if owner in CORE_PARTS:
        return attribute.attr in CORE_PARTS[owner]
    is_clock = owner == "datetime" and attribute.attr == "now"
    return not is_clock and attribute.attr not in CORE_FORBIDDEN_ATTRIBUTES


def test_core_imports_nothing_that_does_io_and_reads_no_clock() -> None:
    found = {path.name: faults for path in files_of("core") if (faults := core_faults(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "from time import monotonic",
        "import time as t",
        "import random",
        "import os",
        "import os.path",
        "from pathlib import Path",
        "import subprocess",
        "import threading",
        "import asyncio",
        "import torch",
        "import orjson",
        "from gpu.device import choose_device",
        "def later():\n    import server.cli",
        "import sys\nsys.stdout.write('x')",
        "from sys import stdout",
        "import sys as system",
        "import logging\nlogging.basicConfig()",
        "import datetime",
        "from datetime import datetime\ndatetime.now()",
        "from datetime import datetime as d",
        "open('x')",
        "import builtins",
        "import numpy as np\nnp.random.rand()",
        "from numpy.random import rand\nfrom numpy import random",
        "import numpy as np\nnp.fromfile('x')",
        "from tokenizers import Tokenizer\nTokenizer.from_file('x')",
        "from jinja2 import FileSystemLoader",
    ],
)
def test_what_core_may_not_do_is_found(source: str) -> None:
    assert core_faults(source)


def test_only_the_engine_three_writers_of_files_a_publisher_and_who_reads_ahead_start_threads() -> None:
    """Of what serves; `steploop chat` serves beside its own loop, and guards a terminal's line.

    The process that tries grammars out has one thread, for its stack. What decodes bodies has a lock alone.
    """
    others = {
        "server/api/decoding.py",
        "server/commands/chat.py",
        "server/commands/console.py",
        "server/grammar_guard.py",
    }
    starters = [
        path.relative_to(ROOT).as_posix()
        for layer in ("core", "server", "gpu")
        for path in files_of(layer)
        if path.relative_to(ROOT).as_posix() not in WIRING | others
        and any(module == "threading" for _, module in imported_modules(ast.parse(path.read_text())))
    ]
    assert starters == [
        "server/engine_thread.py",
        "server/ledger/journal.py",
        "server/observing/kv_events.py",
        "server/observing/logs.py",
        "gpu/host_memory.py",
        "gpu/kv_store.py",
    ]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_what_is_imported_is_declared() -> None:
    """That another dependency brings it along today is no promise."""
    declared = project()["project"]["dependencies"]
    for extra in ("gpu", "kv-events", "otel"):  # looked for before they are imported
        declared += project()["project"]["optional-dependencies"][extra]
    names = {distribution_name(requirement) for requirement in declared}
    ours = sys.stdlib_module_names | {"bench", "core", "gpu", "server"}
    found = {
        module.split(".")[0] for layer in ("core", "server", "gpu") for module in modules_imported_in(layer)
    } - ours
    distributions = {"zmq": ["pyzmq"]} | packages_distributions()  # which knows what is installed
    undeclared = {name for name in found if not names & {*map(distribution_name, distributions.get(name, [name]))}}
    assert not undeclared
    assert len(found) > 15


def test_the_wheel_has_what_it_imports_and_nothing_that_stays_in_the_checkout() -> None:
    """Of bench, what `steploop bench` needs; of the embedded model, its files and not its training."""
    packages, modules = project()["tool"]["setuptools"]["packages"], project()["tool"]["setuptools"]["py-modules"]
    folders = {path.parent for layer in ("core", "server", "gpu") for path in files_of(layer)} - {ROOT / "gpu" / "demo"}
    assert sorted(packages) == sorted(str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders)
    imported = {module for package in packages for module in modules_imported_in(package.replace(".", "/"), "*.py")}
    assert not {module for module in imported if module.startswith("gpu.demo")}
    needed: set[str] = set()
    while new := {module for module in imported if module.startswith("bench.")} - needed:
        needed |= new
        imported = {module for name in new for module in modules_imported_in("bench", f"{name.split('.')[1]}.py")}
    assert sorted(modules) == sorted(needed)


def modules_imported_in(folder: str, pattern: str = "**/*.py") -> set[str]:
    return {
        module for path in (ROOT / folder).glob(pattern) for _, module in imported_modules(ast.parse(path.read_text()))
    }


def distribution_name(requirement: str) -> str:
    """Source: PEP 503's normal form."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def test_no_group_of_several_ways_is_repeated_possessively() -> None:
    """Python before 3.11.5, Debian 12's too, matches those wrongly (gh-106052): a field of a head was passed over."""
    repeated = re.compile(r"(?<!\()\)(?:[*+?]|\{+[^}]*\}+)\+")  # but not `()*+` in a set of characters
    found = {
        path.relative_to(ROOT).as_posix()
        for layer in ("core", "server", "gpu")
        for path in files_of(layer)
        if repeated.search(path.read_text())
    }
    assert not found


PRODUCTS = {"dot", "matmul", "inner", "vdot", "einsum", "tensordot", "linalg"}


@pytest.mark.parametrize("path", [*files_of("gpu/cpu_kernels"), *files_of("gpu/kernels")], ids=str)
def test_a_kernel_leaves_no_product_to_numpy(path: Path) -> None:
    """Whose BLAS adds in an order that depends on the CPU: what a kernel promises of last bits holds on any."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.MatMult)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy"):
            assert node.attr not in PRODUCTS
