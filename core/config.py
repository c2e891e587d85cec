"""The engine's settings and the model's (its config.json): frozen, validated once, at start. Any thread.

A model's config.json is understood completely or refused: a field that would change the output and is not computed
here is an error that names it. Families are data (families.py); transformers 5 writes `rope_parameters`, earlier ones
`rope_theta` and `rope_scaling`.

A token's rotary angle must be a function of its position alone, so that what was computed for it stays right as its
sequence grows. transformers has two kinds that choose their frequencies by the length of the whole sequence, anew at
every step. They are served as far as a fixed choice agrees with them: "dynamic" as the plain embedding up to
max_position_embeddings, "longrope" with its short factors up to original_max_position_embeddings, where the context
then ends, or, where the operator asks for a longer one, with its long factors for all sequences.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from core.config_fields import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    bad_field,
    count,
    positive_float,
    positive_int,
    read_bool,
    token_ids,
    unsupported_field,
)
from core.errors import UnsupportedModel
from core.families import FAMILIES, TEXT_TOWERS, Family, Traits
from core.prequantized import Fp8Config, PackedConfig, parse_fp8, parse_packed, refuse_other_methods

BLOCK_SIZE = 16  # tokens per KV block
INTER_TOKEN_TARGET = 1.6  # of EngineConfig
QUANTIZE_SCHEMES = ("int8", "fp8", "int4")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
LAYER_TYPES = ("full_attention", "sliding_attention")
OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # before transformers 5
BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # of Nemotron-H's patterns
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
DEFAULT_POSITIONS = 2048  # of families without a default of their own: transformers' LlamaConfig

# Fields that change the output, and the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
}

# Ends of architectures without a head that generates
SCORING, HEADLESS = "ForSequenceClassification", "Model"
MAX_SCORES = 1024

# Of a model of texts and images, where text_config does not have them
_SHARED_FIELDS = "quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The operator's settings of the engine; None leaves the choice to measurement at start.

    Args:
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "bfloat16", "float16" or "float32".
        max_model_len: tokens of context per sequence, at most the model's own.
        kv_memory_bytes: for KV blocks.
        max_batch_tokens: computed in one step.
        max_sequences: that run at once.
        threads: compute threads on a CPU.
        quantize: the layers' matrices to one of QUANTIZE_SCHEMES while they load; None: as they are.
        activations: "bf16": a file's quantised blocks become the serving format while they load, int8 and int4 at each
            step; "int8": they stay as stored, and rows become 8-bit integers to multiply them; "auto": int8 where the
            CPU has kernels for it.
        quantize_cache_bytes: limit of quantised weights kept on disk; 0: none are.
        kv_dtype: "auto": keys and values are stored in dtype; "int8": as 8-bit integers, with a scale for each head of
            a token.
        has_prefix_cache: requests use the keys and values that earlier ones have left.
        inter_token_target: a step with prompts may take so many times as long as its decodes alone, by the step-cost
            model, unless the prompts arrived together with all that decode (core/queue.py); None: no limit.
        forced_tokens: "on": where a grammar leaves one way to go on, its tokens are not sampled one by one; "off".
        speculation: "auto": drafts of a sequence's next tokens are computed where that saves time, on a CPU; "off".
        mtp: the checkpoint's head that predicts later tokens, where it has one, is loaded to draft.
        overlap: "on": the next step is sent before the tokens of this one are read; "off"; "auto": on a GPU.
        tensor_parallel: devices of this machine that compute the model together.
        graphs: "on": steps are captured as CUDA graphs at start; "lazy": when first needed; "off"; "auto": at start, on
            a GPU. Steps that cannot be captured run without.
        kv_offload_bytes: of host memory for evicted KV blocks; 0: their content is lost.
        kv_offload_dir: where host blocks are kept for the next process; None: nowhere.
        kv_offload_dir_bytes: limit of its files; None: as kv_offload_bytes.
        deterministic: refuse to start where a row's rounding may depend on what else is in its step.
        max_loras: adapters in memory at once.
        max_lora_rank: of each of an adapter's matrices.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    threads: int | None = None
    quantize: str | None = None
    activations: str = "auto"
    quantize_cache_bytes: int = 0
    kv_dtype: str = "auto"
    has_prefix_cache: bool = True
    inter_token_target: float | None = INTER_TOKEN_TARGET
    forced_tokens: str = "on"
    speculation: str = "auto"
    mtp: bool = True
    overlap: str = "auto"
    tensor_parallel: int = 1
    graphs: str = "auto"
    kv_offload_bytes: int = 0
    kv_offload_dir: str | None = None
    kv_offload_dir_bytes: int | None = None
    deterministic: bool = False
    max_loras: int = 0
    max_lora_rank: int = 16


# Settings that may change what tokens an answer has
CHANGE_TOKENS = ("max_model_len", "quantize", "activations", "kv_dtype", "tensor_parallel")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Args:
        kind: "default", "linear" (positions divided by factor), "llama3" (low frequencies divided by factor), "yarn"
            (the same with another blend), "longrope" (each frequency divided by its own factor) or "none" (nothing
            turns).
        factor, low_freq_factor, high_freq_factor: of "linear", "llama3" and "yarn".
        original_max_position: tokens of context before it was stretched.
        beta_fast, beta_slow: turns within the original context, above and below which "yarn" keeps and divides.
        is_truncated: whether "yarn" rounds its bounds to whole dimensions.
        factors: of "longrope", one per frequency.
        attention_factor: what the turned q and k are multiplied by, each.
        partial: the part of each head that turns, its first dimensions.
        query_growth: queries are multiplied by 1 + query_growth * log(1 + (position + query_offset) //
            original_max_position).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    partial: float = 1.0
    query_growth: float = 0.0
    query_offset: int = 0

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.partial)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What the layers of one model differ in.

    Args:
        rope: None: q and k are not rotated.
        window: how many tokens a token attends to, itself included; None: all before it.
        is_sparse: its MLP is the model's experts.
        is_recurrent: it has the model's recurrence, instead of attention or beside it.
        attends: it has attention.
        has_mlp: it has an MLP, or experts.
    """

    rope: RopeConfig | None
    window: int | None = None
    is_sparse: bool = False
    is_recurrent: bool = False
    attends: bool = True
    has_mlp: bool = True

    @property
    def rotates(self) -> bool:
        return self.rope is not None and self.rope.kind != "none"


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """What recurrent layers compute: a token reads and changes a state, whose size does not grow with the sequence.

    Args:
        kind: "conv" (LFM2's gated short convolution), "linear_attention" (gated delta rule, arXiv:2412.06464) or
            "mamba" (Mamba-2's state space, arXiv:2405.21060).
        taps: tokens that the convolution sees, the token itself included; the state has those before it.
        channels: that are convolved.
        num_heads, num_key_heads, key_dim, value_dim: of linear attention and state spaces; several heads may share a
            key head (Mamba-2: a group).
        has_bias, has_convolution_bias: of its matrices, and of the convolution.
        is_grouped: the checkpoint stores linear attention's matrices by key head.
        has_norm, is_normed_first: of state spaces: what the heads of a group have read is normed, after the gate or
            before it.
        eps: of the norm.
        input_factors: of state spaces: what rows of the first matrix are multiplied by: gates, values, keys, queries,
            steps; empty: nothing.
    """

    kind: str
    taps: int
    channels: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    has_bias: bool = False
    has_convolution_bias: bool = False
    is_grouped: bool = False
    has_norm: bool = True
    is_normed_first: bool = False
    eps: float = 1e-6
    input_factors: tuple[float, ...] = ()

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """What the hidden state is first multiplied to, by parts: gates, convolved channels, and what heads need."""
        if self.kind == "conv":
            return (3 * self.channels,)
        if self.kind == "mamba":
            return self.output_size, self.channels, self.num_heads
        return self.channels, self.output_size, self.num_heads, self.num_heads

    @property
    def input_size(self) -> int:
        return sum(self.input_sizes)

    @property
    def output_size(self) -> int:
        return self.channels if self.kind == "conv" else self.num_heads * self.value_dim

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """Of the state beside the convolution's."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def num_parameters(self) -> int:
        """Beside its two matrices."""
        found = (self.taps + self.has_convolution_bias) * self.channels
        if self.kind == "mamba":
            return found + 3 * self.num_heads + self.has_norm * self.output_size
        return found + 2 * self.num_heads + self.value_dim


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: keys and values of all heads are matrices times one vector per token.

    That vector and one rotated key that all heads share are all that is cached. Source: DeepSeek-V2 (arXiv:2405.04434),
    section 2.1.

    Args:
        rank: width of the vector.
        query_rank: width from which queries are made likewise; 0: they come straight from the hidden state.
        plain_dim, rope_dim: of a query head, what is not rotated, and then what is.
        value_dim: of a head's value.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: gated MLPs of which each token goes through a few.

    Args:
        num_active: experts per token, the router's likeliest.
        intermediate_size: width of one.
        layout: how the checkpoint stores them: the model_type of a family that does so.
        is_normalized: the shares of the active ones are scaled to sum to 1.
        has_bias: router and experts have biases.
        is_mxfp4: they are stored as four-bit blocks, as in "gpt_oss".
        scoring: what the router's outputs become, and so the shares: their "softmax", or the "sigmoid" of each.
        has_choice_bias: a number for each expert is added to its score where experts are chosen, not to shares.
        is_router_float: scores are computed in float32.
        num_groups, num_active_groups: experts are chosen from the best groups, by the sum of a group's two best scores,
            or without a choice bias by the best one.
        scale: a factor of the shares.
        shared_size: width of an expert that all tokens go through; 0: none.
        has_shared_gate: its output is multiplied by a sigmoid of its own.
        has_gate: see Traits.
        scales_inputs: shares multiply what experts take, not what they give.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    layout: str
    is_normalized: bool = True
    has_bias: bool = False
    is_mxfp4: bool = False
    scoring: str = "softmax"
    has_choice_bias: bool = False
    is_router_float: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    scale: float = 1.0
    shared_size: int = 0
    has_shared_gate: bool = False
    has_gate: bool = True
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Traits):
    """A decoder-only transformer: RMSNorm, grouped-query attention with RoPE, a gated MLP.

    Args:
        max_position: tokens of context that the model was made for, or that are computed exactly: see above.
        layers: num_layers of them; empty: all have rope and no window.
        latent: None: the usual attention. With it, num_kv_heads is 1 and head_dim the width of what is cached.
        attention_scale: factor of the scores; None: 1 / sqrt(head_dim).
        attention_cap, logits_cap: scores, and logits, are cap * tanh(value / cap).
        embedding_scale, residual_scale, logits_scale: factors of embeddings, of what each block adds, and of logits.
        factors: what tensors of a layer are multiplied by while they load, by their usual names.
        packed, fp8: how the checkpoint's matrices are quantised; both None: they are floats (or mxfp4, see experts).
        recurrence: of its recurrent layers; None: all attend.
        num_scores: of a classification head in the generating one's place; 0: it has none.
        num_draft_layers: further layers of the checkpoint, which predict later tokens: see mtp_layer.
        dtype: of the checkpoint, e.g. "bfloat16"; None when config.json does not say.
        eos_token_ids: from config.json (generation_config.json may name more).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerConfig, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    recurrence: RecurrentConfig | None = None
    activation: str = "silu"
    attention_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    factors: tuple[tuple[str, float], ...] = ()
    tie_embeddings: bool = False
    packed: PackedConfig | None = None
    fp8: Fp8Config | None = None
    num_draft_layers: int = 0
    num_scores: int = 0
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def layer(self, index: int) -> LayerConfig:
        return self.layers[index] if self.layers else LayerConfig(self.rope)

    @property
    def mtp_layer(self) -> "ModelConfig":
        """The one layer of the head that predicts the token after the next, as a model of its own."""
        layer = LayerConfig(self.rope, is_sparse=self.experts is not None)
        return replace(self, num_layers=1, layers=(layer,), recurrence=None, num_draft_layers=0, num_scores=0)

    @property
    def packing(self) -> PackedConfig | Fp8Config | None:
        """How the checkpoint's matrices are quantised."""
        return self.packed or self.fp8

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.all_layers if layer.attends))

    @property
    def longest_window(self) -> int | None:
        """How many tokens a token depends on in all layers, itself included; None: in some layer on all before it."""
        known = [window for window in self.windows if window is not None]
        return max(known) if self.recurrence is None and len(known) == len(self.windows) else None

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        return self.layers or (LayerConfig(self.rope),) * self.num_layers

    @property
    def num_recurrent_layers(self) -> int:
        return sum(layer.is_recurrent for layer in self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Those that cache keys and values."""
        return sum(layer.attends for layer in self.all_layers)

    @property
    def query_size(self) -> int:
        """Width of q: all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of k, and of v: all KV heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def attended_size(self) -> int:
        """Width of what attention gives to its output's matrix: all heads."""
        return self.query_size if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def rope_head_dim(self) -> int:
        """Of a head, what may be rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def num_cached(self) -> int:
        """Vectors of kv_size that are cached for a token and layer: key and value, or one for both."""
        return 2 if self.latent is None else 1

    @property
    def num_parameters(self) -> int:
        """Counted once where embeddings are tied."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return sum(map(self._layer_parameters, self.all_layers)) + embeddings + self.hidden_size

    def _layer_parameters(self, layer: LayerConfig) -> int:
        num_norms, found = 0, 0
        if layer.attends or layer.is_recurrent:
            num_norms += sum(map(bool, self.norms[:2]))
            found += layer.attends * self._attention_parameters + layer.is_recurrent * self._recurrent_parameters
        if layer.has_mlp:
            num_norms += sum(map(bool, self.norms[2:]))
            found += self._expert_parameters if layer.is_sparse else self._mlp_parameters
        return found + num_norms * self.hidden_size

    @property
    def _attention_parameters(self) -> int:
        qkv = self.query_size + 2 * self.kv_size
        qk_norms = {"head": 2 * self.head_dim, "all": self.query_size + self.kv_size}.get(self.qk_norm, 0)
        qkv += self.query_size * self.has_output_gate
        biases = qkv * self.qkv_bias + self.hidden_size * self.output_bias
        sinks = self.num_heads * self.has_sinks
        if self.latent is not None:
            return self._latent_parameters
        return (qkv + self.query_size) * self.hidden_size + qk_norms + biases + sinks

    @property
    def _recurrent_parameters(self) -> int:
        if self.recurrence is None:
            return 0
        own = self.recurrence
        matrices = (own.input_size + own.output_size) * self.hidden_size
        return matrices + own.has_bias * (own.input_size + self.hidden_size) + own.num_parameters

    @property
    def _latent_parameters(self) -> int:
        assert self.latent is not None
        latent = self.latent
        queries = self.num_heads * (latent.plain_dim + latent.rope_dim)
        query = queries * self.hidden_size
        if latent.query_rank:
            query = latent.query_rank * (self.hidden_size + 1 + queries)
        cached = (latent.rank + latent.rope_dim) * self.hidden_size + latent.rank
        up = self.num_heads * (latent.plain_dim + latent.value_dim) * latent.rank
        return query + cached + up + self.attended_size * self.hidden_size

    @property
    def _mlp_parameters(self) -> int:
        inner = (1 + self.has_gate) * self.intermediate_size
        biases = (inner + self.hidden_size) * self.mlp_bias
        return (inner + self.intermediate_size) * self.hidden_size + biases

    @property
    def _expert_parameters(self) -> int:
        """Of one layer."""
        if self.experts is None:
            return 0
        width = self.experts.intermediate_size
        num_matrices = 2 + self.experts.has_gate
        expert = num_matrices * self.hidden_size * width + (2 * width + self.hidden_size) * self.experts.has_bias
        router = self.hidden_size + self.experts.has_bias + self.experts.has_choice_bias
        shared = self.hidden_size * (num_matrices * self.experts.shared_size + self.experts.has_shared_gate)
        return self.experts.num_experts * (expert + router) + shared


def parse_model_config(config: Mapping[str, Any], context: int | None = None) -> ModelConfig:
    """Parse a model's config.json.

    Args:
        context: tokens that sequences may have; None: as many as the model is served for by default. Longrope has long
            factors where it is more than the original context.

    Raises:
        UnsupportedModel: the architecture, or a field that would change the output, is not computed here.
        BadCheckpoint: a field is missing, of the wrong type, or contradicts another.
    """
    config = text_config(config)
    family = _family(config)
    config = _renamed({**family.defaults, **config}, family)
    name = architecture_of(config)
    _refuse_output_changing_fields(config, family)
    sizes = _sizes(config, family)
    max_position = positive_int(config, "max_position_embeddings", DEFAULT_POSITIONS)
    latent = sizes["latent"]
    rope_head_dim = sizes["head_dim"] if latent is None else latent.rope_dim
    rope, local_rope = _ropes(config, family, max_position, rope_head_dim, context)
    biased = {part for name, parts in family.biases.items() if not name or read_bool(config, name) for part in parts}
    layers = _layers(config, family, sizes["num_layers"], rope, local_rope)
    is_recurrent = any(layer.is_recurrent for layer in layers)
    return ModelConfig(
        architecture=family.architecture,
        **sizes,
        max_position=_served_positions(config, family, rope, max_position, context),
        rms_norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
        rope=rope,
        layers=layers,
        qkv_bias="qkv" in biased,
        output_bias="output" in biased,
        mlp_bias="mlp" in biased,
        **_traits(config, family),
        experts=_experts(config, family),
        recurrence=_recurrence(config, family, "recurrence" in biased) if is_recurrent else None,
        activation=_activation(config, family),
        **_scales(config, family, latent),
        tie_embeddings=read_bool(config, "tie_word_embeddings") or _generating(name) != name,
        num_scores=num_scores_of(config),
        packed=parse_packed(config),
        fp8=parse_fp8(config),
        num_draft_layers=count(config, "num_nextn_predict_layers"),
        dtype=_dtype(config),
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_token_ids=token_ids(config, "eos_token_id"),
    )


def _traits(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    traits = {trait.name: getattr(family, trait.name) for trait in dataclasses.fields(Traits)}
    if family.qk_norm_field and not read_bool(config, family.qk_norm_field):
        traits["qk_norm"] = "none"
    return traits


def stated_context(config: Mapping[str, Any]) -> int:
    """Tokens of context by config.json, or its family's default; fewer may be served.

    Raises:
        UnsupportedModel, BadCheckpoint: as parse_model_config.
    """
    return positive_int(stated_fields(config), "max_position_embeddings", DEFAULT_POSITIONS)


def stated_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's fields in config.json, with its family's defaults.

    Raises:
        UnsupportedModel, BadCheckpoint: as parse_model_config.
    """
    config = text_config(config)
    family = _family(config)
    return _renamed({**family.defaults, **config}, family)


def _renamed(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """With the usual names of what the family calls otherwise."""
    aliases = {usual: config[own] for own, usual in family.aliases.items() if config.get(own) is not None}
    config = {**config, **aliases}
    if not family.is_of_blocks:
        return config
    pattern, blocks = config.get("hybrid_override_pattern"), config.get("layer_types")
    if blocks is None and isinstance(pattern, str) and set(pattern) <= set(BLOCKS):
        blocks = [BLOCKS[letter] for letter in pattern]
    if not isinstance(blocks, list):
        raise bad_field(f"layers_block_type={blocks!r} and hybrid_override_pattern={pattern!r} name no layers.")
    blocks = [OLDER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in blocks]
    return {**config, "layer_types": blocks, "num_hidden_layers": len(blocks)}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json as if its language model were the whole; see TextTower.

    Raises:
        UnsupportedModel: the language model is not computed here.
    """
    names = config.get("architectures") or [config.get("model_type")]
    named = names[0] if isinstance(names, list) else None
    tower = next((tower for name, tower in TEXT_TOWERS.items() if named in (name, tower.model_type)), None)
    if tower is None:
        return config
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else {**config, "model_type": tower.texts[0]}
    model_type = text.get("model_type", tower.texts[0])
    if model_type not in tower.texts:
        raise unsupported_field("text_config.model_type", model_type, tower.texts)
    shared = {name: config[name] for name in _SHARED_FIELDS if config.get(name) is not None}
    ties = config.get("tie_word_embeddings")  # the whole model's goes before its part's
    ties = text.get("tie_word_embeddings", tower.ties_embeddings) if ties is None else ties
    return {**shared, **text, "tie_word_embeddings": ties, "model_type": model_type, "architectures": None}


def _sizes(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    hidden_size = positive_int(config, "hidden_size", at_most=MAX_WIDTH)
    num_heads = positive_int(config, "num_attention_heads", at_most=MAX_WIDTH)
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise bad_field(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}.")
    latent = _latent(config) if family.has_latent else None
    head_dim = positive_int(config, "head_dim", family.defaults.get("head_dim") or hidden_size // num_heads)
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.rank + latent.rope_dim
    if head_dim % 2:
        raise bad_field(f"head_dim={head_dim} is odd: RoPE turns pairs.")
    if num_heads * head_dim > MAX_WIDTH:
        raise bad_field(f"num_attention_heads={num_heads} of head_dim={head_dim} are more than any model has.")
    return {
        "vocab_size": positive_int(config, "vocab_size", at_most=MAX_WIDTH),
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(config, family),
        "num_layers": positive_int(config, "num_hidden_layers", at_most=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "latent": latent,
    }


def _intermediate_size(config: Mapping[str, Any], family: Family) -> int:
    """LFM2's MLP has two thirds of it, times a factor, rounded up; Granite 4's is the shared expert's."""
    if family.experts is not None and _has_no_experts(config, family):
        return positive_int(config, family.experts.shared_width, at_most=MAX_WIDTH)
    if "intermediate_size_mlp" in family.defaults:  # Llama 4's dense layers
        return positive_int(config, "intermediate_size_mlp", at_most=MAX_WIDTH)
    size = positive_int(config, "intermediate_size", at_most=MAX_WIDTH)
    if "block_auto_adjust_ff_dim" not in family.defaults or not read_bool(config, "block_auto_adjust_ff_dim"):
        return size
    size, multiple = int(2 * size / 3), positive_int(config, "block_multiple_of", at_most=MAX_WIDTH)
    size = int(positive_float(config, "block_ffn_dim_multiplier", 1.0) * size)
    return -(-size // multiple) * multiple


def _recurrence(config: Mapping[str, Any], family: Family, has_bias: bool) -> RecurrentConfig | None:
    if not family.recurrence:
        return None
    if parse_packed(config) is not None or parse_fp8(config) is not None:
        raise unsupported_field("quantization_config", config["quantization_config"], (None,))
    if family.recurrence == "conv":
        width = positive_int(config, "hidden_size", at_most=MAX_WIDTH)
        taps = _taps(config, "conv_L_cache")
        return RecurrentConfig("conv", taps, width, has_bias=has_bias, has_convolution_bias=has_bias)
    if family.recurrence == "mamba":
        return _state_space(config, family)
    heads, key_heads, key_dim, value_dim = (
        positive_int(config, f"linear_{name}", at_most=MAX_WIDTH)
        for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
    )
    channels = 2 * key_heads * key_dim + heads * value_dim
    if heads % key_heads or channels > MAX_WIDTH:
        raise bad_field(
            f"linear_num_value_heads={heads} is not a multiple of linear_num_key_heads={key_heads}, or more than any "
            "model has."
        )
    return RecurrentConfig(
        "linear_attention",
        _taps(config, "linear_conv_kernel_dim"),
        channels,
        heads,
        key_heads,
        key_dim,
        value_dim,
        is_grouped=family.model_type == "qwen3_next",
        eps=positive_float(config, "rms_norm_eps", 1e-6),
    )


def _state_space(config: Mapping[str, Any], family: Family) -> RecurrentConfig:
    heads, groups, key_dim = (
        positive_int(config, f"mamba_{name}", at_most=MAX_WIDTH) for name in ("n_heads", "n_groups", "d_state")
    )
    width = config.get("mamba_d_ssm")
    if width is None and "mamba_expand" in family.defaults:
        width = positive_int(config, "mamba_expand") * positive_int(config, "hidden_size", at_most=MAX_WIDTH)
    given = config.get("mamba_d_head")
    value_dim = width // heads if given in ("auto", None) and isinstance(width, int) else given
    value_dim = positive_int({"mamba_d_head": value_dim}, "mamba_d_head", at_most=MAX_WIDTH)
    channels = heads * value_dim + 2 * groups * key_dim
    if width not in (None, heads * value_dim) or heads % groups or channels > MAX_WIDTH:
        raise bad_field(
            f"mamba_n_heads={heads} of mamba_d_head={value_dim} are not the width {width!r}, not a multiple of "
            f"mamba_n_groups={groups}, or more than any model has."
        )
    return RecurrentConfig(
        "mamba",
        _taps(config, "mamba_d_conv"),
        channels,
        heads,
        groups,
        key_dim,
        value_dim,
        has_bias=read_bool(config, "mamba_proj_bias"),
        has_convolution_bias=read_bool(config, "mamba_conv_bias", True),
        has_norm=read_bool(config, "mamba_rms_norm", True),
        is_normed_first=read_bool(config, "mamba_norm_before_gate"),
        eps=positive_float(config, "rms_norm_eps", 1e-6),
        input_factors=_input_factors(config) if family.has_factors else (),
    )


def _input_factors(config: Mapping[str, Any]) -> tuple[float, ...]:
    of_all = positive_float(config, "ssm_in_multiplier", 1.0)
    factors = tuple(of_all * factor for factor in _floats(config, "ssm_multipliers", 5))
    return () if set(factors) == {1.0} else factors


def _factors(config: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Falcon-H1's, of matrices in place of what they are multiplied by, as llama.cpp's converter has them."""
    before = positive_float(config, "attention_in_multiplier", 1.0)
    gate, down = _floats(config, "mlp_multipliers", 2)
    found = {
        "self_attn.q_proj.weight": before,
        "self_attn.k_proj.weight": before * positive_float(config, "key_multiplier", 1.0),
        "self_attn.v_proj.weight": before,
        "self_attn.o_proj.weight": positive_float(config, "attention_out_multiplier", 1.0),
        "mamba.out_proj.weight": positive_float(config, "ssm_out_multiplier", 1.0),
        "mlp.gate_proj.weight": gate,
        "mlp.down_proj.weight": down,
    }
    return tuple((name, factor) for name, factor in found.items() if factor != 1)


def _floats(config: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    """Ones, where the field is not set."""
    listed = config.get(name)
    listed = [1.0] * length if listed is None else listed
    if not isinstance(listed, list | tuple) or len(listed) != length:
        raise bad_field(f"{name}={listed!r} is not a list of {length} numbers.")
    return tuple(positive_float({name: one}, name) for one in listed)


def _taps(config: Mapping[str, Any], name: str) -> int:
    taps = positive_int(config, name, at_most=BLOCK_SIZE)
    if taps < 2:
        raise bad_field(f"{name}={taps}: a convolution sees 2 tokens at least.")
    return taps


def _latent(config: Mapping[str, Any]) -> LatentConfig:
    rank, rope_dim = (positive_int(config, name, at_most=MAX_WIDTH) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if rank % 2 or rope_dim % 2:
        raise bad_field(f"kv_lora_rank={rank} or qk_rope_head_dim={rope_dim} is odd: RoPE turns pairs.")
    plain_dim, value_dim = (positive_int(config, f"{name}_head_dim", at_most=MAX_WIDTH) for name in ("qk_nope", "v"))
    return LatentConfig(rank, count(config, "q_lora_rank"), plain_dim, rope_dim, value_dim)


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or [config.get("model_type")]
    if not isinstance(names, list):
        raise bad_field(f"architectures={names!r} is not a list.")
    for family in FAMILIES:
        if _generating(names[0]) in (family.architecture, family.model_type):
            if config.get("model_type") not in (family.model_type, None):  # by which transformers computes
                raise bad_field(f"model_type={config['model_type']!r} contradicts architectures={names!r}.")
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModel(f"Architecture {names[0]!r} is not supported.", f"use a model of one of: {supported}.")


def _generating(architecture: str | None) -> str | None:
    """The name of the architecture with a head that generates, whichever head it has."""
    for end in (SCORING, HEADLESS):
        if architecture is not None and architecture.endswith(end) and not architecture.endswith("TextModel"):
            return architecture.removesuffix(end) + "ForCausalLM"
    return architecture


def architecture_of(config: Mapping[str, Any]) -> str:
    """Its name by config.json; "" where it has none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def num_scores_of(config: Mapping[str, Any]) -> int:
    """What a classification head tells of a prompt; 0: it has none."""
    if not architecture_of(config).endswith(SCORING):
        return 0
    labels = config.get("id2label")
    return positive_int(config, "num_labels", len(labels) if isinstance(labels, Mapping) else 2, at_most=MAX_SCORES)


def _refuse_output_changing_fields(config: Mapping[str, Any], family: Family) -> None:
    neutral = {name: values for name, values in _NEUTRAL.items() if name not in family.biases}
    if family.has_partial_rope:
        del neutral["partial_rotary_factor"]
    neutral |= family.neutral
    if family.windows == "none":
        neutral["use_sliding_window"] = (False, None)
    for name, values in neutral.items():
        if config.get(name) not in values:
            raise unsupported_field(name, config[name], values)
    if not _is_mxfp4(config, family):
        refuse_other_methods(config)


def _activation(config: Mapping[str, Any], family: Family) -> str:
    if family.activation is not None:
        return family.activation
    name = config.get(family.activation_field) or family.defaults.get(family.activation_field, "silu")
    if name not in ACTIVATIONS:
        raise unsupported_field(family.activation_field, name, ACTIVATIONS)
    return str(name)


def _scales(config: Mapping[str, Any], family: Family, latent: LatentConfig | None) -> dict[str, Any]:
    """Factors and caps of Granite, Falcon-H1, Gemma and DeepSeek; other families have none of these fields."""
    if latent is not None:
        return {
            "attention_scale": (latent.plain_dim + latent.rope_dim) ** -0.5 * _yarn_growth(_rope_fields(config)) ** 2
        }
    if family.has_factors:
        return {
            "embedding_scale": positive_float(config, "embedding_multiplier", 1.0),
            "logits_scale": positive_float(config, "lm_head_multiplier", 1.0),
            "factors": _factors(config),
        }
    if family.model_type in ("granite", "granitemoehybrid", "granitehybrid"):
        return {
            "attention_scale": positive_float(config, "attention_multiplier"),
            "embedding_scale": positive_float(config, "embedding_multiplier", 1.0),
            "residual_scale": positive_float(config, "residual_multiplier", 1.0),
            "logits_scale": 1 / positive_float(config, "logits_scaling", 1.0),
        }
    scales: dict[str, Any] = {}
    if family.has_scaled_embedding:
        scales["embedding_scale"] = positive_int(config, "hidden_size") ** 0.5
    if "query_pre_attn_scalar" in family.defaults:
        scales |= {
            "attention_scale": positive_float(config, "query_pre_attn_scalar") ** -0.5,
            "attention_cap": _optional_float(config, "attn_logit_softcapping"),
            "logits_cap": _optional_float(config, "final_logit_softcapping"),
        }
    return scales


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the two spellings the older takes precedence, as in transformers."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise bad_field(f"the rope configuration is not an object: {given!r}.")
    return given


def _ropes(
    config: Mapping[str, Any], family: Family, max_position: int, head_dim: int, context: int | None
) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without a window, and of those with one; transformers 5 nests them by layer type."""
    given = _rope_fields(config)
    is_nested = any(isinstance(value, Mapping) for value in given.values())
    if is_nested and not family.has_local_rope:
        raise unsupported_field("rope_parameters", sorted(given), ("one configuration for all layers",))
    beside = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}

    def parse(part: Mapping[str, Any]) -> RopeConfig:
        merged = {"rope_theta": 10_000.0, **beside, **part}
        neutral = _NEUTRAL["partial_rotary_factor"]
        if not family.has_partial_rope and merged.get("partial_rotary_factor") not in neutral:
            raise unsupported_field("partial_rotary_factor", merged["partial_rotary_factor"], (1.0,))
        if family.has_mrope and merged.get("rope_type", merged.get("type")) == "mrope":
            merged["rope_type"] = "default"
        return _rope(config, merged, family, max_position, head_dim, context)

    if not family.has_local_rope:
        return parse(given), parse(given)
    full, local = (given.get(name) or {} for name in LAYER_TYPES) if is_nested else (given, {})
    theta = config.get("rope_local_base_freq", config.get("rope_theta", 10_000.0))
    return parse(full), parse({"rope_theta": theta, **local})


def _served_positions(
    config: Mapping[str, Any], family: Family, rope: RopeConfig, max_position: int, context: int | None
) -> int:
    """Yarn stretches the original context it names; longrope's short factors are for the original one.

    Llama 4's chunks are computed as far as there is one.
    """
    if rope.kind == "yarn" and "original_max_position_embeddings" in {**config, **_rope_fields(config)}:
        return max(max_position, int(min(rope.original_max_position * rope.factor, MAX_COUNT)))
    if family.has_chunks and config.get("attention_chunk_size") is not None:
        return min(max_position, positive_int(config, "attention_chunk_size"))
    if rope.kind == "longrope" and not _is_long(rope, context):
        return min(max_position, rope.original_max_position)
    return max_position


def _is_long(rope: RopeConfig, context: int | None) -> bool:
    return context is not None and context > rope.original_max_position


def _optional_float(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else positive_float(config, name)


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype", config.get("torch_dtype"))  # torch_dtype: before transformers 5
    return name if isinstance(name, str) else None


def _layers(
    config: Mapping[str, Any], family: Family, num_layers: int, rope: RopeConfig, local_rope: RopeConfig
) -> tuple[LayerConfig, ...]:
    """Which layers have rope, a window, experts."""
    is_rotated = _rotated_layers(config, family, num_layers)
    is_windowed = _windowed_layers(config, family, is_rotated)
    window = positive_int(config, "sliding_window") if any(is_windowed) else None
    is_recurrent = _recurrent_layers(config, family, num_layers)
    is_sparse = _sparse_layers(config, family, num_layers)
    layers = []
    for index in range(num_layers):
        recurrent, windowed = is_recurrent[index], is_windowed[index]
        attends, has_mlp = family.has_parallel_mixers or not recurrent, True
        if family.is_of_blocks:
            attends = config["layer_types"][index] == "full_attention"
            has_mlp = not attends and not recurrent
        own_rope: RopeConfig | None = local_rope if windowed else rope
        if not attends or not is_rotated[index]:
            own_rope = _unturned(config) if family.has_chunks else None
        own_window = window if windowed else None
        layers.append(LayerConfig(own_rope, own_window, is_sparse[index], recurrent, attends, has_mlp))
    return () if set(layers) == {LayerConfig(rope)} else tuple(layers)


def _unturned(config: Mapping[str, Any]) -> RopeConfig | None:
    """Llama 4's layers without RoPE: their queries grow with the position."""
    if not config.get("attn_temperature_tuning"):
        return None
    growth, scale = positive_float(config, "attn_scale"), positive_int(config, "floor_scale")
    return RopeConfig(1.0, "none", original_max_position=scale, query_growth=growth, query_offset=1)


def _recurrent_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """By layer_types, or else full_attn_idxs (LFM2, Bamba) or full_attention_interval (Qwen)."""
    if not family.recurrence or family.has_parallel_mixers:
        return [family.has_parallel_mixers] * num_layers
    own = "linear_attention" if family.recurrence == "mamba" else family.recurrence
    kinds, listed = (own, "full_attention"), config.get("layer_types")
    attending = config.get("full_attn_idxs")
    if isinstance(listed, list):
        listed = [OLDER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]
    elif isinstance(attending, list):
        listed = [kinds[index in attending] for index in range(num_layers)]
    elif "full_attention_interval" in family.defaults:
        interval = positive_int(config, "full_attention_interval")
        listed = [kinds[(index + 1) % interval == 0] for index in range(num_layers)]
    allowed = (*kinds, "mlp", "moe") if family.is_of_blocks else kinds
    if not isinstance(listed, list) or len(listed) != num_layers or any(kind not in allowed for kind in listed):
        raise unsupported_field("layer_types", listed, allowed)
    if "full_attention" not in listed:
        raise unsupported_field("layer_types", listed, ("some full_attention",))
    return [kind == own for kind in listed]


def _rotated_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """SmolLM3, Llama 4: no_rope_layers has a 1 for layers that do have rope. Granite 4: all or none."""
    if family.rotates == "if asked":
        kind = config.get("position_embedding_type")
        if kind not in ("rope", "nope", None):
            raise unsupported_field("position_embedding_type", kind, ("rope", "nope"))
        return [kind == "rope"] * num_layers
    if family.windows != "unrotated" and family.rotates != "listed":
        return [family.rotates == "all"] * num_layers
    listed = config.get("no_rope_layers")
    if listed is None or (listed == [] and family.rotates == "listed"):
        interval = positive_int(config, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(item not in (0, 1) for item in listed):
        raise bad_field(f"no_rope_layers={listed!r} is not a list of {num_layers} zeros and ones.")
    return [bool(item) for item in listed[:num_layers]]


def _windowed_layers(config: Mapping[str, Any], family: Family, is_rotated: list[bool]) -> list[bool]:
    """By layer_types, or else by the family; where the family leaves no choice, both must agree."""
    num_layers = len(is_rotated)
    by_family = _windowed_by_family(config, family, is_rotated)
    listed = config.get("layer_types")
    if family.has_chunks:
        kinds = ["chunked_attention" if rotated else "full_attention" for rotated in is_rotated]
        if listed not in (None, kinds):
            raise unsupported_field("layer_types", listed, (kinds,))
        return by_family
    if listed is None or family.recurrence:
        return by_family
    if not isinstance(listed, list) or len(listed) != num_layers or any(kind not in LAYER_TYPES for kind in listed):
        raise unsupported_field("layer_types", listed, LAYER_TYPES)
    is_windowed = [kind == "sliding_attention" for kind in listed]
    has_choice = family.windows == "pattern" or (
        family.windows in ("late", "unrotated") and bool(config.get("use_sliding_window"))
    )
    if is_windowed != by_family and not has_choice:
        raise unsupported_field(
            "layer_types", listed, (["sliding_attention" if w else "full_attention" for w in by_family],)
        )
    return is_windowed


def _windowed_by_family(config: Mapping[str, Any], family: Family, is_rotated: list[bool]) -> list[bool]:
    num_layers = len(is_rotated)
    if family.windows == "pattern":
        interval = positive_int(config, "sliding_window_pattern")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    has_window = config.get("sliding_window") is not None
    if family.windows in ("switched", "late", "unrotated"):
        has_window = has_window and read_bool(config, "use_sliding_window")
    if not has_window or family.windows == "none":
        return [False] * num_layers
    if family.windows == "late":
        first = config.get("max_window_layers")
        if not isinstance(first, int):
            raise bad_field(f"max_window_layers={first!r} is not a number of layers.")
        return [index >= first for index in range(num_layers)]
    if family.windows == "unrotated":
        return [not rotated for rotated in is_rotated]
    return [True] * num_layers


def _sparse_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """See ExpertFields.dense."""
    if family.experts is None or family.experts.dense == "none" or _has_no_experts(config, family):
        return [family.experts is not None and not _has_no_experts(config, family)] * num_layers
    if family.experts.dense == "blocks":
        return [kind == "moe" for kind in config["layer_types"]]
    if family.experts.dense == "interleaved":
        step, sparse = positive_int(config, "interleave_moe_layer_step"), config.get("moe_layers")
        sparse = range(step - 1, num_layers, step) if sparse is None else sparse
        if not isinstance(sparse, list | range):
            raise bad_field(f"moe_layers={sparse!r} is not a list of layers.")
        return [index in sparse for index in range(num_layers)]
    if family.experts.dense == "first":
        listed = config.get("mlp_layer_types")
        if isinstance(listed, list) and len(listed) == num_layers and set(listed) <= {"dense", "sparse"}:
            return [kind == "sparse" for kind in listed]
        if listed is not None:
            raise unsupported_field("mlp_layer_types", listed, (["dense"], ["sparse"]))
        first = count(config, "first_k_dense_replace")
        return [index >= first for index in range(num_layers)]
    if family.experts.dense == "ernie":
        first, end = count(config, "moe_layer_start_index"), config.get("moe_layer_end_index")
        last = num_layers - 1 if end == -1 else count(config, "moe_layer_end_index")
        step = positive_int(config, "moe_layer_interval")
        return [first <= index <= last and (index + 1) % step == 0 for index in range(num_layers)]
    dense, step = config.get("mlp_only_layers") or [], positive_int(config, "decoder_sparse_step")
    if not isinstance(dense, list):
        raise bad_field(f"mlp_only_layers={dense!r} is not a list of layers.")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def _has_no_experts(config: Mapping[str, Any], family: Family) -> bool:
    return family.experts is not None and family.experts.is_optional and config.get(family.experts.count[0]) == 0


def _experts(config: Mapping[str, Any], family: Family) -> ExpertsConfig | None:
    if family.experts is None or _has_no_experts(config, family):
        return None
    if family.experts.dense == "blocks" and "moe" not in config["layer_types"]:
        return None
    fields = family.experts
    field = next((name for name in fields.count if config.get(name) is not None), fields.count[-1])
    num_experts = positive_int(config, field, at_most=MAX_EXPERTS)
    num_active = positive_int(config, fields.active)
    if num_active > num_experts:
        raise bad_field(f"{fields.active}={num_active} is more than {field}={num_experts}.")
    width = positive_int(config, fields.width, at_most=MAX_WIDTH)
    shared_size = 0
    if fields.shared_width:
        shared_size = positive_int(config, fields.shared_width, at_most=MAX_WIDTH)
    elif fields.shared_count:
        shared_size = width * count(config, fields.shared_count)
    experts = ExpertsConfig(
        num_experts,
        num_active,
        width,
        layout=family.model_type,
        is_normalized=not fields.normalized or read_bool(config, fields.normalized),
        has_bias=family.model_type == "gpt_oss",
        is_mxfp4=_is_mxfp4(config, family),
        scoring=fields.scoring,
        has_choice_bias=fields.has_choice_bias,
        is_router_float=fields.is_router_float,
        scale=positive_float(config, fields.scale, 1.0) if fields.scale else 1.0,
        shared_size=shared_size,
        has_shared_gate=fields.has_shared_gate,
        has_gate=family.has_gate,
        scales_inputs=fields.scales_inputs,
        **(_groups(config, num_experts, num_active) if fields.has_groups else {}),
    )
    widths = (positive_int(config, "hidden_size"), experts.intermediate_size)
    if experts.is_mxfp4 and any(width % 32 for width in widths):
        raise bad_field(f"mxfp4 blocks of 32 do not divide hidden_size and intermediate_size={widths}.")
    return experts


def _groups(config: Mapping[str, Any], num_experts: int, num_active: int) -> dict[str, int]:
    if config.get("topk_method") == "greedy":
        return {}
    num_groups = positive_int(config, "n_group", 1)
    num_active_groups = positive_int(config, "topk_group", 1)
    if num_experts % num_groups or not num_active <= num_active_groups * (num_experts // num_groups) <= num_experts:
        raise bad_field(
            f"n_group={num_groups} and topk_group={num_active_groups} do not divide {num_experts} experts, or leave "
            f"fewer than {num_active} to choose from."
        )
    if num_groups > 1 and num_experts // num_groups < 2:
        raise bad_field(f"n_group={num_groups} leaves one expert in a group.")
    return {"num_groups": num_groups, "num_active_groups": num_active_groups}


def _is_mxfp4(config: Mapping[str, Any], family: Family) -> bool:
    """Of gpt-oss's experts only."""
    given = config.get("quantization_config")
    return family.model_type == "gpt_oss" and isinstance(given, Mapping) and given.get("quant_method") == "mxfp4"


def _rope(
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    family: Family,
    max_position: int,
    head_dim: int,
    context: int | None,
) -> RopeConfig:
    """Parse one rope configuration, in the spelling of transformers 5 or an earlier one.

    Args:
        config: the whole config.json, for fields beside it.
        given: rope_theta and its scaling.
        context: see parse_model_config.
    Source: transformers 5, modeling_rope_utils.py.
    """
    kind = given.get("rope_type", given.get("type", "default"))
    if family.model_type == "phi3" and kind in ("su", "yarn"):  # it was called so at first
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise unsupported_field("rope_type", kind, ROPE_KINDS)
    growth = positive_float(given, "llama_4_scaling_beta") if given.get("llama_4_scaling_beta") else 0.0
    if family.has_query_scale and growth and kind != "yarn":
        raise unsupported_field("llama_4_scaling_beta", growth, (None,))
    theta = positive_float(given, "rope_theta")
    partial = positive_float(given, "partial_rotary_factor", 1.0)
    if partial > 1 or int(head_dim * partial) % 2 or int(head_dim * partial) == 0:
        raise bad_field(f"partial_rotary_factor={partial} of head_dim={head_dim} is not a number of pairs.")
    rope = RopeConfig(theta, partial=partial)
    if kind in ("default", "dynamic"):
        return rope
    if kind == "linear":
        return replace(rope, kind=kind, factor=positive_float(given, "factor"))
    beside = config.get("original_max_position_embeddings")  # Phi-3's place for it, which takes precedence
    merged = given if beside is None else {**given, "original_max_position_embeddings": beside}
    original = positive_int(merged, "original_max_position_embeddings", max_position)
    rope = replace(rope, kind=kind, original_max_position=original)
    if kind == "llama3":
        return _llama3(merged, rope)
    rope = replace(rope, factor=positive_float(merged, "factor", max_position / original))
    if kind == "yarn":
        return replace(_yarn(merged, rope), query_growth=growth if family.has_query_scale else 0.0)
    return _longrope(merged, rope, rope.rotary_dim(head_dim) // 2, "long" if _is_long(rope, context) else "short")


def _llama3(given: Mapping[str, Any], rope: RopeConfig) -> RopeConfig:
    low, high = positive_float(given, "low_freq_factor"), positive_float(given, "high_freq_factor")
    if not low < high:
        raise bad_field(f"rope: low_freq_factor={low} is not below high_freq_factor={high}.")
    return replace(rope, factor=positive_float(given, "factor"), low_freq_factor=low, high_freq_factor=high)


def _yarn_growth(given: Mapping[str, Any]) -> float:
    """What latent attention multiplies queries and keys by, each, beside attention_factor."""
    if given.get("rope_type", given.get("type", "default")) == "default" or not given.get("mscale_all_dim"):
        return 1.0
    factor = positive_float(given, "factor")
    return 0.1 * positive_float(given, "mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn(given: Mapping[str, Any], rope: RopeConfig) -> RopeConfig:
    """Source: YaRN (arXiv:2309.00071), section 3.4 for the attention factor."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        attention_factor = magnitude(positive_float(given, "mscale"))
        attention_factor /= magnitude(positive_float(given, "mscale_all_dim"))
    fast, slow = positive_float(given, "beta_fast", 32.0), positive_float(given, "beta_slow", 1.0)
    if fast < slow:
        raise bad_field(f"rope: beta_fast={fast} is below beta_slow={slow}.")
    return replace(
        rope,
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=read_bool(given, "truncate", True),
        attention_factor=positive_float(given, "attention_factor", attention_factor),
    )


def _longrope(given: Mapping[str, Any], rope: RopeConfig, num_factors: int, kind: str) -> RopeConfig:
    """kind: "short" or "long". Source: LongRoPE (arXiv:2402.13753)."""
    name, factor, original = f"{kind}_factor", rope.factor, rope.original_max_position
    factors = given.get(name)
    if not isinstance(factors, list) or len(factors) != num_factors:
        raise bad_field(f"rope: {name} is not a list of {num_factors} numbers.")
    of_pairs = tuple(positive_float({name: number}, name) for number in factors)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return replace(rope, factors=of_pairs, attention_factor=positive_float(given, "attention_factor", attention_factor))
