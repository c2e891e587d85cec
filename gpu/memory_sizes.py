"""What a model takes in memory, by kind, computed from its configuration alone: weights, the largest step, graphs.

Thread: engine, at start, or main, for an estimate.
"""

import math
from collections.abc import Iterator

import torch

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from gpu.attention_groups import MAX_GATHERED_TOKENS
from gpu.checkpoint import Checkpoint
from gpu.device import DeviceChoice
from gpu.kept_matrices import KeptMatrix, find_kept, kept_scheme
from gpu.kernels.attention_tiles import kernel_shape
from gpu.kernels.support import why_no_attention
from gpu.kv_cache import bytes_per_block, num_blocks_for
from gpu.layer_weights import LayerWeights, empty_weights, layer_targets, matrices
from gpu.linear import can_gather, can_pack
from gpu.prompt_logprobs import piece_rows
from gpu.quantize import can_quantize, floats, operator_group_size, stored_bytes
from gpu.quantized_linear import DEVICE_SLAB_BYTES, SLAB_BYTES
from gpu.scores import MAX_SCORES
from gpu.staged_copies import staged_bytes
from gpu.step_shapes import max_decodes, step_shapes

# Of a graph: a generous guess at what the driver keeps of a kernel that it will launch. It is for estimates, before
# anything is loaded: what is true is found out at start (graph_memory.py).
GRAPH_NODE_BYTES, GRAPH_NODES_A_LAYER, GRAPH_NODES = 8 * 1024, 16, 32


def weights_size_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    quantize: str | None,
    device: torch.device,
    checkpoint: Checkpoint | None = None,
) -> int:
    """Of all parameters in memory, ready to compute: in dtype, the layers' matrices quantised where they can be.

    A tied head that is prepacked is one more copy, unless the embedding's rows can be read from it.

    Args:
        checkpoint: which matrices it stores quantised; None: all that its config.json says are.
    """
    size_bytes = model.num_parameters * dtype.itemsize
    ends = (model.vocab_size, model.hidden_size)
    if model.tie_embeddings and can_pack(dtype, device) and not can_gather(ends):
        size_bytes += math.prod(ends) * dtype.itemsize
    scheme = kept_scheme(model, quantize, device)
    if quantize is None and scheme is None:
        return size_bytes
    for index, layer in enumerate(empty_weights(model, dtype, torch.device("meta")).layers):
        kept = {} if scheme is None else find_kept(model, layer, layer_targets(model, index, layer), checkpoint)
        size_bytes += sum(_added_bytes(layer, kept, scheme, dtype, quantize))
    return size_bytes


def _added_bytes(
    layer: LayerWeights, kept: dict[str, KeptMatrix], scheme: str | None, dtype: torch.dtype, quantize: str | None
) -> Iterator[int]:
    """Of a layer's matrices, what storing each as integers or 8-bit floats adds: a negative number.

    Args:
        scheme: of those that are kept.
        quantize: others to this.
    """
    for owner, field in matrices(layer):
        shape = tuple(floats(getattr(owner, field)).shape)
        plain_bytes = math.prod(shape) * dtype.itemsize
        if scheme is not None and field in kept:
            group_size = kept[field].group_size
            group_size = operator_group_size(group_size) if scheme == "int4" else group_size
            yield stored_bytes(shape, scheme, dtype, group_size) - plain_bytes
        elif quantize is not None and can_quantize(quantize, shape[-1]):
            yield stored_bytes(shape, quantize, dtype) - plain_bytes


def loading_size_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """Beside the weights, until they are all there: slices on their way, and a layer that is not quantised yet."""
    size_bytes = staged_bytes(device.device)
    if engine.quantize is not None or kept_scheme(model, None, device.device) is not None:
        layers = empty_weights(model, device.dtype, torch.device("meta")).layers
        size_bytes += max(sum(floats(getattr(*matrix)).nbytes for matrix in matrices(layer)) for layer in layers)
    return size_bytes


def activation_size_bytes(model: ModelConfig, engine: EngineConfig, max_model_len: int, device: DeviceChoice) -> int:
    """An upper bound: one layer's tensors of a full batch, the widest gather of keys and values, logits and noise."""
    dtype = device.dtype
    scored_rows = min(piece_rows(model.vocab_size), engine.max_batch_tokens)
    one_layer = engine.max_batch_tokens * _layer_width(model) * dtype.itemsize
    masks = len(model.windows) + (model.windows != (None,))  # one per window, and one while a windowed one is made
    mask = masks * engine.max_batch_tokens * max_model_len * dtype.itemsize
    longest = num_blocks_for(max_model_len) * BLOCK_SIZE
    gathered_tokens = min(engine.max_sequences * longest, max(longest, MAX_GATHERED_TOKENS))
    gathered = gathered_tokens * 2 * model.kv_size * dtype.itemsize
    # Of rows that draw: raw, adjusted, scaled, noise; of a piece of prompts beside them: of the head, raw, logarithms
    logits = 4 * model.vocab_size * max(4 * engine.max_sequences, engine.max_sequences + 3 * scored_rows)  # float32
    is_written_out = model.attention_cap is not None or model.has_sinks
    written_out = 3 * 4 * MAX_SCORES * is_written_out  # float32: products, and two steps on
    slab_bytes = SLAB_BYTES if device.device.type == "cpu" else DEVICE_SLAB_BYTES
    slabs = 4 * slab_bytes if engine.quantize or model.packing else 0  # a part of a weight: bits, integers, floats
    experts = _expert_activation_bytes(model, engine.max_batch_tokens, dtype)
    decoding = _decoding_bytes(model, engine, max_model_len, device)
    return one_layer + mask + gathered + logits + written_out + slabs + experts + decoding


def _layer_width(model: ModelConfig) -> int:
    """Numbers of one token, of all tensors of a layer."""
    return 4 * model.hidden_size + 4 * model.query_size + 6 * model.kv_size + 3 * model.intermediate_size


def _decoding_bytes(model: ModelConfig, engine: EngineConfig, max_model_len: int, device: DeviceChoice) -> int:
    """Where rows stay on the device: what splits of a context have found, until they are merged; tables, of the tokens
    that slots have seen too; logits.
    """
    if not _may_have_device_rows(model, device):
        return 0
    rows, width = max_decodes(engine), num_blocks_for(max_model_len)
    shape = kernel_shape(model.num_heads, model.num_kv_heads, model.head_dim, device.dtype)
    splits = rows * shape.splits_of(width * BLOCK_SIZE) * model.num_heads * (model.head_dim + 2) * 4  # float32
    tables = (engine.max_sequences + rows) * width * 4  # of slots and of rows, int32
    return splits + tables + (engine.max_sequences + rows) * model.vocab_size * 4


def _may_have_device_rows(model: ModelConfig, device: DeviceChoice) -> bool:
    """Whether the model's decodes may go by device_steps.py; an old device without kernels has room to spare."""
    return device.device.type == "cuda" and why_no_attention(model, device.dtype) is None


def graphs_size_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """What graphs share, a block for their padding, and the driver's part of each."""
    if engine.graphs == "off" or not _may_have_device_rows(model, device):
        return 0
    shapes, dtype = step_shapes(model, engine), device.dtype
    rows, tokens = max_decodes(engine), max(shape.num_tokens for shape in shapes.largest)
    pool = (tokens * _layer_width(model) + rows * model.vocab_size) * dtype.itemsize
    nodes = GRAPH_NODES + GRAPH_NODES_A_LAYER * model.num_layers
    driver = len(shapes.in_order) * nodes * GRAPH_NODE_BYTES
    return pool + _expert_activation_bytes(model, tokens, dtype) + bytes_per_block(model, dtype) + driver


def _expert_activation_bytes(model: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Each token once for each of its experts: in, out of all, in order again, and once as float32."""
    if model.experts is None:
        return 0
    copies = num_tokens * model.experts.num_active
    return copies * (
        model.hidden_size * (3 * dtype.itemsize + 4) + 3 * model.experts.intermediate_size * dtype.itemsize
    )
