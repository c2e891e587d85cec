"""Encoders: models whose tokens all see one another, read from config.json. They embed and score, and keep no KV."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config_fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    bad_field,
    positive_float,
    positive_int,
    read_bool,
    unsupported_field,
)

# model_type -> the family whose layers it has
ENCODERS = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "modernbert": "modernbert",
}
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
    "rope_scaling": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """
    Args:
        family: "bert", "roberta" (positions begin later) or "modernbert" (norms before the blocks, RoPE, a gated MLP).
        max_position: tokens of a prompt.
        first_position: of the table of positions, that the first token has.
        num_types: of texts that are told apart; 0: the family tells none apart.
        windows: of each layer: how far a token sees to each side; None: all.
        thetas: of each layer's RoPE; 0: it has none.
        num_scores: of a classification head; 0: none.
        head_pooling: which tokens that one is of.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    norm_eps: float
    activation: str
    first_position: int = 0
    num_types: int = 0
    windows: tuple[int | None, ...] = ()
    thetas: tuple[float, ...] = ()
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    has_norm_bias: bool = True
    num_scores: int = 0
    head_pooling: str = "cls"
    head_activation: str = "gelu"

    @property
    def is_modern(self) -> bool:
        return self.family == "modernbert"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def is_encoder(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in ENCODERS


def parse_encoder_config(config: Mapping[str, Any], num_scores: int) -> EncoderConfig:
    """
    Args:
        num_scores: see EncoderConfig.

    Raises:
        UnsupportedModel: a field that would change the output is not computed here.
        BadCheckpoint: a field is missing or of the wrong type.
    """
    family = ENCODERS[config["model_type"]]
    for name, values in _NEUTRAL.items():
        if config.get(name) not in values:
            raise unsupported_field(name, config[name], values)
    sizes: dict[str, Any] = {
        "vocab_size": positive_int(config, "vocab_size"),
        "hidden_size": positive_int(config, "hidden_size", at_most=MAX_WIDTH),
        "intermediate_size": positive_int(config, "intermediate_size", at_most=MAX_WIDTH),
        "num_layers": positive_int(config, "num_hidden_layers", at_most=MAX_LAYERS),
        "num_heads": positive_int(config, "num_attention_heads"),
    }
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise bad_field("hidden_size is no multiple of num_attention_heads.")
    positions = positive_int(config, "max_position_embeddings", 8192 if family == "modernbert" else 512)
    if family == "modernbert":
        return EncoderConfig(
            family=family,
            **sizes,
            max_position=positions,
            norm_eps=positive_float(config, "norm_eps", 1e-5),
            activation=_activation(config, "hidden_activation"),
            **_modern_layers(config, sizes["num_layers"]),
            has_attention_bias=read_bool(config, "attention_bias"),
            has_mlp_bias=read_bool(config, "mlp_bias"),
            has_norm_bias=read_bool(config, "norm_bias"),
            num_scores=num_scores,
            head_pooling=str(config.get("classifier_pooling") or "cls"),
            head_activation=_activation(config, "classifier_activation"),
        )
    first = positive_int(config, "pad_token_id", 1) + 1 if family == "roberta" else 0
    return EncoderConfig(
        family=family,
        **sizes,
        max_position=positions - first,
        norm_eps=positive_float(config, "layer_norm_eps", 1e-12),
        activation=_activation(config, "hidden_act"),
        first_position=first,
        num_types=positive_int(config, "type_vocab_size", 2),
        num_scores=num_scores,
    )


def _activation(config: Mapping[str, Any], name: str) -> str:
    found = config.get(name) or "gelu"
    if found not in ACTIVATIONS:
        raise unsupported_field(name, found, ACTIVATIONS)
    return str(found)


def _modern_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Windows and thetas: every third layer sees all, unless config.json says otherwise."""
    every = positive_int(config, "global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or ["sliding" if index % every else "full" for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise bad_field(f"layer_types={kinds!r} is not a list of {num_layers}.")
    are_local = [str(kind).startswith("sliding") for kind in kinds]
    ropes = config.get("rope_parameters") or {}
    thetas: dict[bool, float] = {}
    for is_local, name, old, usual in (
        (False, "full_attention", "global_rope_theta", 160_000.0),
        (True, "sliding_attention", "local_rope_theta", 10_000.0),
    ):
        given = ropes.get(name) or {}
        if given.get("rope_type", "default") != "default":
            raise unsupported_field("rope_type", given["rope_type"], ("default",))
        thetas[is_local] = positive_float(given, "rope_theta", positive_float(config, old, usual))
    window = positive_int(config, "local_attention", 128) // 2
    return {
        "windows": tuple(window if is_local else None for is_local in are_local),
        "thetas": tuple(thetas[is_local] for is_local in are_local),
    }
