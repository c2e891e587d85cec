"""Settings as operators give them, for tests."""

from pathlib import Path

import pytest

from core.errors import StartupError
from server.cli import name_commands
from server.commands.command_line import add_flags, flags_given
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


SAMPLES = {
    "auth": "certificate+key",
    "insecure": "true",
    "jwks": "https://issuer.example/keys",
    "config": None,  # names the file itself
    "model": "{directory}",
    "served-model-name": "tiny",
    "chat-template": "{file}",
    "allow-special-in-content": "true",
    "device": "cpu",
    "dtype": "float32",
    "kv-memory": "2GiB",
    "kv-offload-dir-bytes": "2GiB",
    "host": "::1",
    "bind": "[::1]:0",
    "unix-mode": "600",
    "tls-cert": "{file}",
    "tls-key": "{file}",
    "tls-client-ca": "{file}",
    "tls-client-auth": "optional",
    "trusted-proxies": "unix",
    "forwarded-header": "forwarded",
    "h2c-upgrade": "true",
    "allow": "10.0.0.0/8",
    "deny": "2001:db8::/32",
    "api-key": "secret",
    "ledger-keep": "90d",
    "log-level": "debug",
    "log-format": "json",
    "otlp-endpoint": "http://collector:4318/v1/traces",
    "max-body": "1MiB",
    "head-timeout": "500ms",
    "body-timeout": "5s",
    "idle-timeout": "2min",
    "stall-timeout": "1.5s",
    "drain-timeout": "1h",
    "quantize": "int8",
    "cors-origin": "https://app.example.com",
    "no-prefix-cache": "true",
    "inter-token-target": "2.5",
    "overlap": "on",
    "tensor-parallel": "2",
    "graphs": "off",
    "handshake-timeout": "1s",
    "max-head": "8KiB",
    "max-heads": "1MiB",
    "max-unsent": "8KiB",
    "max-frame": "32KiB",
    "max-header-block": "20KiB",
    "max-control-output": "2MiB",
    "max-resets": "20+2.5/s",
    "max-pings": "20+0/s",
    "max-settings": "2+1/s",
    "max-top-logprobs": "5",
}
