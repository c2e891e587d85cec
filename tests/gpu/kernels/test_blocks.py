"""A file's blocks, decoded by Triton's kernels, are the numbers that the file stands for, and multiply as those do."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from core.gguf import BLOCKS
from gpu.blocks import FORMATS, STORED, BlockWeight, PackedBlocks, dequantise, why_not_in_place, write_packed
from gpu.checkpoint import open_checkpoint
from gpu.device import DeviceChoice
from gpu.kernels import matmul
from gpu.kernels.block_formats import LAYOUTS, read_range, read_rows
from gpu.kernels.matmul import BlockRows, DecodedMatmul, GroupedExperts, Matmul, can_group, can_multiply, stored_as
from gpu.kernels.operators import TritonOperators
from gpu.kernels.sizes import SMALL_ROWS, splits_for
from gpu.layers import GATED
from gpu.linear import make_linear
from gpu.memory_plan import plan_checkpoint, plan_memory
from gpu.operators import Operators
from gpu.parameters import ExpertWeights, layer_without, matrices
from gpu.quant import DEVICE_SLAB_BYTES, Weight
from gpu.runner import ModelRunner
from gpu.weights import MatrixForm, check_checkpoint, describe_blocks, load_weights, names_in_blocks
from tests.gguf_files import Q, random_blocks, write_gguf
from tests.gpu.conftest import ENGINE, load_whole, no_progress
from tests.gpu.driver import Driver
from tests.gpu.kernels.test_experts import EXPERTS, HIDDEN, noise
from tests.gpu.kernels.test_matmul import rows_of
from tests.gpu.kernels.test_sizes import CUDA, hopper
from tests.gpu.operator_cases import CONFIG
from tests.gpu.test_gguf import model_of

__all__ = ["hopper"]  # a fixture


def numbers_of(name: str, stored: torch.Tensor) -> torch.Tensor:
    return dequantise(name, stored.reshape(-1, BLOCKS[name][1])).view(len(stored), -1)


def packed_of(name: str, stored: torch.Tensor, device: torch.device) -> PackedBlocks:
    found, (num_out, row_bytes) = FORMATS[name], stored.shape
    num_chunks = -(-num_out // 64)
    whole = torch.nn.functional.pad(stored, (0, 0, 0, 64 * num_chunks - num_out)).to(device)
    into = torch.empty((num_chunks, row_bytes // found.size_bytes, 64 * found.size_bytes), dtype=torch.uint8)
    write_packed(name, into := into.to(device), whole.view(num_chunks, -1))
    return PackedBlocks(name, into, num_out)


def matrix_of(
    name: str, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device
) -> tuple[BlockWeight, torch.Tensor]:
    """Random blocks, and the matrix that they become where they are dequantised."""
    stored = random_blocks(name, num_out, num_in)
    return BlockWeight(dtype, (packed_of(name, stored, device),)), numbers_of(name, stored).to(device, dtype)


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Of zeros the sign too, which torch.equal does not see."""
    return torch.equal(found, wanted) and torch.equal(found.signbit(), wanted.signbit())


def sizes_of(name: str) -> list[tuple[int, int]]:
    """Outputs that end within a chunk, inputs of one block; several chunks and blocks, whose rows no tile divides."""
    elements = FORMATS[name].elements
    return [(70, elements), (128, 5 * elements)]


@pytest.fixture
def same_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain matrices and of blocks: what is added in which order does not differ."""
    for kind in ("SMALL", "LARGE", "FIXED"):
        tiles = getattr(matmul, f"{kind}_TILES")
        for bits in (16, 32):
            monkeypatch.setitem(tiles, bits, replace(tiles[bits], outputs=64, inputs=32))
        monkeypatch.setattr(matmul, f"{kind}_BLOCK_TILE", tiles[16])


def test_every_format_of_a_file_has_a_layout() -> None:
    assert LAYOUTS.keys() == STORED.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_decoded_rows_are_the_files_numbers_bit_by_bit(name: str, dtype: torch.dtype, device: torch.device) -> None:
    for num_out, num_in in sizes_of(name):
        weight, numbers = matrix_of(name, num_out, num_in, dtype, device)
        (part,) = weight.parts
        assert same_bits(read_range(part, 0, numbers.new_empty(numbers.shape)), numbers)
        assert same_bits(read_range(part, 64, numbers.new_empty(2, num_in)), numbers[64:66])
        chosen = torch.tensor([num_out - 1, 0, 63, 0], device=device)
        assert same_bits(BlockRows(weight)(chosen), numbers[chosen])
        assert read_rows(part, chosen[:0], dtype).shape == (0, num_in)


def test_every_exponent_of_mxfp4_is_its_power_of_two(device: torch.device) -> None:
    stored = random_blocks("MXFP4", 64, 32 * 256)
    stored.view(64, 256, 17)[:, :, 0] = torch.arange(256, dtype=torch.uint8).clamp(max=250)  # 12 times it is finite
    found = read_range(packed_of("MXFP4", stored, device), 0, torch.empty(64, 32 * 256, device=device))
    assert same_bits(found.cpu(), numbers_of("MXFP4", stored))


@pytest.mark.usefixtures("same_tiles")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matmul_has_the_bits_of_the_dequantised_matrix(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """By few rows in parts of the inputs, and by many; half of the formats as --deterministic has it, in each dtype."""
    elements, is_fixed = FORMATS[name].elements, (list(LAYOUTS).index(name) % 2 == 0) == (dtype == torch.float32)
    weight, numbers = matrix_of(name, 70, 4 * 256 if elements == 256 else 1056, dtype, device)
    assert splits_for(70, weight.shape[1], matmul.as_matrices(weight, None)[0].tile(1)) > 1
    bias = rows_of(1, 70, dtype, device)[0]
    for num_rows in (3, SMALL_ROWS + 1):
        x = rows_of(num_rows, weight.shape[1], dtype, device)
        found = Matmul(weight, bias, is_fixed)(x)
        assert torch.equal(found, Matmul(numbers, bias, is_fixed)(x))
        assert found.isfinite().all()


def parts_of(
    sizes: dict[str, int], num_in: int, dtype: torch.dtype, device: torch.device
) -> tuple[BlockWeight, torch.Tensor]:
    found = [matrix_of(name, num_out, num_in, dtype, device) for name, num_out in sizes.items()]
    parts = tuple(part for weight, _ in found for part in weight.parts)
    return BlockWeight(dtype, parts), torch.cat([numbers for _, numbers in found])


@pytest.mark.usefixtures("same_tiles")
def test_parts_of_several_formats_are_one_matrix(dtype: torch.dtype, device: torch.device) -> None:
    weight, numbers = parts_of({"Q4_K": 128, "Q6_K": 40, "Q8_0": 64}, 512, dtype, device)
    assert can_multiply(weight)
    assert stored_as(weight) == ("Q4_K + Q6_K + Q8_0", 2 * (128 * 144 + 64 * 210) + 16 * 64 * 34)
    x, bias = rows_of(SMALL_ROWS + 3, 512, dtype, device), rows_of(1, 232, dtype, device)[0]
    for rows in (x, x[:2], x[:0]):
        assert torch.equal(Matmul(weight, bias)(rows), Matmul(numbers, bias)(rows))


def test_torch_multiplies_what_was_decoded_a_slab_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs of fewer outputs than the parts have."""
    monkeypatch.setattr(matmul, "DEVICE_SLAB_BYTES", 64 * 512 * 4)
    weight, numbers = parts_of({"Q5_K": 192, "Q4_0": 100}, 512, torch.float32, device)
    x, bias = rows_of(5, 512, torch.float32, device), rows_of(1, 292, torch.float32, device)[0]
    assert torch.allclose(DecodedMatmul(weight, bias)(x), torch.nn.functional.linear(x, numbers, bias), rtol=1e-4)


@pytest.mark.usefixtures("same_tiles")
def test_experts_of_blocks_have_the_bits_of_their_matrices(dtype: torch.dtype, device: torch.device) -> None:
    """Of two formats, and of one, whose outputs end within a block of them."""
    num_experts = EXPERTS.num_experts

    def stack(names: tuple[str, ...], num_out: int, num_in: int) -> tuple[BlockWeight, torch.Tensor]:
        parts, numbers = list[PackedBlocks](), list[torch.Tensor]()
        for place, name in enumerate(names):
            stored = random_blocks(name, num_experts * num_out, num_in + 32 * place)[
                :, : num_in // 32 * BLOCKS[name][1]
            ]
            experts = stored.view(num_experts, num_out, -1)
            own = [packed_of(name, expert, device).packed for expert in experts]
            parts.append(PackedBlocks(name, torch.stack(own), num_out))
            numbers.append(torch.stack([numbers_of(name, expert) for expert in experts]).to(device, dtype))
        return BlockWeight(dtype, tuple(parts), num_experts), torch.cat(numbers, 1)

    (gate_up, of_gate_up), (down, of_down) = stack(("Q4_0", "Q5_1"), 32, HIDDEN), stack(("Q8_0",), HIDDEN, 32)
    biases = [noise(place, num_experts, 64).to(device, dtype) for place in (1, 2)]
    router = noise(3, num_experts, HIDDEN).to(device, dtype)

    def experts(gate_up: Weight, down: Weight) -> GroupedExperts:
        weights = ExpertWeights(router, None, gate_up, biases[0], down, biases[1])
        assert can_group(weights)
        return GroupedExperts(EXPERTS, weights, GATED["silu"], make_linear(router, None))

    for num_tokens in (2, SMALL_ROWS + 3):
        x = noise(num_tokens, num_tokens, HIDDEN).to(device, dtype)
        assert torch.equal(experts(gate_up, down)(x), experts(of_gate_up, of_down)(x))
    assert torch.equal(Matmul(gate_up[3], None)(x), Matmul(of_gate_up[3], None)(x))


def test_a_row_of_any_number_is_multiplied_in_the_same_way(dtype: torch.dtype, device: torch.device) -> None:
    weight, _ = parts_of({"Q4_K": 64, "Q6_K": 40}, 1024, dtype, device)
    x, multiply = rows_of(70, 1024, dtype, device), Matmul(weight, None, is_fixed=True)
    together = multiply(x)
    for first, count in ((0, 1), (69, 1), (5, SMALL_ROWS + 1), (63, 2)):
        assert torch.equal(multiply(x[first:][:count].clone()), together[first:][:count])


def open_file(file: Path, device: torch.device, operators_of: type[Operators], in_blocks: bool) -> ModelRunner:
    """In float32; blocks as a GPU's loading has them, or as floats."""
    choice = DeviceChoice(device, "", torch.float32, "", 1, "")
    checkpoint = open_checkpoint(file)
    config = check_checkpoint(checkpoint, model_of(file))
    memory = plan_memory(config, ENGINE, choice, checkpoint.size_bytes, 1 << 30)
    form = MatrixForm(serves_blocks=in_blocks, blocks_on=device if in_blocks else None)
    with torch.inference_mode():
        weights = load_weights(checkpoint, config, torch.float32, device, no_progress, form)
    if operators_of is TritonOperators:
        return ModelRunner(config, ENGINE, memory, weights, TritonOperators(config, torch.float32, device))
    return ModelRunner(config, ENGINE, memory, weights, Operators(torch.float32, device, config.rms_norm_eps))


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize(("family", "kind"), [("llama2", Q.Q4_0), ("mixtral", Q.Q8_0)])
def test_a_file_in_blocks_says_what_it_says_as_floats(
    family: str, kind: Q, model_directory: Callable[[str], Path], tmp_path: Path, device: torch.device
) -> None:
    """Embedding and head too; a prompt of more rows than the small tile has, and few rows."""
    file = write_gguf(model_directory(family), tmp_path / "model.gguf", kind)
    prompts = [(37 * place) % 290 + 3 for place in range(20)], [250]
    found, wanted = (
        (driver := Driver(open_file(file, device, *how))).generate(4, *(driver.add(list(one)) for one in prompts))
        for how in ((TritonOperators, True), (Operators, False))
    )
    assert found == wanted


@pytest.mark.parametrize(("family", "kind"), [("llama2", Q.Q4_0), ("mixtral", Q.Q8_0)])
def test_what_is_loaded_is_the_files_blocks_in_few_pieces(
    family: str, kind: Q, model_directory: Callable[[str], Path], tmp_path: Path, device: torch.device
) -> None:
    """Each is the matrix that floats would be."""
    file = write_gguf(model_directory(family), tmp_path / "model.gguf", kind)
    checkpoint = open_checkpoint(file)
    config = check_checkpoint(checkpoint, model_of(file))
    blocks, floats = (
        load_whole(checkpoint, config, torch.float32, device, no_progress, MatrixForm(None, False, is_so, on))
        for is_so, on in ((True, device), (False, None))
    )
    assert isinstance(blocks.embedding, BlockWeight)
    num_blocks = 0
    for own, plain in zip(blocks.layers, floats.layers, strict=True):
        for (owner, name), (plain_owner, _) in zip(matrices(own), matrices(plain), strict=True):
            weight, wanted = getattr(owner, name), getattr(plain_owner, name)
            if wanted.shape[-1] % 32:  # no whole blocks
                assert torch.equal(weight, wanted)
                continue
            assert can_multiply(weight)
            num_blocks += len(weight.parts)
            one_by_one = [weight] if weight.num_stacked is None else [weight[place] for place in range(len(wanted))]
            rows = [
                read_range(part, 0, wanted.new_empty(part.num_out, part.num_in))
                for one in one_by_one
                for part in one.parts
            ]
            assert torch.equal(torch.cat(rows).view(wanted.shape), wanted)
    assert 3 * config.num_layers <= num_blocks <= 6 * config.num_layers


def test_matrices_in_blocks_get_no_other_memory(
    model_directory: Callable[[str], Path], tmp_path: Path, device: torch.device
) -> None:
    file = write_gguf(model_directory("mixtral"), tmp_path / "model.gguf", Q.Q8_0)
    checkpoint = open_checkpoint(file)
    config = check_checkpoint(checkpoint, model_of(file))
    names = partial(names_in_blocks, checkpoint=checkpoint)
    layer, targets = layer_without(config, 0, torch.float32, device, names)
    left_out = names(targets).keys()
    assert {"gate_up", "qkv"} <= left_out
    for owner, name in matrices(layer):
        assert (getattr(owner, name).device.type == "meta") == (name in left_out)
    assert {target.into.device.type for target in targets.values()} == {"meta", device.type}
    assert layer.attention_norm is not None
    assert layer.attention_norm.device.type == device.type


def test_the_plan_counts_a_files_blocks_on_a_device(
    model_directory: Callable[[str], Path], tmp_path: Path, hopper: None
) -> None:
    file = write_gguf(model_directory("llama2"), tmp_path / "model.gguf", Q.Q4_0)
    checkpoint = open_checkpoint(file)
    config = check_checkpoint(checkpoint, model_of(file))
    in_blocks, in_floats = (
        plan_checkpoint(config, replace(ENGINE, activations=kind), CUDA, checkpoint, 1 << 32).weights_bytes
        for kind in ("auto", "bf16")
    )
    assert in_floats == 2 * config.num_parameters
    stored = [tensor for tensor in checkpoint.tensors.values() if tensor.format == "Q4_0"]
    saved = sum(2 * math.prod(tensor.shape) - tensor.size_bytes for tensor in stored)
    assert in_blocks == in_floats - saved + DEVICE_SLAB_BYTES
    said = describe_blocks(checkpoint, None, "as bfloat16")
    assert re.match(r"Q4_0 \d+% as stored, multiplied by activations as bfloat16", said)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, None),
        ({"activations": "int8"}, None),
        ({"activations": "bf16"}, "--activations bf16"),
        ({"quantize": "int8"}, "--quantize int8"),
        ({"tensor_parallel": 2}, "--tensor-parallel"),
    ],
)
def test_what_makes_blocks_floats_on_a_device_is_told(settings: dict[str, Any], why: str | None, hopper: None) -> None:
    assert why_not_in_place(CONFIG, replace(ENGINE, **settings), CUDA) == why
    assert why_not_in_place(replace(CONFIG, head_dim=33), ENGINE, CUDA) is not None
