"""Attention over block tables: a step's rows, the kernels' interface, and torch's implementation. Thread: engine.

Kernels take a step's rows as they are (cpu_kernels/attention.py, kernels/attention.py). Torch gathers blocks: decodes
attend together over padded contexts, prompts in tiles. Torch rounds sums differently for other shapes, so a token's
shapes depend on its place in its sequence alone, whoever shares the step and however its prompt was cut into chunks.
Groups and masks are made once a step, by its first layer.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.device import to_device
from gpu.kv_cache import LayerKV, num_blocks_for

IntArray = npt.NDArray[np.signedinteger[Any]]

TILE_TOKENS = 64  # of a prompt attend together, from a multiple of it on
# A decode attends over its context padded to one of a few lengths: LEAST_CONTEXT and its doubles, then multiples of
# CONTEXT_STEP (as many keys as torch's attention takes at a time).
LEAST_CONTEXT = 64
CONTEXT_STEP = 512
# Decodes that attend together gather at most so many tokens of keys and values, unless one alone has more, so that a
# step's memory does not grow with its rows. Some 6 ms of work, against 50 µs for one more group.
MAX_GATHERED_TOKENS = 65_536

# From so many rows on, MKL and oneDNN add each row's numbers in the same order, however many there are.
LEAST_ROWS = 4
# float32 scores at a time, and twice as many temporary numbers: a long prompt's chunk is cut to this.
MAX_SCORES = 4 * 1024**2


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How the dot products of queries and keys become scores.

    Args:
        scale: their factor; None: 1 / sqrt(head_dim).
        cap: scores become cap * tanh(score / cap); None: they are not capped.
        sinks: [heads], one more score for each, which takes its share and adds no value; None: none.
        are_latent: values are narrower than keys.
    """

    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    are_latent: bool = False

    @property
    def are_plain(self) -> bool:
        """Whether torch's own attention computes them."""
        return self.cap is None and self.sinks is None and not self.are_latent


PLAIN = Scores()


@dataclass(frozen=True, slots=True)
class HostRows:
    """RaggedRows' columns on the host. scratch_block: a block of zeros, which pads contexts."""

    tables: IntArray
    ends: IntArray
    offsets: IntArray
    scratch_block: int


@dataclass(slots=True)
class RaggedRows:
    """All rows of a step, as kernels read them: integers of their index_dtype, on the device.

    Decodes, which have one token each, come first, in the order of the batch's tokens; then rows of any number of new
    tokens. What a table holds beyond a row's end is never read.

    Args:
        num_decodes: rows of one token each.
        window: how many tokens one sees, itself included; None: all before it.
        host: the same on the host, for kernels that lay them out there; None: only the device knows.
        layout: the kernels' own, made by the first layer and used by all that share the rows.
    """

    tables: Tensor  # [rows, blocks of the longest]
    ends: Tensor  # [rows]: one past the last new token's position; 0: a decode sees nothing, and its output is zeros
    offsets: Tensor  # [rows + 1]: where a row's new tokens begin among the batch's
    num_decodes: int
    window: int | None
    host: "HostRows | None" = None
    layout: object = None


def rows_in_chunks(rows: RaggedRows, chunk: int) -> RaggedRows:
    """The rows cut where chunks begin; each sees what it has of its chunk, as if the sequence began there.

    Args:
        rows: known on the host.
        chunk: tokens, a multiple of BLOCK_SIZE.
    """
    assert rows.host is not None, "chunks are cut on the host"
    host = rows.host
    if host.ends.max(initial=0) <= chunk:
        return replace(rows)
    pieces: list[tuple[int, int, int]] = []  # row, its chunk's first position, the piece's end
    lengths = []
    for row, (end, length) in enumerate(zip(host.ends.tolist(), np.diff(host.offsets).tolist(), strict=True)):
        start = end - (1 if row < rows.num_decodes else length)
        first = start // chunk * chunk
        while first < end:
            piece_end = min(end, first + chunk)
            pieces.append((row, first, piece_end))
            lengths.append(piece_end - max(start, first))
            first += chunk
    tables = np.full((len(pieces), chunk // BLOCK_SIZE), host.scratch_block, host.tables.dtype)
    for index, (row, first, end) in enumerate(pieces):
        blocks = host.tables[row, first // BLOCK_SIZE : num_blocks_for(end)]
        tables[index, : len(blocks)] = blocks
    ends = np.array([end - first for _, first, end in pieces], host.ends.dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(host.offsets.dtype)
    on_device = [to_device(column, rows.tables.device).to(rows.ends.dtype) for column in (tables, ends, offsets)]
    own = HostRows(tables, ends, offsets, host.scratch_block)
    return replace(rows, tables=on_device[0], ends=on_device[1], offsets=on_device[2], host=own)


class AttentionKernels(Protocol):
    """Attention of all rows at once, on one kind of device.

    Args:
        index_dtype: of a RaggedRows' tensors.
        are_own_tokens_alone: a row's several sampled tokens become rows of one token each, so that they are rounded as
            when they were sampled. False: they are one row, and share its keys.
        prompt_tile: see RunnerLimits.
    """

    index_dtype: torch.dtype
    are_own_tokens_alone: bool
    prompt_tile: int

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """Allocate room for so many rows of such a context, so that it never grows later. kv: a layer's."""

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """query: [tokens, heads, head_dim], rotated; returns [tokens, heads * head_dim]."""


@dataclass(slots=True)
class DecodeGroup:
    """Decodes that attend together.

    Args:
        first_token, end_token: as a range of the batch's.
        blocks: [tokens, blocks of a context], padded with the scratch block.
        mask: added to the scores, 0 or -inf: [tokens, 1, 1, context]; None: nothing is hidden.
    """

    first_token: int
    end_token: int
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PromptTile:
    """Tokens first to first + num_tokens of a tile of 64, and what the whole tile sees.

    Args:
        first_context, num_context: a range of the group's context.
        mask: added to the scores, 0 or -inf: [64, num_context].
    """

    first: int
    num_tokens: int
    first_context: int
    num_context: int
    mask: Tensor


@dataclass(slots=True)
class PromptGroup:
    """New tokens of one row's prompt.

    Args:
        first_token, end_token: as a range of the batch's.
        blocks: [blocks of the context], padded with the scratch block to the end of the last tile.
        tiles: in order, without gaps.
    """

    first_token: int
    end_token: int
    blocks: Tensor
    tiles: list[PromptTile]


class TorchAttention:
    """AttentionKernels of torch's operators.

    Args:
        dtype: of the masks: the model's.
    """

    index_dtype = torch.int64
    are_own_tokens_alone = True
    prompt_tile = TILE_TOKENS

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """See AttentionKernels: each step allocates its own."""

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels; rows: known on the host."""
        groups = rows.layout
        if not isinstance(groups, list):
            assert rows.host is not None
            groups = rows.layout = self.groups_of(rows.host, rows.num_decodes, rows.window)
        outputs = [_attend_group(query[group.first_token : group.end_token], kv, group, scores) for group in groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def groups_of(self, rows: HostRows, num_decodes: int, window: int | None) -> list[DecodeGroup | PromptGroup]:
        """Groups that cover the tokens in order, without gaps. A window that no row has filled yet hides nothing."""
        hiding = window if window is not None and rows.ends.max(initial=0) > window else None
        prompts = range(num_decodes, len(rows.ends))
        return [
            *self._decode_groups(rows, num_decodes, hiding),
            *(self._prompt_group(rows, row, hiding) for row in prompts),
        ]

    def _decode_groups(self, rows: HostRows, num_decodes: int, window: int | None) -> list[DecodeGroup]:
        """Decodes in groups of one padded length each, cut where they would gather too much."""
        if not num_decodes:
            return []
        ends = rows.ends[:num_decodes]
        seen = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)  # the first position seen
        contexts = padded_contexts(ends if window is None else np.minimum(ends, window + BLOCK_SIZE))
        groups: list[DecodeGroup] = []
        first = 0
        for token in range(1, num_decodes + 1):
            is_one_more = token < num_decodes and contexts[token] == contexts[first]
            if is_one_more and (token + 1 - first) * contexts[first] <= MAX_GATHERED_TOKENS:
                continue
            own = slice(first, token)
            groups.append(self._decode_group(rows, own, seen[own], int(contexts[first])))
            first = token
        return groups

    def _decode_group(self, rows: HostRows, own: slice, seen: IntArray, num_context: int) -> DecodeGroup:
        """Each context begins with the block of the first position that is seen, and is num_context tokens long."""
        first_blocks, ends = seen // BLOCK_SIZE, rows.ends[own]
        blocks = np.stack(
            [
                _context(rows, row, first, num_context)
                for row, first in zip(range(own.start, own.stop), first_blocks, strict=True)
            ]
        )
        positions = np.arange(num_context) + (first_blocks * BLOCK_SIZE)[:, None]  # [tokens, context]
        hidden = (positions < seen[:, None]) | (positions >= ends[:, None])
        mask = None
        if hidden.any():
            mask = self._on_device(np.where(hidden, np.float32("-inf"), np.float32(0))).to(self._dtype)[:, None, None]
        return DecodeGroup(own.start, own.stop, self._on_device(blocks), mask)

    def _prompt_group(self, rows: HostRows, row: int, window: int | None) -> PromptGroup:
        first_token, end_token, end = int(rows.offsets[row]), int(rows.offsets[row + 1]), int(rows.ends[row])
        start = end - (end_token - first_token)
        first_block = _first_seen_block(start // TILE_TOKENS * TILE_TOKENS, window)
        skipped = first_block * BLOCK_SIZE
        tile_starts = range(start // TILE_TOKENS * TILE_TOKENS, end, TILE_TOKENS)
        tiles = [self._tile(max(start, tile), min(end, tile + TILE_TOKENS), skipped, window) for tile in tile_starts]
        blocks = _context(rows, row, first_block, tile_starts[-1] + TILE_TOKENS - skipped)
        return PromptGroup(first_token, end_token, self._on_device(blocks), tiles)

    def _tile(self, start: int, end: int, skipped: int, window: int | None) -> PromptTile:
        """Positions start to end, of one tile; context position 0 is position `skipped`."""
        tile_start = start // TILE_TOKENS * TILE_TOKENS
        first = _first_seen_block(tile_start, window) * BLOCK_SIZE
        num_context = tile_start + TILE_TOKENS - first
        mask = self._masked(num_context).triu_(tile_start - first + 1)  # token i sees up to tile_start + i
        if window is not None and num_context > window:  # and from tile_start + i + 1 - window on
            mask += self._masked(num_context).tril_(tile_start - first - window)
        return PromptTile(start - tile_start, end - start, first - skipped, num_context, mask)

    def _masked(self, num_context: int) -> Tensor:
        return torch.full((TILE_TOKENS, num_context), float("-inf"), dtype=self._dtype, device=self._device)

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def _context(rows: HostRows, row: int, first_block: int, num_context: int) -> IntArray:
    """A row's blocks from the first on, up to its end, padded: [num_context / 16]."""
    blocks = np.full(num_context // BLOCK_SIZE, rows.scratch_block, dtype=np.int64)
    used = rows.tables[row, first_block : num_blocks_for(int(rows.ends[row]))]
    blocks[: len(used)] = used
    return blocks


def padded_contexts(num_tokens: IntArray) -> IntArray:
    """What contexts of so many tokens are padded to, each by its own length alone."""
    doubles = LEAST_CONTEXT << np.arange((CONTEXT_STEP // LEAST_CONTEXT).bit_length())  # 64 to 512
    steps = -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP
    short = doubles[np.minimum(np.searchsorted(doubles, num_tokens), len(doubles) - 1)]
    return np.where(num_tokens <= CONTEXT_STEP, short, steps)


def _first_seen_block(position: int, window: int | None) -> int:
    """The block of the first position that a position sees."""
    return 0 if window is None else max(0, position + 1 - window) // BLOCK_SIZE


def _attend_group(query: Tensor, kv: LayerKV, group: DecodeGroup | PromptGroup, scores: Scores) -> Tensor:
    if isinstance(group, PromptGroup):
        return _attend_prompt(query, kv, group, scores)
    return _decode(query, kv, group, scores)


def _decode(query: Tensor, kv: LayerKV, group: DecodeGroup, scores: Scores) -> Tensor:
    """A KV head's query heads, which share its keys, take the place of query tokens."""
    keys, values = kv.read(group.blocks, query.dtype)
    num_rows, num_kv_heads, _, head_dim = keys.shape
    grouped = query.view(num_rows, num_kv_heads, -1, head_dim)  # [rows, kv_heads, heads per kv, head_dim]
    if scores.are_plain:
        out = F.scaled_dot_product_attention(grouped, keys, values, group.mask, scale=scores.scale)
    else:
        mask = None if group.mask is None else group.mask.unsqueeze(1)
        out = attend_by_scores(grouped.unsqueeze(3), keys, values, mask, scores)
    return out.reshape(num_rows, -1)  # [rows, heads * width of a value]


def _attend_prompt(query: Tensor, kv: LayerKV, group: PromptGroup, scores: Scores) -> Tensor:
    """KV heads take the place of rows, so that keys are shared without a copy."""
    keys, values = (both[0] for both in kv.read(group.blocks.unsqueeze(0), query.dtype))  # [kv_heads, context, dim]
    num_tokens, _, head_dim = query.shape
    query = query.view(num_tokens, keys.shape[0], -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, per_kv, tokens, dim]
    outputs, first = [], 0
    for tile in group.tiles:
        seen = slice(tile.first_context, tile.first_context + tile.num_context)
        part = query[:, :, first : first + tile.num_tokens]
        outputs.append(_attend_tile(part, keys[:, seen], values[:, seen], tile, scores))
        first += tile.num_tokens
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, -1)


def _attend_tile(query: Tensor, keys: Tensor, values: Tensor, tile: PromptTile, scores: Scores) -> Tensor:
    """
    Args:
        query: [kv_heads, heads per kv, tokens of the tile that are new, head_dim].
        keys, values: [kv_heads, context, head_dim].
    Returns:
        as query.
    """
    missing = TILE_TOKENS - tile.num_tokens
    if missing:
        query = F.pad(query, (0, 0, tile.first, missing - tile.first))
    if scores.are_plain:
        shape = (*query.shape[:2], *keys.shape[1:])
        shared = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
        out = F.scaled_dot_product_attention(query, *shared, tile.mask, scale=scores.scale)
    else:
        out = attend_by_scores(query, keys, values, tile.mask, scores)
    return out[:, :, tile.first : tile.first + tile.num_tokens]


def attend_by_scores(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Softmax of capped scores and sinks, which torch's own attention lacks, in float32, times the values.

    Some tokens at a time, so that the scores of a long prompt's chunk take bounded memory.

    Args:
        query: [..., kv_heads, heads per kv, tokens, head_dim].
        keys, values: [..., kv_heads, context, head_dim].
        mask: added to the scores [..., kv_heads, heads per kv, tokens, context]; broadcast.
    Returns:
        as query, as wide as the values.
    """
    *rows, per_kv, num_tokens, _ = query.shape
    num_context = keys.shape[-2]
    step = max(1, MAX_SCORES // (torch.Size(rows).numel() * per_kv * num_context))
    outputs = []
    for first in range(0, num_tokens, step):
        end = min(first + step, num_tokens)
        hidden = mask[..., first:end, :] if mask is not None and mask.shape[-2] > 1 else mask
        shares = _shares(query[..., first:end, :], keys, hidden, scores)
        # [..., kv_heads, heads per kv * tokens, head_dim]
        part = multiply_in_company(shares.to(values.dtype).flatten(-3, -2), values)
        outputs.append(part.view(*rows, per_kv, end - first, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)


def _shares(query: Tensor, keys: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """[..., kv_heads, heads per kv, tokens, context], float32; with its sink, each token's sum to 1."""
    # Heads that share keys act as more tokens
    found = multiply_in_company(query.flatten(-3, -2), keys.transpose(-1, -2))
    found = found.float().mul_(scores.scale or query.shape[-1] ** -0.5).view(*query.shape[:-1], -1)
    if scores.cap is not None:
        found = found.div_(scores.cap).tanh_().mul_(scores.cap)
    if mask is not None:
        found += mask
    if scores.sinks is None:
        return found.softmax(-1)
    sinks = scores.sinks.float().view(*query.shape[-4:-2], 1, 1).expand(*found.shape[:-1], 1)
    shares = torch.cat([found, sinks], -1).softmax(-1)
    return shares[..., :-1]


def multiply_in_company(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix, each row the same to the last bit in any company."""
    num_rows = rows.shape[-2]
    if num_rows >= LEAST_ROWS:
        return rows @ matrix
    return (F.pad(rows, (0, 0, 0, LEAST_ROWS - num_rows)) @ matrix)[..., :num_rows, :]
