"""Attention of rows of one new token each, over block tables: what gpu/attention.py calls. Thread: engine."""

import math

import torch
from torch import Tensor

from gpu.attention import DecodeRows
from gpu.cpu_kernels.attention import Arguments, attend
from gpu.cpu_kernels.team import Kernel
from gpu.kv_cache import LayerKV

LOG2_E = math.log2(math.e)
ROWS_PER_THREAD = 4  # from so many on, whole rows are work that threads can share evenly


class PagedDecode:
    """With as many threads as torch has. Not for two threads at once: the arguments are its own."""

    def __init__(self) -> None:
        self._kernel = Kernel(attend)
        self._arguments = Arguments()

    def __call__(self, query: Tensor, kv: LayerKV, rows: DecodeRows, scale: float | None) -> Tensor:
        """
        Args:
            query: [rows, heads, head_dim], bf16, rotated; a row's heads lie together.
            scale: of scores; None: 1 / sqrt(head_dim).
        Returns:
            [rows, heads * head_dim]
        """
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        out = query.new_empty((num_rows, num_heads * head_dim))
        told = self._arguments
        told.next_piece = 0
        told.query, told.query_stride = query.data_ptr(), query.stride(0) * query.element_size()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.tables, told.table_width = rows.tables.data_ptr(), rows.tables.shape[1]
        told.firsts, told.ends = rows.firsts.data_ptr(), rows.ends.data_ptr()
        told.out, told.num_rows = out.data_ptr(), num_rows
        told.num_kv_heads, told.per_kv, told.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        told.scale = (head_dim**-0.5 if scale is None else scale) * LOG2_E
        told.together = num_kv_heads if num_rows >= ROWS_PER_THREAD * torch.get_num_threads() else 1
        self._kernel(told, torch.get_num_threads())
        return out
