"""Parameters of layers' own inputs and of streams (Gemma 3n, 4), and the tensors that fill them. Thread: engine.

gpu/layer_inputs.py computes with them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.config import LayerInputs, ModelConfig, StreamsConfig
from gpu.blocks import BlockWeight


class Allocates(Protocol):
    """A layer's parameters as they are allocated, by the names of the tensors that fill them."""

    @property
    def config(self) -> ModelConfig: ...

    def whole(self, name: str, *shape: int) -> Tensor: ...

    def norm(self, name: str, *shape: int) -> Tensor: ...


@dataclass(slots=True)
class LayerInputWeights:
    """What a layer does with its own input: see LayerInputs."""

    gate: Tensor  # [size, hidden]
    output: Tensor  # [hidden, size]
    norm: Tensor  # [hidden]


@dataclass(slots=True)
class StreamsWeights:
    """A layer's: see StreamsConfig."""

    norm: Tensor  # [hidden]
    router: Tensor  # [count, hidden]
    predict: Tensor  # [count * count, count]
    correct: Tensor  # [count, count]
    scale: Tensor  # [hidden]
    low: Tensor  # [rank, hidden]
    high: Tensor  # [hidden, rank]
    residual_norm: Tensor  # [hidden]


@dataclass(slots=True)
class InputsWeights:
    """What makes all layers' own inputs."""

    embedding: Tensor | BlockWeight  # [LayerInputs.vocab_size, layers * size]
    project: Tensor  # [layers * size, hidden]
    norm: Tensor  # [size]


@dataclass(slots=True)
class OuterStreamsWeights:
    """[hidden, hidden] for each stream but the active one: what makes it of an embedding, and what it is read by."""

    spread: tuple[Tensor, ...]
    joined: tuple[Tensor, ...]


def inputs_of(layer_inputs: LayerInputs, found: Allocates) -> LayerInputWeights:
    """Allocate a layer's."""
    hidden = found.config.hidden_size
    return LayerInputWeights(
        found.whole("per_layer_input_gate.weight", layer_inputs.size, hidden),
        found.whole("per_layer_projection.weight", hidden, layer_inputs.size),
        found.norm("post_per_layer_input_norm", hidden),
    )


def streams_of(streams: StreamsConfig, found: Allocates) -> StreamsWeights:
    """Allocate a layer's."""
    hidden, num_streams = found.config.hidden_size, streams.count
    return StreamsWeights(
        found.norm("altup.router_norm", hidden),
        found.whole("altup.modality_router.weight", num_streams, hidden),
        found.whole("altup.prediction_coefs.weight", num_streams**2, num_streams),
        found.whole("altup.correction_coefs.weight", num_streams, num_streams),
        found.whole("altup.correct_output_scale", hidden),
        found.whole("laurel.linear_left.weight", streams.rank, hidden),
        found.whole("laurel.linear_right.weight", hidden, streams.rank),
        found.norm("laurel.post_laurel_norm", hidden),
    )


def ends_of(
    config: ModelConfig, named: Callable[..., Tensor]
) -> tuple[InputsWeights | None, OuterStreamsWeights | None]:
    """Allocate what is not a layer's. named(name, *shape): a tensor that "model.{name}.weight" fills."""
    inputs = streams = None
    if config.inputs is not None:
        size, width = config.inputs.size, config.num_layers * config.inputs.size
        inputs = InputsWeights(
            named("embed_tokens_per_layer", config.inputs.vocab_size, width),
            named("per_layer_model_projection", width, config.hidden_size),
            named("per_layer_projection_norm", size),
        )
    if config.streams is not None:
        shape, others = (config.hidden_size, config.hidden_size), range(config.streams.count - 1)
        ends = ("altup_projections", "altup_unembed_projections")
        streams = OuterStreamsWeights(*(tuple(named(f"{end}.{index}", *shape) for index in others) for end in ends))
    return inputs, streams
