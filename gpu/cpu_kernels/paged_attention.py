"""Attention over block tables by kernels: what gpu/attention.py calls. Thread: engine."""

import math
from functools import cache

import torch
from torch import Tensor

from gpu.attention import RaggedRows
from gpu.cpu_kernels import decode, prefill
from gpu.cpu_kernels.team import Kernel
from gpu.kv_cache import LayerKV
from gpu.scores import Scores

LOG2_E = math.log2(math.e)
NO_WINDOW = 1 << 62
PIECE_BYTES = 256  # of a token's keys that are read together: what lies beside a line is fetched with it
SHARED_ROWS = 4  # for each thread: with so many, one that is left over keeps the others waiting for little


class PagedAttention:
    """AttentionKernels with as many threads as torch has. Not for two threads at once: the arguments are its own."""

    index_dtype = torch.int64
    are_own_tokens_alone = True
    prompt_tile = 1  # it computes the new tokens alone

    def __init__(self) -> None:
        self._decode, self._decode_arguments = Kernel(decode.attend), decode.Arguments()
        self._prefill, self._prefill_arguments = Kernel(prefill.attend_many), prefill.Arguments()

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels. query: bf16; a token's heads lie together. scores: are plain."""
        num_tokens, num_heads, head_dim = query.shape
        out = query.new_empty((num_tokens, num_heads * head_dim))
        scale = (head_dim**-0.5 if scores.scale is None else scores.scale) * LOG2_E
        if rows.num_decodes:
            self._attend_decodes(query, kv, rows, scale, out)
        if len(rows.ends) > rows.num_decodes:
            self._attend_prompts(query, kv, rows, scale, out)
        return out

    def _attend_decodes(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scale: float, out: Tensor) -> None:
        _, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        told = self._decode_arguments
        told.next_piece = 0
        told.query, told.query_stride = query.data_ptr(), query.stride(0) * query.element_size()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.tables, told.table_width = rows.tables.data_ptr(), rows.tables.shape[1]
        told.ends, told.window = rows.ends.data_ptr(), NO_WINDOW if rows.window is None else rows.window
        told.out, told.num_rows = out.data_ptr(), rows.num_decodes
        told.num_kv_heads, told.per_kv, told.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        told.scale, num_threads = scale, torch.get_num_threads()
        told.piece_heads = piece_heads(rows.num_decodes, num_kv_heads, head_dim, num_threads)
        self._decode(told, num_threads)

    def _attend_prompts(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scale: float, out: Tensor) -> None:
        """Row by row: threads share each."""
        _, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        told = self._prefill_arguments
        told.query_stride = query.stride(0) * query.element_size()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.window = NO_WINDOW if rows.window is None else rows.window
        told.num_kv_heads, told.per_kv, told.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        told.scale = scale
        tables, table_bytes = rows.tables.data_ptr(), rows.tables.stride(0) * rows.tables.element_size()
        ends, offsets = rows.ends.tolist(), rows.offsets.tolist()
        for row in range(rows.num_decodes, len(ends)):
            first, num_tokens = offsets[row], offsets[row + 1] - offsets[row]
            told.next_piece = 0
            told.query, told.table = query.data_ptr() + first * told.query_stride, tables + row * table_bytes
            told.start, told.num_tokens = ends[row] - num_tokens, num_tokens
            told.out = out.data_ptr() + first * out.stride(0) * out.element_size()
            self._prefill(told, torch.get_num_threads())


@cache
def piece_heads(num_rows: int, num_kv_heads: int, head_dim: int, num_threads: int) -> int:
    """KV heads of a row that a thread attends to together: of PIECE_BYTES, where rows divide among the threads."""
    if num_rows % num_threads and num_rows < SHARED_ROWS * num_threads:
        return 1
    wanted = min(num_kv_heads, max(1, PIECE_BYTES // (2 * head_dim)))
    return next(count for count in range(wanted, 0, -1) if num_kv_heads % count == 0)
