"""What is served and what computes it, as the settings say: models that are there, engines that go together."""

from pathlib import Path

import pytest

from core.config import EngineConfig
from core.errors import ExitCode, StartupError
from server.config_sources import load_config
from server.values import HubId
from tests.server.given_settings import refusal, toml_flag, typed


@pytest.mark.parametrize(("value", "factor"), [("2", 2.0), ("1.25", 1.25), ("0", None)])
def test_inter_token_target_of_0_is_no_bound(value: str, factor: float | None, tmp_path: Path) -> None:
    config = load_config(toml_flag(tmp_path, f"inter_token_target = {value}"), {})
    assert config.to_engine_config().inter_token_target == factor


def test_a_missing_model_names_what_lies_near(tmp_path: Path) -> None:
    (tmp_path / "Llama-3.2-1B").mkdir()
    error = refusal({"model": str(tmp_path / "llama-3.2-1b")}, {})
    assert error.fix.startswith("--model MODEL, ")  # an empty directory cannot be served
    (tmp_path / "Llama-3.2-1B" / "config.json").touch()
    error = refusal({"model": str(tmp_path / "llama-3.2-1b")}, {})
    assert error.exit_code == ExitCode.MODEL
    assert str(tmp_path / "Llama-3.2-1B") in error.cause
    assert error.fix == f"--model {tmp_path / 'Llama-3.2-1B'}"


def test_a_missing_model_with_nothing_like_it_names_the_models_where_it_would_be(tmp_path: Path) -> None:
    (tmp_path / "unlike").mkdir()
    (tmp_path / "notes.gguf.txt").touch()
    missing = str(tmp_path / "nope")
    assert refusal({"model": missing}, {}).cause.endswith(f"; there is no model in {tmp_path}")
    models = [tmp_path / f"Llama-{i}" for i in range(7)]
    for model in models:
        model.mkdir()
        (model / "config.json").touch()
    listed = ", ".join(map(str, models[:5]))
    assert refusal({"model": missing}, {}).cause.endswith(f"; the models in {tmp_path}: {listed} and 2 more")


def test_a_path_missing_early_names_where_it_stops_being_true(tmp_path: Path) -> None:
    (tmp_path / "unlike").mkdir()
    cause = refusal({"model": str(tmp_path / "models" / "deep" / "er")}, {}).cause
    assert f"{tmp_path} exists, {tmp_path / 'models'} does not" in cause


def test_a_file_for_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    error = refusal({"model": str(tmp_path / "config.json")}, {})
    assert "this is a file" in error.cause
    assert error.fix == f"--model {tmp_path}"
    (tmp_path / "config.json").rename(tmp_path / "notes.txt")
    assert refusal({"model": str(tmp_path / "notes.txt")}, {}).fix.startswith("--model MODEL, ")


def test_engine_config_carries_what_the_operator_asked() -> None:
    flags: dict[str, str | list[str]] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": "1024",
        "kv_memory_bytes": "64MiB",
        "max_batch_tokens": "256",
        "max_sequences": "8",
        "threads": "2",
        "quantize": "int4",
        "quantize_cache_bytes": "1GiB",
        "kv_offload_bytes": "8GiB",
        "kv_offload_dir": "/var/cache/kv",
        "kv_offload_dir_bytes": "9GiB",
    }
    assert load_config({"tensor_parallel": "2"}, {}).to_engine_config().tensor_parallel == 2
    want = EngineConfig(
        *("cpu", "float32", 1024, 64 * 2**20, 256, 8, 2, "int4", 2**30),
        kv_offload_bytes=2**33,
        kv_offload_dir="/var/cache/kv",
        kv_offload_dir_bytes=9 * 2**30,
    )
    assert load_config(flags, {}).to_engine_config() == want


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ({"kv_offload_dir": "/var/cache/kv"}, "--kv-offload-memory 1GiB"),
        ({"kv_offload_bytes": "1GiB", "no_prefix_cache": "true"}, "leave one of them out"),
    ],
)
def test_offload_that_could_hold_nothing_is_refused(flags: dict[str, str | list[str]], fix: str) -> None:
    with pytest.raises(StartupError) as refused:
        load_config(flags, {}).to_engine_config()
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({"graphs": "on"}, "--graphs on and --tensor-parallel 2: ranks send steps without"),
        ({"lazy_graphs": "true"}, "--graphs lazy and --tensor-parallel 2: ranks send steps without"),
        ({"kv_offload_bytes": "1GiB"}, "--kv-offload-memory and --tensor-parallel 2: the ranks keep no"),
    ],
)
def test_what_several_ranks_do_not_have_is_refused(flags: dict[str, str | list[str]], cause: str) -> None:
    with pytest.raises(StartupError) as refused:
        load_config(flags | {"tensor_parallel": "2"}, {}).to_engine_config()
    assert refused.value.cause.startswith(cause)
    assert refused.value.exit_code == ExitCode.CONFIGURATION
    load_config(flags | {"tensor_parallel": "1"}, {}).to_engine_config()


@pytest.mark.parametrize(
    ("given", "wanted", "origins"),
    [
        ([], ("auto", "auto"), []),
        (["--no-overlap"], ("off", "auto"), ["--no-overlap"]),
        (["--lazy-graphs"], ("auto", "lazy"), ["--lazy-graphs"]),
        (["--overlap", "on", "--graphs", "lazy"], ("on", "lazy"), []),
        (
            ["--graphs", "auto", "--lazy-graphs", "--overlap", "off", "--no-overlap"],
            ("off", "lazy"),
            ["--no-", "--lazy-"],
        ),
    ],
)
def test_switches_of_the_last_release_stand_for_a_mode_with_a_warning(
    given: list[str], wanted: tuple[str, str], origins: list[str]
) -> None:
    config = load_config(typed("serve", *given), {})
    engine = config.to_engine_config()
    assert (engine.overlap, engine.graphs) == wanted
    assert len(config.warnings) == len(origins)
    assert all(told.startswith(origin) for told, origin in zip(config.warnings, origins, strict=True))


def test_a_switch_of_the_last_release_is_taken_from_environment_and_file(tmp_path: Path) -> None:
    config = load_config(toml_flag(tmp_path, "lazy_graphs = true"), {"STEPLOOP_NO_OVERLAP": "1"})
    assert (config.overlap, config.graphs) == ("off", "lazy")
    assert config.warnings[0] == (
        "STEPLOOP_NO_OVERLAP is an old name, which the next release will not take: use --overlap off"
    )


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({"overlap": "on", "no_overlap": "true"}, "--overlap on and --no-overlap contradict each other"),
        ({"graphs": "off", "lazy_graphs": "true"}, "--graphs off and --lazy-graphs contradict each other"),
    ],
)
def test_a_switch_against_its_mode_is_refused(flags: dict[str, str | list[str]], cause: str) -> None:
    assert refusal(flags, {}).cause == cause


def test_model_is_a_directory_a_gguf_file_or_a_hubs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").touch()
    (tmp_path / "tiny.gguf").touch()
    assert load_config({"model": "models/tiny"}, {}).model == Path("models/tiny")
    assert load_config({"model": "tiny.gguf"}, {}).model == Path("tiny.gguf")
    assert load_config({"model": "Qwen/Qwen3-0.6B"}, {}).model == HubId("Qwen/Qwen3-0.6B")
    assert load_config({"model": "Qwen/Qwen3-0.6B@refs/pr/1"}, {}).model == HubId("Qwen/Qwen3-0.6B", "refs/pr/1")
    for text in ("models/tinny", "tiny", "org/tiny.gguf", "./org/tiny", "org/..", "org/a@../b", "a/b/c", "org/a--b"):
        assert refusal({"model": text}, {}).exit_code == ExitCode.MODEL
    assert "models/tiny" in refusal({"model": "models/tinny"}, {}).cause
    assert "tiny.gguf" in refusal({"model": "tyni.gguf"}, {}).cause
