"""A checkpoint's tensors to the model's fused parameters. Thread: engine (at start), or main, for an estimate.

Every tensor is accounted for: missing, unexpected and misshaped ones are named. Prequantized matrices are served so
where they can be; others become floats while they load.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from core.config import ModelConfig
from gpu.checkpoint import BYTES, Checkpoint, Progress, TensorSource, bad_checkpoint, is_buffer, named_tensors
from gpu.parallel.ranks import Shard
from gpu.parameters import (
    EMBEDDING,
    HEAD,
    LayerWeights,
    ModelWeights,
    Target,
    empty_ends,
    empty_layer,
    empty_weights,
    end_targets,
    layer_of,
    layer_targets,
    matrices,
    targets,
)
from gpu.quant import FP8, QuantizedWeight, Weight, floats, pack_nibbles, prequantized_group
from gpu.streams import Fill

# The last part of a module's name -> the matrix that it is of; no router, which gates nothing here
_FIELDS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    "o_proj": "output",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("down_proj", "w2"), "down"),
}
SUFFIX = ".weight"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How the layers' matrices are kept.

    Args:
        convert: a matrix to what is kept of it, as soon as its layer is full; None: the matrix.
        serves_prequantized: those that the checkpoint holds quantised stay so where they can: see find_prequantized.
    """

    convert: Callable[[Tensor], Weight] | None = None
    serves_prequantized: bool = False


AS_THEY_ARE = MatrixForm()


def check_checkpoint(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Hold the headers against what the model needs; allocates nothing.

    A tied model may carry its head as well: what is stored beside the embedding is compared with it.

    Returns: the model as the checkpoint has it: untied where it brings another head.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped.
    """
    weights = empty_weights(config, torch.float32, torch.device("meta"))
    _check(checkpoint, targets(config, weights), config)
    if not config.tie_embeddings or HEAD not in checkpoint.tensors:
        return config
    with TensorSource(checkpoint, torch.float32, lambda done, total: None) as source:
        if torch.equal(*(source.numbers(name).float() for name in (HEAD, EMBEDDING))):
            return config
    logger.warning(
        "tie_word_embeddings is true, but %s differs from %s: the head is served as %s has it",
        *(HEAD, EMBEDDING, checkpoint.path),
    )
    return check_checkpoint(checkpoint, replace(config, tie_embeddings=False))


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    form: MatrixForm = AS_THEY_ARE,
    fill: Fill = Target.fill,
    shard: Shard | None = None,
) -> ModelWeights:
    """Fill the model's parameters from the checkpoint, one layer at a time, converting to dtype.

    Args:
        config: of all that the checkpoint holds: see check_checkpoint.
        fill: see TensorSource.
        shard: load this part only; None: all.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped, told before any is read.
    """
    expected = targets(config, empty_weights(config, dtype, torch.device("meta")))
    _check(checkpoint, expected, config)
    part = config if shard is None else shard.config
    head_rows = slice(0, config.vocab_size) if shard is None else shard.head_rows
    weights = empty_ends(part, dtype, device, head_rows.stop - head_rows.start)
    with TensorSource(checkpoint, dtype, progress, fill, None if shard is None else shard.cut) as source:
        for name in _extra_biases(checkpoint, expected):
            if source.tensor(name).any():
                raise bad_checkpoint(
                    f"{checkpoint.path}: {name} is not zero, and the architecture has no such parameter."
                )
        source.fill(end_targets(part, weights))
        for index in range(part.num_layers):
            layer = empty_layer(part, index, dtype, device)
            _load_layer(part, index, layer, source, form)
            weights.layers.append(layer)
        source.finish()
    if shard is not None and config.tie_embeddings:
        weights.lm_head = weights.embedding[head_rows]
    return weights


def _load_layer(config: ModelConfig, index: int, layer: LayerWeights, source: TensorSource, form: MatrixForm) -> None:
    wanted = layer_targets(config, index, layer)
    kept = find_prequantized(config, layer, wanted, source.checkpoint) if form.serves_prequantized else {}
    kept_names = {name for matrix in kept.values() for name in matrix.names}
    source.fill({name: target for name, target in wanted.items() if name not in kept_names})
    if kept:
        wanted.clear()  # it holds the places of floats that are not to come
        load_prequantized(config, index, layer, kept, source)
    if form.convert is not None:
        for owner, name in matrices(layer):
            if name not in kept:
                setattr(owner, name, form.convert(floats(getattr(owner, name))))


def _extra_biases(checkpoint: Checkpoint, wanted: dict[str, Target]) -> set[str]:
    """Early GPTQ tools gave each packed matrix a bias, of zeros where the model has none."""
    packed = {name.removesuffix("weight") + "bias" for name, header in checkpoint.tensors.items() if header.parts}
    return (packed & checkpoint.tensors.keys()) - wanted.keys()


def _check(checkpoint: Checkpoint, wanted: dict[str, Target], config: ModelConfig) -> None:
    missing = sorted(wanted.keys() - checkpoint.tensors.keys())
    if missing:
        raise bad_checkpoint(f"{checkpoint.path}: {len(missing)} tensors are missing: {named_tensors(missing)}.")
    tied = {HEAD} if config.tie_embeddings else set()
    unwanted = checkpoint.tensors.keys() - wanted.keys() - tied - _extra_biases(checkpoint, wanted)
    buffers = sorted(name for name in unwanted if is_buffer(name, checkpoint.tensors[name].shape))
    unexpected = sorted(unwanted.difference(buffers))
    if unexpected:
        raise bad_checkpoint(
            f"{checkpoint.path}: {len(unexpected)} tensors are not this architecture's: {named_tensors(unexpected)}."
        )
    if buffers:
        logger.info("%d buffers of the checkpoint are left out: %s", len(buffers), named_tensors(buffers))
    for name, target in wanted.items():
        header = checkpoint.tensors[name]
        if header.shape != target.shape:
            found, asked = list(header.shape), list(target.shape)
            raise bad_checkpoint(f"{header.file}: {name} has the shape {found}, the configuration asks for {asked}.")
        if (header.format == BYTES) != target.is_packed:
            raise bad_checkpoint(
                f"{header.file}: {name} is stored as {header.format}, which is not the format config.json says."
            )


@dataclass(frozen=True, slots=True)
class PrequantizedMatrix:
    """
    Args:
        names: of the checkpoint's tensors that it is made of.
        group_size: inputs that share a scale.
    """

    names: tuple[str, ...]
    group_size: int


def prequantized_scheme(config: ModelConfig, quantize: str | None, device: torch.device) -> str | None:
    """What --quantize would call that which is stored quantised and served so; None: it becomes floats.

    8-bit floats are for devices: a CPU computes with floats faster, and keeps them where --quantize fp8 asks for it.

    Args:
        quantize: what the operator asks for.
    """
    if config.fp8 is not None:
        return "fp8" if quantize == "fp8" or (quantize is None and device.type != "cpu") else None
    return "int4" if config.packed is not None and config.packed.is_served and quantize in (None, "int4") else None


def find_prequantized(
    config: ModelConfig, layer: LayerWeights, names: Iterable[str], checkpoint: Checkpoint | None
) -> dict[str, PrequantizedMatrix]:
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
        group_size = prequantized_group(config.packing.group_size, floats(getattr(owner, field)).shape[-1])
        is_stored = checkpoint is None or all(checkpoint.tensors[name].parts for name in by_field[field])
        if group_size is not None and is_stored:
            found[field] = PrequantizedMatrix(tuple(by_field[field]), group_size)
    return found


def load_prequantized(
    config: ModelConfig, index: int, layer: LayerWeights, kept: dict[str, PrequantizedMatrix], source: TensorSource
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
        size = prequantized_group(packing.group_size, shape[-1]) if len(shape) > 1 else None
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
            setattr(owner, field, _quantized(dtype, values, groups))


def _quantized(dtype: torch.dtype, values: Tensor, groups: list[Tensor]) -> QuantizedWeight:
    """Of bytes: of 8-bit floats and their scales, or of integers up to 15, their scales and zeros."""
    if len(groups) == 1:
        return QuantizedWeight(dtype, values.view(FP8), *groups)
    return QuantizedWeight(dtype, pack_nibbles(values), *groups)
