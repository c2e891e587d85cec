"""Random inputs for each kernel, how it is launched, and what it should give: torch's, in float32.

Those of a layer; attention, sampling and the table of all builders are in gpu_token_problems.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from core.config import ExpertsConfig, ModelConfig, RopeConfig
from gpu.expert_weights import ExpertWeights
from gpu.kv_cache import LayerKV
from gpu.linear import Linear, make_linear
from gpu.mlp import GATED, Experts
from gpu.operators import Operators
from gpu.quantize import FP8, MAX_FP8, QuantizedWeight, Weight, dequantize, quantize
from gpu.rope import Rope

EPS = 1e-6
THETA = 500_000.0
SPARE_BLOCKS = 16
BLOCK = 16  # tokens

Launch = Callable[[], Any]


class NotHere(Exception):
    """There is no such kernel in this tree, or it does not know the shape: which, and why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel on one set of inputs.

    Args:
        launch: what is timed.
        reference: what it is to give, computed by torch in float32.
        num_bytes, flops: that it must at least read and write, and compute.
        outputs: what was launched gave -> the tensors to compare.
        peer: torch's operators for the same, in dtype; None: none is worth a look.
        tolerance: None: the dtype's.
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


def add_norm(generator: Generator, dtype: torch.dtype, rows: int, width: int) -> Problem:
    x, added, weight = (noise(generator, dtype, *shape) for shape in ((rows, width), (rows, width), (width,)))
    kernels, torchs = _kernels(dtype, x.device), Operators(dtype, x.device, EPS)

    def reference() -> tuple[Tensor, Tensor]:
        total = (x.float() + added.float()).to(dtype).float()  # what is normed was rounded
        return total, F.rms_norm(total, (width,), weight.float(), EPS)

    return Problem(
        dtype,
        lambda: kernels.add_norm(x, added, 1.0, weight),
        reference,
        4 * x.nbytes + weight.nbytes,
        peer=lambda: torchs.add_norm(x, added, 1.0, weight),
    )


def rotate_and_store(
    generator: Generator, dtype: torch.dtype, rows: int, heads: int, kv_heads: int, head_dim: int, norm: str
) -> Problem:
    """Into slots in random order; what lies beside them must stay as it is."""
    device = generator.device
    qkv = noise(generator, dtype, rows, heads + 2 * kv_heads, head_dim)
    norms = (noise(generator, dtype, head_dim), noise(generator, dtype, head_dim)) if norm == "head" else None
    num_blocks = rows // BLOCK + SPARE_BLOCKS
    slots = torch.randperm(num_blocks * BLOCK, generator=generator, device=device)[:rows]
    positions = torch.randint(0, 8192, (rows,), generator=generator, device=device)
    rotation = Rope(RopeConfig(THETA), head_dim, device).rotation(positions.float())

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
        2 * qkv.nbytes + rotation.nbytes,
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


def embed(generator: Generator, dtype: torch.dtype, rows: int, vocab: int, width: int) -> Problem:
    from gpu.kernels.device_rows import embed_rows

    table = noise(generator, dtype, vocab, width)
    token_ids = torch.randint(0, vocab, (rows,), generator=generator, device=generator.device)
    return Problem(
        dtype,
        lambda: embed_rows(table, token_ids),
        lambda: (table[token_ids].float(),),
        2 * rows * width * dtype.itemsize,
        peer=lambda: F.embedding(token_ids, table),
        tolerance=0.0,
    )


def decoding_rows(generator: Generator, dtype: torch.dtype, rows: int, slots: int, width: int) -> Problem:
    """What a step of decodes reads; the last row is padding, every other token is what its slot drew last."""
    from gpu.kernels.device_rows import SpareBlocks, empty_rows, fill_rows

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, device=generator.device)

    tables, last = draw(1000, slots, width).int(), draw(1000, slots)
    step = torch.stack([torch.randperm(slots, generator=generator, device=generator.device)[:rows]] * 3).int()
    step[1], step[2] = draw(width * BLOCK, rows), draw(1000, rows)
    step[2, ::2] = -1
    step[:, -1] = -1
    filled = empty_rows(rows, rows, width, step.new_zeros((2, rows)).long())
    real, positions, spare = step[0, :-1].long(), step[1, :-1].long(), SpareBlocks(1000, 1001)

    def reference() -> tuple[Tensor, ...]:
        is_used = torch.arange(width, device=step.device) <= (positions // BLOCK)[:, None]
        blocks = torch.where(is_used, tables[real], spare.scratch)
        first = tables[real, positions // BLOCK].long() * BLOCK + positions % BLOCK
        tokens = torch.where(step[2, :-1] < 0, last[real], step[2, :-1])
        wanted = (tokens, first, positions + 1, F.pad(blocks, (0, 0, 0, 1), value=spare.scratch))
        return tuple(part.float() for part in wanted)

    return Problem(
        dtype,
        lambda: fill_rows(filled, step, tables, last, spare),
        reference,
        2 * filled.tables.nbytes,
        outputs=lambda _: (filled.token_ids[:-1], filled.kv_slots[:-1], filled.ends[:-1], filled.tables),
        tolerance=0.0,
    )


def prompt_tokens(generator: Generator, dtype: torch.dtype, tokens: int, slots: int, width: int) -> Problem:
    """What tokens of prompts read; the last is padding."""
    from gpu.kernels.device_rows import SpareBlocks, empty_rows, fill_tokens

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, device=generator.device)

    tables, last = draw(1000, slots, width).int(), draw(1000, slots)
    step = torch.stack([draw(slots, tokens), draw(width * BLOCK, tokens), draw(1000, tokens)]).int()
    step[:, -1] = -1
    filled = empty_rows(1, tokens, width, step.new_zeros((2, 1)).long())
    real, positions = step[0, :-1].long(), step[1, :-1].long()

    def reference() -> tuple[Tensor, ...]:
        places = tables[real, positions // BLOCK].long() * BLOCK + positions % BLOCK
        return tuple(part.float() for part in (step[2, :-1], places, positions))

    return Problem(
        dtype,
        lambda: fill_tokens(filled, 0, step, tables, last, SpareBlocks(1000, 1001)),
        reference,
        step.nbytes + 20 * tokens,
        outputs=lambda _: (filled.token_ids[:-1], filled.kv_slots[:-1], filled.positions[:-1]),
        tolerance=0.0,
    )


def scatter(generator: Generator, dtype: torch.dtype, rows: int, slots: int, width: int) -> Problem:
    """One row is padding."""
    from gpu.kernels.device_rows import scatter_rows

    table, new = noise(generator, dtype, slots, width), noise(generator, dtype, rows, width)
    places = torch.randperm(slots, generator=generator, device=generator.device)[:rows]
    places[rows // 2] = -1
    wanted = table.float()
    wanted[places[places >= 0]] = new[places >= 0].float()
    return Problem(
        dtype,
        lambda: scatter_rows(table, places, new),
        lambda: (wanted,),
        2 * new.nbytes,
        outputs=lambda _: (table,),
        tolerance=0.0,
    )


def product(generator: Generator, dtype: torch.dtype, matrix: str, form: str, rows: int, **size: int) -> Problem:
    """size: out and in; matrix: a word of which one it is."""
    from gpu.kernels.product import Product, stored_as
    from gpu.quantized_linear import SlabLinear

    num_out, num_in = size["out"], size["in"]
    plain = noise(generator, dtype, num_out, num_in)
    weight = _stored(plain, form)
    del plain
    x, bias = noise(generator, dtype, rows, num_in), noise(generator, dtype, num_out)
    kernel = Product(weight, bias)
    torchs: Linear = (
        SlabLinear(weight, bias) if isinstance(weight, QuantizedWeight) else make_linear(weight, bias, None)
    )
    return Problem(
        dtype,
        lambda: kernel(x),
        lambda: (F.linear(x.float(), _exact(weight), bias.float()),),
        stored_as(weight)[1] + x.nbytes + rows * num_out * dtype.itemsize,
        2.0 * rows * num_out * num_in,
        peer=lambda: torchs(x),
    )


def _stored(plain: Tensor, form: str) -> Weight:
    """form: "plain", what quantize() makes, or "fp8 by N": as checkpoints have it, N inputs that share a scale."""
    if form == "plain":
        return plain
    scheme, _, size = form.partition(" by ")
    if not size:
        return quantize(plain, scheme)
    groups = plain.float().view(len(plain), -1, int(size))
    scales = groups.abs().amax(-1) / MAX_FP8
    return QuantizedWeight(plain.dtype, groups.div_(scales.unsqueeze(-1)).to(FP8).flatten(1), scales)


def _exact(weight: Weight) -> Tensor:
    return dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()


def experts(
    generator: Generator, dtype: torch.dtype, rows: int, hidden: int, experts: int, active: int, width: int
) -> Problem:
    """All choose by the same scores: what the router's rounding decides is not the kernels'."""
    from gpu.kernels.experts import GroupedExperts

    config = ExpertsConfig(experts, active, width, "qwen3_moe")
    gate_up = noise(generator, dtype, experts, 2 * width, hidden) * hidden**-0.5
    down = noise(generator, dtype, experts, hidden, width) * width**-0.5
    x, scores = noise(generator, dtype, rows, hidden), noise(generator, torch.float32, rows, experts)
    weights = ExpertWeights(scores[:1], None, gate_up, None, down, None)
    kernel = GroupedExperts(config, weights, GATED["silu"], lambda _: scores)

    def by_torch(of: torch.dtype) -> Experts:
        def make(weight: Weight, bias: Tensor | None) -> Linear:
            assert isinstance(weight, Tensor)
            return (lambda _: scores) if weight is weights.router else partial(F.linear, weight=weight.to(of))

        return Experts(config, weights, GATED["silu"], make)

    num_touched = min(experts, rows * active) if rows * active < experts else experts
    num_numbers = num_touched * 3 * width * hidden
    return Problem(
        dtype,
        lambda: kernel(x),
        lambda: (by_torch(torch.float32)(x.float()),),
        num_numbers * dtype.itemsize + 2 * x.nbytes,
        6.0 * rows * active * width * hidden,
    )


LAYER_BUILDERS: Mapping[str, Callable[..., Problem]] = {
    "add_norm": add_norm,
    "rotate_and_store": rotate_and_store,
    "gate": gate,
    "embed": embed,
    "decoding_rows": decoding_rows,
    "prompt_tokens": prompt_tokens,
    "scatter": scatter,
    "product": product,
    "experts": experts,
}
