"""Problems of products with matrices, plain and quantised, and of experts; see gpu_problems.py."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from bench.gpu_problems import Problem, noise
from core.config import ExpertsConfig
from gpu.layers import GATED, Experts
from gpu.linear import Linear, make_linear
from gpu.parameters import ExpertWeights
from gpu.quant import FP8, MAX_FP8, QuantizedWeight, Weight, dequantize, quantize


def product(
    generator: Generator, dtype: torch.dtype, matrix: str, form: str, rows: int, bias: bool = True, **size: int
) -> Problem:
    """size: out and in; matrix: a word of which one it is."""
    from gpu.kernels.matmul import Matmul, stored_as
    from gpu.quant import SlabLinear

    num_out, num_in = size["out"], size["in"]
    weight = stored(generator, dtype, form, num_out, num_in)
    x, added = noise(generator, dtype, rows, num_in), noise(generator, dtype, num_out) if bias else None
    kernel = Matmul(weight, added)
    torchs: Linear = (
        SlabLinear(weight, added) if isinstance(weight, QuantizedWeight) else make_linear(weight, added, None)
    )
    return Problem(
        dtype,
        lambda: kernel(x),
        lambda: (F.linear(x.float(), _exact(weight), None if added is None else added.float()),),
        stored_as(weight)[1] + x.nbytes + rows * num_out * dtype.itemsize,
        2.0 * rows * num_out * num_in,
        peer=lambda: torchs(x),
    )


def stored(generator: Generator, dtype: torch.dtype, form: str, *shape: int) -> Weight:
    """A matrix, or a stack of them, of numbers of about 1 / sqrt(inputs).

    Args:
        form: "plain", what quantize() makes, or "fp8 by N" and "int4 by N": as checkpoints have it, N inputs that
            share a scale.
    """
    scheme, _, size = form.partition(" by ")
    if scheme == "int4" and size:
        return _int4(generator, dtype, int(size), *shape)
    plain = noise(generator, dtype, *shape).mul_(shape[-1] ** -0.5)
    if form == "plain":
        return plain
    if not size:
        return quantize(plain, scheme)
    groups = plain.float().view(*shape[:-1], -1, int(size))
    scales = groups.abs().amax(-1) / MAX_FP8
    return QuantizedWeight(plain.dtype, groups.div_(scales.unsqueeze(-1)).to(FP8).flatten(-2), scales)


def _int4(generator: Generator, dtype: torch.dtype, group: int, *shape: int) -> QuantizedWeight:
    """Any numbers are some matrix's."""
    *rows, num_in = shape
    values = torch.randint(0, 256, (*rows, num_in // 2), generator=generator, device=generator.device)
    scales = noise(generator, torch.float32, *rows, num_in // group).abs_() + 0.5
    zeros = noise(generator, torch.float32, *rows, num_in // group)
    size = 0.2 * num_in**-0.5
    return QuantizedWeight(dtype, values.to(torch.uint8), (size * scales).bfloat16(), (size * zeros).bfloat16())


def _exact(weight: Weight) -> Tensor:
    return dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()


def experts(
    generator: Generator,
    dtype: torch.dtype,
    rows: int,
    hidden: int,
    experts: int,
    active: int,
    width: int,
    form: str,
    activation: str = "silu",
    bias: bool = False,
) -> Problem:
    """All choose by the same scores: what the router's rounding decides is not the kernels'."""
    from gpu.kernels.matmul import GroupedExperts, stored_as

    config = ExpertsConfig(experts, active, width, "qwen3_moe")
    gate_up = stored(generator, dtype, form, experts, 2 * width, hidden)
    down = stored(generator, dtype, form, experts, hidden, width)
    biases = [noise(generator, dtype, experts, size) if bias else None for size in (2 * width, hidden)]
    x, scores = noise(generator, dtype, rows, hidden), noise(generator, torch.float32, rows, experts)
    weights = ExpertWeights(scores[:1], None, gate_up, biases[0], down, biases[1])
    kernel = GroupedExperts(config, weights, GATED[activation], lambda _: scores)

    def reference() -> tuple[Tensor]:
        def make(weight: Weight, bias: Tensor | None) -> Linear:
            if weight is weights.router:
                return lambda _: scores
            return partial(F.linear, weight=_exact(weight), bias=None if bias is None else bias.float())

        return (Experts(config, weights, GATED[activation], make)(x.float()),)

    num_touched = min(experts, rows * active)
    num_bytes = (stored_as(gate_up)[1] + stored_as(down)[1]) * num_touched / experts
    return Problem(dtype, lambda: kernel(x), reference, num_bytes + 2 * x.nbytes, 6.0 * rows * active * width * hidden)
