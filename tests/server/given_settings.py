"""Settings as operators give them, for tests."""

from pathlib import Path

import pytest

from core.errors import StartupError
from server.cli import name_commands
from server.commands.command_line import add_flags, flags_given
from server.config import Option
from server.config_sources import load_config


def toml_flag(tmp_path: Path, text: str) -> dict[str, str | list[str]]:
    path = tmp_path / "steploop.toml"
    path.write_text(text)
    return {"config_file": str(path)}


def typed(*words: str) -> dict[str, str | list[str]]:
    """The settings that a command line gives."""
    parser, by_command = name_commands()
    add_flags(by_command)
    return flags_given(parser.parse_args(words))


def refusal(flags: dict[str, str | list[str]], environ: dict[str, str]) -> StartupError:
    with pytest.raises(StartupError) as caught:
        load_config(flags, environ)
    return caught.value


SAMPLES = {  # by name, else by metavar, else 123; {file} and {directory} exist
    "BOOL": "true",
    "pooling": "mean",
    "activations": "int8",
    "alias": "gpt-4o-mini",
    "FILE": "{file}",
    "MODEL": "{directory}",
    "NAME=PATH": "sql={directory}",
    "lora-dir": "{directory}",
    "models-dir": "{directory}",
    "models-memory": "2GiB",
    "NETWORK": "10.0.0.0/8",
    "RATE": "20+2.5/s",
    "SIZE": "123KiB",
    "kv-memory": "2GiB",
    "kv-offload-dir-bytes": "2GiB",
    "ledger-keep": "90d",
    "inter-token-target": "2.5",
    "tensor-parallel": "2",
    "max-top-logprobs": "5",
    "device": "cpu",
    "dtype": "float32",
    "quantize": "int8",
    "kv-dtype": "int8",
    "forced-tokens": "off",
    "speculation": "off",
    "tool-format": "xml",
    "overlap": "on",
    "graphs": "off",
    "log-level": "debug",
    "log-format": "json",
    "otlp-endpoint": "http://collector:4318/v1/traces",
    "bind": "[::1]:0",
    "agent-check": "127.0.0.1:1",
    "kv-events": "127.0.0.1:1",
    "kv-events-replay": "127.0.0.1:2",
    "tls-client-auth": "optional",
    "trusted-proxies": "unix",
    "forwarded-header": "forwarded",
    "unix-mode": "600",
    "auth": "certificate+key",
    "jwks": "https://issuer.example/keys",
    "cors-origin": "https://app.example.com",
}


def sample_of(option: Option) -> str:
    return SAMPLES.get(option.name) or SAMPLES.get(option.metavar, "123")
