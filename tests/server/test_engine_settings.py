"""Settings of the model and the engine: models that exist, settings that go together."""

from pathlib import Path

import pytest

from core.config import EngineConfig
from core.errors import ExitCode, StartupError
from server.config_sources import load_config
from server.values import HubId
from tests.server.given_settings import refusal, toml_flag

Flags = dict[str, str | list[str]]


def make_model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").touch()
    return path


@pytest.mark.parametrize(("value", "factor"), [("2", 2.0), ("1.25", 1.25), ("0", None)])
def test_inter_token_target_of_0_is_no_bound(value: str, factor: float | None, tmp_path: Path) -> None:
    config = load_config(toml_flag(tmp_path, f"inter_token_target = {value}"), {})
    assert config.to_engine_config().inter_token_target == factor


def test_a_missing_model_names_what_lies_near(tmp_path: Path) -> None:
    (tmp_path / "Llama-3.2-1B").mkdir()
    missing: Flags = {"model": str(tmp_path / "llama-3.2-1b")}
    assert refusal(missing, {}).fix.startswith("--model MODEL, "), "an empty directory cannot be served"
    (tmp_path / "Llama-3.2-1B" / "config.json").touch()
    error = refusal(missing, {})
    assert error.exit_code == ExitCode.MODEL
    assert str(tmp_path / "Llama-3.2-1B") in error.cause
    assert error.fix == f"--model {tmp_path / 'Llama-3.2-1B'}"


def test_a_missing_model_with_nothing_like_it_names_the_models_where_it_would_be(tmp_path: Path) -> None:
    (tmp_path / "unlike").mkdir()
    (tmp_path / "notes.gguf.txt").touch()
    missing = str(tmp_path / "nope")
    assert refusal({"model": missing}, {}).cause.endswith(f"; there is no model in {tmp_path}")
    models = [make_model(tmp_path / f"Llama-{i}") for i in range(7)]
    listed = ", ".join(map(str, models[:5]))
    assert refusal({"model": missing}, {}).cause.endswith(f"; the models in {tmp_path}: {listed} and 2 more")
    cause = refusal({"model": str(tmp_path / "models" / "deep" / "er")}, {}).cause
    assert f"{tmp_path} exists, {tmp_path / 'models'} does not" in cause


def test_a_file_for_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    error = refusal({"model": str(tmp_path / "config.json")}, {})
    assert "this is a file" in error.cause
    assert error.fix == f"--model {tmp_path}"
    (tmp_path / "config.json").rename(tmp_path / "notes.txt")
    assert refusal({"model": str(tmp_path / "notes.txt")}, {}).fix.startswith("--model MODEL, ")


def test_model_is_a_directory_a_gguf_file_or_a_hubs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "models" / "tiny")
    (tmp_path / "tiny.gguf").touch()
    for text, model in {
        "models/tiny": Path("models/tiny"),
        "tiny.gguf": Path("tiny.gguf"),
        "Qwen/Qwen3-0.6B": HubId("Qwen/Qwen3-0.6B"),
        "Qwen/Qwen3-0.6B@refs/pr/1": HubId("Qwen/Qwen3-0.6B", "refs/pr/1"),
    }.items():
        assert load_config({"model": text}, {}).model == model
    for text in ("models/tinny", "tiny", "org/tiny.gguf", "./org/tiny", "org/..", "org/a@../b", "a/b/c", "org/a--b"):
        assert refusal({"model": text}, {}).exit_code == ExitCode.MODEL
    assert "models/tiny" in refusal({"model": "models/tinny"}, {}).cause
    assert "tiny.gguf" in refusal({"model": "tyni.gguf"}, {}).cause


def test_engine_config_carries_what_the_operator_asked() -> None:
    flags: Flags = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": "1024",
        "kv_memory_bytes": "64MiB",
        "max_batch_tokens": "256",
        "max_sequences": "8",
        "threads": "2",
        "quantize": "int4",
        "activations": "int8",
        "quantize_cache_bytes": "1GiB",
        "kv_dtype": "int8",
        "kv_offload_bytes": "8GiB",
        "kv_offload_dir": "/var/cache/kv",
        "kv_offload_dir_bytes": "9GiB",
    }
    want = EngineConfig(
        *("cpu", "float32", 1024, 64 * 2**20, 256, 8, 2, "int4", "int8", 2**30),
        kv_dtype="int8",
        kv_offload_bytes=2**33,
        kv_offload_dir="/var/cache/kv",
        kv_offload_dir_bytes=9 * 2**30,
    )
    assert load_config(flags, {}).to_engine_config() == want
    assert load_config({"tensor_parallel": "2"}, {}).to_engine_config().tensor_parallel == 2


@pytest.mark.parametrize(
    ("flags", "cause", "fix"),
    [
        ({"kv_offload_dir": "/kv"}, "--kv-offload-dir stores the contents", "--kv-offload-memory 1GiB"),
        ({"kv_offload_bytes": "1GiB", "no_prefix_cache": "true"}, "--kv-offload-memory keeps", "leave one of them out"),
        (
            {"graphs": "on", "tensor_parallel": "2"},
            "--graphs on does not work with --tensor-parallel 2",
            "--graphs out",
        ),
        (
            {"graphs": "lazy", "tensor_parallel": "2"},
            "--graphs lazy does not work with --tensor-parallel 2",
            "--graphs out",
        ),
        (
            {"kv_offload_bytes": "1GiB", "tensor_parallel": "2"},
            "--kv-offload-memory does not work with --tensor-parallel 2",
            "leave",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(flags: Flags, cause: str, fix: str) -> None:
    with pytest.raises(StartupError) as refused:
        load_config(flags, {}).to_engine_config()
    assert refused.value.cause.startswith(cause)
    assert fix in refused.value.fix
    assert refused.value.exit_code == ExitCode.CONFIGURATION
