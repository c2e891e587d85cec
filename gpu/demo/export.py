"""A trained model as a Hugging Face directory, its figures and its card.

Owns the files under gpu/demo/model. Weights are written in bfloat16, as a server reads them.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gpu.demo.examine import Score
from gpu.demo.glossary import HERE, Corpus
from gpu.demo.llama import Llama, Shape
from gpu.demo.tokens import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, token_id

MODEL = HERE / "model"


@dataclass(frozen=True)
class Run:
    """What a training run measured."""

    num_steps: int
    num_conversations: int
    loss: float
    wall_minutes: float
    cpu_minutes: float
    num_threads: int
    num_resumes: int


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, tokenizer, chat template and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    tokenizer.save(str(folder / "tokenizer.json"))
    end = token_id(tokenizer, IM_END)
    _write_json(folder / "config.json", _model_config(model.shape, end, token_id(tokenizer, END_OF_TEXT)))
    _write_json(folder / "generation_config.json", {"do_sample": False, "temperature": 0.0, "eos_token_id": [end]})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.shape))


def load_exported(folder: Path) -> tuple[Llama, Tokenizer]:
    """The exported model as a server sees it: weights rounded to bfloat16."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(Shape(vocab_size=config["vocab_size"]), seed=0)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_card(run: Run, corpus: Corpus, scores: dict[str, Score], folder: Path) -> None:
    """Write figures.json, and README.md from card.md with the figures filled in."""
    size_mb = round((folder / "model.safetensors").stat().st_size / 1e6, 1)
    weights = load_file(folder / "model.safetensors")
    values: dict[str, object] = {
        "parameters": sum(weight.numel() for weight in weights.values()),
        "size_mb": size_mb,
        "entries": len(corpus.entries),
        "long_texts": len(corpus.longs),
        "phrasings": sum(len(entry.phrasings) for entry in corpus.answered()),
        "corpus_chars": sum(len(text) for e in corpus.answered() for text in (e.answer, *e.phrasings)),
        **asdict(run),
    }
    for kind, score in scores.items():
        values |= {
            f"{kind}_right": score.num_right,
            f"{kind}_verbatim": score.num_verbatim,
            f"{kind}_asked": score.num_asked,
            f"{kind}_percent": score.percent,
        }
    _write_json(folder / "figures.json", values)
    (folder / "README.md").write_text((HERE / "card.md").read_text().format(**values))


def _model_config(shape: Shape, end: int, pad: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END, END_OF_TEXT],
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
