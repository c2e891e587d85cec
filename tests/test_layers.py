"""The rule of the house, held over the syntax trees: server → core ← gpu, and what each layer may import at all."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WIRING = {"server/__main__.py", "server/cli.py"}  # the only files that import both sides

FORBIDDEN = {
    "core": {
        "server",
        "gpu",
        "bench",
        "tests",
        "asyncio",
        "threading",
        "socket",
        "torch",
        "uvloop",
        "h11",
        "h2",
        "orjson",
    },
    "server": {"gpu", "bench", "tests", "torch", "triton", "transformers"},
    "gpu": {"server", "bench", "tests", "asyncio", "uvloop", "h11", "h2", "msgspec", "transformers"},
}
FORBIDDEN_CALLS_IN_CORE = {"open", "print", "input"}
CLOCKS_IN_CORE = {("time", "time"), ("time", "monotonic"), ("time", "perf_counter"), ("datetime", "now")}


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
        if name in WIRING or name.startswith("gpu/demo/"):
            continue
        for line, module in imported_modules(ast.parse(path.read_text())):
            if module.split(".")[0] in FORBIDDEN[layer]:
                crossings.append(f"{name}:{line} imports {module}")
    assert not crossings


def test_core_does_no_io_and_reads_no_clock() -> None:
    found = []
    for path in files_of("core"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS_IN_CORE:
                found.append(f"{path.name}:{node.lineno} calls {function.id}")
            if (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and (function.value.id, function.attr) in CLOCKS_IN_CORE
            ):
                found.append(f"{path.name}:{node.lineno} reads a clock")
    assert not found


def test_only_the_engine_thread_starts_a_thread() -> None:
    starters = [
        path.relative_to(ROOT).as_posix()
        for layer in ("core", "server", "gpu")
        for path in files_of(layer)
        if path.relative_to(ROOT).as_posix() not in WIRING
        and any(module == "threading" for _, module in imported_modules(ast.parse(path.read_text())))
    ]
    assert starters == ["server/engine_thread.py"]
