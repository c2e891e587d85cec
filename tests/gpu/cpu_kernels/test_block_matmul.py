"""Matrices of a file's blocks are the numbers that the file stands for, and multiply so, whatever the rows."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

from core.gguf import BLOCKS
from gpu.blocks import FORMATS, BlockWeight, PackedBlocks
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from gpu.quant import QuantizedWeight, dequantize, pack_nibbles, quantize
from tests.gguf_files import random_blocks

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.block_matmul import BlockMatmul, pack_blocks, pack_quantized


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def numbers_of(name: str, stored: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(stored.numpy(), getattr(gguf.GGMLQuantizationType, name)))


def packed_of(name: str, num_out: int, num_in: int) -> tuple[PackedBlocks, torch.Tensor]:
    """A random matrix, and the numbers that it stands for."""
    if name in BLOCKS:
        stored = random_blocks(name, num_out, num_in)
        return pack_blocks(name, stored), numbers_of(name, stored)
    values = torch.randint(0, 16, (num_out, num_in), generator=torch.Generator().manual_seed(num_in)).byte()
    groups = num_out, num_in // FORMATS[name].elements
    scales, zeros = noise(*groups).bfloat16(), noise(*groups, 1).squeeze(-1).bfloat16()
    weight = QuantizedWeight(torch.bfloat16, pack_nibbles(values), scales, zeros)
    packed = pack_quantized(weight)
    assert packed is not None
    assert packed.format == name
    return packed, dequantize(weight, torch.float32)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """What is left of rows in 8 bits, a scale for 32 numbers."""
    groups = x.float().view(len(x), x.shape[1] // 32, 32)
    most = groups.abs().amax(-1, keepdim=True)
    integers = (groups * (127 / most).nan_to_num(0, 0, 0)).round()
    return (integers * (most / 127)).flatten(1)


def shapes_of(name: str) -> list[tuple[int, int]]:
    """Whole blocks of outputs and not, whole parts of inputs and not."""
    elements = FORMATS[name].elements
    return [(64, 256), (70, elements), (200, 5 * elements), (128, 768)]


@pytest.mark.parametrize("name", [name for name in FORMATS if name in BLOCKS])
def test_a_block_of_64_outputs_has_each_field_of_all_of_them_and_zeros_for_those_that_are_missing(name: str) -> None:
    found = FORMATS[name]
    for num_out, num_in in shapes_of(name):
        stored = random_blocks(name, num_out, num_in)
        wide = torch.zeros(-(-num_out // 64) * 64, *stored.shape[1:], dtype=torch.uint8)
        wide[:num_out] = stored
        if found.signed is not None:
            wide.view(-1, found.size_bytes)[: num_out * num_in // found.elements, found.signed :] ^= 128
        blocks = wide.view(-1, 64, num_in // found.elements, found.size_bytes).transpose(1, 2)
        fields = [
            blocks[..., first : first + width]  # [64 outputs, blocks, 64, bytes]
            for width, count, place in found.fields
            for first in range(place, place + width * count, width)
        ]
        wanted = torch.cat([field.flatten(2) for field in fields], 2)
        assert torch.equal(pack_blocks(name, stored).packed, wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_files_numbers_bit_by_bit(name: str) -> None:
    for shape in shapes_of(name):
        packed, numbers = packed_of(name, *shape)
        matmul = BlockMatmul(BlockWeight(torch.float32, (packed,)), None)
        assert torch.equal(matmul.rows(torch.arange(shape[0])), numbers)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("group_size", [32, 64, 96, 256])
def test_what_is_quantised_is_packed_with_its_numbers(scheme: str, group_size: int) -> None:
    made = quantize(noise(70, 768) / 10 + 0.1, scheme)
    groups = [
        None if of is None else of[:, : 768 // group_size].contiguous() for of in (made.scales, made.zeros)
    ]  # of other sizes: as files have them
    assert groups[0] is not None
    weight = QuantizedWeight(torch.bfloat16, made.values, groups[0], groups[1])
    packed = pack_quantized(weight)
    assert packed is not None
    rows = BlockMatmul(BlockWeight(torch.float32, (packed,)), None).rows(torch.arange(70))
    assert torch.equal(rows, dequantize(weight, torch.float32))


def test_other_quantised_matrices_are_left_to_slabs() -> None:
    for weight in (
        quantize(noise(64, 64), "fp8"),
        quantize(noise(64, 36), "int8"),
        quantize(noise(8, 32) * 1e9, "int8"),
    ):
        assert pack_quantized(weight) is None


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_matmuls_are_the_files_numbers_times_rows_in_8_bits(
    name: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    for num_out, num_in in shapes_of(name):
        (packed, numbers), bias = packed_of(name, num_out, num_in), noise(num_out)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)):
            matmul = BlockMatmul(BlockWeight(dtype, (packed,)), bias.to(dtype))
            for num_rows in (0, 1, 2, 5, 6, 7, 33):
                x = noise(num_rows, num_in).to(dtype)
                want = rounded_rows(x) @ numbers.T + bias.to(dtype).float()
                most = float(want.abs().max()) if num_rows else 1.0
                assert torch.allclose(matmul(x).float(), want, rtol=tolerance, atol=2 * tolerance * most)


def test_parts_of_several_formats_are_one_matrix() -> None:
    sizes = {"Q4_K": 192, "Q6_K": 70, "Q8_0": 64, "Q4_0": 10}
    stored = {name: random_blocks(name, size, 512) for name, size in sizes.items()}
    parts = tuple(pack_blocks(name, rows) for name, rows in stored.items())
    numbers, x = torch.cat([numbers_of(*item) for item in stored.items()]), noise(9, 512)
    matmul = BlockMatmul(BlockWeight(torch.float32, parts), None)
    want = rounded_rows(x) @ numbers.T
    assert torch.allclose(matmul(x), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_rounded_the_same_in_any_company(name: str) -> None:
    matmul = BlockMatmul(BlockWeight(torch.bfloat16, (packed_of(name, 192, 1024)[0],)), None)
    x = noise(600, 1024).bfloat16()
    whole = matmul(x)
    for first, end in ((0, 1), (3, 10), (90, 200), (500, 600), (599, 600), (0, 32), (0, 17)):
        assert torch.equal(matmul(x[first:end]), whole[first:end])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_row_alone(bad: float) -> None:
    matmul = BlockMatmul(BlockWeight(torch.bfloat16, (pack_blocks("Q4_0", random_blocks("Q4_0", 64, 256)),)), None)
    x = noise(3, 256).bfloat16()
    alone = matmul(x)
    x[1, 77] = bad
    found = matmul(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], alone[[0, 2]])


OTHER_CPU = """
import sys
from gpu import device
device.cpu_flags = lambda: frozenset({"avx2", "fma", "f16c"})
import pytest
chosen = "(rows_are or company or (matmuls and not -2)) and (Q8_0 or MXFP4 or Q3_K or Q4_K or INT4_64)"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512bw" not in cpu_flags(), reason="this CPU is one: the tests above are the same")
def test_a_cpu_without_avx512_computes_the_same(tmp_path: Path) -> None:
    """The same tests of a format of each kind, compiled for a CPU that has AVX2 only."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", OTHER_CPU, __file__]
    assert subprocess.run(command, env=environment, timeout=900, check=False).returncode == 0
