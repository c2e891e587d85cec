"""What Gemma 3n and 4 have beside attention and MLPs: inputs of each layer's own, and several streams. Thread: engine.

A layer's own input comes from the token's id, by a second embedding that has some numbers for each layer, and from the
first hidden state. Of several streams (AltUp) each layer predicts all from all, computes the active one from its
prediction, and corrects the others by how far that one's prediction was off. Streams are [count, tokens, hidden]. Small
sums over streams are written out, so that a token's bits do not depend on how many are computed together.
"""

import math

import torch
from torch import Tensor

from core.config import LayerInputs, ModelConfig, StreamsConfig
from gpu.blocks import BlockWeight
from gpu.input_weights import InputsWeights, LayerInputWeights, OuterStreamsWeights, StreamsWeights
from gpu.linear import Embed, Linear
from gpu.operators import Operators

LEAST_SQUARE = 1e-5  # of a stream's mean: transformers, modeling_gemma3n.py
HALF = 2**-0.5


class MakeInputs:
    """Makes all layers' own inputs."""

    def __init__(self, config: LayerInputs, weights: InputsWeights, operators: Operators) -> None:
        embedding = weights.embedding
        self._operators, self._norm, self._config = operators, weights.norm, config
        self._embed: Embed = (
            operators.block_rows(embedding) if isinstance(embedding, BlockWeight) else operators.embedding(embedding)
        )
        self._project = operators.linear(weights.project, None)
        self._embed_scale = float(torch.tensor(config.size**0.5, dtype=weights.norm.dtype))

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """token_ids: [tokens]. x: embeddings, [tokens, hidden]. Returns [tokens, layers, size]."""
        size = self._config.size
        known = torch.where(token_ids < self._config.vocab_size, token_ids, 0)
        own = self._embed(known).view(len(x), -1, size) * self._embed_scale
        projected = (self._project(x) * x.shape[1] ** -0.5).view(len(x), -1, size)
        return (self._operators.norm(projected, self._norm) + own) * HALF


class LayerInput:
    """What a layer adds for its own input."""

    def __init__(self, config: ModelConfig, weights: LayerInputWeights, operators: Operators) -> None:
        self._gate, self._output = operators.linear(weights.gate, None), operators.linear(weights.output, None)
        self._gated, self._norm, self._operators = operators.gated(config.activation), weights.norm, operators

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        """x: [tokens, hidden]; given: [tokens, size], the layer's; returns [tokens, hidden]."""
        gated = self._gated(torch.cat([self._gate(x), given], 1))
        return self._operators.norm(self._output(gated), self._norm)


class OuterStreams:
    """Streams before the first layer, and behind the last."""

    def __init__(self, weights: OuterStreamsWeights, operators: Operators) -> None:
        self._spread: list[Linear] = [operators.linear(weight, None) for weight in weights.spread]
        self._joined: list[Linear] = [operators.linear(weight, None) for weight in weights.joined]

    def spread(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden]; returns [count, tokens, hidden]."""
        return torch.stack([x, *(_as_long_as(x, project(x)) for project in self._spread)])

    def joined(self, streams: Tensor) -> Tensor:
        """[tokens, hidden]"""
        first, *others = streams.unbind()
        read = [_as_long_as(first, project(one)) for project, one in zip(self._joined, others, strict=True)]
        return torch.stack([first, *read]).mean(0)


def _as_long_as(like: Tensor, x: Tensor) -> Tensor:
    """x, of the same length for each token as the other. Both: [tokens, hidden]."""
    wanted = like.float().square().mean(-1, keepdim=True).sqrt()
    own = x.float().square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return (x * wanted / own).to(x.dtype)


class LayerStreams:
    """What a layer does with the streams around attention and MLP."""

    def __init__(self, config: StreamsConfig, weights: StreamsWeights, operators: Operators) -> None:
        self._operators, self._norm, self._residual_norm = operators, weights.norm, weights.residual_norm
        self.active, self._is_scaled = config.active, config.is_scaled
        self._router, self._predict, self._correct, self._low, self._high = (
            operators.linear(weight, None)
            for weight in (weights.router, weights.predict, weights.correct, weights.low, weights.high)
        )
        self._scale = weights.scale

    def _shares(self, x: Tensor) -> Tensor:
        """[tokens, count]"""
        normed = self._operators.norm(x, self._norm) / x.shape[1]
        return self._router(normed).float().tanh().to(x.dtype)

    def predicted(self, streams: Tensor) -> Tensor:
        """Streams as predicted from all."""
        count, numbers = len(streams), streams.float()
        by = self._predict(self._shares(streams[self.active])).float().T.view(count, count, -1, 1)
        found = numbers.clone()
        for one in range(count):
            for other in range(count):
                found[one] += numbers[other] * by[one, other]
        return found.to(streams.dtype)

    def residual(self, normed: Tensor) -> Tensor:
        """Beside attention: what it reads plus a low-rank change of it. [tokens, hidden], also returned so."""
        changed = self._high(self._low(normed))
        return normed + self._operators.norm(changed, self._residual_norm)

    def with_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        return (x + residual) / math.sqrt(2)

    def corrected(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Streams, of which the active one was computed: [tokens, hidden]."""
        by = self._correct(self._shares(computed)).float().T.unsqueeze(-1) + 1  # [count, tokens, 1]
        off = computed.float() - predicted[self.active].float()
        return (predicted.float() + off * by).to(predicted.dtype)

    def read(self, streams: Tensor) -> Tensor:
        """What the layer's own input multiplies: [tokens, hidden]."""
        active = streams[self.active]
        return active * self._scale if self._is_scaled else active
