"""What is served. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field
from pathlib import Path

from server.settings.option import Setting
from server.values import HubId, count_between, existing_file, model_source, text_value


@dataclass(frozen=True)
class ModelSettings:
    """What is served."""

    model: Path | HubId | None = field(
        default=None,
        metadata=Setting(
            name="model",
            parse=model_source,
            metavar="MODEL",
            help="Hugging Face directory (config.json, *.safetensors, tokenizer.json), GGUF file, or"
            " org/name[@revision] to fetch from a hub; without it the embedded demonstration model is served",
            group="model",
        ),
    )
    served_model_name: str | None = field(
        default=None,
        metadata=Setting(
            name="served-model-name",
            parse=text_value,
            metavar="NAME",
            help="the name clients ask for (default: the directory's, file's or hub's name)",
            group="model",
        ),
    )
    chat_template: Path | None = field(
        default=None,
        metadata=Setting(
            name="chat-template",
            parse=existing_file,
            metavar="FILE",
            help="Jinja template, instead of the model's own",
            group="model",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=Setting(
            name="max-model-len",
            parse=count_between(16, 10_000_000),
            metavar="TOKENS",
            help="context of a sequence, prompt and answer together (default: the model's own)",
            group="model",
        ),
    )
