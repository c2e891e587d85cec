"""The parameters of a layer with experts, and how the families name and store them. Thread: engine (at start)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from core.config import ExpertsConfig
from gpu.quantize import Weight, floats
from gpu.targets import (
    MXFP4_BLOCK,
    Target,
    write_mxfp4_blocks,
    write_mxfp4_scales,
    write_paired,
    write_transposed,
)

Empty = Callable[[tuple[int, ...]], Tensor]

# family -> the router, and of each expert gate, up and down
_NAMES = {
    "mixtral": (
        "block_sparse_moe.gate",
        tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
    ),
    "qwen3_moe": ("mlp.gate", tuple(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
}


@dataclass(slots=True)
class ExpertWeights:
    """A router and its experts; biases are None where the family has none."""

    router: Tensor  # [experts, hidden]
    router_bias: Tensor | None  # [experts]
    gate_up: Weight  # [experts, 2 * width, hidden]
    gate_up_bias: Tensor | None  # [experts, 2 * width]
    down: Weight  # [experts, hidden, width]
    down_bias: Tensor | None  # [experts, hidden]


def empty_experts(config: ExpertsConfig, hidden_size: int, empty: Empty) -> ExpertWeights:
    num_experts, width = config.num_experts, config.intermediate_size
    return ExpertWeights(
        router=empty((num_experts, hidden_size)),
        router_bias=empty((num_experts,)) if config.has_bias else None,
        gate_up=empty((num_experts, 2 * width, hidden_size)),
        gate_up_bias=empty((num_experts, 2 * width)) if config.has_bias else None,
        down=empty((num_experts, hidden_size, width)),
        down_bias=empty((num_experts, hidden_size)) if config.has_bias else None,
    )


def expert_targets(config: ExpertsConfig, weights: ExpertWeights) -> Iterator[tuple[str, Target]]:
    """The layer's tensors by name."""
    if config.layout == "gpt_oss":
        yield from _gpt_oss_targets(config, weights)
        return
    router, names = _NAMES[config.layout]
    gate_up, down = floats(weights.gate_up), floats(weights.down)
    yield f"{router}.weight", Target(weights.router)
    for expert in range(config.num_experts):
        for name, rows in zip(names, (*gate_up[expert].chunk(2), down[expert]), strict=True):
            yield f"{name.format(expert)}.weight", Target(rows)


def _gpt_oss_targets(config: ExpertsConfig, weights: ExpertWeights) -> Iterator[tuple[str, Target]]:
    """All experts in one tensor, [in, out] or as blocks; rows of gate and up take turns."""
    yield "mlp.router.weight", Target(weights.router)
    if weights.router_bias is not None and weights.gate_up_bias is not None and weights.down_bias is not None:
        yield "mlp.router.bias", Target(weights.router_bias)
        yield "mlp.experts.gate_up_proj_bias", Target(weights.gate_up_bias, write=write_paired)
        yield "mlp.experts.down_proj_bias", Target(weights.down_bias)
    for name, into, are_pairs in (("gate_up", floats(weights.gate_up), True), ("down", floats(weights.down), False)):
        prefix, (num_experts, num_out, num_in) = f"mlp.experts.{name}_proj", into.shape
        if not config.is_mxfp4:
            write = partial(write_transposed, are_pairs=are_pairs)
            yield prefix, Target(into, write=write, stored_shape=(num_experts, num_in, num_out))
            continue
        blocks = (num_experts, num_out, num_in // MXFP4_BLOCK)
        write = partial(write_mxfp4_blocks, are_pairs=are_pairs)
        yield f"{prefix}_blocks", Target(into, write=write, stored_shape=(*blocks, MXFP4_BLOCK // 2), is_packed=True)
        write = partial(write_mxfp4_scales, are_pairs=are_pairs)
        yield f"{prefix}_scales", Target(into, write=write, stored_shape=blocks, is_packed=True, is_scale=True)
