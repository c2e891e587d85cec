"""Small random directories, of Llama or of another model's shapes, as floats, or packed as GPTQ and AWQ pack.

Number by number, by the definitions.

Sources: AutoGPTQ, nn_modules/qlinear/qlinear_cuda.py, QuantLinear.pack; AutoAWQ, modules/linear/gemm.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Integers = npt.NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
HIDDEN, WIDTH = 64, 128
MATRICES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_pair(directory: Path, quantization: dict[str, Any], seed: int = 0) -> tuple[Path, Path]:
    """The same numbers twice: packed, and as the floats they stand for."""
    random = np.random.default_rng(seed)
    shared = {
        "model.embed_tokens.weight": random.standard_normal((300, HIDDEN)),
        "lm_head.weight": random.standard_normal((300, HIDDEN)) * 0.1,
        "model.norm.weight": random.uniform(0.5, 1.5, HIDDEN),
    }
    packed, floats = {}, {}
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shared[f"model.layers.{layer}.{norm}.weight"] = random.uniform(0.5, 1.5, HIDDEN)
        for name, (num_out, num_in) in MATRICES.items():
            module = f"model.layers.{layer}.{name}"
            parts, weight = make_matrix(random, quantization, num_out, num_in)
            packed.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
            floats[f"{module}.weight"] = weight
    both = {name: torch.from_numpy(array).float() for name, array in shared.items()}
    write_directory(directory / "packed", {**both, **packed}, {**CONFIG, "quantization_config": quantization})
    write_directory(directory / "floats", {**both, **floats}, CONFIG)
    return directory / "packed", directory / "floats"


def save_pair_like(source: Path, directory: Path, quantization: dict[str, Any], matrices: str) -> tuple[Path, Path]:
    """Another model's directory, with matrices of its shapes.

    Args:
        matrices: a pattern of their names.
    """
    random, config = np.random.default_rng(0), json.loads((source / "config.json").read_text())
    packed = load_file(source / "model.safetensors")
    floats = dict(packed)
    for name in [name for name in packed if re.search(matrices, name)]:
        parts, floats[name] = make_matrix(random, quantization, *packed.pop(name).shape)
        packed |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    write_directory(directory / "packed", packed, {**config, "quantization_config": quantization})
    write_directory(directory / "floats", floats, config)
    return directory / "packed", directory / "floats"


def write_directory(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def make_matrix(
    random: np.random.Generator, quantization: dict[str, Any], num_out: int, num_in: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random integers, scales and zeros: the tensors of the format, and [out, in] floats."""
    if quantization["quant_method"] == "compressed-tensors":
        return make_compressed(random, quantization["config_groups"]["group_0"]["weights"], num_out, num_in)
    is_awq = quantization["quant_method"] == "awq"
    bits = quantization["bits"]
    size = num_in if quantization["group_size"] == -1 else quantization["group_size"]
    num_groups = -(-num_in // size)
    groups = np.arange(num_in) // size
    if quantization.get("desc_act"):
        groups = random.permutation(groups)
    values = random.integers(0, 2**bits, (num_in, num_out))
    zeros = random.integers(0, 2**bits, (num_groups, num_out))
    zeros[:, 0] = 0
    if quantization.get("sym"):
        zeros[:] = 2 ** (bits - 1)
    scales = (random.uniform(0.5, 1.5, (num_groups, num_out)) * 0.4 / 2**bits).astype(np.float16)
    weight = (values - zeros[groups]) * scales[groups].astype(np.float64)
    stored_zeros = zeros if is_awq or quantization.get("checkpoint_format") == "gptq_v2" else (zeros - 1) % 2**bits
    parts = {
        "qweight": pack_awq(values) if is_awq else pack_rows(values, bits),
        "qzeros": pack_awq(stored_zeros) if is_awq else pack_rows(stored_zeros.T, bits).T.contiguous(),
        "scales": torch.from_numpy(scales),
    }
    if not is_awq:
        parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts, torch.from_numpy(weight.T.astype(np.float32)).contiguous()


def make_compressed(
    random: np.random.Generator, weights: dict[str, Any], num_out: int, num_in: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same in the format of compressed-tensors, for signed integers."""
    bits, size = weights["num_bits"], weights.get("group_size") or num_in
    groups, half = np.arange(num_in) // size, 2 ** (bits - 1)
    if weights.get("actorder") == "group":
        groups = random.permutation(groups)
    values = random.integers(-half, half, (num_out, num_in))
    zeros = random.integers(-half, half, (num_out, -(-num_in // size))) * (not weights["symmetric"])
    scales = torch.from_numpy(random.uniform(0.5, 1.5, zeros.shape) * 0.4 / 2**bits).bfloat16()
    weight = (values - zeros[:, groups]) * scales.double().numpy()[:, groups]
    parts = {
        "weight_packed": pack_rows((values + half).T, bits).T.contiguous(),
        "weight_scale": scales,
        "weight_shape": torch.tensor([num_out, num_in]),
    }
    if not weights["symmetric"]:
        padded = np.pad(zeros + half, ((0, -num_out % (32 // bits)), (0, 0)))
        parts["weight_zero_point"] = pack_rows(padded, bits)
    if weights.get("actorder") == "group":
        parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts, torch.from_numpy(weight.astype(np.float32)).contiguous()


def pack_rows(values: Integers, bits: int) -> torch.Tensor:
    """[n, m] → [n * bits / 32, m]: of neighbouring rows the first has the lowest bits."""
    packed = np.zeros((len(values) * bits // 32, values.shape[1]), dtype=np.uint32)
    for row, numbers in enumerate(values.astype(np.uint32)):
        packed[row // (32 // bits)] |= numbers << np.uint32(bits * (row % (32 // bits)))
    return torch.from_numpy(packed.view(np.int32))


def pack_awq(values: Integers) -> torch.Tensor:
    """[n, m] → [n, m / 8]: eight neighbouring columns in the order that its kernel wants."""
    packed = np.zeros((len(values), values.shape[1] // 8), dtype=np.uint32)
    for column in range(packed.shape[1]):
        for place, which in enumerate(AWQ_ORDER):
            packed[:, column] |= values[:, 8 * column + which].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(packed.view(np.int32))
