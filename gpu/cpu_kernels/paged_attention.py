"""Attention over block tables by kernels: what gpu/attention.py calls. Thread: engine."""

import math
from dataclasses import dataclass

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
        per_kv, num_threads = num_heads // num_kv_heads, torch.get_num_threads()
        pieces = rows.layout
        if not isinstance(pieces, Pieces):
            ends = rows.ends[: rows.num_decodes].tolist()
            pieces = rows.layout = divide(ends, rows.window, num_kv_heads, per_kv, head_dim, num_threads)
        told = self._decode_arguments
        told.next_piece = 0
        told.query, told.query_stride = query.data_ptr(), query.stride(0) * query.element_size()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.tables, told.table_width = rows.tables.data_ptr(), rows.tables.shape[1]
        told.ends, told.window = rows.ends.data_ptr(), NO_WINDOW if rows.window is None else rows.window
        told.out, told.num_rows = out.data_ptr(), rows.num_decodes
        told.num_kv_heads, told.per_kv, told.head_dim = num_kv_heads, per_kv, head_dim
        told.scale, told.piece_heads = scale, pieces.num_heads
        splits = pieces.splits
        if splits is None:
            told.first_splits = 0
        else:
            splits.counts.zero_()
            told.first_splits, told.found = splits.first_splits.data_ptr(), splits.found.data_ptr()
            told.counts = splits.counts.data_ptr()
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


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Where pieces are splits of a row's context.

    Args:
        first_splits: int64 [rows + 1]: splits of the rows before.
        found: bytes: what each split of each KV head has found, until it is merged.
        counts: int64 [rows, KV heads / those of a piece]: splits that have ended; zeros before each use.
    """

    first_splits: Tensor
    found: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What a thread takes at a time of rows of one token; the same in all layers of a step that see as far.

    Args:
        num_heads: KV heads, a divisor of theirs.
        splits: None: all of a row's context.
    """

    num_heads: int
    splits: Splits | None


def divide(
    ends: list[int], window: int | None, num_kv_heads: int, per_kv: int, head_dim: int, num_threads: int
) -> Pieces:
    """Whole rows, where the longest is a small part of a thread's share; otherwise their splits.

    KV heads: as many as PIECE_BYTES hold, unless few pieces would not divide evenly among the threads.
    """
    lengths = [end if window is None else min(end, window) for end in ends]
    wanted = min(num_kv_heads, max(1, PIECE_BYTES // (2 * head_dim)))
    num_heads = next(count for count in range(wanted, 0, -1) if num_kv_heads % count == 0)
    is_even = max(lengths) * num_threads * SHARED_ROWS <= sum(lengths)
    if num_threads == 1 or is_even or max(ends) <= decode.SPLIT_TOKENS:
        is_shared = len(ends) % num_threads == 0 or len(ends) >= SHARED_ROWS * num_threads
        return Pieces(num_heads if is_shared else 1, None)
    firsts = [0]
    for end, length in zip(ends, lengths, strict=True):
        firsts.append(firsts[-1] + -(-end // decode.SPLIT_TOKENS) - (end - length) // decode.SPLIT_TOKENS)
    if firsts[-1] < SHARED_ROWS * num_threads:
        num_heads = 1
    found = torch.empty(firsts[-1] * num_kv_heads * decode.head_bytes(per_kv, head_dim), dtype=torch.uint8)
    counts = torch.empty((len(ends), num_kv_heads // num_heads), dtype=torch.int64)
    return Pieces(num_heads, Splits(torch.tensor(firsts), found, counts))
