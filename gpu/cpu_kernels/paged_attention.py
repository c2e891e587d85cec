"""Attention over block tables by kernels: what gpu/attention.py calls. Thread: engine."""

import math

import torch
from torch import Tensor

from gpu.attention import DecodeRows, PromptRow
from gpu.cpu_kernels import decode, prefill
from gpu.cpu_kernels.team import Kernel
from gpu.kv_cache import LayerKV

LOG2_E = math.log2(math.e)
NO_WINDOW = 1 << 62


class PagedAttention:
    """With as many threads as torch has. Not for two threads at once: the arguments are its own."""

    def __init__(self) -> None:
        self._decode, self._decode_arguments = Kernel(decode.attend), decode.Arguments()
        self._prefill, self._prefill_arguments = Kernel(prefill.attend_many), prefill.Arguments()

    def decode(self, query: Tensor, kv: LayerKV, rows: DecodeRows, scale: float | None) -> Tensor:
        """Rows of one new token. query: [rows, heads, head_dim], bf16; a row's heads lie together."""
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        out = query.new_empty((num_rows, num_heads * head_dim))
        told = self._decode_arguments
        told.next_piece = 0
        told.query, told.query_stride = query.data_ptr(), query.stride(0) * query.element_size()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.tables, told.table_width = rows.tables.data_ptr(), rows.tables.shape[1]
        told.firsts, told.ends = rows.firsts.data_ptr(), rows.ends.data_ptr()
        told.out, told.num_rows = out.data_ptr(), num_rows
        told.num_kv_heads, told.per_kv, told.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        told.scale = (head_dim**-0.5 if scale is None else scale) * LOG2_E
        self._decode(told, torch.get_num_threads())
        return out

    def prefill(self, query: Tensor, kv: LayerKV, row: PromptRow, scale: float | None) -> Tensor:
        """One row of several new tokens. query: [tokens, heads, head_dim], bf16; a token's heads lie together."""
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        out = query.new_empty((num_tokens, num_heads * head_dim))
        told = self._prefill_arguments
        told.next_piece = 0
        told.query, told.query_stride = query.data_ptr(), query.stride(0) * query.element_size()
        told.keys, told.values, told.table = kv.keys.data_ptr(), kv.values.data_ptr(), row.table.data_ptr()
        told.start, told.num_tokens = row.start, num_tokens
        told.window = NO_WINDOW if row.window is None else row.window
        told.out, told.num_kv_heads = out.data_ptr(), num_kv_heads
        told.per_kv, told.head_dim = num_heads // num_kv_heads, head_dim
        told.scale = (head_dim**-0.5 if scale is None else scale) * LOG2_E
        self._prefill(told, torch.get_num_threads())
        return out
