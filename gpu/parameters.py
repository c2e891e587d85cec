"""A model's parameters, in the fused layout used for computing, and which checkpoint tensors fill them.

One pass allocates a layer's parameters and says where each tensor of the checkpoint goes, and what is rearranged on the
way; it knows how the families name and store layers and experts. Thread: engine (at start).
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from core.config import ExpertsConfig, LatentConfig, LayerConfig, ModelConfig, RecurrentConfig
from gpu.blocks import BlockWeight
from gpu.device import own_huge_pages
from gpu.input_weights import (
    InputsWeights,
    LayerInputWeights,
    OuterStreamsWeights,
    StreamsWeights,
    ends_of,
    inputs_of,
    streams_of,
)
from gpu.quant import Weight, floats

MXFP4_BLOCK = 32  # numbers that share a scale
# OCP Microscaling Formats 1.0, section 5.3.3: E2M1, sign last
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_SCALE_BIAS = 127  # a scale is 2 ** (byte - 127): section 5.4.1, E8M0
HEAD = "lm_head.weight"
SCORE = "score.weight"
EMBEDDING = "model.embed_tokens.weight"
INPUTS = "model.embed_tokens_per_layer.weight"
# May be quantised; routers stay: their choices matter more than bytes.
MIXER_MATRICES = ("qkv", "output", "taken", "given")  # of attention, and of a recurrence
MLP_MATRICES = ("gate_up", "down", "shared_gate_up", "shared_down")  # the last two of experts alone
META = torch.device("meta")  # of what has no memory
Empty = Callable[[tuple[int, ...]], Tensor]


ALL_STACKED = ("qwen3_vl_moe_text", "llama4_text")  # the layouts that have all experts in one tensor, [in, out]
BY_ROWS = "qwen3_5_moe_text"  # the layout that may have them so, too, each matrix as it is used
STACKED_BY_ROWS = f"{BY_ROWS}, stacked"
BESIDE = "gemma4_text"  # the layout that has all experts in one tensor each of gate and up, and of down
BESIDE_SPLIT = f"{BESIDE}, split"  # the same with a tensor for each expert: GGUF's
OSS, OSS_SPLIT = "gpt_oss", "gpt_oss, split"
# what layouts are in GGUF files
SPLIT = {BESIDE: BESIDE_SPLIT, OSS: OSS_SPLIT, "qwen3_vl_moe_text": "qwen3_moe", "llama4_text": "qwen2_moe"}
_PROJECTIONS, _TWO_PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class _ExpertNames:
    """What checkpoints call the parts of a mixture of experts.

    Args:
        experts: a tensor of one expert, by its number and projection; or of all, by the projection.
        projections: those of gate and up, or of both, and of down.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}.{}.weight"
    projections: tuple[str, ...] = _PROJECTIONS
    shared: str = "mlp.shared_experts"
    shared_projections: tuple[str, ...] = _PROJECTIONS
    shared_gate: str = "mlp.shared_expert_gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"

    @property
    def are_stacked(self) -> bool:
        return self.experts.count("{}") == 1


_ONE_SHARED = _ExpertNames(shared="mlp.shared_expert")
_STACKED = replace(_ONE_SHARED, experts="mlp.experts.{}", projections=_TWO_PROJECTIONS)
# by ExpertsConfig.layout
_NAMES = {
    "mixtral": _ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")),
    "lfm2_moe": _ExpertNames(
        *("feed_forward.gate", "feed_forward.experts.{}.{}.weight", ("w1", "w3", "w2")),
        choice_bias="feed_forward.expert_bias",
    ),
    "ernie4_5_moe": _ExpertNames(choice_bias="mlp.moe_statics.e_score_correction_bias"),
    "granitemoehybrid": _ExpertNames(
        "block_sparse_moe.router.layer",
        *("block_sparse_moe.{}.weight", ("input_linear", "output_linear")),
        *("shared_mlp", ("input_linear", "output_linear")),
    ),
    OSS: replace(_STACKED, router="mlp.router"),
    OSS_SPLIT: _ExpertNames("mlp.router"),
    BESIDE: _ExpertNames("router.proj", "experts.{}", _TWO_PROJECTIONS, "mlp"),
    BESIDE_SPLIT: _ExpertNames("router.proj", "experts.{}.{}.weight", _TWO_PROJECTIONS, "mlp"),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", BY_ROWS), _ONE_SHARED),
    **dict.fromkeys((STACKED_BY_ROWS, *ALL_STACKED), _STACKED),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of the checkpoint goes.

    Args:
        into: rows of a parameter.
        head_dim: reorder the rows within heads of this size; None: keep their order.
        rotary_dim: how many rows of each head are reordered; None: all.
        num_reordered: how many rows are reordered; None: all.
        offset: added to each number.
        write: writes a tensor of another shape or format into `into`, or part of its first dimension into the same
            part of `into`; None: copy.
        stored_shape: the checkpoint's tensor; None: the shape of `into`.
        is_packed: stored as bytes, not as floats.
        is_scale: multiplies what another tensor has written, so it is read last.
        arrange: gives all rows in the order of here from those of the checkpoint; None: it is the same.
        factor: of all numbers, or [rows, 1]; None: 1.
        matrix: which matrix (see matrices; or `steps`) the rows belong to; None: none, or a bias.
    """

    into: Tensor
    head_dim: int | None = None
    rotary_dim: int | None = None
    num_reordered: int | None = None
    offset: float = 0.0
    write: Callable[[Tensor, Tensor], None] | None = None
    stored_shape: tuple[int, ...] | None = None
    is_packed: bool = False
    is_scale: bool = False
    arrange: Callable[[Tensor], Tensor] | None = None
    factor: float | Tensor | None = None
    matrix: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.into.shape) if self.stored_shape is None else self.stored_shape

    @property
    def is_as_stored(self) -> bool:
        """Whether rows have the numbers of the checkpoint's, if in another order."""
        return self.write is None and self.factor is None

    def fill(self, tensor: Tensor) -> None:
        """tensor: of the shape above, in any float format, or bytes."""
        self.write_rows(0, tensor)
        self.finish()

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Write some of the tensor's rows, from this one on; call finish() once all are written."""
        into = self.into[first : first + len(rows)]
        if self.write is not None:
            self.write(into, rows)
        else:
            into.copy_(rows)

    def finish(self) -> None:
        """Add the offset and reorder, once all rows are written."""
        if self.offset:
            self.into.add_(self.offset)
        if self.arrange is not None:
            self.into.copy_(self.arrange(self.into))
        if self.factor is not None:
            self.into.mul_(self.factor if isinstance(self.factor, float) else self.factor.to(self.into.device))
        if self.head_dim is not None:
            rows = self.into[: self.num_reordered]
            rows.copy_(interleave_halves(rows, self.head_dim, self.rotary_dim))


Targets = dict[str, Target]
"""By the tensor's name in the checkpoint."""


def interleave_halves(rows: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder each head's rows from (first half, second half) to pairs, so that what RoPE rotates is adjacent.

    Attention scores do not change: q and k are reordered alike. rows: [heads * head_dim, ...], also returned so; the
    first rotary_dim rows of each head are reordered, or all.
    """
    if rotary_dim is not None and rotary_dim != head_dim:
        heads = rows.view(-1, head_dim, *rows.shape[1:])
        turned = interleave_halves(heads[:, :rotary_dim].flatten(0, 1), rotary_dim)
        turned = turned.view(-1, rotary_dim, *rows.shape[1:])
        return torch.cat([turned, heads[:, rotary_dim:]], 1).view(rows.shape)
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def gates_first(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder rows from each head's query and its gate to all gates, then all queries, whose pairs are adjacent."""
    query, gate = rows.view(-1, 2, head_dim, *rows.shape[1:]).unbind(1)
    return torch.cat([gate.flatten(0, 1), interleave_halves(query.flatten(0, 1), head_dim, rotary_dim)])


def parts_first(rows: Tensor, num_groups: int, sizes: list[int]) -> Tensor:
    """Reorder rows from groups, each with parts of these sizes, to all groups' first parts, then their second ones."""
    parts = rows.view(num_groups, sum(sizes), *rows.shape[1:]).split_with_sizes(sizes, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def part_pairs(rows: Tensor) -> Tensor:
    """Reorder rows from pairs (gate, up) to all gates, then all ups. rows: [2 * n, ...], also returned so."""
    return rows.view(-1, 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def write_taps(into: Tensor, tensor: Tensor) -> None:
    """into: [taps, channels]; tensor: [channels, 1, taps]."""
    into.copy_(tensor.squeeze(1).T)


def write_transposed(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """into: [experts, out, in]; tensor: [experts, in, out]; are_pairs: its outputs alternate (gate, up)."""
    for rows, expert in zip(into, tensor, strict=True):
        rows.copy_(part_pairs(expert.T.contiguous()) if are_pairs else expert.T)


def write_scales(into: Tensor, tensor: Tensor, scale: float) -> None:
    """Multiply rows in place. into: [out, in]; tensor: [out]."""
    into.mul_((tensor.to(into.device, into.dtype) * scale).unsqueeze(1))


def write_paired(into: Tensor, tensor: Tensor) -> None:
    """Both: [experts, 2 * n]."""
    for rows, expert in zip(into, tensor, strict=True):
        rows.copy_(part_pairs(expert))


def write_mxfp4_blocks(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """Unpack four-bit numbers without their scales; a byte's low half comes first.

    into: [experts, out, in]; tensor: [experts, out, in / 32, 16], bytes.
    """
    values = torch.tensor(FP4_VALUES, dtype=into.dtype, device=into.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # [256, 2]
    for rows, expert in zip(into, tensor, strict=True):
        unpacked = pairs[expert.to(into.device).flatten(1).int()].view(rows.shape)
        rows.copy_(part_pairs(unpacked) if are_pairs else unpacked)


def write_mxfp4_scales(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """Multiply by powers of two, in place. into: [experts, out, in]; tensor: [experts, out, in / 32], bytes."""
    for rows, expert in zip(into, tensor, strict=True):
        exponents = expert.to(into.device).int() - MXFP4_SCALE_BIAS
        exponents = part_pairs(exponents) if are_pairs else exponents
        blocks = rows.view(*exponents.shape, MXFP4_BLOCK)
        blocks.copy_(torch.ldexp(blocks.float(), exponents.unsqueeze(-1)))


@dataclass(slots=True)
class ExpertWeights:
    """A router and its experts; what the family lacks is None."""

    router: Tensor  # [experts, hidden]; see ExpertsConfig.is_router_float
    router_bias: Tensor | None  # [experts]
    gate_up: Weight  # [experts, 2 * width, hidden], or without a gate [experts, width, hidden]
    gate_up_bias: Tensor | None  # [experts, 2 * width]
    down: Weight  # [experts, hidden, width]
    down_bias: Tensor | None  # [experts, hidden]
    choice_bias: Tensor | None = None  # [experts], float32
    shared_gate_up: Weight | None = None  # [2 * shared width, hidden]
    shared_down: Weight | None = None  # [hidden, shared width]
    shared_gate: Tensor | None = None  # [1, hidden]
    norms: "BesideNorms | None" = None
    share_scales: Tensor | None = None  # [experts], float32


@dataclass(slots=True)
class BesideNorms:
    """See ExpertsConfig.are_beside: [hidden] each."""

    shared: Tensor  # before the shared expert
    shared_post: Tensor
    experts: Tensor  # before the others
    experts_post: Tensor


@dataclass(slots=True)
class MlpWeights:
    """One MLP; families without biases have None."""

    gate_up: Weight  # [2 * intermediate, hidden], or without a gate [intermediate, hidden]
    gate_up_bias: Tensor | None  # one for each row
    down: Weight  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


@dataclass(slots=True)
class LatentWeights:
    """Of latent attention; `qkv` of the layer is [query_rank or all query heads, hidden], then what is cached."""

    query_norm: Tensor | None  # [query_rank]
    query_up: Weight | None  # [heads * (plain_dim + rope_dim), query_rank]
    norm: Tensor  # [rank]
    up: Tensor  # [heads * (plain_dim + value_dim), rank]; each head's key, then its value


@dataclass(slots=True)
class RecurrentWeights:
    """Of a recurrent layer, beside its two matrices."""

    convolution: Tensor  # [taps, channels], float32
    convolution_bias: Tensor | None  # [channels]
    # Float32; the first is the logarithm of a step's decay, the second is added to the step
    decay: Tensor | None = None  # [heads]
    step_bias: Tensor | None = None  # [heads]
    norm: Tensor | None = None  # [value_dim], or of a state space [heads * value_dim]
    skip: Tensor | None = None  # [heads], of a state space: the factor of a value that goes around the memory


@dataclass(slots=True)
class LayerWeights:
    """One layer; None: it has no such parameter. Rows of q and k are reordered: see interleave_halves.

    Norms are float32 where the checkpoint stores offsets from 1, which a shorter format would round.
    """

    attention_norm: Tensor | None = None  # [hidden]; before a recurrence, too
    qkv: Weight | None = None  # [query + 2 * kv, hidden]
    qkv_bias: Tensor | None = None  # [query + 2 * kv]
    query_norm: Tensor | None = None  # [head_dim], or [heads, head_dim] over all heads at once
    key_norm: Tensor | None = None  # [head_dim], or [kv_heads, head_dim]
    sinks: Tensor | None = None  # [heads]
    output: Weight | None = None  # [hidden, query]
    output_bias: Tensor | None = None  # [hidden]
    attention_post_norm: Tensor | None = None  # [hidden]
    mlp_norm: Tensor | None = None  # [hidden]
    mlp: MlpWeights | ExpertWeights | None = None
    mlp_post_norm: Tensor | None = None  # [hidden]
    latent: LatentWeights | None = None
    recurrent: RecurrentWeights | None = None
    taken: Weight | None = None  # [RecurrentConfig.input_size, hidden]; without `steps`
    steps: Tensor | None = None  # [2 * heads, hidden]; see RecurrentConfig.has_float_steps
    taken_bias: Tensor | None = None  # [RecurrentConfig.input_size]
    given: Weight | None = None  # [hidden, RecurrentConfig.output_size]
    given_bias: Tensor | None = None  # [hidden]
    inputs: LayerInputWeights | None = None
    streams: StreamsWeights | None = None
    scale: Tensor | None = None  # [1], of what the layer leaves


@dataclass(slots=True)
class ModelWeights:
    """All parameters; the layers' matrices may be quantised, and are taken once, in order."""

    embedding: Tensor | BlockWeight  # [vocab, hidden]
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden]; see LayerWeights
    lm_head: Tensor | BlockWeight  # [vocab, hidden]; the embedding itself when tied
    score: Tensor | None = None  # [scores, hidden]: of a model that scores
    inputs: InputsWeights | None = None
    streams: OuterStreamsWeights | None = None


@dataclass(slots=True)
class MtpWeights:
    """A head that predicts the token after the next, from a token's last hidden state and the token that followed it.

    Args:
        join: of the embedding and the state, both normed, to what the layer reads.
        norm: before the model's head, which it shares.
        is_normed: it goes on from its own states after `norm`, not before it.
    """

    join: Tensor  # [hidden, 2 * hidden]
    embedding_norm: Tensor  # [hidden]
    state_norm: Tensor  # [hidden]
    norm: Tensor  # [hidden]
    layer: LayerWeights
    is_normed: bool


def empty_mtp(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, stored: Container[str]
) -> tuple[MtpWeights, Targets]:
    """Allocate it. Sources: vLLM, models/qwen3_next_mtp.py and models/deepseek_mtp.py.

    Args:
        config: the whole model's.
        stored: names of the checkpoint's tensors.
    """
    hidden, empty_norm = config.hidden_size, partial(torch.empty, dtype=_norm_dtype(config, dtype), device=device)
    own = f"model.layers.{config.num_layers}"
    prefix, names = own, [f"{own}.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
    if config.recurrence is not None:
        prefix = "mtp.layers.0"
        names = [f"mtp.{name}" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    layer_config = config.mtp_layer
    if layer_config.experts is not None and layer_config.experts.layout in (BY_ROWS, STACKED_BY_ROWS):
        layout = STACKED_BY_ROWS if f"{prefix}.mlp.experts.gate_up_proj" in stored else BY_ROWS
        layer_config = replace(layer_config, experts=replace(layer_config.experts, layout=layout))
    layer, of_layer = empty_layer(layer_config, 0, dtype, device)
    targets = {prefix + name.removeprefix("model.layers.0"): target for name, target in of_layer.items()}
    join = torch.empty((hidden, 2 * hidden), dtype=dtype, device=device)
    norms = empty_norm(hidden), empty_norm(hidden), empty_norm(hidden)
    targets[f"{names[0]}.weight"] = Target(join)
    for name, norm in zip(names[1:], norms, strict=True):
        targets[f"{name}.weight"] = Target(norm, offset=_norm_offset(config))
    return MtpWeights(join, *norms, layer, config.recurrence is not None), targets


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[ModelWeights, Targets]:
    """Allocate all parameters."""
    weights, targets = empty_ends(config, dtype, device, config.vocab_size)
    found = [empty_layer(config, index, dtype, device) for index in range(config.num_layers)]
    for _, layer_targets in found:
        targets.update(layer_targets)
    weights.layers = [layer for layer, _ in found]
    return weights, targets


def empty_ends(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_head_rows: int, without: Collection[str] = ()
) -> tuple[ModelWeights, Targets]:
    """Allocate all but the layers. without: embedding and head by their names, where they get no memory."""
    empty = _empty(dtype, device)
    of_embedding, of_head = (META if name in without else device for name in (EMBEDDING, HEAD))
    embedding = _empty(dtype, of_embedding)((config.vocab_size, config.hidden_size))
    norm = empty((config.hidden_size,), dtype=_norm_dtype(config, dtype))
    targets = {EMBEDDING: Target(embedding)}
    targets[_own_name(config, "model.norm.weight")] = Target(norm, offset=_norm_offset(config))
    lm_head = embedding
    if not config.tie_embeddings:
        lm_head = _empty(dtype, of_head)((num_head_rows, config.hidden_size))
        targets[HEAD] = Target(lm_head)
    score = None
    if config.num_scores:
        score = empty((config.num_scores, config.hidden_size))
        targets[SCORE] = Target(score)

    def named(name: str, *shape: int) -> Tensor:
        into = empty(shape)
        targets[f"model.{name}.weight"] = Target(into)
        return into

    return ModelWeights(embedding, (), norm, lm_head, score, *ends_of(config, named)), targets


def _own_name(config: ModelConfig, name: str) -> str:
    """What the checkpoint calls a tensor."""
    for usual, own in config.renamed:
        name = name.replace(usual, own)
    return name


def empty_layer(
    config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device
) -> tuple[LayerWeights, Targets]:
    return layer_of(config, index, _empty(dtype, device), _empty(_norm_dtype(config, dtype), device))


def layer_without(
    config: ModelConfig,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    without: Callable[[Targets], Collection[str]],
) -> tuple[LayerWeights, Targets]:
    """empty_layer, where some matrices get no memory. without: their names (see matrices), of the layer's targets."""
    norms, made = _norm_dtype(config, dtype), list[Tensor]()

    def listed(shape: tuple[int, ...]) -> Tensor:
        made.append(torch.empty(shape, dtype=dtype, device=META))
        return made[-1]

    layer, targets = layer_of(config, index, listed, _empty(norms, META))
    names = without(targets)
    left_out = [getattr(owner, name) for owner, name in matrices(layer) if name in names]
    devices = iter([META if any(one is other for other in left_out) else device for one in made])
    return layer_of(
        config, index, lambda shape: torch.empty(shape, dtype=dtype, device=next(devices)), _empty(norms, device)
    )


def _empty(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """On a CPU by large pages: what is packed soon would take small ones one by one, for each layer anew."""
    if device.type == "cpu":
        return partial(own_huge_pages, dtype=dtype)
    return partial(torch.empty, dtype=dtype, device=device)


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if config.has_norm_offset else dtype


def _norm_offset(config: ModelConfig) -> float:
    return 1.0 if config.has_norm_offset else 0.0


@dataclass(slots=True)
class Allocation:
    """A layer's parameters, as they are allocated.

    Args:
        config: with the layer's own sizes.
        targets: the tensors that fill them, by their usual names within a layer.
    """

    config: ModelConfig
    layer: LayerConfig
    empty: Empty
    empty_norm: Empty
    targets: Targets = field(default_factory=dict)

    @property
    def reordered(self) -> int | None:
        """The head size within which rows of q and k are reordered; None: they are as they are here."""
        return None if self.config.are_pairs_adjacent else self.config.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.config.rope.rotary_dim(self.config.head_dim)  # RoPE rotates q and k, not v

    def whole(self, name: str, *shape: int, matrix: str | None = None) -> Tensor:
        """A parameter that one tensor fills."""
        into = self.empty(shape)
        self.targets[name] = Target(into, matrix=matrix)
        return into

    def parts(self, sizes: Mapping[str, int], suffix: str, *inputs: int, matrix: str | None = None) -> Tensor:
        """A parameter whose rows come from several tensors, so many from each."""
        into = self.empty((sum(sizes.values()), *inputs))
        for name, rows in zip(sizes, into.split_with_sizes(list(sizes.values())), strict=True):
            self.targets[f"{name}.{suffix}"] = Target(rows, matrix=matrix)
        return into

    def in_float(self, name: str, *shape: int) -> Tensor:
        into = self.empty_norm(shape).float()
        self.targets[name] = Target(into)
        return into

    def norm(self, name: str, *shape: int, head_dim: int | None = None) -> Tensor:
        into = self.empty_norm(shape)
        offset = _norm_offset(self.config)
        self.targets[f"{name}.weight"] = Target(into.view(-1), head_dim, self.rotary_dim, offset=offset)
        return into

    def layer_norm(self, name: str) -> Tensor | None:
        return self.norm(name, self.config.hidden_size) if name else None


def _attention(layer: LayerWeights, found: Allocation) -> None:
    config = found.config
    hidden, head_dim = config.hidden_size, config.head_dim
    layer.qkv = _queries_keys_values(found, "weight", hidden, matrix="qkv")
    layer.qkv_bias = _queries_keys_values(found, "bias") if config.qkv_bias else None
    if config.qk_norm in ("head", "all"):
        heads, kv_heads = ((config.num_heads,), (config.num_kv_heads,)) if config.qk_norm == "all" else ((), ())
        layer.query_norm = found.norm("self_attn.q_norm", *heads, head_dim, head_dim=found.reordered)
        if found.layer.source is None:
            layer.key_norm = found.norm("self_attn.k_norm", *kv_heads, head_dim, head_dim=found.reordered)
    layer.sinks = found.whole("self_attn.sinks", config.num_heads) if config.has_sinks else None
    layer.output = found.whole("self_attn.o_proj.weight", hidden, config.attended_size, matrix="output")
    layer.output_bias = found.whole("self_attn.o_proj.bias", hidden) if config.output_bias else None


def _queries_keys_values(found: Allocation, suffix: str, *inputs: int, matrix: str | None = None) -> Tensor:
    config, reordered, rotary_dim = found.config, found.reordered, found.rotary_dim
    if config.has_fused_qkv:
        into = found.empty((config.query_size + 2 * config.kv_size, *inputs))
        num_reordered = config.query_size + config.kv_size
        target = Target(into, reordered, rotary_dim, num_reordered, matrix=matrix)
        found.targets[f"self_attn.qkv_proj.{suffix}"] = target
        return into
    query, key, value = (f"self_attn.{name}_proj" for name in "qkv")
    sizes = {query: config.query_size * (1 + config.has_output_gate), key: config.kv_size, value: config.kv_size}
    names = (query, key, value)[: 1 if found.layer.source is not None else 3 if found.layer.has_values else 2]
    into = found.parts({name: sizes[name] for name in names}, suffix, *inputs, matrix=matrix)
    for name in names[:2]:
        place = f"{name}.{suffix}"
        found.targets[place] = replace(found.targets[place], head_dim=reordered, rotary_dim=rotary_dim)
    if config.has_output_gate:
        arrange = partial(gates_first, head_dim=config.head_dim, rotary_dim=rotary_dim)
        place = f"{query}.{suffix}"
        found.targets[place] = replace(found.targets[place], head_dim=None, arrange=arrange)
    return into


def _latent_attention(layer: LayerWeights, found: Allocation) -> None:
    config, hidden = found.config, found.config.hidden_size
    assert config.latent is not None
    latent, query_rank = config.latent, config.latent.query_rank
    queries = config.num_heads * (latent.plain_dim + latent.rope_dim)
    first = "self_attn.q_a_proj" if query_rank else "self_attn.q_proj"
    sizes = {first: query_rank or queries, "self_attn.kv_a_proj_with_mqa": latent.rank + latent.rope_dim}
    layer.qkv = found.parts(sizes, "weight", hidden, matrix="qkv")
    layer.output = found.whole("self_attn.o_proj.weight", hidden, config.attended_size, matrix="output")
    layer.output_bias = found.whole("self_attn.o_proj.bias", hidden) if config.output_bias else None
    query_up = "self_attn.q_b_proj.weight"
    layer.latent = LatentWeights(
        found.norm("self_attn.q_a_layernorm", query_rank) if query_rank else None,
        found.whole(query_up, queries, query_rank, matrix="query_up") if query_rank else None,
        found.norm("self_attn.kv_a_layernorm", latent.rank),
        _keys_and_values(found, latent),
    )


def _keys_and_values(found: Allocation, latent: LatentConfig) -> Tensor:
    heads, sizes = found.config.num_heads, [latent.plain_dim, latent.value_dim]
    if not latent.is_split:
        return found.whole("self_attn.kv_b_proj.weight", heads * sum(sizes), latent.rank)
    into = found.empty((heads * sum(sizes), latent.rank))
    keys, values = into.view(heads, -1, latent.rank).split_with_sizes(sizes, 1)
    write, stored_shape = partial(write_transposed, are_pairs=False), (heads, latent.rank, latent.plain_dim)
    found.targets["self_attn.k_b_proj.weight"] = Target(keys, write=write, stored_shape=stored_shape)
    found.targets["self_attn.v_b_proj.weight"] = Target(values)
    return into


def _multiply(targets: Targets, name: str, factor: float | Tensor) -> None:
    """Have what a tensor fills be multiplied once it is read."""
    if name in targets:
        targets[name] = replace(targets[name], factor=factor)


def _short_convolution(layer: LayerWeights, found: Allocation, own: RecurrentConfig) -> None:
    hidden, width = found.config.hidden_size, own.output_size
    layer.taken = found.whole("conv.in_proj.weight", own.input_size, hidden, matrix="taken")
    layer.taken_bias = found.whole("conv.in_proj.bias", own.input_size) if own.has_bias else None
    layer.given = found.whole("conv.out_proj.weight", hidden, width, matrix="given")
    layer.given_bias = found.whole("conv.out_proj.bias", hidden) if own.has_bias else None
    layer.recurrent = RecurrentWeights(*_convolution(found, own, "conv.conv"))


def _convolution(found: Allocation, own: RecurrentConfig, name: str) -> tuple[Tensor, Tensor | None]:
    """Of a checkpoint's [channels, 1, taps]: [taps, channels], and its bias."""
    taps = found.empty_norm((own.taps, own.channels)).float()
    stored_shape = (own.channels, 1, own.taps)
    found.targets[f"{name}.weight"] = Target(taps, write=write_taps, stored_shape=stored_shape)
    return taps, found.whole(f"{name}.bias", own.channels) if own.has_convolution_bias else None


def _delta_net(layer: LayerWeights, found: Allocation, own: RecurrentConfig) -> None:
    hidden = found.config.hidden_size
    qkv, gate, strength, step = (f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
    sizes = {qkv: own.channels, gate: own.output_size, strength: own.num_heads, step: own.num_heads}
    if own.is_grouped:
        sizes = {qkv: sizes[qkv], gate: sizes[gate]} if own.is_split else {f"{qkv}z": own.channels + own.output_size}
        sizes[f"{strength}a"] = 2 * own.num_heads
    if own.has_float_steps:
        apart = {name: sizes.pop(name) for name in (strength, step, f"{strength}a") if name in sizes}
        layer.steps = found.parts(apart, "weight", hidden, matrix="steps")
    layer.taken = found.parts(sizes, "weight", hidden, matrix="taken")
    per_key = own.num_heads // own.num_key_heads
    values = per_key * own.value_dim
    for name, of_key in ((f"{qkv}z", [own.key_dim] * 2 + [values] * 2), (f"{strength}a", [per_key] * 2)):
        if f"{name}.weight" in found.targets:
            arrange = partial(parts_first, num_groups=own.num_key_heads, sizes=of_key)
            found.targets[f"{name}.weight"] = replace(found.targets[f"{name}.weight"], arrange=arrange)
    layer.given = found.whole("linear_attn.out_proj.weight", hidden, own.output_size, matrix="given")
    layer.recurrent = RecurrentWeights(
        *_convolution(found, own, "linear_attn.conv1d"),
        found.in_float("linear_attn.A_log", own.num_heads),
        found.in_float("linear_attn.dt_bias", own.num_heads),
        found.in_float("linear_attn.norm.weight", own.value_dim),
    )


def _state_space(layer: LayerWeights, found: Allocation, own: RecurrentConfig) -> None:
    hidden = found.config.hidden_size
    layer.taken = found.whole("mamba.in_proj.weight", own.input_size, hidden, matrix="taken")
    if own.input_factors:
        keys = own.num_key_heads * own.key_dim
        sizes = torch.tensor([own.output_size, own.output_size, keys, keys, own.num_heads])
        factors = torch.tensor(own.input_factors).repeat_interleave(sizes).unsqueeze(1)  # [input_size, 1]
        _multiply(found.targets, "mamba.in_proj.weight", factors)
    layer.taken_bias = found.whole("mamba.in_proj.bias", own.input_size) if own.has_bias else None
    layer.given = found.whole("mamba.out_proj.weight", hidden, own.output_size, matrix="given")
    layer.given_bias = found.whole("mamba.out_proj.bias", hidden) if own.has_bias else None
    layer.recurrent = RecurrentWeights(
        *_convolution(found, own, "mamba.conv1d"),
        found.in_float("mamba.A_log", own.num_heads),
        found.in_float("mamba.dt_bias", own.num_heads),
        found.in_float("mamba.norm.weight", own.output_size) if own.has_norm else None,
        found.in_float("mamba.D", own.num_heads),
    )


def _mlp(layer: LayerWeights, found: Allocation) -> None:
    config, hidden = found.config, found.config.hidden_size
    width, names = config.intermediate_size, ("gate", "up") if config.has_gate else ("up",)
    sizes = {f"mlp.{name}_proj": width for name in names}
    if config.has_fused_gate_up:
        sizes = {"mlp.gate_up_proj": 2 * width}
    layer.mlp = MlpWeights(
        gate_up=found.parts(sizes, "weight", hidden, matrix="gate_up"),
        gate_up_bias=found.parts(sizes, "bias") if config.mlp_bias else None,
        down=found.whole("mlp.down_proj.weight", hidden, width, matrix="down"),
        down_bias=found.whole("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
    )


def _experts(layer: LayerWeights, found: Allocation) -> None:
    experts = found.config.experts
    assert experts is not None
    layer.mlp = mlp = _empty_experts(experts, found.config.hidden_size, found.empty)
    found.targets |= _expert_targets(experts, mlp)
    if experts.are_beside and layer.mlp_norm is not None:
        names = (f"{name}_feedforward_layernorm_{number}" for name, number in (("post", 1), ("pre", 2), ("post", 2)))
        post, before, behind = (found.norm(name, found.config.hidden_size) for name in names)
        mlp.norms, layer.mlp_norm = BesideNorms(layer.mlp_norm, post, before, behind), None
        mlp.share_scales = found.in_float("router.per_expert_scale", experts.num_experts)
        write = partial(write_scales, scale=found.config.hidden_size**-0.5)
        found.targets["router.scale"] = Target(
            mlp.router.T, write=write, stored_shape=(found.config.hidden_size,), is_scale=True
        )


# by RecurrentConfig.kind
_RECURRENCES = {"conv": _short_convolution, "linear_attention": _delta_net, "mamba": _state_space}


def layer_of(config: ModelConfig, index: int, empty: Empty, empty_norm: Empty) -> tuple[LayerWeights, Targets]:
    """A layer's parameters, as `empty` makes them, and the checkpoint's tensors that fill them."""
    own, config = config.layer(index), config.of_layer(index)
    layer, found = LayerWeights(), Allocation(config, own, empty, empty_norm)
    before, after, before_mlp, after_mlp = config.norms
    if own.attends or own.is_recurrent:
        layer.attention_norm, layer.attention_post_norm = found.layer_norm(before), found.layer_norm(after)
    if own.attends:
        (_attention if config.latent is None else _latent_attention)(layer, found)
    if own.is_recurrent and config.recurrence is not None:
        _RECURRENCES[config.recurrence.kind](layer, found, config.recurrence)
    if own.has_mlp:
        layer.mlp_norm, layer.mlp_post_norm = found.layer_norm(before_mlp), found.layer_norm(after_mlp)
        (_experts if own.is_sparse else _mlp)(layer, found)
    if config.has_layer_scale:
        layer.scale = found.whole("layer_scalar", 1)
    layer.inputs = None if config.inputs is None else inputs_of(config.inputs, found)
    layer.streams = None if config.streams is None else streams_of(config.streams, found)
    for name, factor in config.factors:
        _multiply(found.targets, name, factor)
    return layer, {_own_name(config, f"model.layers.{index}.{name}"): one for name, one in found.targets.items()}


def _empty_experts(config: ExpertsConfig, hidden: int, empty: Empty) -> ExpertWeights:
    num_experts, width = config.num_experts, config.intermediate_size
    router, shared, num_rows = empty((num_experts, hidden)), config.shared_size, 1 + config.has_gate
    return ExpertWeights(
        router=router.float() if config.is_router_float else router,
        router_bias=empty((num_experts,)) if config.has_bias else None,
        gate_up=empty((num_experts, num_rows * width, hidden)),
        gate_up_bias=empty((num_experts, num_rows * width)) if config.has_bias else None,
        down=empty((num_experts, hidden, width)),
        down_bias=empty((num_experts, hidden)) if config.has_bias else None,
        choice_bias=empty((num_experts,)).float() if config.has_choice_bias else None,
        shared_gate_up=empty((num_rows * shared, hidden)) if shared else None,
        shared_down=empty((hidden, shared)) if shared else None,
        shared_gate=empty((1, hidden)) if config.has_shared_gate else None,
    )


def _expert_targets(config: ExpertsConfig, weights: ExpertWeights) -> Targets:
    names = _NAMES.get(config.layout, _ExpertNames())
    *inner, last = projections = names.projections[-2 - config.has_gate :]  # without a gate: up and down
    targets = {f"{names.router}.weight": Target(weights.router)}
    if names.are_stacked:
        for name, matrix in ((inner[0], "gate_up"), (last, "down")):
            targets |= _stacked_targets(config, names.experts.format(name), matrix, floats(getattr(weights, matrix)))
    for expert in range(0 if names.are_stacked else config.num_experts):
        rows = (*floats(weights.gate_up)[expert].chunk(len(inner)), floats(weights.down)[expert])
        for name, into in zip(projections, rows, strict=True):
            targets[names.experts.format(expert, name)] = Target(into, matrix="down" if name == last else "gate_up")
    if weights.router_bias is not None and weights.gate_up_bias is not None and weights.down_bias is not None:
        write = write_paired if config.layout == OSS else None
        parts = (*weights.gate_up_bias.chunk(len(inner), 1), weights.down_bias)
        for name, into in zip(projections, parts, strict=True):
            targets[f"mlp.experts.{name}_bias"] = Target(into, write=None if name == last else write)
        targets[f"{names.router}.bias"] = Target(weights.router_bias)
    if weights.choice_bias is not None:
        # ERNIE's is [1, experts]
        into = weights.choice_bias.unsqueeze(0) if config.layout == "ernie4_5_moe" else weights.choice_bias
        targets[names.choice_bias] = Target(into)
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        *inner, last = names.shared_projections[-2 - config.has_gate :]
        for name, into in zip(inner, floats(weights.shared_gate_up).chunk(len(inner)), strict=True):
            targets[f"{names.shared}.{name}.weight"] = Target(into, matrix="shared_gate_up")
        targets[f"{names.shared}.{last}.weight"] = Target(floats(weights.shared_down), matrix="shared_down")
    if weights.shared_gate is not None:
        targets[f"{names.shared_gate}.weight"] = Target(weights.shared_gate)
    return targets


def _stacked_targets(config: ExpertsConfig, name: str, matrix: str, into: Tensor) -> Targets:
    """All experts in one tensor: as they are used, [in, out], or blocks; gpt-oss alternates rows of gate and up."""
    num_experts, num_out, num_in = into.shape
    are_pairs = config.layout == OSS and matrix == "gate_up"
    if config.is_mxfp4:
        blocks = (num_experts, num_out, num_in // MXFP4_BLOCK)
        write, shape = partial(write_mxfp4_blocks, are_pairs=are_pairs), (*blocks, MXFP4_BLOCK // 2)
        write_both = partial(write_mxfp4_scales, are_pairs=are_pairs)
        return {
            f"{name}_blocks": Target(into, write=write, stored_shape=shape, is_packed=True),
            f"{name}_scales": Target(into, write=write_both, stored_shape=blocks, is_packed=True, is_scale=True),
        }
    if config.layout not in (*ALL_STACKED, OSS):
        return {name: Target(into, matrix=matrix)}
    write = partial(write_transposed, are_pairs=are_pairs)
    return {name: Target(into, write=write, stored_shape=(num_experts, num_in, num_out), matrix=matrix)}


def has_stacked_experts(names: Iterable[str]) -> bool:
    return any(name.startswith("model.") and name.endswith("mlp.experts.gate_up_proj") for name in names)


def matrices(layer: LayerWeights) -> list[tuple[LayerWeights | LatentWeights | MlpWeights | ExpertWeights, str]]:
    """What may be quantised: owner and attribute."""
    named = ((layer, MIXER_MATRICES), (layer.latent, ("query_up",)), (layer.mlp, MLP_MATRICES))
    found = ((owner, name) for owner, names in named if owner is not None for name in names)
    return [(owner, name) for owner, name in found if getattr(owner, name, None) is not None]


def first_matrix(layer: LayerWeights) -> Tensor:
    """One of its matrices, before they are quantised: for its format and device."""
    return floats(getattr(*matrices(layer)[0]))
