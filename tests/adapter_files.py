"""LoRA adapters as PEFT writes them, with random weights, and the models that have them merged in."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
# What PEFT 0.21 writes, with its defaults
SETTINGS: dict[str, Any] = json.loads(
    """{
    "peft_type": "LORA", "peft_version": "0.21.2", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tests/base",
    "auto_mapping": {"parent_library": "transformers"}, "inference_mode": true, "revision": null, "r": 8,
    "lora_alpha": 16, "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": false, "init_lora_weights": true,
    "use_rslora": false, "use_dora": false, "use_qalora": false, "lora_bias": false, "modules_to_save": null,
    "rank_pattern": {}, "alpha_pattern": {}, "megatron_core": "megatron.core", "qalora_group_size": 16,
    "layers_to_transform": null, "layer_replication": null, "trainable_token_indices": null, "loftq_config": {}
    }"""
)


def save_adapter(
    directory: Path, model: Path, seed: int = 0, targets: Sequence[str] = EVERYWHERE, size: float = 1.0, **settings: Any
) -> Path:
    """Write an adapter of the model's matrices of these names.

    Args:
        size: of what it adds, against what the matrices are.
        settings: of adapter_config.json, beside SETTINGS.
    """
    told = SETTINGS | settings
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or ".experts." in name or weight.dim() != 2:
            continue
        rank = _by_pattern(told["rank_pattern"], module, told["r"])
        num_out, num_in = weight.shape
        down = torch.randn(rank, num_in, generator=generator) / num_in**0.5
        up = torch.randn(num_out, rank, generator=generator) * float(weight.std()) * size
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(told | {"target_modules": list(targets)}))
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    return directory


def save_merged(directory: Path, model: Path, adapter: Path) -> Path:
    """Write the model with the adapter's products added to its matrices, in float64."""
    shutil.copytree(model, directory)
    told = json.loads((adapter / "adapter_config.json").read_text())
    weights, pairs = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in pairs if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = pairs[name].double(), pairs[name.replace("lora_A", "lora_B")].double()
        alpha = _by_pattern(told["alpha_pattern"], module, told["lora_alpha"])
        scale = alpha / (len(down) ** 0.5 if told["use_rslora"] else len(down))
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * (up @ down)).to(weight.dtype)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def _by_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """As PEFT finds it."""
    return next((value for one, value in patterns.items() if re.match(rf"(.*\.)?({one})$", module)), usual)
