"""Matrices that a checkpoint holds quantised and that are served so: which they are, and how they are read.

What does not stay as it is becomes floats while it loads. Thread: engine (at start), or main, for an estimate.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.config import ModelConfig
from gpu.checkpoint import Checkpoint, TensorSource
from gpu.layer_weights import LayerWeights, layer_of, layer_targets, matrices
from gpu.quantize import FP8, QuantizedWeight, floats, kept_group, pack_nibbles, split_groups

# The last part of a module's name -> the matrix that it is of; no router, which gates nothing here
_FIELDS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    "o_proj": "output",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("down_proj", "w2"), "down"),
}
SUFFIX = ".weight"


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """
    Args:
        names: of the checkpoint's tensors that it is made of.
        group_size: inputs that share a scale.
    """

    names: tuple[str, ...]
    group_size: int


def kept_scheme(config: ModelConfig, quantize: str | None, device: torch.device) -> str | None:
    """What --quantize would call that which is stored quantised and served so; None: it becomes floats.

    8-bit floats are for devices: a CPU computes with floats faster, and keeps them where --quantize fp8 asks for it.

    Args:
        quantize: what the operator asks for.
    """
    if config.fp8 is not None:
        return "fp8" if quantize == "fp8" or (quantize is None and device.type != "cpu") else None
    return "int4" if config.packed is not None and config.packed.is_kept and quantize in (None, "int4") else None


def find_kept(
    config: ModelConfig, layer: LayerWeights, names: Iterable[str], checkpoint: Checkpoint | None
) -> dict[str, KeptMatrix]:
    """A layer's matrices that can stay, by their field: all that it is made of is stored quantised.

    Args:
        layer: not filled yet; of the rank's part.
        names: of the layer's tensors.
        checkpoint: None: all that may be stored quantised is.
    """
    by_field: dict[str, list[str]] = {}
    for name in names:
        field = _FIELDS.get(name.removesuffix(SUFFIX).rpartition(".")[2])
        if field is not None and not name.endswith("bias"):
            by_field.setdefault(field, []).append(name)
    assert config.packing is not None
    found = {}
    for owner, field in matrices(layer):
        group_size = kept_group(config.packing.group_size, floats(getattr(owner, field)).shape[-1])
        is_stored = checkpoint is None or all(checkpoint.tensors[name].parts for name in by_field[field])
        if group_size is not None and is_stored:
            found[field] = KeptMatrix(tuple(by_field[field]), group_size)
    return found


def load_kept(
    config: ModelConfig, index: int, layer: LayerWeights, kept: dict[str, KeptMatrix], source: TensorSource
) -> None:
    """Read numbers, scales and zeros into layers of their own, with the same order of rows, and put them together.

    The floats that were allocated for them go first: a layer's memory is not needed twice.
    """
    packing = config.packing
    assert packing is not None
    dtype, device = floats(layer.qkv).dtype, floats(layer.qkv).device
    for owner, field in matrices(layer):
        if field in kept:
            setattr(owner, field, torch.empty(0))

    def empty_groups(shape: tuple[int, ...]) -> Tensor:
        size = kept_group(packing.group_size, shape[-1]) if len(shape) > 1 else None
        scale_dtype = torch.float32 if config.fp8 is not None else dtype
        return torch.empty((*shape[:-1], shape[-1] // (size or 1)), dtype=scale_dtype, device=device)

    empty_values = partial(torch.empty, dtype=torch.uint8, device=device)
    empties = (empty_values, empty_groups) if config.fp8 is not None else (empty_values, empty_groups, empty_groups)
    layers = [layer_of(config, index, empty, empty) for empty in empties]
    all_targets = [layer_targets(config, index, part) for part in layers]
    for matrix in kept.values():
        source.fill_parts(
            [{name: targets[name] for name in matrix.names} for targets in all_targets], matrix.group_size
        )
    for (owner, field), *parts in zip(matrices(layer), *map(matrices, layers), strict=True):
        if field in kept:
            values, *groups = (floats(getattr(part, name)) for part, name in parts)
            setattr(owner, field, _weight(dtype, values, groups))


def _weight(dtype: torch.dtype, values: Tensor, groups: list[Tensor]) -> QuantizedWeight:
    """Of bytes: of 8-bit floats and their scales, or of integers up to 15, their scales and zeros."""
    if len(groups) == 1:
        return QuantizedWeight(dtype, values.view(FP8), *groups)
    return split_groups(QuantizedWeight(dtype, pack_nibbles(values), *groups))
