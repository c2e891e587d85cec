"""Directories with 8-bit floats give what the floats that they stand for give; what is not read is named."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import parse_model_config
from core.errors import BadCheckpoint
from gpu import parameters
from gpu import weights as weights_module
from gpu.checkpoint import open_checkpoint
from gpu.memory_plan import estimate, memory_needed, weights_size_bytes
from gpu.parameters import LayerWeights, ModelWeights, Target, matrices
from gpu.quant import QuantizedWeight, dequantize
from gpu.streams import StagedCopies
from gpu.weights import MatrixForm, load_weights, prequantized_scheme
from tests import packed_files
from tests.fp8_files import BLOCKS, SCHEMES, WHOLE, save_pair
from tests.gpu.conftest import ENGINE, no_progress, open_runner
from tests.gpu.driver import Driver, make_plan
from tests.gpu.late_streams import LateStreams
from tests.gpu.test_memory_plan import BF16, CUDA
from tests.oracle import Oracle, read_config

CPU = torch.device("cpu")
AS_STORED = replace(ENGINE, quantize="fp8")
PROMPT = [(37 * place) % 290 + 3 for place in range(30)]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose widths are multiples of 32."""
    _, floats = packed_files.save_pair(
        tmp_path_factory.mktemp("plain"), {"quant_method": "gptq", "bits": 4, "group_size": 32}
    )
    return floats


def load(directory: Path, is_kept: bool, dtype: torch.dtype = torch.float32, fill: Any = Target.fill) -> ModelWeights:
    config = parse_model_config(read_config(directory))
    checkpoint = open_checkpoint(directory, config.packing)
    return load_weights(checkpoint, config, dtype, CPU, no_progress, MatrixForm(serves_prequantized=is_kept), fill)


def loaded_matrices(weights: ModelWeights) -> dict[str, Any]:
    return {
        f"{index} {field}": getattr(owner, field)
        for index, layer in enumerate(weights.layers)
        for owner, field in matrices(layer)
    }


def as_floats(weight: Any) -> torch.Tensor:
    return dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else weight


def logits_of(directory: Path, engine: Any = ENGINE) -> torch.Tensor:
    """At every position of the prompt."""
    runner, tables = open_runner(directory, engine), [(0, 0, 0), (0, 1, 1)]
    rows = [make_plan([(0, place, [token], True)], tables=tables) for place, token in enumerate(PROMPT)]
    return torch.cat([runner.forward(row).sent.logits for row in rows])


def tokens_of(directory: Path, **engine: Any) -> list[list[int]]:
    driver = Driver(open_runner(directory, replace(ENGINE, **engine)))
    prompts = ([5], list(range(40, 47)), PROMPT)
    return driver.generate(12, *(driver.add(list(prompt)) for prompt in prompts))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_kept", [False, True])
def test_matrices_are_those_that_were_stored(scheme: str, is_kept: bool, plain: Path, tmp_path: Path) -> None:
    stored, floats = save_pair(plain, tmp_path, SCHEMES[scheme])
    found, wanted = loaded_matrices(load(stored, is_kept)), loaded_matrices(load(floats, False))
    for name, weight in found.items():
        assert isinstance(weight, QuantizedWeight) is is_kept
        assert torch.equal(as_floats(weight), wanted[name])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_floats_by_transformers(scheme: str, plain: Path, tmp_path: Path) -> None:
    stored, floats = save_pair(plain, tmp_path, SCHEMES[scheme])
    want = Oracle(floats).logits(PROMPT)
    assert torch.equal(logits_of(stored), logits_of(floats))
    for engine in (ENGINE, AS_STORED):
        assert (logits_of(stored, engine) - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe", "olmo2", "qwen2"])
@pytest.mark.parametrize("scheme", ["blocks", "whole", "compressed channels"])
def test_families_say_what_their_floats_say(
    scheme: str, family: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of some 32 does not divide all widths: rows of such become floats."""
    stored, floats = save_pair(model_directory(family), tmp_path, SCHEMES[scheme])
    found, wanted = loaded_matrices(load(stored, True)), loaded_matrices(load(floats, False))
    assert all(torch.equal(as_floats(weight), wanted[name]) for name, weight in found.items())
    want = tokens_of(floats)
    assert tokens_of(stored) == want
    if all(isinstance(weight, QuantizedWeight) for weight in found.values()):
        assert tokens_of(stored, quantize="fp8") == want


def test_other_schemes_quantise_the_floats(plain: Path, tmp_path: Path) -> None:
    stored, floats = save_pair(plain, tmp_path, BLOCKS)
    for scheme in ("int8", "int4"):
        assert tokens_of(stored, quantize=scheme) == tokens_of(floats, quantize=scheme)


def test_a_rounded_weight_is_rounded_once(plain: Path, tmp_path: Path) -> None:
    stored, floats = save_pair(plain, tmp_path, BLOCKS)
    wanted = loaded_matrices(load(floats, False, torch.bfloat16))
    assert all(
        torch.equal(found, wanted[name]) for name, found in loaded_matrices(load(stored, False, torch.bfloat16)).items()
    )
    for name, found in loaded_matrices(load(stored, True, torch.bfloat16)).items():
        assert torch.equal(dequantize(found, torch.bfloat16), wanted[name])


def test_they_go_to_a_device_in_slices(plain: Path, tmp_path: Path) -> None:
    stored, _ = save_pair(plain, tmp_path, BLOCKS)
    streams = LateStreams()
    found, wanted = load(stored, True, fill=StagedCopies(streams, 1024).fill), load(stored, True)
    streams.finish()
    for one, other in zip(loaded_matrices(found).values(), loaded_matrices(wanted).values(), strict=True):
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(one.scales, other.scales)


def test_a_device_keeps_them_and_a_cpu_where_it_is_asked_to(plain: Path, tmp_path: Path) -> None:
    stored, _ = save_pair(plain, tmp_path, WHOLE)
    config = parse_model_config(read_config(stored))
    for device, found in ((torch.device("cuda"), "fp8"), (CPU, None)):
        assert prequantized_scheme(config, None, device) == found
        assert prequantized_scheme(config, "fp8", device) == "fp8"
        assert prequantized_scheme(config, "int8", device) is prequantized_scheme(config, "int4", device) is None


@pytest.mark.parametrize("scheme", ["blocks", "compressed channels"])
def test_the_plan_knows_what_is_kept(scheme: str, plain: Path, tmp_path: Path) -> None:
    """One matrix of a layer is stored as floats, and so is what it is fused with."""
    stored, floats = save_pair(plain, tmp_path, SCHEMES[scheme])
    keep_plain(stored, floats, "model.layers.1.mlp.up_proj")
    config = parse_model_config(read_config(stored))
    checkpoint = open_checkpoint(stored, config.packing)
    found = loaded_matrices(load(stored, True, torch.bfloat16))
    assert [name for name, weight in found.items() if not isinstance(weight, QuantizedWeight)] == ["1 gate_up"]
    saved_bytes = sum(
        2 * weight.values.numel() - weight.values.nbytes - weight.scales.nbytes
        for weight in found.values()
        if isinstance(weight, QuantizedWeight)
    )
    whole_bytes = 2 * config.num_parameters
    for device, quantize, want in ((CUDA, None, whole_bytes - saved_bytes), (BF16, None, whole_bytes)):
        assert weights_size_bytes(config, torch.bfloat16, quantize, device.device, checkpoint) == want
    assert memory_needed(config, ENGINE, BF16, checkpoint) > whole_bytes
    kept, plainly = (estimate(stored, config, engine).weights_bytes for engine in (AS_STORED, ENGINE))
    assert kept == weights_size_bytes(config, torch.float32, "fp8", CPU, checkpoint) < plainly == 2 * whole_bytes


def keep_plain(stored: Path, floats: Path, module: str) -> None:
    """As modules_to_not_convert has it."""
    tensors = load_file(stored / "model.safetensors")
    for name in [name for name in tensors if name.startswith(f"{module}.weight_scale")]:
        del tensors[name]
    tensors[f"{module}.weight"] = load_file(floats / "model.safetensors")[f"{module}.weight"]
    save_file(tensors, stored / "model.safetensors")


def test_a_head_may_be_stored_so_too(plain: Path, tmp_path: Path) -> None:
    stored, floats = save_pair(plain, tmp_path, BLOCKS)
    tensors, wanted = load_file(stored / "model.safetensors"), load_file(floats / "model.safetensors")
    values, scale = (torch.arange(300 * 64).view(300, 64) % 17 - 8.0) / 8, torch.full((10, 2), 0.125)
    tensors |= {"lm_head.weight": values.to(torch.float8_e4m3fn), "lm_head.weight_scale_inv": scale}
    wanted["lm_head.weight"] = values / 8
    save_file(tensors, stored / "model.safetensors")
    save_file(wanted, floats / "model.safetensors")
    assert torch.equal(logits_of(stored), logits_of(floats))


MODULE = "model.layers.0.mlp.up_proj"
DAMAGES: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scale": (
        BLOCKS,
        lambda tensors: tensors.pop(f"{MODULE}.weight_scale_inv"),
        "up_proj.weight is stored as F8_E4M3",
    ),
    "a scale of another shape": (
        BLOCKS,
        lambda tensors: tensors.update({f"{MODULE}.weight_scale_inv": torch.ones(2, 2)}),
        r"weight_scale_inv is \[2, 2\] as F32; config.json and its weight ask for \[4, 2\]",
    ),
    "scales where there is one": (
        WHOLE,
        lambda tensors: tensors.update({f"{MODULE}.weight_scale_inv": torch.ones(4, 2)}),
        r"ask for one, or \[128, 1\]",
    ),
    "a scale of bytes": (
        BLOCKS,
        lambda tensors: tensors.update({f"{MODULE}.weight_scale_inv": torch.ones(4, 2).to(torch.float8_e8m0fnu)}),
        "weight_scale_inv is stored as F8_E8M0; supported are F64, F32, F16, BF16, F8_E4M3",
    ),
    "another format": (
        BLOCKS,
        lambda tensors: tensors.update({f"{MODULE}.weight": tensors[f"{MODULE}.weight"].to(torch.float8_e5m2)}),
        "up_proj.weight is stored as F8_E5M2; supported are F64, F32, F16, BF16, F8_E4M3",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_read_is_named(damage: str, plain: Path, tmp_path: Path) -> None:
    scheme, change, message = DAMAGES[damage]
    stored, _ = save_pair(plain, tmp_path, scheme)
    tensors = load_file(stored / "model.safetensors")
    change(tensors)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=message):
        load(stored, True)


def test_without_a_configuration_they_are_refused_with_what_is_missing(plain: Path, tmp_path: Path) -> None:
    stored, _ = save_pair(plain, tmp_path, BLOCKS)
    config = read_config(stored)
    del config["quantization_config"]
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=r"F8_E4M3 where config\.json has a quantization_config"):
        load(stored, False)


def test_floats_that_are_not_to_come_take_no_memory_beside_what_does(plain: Path, tmp_path: Path) -> None:
    """Of a layer's matrices, once the first of its 8-bit floats are read."""
    stored, _ = save_pair(plain, tmp_path, WHOLE)
    alive: list[weakref.ref[torch.Tensor]] = []
    seen = []

    def fill(target: Target, tensor: torch.Tensor) -> None:
        if target.into.dtype == torch.uint8:
            seen.append(sum(weight() is not None for weight in alive))
        target.fill(tensor)

    def empty_layer(*arguments: Any) -> tuple[LayerWeights, parameters.Targets]:
        layer, targets = parameters.empty_layer(*arguments)
        alive[:] = [weakref.ref(getattr(owner, field)) for owner, field in matrices(layer)]
        return layer, targets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "empty_layer", empty_layer)
        load(stored, True, fill=fill)
    assert seen == [0] * 14
