"""Problems of rows that are looked up on the device: embeddings, and what a step reads; see gpu_problems.py."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from bench.gpu_problems import BLOCK, Problem, noise
from gpu.rows import DeviceTables, RowOperators, StepInputs


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


def row_tables(generator: Generator, dtype: torch.dtype, rows: int, slots: int, width: int) -> Problem:
    """Block tables of a step's rows; the last is padding."""
    blocks = torch.randint(0, 1000, (slots, width), generator=generator, device=generator.device).int()
    inputs = _inputs(generator, rows, slots, width)
    filled = _rows_over(blocks, rows)

    def reference() -> tuple[Tensor, ...]:
        is_used = torch.arange(width, device=blocks.device) * BLOCK < inputs.ends[:, None]
        return (torch.where(is_used, blocks[inputs.slots.long()], SCRATCH).float(),)

    return Problem(dtype, lambda: filled.tables_of(inputs, width), reference, 2 * rows * width * 4, tolerance=0.0)


def step_tokens(generator: Generator, dtype: torch.dtype, tokens: int, slots: int, width: int) -> Problem:
    """What a step's tokens read; the last is padding, every other one what its slot sampled last."""
    blocks = torch.randint(0, 1000, (slots, width), generator=generator, device=generator.device).int()
    inputs, filled = _inputs(generator, tokens, slots, width), _rows_over(blocks, tokens)
    slot, position, token_id = (part[:-1].long() for part in inputs.tokens)

    def reference() -> tuple[Tensor, ...]:
        places = blocks[slot, position // BLOCK].long() * BLOCK + position % BLOCK
        wanted = (torch.where(token_id < 0, slot + LAST_TOKEN, token_id), places, position)
        return tuple(part.float() for part in wanted)

    def read() -> tuple[Tensor, ...]:
        found = filled.tokens_of(inputs)
        return found.token_ids[:-1], found.kv_slots[:-1], found.positions[:-1]

    return Problem(
        dtype,
        lambda: filled.tokens_of(inputs),
        reference,
        inputs.tokens.nbytes + 20 * tokens,
        outputs=lambda _: read(),
        tolerance=0.0,
    )


SCRATCH, LAST_TOKEN = 1000, 7


def _rows_over(blocks: Tensor, num_tokens: int) -> RowOperators:
    """Slot i has sampled the token LAST_TOKEN + i last."""
    from gpu.kernels.device_rows import DeviceRows

    last = torch.arange(len(blocks), device=blocks.device) + LAST_TOKEN
    return DeviceRows(DeviceTables(blocks, last, SCRATCH, SCRATCH + 1), num_tokens, num_tokens)


def _inputs(generator: Generator, rows: int, slots: int, width: int) -> StepInputs:
    """Of rows of a token each, the last of them padding."""

    def draw(most: int) -> Tensor:
        return torch.randint(0, most, (rows,), generator=generator, device=generator.device)

    tokens = torch.stack([draw(slots), draw(width * BLOCK), draw(1000)]).int()
    tokens[2, ::2] = -1
    tokens[:, -1] = -1
    none = tokens.new_empty(0)
    return StepInputs(tokens[0], tokens[1] + 1, none, none, none, tokens)


def clear(generator: Generator, dtype: torch.dtype, layers: int, blocks: int, cleared: int, width: int) -> Problem:
    """Others' content stays."""
    cache = noise(generator, dtype, layers, 2, blocks, BLOCK, 1, width)
    which = torch.randperm(blocks, generator=generator, device=generator.device)[:cleared].int()
    wanted, rows = cache.clone(), _rows_over(which.new_zeros((1, 1)), 1)
    wanted[:, :, which.long()] = 0
    return Problem(
        dtype,
        lambda: rows.clear_blocks(cache, which),
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
