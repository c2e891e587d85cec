"""FlashAttention as torch brings it, beside Triton's kernels and behind the same protocol. Thread: engine.

FlashAttention 3, where it is installed and activated, reads block tables itself; FlashAttention 2 is given blocks that
are gathered, of at most MAX_GATHERED_TOKENS. Neither knows caps nor sinks, and how they cut a context depends on the
step's longest one: what a row gets is not rounded the same in any company.
Source: torch.nn.attention.varlen, https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import TILE_TOKENS, RaggedRows
from gpu.attention_groups import MAX_GATHERED_TOKENS
from gpu.kv_cache import LayerKV
from gpu.scores import Scores

Varlen = Callable[..., Any]
NEEDED = ("window_size", "enable_gqa", "seqused_k", "block_table")
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
DTYPES = (torch.bfloat16, torch.float16)


def find_attention() -> "VarlenAttention | None":
    """Torch's, if it has what is needed here."""
    varlen = find_varlen()
    return None if varlen is None else VarlenAttention(varlen, reads_tables())


def find_varlen() -> Varlen | None:
    """varlen_attn, if it takes tables of blocks."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if set(NEEDED) <= set(inspect.signature(varlen_attn).parameters) else None


def reads_tables() -> bool:
    """Whether FlashAttention 3 or later serves."""
    try:
        from torch.nn.attention import current_flash_attention_impl
    except ImportError:
        return False
    return current_flash_attention_impl() not in (None, "FA2")


class VarlenAttention:
    """AttentionKernels of a CUDA device.

    Args:
        varlen: torch.nn.attention.varlen.varlen_attn.
        reads_tables: False: blocks are gathered.
    """

    index_dtype = torch.int32
    are_own_tokens_alone = False
    prompt_tile = TILE_TOKENS

    def __init__(self, varlen: Varlen, reads_tables: bool) -> None:
        self._varlen = varlen
        self._reads_tables = reads_tables

    def can_attend(self, query: Tensor, rows: RaggedRows, scores: Scores) -> bool:
        """Whether it knows the model's heads and scores, and gathers no more than it may."""
        head_dim = query.shape[2]
        if not scores.are_plain or query.dtype not in DTYPES or head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
            return False
        return self._reads_tables or rows.tables.numel() * BLOCK_SIZE <= MAX_GATHERED_TOKENS

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels. Tables beyond a row's end hold blocks of finite numbers, which weigh nothing."""
        num_rows, width = rows.tables.shape
        told: dict[str, Any] = {"seqused_k": rows.ends}
        if self._reads_tables:
            keys, values = kv.both[0], kv.both[1]  # [blocks, 16, kv_heads, head_dim]
            told |= {"cu_seq_k": None, "block_table": rows.tables}
        else:
            keys, values = kv.both.index_select(1, rows.tables.flatten()).flatten(1, 2)  # [rows * context, ...]
            context = width * BLOCK_SIZE
            told["cu_seq_k"] = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device) * context
        num_new = query.shape[0] - rows.num_decodes
        out: Tensor = self._varlen(
            query,
            keys,
            values,
            rows.offsets,
            max_q=max(1, num_new),
            max_k=width * BLOCK_SIZE,
            scale=scores.scale,
            window_size=(-1 if rows.window is None else rows.window - 1, 0),
            enable_gqa=query.shape[1] != kv.keys.shape[1],
            **told,
        )
        return out.flatten(1)
