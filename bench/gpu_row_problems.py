"""Problems of rows that are looked up on the device: embeddings, and what a step reads; see gpu_problems.py."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from bench.gpu_problems import BLOCK, Problem, noise


def embed(generator: Generator, dtype: torch.dtype, rows: int, vocab: int, width: int) -> Problem:
    from gpu.kernels.device_rows import embed_rows

    table = noise(generator, dtype, vocab, width)
    token_ids = torch.randint(0, vocab, (rows,), generator=generator, device=generator.device)
    return Problem(
        dtype,
        lambda: embed_rows(table, token_ids),
        lambda: (table[token_ids].float(),),
        2 * rows * width * dtype.itemsize,
        peer=lambda: F.embedding(token_ids, table),
        tolerance=0.0,
    )


def decoding_rows(generator: Generator, dtype: torch.dtype, rows: int, slots: int, width: int) -> Problem:
    """What a step of decodes reads; the last row is padding, every other token is what its slot drew last."""
    from gpu.kernels.device_rows import SpareBlocks, empty_rows, fill_rows

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, device=generator.device)

    tables, last = draw(1000, slots, width).int(), draw(1000, slots)
    step = torch.stack([torch.randperm(slots, generator=generator, device=generator.device)[:rows]] * 3).int()
    step[1], step[2] = draw(width * BLOCK, rows), draw(1000, rows)
    step[2, ::2] = -1
    step[:, -1] = -1
    filled = empty_rows(rows, rows, width, step.new_zeros((2, rows)).long())
    real, positions, spare = step[0, :-1].long(), step[1, :-1].long(), SpareBlocks(1000, 1001)

    def reference() -> tuple[Tensor, ...]:
        is_used = torch.arange(width, device=step.device) <= (positions // BLOCK)[:, None]
        blocks = torch.where(is_used, tables[real], spare.scratch)
        first = tables[real, positions // BLOCK].long() * BLOCK + positions % BLOCK
        tokens = torch.where(step[2, :-1] < 0, last[real], step[2, :-1])
        wanted = (tokens, first, positions + 1, F.pad(blocks, (0, 0, 0, 1), value=spare.scratch))
        return tuple(part.float() for part in wanted)

    return Problem(
        dtype,
        lambda: fill_rows(filled, step, tables, last, spare),
        reference,
        2 * filled.tables.nbytes,
        outputs=lambda _: (filled.token_ids[:-1], filled.kv_slots[:-1], filled.ends[:-1], filled.tables),
        tolerance=0.0,
    )


def prompt_tokens(generator: Generator, dtype: torch.dtype, tokens: int, slots: int, width: int) -> Problem:
    """What tokens of prompts read; the last is padding."""
    from gpu.kernels.device_rows import SpareBlocks, empty_rows, fill_tokens

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, device=generator.device)

    tables, last = draw(1000, slots, width).int(), draw(1000, slots)
    step = torch.stack([draw(slots, tokens), draw(width * BLOCK, tokens), draw(1000, tokens)]).int()
    step[:, -1] = -1
    filled = empty_rows(1, tokens, width, step.new_zeros((2, 1)).long())
    real, positions = step[0, :-1].long(), step[1, :-1].long()

    def reference() -> tuple[Tensor, ...]:
        places = tables[real, positions // BLOCK].long() * BLOCK + positions % BLOCK
        return tuple(part.float() for part in (step[2, :-1], places, positions))

    return Problem(
        dtype,
        lambda: fill_tokens(filled, 0, step, tables, last, SpareBlocks(1000, 1001)),
        reference,
        step.nbytes + 20 * tokens,
        outputs=lambda _: (filled.token_ids[:-1], filled.kv_slots[:-1], filled.positions[:-1]),
        tolerance=0.0,
    )


def clear(generator: Generator, dtype: torch.dtype, layers: int, blocks: int, cleared: int, width: int) -> Problem:
    """Others' content stays."""
    from gpu.kernels.device_rows import clear_blocks

    cache = noise(generator, dtype, layers, 2, blocks, BLOCK, 1, width)
    which = torch.randperm(blocks, generator=generator, device=generator.device)[:cleared].int()
    wanted = cache.clone()
    wanted[:, :, which.long()] = 0
    return Problem(
        dtype,
        lambda: clear_blocks(cache, which),
        lambda: (wanted,),
        cache.nbytes * cleared / blocks,
        outputs=lambda _: (cache,),
        peer=lambda: cache.index_fill_(2, which.long(), 0),
        tolerance=0.0,
    )


def scatter(generator: Generator, dtype: torch.dtype, rows: int, slots: int, width: int) -> Problem:
    """One row is padding."""
    from gpu.kernels.device_rows import scatter_rows

    table, new = noise(generator, dtype, slots, width), noise(generator, dtype, rows, width)
    places = torch.randperm(slots, generator=generator, device=generator.device)[:rows]
    places[rows // 2] = -1
    wanted = table.float()
    wanted[places[places >= 0]] = new[places >= 0].float()
    return Problem(
        dtype,
        lambda: scatter_rows(table, places, new),
        lambda: (wanted,),
        2 * new.nbytes,
        outputs=lambda _: (table,),
        tolerance=0.0,
    )
