"""Where a model lies and what it is called; its config.json, understood. Reads small files only, no weights."""

import json
from pathlib import Path

from core.config import ModelConfig, parse_model_config
from core.errors import BadCheckpoint, ExitCode, StartupError
from server.config import ServerConfig
from server.values import what_lies_near

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "gpu" / "demo" / "model"
EMBEDDED_NAME = "steploop-demo"


def model_directory(config: ServerConfig) -> Path:
    """The directory to serve from: the one named, or the embedded model's."""
    return EMBEDDED_MODEL if config.model is None else config.model


def model_name(config: ServerConfig) -> str:
    """What clients ask for."""
    if config.served_model_name is not None:
        return config.served_model_name
    return EMBEDDED_NAME if config.model is None else config.model.resolve().name


def context_origin(config: ServerConfig) -> str:
    """Where max_model_len comes from, for those who wonder about its value."""
    return "the model's own" if config.max_model_len is None else "as --max-model-len says"


def read_model_config(directory: Path) -> ModelConfig:
    """
    Raises:
        StartupError: config.json is missing or unreadable, or what it describes is not computed here.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        cause = f"{path} does not exist{what_lies_near(path)}"
        raise StartupError(cause, "--model DIR with a Hugging Face model's files", ExitCode.MODEL) from error
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}", "download the model's directory again") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} holds no JSON object", "download the model's directory again")
    return parse_model_config(content)
