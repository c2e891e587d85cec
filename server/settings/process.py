"""The file with the settings, and the logs. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field
from pathlib import Path

from server.settings.option import Setting
from server.values import choice_of, existing_file, otlp_endpoint


@dataclass(frozen=True)
class ProcessSettings:
    """The file with the settings, and the logs."""

    config_file: Path | None = field(
        default=None,
        metadata=Setting(
            name="config",
            parse=existing_file,
            metavar="FILE",
            help="TOML file with settings",
            group="server",
            in_file=False,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=Setting(
            name="log-level",
            parse=choice_of("debug", "info", "warning", "error", loud="debug", verbose="debug", quiet="error"),
            metavar="LEVEL",
            help="debug, info, warning or error",
            group="server",
        ),
    )
    log_format: str = field(
        default="text",
        metadata=Setting(
            name="log-format", parse=choice_of("text", "json"), metavar="FORMAT", help="text or json", group="server"
        ),
    )
    otlp_endpoint: str | None = field(
        default=None,
        metadata=Setting(
            name="otlp-endpoint",
            parse=otlp_endpoint,
            metavar="URL",
            help="send a trace of each generation to this OpenTelemetry collector, by OTLP over HTTP: such as"
            " http://localhost:4318 (needs the extra otel)",
            group="server",
        ),
    )
