"""config.json's quantization_config of checkpoints with 8-bit floats (e4m3): understood completely, or refused by name.

Only weights are read so. Scales of activations, of keys and of values are left out: those stay in the serving format.
Which matrices are stored so, the files say; lists of modules that are not are therefore not read. Any thread.

Sources: transformers, FineGrainedFP8Config; AutoFP8, its config.json; compressed-tensors, QuantizationArgs. What the
numbers are: arXiv:2209.05433.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config_fields import bad_field, read_quantization, refuse_others, unsupported_field

# Fields that change what the tensors mean, and the values under which they do not.
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "scale_fmt": ("float", "ue8m0", None),  # powers of two are floats, too
        "expert_dtype": ("fp8", None),
    },
    "compressed-tensors": {"format": ("float-quantized",), "transform_config": ({}, None)},
}
METHODS = tuple(_NEUTRAL)
_NEUTRAL_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "strategy": ("tensor", "channel", "block"),
}


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """How a checkpoint's matrices are scaled: weight = value * scale.

    Args:
        block: (outputs, inputs) that share a scale, from the first on, the last perhaps fewer; None: a scale for each
            output, or one for all.
    """

    block: tuple[int, int] | None

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None: all of a row."""
        return None if self.block is None else self.block[1]


def parse_fp8(config: Mapping[str, Any]) -> Fp8Config | None:
    """None: the checkpoint is not of these methods.

    Raises:
        UnsupportedModel, BadCheckpoint: it is, but in a variant that is not read, or that no one can read.
    """
    given = read_quantization(config, _NEUTRAL)
    if given is None:
        return None
    if given["quant_method"] == "fp8":
        return Fp8Config(_block(given.get("weight_block_size"), "quantization_config.weight_block_size"))
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, Mapping):
        refuse_others(sparsity, {"format": ("dense", None)}, "quantization_config.sparsity_config")
    return _parse_groups(given.get("config_groups"))


def _parse_groups(groups: object) -> Fp8Config:
    """Of compressed-tensors: which modules are of which group does not matter where all are stored alike."""
    if not isinstance(groups, Mapping) or not groups:
        raise bad_field(f"quantization_config.config_groups={groups!r} names no group.")
    found = [_parse_group(group, f"quantization_config.config_groups.{name}") for name, group in groups.items()]
    if len(set(found)) > 1:
        blocks = sorted({str(each.block) for each in found})
        raise unsupported_field("quantization_config.config_groups: block_structure", blocks, ("one for all groups",))
    return found[0]


def _parse_group(group: object, name: str) -> Fp8Config:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise bad_field(f"{name} does not say how weights are stored.")
    refuse_others(group, {"format": ("float-quantized", None)}, name)
    refuse_others(weights, _NEUTRAL_WEIGHTS, f"{name}.weights")
    if weights["strategy"] != "block":
        return Fp8Config(None)
    block = _block(weights.get("block_structure"), f"{name}.weights.block_structure")
    if block is None:
        raise bad_field(f"{name}.weights.block_structure is missing.")
    return Fp8Config(block)


def _block(given: object, name: str) -> tuple[int, int] | None:
    """[outputs, inputs], or "128x128" as older compressed-tensors write it."""
    if given is None:
        return None
    sizes = given.split("x") if isinstance(given, str) else given
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_size(size) for size in sizes):
        raise bad_field(f"{name}={given!r} is not two sizes.")
    return int(sizes[0]), int(sizes[1])


def _is_size(size: object) -> bool:
    is_number = isinstance(size, int) and not isinstance(size, bool)
    return (is_number or (isinstance(size, str) and size.isdecimal())) and int(str(size)) > 0
