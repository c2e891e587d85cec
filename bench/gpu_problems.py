"""Random inputs for each kernel, how it is launched, and what it should give: torch's, in float32.

What a problem is, and those of what lies between a layer's products. Products, looked-up rows, attention and sampling
have files of their own; gpu_kernels.py has the table of all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from core.config import ModelConfig, RopeConfig
from gpu.kv_cache import LayerKV
from gpu.layers import GATED, Rope
from gpu.operators import Operators

EPS = 1e-6
THETA = 500_000.0
SPARE_BLOCKS = 16
BLOCK = 16  # tokens

Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel on one set of inputs.

    Args:
        launch: what is timed.
        reference: what it is to give, computed by torch in float32.
        num_bytes, flops: that it must at least read and write, and compute.
        outputs: what was launched gave -> the tensors to compare.
        peer: torch's operators for the same, in dtype; None: none is worth a look.
        tolerance: None: the dtype's; 0: to the last bit, and the error is the share of numbers that differ.
    """

    dtype: torch.dtype
    launch: Launch
    reference: Callable[[], tuple[Tensor, ...]]
    num_bytes: float
    flops: float = 0.0
    outputs: Callable[[Any], tuple[Tensor, ...]] = lambda out: (out,) if isinstance(out, Tensor) else tuple(out)
    peer: Launch | None = None
    tolerance: float | None = None


def noise(generator: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def _kernels(dtype: torch.dtype, device: torch.device) -> Operators:
    """TritonOperators; what it computes takes its sizes from what it is given."""
    from gpu.kernels.operators import TritonOperators

    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_position=1 << 17,
        rms_norm_eps=EPS,
        rope=RopeConfig(THETA),
    )
    return TritonOperators(config, dtype, device)


def add_norm(
    generator: Generator, dtype: torch.dtype, rows: int, width: int, scale: float = 1.0, weight: bool = True
) -> Problem:
    x, added = (noise(generator, dtype, rows, width) for _ in range(2))
    by = noise(generator, dtype, width) if weight else None
    kernels, torchs = _kernels(dtype, x.device), Operators(dtype, x.device, EPS)

    def reference() -> tuple[Tensor, Tensor]:
        total = x.float() + scale * added.float()
        if by is None:
            return total, total
        rounded = total.to(dtype).float()  # what is normed was rounded
        return total, F.rms_norm(rounded, (width,), by.float(), EPS)

    return Problem(
        dtype,
        lambda: kernels.add_norm(x, added, scale, by),
        reference,
        (4 if weight else 3) * x.nbytes,
        peer=lambda: torchs.add_norm(x, added, scale, by),
    )


def norm(generator: Generator, dtype: torch.dtype, rows: int, width: int) -> Problem:
    x, weight = noise(generator, dtype, rows, width), noise(generator, dtype, width)
    kernels = _kernels(dtype, x.device)
    return Problem(
        dtype,
        lambda: kernels.norm(x, weight),
        lambda: (F.rms_norm(x.float(), (width,), weight.float(), EPS),),
        2 * x.nbytes,
    )


def rotate_and_store(
    generator: Generator,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm: str,
    turns: bool = True,
) -> Problem:
    """Into slots in random order; what lies beside them must stay as it is.

    Args:
        norm: "none", of each "head" by itself, or of "all" heads together.
    """
    device = generator.device
    qkv = noise(generator, dtype, rows, heads + 2 * kv_heads, head_dim)
    norms: tuple[Tensor, Tensor] | None = None
    if norm != "none":
        of_query, of_key = ((heads,), (kv_heads,)) if norm == "all" else ((), ())
        norms = noise(generator, dtype, *of_query, head_dim), noise(generator, dtype, *of_key, head_dim)
    num_blocks = rows // BLOCK + SPARE_BLOCKS
    slots = torch.randperm(num_blocks * BLOCK, generator=generator, device=device)[:rows]
    positions = torch.randint(0, 8192, (rows,), generator=generator, device=device)
    rotation = Rope(RopeConfig(THETA), head_dim, device).rotation(positions.float()) if turns else None

    def empty_kv(of: torch.dtype) -> LayerKV:
        both = torch.full((2, num_blocks, BLOCK, kv_heads, head_dim), float("nan"), dtype=of, device=device)
        return LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))

    def found(query: Tensor, kv: LayerKV) -> tuple[Tensor, ...]:
        return query, kv.keys.nan_to_num(0), kv.values.nan_to_num(0)

    def reference() -> tuple[Tensor, ...]:
        exact, operators = empty_kv(torch.float32), Operators(torch.float32, device, EPS)
        in_float = None if norms is None else (norms[0].float(), norms[1].float())
        return found(operators.rotate_and_store(qkv.float(), in_float, rotation, exact, slots), exact)

    kernels, torchs, kv, peer_kv = _kernels(dtype, device), Operators(dtype, device, EPS), *map(empty_kv, [dtype] * 2)
    return Problem(
        dtype,
        lambda: kernels.rotate_and_store(qkv, norms, rotation, kv, slots),
        reference,
        2 * qkv.nbytes + (0 if rotation is None else rotation.nbytes),
        outputs=lambda query: found(query, kv),
        peer=lambda: torchs.rotate_and_store(qkv, norms, rotation, peer_kv, slots),
    )


def gate(generator: Generator, dtype: torch.dtype, rows: int, width: int, activation: str) -> Problem:
    gate_up = 4 * noise(generator, dtype, rows, 2 * width)
    kernel, torchs = _kernels(dtype, gate_up.device).gated(activation), GATED[activation]
    return Problem(
        dtype,
        lambda: kernel(gate_up),
        lambda: (torchs(gate_up.float()),),
        gate_up.nbytes * 1.5,
        peer=lambda: torchs(gate_up),
    )
