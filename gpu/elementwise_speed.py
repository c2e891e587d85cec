"""How long what lies between a model's products takes: what is measured at start. Thread: engine.

Norms, RoPE with the writing of keys and values, gates: by kernels or by torch, one choice for all of them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from core.config import ModelConfig
from gpu.kv_cache import LayerKV
from gpu.operators import ElementwiseChoice, Operators

ROUNDS = 3  # the best counts, and the first warms up
LAYERS = 8  # in a round


@dataclass(frozen=True, slots=True)
class ElementwiseProbe:
    """A layer without its products and its attention, in a model's shapes. choice: the operators'."""

    choice: ElementwiseChoice
    operators: Operators
    config: ModelConfig

    def seconds(self, num_rows: int) -> float:
        """The best round of LAYERS for so many tokens, computed as is chosen."""
        layer, best_s = self._layer(num_rows), float("inf")
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            for _ in range(LAYERS):
                layer()
            best_s = min(best_s, time.perf_counter() - started_s)
        return best_s

    def _layer(self, num_rows: int) -> Callable[[], None]:
        config, operators = self.config, self.operators
        ones = partial(torch.ones, dtype=torch.bfloat16)
        x, weight = ones(num_rows, config.hidden_size), ones(config.hidden_size)
        qkv = ones(num_rows, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        both = ones(2, num_rows, config.num_kv_heads, config.head_dim)
        kv, slots = LayerKV(both, both[0], both[1]), torch.arange(num_rows)
        rotation = torch.ones(num_rows, 1, config.head_dim // 2, dtype=torch.complex64)
        gated, gate_up = operators.gated(config.activation), ones(num_rows, 2 * config.intermediate_size)

        def run() -> None:
            operators.rotate_and_store(qkv, None, rotation, kv, slots)
            operators.add_norm(x, x, 1.0, weight)
            gated(gate_up)
            operators.add_norm(x, x, 1.0, weight)

        return run


def find_elementwise(config: ModelConfig, operators: Operators) -> ElementwiseProbe | None:
    """None: there is nothing to choose."""
    choice = operators.elementwise_choice
    return None if choice is None else ElementwiseProbe(choice, operators, config)
