"""The model: a decoder-only transformer, from token ids to logits. Thread: engine.

Families differ in fields of ModelConfig and in which parameters a layer has. Norms and RoPE are computed in float32.
Keys and values are written to the paged cache before attention reads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.config import ModelConfig, RopeConfig, Sight
from gpu.adapters import SITES, AdaptedLinear, AdaptedRows, StepAdapters
from gpu.attention import RaggedRows, Scores
from gpu.blocks import BlockWeight
from gpu.kv_cache import KVCache, LayerKV
from gpu.layer_inputs import LayerInput, LayerStreams, MakeInputs, OuterStreams
from gpu.layers import BesideExperts, Block, Experts, Latent, Mlp, Rope, WithSharedExpert, keep_largest, sigmoid
from gpu.linear import Embed, Linear
from gpu.operators import HeadNorms, Operators
from gpu.parallel.ranks import norm_heads
from gpu.parameters import ExpertWeights, LayerWeights, ModelWeights
from gpu.recurrence import Recurrence, RecurrentRows
from gpu.rows import StepTokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs.

    Args:
        attending: by what a layer sees.
        asked: [some], indexes of the tokens whose logits are wanted; None: all, in order.
        adapted: None: no token has an adapter.
        recurrent: None: no layer is.
    """

    tokens: StepTokens
    attending: dict[Sight, RaggedRows]
    asked: Tensor | None
    adapted: AdaptedRows | None = None
    recurrent: RecurrentRows | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """A step's position embedding by one of the ropes; see Rope."""

    factors: Tensor | None  # [tokens, 1, head_dim / 2], complex
    query_scale: Tensor | None  # [tokens, 1, 1]


UNROTATED = Rotation(None, None)
ComputeLayers = Callable[[Tensor, list[Rotation], Batch], Tensor]
"""Embeddings [tokens, hidden] to last hidden states, [asked, hidden]"""


@dataclass(slots=True)
class LayerAttention:
    """A layer's attention."""

    rope: int | None  # index among the model's; None: q and k are not rotated
    sight: Sight
    head_dim: int
    num_kv_heads: int
    has_own: bool  # keys and values; False: it attends over those of a layer before it
    has_values: bool
    qkv: Linear  # hidden -> query + 2 * kv; see LatentWeights, LayerConfig.source and has_values
    head_norms: HeadNorms | None
    query_norm: Tensor | None  # where keys are another layer's
    latent: Latent | None
    cached: int  # index among the layers that cache
    scores: Scores
    output: Linear  # all heads -> hidden


@dataclass(slots=True)
class LayerRecurrence:
    """A layer's recurrence."""

    taken: Linear  # hidden -> RecurrentConfig.input_size, without `steps`
    steps: Linear | None  # hidden -> 2 * heads; see LayerWeights
    mix: Recurrence
    state: int  # index among the recurrent layers
    given: Linear  # RecurrentConfig.output_size -> hidden


@dataclass(slots=True)
class Layer:
    """One layer, ready to compute: attention, a recurrence or both, and an MLP. What it lacks is None."""

    norm: Tensor | None  # [hidden], before attention and recurrence
    attention: LayerAttention | None
    recurrence: LayerRecurrence | None
    post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]
    mlp: Block | None
    mlp_post_norm: Tensor | None  # [hidden]
    inputs: LayerInput | None
    streams: LayerStreams | None
    scale: float

    @property
    def mixes(self) -> bool:
        return self.attention is not None or self.recurrence is not None

    @property
    def first_norm(self) -> Tensor | None:
        return self.norm if self.mixes else self.mlp_norm


class Model:
    """Takes the weights over: their layers, which may be read only then, and a tied embedding.

    Args:
        takes_adapters: rows may have adapters (Batch.adapted).
        ends: embedding and head of another model; None: the weights'.

    Attributes:
        adapted: what the layers' matmuls read; None: it takes none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        operators: Operators,
        takes_adapters: bool = False,
        ends: tuple[Embed, Linear] | None = None,
    ) -> None:
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self.operators = operators
        self.config = config
        self.norm = weights.norm  # [hidden]
        self.embed, self.lm_head = _ends(weights, self.operators) if ends is None else ends
        self.score = None if weights.score is None else operators.small(weights.score, None)  # hidden -> scores
        used = _ropes(config)
        self.ropes = [Rope(rope, head_dim, device) for rope, head_dim in used]
        self._inputs = self._streams = None
        if config.inputs is not None and weights.inputs is not None:
            self._inputs = MakeInputs(config.inputs, weights.inputs, operators)
        if config.streams is not None and weights.streams is not None:
            self._streams = OuterStreams(weights.streams, operators)
        layers = iter(weights.layers)
        self.layers = [_layer(config, next(layers), index, used, self.operators) for index in range(config.num_layers)]
        self.adapted = StepAdapters(operators.low_rank()) if takes_adapters else None
        if self.adapted is not None:
            for index, one in enumerate(self.layers):
                for owner, site in adapter_sites(one):
                    setattr(owner, site, AdaptedLinear(getattr(owner, site), index, site, self.adapted))
        self._next_norms = [layer.first_norm for layer in self.layers[1:]] + [None]
        # Rounded to the weights' format, as in training.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self._residual_scale = float(torch.tensor(config.residual_scale, dtype=dtype))

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens; returns the last hidden states of those asked for: [asked, hidden]."""
        x = self._begin(batch.tokens)
        adapted, with_adapters = self.adapted, batch.adapted
        if adapted is not None:
            adapted.groups = None if with_adapters is None else with_adapters.groups
        if batch.recurrent is not None:
            batch.recurrent.copy_states()
        positions = batch.tokens.positions
        rotations = [Rotation(rope.rotation(positions), rope.query_scale(positions)) for rope in self.ropes]
        compute = partial(self._through_layers if self._streams is None else self._through_streams, cache=cache)
        few = None if self._inputs is not None else self.operators.few_layers
        return compute(x, rotations, batch) if few is None else few(compute, x, rotations, batch)

    def _through_layers(self, x: Tensor, rotations: list[Rotation], batch: Batch, cache: KVCache) -> Tensor:
        """x: embeddings, [tokens, hidden]; returns as forward() does."""
        adapted, with_adapters, first_norm = self.adapted, batch.adapted, self.layers[0].first_norm
        given = None if self._inputs is None else self._inputs(batch.tokens.token_ids, x)  # [tokens, layers, size]
        normed = x if first_norm is None else self.operators.norm(x, first_norm)
        for index, (layer, next_norm) in enumerate(zip(self.layers, self._next_norms, strict=True)):
            mixed = self._mixed(layer, normed, rotations, batch, cache) if layer.mixes else None
            if layer is self.layers[-1]:  # the other tokens' outputs are not needed from here on
                if batch.asked is not None:
                    x, normed = x.index_select(0, batch.asked), normed.index_select(0, batch.asked)
                    given = None if given is None else given.index_select(0, batch.asked)
                    mixed = None if mixed is None else mixed.index_select(0, batch.asked)
                    if adapted is not None and with_adapters is not None:
                        adapted.groups = with_adapters.asked
                if not len(x):
                    return x
            if mixed is not None:
                x, normed = self._add(x, mixed, layer.post_norm, next_norm if layer.mlp is None else layer.mlp_norm)
            if layer.mlp is not None:
                added = layer.mlp(normed)
                if self.operators.ranks is not None:
                    added = self.operators.ranks.sum(added)
                x, normed = self._add(x, added, layer.mlp_post_norm, next_norm)  # [tokens, hidden] each
            if layer.inputs is not None and given is not None:
                x = x + layer.inputs(x, given[:, index])
            if layer.inputs is not None or layer.scale != 1:
                x = x * layer.scale
                normed = x if next_norm is None else self.operators.norm(x, next_norm)
        if adapted is not None:
            adapted.groups = None  # an adapter's memory goes with its last request
        return x

    def _through_streams(self, x: Tensor, rotations: list[Rotation], batch: Batch, cache: KVCache) -> Tensor:
        """The same for a model with several streams."""
        assert self._inputs is not None
        assert self._streams is not None
        given, streams = self._inputs(batch.tokens.token_ids, x), self._streams.spread(x)
        for index, layer in enumerate(self.layers):
            own = layer.streams
            assert own is not None
            assert layer.norm is not None
            assert layer.mlp is not None
            assert layer.inputs is not None
            predicted = own.predicted(streams)
            x = predicted[own.active]
            normed = self.operators.norm(x, layer.norm)
            mixed = self._mixed(layer, normed, rotations, batch, cache)
            x = own.with_residual(self._add(x, mixed, layer.post_norm, None)[0], own.residual(normed))
            normed = x if layer.mlp_norm is None else self.operators.norm(x, layer.mlp_norm)
            x, _ = self._add(x, layer.mlp(normed), layer.mlp_post_norm, None)
            streams = own.corrected(predicted, x)
            streams[1:] += layer.inputs(own.read(streams), given[:, index])
        x = self._streams.joined(streams)
        return x if batch.asked is None else x.index_select(0, batch.asked)

    def _begin(self, tokens: StepTokens) -> Tensor:
        """What the first layer reads: [tokens, hidden]."""
        x = self.embed(tokens.token_ids)
        return x.mul_(self._embedding_scale) if self._embedding_scale != 1 else x

    def normed(self, x: Tensor) -> Tensor:
        """The last norm. x: [some, hidden], from forward(); also returned so."""
        return self.operators.norm(x, self.norm)

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """
        Args:
            x: [some, hidden], from forward().
            out: [some, vocab], float32: where to write them; not with several ranks.

        Returns:
            [some, vocab], float32; with several ranks, on the first alone.
        """
        if not len(x):
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        found = self.lm_head(self.normed(x))
        logits = found.float() if out is None else out.copy_(found)
        if self.config.logits_scale != 1:
            logits = logits.mul_(self.config.logits_scale)
        if self.config.logits_cap is not None:
            logits = logits.div_(self.config.logits_cap).tanh_().mul_(self.config.logits_cap)
        ranks = self.operators.ranks
        return logits if ranks is None else ranks.gather_columns(logits, self.config.vocab_size)

    def probes(self, size_bytes: int) -> list[tuple[Linear, int]]:
        """Matmuls of the first layers, with their input widths: at least so many bytes of weights, if there are."""
        found: list[tuple[Linear, int]] = []
        size = 0
        for index, layer in enumerate(self.layers):
            config, mlps = self.config.of_layer(index), [layer.mlp] if isinstance(layer.mlp, Mlp) else []
            width = config.intermediate_size
            if isinstance(layer.mlp, Experts | BesideExperts) and config.experts is not None:
                mlps, width = layer.mlp.experts, config.experts.intermediate_size
            if layer.attention is not None:
                found += [(layer.attention.qkv, config.hidden_size), (layer.attention.output, config.attended_size)]
            if layer.recurrence is not None and config.recurrence is not None:
                given = layer.recurrence.given, config.recurrence.output_size
                found += [(layer.recurrence.taken, config.hidden_size), given]
            for mlp in mlps:
                found += [(mlp.gate_up, config.hidden_size), (mlp.down, width)]
            size += (
                2 * (config.query_size + config.kv_size) * config.hidden_size
                + 3 * len(mlps) * width * config.hidden_size
            )
            if size * self.norm.element_size() >= size_bytes:
                break
        return found

    def _mixed(self, layer: Layer, x: Tensor, rotations: list[Rotation], batch: Batch, cache: KVCache) -> Tensor:
        """What attention and recurrence add. x: [tokens, hidden], normed; also returned so."""
        attention, recurrence, added = layer.attention, layer.recurrence, None
        if attention is not None:
            added = self._attention(attention, x, rotations, batch, cache.layers[attention.cached])
        if recurrence is not None:
            assert batch.recurrent is not None, "the model has recurrent layers"
            taken = recurrence.taken(x)
            taken = taken if recurrence.steps is None else torch.cat([taken, recurrence.steps(x)], 1)
            beside = recurrence.given(recurrence.mix(taken, batch.recurrent, recurrence.state))
            added = beside if added is None else added.add_(beside)
        assert added is not None, "it attends, or is recurrent"
        return added

    def _attention(
        self, layer: LayerAttention, x: Tensor, rotations: list[Rotation], batch: Batch, kv: LayerKV
    ) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        operators = self.operators
        turned = UNROTATED if layer.rope is None else rotations[layer.rope]
        if layer.latent is not None and turned.factors is not None:
            query, cached = layer.latent.queries_and_cached(layer.qkv(x), turned.factors)
            kv.keys.index_copy_(0, batch.tokens.slots_in(kv), cached)
            attended = operators.attention.attend(query, kv, batch.attending[layer.sight], layer.scores)
            added = layer.output(layer.latent.values(attended))
            return added if operators.ranks is None else operators.ranks.sum(added)
        taken, gate = layer.qkv(x), None
        if self.config.has_output_gate:
            gate, taken = taken.tensor_split([self.config.query_size], 1)
        qkv = taken.reshape(x.shape[0], -1, layer.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        if layer.has_own:
            qkv = self._with_values(layer, qkv)
            norms = self._own_norms(layer, qkv)
            query = operators.rotate_and_store(qkv, norms, turned.factors, kv, batch.tokens.slots_in(kv))
        else:
            query = operators.rotated(qkv, layer.query_norm, turned.factors)
        if turned.query_scale is not None:
            query = query.mul_(turned.query_scale)
        attending = batch.attending[layer.sight]
        attended = operators.attention.attend(query, kv, attending, layer.scores)
        added = layer.output(attended if gate is None else attended * sigmoid(gate))
        return added if operators.ranks is None else operators.ranks.sum(added)

    def _with_values(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        """With values that are keys, and normed. qkv: [tokens, heads + 1 or 2 * kv_heads, head_dim]."""
        if not layer.has_values:
            keys = qkv[:, -layer.num_kv_heads :]  # pairs lie side by side: interleave_halves
            qkv = torch.cat([qkv, torch.cat([keys[..., ::2], keys[..., 1::2]], 2)], 1)
        if not self.config.has_value_norm:
            return qkv
        query_key, values = qkv.tensor_split([qkv.shape[1] - layer.num_kv_heads], 1)
        return torch.cat([query_key, self.operators.norm(values, values.new_ones(layer.head_dim))], 1)

    def _own_norms(self, layer: LayerAttention, qkv: Tensor) -> HeadNorms | None:
        """Norms within a head; norms over all ranks' heads are applied here. qkv: see Operators.rotate_and_store."""
        norms, ranks = layer.head_norms, self.operators.ranks
        if norms is None or ranks is None or norms[0].dim() == 1:
            return norms
        norm_heads(qkv, norms, self.config.rms_norm_eps, ranks)
        return None

    def _add(
        self, x: Tensor, added: Tensor, post_norm: Tensor | None, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(x plus a block's output, the next block's input), all [tokens, hidden]."""
        if post_norm is not None:
            added = self.operators.norm(added, post_norm)
        return self.operators.add_norm(x, added, self._residual_scale, next_norm)


def adapter_sites(layer: Layer) -> Iterator[tuple[LayerAttention | LayerRecurrence | Mlp, str]]:
    """Owner and attribute of a layer's matmuls that adapters may add to."""
    for owner in (layer.attention, layer.recurrence, layer.mlp):
        if isinstance(owner, LayerAttention | LayerRecurrence | Mlp):
            yield from ((owner, site) for site in SITES if getattr(owner, site, None) is not None)


def _ends(weights: ModelWeights, operators: Operators) -> tuple[Embed, Linear]:
    """Embedding and head; a tied embedding is deleted where its rows are read from the head."""
    embedding, lm_head = weights.embedding, weights.lm_head
    if isinstance(embedding, BlockWeight):
        return operators.block_rows(embedding), operators.linear(lm_head, None)
    if lm_head is embedding:
        del weights.embedding, weights.lm_head
        return operators.tied(embedding)
    return operators.embedding(embedding), operators.linear(lm_head, None)


def _layer(
    config: ModelConfig, weights: LayerWeights, index: int, ropes: list[tuple[RopeConfig, int]], operators: Operators
) -> Layer:
    return Layer(
        norm=weights.attention_norm,
        attention=_attention(config, weights, index, ropes, operators),
        recurrence=_recurrence(config, weights, index, operators),
        post_norm=weights.attention_post_norm,
        mlp_norm=weights.mlp_norm,
        mlp=_mlp(config, weights, operators, config.layer(index).sparsity),
        mlp_post_norm=weights.mlp_post_norm,
        inputs=None if weights.inputs is None else LayerInput(config, weights.inputs, operators),
        streams=_streams(config, weights, operators),
        scale=1.0 if weights.scale is None else float(weights.scale),
    )


def _streams(config: ModelConfig, weights: LayerWeights, operators: Operators) -> LayerStreams | None:
    if config.streams is None or weights.streams is None:
        return None
    return LayerStreams(config.streams, weights.streams, operators)


def _ropes(config: ModelConfig) -> list[tuple[RopeConfig, int]]:
    """The different ones of its layers, with the sizes of heads."""
    heads = {layer: config.with_sizes(layer).rope_head_dim for layer in config.all_layers}
    return list(dict.fromkeys((layer.rope, heads[layer]) for layer in config.all_layers if layer.rope is not None))


def _attention(
    config: ModelConfig, weights: LayerWeights, index: int, ropes: list[tuple[RopeConfig, int]], operators: Operators
) -> LayerAttention | None:
    if weights.qkv is None or weights.output is None:
        return None
    layer, own, latent, head_norms = config.layer(index), config.of_layer(index), None, None
    if weights.query_norm is not None and weights.key_norm is not None:
        head_norms = (weights.query_norm, weights.key_norm)
    if config.qk_norm == "plain" and weights.attention_norm is not None and layer.rotates:  # as it would be after RoPE
        head_norms = (weights.attention_norm.new_ones(config.head_dim),) * 2
    if config.latent is not None and weights.latent is not None:
        latent = Latent(config.latent, weights.latent, operators.linear)
    source = index if layer.source is None else layer.source
    return LayerAttention(
        rope=ropes.index((layer.rope, own.rope_head_dim)) if layer.rope else None,
        sight=layer.sight,
        head_dim=own.head_dim,
        num_kv_heads=own.num_kv_heads,
        has_own=layer.source is None,
        has_values=layer.has_values,
        qkv=operators.linear(weights.qkv, weights.qkv_bias),
        head_norms=head_norms,
        query_norm=weights.query_norm,
        latent=latent,
        cached=sum(one.caches for one in config.all_layers[:source]),
        scores=Scores(config.attention_scale, config.attention_cap, weights.sinks, config.latent is not None),
        output=operators.linear(weights.output, weights.output_bias),
    )


def _recurrence(config: ModelConfig, weights: LayerWeights, index: int, operators: Operators) -> LayerRecurrence | None:
    if weights.taken is None or weights.given is None or weights.recurrent is None or config.recurrence is None:
        return None
    return LayerRecurrence(
        taken=operators.linear(weights.taken, weights.taken_bias),
        steps=None if weights.steps is None else operators.small(weights.steps, None),
        mix=operators.recurrence(config.recurrence, weights.recurrent),
        state=sum(one.is_recurrent for one in config.all_layers[:index]),
        given=operators.linear(weights.given, weights.given_bias),
    )


def _mlp(config: ModelConfig, weights: LayerWeights, operators: Operators, sparsity: float) -> Block | None:
    if weights.mlp is None:
        return None
    gated = operators.gated(config.activation)
    gated = keep_largest(gated, sparsity) if sparsity else gated
    if isinstance(weights.mlp, ExpertWeights):
        assert config.experts is not None
        mlp = weights.mlp
        if mlp.shared_gate_up is None or mlp.shared_down is None:
            return operators.experts(config.experts, mlp, gated)
        shared = Mlp(operators.linear(mlp.shared_gate_up, None), operators.linear(mlp.shared_down, None), gated)
        if mlp.norms is not None:
            beside = Experts(config.experts, mlp, gated, operators.router(config.experts, mlp), operators.linear)
            return BesideExperts(beside, shared, mlp.norms, operators.norm)
        gate = None if mlp.shared_gate is None else operators.small(mlp.shared_gate, None)
        return WithSharedExpert(operators.experts(config.experts, mlp, gated), shared, gate)
    gate_up = operators.linear(weights.mlp.gate_up, weights.mlp.gate_up_bias)
    return Mlp(gate_up, operators.linear(weights.mlp.down, weights.mlp.down_bias), gated)
