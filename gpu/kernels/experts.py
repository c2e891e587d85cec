"""A layer's experts on a device: all of them in two launches, without the host. Thread: engine.

The router's choices are sorted by expert, where they lie; each expert's rows come in tiles of their own, and how many
tiles that makes is bounded by the rows alone, so that a graph may hold it. A row's product is the same beside any
others that have the same tile; see product.py.
"""

import torch
from torch import Tensor

from core.config import ExpertsConfig
from gpu.expert_weights import ExpertWeights
from gpu.kernels.block_sizes import COLUMN_WARPS, COLUMNS, SMALL_ROWS, next_power_of_two
from gpu.kernels.product import PRECISION, Matrix, as_matrix, can_multiply
from gpu.kernels.products import add_experts, multiply_by_expert
from gpu.layers import Gated, shares_of
from gpu.linear import Linear


def can_group(weights: ExpertWeights) -> bool:
    """Whether the kernels know how the experts are stored."""
    return can_multiply(weights.gate_up) and can_multiply(weights.down)


class GroupedExperts:
    """See gpu.layers.Experts.

    Args:
        weights: such as it can_group.
        router: hidden -> experts.
    """

    def __init__(self, config: ExpertsConfig, weights: ExpertWeights, gated: Gated, router: Linear) -> None:
        self._config = config
        self._router = router
        self._gated = gated
        self._gate_up, self._gate_up_bias = as_matrix(weights.gate_up), weights.gate_up_bias
        self._down, self._down_bias = as_matrix(weights.down), weights.down_bias
        self._experts = torch.arange(config.num_experts, device=weights.router.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        num_active, num_tokens = self._config.num_active, x.shape[0]
        if not num_tokens:
            return x
        shares, chosen = shares_of(self._router(x), num_active, self._config.is_normalized)
        by_expert, pairs = chosen.flatten().sort(stable=True)  # [tokens * active]: whose, and which (token, choice)
        ends = torch.searchsorted(by_expert, self._experts, right=True)  # [experts]: of each one's pairs
        inner = self._multiply(x, self._gate_up, self._gate_up_bias, pairs, ends, num_active)
        found = self._multiply(self._gated(inner), self._down, self._down_bias, pairs, ends, 1)
        out = torch.empty_like(x)
        add_experts[(num_tokens, -(-x.shape[1] // COLUMNS))](
            found, shares, out, x.shape[1], ACTIVE=num_active, BLOCK=COLUMNS, num_warps=COLUMN_WARPS
        )
        return out

    def _multiply(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, pairs: Tensor, ends: Tensor, share: int
    ) -> Tensor:
        """[pairs, out], in the order of (token, choice).

        Args:
            x: [pairs / share, in].
            pairs, ends: see multiply_by_expert.
        """
        num_experts, num_pairs = self._config.num_experts, len(pairs)
        # Few rows as for a matrix of all: a token's experts are the same in its company's tiles.
        tile = matrix.tile(SMALL_ROWS if num_pairs <= SMALL_ROWS * self._config.num_active else SMALL_ROWS + 1)
        out = x.new_empty((num_pairs, matrix.num_out))
        multiply_by_expert[(-(-matrix.num_out // tile.outputs), most_tiles(num_pairs, num_experts, tile.rows))](
            x,
            matrix.values,
            matrix.scales,
            matrix.zeros,
            out if bias is None else bias,  # what is not read is still an address
            out,
            pairs,
            ends,
            matrix.num_out,
            matrix.num_in,
            matrix.values.stride(-2),
            num_experts,
            SHARE=share,
            FORM=matrix.form,
            HAS_BIAS=bias is not None,
            GROUP=matrix.group_constant,
            IS_WHOLE=matrix.num_in % tile.inputs == 0,
            PRECISION=PRECISION,
            BLOCK_E=next_power_of_two(num_experts),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Tiles of so many rows that pairs can fill, however they fall: each expert's last may be partly empty."""
    return num_pairs // rows + min(num_pairs, num_experts)
