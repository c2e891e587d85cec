"""A checkpoint's tensors to the model's fused parameters. Thread: engine (at start).

Every tensor is accounted for: missing, unexpected and misshaped ones are named.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.config import ModelConfig
from gpu.checkpoint import (
    BYTES,
    Checkpoint,
    Progress,
    TensorSource,
    bad_checkpoint,
    is_buffer,
    named_tensors,
)
from gpu.kept_matrices import find_kept, load_kept
from gpu.layer_weights import (
    EMBEDDING,
    LayerWeights,
    ModelWeights,
    empty_ends,
    empty_layer,
    empty_weights,
    end_targets,
    layer_targets,
    matrices,
    targets,
)
from gpu.parallel.ranks import HEAD, Shard
from gpu.quantize import Weight, floats
from gpu.streams import Fill
from gpu.targets import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How the layers' matrices are kept.

    Args:
        convert: a matrix to what is kept of it, as soon as its layer is full; None: the matrix.
        is_packed_kept: those that the checkpoint holds quantised stay so where they can: see gpu.kept_matrices.
    """

    convert: Callable[[Tensor], Weight] | None = None
    is_packed_kept: bool = False


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
    kept = find_kept(config, layer, wanted, source.checkpoint) if form.is_packed_kept else {}
    kept_names = {name for matrix in kept.values() for name in matrix.names}
    source.fill({name: target for name, target in wanted.items() if name not in kept_names})
    if kept:
        wanted.clear()  # it holds the places of floats that are not to come
        load_kept(config, index, layer, kept, source)
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
