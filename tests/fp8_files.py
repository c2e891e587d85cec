"""A model's directory again with its layers' matrices in 8-bit floats, and with the floats that these stand for.

By the definitions, in plain torch and float32. Sources: the config.json of Qwen3-8B-FP8, Ministral-3, AutoFP8's
Meta-Llama-3-8B-Instruct-FP8 and RedHatAI's Llama models; compressed-tensors.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
MATRIX = re.compile(
    r"(model|backbone|mtp)\.(language_model\.)?layers\.\d+\..*(_proj(_\w+)?|\.w[123]|put_linear)\.weight"
)
BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "modules_to_not_convert": ["lm_head"],
}
WHOLE: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
MODEL_OPTIMIZER: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["lm_head"],
}
AUTO_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' configuration."""
    arguments = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


SCHEMES: dict[str, dict[str, Any]] = {
    "blocks": BLOCKS,
    "blocks of 128": {**BLOCKS, "weight_block_size": [128, 128]},
    "whole": WHOLE,
    "auto_fp8": AUTO_FP8,
    "model optimizer": MODEL_OPTIMIZER,
    "compressed channels": compressed("channel"),
    "compressed whole": compressed("tensor"),
    "compressed blocks": compressed("block", block_structure=[64, 32]),
}


def save_pair(source: Path, directory: Path, scheme: dict[str, Any], without: str = "a^") -> tuple[Path, Path]:
    """(as 8-bit floats, as the floats that they stand for).

    Args:
        scheme: a quantization_config.
        without: a pattern of matrices that are not quantised.
    """
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    stored, floats = dict(tensors), dict(tensors)
    for name in filter(MATRIX.fullmatch, tensors):
        if re.search(without, name):
            continue
        tensor = tensors[name].float()
        of_each = [quantize(matrix, scheme) for matrix in tensor.view(-1, *tensor.shape[-2:])]
        values, scales, spread = (
            torch.stack(part).view(*tensor.shape[:-2], *part[0].shape) for part in zip(*of_each, strict=True)
        )
        stored |= {name: values} | named_scales(name.removesuffix(".weight"), scales, scheme)
        floats[name] = values.float() * spread
    config.pop("quantization_config", None)
    write_directory(directory / "fp8", stored, {**config, "quantization_config": scheme})
    write_directory(directory / "floats", floats, config)
    return directory / "fp8", directory / "floats"


def named_scales(module: str, scales: torch.Tensor, scheme: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As tools of that kind write them; of activations too, where they are static."""
    if scheme["quant_method"] == "modelopt":
        scales = scales.squeeze()
        static = {f"{module}.{name}": torch.tensor(0.5) for name in ("input_scale", "k_scale", "v_scale")}
        return {f"{module}.weight_scale": scales, **static}
    if scheme["quant_method"] == "compressed-tensors":
        return {f"{module}.weight_scale": scales.bfloat16()}
    if "weight_block_size" not in scheme:
        one = torch.tensor([0.5])
        return {f"{module}.weight_scale": scales, f"{module}.input_scale": one, f"{module}.k_scale": one.clone()}
    if scheme["weight_block_size"] is None:
        return {
            f"{module}.weight_scale_inv": scales.bfloat16().squeeze(),
            f"{module}.activation_scale": torch.tensor(0.5),
        }
    return {f"{module}.weight_scale_inv": scales}


def quantize(weight: torch.Tensor, scheme: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, scales, scales of each number); scales are bfloat16 numbers, so that either format stores them."""
    num_out, num_in = weight.shape
    rows, columns = block_of(scheme, num_out, num_in)
    row_blocks, column_blocks = (
        torch.arange(size) // of_block for size, of_block in ((num_out, rows), (num_in, columns))
    )
    scales = torch.zeros(int(row_blocks[-1]) + 1, int(column_blocks[-1]) + 1)
    places = (row_blocks[:, None] * scales.shape[1] + column_blocks).flatten()
    scales.view(-1).scatter_reduce_(0, places, weight.abs().flatten(), "amax")
    scales = (scales / LARGEST).bfloat16().float()
    spread = scales[row_blocks][:, column_blocks]
    return (weight / spread).clamp(-LARGEST, LARGEST).to(FP8), scales, spread


def block_of(scheme: dict[str, Any], num_out: int, num_in: int) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    if scheme["quant_method"] in ("fp8", "modelopt"):
        rows, columns = scheme.get("weight_block_size") or (num_out, num_in)
        return rows, columns
    weights = scheme["config_groups"]["group_0"]["weights"]
    blocks = {"tensor": (num_out, num_in), "channel": (1, num_in), "block": weights.get("block_structure")}
    rows, columns = blocks[weights["strategy"]]
    return rows, columns


def write_directory(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
