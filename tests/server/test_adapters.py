"""Whose adapters the settings name: of the model of this process, of one that it starts, or of one elsewhere."""

import re
from pathlib import Path

import pytest

from core.errors import StartupError
from server.config import ServerConfig
from server.config_sources import load_config
from server.values import NamedPath
from tests.server.given_settings import refusal, toml_flag
from tests.server.tiny_model import write_tiny_model

ADAPTER = '[[models]]\nname = "{name}"\nadapter_of = "{base}"\n{more}\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "lora").mkdir()
    return tmp_path


def adapter(home: Path, base: str, name: str = "sql", path: str = "lora", more: str = "") -> str:
    return ADAPTER.format(name=name, base=base, more=f'path = "{home / path}"\n{more}')


def config_of(home: Path, text: str) -> ServerConfig:
    return load_config(toml_flag(home, text), {})


def test_an_adapter_of_this_process(home: Path) -> None:
    model = f'model = "{home / "tiny"}"\nmax_loras = 3\nlora = ["law={home / "lora"}"]\n'
    for base in ("tiny", "gpt-4o"):
        config = config_of(home, f'{model}alias = ["gpt-4o"]\n' + adapter(home, base))
        assert config.loras == (NamedPath("law", home / "lora"), NamedPath("sql", home / "lora"))
        assert (config.models, config.has_engine, config.to_engine_config().max_loras) == ((), True, 3)
    assert config_of(home, adapter(home, "steploop-demo")).has_engine
    assert config_of(home, "").to_engine_config().max_loras == 0


def test_an_adapter_of_a_model_that_is_started_on_demand(home: Path) -> None:
    listed = f'[[models]]\nname = "big"\npath = "{home / "tiny"}"\nsettings = {{ max_loras = 2 }}\n'
    config = config_of(home, listed + adapter(home, "big"))
    (model,), (process,) = config.models, config.own_models
    assert model.names == ("big", "sql")
    assert [model.name_there(name) for name in ("big", "sql", "gpt", None)] == ["big", "sql", "big", "big"]
    assert (process.loras, process.to_engine_config().max_loras) == ((NamedPath("sql", home / "lora"),), 2)
    (found,) = config_of(home, f'models_dir = "{home}"\n' + adapter(home, "tiny")).own_models
    assert found.loras == (NamedPath("sql", home / "lora"),)


def test_an_adapter_that_upstreams_have(home: Path) -> None:
    listed = '[[models]]\nname = "big"\nupstream_model = "other"\nupstreams = [{ url = "http://x:1" }]\n'
    (model,) = config_of(home, listed + ADAPTER.format(name="sql", base="big", more="")).models
    assert [model.name_there(name) for name in ("big", "sql")] == ["other", "sql"]


def test_adapters_of_nothing_are_refused(home: Path) -> None:
    upstream = '[[models]]\nname = "big"\nupstreams = [{ url = "http://x:1" }]\n'
    local = f'[[models]]\nname = "big"\npath = "{home / "tiny"}"\n'
    cases = [
        (adapter(home, "nothing"), "has adapter_of 'nothing', which is none of: steploop-demo"),
        (upstream + adapter(home, "small"), "has adapter_of 'small', which is none of: big"),
        (upstream + adapter(home, "big"), "has a path, but upstreams serve its model"),
        (local + ADAPTER.format(name="sql", base="big", more=""), "'sql' in .* has no path"),
        (ADAPTER.format(name="sql", base="steploop-demo", more=""), "'sql' in .* has no path"),
        (local + adapter(home, "big", path="nowhere"), "nowhere"),
        (local + adapter(home, "big", name="big"), "two models of the name 'big'"),
        (
            local + adapter(home, "big") + adapter(home, "sql", name="chained"),
            "has adapter_of 'sql', which is none of",
        ),
        (adapter(home, "steploop-demo", more="keep_alive = 0"), "keep_alive is not for adapters"),
        (local + "adapters = {}\n", "adapters is not a field"),
        (local + f'settings = {{ lora = ["a={home}"] }}\n', "has the setting 'lora'"),
        (local + "settings = { max_loras = 1 }\n" + adapter(home, "big") + adapter(home, "big", "b"), "--max-loras 1"),
    ]
    for text, says in cases:
        refused = refusal(toml_flag(home, text), {})
        assert re.search(says, refused.cause), (says, refused.cause)
    refused = refusal(toml_flag(home, f'lora_dir = "{home}"\n' + upstream), {})
    assert "apply to the model in this process, and there is none" in refused.cause
    for settings, says in (
        ("tensor_parallel = 2", "LoRA adapters do not work with --tensor-parallel 2"),
        ("max_loras = 1", "names 2"),
    ):
        text = f'{settings}\nlora = ["a={home}", "b={home}"]\n'
        with pytest.raises(StartupError, match=says):
            config_of(home, text).to_engine_config()
