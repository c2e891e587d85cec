"""The file with the settings, and the logs. Thread: main, at start; frozen after that."""

from dataclasses import dataclass
from pathlib import Path

from server.settings.option import Group
from server.values import choice_of, existing_file, otlp_endpoint

_SERVER = Group("server")


@dataclass(frozen=True)
class ProcessSettings:
    """The file with the settings, and the logs."""

    config_file: Path | None = _SERVER.setting(
        "config", None, existing_file, "FILE", "TOML file with settings", in_file=False
    )
    log_level: str = _SERVER.setting(
        "log-level",
        "info",
        choice_of("debug", "info", "warning", "error", loud="debug", verbose="debug", quiet="error"),
        "LEVEL",
        "debug, info, warning or error",
    )
    log_format: str = _SERVER.setting("log-format", "text", choice_of("text", "json"), "FORMAT", "text or json")
    otlp_endpoint: str | None = _SERVER.setting(
        "otlp-endpoint",
        None,
        otlp_endpoint,
        "URL",
        "send a trace of each generation to this OpenTelemetry collector, by OTLP over HTTP: such as"
        " http://localhost:4318 (needs the extra otel)",
    )
