"""Loads a checkpoint's tensors into the model's fused parameters. Thread: engine (at start), or main, for an estimate.

Accounts for every tensor: names the missing, unexpected and misshaped ones. Prequantized matrices are served so where
they can be; the others become floats while they load.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from core.config import ModelConfig
from core.prequantized import Fp8Config
from gpu.blocks import BLOCK_OUTPUTS, FORMATS, BlockWeight, PackedBlocks
from gpu.checkpoint import BYTES, FLOATS, Checkpoint, Progress, TensorSource, bad_checkpoint, is_buffer, named_tensors
from gpu.parallel.ranks import Shard
from gpu.parameters import (
    BY_ROWS,
    EMBEDDING,
    HEAD,
    INPUTS,
    SPLIT,
    STACKED_BY_ROWS,
    Empty,
    LayerWeights,
    ModelWeights,
    MtpWeights,
    Target,
    Targets,
    empty_ends,
    empty_layer,
    empty_mtp,
    empty_weights,
    first_matrix,
    has_stacked_experts,
    layer_of,
    layer_without,
    matrices,
)
from gpu.quant import FP8, QuantizedWeight, Weight, floats, pack_nibbles, prequantized_group
from gpu.streams import Fill

logger = logging.getLogger(__name__)
_DRAFT_LAYER = re.compile(r"(model|mtp)\.layers\.\d+|model\.mtp_\w+")


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How the layers' matrices are kept.

    Args:
        convert: quantises a matrix, as soon as its layer is full; None: matrices stay floats.
        serves_prequantized: keep what the checkpoint stores quantised where possible: see find_prequantized.
        serves_blocks: keep a GGUF file's blocks where possible: see names_in_blocks.
        blocks_on: the GPU that packs blocks, parts of one format and matrices of a stack in one piece; None: packed for
            a CPU.
    """

    convert: Callable[[Tensor], Weight] | None = None
    serves_prequantized: bool = False
    serves_blocks: bool = False
    blocks_on: torch.device | None = None


AS_THEY_ARE = MatrixForm()


def check_checkpoint(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Hold the headers against what the model needs; allocates nothing.

    The head of a tied model that stores one is compared with the embedding.

    Returns: the model as the checkpoint has it: untied if its head differs.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped.
    """
    layout, stored = None if config.experts is None else config.experts.layout, checkpoint.tensors
    if layout == BY_ROWS and has_stacked_experts(stored):
        layout = STACKED_BY_ROWS
    if layout in SPLIT and any(".experts.0." in name for name in stored):
        layout = SPLIT[layout]
    if config.experts is not None and layout is not None:
        config = replace(config, experts=replace(config.experts, layout=layout))
    if config.latent is not None and any(name.endswith(".k_b_proj.weight") for name in stored):
        config = replace(config, latent=replace(config.latent, is_split=True))
    if config.recurrence is not None and any(name.endswith(".in_proj_qkv.weight") for name in stored):
        config = replace(config, recurrence=replace(config.recurrence, is_split=True))
    if config.recurrence is not None and _has_float_steps(checkpoint):
        config = replace(config, recurrence=replace(config.recurrence, has_float_steps=True))
    _check(checkpoint, config)
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


def _has_float_steps(checkpoint: Checkpoint) -> bool:
    """See RecurrentConfig."""
    found = {(name.rpartition(".in_proj_")[2], bool(header.parts)) for name, header in checkpoint.tensors.items()}
    has_steps = any((f"{end}.weight", False) in found for end in ("a", "b", "ba"))
    return has_steps and any((f"{end}.weight", True) in found for end in ("qkv", "qkvz"))


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
    """Fill the model's parameters from the checkpoint, converting to dtype. A layer is read when it is taken.

    Args:
        config: the whole checkpoint's, as check_checkpoint returns it.
        progress: see TensorSource.
        fill: see TensorSource.
        shard: load this part only; None: all.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped; before any is read.
    """
    extra_biases = _check(checkpoint, config)
    part = config if shard is None else shard.config
    head_rows = slice(0, config.vocab_size) if shard is None else shard.head_rows
    without = [] if form.blocks_on is None else _ends_in_blocks(checkpoint)
    weights, targets = empty_ends(part, dtype, device, head_rows.stop - head_rows.start, without)
    cut = None if shard is None else shard.cut
    with TensorSource(checkpoint, dtype, progress, fill, cut) as source:
        for name in extra_biases:
            if source.tensor(name).any():
                raise bad_checkpoint(
                    f"{checkpoint.path}: {name} is not zero, and the architecture has no such parameter."
                )
        if form.serves_blocks:
            _load_blocks_of_ends(weights, targets, source, dtype, form.blocks_on)
        source.fill(targets)
    if shard is not None and config.tie_embeddings:
        weights.lm_head = floats(weights.embedding)[head_rows]

    def empty(index: int) -> tuple[LayerWeights, Targets]:
        if form.blocks_on is None:
            return empty_layer(part, index, dtype, device)
        return layer_without(part, index, dtype, device, partial(names_in_blocks, checkpoint=checkpoint))

    def layers() -> Iterator[LayerWeights]:
        with source:
            for index in range(part.num_layers):
                yield _load_layer(part, index, source, form, *empty(index))
            source.finish()

    weights.layers = layers()
    return weights


def mtp_size_bytes(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> int:
    """Of the head that predicts later tokens (MtpWeights), unquantised; 0: the checkpoint has none that is served."""
    if not config.num_draft_layers and config.recurrence is None:
        return 0
    _, targets = empty_mtp(config, dtype, torch.device("meta"), checkpoint.tensors)
    wrong = sorted(
        name
        for name, target in targets.items()
        if name not in checkpoint.tensors or checkpoint.tensors[name].shape != target.shape
    )
    if wrong:
        if len(wrong) < len(targets):
            logger.warning("the head that predicts later tokens is left out: it lacks %s", named_tensors(wrong))
        return 0
    return sum(target.into.nbytes for target in targets.values())


def load_mtp(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    convert: Callable[[Tensor], Weight] | None,
) -> MtpWeights:
    """Fill it; mtp_size_bytes has found it whole."""
    weights, targets = empty_mtp(config, dtype, device, checkpoint.tensors)
    with TensorSource(checkpoint, dtype, lambda done, total: None) as source:
        _load_layer(config, 0, source, MatrixForm(convert), weights.layer, targets)
    return weights


def names_in_blocks(targets: Targets, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """A layer's matrices whose tensors are all stored in blocks that are multiplied so -> their tensors, in order."""
    found: dict[str, list[str]] = {}
    for name, target in targets.items():
        if target.matrix is not None:
            found.setdefault(target.matrix, []).append(name)
    return {
        matrix: names
        for matrix, names in found.items()
        if all(checkpoint.tensors[name].format in FORMATS and targets[name].is_as_stored for name in names)
    }


def ends_in_blocks(targets: Targets, checkpoint: Checkpoint) -> list[str]:
    """Embeddings and head, those of them that are stored so."""
    return [name for name in _ends_in_blocks(checkpoint) if name in targets]


def _ends_in_blocks(checkpoint: Checkpoint) -> list[str]:
    stored = checkpoint.tensors
    return [name for name in (EMBEDDING, HEAD, INPUTS) if name in stored and stored[name].format in FORMATS]


def describe_blocks(checkpoint: Checkpoint, why_not: str | None, activations: str) -> str:
    """A GGUF file's formats, the largest first, and what becomes of them.

    Args:
        why_not: blocks become floats, as a phrase; None: those of FORMATS stay.
        activations: their format, as a phrase.
    """
    sizes = Counter[str]()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.format] += tensor.size_bytes
    total = max(1, sizes.total())
    kept, others = list[str](), list[str]()
    for name, size in sizes.most_common():
        if name not in FLOATS:
            (kept if name in FORMATS and why_not is None else others).append(f"{name} {size / total:.0%}")
    said = [f"{', '.join(kept)} as stored, multiplied by activations {activations}"] if kept else []
    if others:
        said.append(f"{', '.join(others)} dequantized while loading" + (f": {why_not}" if why_not else ""))
    return "; ".join(said) or "floats"


def _load_blocks_of_ends(
    weights: ModelWeights, targets: Targets, source: TensorSource, dtype: torch.dtype, device: torch.device | None
) -> None:
    """Load what is stored in blocks, and take it from the targets. device: see MatrixForm.blocks_on."""
    is_tied = weights.lm_head is weights.embedding
    for name in ends_in_blocks(targets, source.checkpoint):
        found = BlockWeight(dtype, _load_parts([name], None, targets, source, device))
        if name == INPUTS and weights.inputs is not None:
            weights.inputs.embedding = found
        if name == EMBEDDING:
            weights.embedding = found
        if name == HEAD or (name == EMBEDDING and is_tied):
            weights.lm_head = found


def _load_parts(
    names: list[str], num_stacked: int | None, targets: Targets, source: TensorSource, device: torch.device | None
) -> tuple[PackedBlocks, ...]:
    """A matrix, or a stack, of these tensors, which are taken from the targets. device: see MatrixForm.blocks_on."""
    if device is None:
        return tuple(source.blocks(name, targets.pop(name)) for name in names)
    headers = [source.checkpoint.tensors[name] for name in names]
    kinds, per_matrix = [(header.format, header.shape[0]) for header in headers], len(names) // (num_stacked or 1)
    pieces = _joined(kinds[:per_matrix])
    if kinds != kinds[:per_matrix] * (num_stacked or 1):  # its matrices differ: none are stacked
        pieces, per_matrix, num_stacked = [[place] for place in range(len(names))], len(names), None
    parts = list[PackedBlocks]()
    for places in pieces:
        (name, _), sizes = kinds[places[0]], [kinds[place][1] for place in places]
        found, num_chunks = FORMATS[name], [-(-size // BLOCK_OUTPUTS) for size in sizes]
        shape = sum(num_chunks), headers[places[0]].shape[-1] // found.elements, BLOCK_OUTPUTS * found.size_bytes
        packed = torch.empty((num_stacked or 1, *shape), dtype=torch.uint8, device=device)
        for matrix, rows in enumerate(packed):
            for place, into in zip(places, rows.split(num_chunks), strict=True):
                tensor = names[matrix * per_matrix + place]
                source.fill_blocks(tensor, targets.pop(tensor), into)
        parts.append(PackedBlocks(name, packed if num_stacked else packed[0], sum(sizes)))
    return tuple(parts)


def _joined(kinds: list[tuple[str, int]]) -> list[list[int]]:
    """Which of a matrix's tensors lie in one piece, by place: of one format, 64 outputs at a time but for the last.

    Args:
        kinds: (format, outputs).
    """
    found = list[list[int]]()
    for place, (name, _) in enumerate(kinds):
        before = kinds[place - 1]
        if place and before[0] == name and before[1] % BLOCK_OUTPUTS == 0:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def _load_blocks(
    layer: LayerWeights, targets: Targets, source: TensorSource, dtype: torch.dtype, device: torch.device | None
) -> None:
    """Load a layer's matrices that are stored in blocks, and take them from the targets."""
    found = names_in_blocks(targets, source.checkpoint)
    for owner, matrix in matrices(layer):
        if matrix in found:
            shape = floats(getattr(owner, matrix)).shape
            setattr(owner, matrix, torch.empty(0))  # nothing was written to it: it has taken no memory
            num_stacked = shape[0] if len(shape) > 2 else None
            parts = _load_parts(found[matrix], num_stacked, targets, source, device)
            setattr(owner, matrix, BlockWeight(dtype, parts, num_stacked))


def _load_layer(
    config: ModelConfig, index: int, source: TensorSource, form: MatrixForm, layer: LayerWeights, targets: Targets
) -> LayerWeights:
    kept = find_prequantized(config, layer, targets, source.checkpoint) if form.serves_prequantized else {}
    if form.serves_blocks:
        _load_blocks(layer, targets, source, first_matrix(layer).dtype, form.blocks_on)
    source.fill({name: target for name, target in targets.items() if target.matrix not in kept})
    if kept:
        targets.clear()  # the floats that they hold go, before the quantised matrices come
        _load_prequantized(config, index, layer, kept, source)
    if form.convert is not None:
        for owner, name in matrices(layer):
            if name not in kept:
                setattr(owner, name, form.convert(floats(getattr(owner, name))))
    return layer


def _extra_biases(checkpoint: Checkpoint, wanted: dict[str, Target]) -> set[str]:
    """Early GPTQ tools stored a bias for each packed matrix, zeros where the model has none."""
    packed = {name.removesuffix("weight") + "bias" for name, header in checkpoint.tensors.items() if header.parts}
    return (packed & checkpoint.tensors.keys()) - wanted.keys()


def _check(checkpoint: Checkpoint, config: ModelConfig) -> set[str]:
    """
    Returns: biases that must be zero: see _extra_biases.

    Raises:
        BadCheckpoint: see check_checkpoint.
    """
    _, wanted = empty_weights(config, torch.float32, torch.device("meta"))
    missing = sorted(wanted.keys() - checkpoint.tensors.keys())
    if missing:
        raise bad_checkpoint(f"{checkpoint.path}: {len(missing)} tensors are missing: {named_tensors(missing)}.")
    tied = {HEAD} if config.tie_embeddings else set()
    extra_biases = _extra_biases(checkpoint, wanted)
    drafts = {name for name in checkpoint.tensors if name.startswith(_draft_prefixes(config))}
    unwanted = checkpoint.tensors.keys() - wanted.keys() - tied - extra_biases - drafts - _unread(config)
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
    return extra_biases


def _unread(config: ModelConfig) -> set[str]:
    """What published checkpoints have of layers that attend over the keys and values of another."""
    shared = [index for index, layer in enumerate(config.layers) if layer.source is not None]
    names = [f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm")]
    return {f"model.layers.{index}.{name}" for index in shared for name in names}


def _draft_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Of layers that predict later tokens: behind the others, or ERNIE's."""
    layers = range(config.num_layers, config.num_layers + config.num_draft_layers)
    own = ("mtp.",) if config.recurrence is not None else ("model.mtp_",) if layers else ()
    return (*(f"model.layers.{index}." for index in layers), *own)


def heads_left_out(checkpoint: Checkpoint, config: ModelConfig, is_first_served: bool) -> list[str]:
    """The checkpoint's layers that predict later tokens and are not served, by their names."""
    drafts = (name for name in checkpoint.tensors if name.startswith(_draft_prefixes(config)))
    found = sorted({match[0] for name in drafts if (match := _DRAFT_LAYER.match(name))})
    first = {f"model.layers.{config.num_layers}", "mtp.layers.0"} if is_first_served else set()
    return [name for name in found if name not in first]


def prequantized_scheme(config: ModelConfig, quantize: str | None, device: torch.device) -> str | None:
    """How prequantized matrices are served, in the words of --quantize; None: they become floats.

    8-bit floats are for GPUs: a CPU computes faster with floats, and serves 8-bit floats only for --quantize fp8.

    Args:
        quantize: the setting.
    """
    packing = config.packing
    if isinstance(packing, Fp8Config):
        return "fp8" if quantize == "fp8" or (quantize is None and device.type != "cpu") else None
    return "int4" if packing is not None and packing.is_served and quantize in (None, "int4") else None


def find_prequantized(
    config: ModelConfig, layer: LayerWeights, targets: Targets, checkpoint: Checkpoint | None
) -> dict[str, int]:
    """A layer's matrices that can stay quantised, because all of their tensors are stored so.

    Args:
        layer: not filled yet; the rank's part.
        targets: the layer's tensors.
        checkpoint: None: assume that all that may be stored quantised is.

    Returns:
        By the matrix's name, how many inputs share a scale.
    """
    assert config.packing is not None
    found = {}
    for owner, matrix in matrices(layer):
        names = [name for name, target in targets.items() if target.matrix == matrix]
        group_size = prequantized_group(config.packing.group_size, floats(getattr(owner, matrix)).shape[-1])
        is_stored = checkpoint is None or all(checkpoint.tensors[name].parts for name in names)
        is_stored = is_stored and all(targets[name].write is None for name in names)
        if names and group_size is not None and is_stored:
            found[matrix] = group_size
    return found


def _load_prequantized(
    config: ModelConfig, index: int, layer: LayerWeights, kept: dict[str, int], source: TensorSource
) -> None:
    """Read values, scales and zeros into layers of their own, whose rows are ordered alike, and join them.

    The floats that were allocated for them are freed first, so that a layer's memory is not needed twice.
    """
    packing = config.packing
    assert packing is not None
    is_fp8 = isinstance(packing, Fp8Config)
    like = first_matrix(layer)
    dtype, device = like.dtype, like.device
    del like
    for owner, matrix in matrices(layer):
        if matrix in kept:
            setattr(owner, matrix, torch.empty(0))

    def empty_groups(shape: tuple[int, ...]) -> Tensor:
        size = prequantized_group(packing.group_size, shape[-1]) if len(shape) > 1 else None
        scale_dtype = torch.float32 if is_fp8 else dtype
        return torch.empty((*shape[:-1], shape[-1] // (size or 1)), dtype=scale_dtype, device=device)

    empties: dict[str, Empty] = {"values": partial(torch.empty, dtype=torch.uint8, device=device)}
    empties |= dict.fromkeys(("scales",) if is_fp8 else ("scales", "zeros"), empty_groups)
    parts = {part: layer_of(config, index, empty, empty) for part, empty in empties.items()}
    for name, target in parts["values"][1].items():
        if target.matrix in kept:
            into = {part: targets[name] for part, (_, targets) in parts.items()}
            into["values"] = replace(target, factor=None)  # it is of the scales, and of the zeros
            source.fill_parts(name, into, kept[target.matrix])
    for (owner, matrix), *stored in zip(matrices(layer), *(matrices(part) for part, _ in parts.values()), strict=True):
        if matrix in kept:
            values, *groups = (floats(getattr(part, name)) for part, name in stored)
            values = values.view(FP8) if is_fp8 else pack_nibbles(values)
            setattr(owner, matrix, QuantizedWeight(dtype, values, *groups))
