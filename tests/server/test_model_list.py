"""Which models are found, and what is said of each."""

import errno
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from core.errors import ExitCode
from server.cli import main
from server.commands.hub import Hub
from server.commands.models import find_models, print_table
from server.engine_loader import ModelFacts
from tests.gguf_files import Q, write_gguf
from tests.server.tiny_model import CONTEXT, write_tiny_model


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with models in it at several depths, and beside it a cache with one more."""
    root = tmp_path / "models"
    (root / "org").mkdir(parents=True)
    write_tiny_model(root / "org" / "tiny")
    write_gguf(root / "org" / "tiny", root / "tiny.gguf", Q.Q8_0)
    (root / "notes").mkdir()
    (root / "notes" / "config.json").write_text("{}")
    cached = tmp_path / "cache" / "models--org--real"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    (cached / "snapshots").mkdir()
    write_tiny_model(cached / "snapshots" / ("a" * 40))
    (cached.with_name("models--org--half") / "refs").mkdir(parents=True)
    (cached.with_name("models--org--half") / "refs" / "main").write_text("b" * 40)
    write_tiny_model(tmp_path / "embedded")
    monkeypatch.setattr("server.engine_loader.DEMO_DIRECTORY", tmp_path / "embedded")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return root


NAMES = ("org/tiny", "tiny.gguf")


def found_in(*directories: Path) -> list[str]:
    return [name for name, _ in find_models(directories, Hub("http://hub", directories[0].parent / "cache"))]


def test_models_are_found_once_and_by_the_shortest_way(models: Path) -> None:
    local = [str(models / name) for name in NAMES]
    assert found_in(models, models / "org") == [*local, "org/real"]
    (models / "again").symlink_to(models)
    (models / "lost").symlink_to(models / "nowhere")
    assert found_in(models) == [*local, "org/real"]


def test_a_directory_that_may_not_be_looked_into_hides_the_others_not(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "private").mkdir()
    look = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert str(models / "org" / "tiny") in found_in(models)


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    assert main(["models", "--json", "--device", "cpu", *words]) == ExitCode.OK
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def test_json_says_what_each_is_and_needs(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--dir", str(models), "--dtype", "float32")
    assert list(found) == ["steploop-demo", str(models / "org" / "tiny"), str(models / "tiny.gguf"), "org/real"]
    plain, quantised = found[str(models / "org" / "tiny")], found[str(models / "tiny.gguf")]
    assert (plain["dtype"], quantised["dtype"]) == ("F32", "Q8_0")
    assert plain["context"] == quantised["context"] == CONTEXT
    assert plain["num_parameters"] == quantised["num_parameters"]
    assert plain["size_bytes"] == 4 * plain["num_parameters"]
    assert quantised["size_bytes"] < plain["size_bytes"] / 3
    assert plain["needed_bytes"] == quantised["needed_bytes"] > plain["size_bytes"]
    assert all(model["fits"] and model["reason"] is None for model in found.values())


def test_what_cannot_be_served_or_does_not_fit_says_why(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((models / "org" / "tiny" / "config.json").read_text())
    (models / "org" / "tiny" / "config.json").write_text(json.dumps(config | {"architectures": ["FalconForCausalLM"]}))
    monkeypatch.setattr("gpu.device.free_memory_bytes", lambda device: 2**20)
    found = listed(capsys, "--dir", str(models))
    falcon, quantised = found[str(models / "org" / "tiny")], found[str(models / "tiny.gguf")]
    assert "FalconForCausalLM" in str(falcon["reason"])
    assert falcon["needed_bytes"] is None
    assert quantised["reason"] == "1 MiB free"
    assert not falcon["fits"]
    assert not quantised["fits"]


def test_what_is_missing_or_stored_as_a_pickle_is_listed_with_the_reason(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (models / "org" / "tiny" / "tokenizer.json").unlink()
    for name, file in (("old", "pytorch_model.bin"), ("older", "consolidated.00.pth")):
        (models / name).mkdir()
        (models / name / "config.json").write_text((models / "org" / "tiny" / "config.json").read_text())
        (models / name / file).write_bytes(b"")
    found = listed(capsys, "--dir", str(models))
    reasons = {Path(name).name: str(found[name]["reason"]) for name in found if not found[name]["fits"]}
    assert reasons.keys() == {"old", "older", "tiny"}
    assert reasons["tiny"].endswith("tokenizer.json is missing")
    for name, file in (("old", "pytorch_model.bin"), ("older", "consolidated.00.pth")):
        assert f"it holds {file}, and pickled weights, which can run code, are not read" in reasons[name]


def test_table_has_a_row_a_model(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--dir", str(models), "--device", "cpu"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert re.search(rf"steploop-demo .* {CONTEXT} .* F32 .* yes", text)
    assert re.search(rf"org/real .* {CONTEXT} .* F32 .* yes", text)


def test_a_path_is_shown_once() -> None:
    stream = io.StringIO()
    print_table([ModelFacts("a.gguf", Path("a.gguf")), ModelFacts("org/b", Path("cache/b"))], stream)
    assert stream.getvalue().count("a.gguf") == 1
    assert "cache/b" in stream.getvalue()
    stream = io.StringIO()
    print_table([ModelFacts("a.gguf", Path("a.gguf"), reason="a.gguf: it is too large")], stream)
    assert stream.getvalue().splitlines()[-1] == "a.gguf: it is too large"


def test_a_directory_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--dir", str(tmp_path / "none")]) == ExitCode.USAGE
    assert "it must be a directory that exists" in capsys.readouterr().err
    (tmp_path / "models").mkdir()
    assert main(["models", "--dir", str(tmp_path / "modles")]) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith(f"fix: --dir {tmp_path / 'models'}\n")


def test_the_needs_are_what_serve_asks_for(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """One byte less than what is listed, and the plan refuses."""
    needed = listed(capsys, "--dir", str(models))[str(models / "tiny.gguf")]["needed_bytes"]
    for free_bytes, code in ((needed, ExitCode.OK), (int(str(needed)) - 1, ExitCode.MEMORY)):
        monkeypatch.setattr("gpu.memory_plan.free_memory_bytes", lambda device, free=free_bytes: free)
        words = ["serve", "--estimate", "--device", "cpu", "--model", str(models / "org" / "tiny")]
        assert main(words) == code
        capsys.readouterr()
