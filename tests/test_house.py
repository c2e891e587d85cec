"""The house keeps its order: the rooms of the server import in one direction, no files import in a circle.

And how much there is to read: `BUDGETS` is the one place that says it. Lower a budget with what is deleted; raise it
only with the reason in the commit.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "core", "gpu")

# Lines and modules of a folder's own files, without its subfolders; of tests: with them.
BUDGETS = {
    "server": (14_565, 36),
    "server/api": (6260, 19),
    "server/batches": (945, 3),
    "server/commands": (2315, 13),
    "server/gate": (2920, 9),
    "server/ledger": (2035, 7),
    "server/listening": (1235, 5),
    "server/observing": (2635, 10),
    "server/upstream": (1675, 6),
    "server/wire": (4835, 15),
    "core": (18_925, 47),
    "gpu": (12_920, 37),
    "gpu/cpu_kernels": (5780, 15),
    "gpu/kernels": (3560, 8),
    "gpu/parallel": (765, 5),
    "bench": (10_760, 40),
}
TEST_LINES = 74_720

# server's rooms, lowest first: a file imports from its own room and those before it. A name is a folder or a module.
ROOMS = (
    ("values", "clock"),
    ("wire",),
    ("listening",),
    ("gate",),
    ("api",),
    ("ledger", "observing"),
    ("upstream",),
    ("batches",),
    ("config", "callers"),
    (
        "prompts",
        "output",
        "engine_client",
        "engine_thread",
        "grammar_guard",
        "own_processes",
        "resumable",
        "generation",
        "relay",
        "relayed",
        "adapters",
        "local_models",
    ),
    ("app", "batch_routes", "dashboard", "openapi", "tenant_routes", "switches", "routes"),
    ("banner", "gguf_tokenizer", "model_files", "supervision", "loaded_engine", "process"),
    ("memory_limits", "config_sources", "commands", "engine_loader", "cli", "fork_server", "__main__"),
)


def modules_of(package: str) -> dict[str, Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    return {_name(path): path for path in files if "demo" not in path.relative_to(ROOT).parts}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules of the same package that each imports, wherever in the file it does."""
    return {name: set(_imports(name, path, modules)) for name, path in modules.items()}


def _imports(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [one if one in modules else node.module or "" for one in found]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        yield from (one for one in found if one in modules and one != name)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach one another: Tarjan's strongly connected components, of two or more."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(imports.get(node, ())):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in imports:
        if node not in order:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_one_another_in_a_circle(package: str) -> None:
    assert circles(imports_of(modules_of(package))) == []


def room_of(module: str) -> str:
    """server.gate.quota is of the room gate, server.app of app."""
    return module.split(".")[1] if "." in module else ""


def test_the_rooms_of_the_server_import_in_one_direction() -> None:
    ranks = {name: rank for rank, names in enumerate(ROOMS) for name in names}
    modules = modules_of("server")
    unknown = sorted({room_of(name) for name in modules} - ranks.keys() - {""})
    assert not unknown, f"ROOMS does not place {unknown}"
    found = [
        f"{name} imports {other}"
        for name, others in imports_of(modules).items()
        for other in sorted(others)
        if room_of(name) and room_of(other) and ranks[room_of(other)] > ranks[room_of(name)]
    ]
    assert not found


@pytest.mark.parametrize("folder", sorted(BUDGETS))
def test_a_folder_stays_within_its_budget(folder: str) -> None:
    files = list((ROOT / folder).glob("*.py"))
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    num_files = sum(1 for path in files if path.stat().st_size)
    most_lines, most_files = BUDGETS[folder]
    assert num_lines <= most_lines, f"{folder} has {num_lines} lines of {most_lines}: delete, or raise it with a reason"
    assert num_files <= most_files, f"{folder} has {num_files} modules of {most_files}: fold, or raise it with a reason"


def test_the_tests_stay_within_theirs() -> None:
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    assert num_lines <= TEST_LINES


def test_every_folder_has_a_budget() -> None:
    files = [path for one in (*PACKAGES, "bench") for path in (ROOT / one).rglob("*.py")]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in files}
    assert {one for one in folders if not one.startswith("gpu/demo")} == BUDGETS.keys()


@pytest.mark.parametrize("page", ["README.md", "docs/lifecycle.md"])
def test_the_files_that_a_page_names_are_there(page: str) -> None:
    names = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text(encoding="utf-8"))
    files = {f"/{path.relative_to(ROOT)}" for one in (*PACKAGES, "tests") for path in (ROOT / one).rglob("*.py")}
    assert names
    assert not [name for name in names if not any(path.endswith(f"/{name}") for path in files)]
