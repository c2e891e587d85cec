"""GPTQ and AWQ directories give what the floats that they stand for give; what is not read is named."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import parse_model_config
from core.errors import BadCheckpoint
from gpu.checkpoint import open_checkpoint
from gpu.memory_plan import estimate, weights_size_bytes
from gpu.parameters import ModelWeights, matrices
from gpu.quant import QuantizedWeight, dequantize
from gpu.weights import MatrixForm, load_weights, prequantized_scheme
from tests.gpu.conftest import ENGINE, no_progress, open_runner
from tests.gpu.driver import Driver
from tests.oracle import read_config
from tests.packed_files import save_pair

CPU = torch.device("cpu")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
KEPT: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq symmetric": {**GPTQ, "sym": True, "group_size": 64},
    "gptq whole rows": {**GPTQ, "group_size": -1},
    "gptq v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "awq": AWQ,
    "awq of 64": {**AWQ, "group_size": 64},
}
AS_FLOATS: dict[str, dict[str, Any]] = {
    "gptq ordered": {**GPTQ, "desc_act": True},
    "gptq 8 bit": {**GPTQ, "bits": 8},
    "gptq 8 bit whole rows": {**GPTQ, "bits": 8, "group_size": -1, "sym": True},
    "gptq small groups": {**GPTQ, "group_size": 16},
}


def load(directory: Path) -> ModelWeights:
    config = parse_model_config(read_config(directory))
    checkpoint = open_checkpoint(directory, config.packing)
    form = MatrixForm(serves_prequantized=prequantized_scheme(config, None, CPU) is not None)
    return load_weights(checkpoint, config, torch.float32, CPU, no_progress, form)


def tokens_of(directory: Path, **engine: Any) -> list[list[int]]:
    driver = Driver(open_runner(directory, dataclasses.replace(ENGINE, **engine)))
    prompts = ([5], list(range(40, 47)), list(range(100, 140)))
    return driver.generate(16, *(driver.add(list(prompt)) for prompt in prompts))


@pytest.mark.parametrize("name", [*KEPT, *AS_FLOATS])
def test_matrices_are_those_that_were_packed(name: str, tmp_path: Path) -> None:
    packed, floats = (load(directory) for directory in save_pair(tmp_path, {**KEPT, **AS_FLOATS}[name]))
    for layer, plain in zip(packed.layers, floats.layers, strict=True):
        for (owner, field), (plain_owner, _) in zip(matrices(layer), matrices(plain), strict=True):
            found = getattr(owner, field)
            assert isinstance(found, QuantizedWeight) == (name in KEPT)
            found = dequantize(found, torch.float32) if isinstance(found, QuantizedWeight) else found
            assert torch.allclose(found, getattr(plain_owner, field), atol=1e-5)


@pytest.mark.parametrize("name", ["gptq", "gptq whole rows", "awq", "gptq ordered"])
def test_tokens_are_those_of_the_floats(name: str, tmp_path: Path) -> None:
    packed, floats = save_pair(tmp_path, {**KEPT, **AS_FLOATS}[name])
    assert tokens_of(packed) == tokens_of(floats)


def test_int4_leaves_packed_integers_as_they_are_and_int8_does_not(tmp_path: Path) -> None:
    packed, floats = save_pair(tmp_path, GPTQ)
    assert tokens_of(packed, quantize="int4") == tokens_of(packed)
    assert tokens_of(packed, quantize="int8") == tokens_of(floats, quantize="int8")


def test_the_plan_knows_packed_matrices(tmp_path: Path) -> None:
    directory, _ = save_pair(tmp_path, GPTQ)
    config = parse_model_config(read_config(directory))
    kept, int4, int8 = (weights_size_bytes(config, torch.bfloat16, scheme, CPU) for scheme in (None, "int4", "int8"))
    assert kept == int4 < int8 < 2 * config.num_parameters
    assert estimate(directory, config, ENGINE).weights_bytes == weights_size_bytes(config, torch.float32, None, CPU)


def test_a_bias_of_zeros_that_the_architecture_has_not_is_left_out(tmp_path: Path) -> None:
    packed, floats = save_pair(tmp_path, GPTQ)
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{MODULE}.bias"] = torch.zeros(128)
    save_file(tensors, packed / "model.safetensors")
    assert tokens_of(packed) == tokens_of(floats)
    tensors[f"{MODULE}.bias"][7] = 0.5
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"up_proj.bias is not zero"):
        load(packed)


def test_a_head_or_layer_that_is_not_packed_is_read_as_floats(tmp_path: Path) -> None:
    packed, floats = save_pair(tmp_path, GPTQ)
    tensors, plain = load_file(packed / "model.safetensors"), load_file(floats / "model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{module}.{part}"]
    tensors[f"{module}.weight"] = plain[f"{module}.weight"]
    save_file(tensors, packed / "model.safetensors")
    layers = load(packed).layers
    assert isinstance(layers[0].mlp.down, QuantizedWeight)
    assert torch.equal(layers[1].mlp.down, load(floats).layers[1].mlp.down)
    assert tokens_of(packed) == tokens_of(floats)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


MODULE = "model.layers.0.mlp.up_proj"
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no zeros": (drop(f"{MODULE}.qzeros"), "without .*up_proj.qzeros"),
    "short scales": (
        lambda tensors: tensors.update({f"{MODULE}.scales": tensors[f"{MODULE}.scales"][:1].clone()}),
        r"up_proj.scales is \[1, 128\] as F16; its qweight asks for \[2, 128\]",
    ),
    "groups that are not": (
        lambda tensors: tensors[f"{MODULE}.g_idx"].fill_(7),
        "desc_act is not set",
    ),
    "float integers": (
        lambda tensors: tensors.update({f"{MODULE}.qweight": tensors[f"{MODULE}.qweight"].float()}),
        "up_proj.qweight is .* as F32",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_matrix_is_named(damage: str, tmp_path: Path) -> None:
    directory, _ = save_pair(tmp_path, GPTQ)
    tensors = load_file(directory / "model.safetensors")
    change, message = DAMAGES[damage]
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=message):
        load(directory)


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory, _ = save_pair(tmp_path, {**GPTQ, "desc_act": True})
    tensors = load_file(directory / "model.safetensors")
    tensors[f"{MODULE}.g_idx"][3] = 2
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="not among the 2 there are"):
        load(directory)


def test_a_matrix_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory, _ = save_pair(tmp_path, GPTQ)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.qweight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"packed: 1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        open_runner(directory)


def test_packed_tensors_without_a_configuration_are_not_the_architectures(tmp_path: Path) -> None:
    directory, _ = save_pair(tmp_path, GPTQ)
    config = read_config(directory)
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="missing"):
        load(directory)
