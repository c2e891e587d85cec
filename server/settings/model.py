"""What is served. Thread: main, at start; frozen after that."""

from dataclasses import dataclass
from pathlib import Path

from server.settings.option import Group
from server.values import HubId, existing_file, model_source, text_value

_MODEL = Group("model")


@dataclass(frozen=True)
class ModelSettings:
    """What is served."""

    model: Path | HubId | None = _MODEL.setting(
        "model",
        None,
        model_source,
        "MODEL",
        "Hugging Face directory (config.json, *.safetensors, tokenizer.json), GGUF file, or"
        " org/name[@revision] to fetch from a hub; without it the embedded demonstration model is served",
    )
    served_model_name: str | None = _MODEL.setting(
        "served-model-name",
        None,
        text_value,
        "NAME",
        "the name clients ask for (default: the directory's, file's or hub's name)",
    )
    chat_template: Path | None = _MODEL.setting(
        "chat-template", None, existing_file, "FILE", "Jinja template, instead of the model's own"
    )
    allow_special_in_content: bool = _MODEL.switch(
        "allow-special-in-content",
        "what messages spell as a control token (<|im_start|>) is one: whoever may write a message can write any turn",
    )
    max_model_len: int | None = _MODEL.count(
        "max-model-len",
        None,
        (16, 10_000_000),
        "context of a sequence, prompt and answer together (default: the model's own)",
        "TOKENS",
    )
