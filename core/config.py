"""The engine's settings, and what a model is (read by config_json.py): frozen, checked once, at start. Any thread."""

from dataclasses import dataclass, replace
from typing import Any

from core.config_fields import Traits
from core.prequantized import Packing

BLOCK_SIZE = 16  # tokens per KV block
INTER_TOKEN_TARGET = 1.6  # of EngineConfig
QUANTIZE_SCHEMES = ("int8", "fp8", "int4")


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
            CPU has kernels for it. On a GPU rows stay floats; with "auto" and "int8" a file's blocks stay as stored.
        quantize_cache_bytes: limit of quantised weights kept on disk; 0: none are.
        kv_dtype: "auto": keys and values are stored in dtype; "int8": as 8-bit integers, with a scale for each head of
            a token.
        has_window_blocks: layers with a window have KV blocks of their own, where others have none; False: one table.
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
    has_window_blocks: bool = True
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
            (the same with another blend), "longrope" (each frequency divided by its own factor), "proportional"
            ("linear", and only the first pairs turn) or "none" (nothing turns).
        factor, low_freq_factor, high_freq_factor: of "linear", "proportional", "llama3" and "yarn".
        original_max_position: tokens of context before it was stretched.
        beta_fast, beta_slow: turns within the original context, above and below which "yarn" keeps and divides.
        is_truncated: whether "yarn" rounds its bounds to whole dimensions.
        factors: of "longrope", one per frequency.
        attention_factor: what the turned q and k are multiplied by, each.
        partial: the part of each head that turns, its first dimensions.
        turning: of "proportional": the part of the pairs that turn; the others count where frequencies are spaced.
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
    turning: float = 1.0
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
        chunk: a token attends to those before it within its chunk of so many, a multiple of BLOCK_SIZE; None: to all.
        head_dim, num_kv_heads, intermediate_size: None: the model's.
        source: the layer whose keys and values it attends over, with an equal window; None: it has its own.
        has_values: False: a token's value is its key, as it was before norm and RoPE.
        sparsity: the part of its MLP's gates that are zero, of a normal distribution; 0: none is made so.
    """

    rope: RopeConfig | None
    window: int | None = None
    is_sparse: bool = False
    is_recurrent: bool = False
    attends: bool = True
    has_mlp: bool = True
    chunk: int | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    source: int | None = None
    has_values: bool = True
    sparsity: float = 0.0

    @property
    def caches(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.attends and self.source is None

    @property
    def sight(self) -> "Sight":
        return Sight(self.window, self.chunk, self.head_dim, self.num_kv_heads)

    @property
    def rotates(self) -> bool:
        return self.rope is not None and self.rope.kind != "none"


@dataclass(frozen=True, slots=True)
class Sight:
    """What layers that attend alike have in common: what a token sees, and sizes of heads. See LayerConfig."""

    window: int | None = None
    chunk: int | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None


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
        is_grouped, is_split: the checkpoint stores linear attention's matrices by key head; strengths and steps alone.
        has_float_steps: strengths and steps have a matrix of their own: of the first one, the checkpoint quantises all
            but these.
        is_tiled: heads that share a key head lie as far apart as there are key heads; False: side by side.
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
    is_split: bool = False
    has_float_steps: bool = False
    is_tiled: bool = False
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
        is_split: the checkpoint has keys' and values' matrices apart, by head, the keys' transposed.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    is_split: bool = False


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Each layer adds something of the token itself, which a second embedding has for it (Gemma 3n, 4).

    Args:
        vocab_size: of that embedding; other tokens have the first one's.
        size: of what a layer gets.
    """

    vocab_size: int
    size: int

    def num_parameters(self, hidden_size: int, num_layers: int) -> int:
        of_layer = 2 * self.size * hidden_size + hidden_size
        return num_layers * (of_layer + self.size * (self.vocab_size + hidden_size)) + self.size


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """A token has several hidden states, of which layers compute one and predict the others (Gemma 3n).

    Source: AltUp (arXiv:2301.13310); of the low-rank residual: LAuReL (arXiv:2411.07501).

    Args:
        count, active: of streams; the one that layers compute.
        rank: of what is added to what attention adds.
        is_scaled: what the layer's own input reads of the active stream is scaled.
    """

    count: int
    active: int
    rank: int
    is_scaled: bool

    def num_parameters(self, hidden_size: int, num_layers: int) -> int:
        of_layer = (self.count + 3 + 2 * self.rank) * hidden_size + self.count**2 * (self.count + 1)
        return num_layers * of_layer + 2 * (self.count - 1) * hidden_size**2


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
        are_beside: experts, shared expert and router each norm the layer's own state, and what they give is normed,
            too; a number for each expert multiplies its shares (Gemma 4).
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
    are_beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Traits):
    """A decoder-only transformer: RMSNorm, grouped-query attention with RoPE, a gated MLP.

    Args:
        max_position: tokens of context that the model was made for, or that are computed exactly (config_json.py).
        layers: num_layers of them; empty: all have rope and no window.
        latent: None: the usual attention. With it, num_kv_heads is 1 and head_dim the width of what is cached.
        attention_scale: factor of the scores; None: 1 / sqrt(head_dim).
        attention_cap, logits_cap: scores, and logits, are cap * tanh(value / cap).
        embedding_scale, residual_scale, logits_scale: factors of embeddings, of what each block adds, and of logits.
        factors: what tensors of a layer are multiplied by while they load, by their usual names.
        has_unknown_factors: the checkpoint's matrices are multiplied by factors that it does not tell.
        packing: how the checkpoint's matrices are quantised; None: they are floats (or mxfp4, see experts).
        recurrence: of its recurrent layers; None: all attend.
        inputs, streams: None: it has none.
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
    inputs: LayerInputs | None = None
    streams: StreamsConfig | None = None
    activation: str = "silu"
    attention_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    factors: tuple[tuple[str, float], ...] = ()
    has_unknown_factors: bool = False
    tie_embeddings: bool = False
    packing: Packing | None = None
    num_draft_layers: int = 0
    num_scores: int = 0
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def layer(self, index: int) -> LayerConfig:
        return self.layers[index] if self.layers else LayerConfig(self.rope)

    def of_layer(self, index: int) -> "ModelConfig":
        """The model as if all layers had this one's sizes."""
        return self.with_sizes(self.layer(index))

    def with_sizes(self, layer: LayerConfig) -> "ModelConfig":
        named = {name: getattr(layer, name) for name in ("head_dim", "num_kv_heads", "intermediate_size")}
        own: dict[str, Any] = {name: size for name, size in named.items() if size is not None}
        if self.experts is not None and self.experts.are_beside and layer.intermediate_size is not None:
            own["experts"] = replace(self.experts, shared_size=layer.intermediate_size)
        return replace(self, **own) if own else self

    @property
    def kinds(self) -> tuple["ModelConfig", ...]:
        """The model as if all layers had the sizes of one, for each that differs from the others."""
        by_sizes = {(one.head_dim, one.num_kv_heads, one.intermediate_size): one for one in self.all_layers}
        return tuple(map(self.with_sizes, by_sizes.values()))

    @property
    def cached_heads(self) -> tuple[tuple[int, int], ...]:
        """(KV heads, their size) of each layer that caches keys and values, in order."""
        return tuple(
            (layer.num_kv_heads or self.num_kv_heads, layer.head_dim or self.head_dim)
            for layer in self.all_layers
            if layer.caches
        )

    @property
    def mtp_layer(self) -> "ModelConfig":
        """The one layer of the head that predicts the token after the next, as a model of its own."""
        layer = LayerConfig(self.rope, is_sparse=self.experts is not None)
        return replace(self, num_layers=1, layers=(layer,), recurrence=None, num_draft_layers=0, num_scores=0)

    @property
    def sights(self) -> tuple[Sight, ...]:
        """The different ones of its layers."""
        return tuple(dict.fromkeys(layer.sight for layer in self.all_layers if layer.attends))

    @property
    def longest_window(self) -> int | None:
        """How many tokens a token depends on in all layers, itself included; None: in some layer on all before it."""
        known = [sight.window or sight.chunk for sight in self.sights]
        lengths = [length for length in known if length is not None]
        return max(lengths) if self.recurrence is None and len(known) == len(lengths) else None

    def kv_windows(self, length: int) -> tuple[int | None, ...]:
        """How many tokens a token sees in each layer that caches, in order; None: all of such a context."""
        seen = [layer.window or layer.chunk or length for layer in self.all_layers if layer.caches]
        return tuple(one if one < length else None for one in seen)

    def is_cut(self, length: int) -> bool:
        """Whether some layer sees a part of such a context alone, by chunks."""
        return any(layer.chunk is not None and layer.chunk < length for layer in self.layers)

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        return self.layers or (LayerConfig(self.rope),) * self.num_layers

    @property
    def num_recurrent_layers(self) -> int:
        return sum(layer.is_recurrent for layer in self.layers)

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
        beside = [own for own in (self.inputs, self.streams) if own is not None]
        embeddings += sum(own.num_parameters(self.hidden_size, self.num_layers) for own in beside)
        layers = (self.with_sizes(layer)._layer_parameters(layer) for layer in self.all_layers)
        return sum(layers) + embeddings + self.hidden_size

    def _layer_parameters(self, layer: LayerConfig) -> int:
        num_norms, found = 0, int(self.has_layer_scale)
        if layer.attends or layer.is_recurrent:
            num_norms += sum(map(bool, self.norms[:2]))
            found += layer.attends * self._attention_parameters + layer.is_recurrent * self._recurrent_parameters
            if layer.source is not None or not layer.has_values:
                found -= self._missing_parameters(layer)
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

    def _missing_parameters(self, layer: LayerConfig) -> int:
        """Of what _attention_parameters counts, what the layer has no matrices for."""
        one = self.kv_size * (self.hidden_size + self.qkv_bias)
        return one if layer.source is None else 2 * one + self.head_dim * (self.qk_norm == "head")

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
        if self.experts.are_beside:
            shared += 3 * self.hidden_size + self.experts.num_experts  # norms, and a scale for each
        return self.experts.num_experts * (expert + router) + shared
