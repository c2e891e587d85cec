"""What a model's steps must at least read and compute, from its files' headers; and how long that takes at a ceiling.

Counts products with weights, attention's products, weights and keys and values read. Norms, activations, sampling and
everything done twice are a server's own cost: they make its share of the limit smaller.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import parse_model_config
from gpu.checkpoint import open_checkpoint

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Numbers of a model that cost something in each step.

    Args:
        body: of the layers' matrices, those of experts aside.
        head: of the output head; computed for the rows that sample only.
        experts: of all experts' matrices, over all layers; 0 in a dense model.
        num_experts, num_used_experts: of a layer: how many there are, and how many a token uses.
        query_width: heads times their size, times layers: what attention costs per pair of tokens.
        kv_width: keys and values that a token leaves behind, over all layers.
    """

    body: int
    head: int
    experts: int
    num_experts: int
    num_used_experts: int
    query_width: int
    kv_width: int

    def bytes_read(self, num_tokens: int, number_bytes: int, layer_bytes: float | None = None) -> float:
        """Of weights, in a step of so many tokens; of experts, those that are used if tokens choose evenly.

        Args:
            layer_bytes: of a number in the layers' matrices, where they are quantised; None: as number_bytes.
        """
        in_layers = self.body + self.experts * self._share_touched(num_tokens)
        return in_layers * (number_bytes if layer_bytes is None else layer_bytes) + self.head * number_bytes

    def flops(self, num_tokens: int, num_pairs: float, num_sampled: int) -> float:
        """Operations of a step.

        Args:
            num_pairs: over all its tokens: how many tokens each attends to, itself counted.
        """
        used = self.body + self.experts * self._share_used
        return 2.0 * (used * num_tokens + self.head * num_sampled) + 4.0 * self.query_width * num_pairs

    @property
    def _share_used(self) -> float:
        return self.num_used_experts / self.num_experts if self.num_experts else 0.0

    def _share_touched(self, num_tokens: int) -> float:
        return 1 - (1 - self._share_used) ** num_tokens


@dataclass(frozen=True, slots=True)
class Speed:
    """What the machine can do at most; see bench/limits.py."""

    read_bytes_per_s: float
    flops: float


def work_of(directory: Path) -> ModelWork:
    """
    Raises:
        StartupError, OSError, ValueError: the directory's files.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(directory, parse_model_config(config).packing)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    return count_work(config, shapes)


def count_work(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelWork:
    """The work of a model with this config.json and these tensors."""
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    vocabulary = matrices.get(HEAD, matrices[EMBEDDING])
    body = sum(matrices.values()) - experts - sum(matrices.get(name, 0) for name in (EMBEDDING, HEAD))
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    num_layers = config["num_hidden_layers"]
    return ModelWork(
        body=body,
        head=vocabulary,
        experts=experts,
        num_experts=config.get("num_experts", 0),
        num_used_experts=config.get("num_experts_per_tok", 0),
        query_width=num_layers * num_heads * head_dim,
        kv_width=2 * num_layers * num_kv_heads * head_dim,
    )


def decode_limit_s(
    work: ModelWork,
    speed: Speed,
    num_rows: int,
    context: float,
    number_bytes: int,
    layer_bytes: float | None = None,
) -> float:
    """The least time of a step that gives each of num_rows sequences one token: reading or computing, the longer one.

    Args:
        context: tokens that each row attends to.
        number_bytes: of one weight, and of one number in keys and values.
        layer_bytes: see bytes_read.
    """
    kv_bytes = num_rows * context * work.kv_width * number_bytes
    read_bytes = work.bytes_read(num_rows, number_bytes, layer_bytes) + kv_bytes
    flops = work.flops(num_rows, num_rows * context, num_rows)
    return max(read_bytes / speed.read_bytes_per_s, flops / speed.flops)


def prefill_limit_s(work: ModelWork, speed: Speed, num_tokens: int, number_bytes: int) -> float:
    """The least time to compute one prompt and draw its first token."""
    flops = work.flops(num_tokens, num_tokens * (num_tokens + 1) / 2, 1)
    return max(work.bytes_read(num_tokens, number_bytes) / speed.read_bytes_per_s, flops / speed.flops)


def serving_limit_tokens_per_s(
    work: ModelWork, speed: Speed, num_streams: int, num_prompt: int, num_output: int, number_bytes: int
) -> float:
    """Output tokens per second at most, for so many clients that each ask again when answered.

    Prompts and decode steps of full batches one after the other: a token of a prompt costs what it costs alone.
    """
    prefill_s = num_streams * prefill_limit_s(work, speed, num_prompt, number_bytes)
    step_s = decode_limit_s(work, speed, num_streams, num_prompt + num_output / 2, number_bytes)
    return num_streams * num_output / (prefill_s + (num_output - 1) * step_s)
