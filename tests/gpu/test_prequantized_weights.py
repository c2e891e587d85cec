"""GPTQ, AWQ and fp8 directories give what the floats that they stand for give; what is not read is named."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.config import EngineConfig
from core.config_json import parse_model_config
from core.errors import BadCheckpoint
from core.plan import make_plan
from core.scheduler import Scheduler
from core.types import Request, SamplingParams
from gpu import parameters
from gpu import weights as weights_module
from gpu.checkpoint import open_checkpoint
from gpu.device import choose_device
from gpu.memory_plan import estimate, memory_needed, weights_size_bytes
from gpu.parameters import LayerWeights, ModelWeights, Target, matrices
from gpu.quant import QuantizedWeight, dequantize
from gpu.streams import StagedCopies
from gpu.weights import MatrixForm, check_checkpoint, prequantized_scheme
from tests import fp8_files, packed_files
from tests.fakes import FakeClock
from tests.fp8_files import BLOCKS, SCHEMES, WHOLE
from tests.gpu.conftest import ENGINE, load_whole, no_progress, open_runner
from tests.gpu.driver import Driver
from tests.gpu.late_streams import LateStreams
from tests.gpu.test_memory_plan import BF16, CUDA
from tests.oracle import Oracle, read_config, save_random_model
from tests.workload import Workload, WorkloadRun

CPU = torch.device("cpu")
TENSORS = "model.safetensors"
MODULE = "model.layers.0.mlp.up_proj"
PROMPT = [(37 * place) % 290 + 3 for place in range(30)]
AS_STORED = replace(ENGINE, quantize="fp8")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, "num_bits": 4, **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


PACKED = compressed(strategy="group", group_size=32)
UNEVEN = compressed(strategy="group", group_size=32, symmetric=False)
KEPT: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq symmetric": {**GPTQ, "sym": True, "group_size": 64},
    "gptq whole rows": {**GPTQ, "group_size": -1},
    "gptq v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "awq": AWQ,
    "awq of 64": {**AWQ, "group_size": 64},
    "compressed": PACKED,
    "compressed, with zeros": UNEVEN,
    "compressed, whole rows": compressed(strategy="channel"),
}
AS_FLOATS: dict[str, dict[str, Any]] = {
    "gptq ordered": {**GPTQ, "desc_act": True},
    "gptq 8 bit": {**GPTQ, "bits": 8},
    "gptq 8 bit whole rows": {**GPTQ, "bits": 8, "group_size": -1, "sym": True},
    "gptq small groups": {**GPTQ, "group_size": 16},
    "compressed, ordered": compressed(strategy="group", group_size=32, actorder="group", symmetric=False),
    "compressed, 8 bit": compressed(strategy="channel", num_bits=8),
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose widths are multiples of 32."""
    return packed_files.save_pair(tmp_path_factory.mktemp("plain"), GPTQ)[1]


@pytest.fixture
def pair(plain: Path, tmp_path: Path) -> Callable[[dict[str, Any]], tuple[Path, Path]]:
    """A scheme -> a directory that stores it, and one with the floats that it stands for."""

    def save(scheme: dict[str, Any]) -> tuple[Path, Path]:
        is_packed = scheme.get("quant_method") in ("gptq", "awq") or scheme.get("format") == "pack-quantized"
        if is_packed:
            return packed_files.save_pair(tmp_path / "integers", scheme)
        return fp8_files.save_pair(plain, tmp_path, scheme)

    return save


Pair = Callable[[dict[str, Any]], tuple[Path, Path]]


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / TENSORS)
    change(tensors)
    save_file(tensors, directory / TENSORS)


def load(directory: Path, is_kept: bool, dtype: torch.dtype = torch.float32, fill: Any = Target.fill) -> ModelWeights:
    config = parse_model_config(read_config(directory))
    checkpoint = open_checkpoint(directory, config.packing)
    config = check_checkpoint(checkpoint, config)
    return load_whole(checkpoint, config, dtype, CPU, no_progress, MatrixForm(serves_prequantized=is_kept), fill)


def load_as_served(directory: Path) -> ModelWeights:
    config = parse_model_config(read_config(directory))
    return load(directory, prequantized_scheme(config, None, CPU) is not None)


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
    prompts = ([5], list(range(40, 47)), list(range(100, 140)))
    return driver.generate(12, *(driver.add(list(prompt)) for prompt in prompts))


@pytest.mark.parametrize("name", [*KEPT, *AS_FLOATS])
def test_packed_matrices_are_those_that_were_packed(name: str, pair: Pair) -> None:
    packed, floats = (loaded_matrices(load_as_served(directory)) for directory in pair({**KEPT, **AS_FLOATS}[name]))
    for matrix, found in packed.items():
        assert isinstance(found, QuantizedWeight) == (name in KEPT)
        assert torch.allclose(as_floats(found), floats[matrix], atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_kept", [False, True])
def test_8_bit_floats_are_those_that_were_stored(scheme: str, is_kept: bool, pair: Pair) -> None:
    stored, floats = pair(SCHEMES[scheme])
    found, wanted = loaded_matrices(load(stored, is_kept)), loaded_matrices(load(floats, False))
    for name, weight in found.items():
        assert isinstance(weight, QuantizedWeight) is is_kept
        assert torch.equal(as_floats(weight), wanted[name])


@pytest.mark.parametrize("name", ["gptq", "gptq whole rows", "awq", "gptq ordered"])
def test_tokens_are_those_of_the_floats(name: str, pair: Pair) -> None:
    packed, floats = pair({**KEPT, **AS_FLOATS}[name])
    assert tokens_of(packed) == tokens_of(floats)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_floats_by_transformers(scheme: str, pair: Pair) -> None:
    stored, floats = pair(SCHEMES[scheme])
    want = Oracle(floats).logits(PROMPT)
    assert torch.equal(logits_of(stored), logits_of(floats))
    for engine in (ENGINE, AS_STORED):
        assert (logits_of(stored, engine) - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe", "olmo2", "qwen2", "deepseek_v3"])
@pytest.mark.parametrize("scheme", ["blocks", "whole", "compressed channels"])
def test_families_say_what_their_floats_say(
    scheme: str, family: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of some 32 does not divide all widths: rows of such become floats."""
    stored, floats = fp8_files.save_pair(model_directory(family), tmp_path, SCHEMES[scheme])
    found, wanted = loaded_matrices(load(stored, True)), loaded_matrices(load(floats, False))
    assert all(torch.equal(as_floats(weight), wanted[name]) for name, weight in found.items())
    want = tokens_of(floats)
    assert tokens_of(stored) == want
    if all(isinstance(weight, QuantizedWeight) for weight in found.values()):
        assert tokens_of(stored, quantize="fp8") == want


STEPS = r"in_proj_(a|b|ba)\.weight"  # which published checkpoints leave as floats
OF_RECURRENT_LAYERS = {
    "lfm2": ("compressed channels", "a^"),
    "qwen3_5": ("blocks", STEPS),
    "qwen3_5_moe": ("compressed channels", STEPS),
    "qwen3_next": ("whole", STEPS),
    "granite_hybrid": ("compressed channels", "router"),
    "granite_hybrid_dense": ("compressed blocks", "a^"),
    "falcon_h1": ("compressed channels", "a^"),
    "nemotron_h": ("model optimizer", "a^"),
}


@pytest.mark.parametrize("family", OF_RECURRENT_LAYERS)
def test_recurrent_layers_compute_by_8_bit_floats_what_transformers_computes(
    family: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """In chunks and in company. Rows are reordered, and multiplied by factors, together with their scales."""
    name, without = OF_RECURRENT_LAYERS[family]
    stored, floats = fp8_files.save_pair(model_directory(family), tmp_path, SCHEMES[name], without)
    found, wanted = loaded_matrices(load(stored, True)), loaded_matrices(load(floats, False))
    assert any(isinstance(weight, QuantizedWeight) for weight in found.values())
    for matrix, weight in found.items():
        is_odd = name.endswith("blocks") and weight.shape[-1] % 32
        assert isinstance(weight, Tensor if is_odd else QuantizedWeight)
        torch.testing.assert_close(as_floats(weight), wanted[matrix][: weight.shape[0]], rtol=2e-7, atol=0)
    check_answers(stored, Oracle(floats), ENGINE)
    if not name.endswith("blocks"):  # odd rows would be quantised anew
        check_answers(stored, Oracle(floats), AS_STORED)


@pytest.mark.parametrize(
    ("family", "scheme", "matrices"),
    [
        ("qwen3_5", AWQ, r"language_model.*layers.*(_proj|qkv|z)\.weight"),
        ("qwen3_next", GPTQ, r"layers.*(_proj|qkvz|ba)\.weight"),
        ("qwen3_5_moe", GPTQ, r"experts.*_proj\.weight"),
        ("falcon_h1", GPTQ, r"layers.*_proj\.weight"),
        ("nemotron_h", AWQ, r"(?<!in)_proj\.weight"),
        ("nemotron_h", UNEVEN, r"_proj\.weight"),
        ("qwen3_next", PACKED, r"layers.*(_proj|qkvz)\.weight"),
        ("lfm2", PACKED, r"layers.*(_proj|\.w[123])\.weight"),
    ],
)
def test_recurrent_layers_compute_by_packed_integers_what_transformers_computes(
    family: str, scheme: dict[str, Any], matrices: str, tmp_path: Path
) -> None:
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 16} if family == "falcon_h1" else {}  # integers pack 8 outputs
    source = save_random_model(family, tmp_path / "source", **sizes)
    packed, floats = packed_files.save_pair_like(source, tmp_path, scheme, matrices)
    found, wanted = (loaded_matrices(load_as_served(directory)) for directory in (packed, floats))
    assert any(isinstance(weight, QuantizedWeight) for weight in found.values())
    for name, weight in found.items():
        torch.testing.assert_close(as_floats(weight), wanted[name][: weight.shape[0]], rtol=0, atol=1e-5)
    check_answers(packed, Oracle(floats), ENGINE)


def check_answers(directory: Path, oracle: Oracle, engine: EngineConfig) -> None:
    runner = open_runner(directory, engine)
    scheduler = Scheduler(replace(runner.limits, max_batch_tokens=24, timed_rows=()), (), seeds=lambda: 0)
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    prompts = {"one": PROMPT, "two": PROMPT[7:], "three": [5]}
    asked = [
        Request(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, arrival_s=0.0)
        for name, prompt in prompts.items()
    ]
    found = WorkloadRun(
        Workload([(place, one) for place, one in enumerate(asked)]), scheduler, runner, FakeClock()
    ).run()
    for name, prompt in prompts.items():
        said = found[name].endings[0].token_ids
        assert said == oracle.greedy(prompt, 10, said)


@pytest.mark.parametrize("scheme", ["compressed channels", "blocks"])
def test_stacked_experts_are_those_that_lie_apart(
    scheme: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """As transformers writes them: the scales' names are the experts', with an ending."""
    stored, _ = fp8_files.save_pair(
        model_directory("qwen3_5_moe"), tmp_path, SCHEMES[scheme], f"{STEPS}|gate_proj|up_proj"
    )
    end = "scale_inv" if scheme == "blocks" else "scale"

    def stack(tensors: Tensors) -> None:
        for layer in range(2):
            owner = f"model.layers.{layer}.mlp.experts"
            apart = {
                part: torch.stack([tensors.pop(f"{owner}.{i}.{part}") for i in range(6)])
                for part in ("gate_proj.weight", "up_proj.weight", "down_proj.weight", f"down_proj.weight_{end}")
            }
            tensors[f"{owner}.gate_up_proj"] = torch.cat([apart["gate_proj.weight"], apart["up_proj.weight"]], 1)
            tensors[f"{owner}.down_proj"] = apart["down_proj.weight"]
            tensors[f"{owner}.down_proj_{end}"] = apart[f"down_proj.weight_{end}"]

    wanted = loaded_matrices(load(stored, True))
    change_tensors(stored, stack)
    for name, weight in loaded_matrices(load(stored, True)).items():
        assert isinstance(weight, QuantizedWeight) == isinstance(wanted[name], QuantizedWeight)
        assert torch.equal(as_floats(weight), as_floats(wanted[name]))


OF_STACKS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "one each": ("whole", lambda scale: scale.reshape(6)),
    "one each, as columns": ("whole", lambda scale: scale.reshape(6, 1)),
    "one each, as matrices": ("whole", lambda scale: scale.reshape(6, 1, 1)),
    "one": ("whole", lambda scale: scale[0].clone()),
    "a vector of one": ("whole", lambda scale: scale[:1].clone()),
    "of outputs": ("compressed channels", lambda scale: scale.reshape(6, -1)),
}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("shape", OF_STACKS)
def test_experts_in_one_tensor_have_scales_of_any_shape_that_fits(
    shape: str, is_kept: bool, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    name, change = OF_STACKS[shape]
    stored, floats = fp8_files.save_pair(model_directory("granite_hybrid"), tmp_path, SCHEMES[name], "router")
    of_stacks = dict[str, Tensor]()

    def reshape(tensors: Tensors) -> None:
        for weight, values in list(tensors.items()):
            if values.dim() == 3 and values.dtype == torch.float8_e4m3fn:
                end = "_scale_inv" if f"{weight}_scale_inv" in tensors else "_scale"
                scale = tensors[weight + end] = change(tensors[weight + end])
                of_stacks[weight] = values.float() * scale.float().reshape(min(6, scale.numel()), -1, 1)

    change_tensors(stored, reshape)
    assert len(of_stacks) == 6
    change_tensors(floats, lambda tensors: tensors.update(of_stacks))
    found, wanted = loaded_matrices(load(stored, is_kept)), loaded_matrices(load(floats, False))
    for matrix, weight in found.items():
        assert isinstance(weight, QuantizedWeight) is is_kept
        torch.testing.assert_close(as_floats(weight), wanted[matrix], rtol=2e-7, atol=0)


def test_scales_of_fewer_experts_are_refused_with_what_would_fit(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    stored, _ = fp8_files.save_pair(model_directory("granite_hybrid"), tmp_path, WHOLE, "router")
    name = "model.layers.0.block_sparse_moe.input_linear.weight_scale_inv"
    change_tensors(stored, lambda tensors: tensors.update({name: torch.ones(5)}))
    with pytest.raises(BadCheckpoint, match=r"is \[5\] as F32; .* ask for one, or \[6\], or \[6, 48, 1\]") as error:
        load(stored, True)
    assert error.value.fix.startswith("store the scales so, in")


def test_what_a_delta_net_does_not_quantise_is_counted(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    stored, _ = fp8_files.save_pair(model_directory("qwen3_next"), tmp_path, SCHEMES["compressed channels"], STEPS)
    config = parse_model_config(read_config(stored))
    checkpoint = open_checkpoint(stored, config.packing)
    config = check_checkpoint(checkpoint, config)
    saved_bytes = sum(
        2 * weight.values.numel() - weight.values.nbytes - weight.scales.nbytes
        for weight in loaded_matrices(load(stored, True, torch.bfloat16)).values()
    )
    wanted = 2 * config.num_parameters - saved_bytes
    assert weights_size_bytes(config, ENGINE, CUDA, checkpoint) == wanted


def test_int4_leaves_packed_integers_as_they_are_and_other_schemes_quantise_the_floats(pair: Pair) -> None:
    packed, floats = pair(GPTQ)
    assert tokens_of(packed, quantize="int4") == tokens_of(packed)
    assert tokens_of(packed, quantize="int8") == tokens_of(floats, quantize="int8")
    stored, floats = pair(BLOCKS)
    for scheme in ("int8", "int4"):
        assert tokens_of(stored, quantize=scheme) == tokens_of(floats, quantize=scheme)


def test_a_rounded_weight_is_rounded_once(pair: Pair) -> None:
    stored, floats = pair(BLOCKS)
    wanted = loaded_matrices(load(floats, False, torch.bfloat16))
    for is_kept in (False, True):
        for name, found in loaded_matrices(load(stored, is_kept, torch.bfloat16)).items():
            assert torch.equal(dequantize(found, torch.bfloat16) if is_kept else found, wanted[name])


def test_8_bit_floats_go_to_a_device_in_slices(pair: Pair) -> None:
    stored, _ = pair(BLOCKS)
    streams = LateStreams()
    found, wanted = load(stored, True, fill=StagedCopies(streams, 1024).fill), load(stored, True)
    streams.finish()
    for one, other in zip(loaded_matrices(found).values(), loaded_matrices(wanted).values(), strict=True):
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(one.scales, other.scales)


def test_a_device_keeps_8_bit_floats_and_a_cpu_where_it_is_asked_to(pair: Pair) -> None:
    config = parse_model_config(read_config(pair(WHOLE)[0]))
    for device, found in ((torch.device("cuda"), "fp8"), (CPU, None)):
        assert prequantized_scheme(config, None, device) == found
        assert prequantized_scheme(config, "fp8", device) == "fp8"
        assert prequantized_scheme(config, "int8", device) is prequantized_scheme(config, "int4", device) is None


def test_the_plan_knows_packed_matrices(pair: Pair) -> None:
    directory, _ = pair(GPTQ)
    config = parse_model_config(read_config(directory))
    kept, int4, int8 = (
        weights_size_bytes(config, replace(ENGINE, quantize=scheme), BF16) for scheme in (None, "int4", "int8")
    )
    assert kept == int4 < int8 < 2 * config.num_parameters
    assert estimate(directory, config, ENGINE).weights_bytes == weights_size_bytes(
        config, ENGINE, choose_device(ENGINE)
    )


@pytest.mark.parametrize("scheme", ["blocks", "compressed channels"])
def test_the_plan_knows_which_8_bit_floats_are_kept(scheme: str, pair: Pair) -> None:
    """One matrix of a layer is stored as floats, and so is what it is fused with."""
    stored, floats = pair(SCHEMES[scheme])
    change_tensors(stored, lambda tensors: keep_plain(tensors, floats, "model.layers.1.mlp.up_proj"))
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
    for device, want in ((CUDA, whole_bytes - saved_bytes), (BF16, whole_bytes)):
        assert weights_size_bytes(config, ENGINE, device, checkpoint) == want
    assert memory_needed(config, ENGINE, BF16, checkpoint) > whole_bytes
    kept, plainly = (estimate(stored, config, engine).weights_bytes for engine in (AS_STORED, ENGINE))
    assert kept == weights_size_bytes(config, AS_STORED, choose_device(ENGINE), checkpoint) < plainly == 2 * whole_bytes


def keep_plain(tensors: Tensors, floats: Path, module: str) -> None:
    """Store a matrix as floats, as modules_to_not_convert has it."""
    for name in [name for name in tensors if name.startswith(f"{module}.")]:
        del tensors[name]
    tensors[f"{module}.weight"] = load_file(floats / TENSORS)[f"{module}.weight"]


def test_a_layer_that_is_not_packed_is_read_as_floats(pair: Pair) -> None:
    packed, floats = pair(GPTQ)
    change_tensors(packed, lambda tensors: keep_plain(tensors, floats, "model.layers.1.mlp.down_proj"))
    layers = load_as_served(packed).layers
    assert isinstance(layers[0].mlp.down, QuantizedWeight)
    assert torch.equal(layers[1].mlp.down, load_as_served(floats).layers[1].mlp.down)
    assert tokens_of(packed) == tokens_of(floats)


def test_a_head_may_be_stored_so_too(pair: Pair) -> None:
    stored, floats = pair(BLOCKS)
    values, scale = (torch.arange(300 * 64).view(300, 64) % 17 - 8.0) / 8, torch.full((10, 2), 0.125)
    head = {"lm_head.weight": values.to(torch.float8_e4m3fn), "lm_head.weight_scale_inv": scale}
    change_tensors(stored, lambda tensors: tensors.update(head))
    change_tensors(floats, lambda tensors: tensors.update({"lm_head.weight": values / 8}))
    assert torch.equal(logits_of(stored), logits_of(floats))


def test_a_bias_of_zeros_that_the_architecture_has_not_is_left_out(pair: Pair) -> None:
    packed, floats = pair(GPTQ)
    change_tensors(packed, lambda tensors: tensors.update({f"{MODULE}.bias": torch.zeros(128)}))
    assert tokens_of(packed) == tokens_of(floats)


def put(part: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    """Replace a part of MODULE by what becomes of it."""
    name = f"{MODULE}.{part}"
    return lambda tensors: tensors.update({name: tensor(tensors[name])})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


DAMAGES: dict[str, tuple[dict[str, Any], Callable[[Tensors], object], str]] = {
    "no scales": (PACKED, drop(f"{MODULE}.weight_scale"), "without .*up_proj.weight_scale"),
    "zeros of fewer outputs": (
        UNEVEN,
        put("weight_zero_point", lambda zeros: zeros[1:].clone()),
        r"up_proj.weight_zero_point is \[15, 2\] as I32; .*up_proj.weight_packed asks for \[16, 2\]",
    ),
    "no zeros": (GPTQ, drop(f"{MODULE}.qzeros"), "without .*up_proj.qzeros"),
    "short scales": (
        GPTQ,
        put("scales", lambda scales: scales[:1].clone()),
        r"up_proj.scales is \[1, 128\] as F16; .*up_proj.qweight asks for \[2, 128\]",
    ),
    "groups in an order": (GPTQ, put("g_idx", lambda groups: groups.fill_(7)), "desc_act is not set"),
    "a group that is not there": (
        {**GPTQ, "desc_act": True},
        put("g_idx", lambda groups: groups.index_fill(0, torch.tensor([3]), 2)),
        "not among the 2 there are",
    ),
    "float integers": (GPTQ, put("qweight", torch.Tensor.float), "up_proj.qweight is .* as F32"),
    "a bias that is not zero": (
        GPTQ,
        lambda tensors: tensors.update({f"{MODULE}.bias": torch.ones(128)}),
        "up_proj.bias is not zero",
    ),
    "no matrix": (
        GPTQ,
        drop("model.layers.1.mlp.up_proj.qweight"),
        r"packed: 1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "no scale": (BLOCKS, drop(f"{MODULE}.weight_scale_inv"), "up_proj.weight is stored as F8_E4M3"),
    "a scale of another shape": (
        BLOCKS,
        put("weight_scale_inv", lambda scale: torch.ones(2, 2)),
        r"weight_scale_inv is \[2, 2\] as F32; config.json and its weight ask for \[4, 2\]",
    ),
    "scales where there is one": (
        WHOLE,
        lambda tensors: tensors.update({f"{MODULE}.weight_scale_inv": torch.ones(4, 2)}),
        r"ask for one, or \[128, 1\]",
    ),
    "a scale of bytes": (
        BLOCKS,
        put("weight_scale_inv", lambda scale: torch.ones(4, 2).to(torch.float8_e8m0fnu)),
        "weight_scale_inv is stored as F8_E8M0; supported are F64, F32, F16, BF16, F8_E4M3",
    ),
    "another format": (
        BLOCKS,
        put("weight", lambda weight: weight.to(torch.float8_e5m2)),
        "up_proj.weight is stored as F8_E5M2; supported are F64, F32, F16, BF16, F8_E4M3",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_matrix_is_named(damage: str, pair: Pair) -> None:
    scheme, change, message = DAMAGES[damage]
    directory, _ = pair(scheme)
    change_tensors(directory, change)
    with pytest.raises(BadCheckpoint, match=message):
        load(directory, True)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [(GPTQ, "missing"), (BLOCKS, r"F8_E4M3 where config\.json has a quantization_config")],
    ids=["gptq", "fp8"],
)
def test_without_a_configuration_they_are_refused(scheme: dict[str, Any], message: str, pair: Pair) -> None:
    directory, _ = pair(scheme)
    config = read_config(directory)
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=message):
        load(directory, False)


def test_floats_that_are_not_to_come_take_no_memory_beside_what_does(pair: Pair) -> None:
    """Of a layer's matrices, once the first of its 8-bit floats are read."""
    stored, _ = pair(WHOLE)
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
