"""torch's scaled_dot_product_attention beside Triton's kernels, and behind the same protocol. Thread: engine.

Blocks are gathered, and a mask says what each token sees: the host knows shapes, not ends. So it takes steps of decodes
alone, and those of one prompt alone. It knows neither caps nor sinks, and torch picks its kernel by the step's shape:
what a row gets is not rounded the same in any company.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import TILE_TOKENS, RaggedRows
from gpu.attention_groups import MAX_GATHERED_TOKENS
from gpu.kv_cache import LayerKV
from gpu.scores import MAX_SCORES, Scores


class SdpaAttention:
    """AttentionKernels of any device."""

    index_dtype = torch.int32
    are_own_tokens_alone = False
    prompt_tile = TILE_TOKENS

    def can_attend(self, query: Tensor, rows: RaggedRows, scores: Scores) -> bool:
        """Whether it knows the scores and the kind of step, and gathers and masks no more than it may."""
        num_rows, width = rows.tables.shape
        are_decodes = rows.num_decodes == num_rows == query.shape[0]
        is_prompt = (num_rows, rows.num_decodes) == (1, 0)
        return (
            (are_decodes or is_prompt)
            and scores.are_plain
            and num_rows * width * BLOCK_SIZE <= MAX_GATHERED_TOKENS
            and query.shape[0] * width * BLOCK_SIZE <= MAX_SCORES
        )

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels. Tables beyond a row's end hold blocks of finite numbers, which weigh nothing."""
        num_rows, width = rows.tables.shape
        num_tokens, num_heads, head_dim = query.shape
        per_row = num_tokens // num_rows
        # [2, rows, kv_heads, context, head_dim]
        context = (
            kv.both.index_select(1, rows.tables.flatten()).view(2, num_rows, -1, *kv.both.shape[3:]).transpose(2, 3)
        )
        out = F.scaled_dot_product_attention(
            query.view(num_rows, per_row, num_heads, head_dim).transpose(1, 2),
            context[0],
            context[1],
            self._seen(rows, per_row, width * BLOCK_SIZE),
            scale=scores.scale,
            enable_gqa=num_heads != kv.keys.shape[1],
        )
        out = out.transpose(1, 2).reshape(num_tokens, -1)
        return out.masked_fill_((rows.ends == 0)[:, None], 0) if rows.num_decodes else out

    @staticmethod
    def _seen(rows: RaggedRows, per_row: int, num_context: int) -> Tensor:
        """[rows, 1, new tokens of each, context]: the keys that each token sees, one at least."""
        device = rows.ends.device
        num_new = 1 if rows.num_decodes else rows.offsets[1:]  # a graph's shape may have more tokens than the row
        first = (rows.ends - num_new).clamp_(min=0)
        positions = first[:, None] + torch.arange(per_row, device=device, dtype=torch.int32)  # [rows, new tokens]
        keys = torch.arange(num_context, device=device, dtype=torch.int32)
        seen = keys <= positions[..., None]
        if rows.window is not None:
            seen &= keys > positions[..., None] - rows.window
        return seen[:, None]
