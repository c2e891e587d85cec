"""bench.gpu_check --part kernels: each kernel beside its float32 reference, and its time beside the limit.

A builder makes a kernel's random inputs, says how it is launched, and what torch gives in float32. A case is a builder,
a shape and a format. Timed shapes are those of real models; variants are only held against their references: heads of
all sizes and groups, windows, caps and sinks, one-token contexts and splits, matrices whose sides no tile divides,
quantized experts, and everything that requests may ask of sampling. On a CPU Triton's interpreter takes milliseconds
for each program: shapes there are a few numbers wide. Outputs are poisoned: what a kernel does not write is NaN, and
makes its error infinite. A new kernel adds a builder and its cases here. Triton's modules are imported where they are
used: listing the cases needs none of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from bench.gpu_run import OK, WRONG, Case, Context, Row, ceilings_case, target_of
from bench.limits import median_s, num_copies
from bench.results import Cell
from core.config import ExpertsConfig, ModelConfig, RopeConfig
from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.attention import RaggedRows, Scores
from gpu.blocks import BLOCK_OUTPUTS, FORMATS, BlockWeight, PackedBlocks, dequantise
from gpu.device import DTYPES
from gpu.kv_cache import SCALE_BYTES, LayerKV, blockwise
from gpu.layers import GATED, Experts, Rope
from gpu.linear import Linear
from gpu.operators import Operators
from gpu.parameters import ExpertWeights
from gpu.quant import FP8, MAX_FP8, QuantizedWeight, Weight, dequantize, floats, quantize
from gpu.rows import DeviceTables, RowOperators, StepInputs
from gpu.sampler import LaunchedSampler, Sampler, SamplingSlots

# |out - ref| / |ref|: rounding a result once costs 2 ** -9 of it in bfloat16, 2 ** -12 in float16, at most; float32's
# sums of thousands, added in another order, differ by a few 2 ** -24.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
OF_16_BITS = 2e-4  # queries and shares of decodes over keys and values in 8 bits
CASE_LIMIT_S = 90.0  # compiling is most of it
ERRORS, TIMES = "Kernels: errors", "Kernels: times"
EPS, THETA = 1e-6, 500_000.0
BLOCK, SPARE_BLOCKS = 16, 16
NO_BLOCK = 1 << 20  # the id of no block
SCRATCH, LAST_TOKEN = 1000, 7
SCORES_AT_ONCE = 1 << 26

Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel on one set of inputs.

    Args:
        launch: what is timed.
        reference: what it is to give, computed by torch in float32.
        num_bytes, flops: that it must at least read and write, and compute.
        outputs: what was launched gave -> the tensors to compare.
        tolerance: None: the format's; 0: to the last bit, and the error is the share of numbers that differ.
    """

    launch: Launch
    reference: Callable[[], tuple[Tensor, ...]]
    num_bytes: float
    flops: float = 0.0
    outputs: Callable[[Any], tuple[Tensor, ...]] = lambda out: _tensors(out)
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws a problem's inputs: in dtype, unless they are indexes."""

    generator: Generator
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def noise(self, *shape: int) -> Tensor:
        return self.exact(*shape).to(self.dtype)

    def exact(self, *shape: int) -> Tensor:
        """In float32."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self.generator, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)

    def operators(self) -> Operators:
        """TritonOperators, which take their sizes from what they are given."""
        from gpu.kernels.operators import TritonOperators

        sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}
        sizes |= {"num_kv_heads": 1, "head_dim": 32, "max_position": 1 << 17}
        config = ModelConfig(architecture="LlamaForCausalLM", rms_norm_eps=EPS, rope=RopeConfig(THETA), **sizes)  # type: ignore[arg-type]
        return TritonOperators(config, self.dtype, self.device)


BUILDERS: dict[str, Callable[..., Problem]] = {}
"""By the kernel's name: (draw, KernelCase.shape) -> the problem."""


def builder(build: Callable[..., Problem]) -> Callable[..., Problem]:
    BUILDERS[build.__name__] = build
    return build


def _of_operator(draw: Draw, name: str, num_bytes: float, *arguments: Any) -> Problem:
    """An operator of TritonOperators beside torch's of the same name in float32."""
    exact = [value.float() if isinstance(value, Tensor) else value for value in arguments]
    reference = partial(getattr(Operators(torch.float32, draw.device, EPS), name), *exact)
    launch = partial(getattr(draw.operators(), name), *arguments)
    return Problem(launch, lambda: _tensors(reference()), num_bytes)


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(part for part in out if part is not None)


@builder
def add_norm(draw: Draw, rows: int, width: int, scale: float = 1.0, weight: bool = True) -> Problem:
    x, added = draw.noise(rows, width), draw.noise(rows, width)
    by = draw.noise(width) if weight else None
    return _of_operator(draw, "add_norm", (4 if weight else 3) * x.nbytes, x, added, scale, by)


@builder
def norm(draw: Draw, rows: int, width: int) -> Problem:
    x = draw.noise(rows, width)
    return _of_operator(draw, "norm", 2 * x.nbytes, x, draw.noise(width))


@builder
def rotate_and_store(
    draw: Draw, rows: int, heads: int, kv_heads: int, head_dim: int, norm: str, turns: bool = True,
    in_8_bits: bool = False,
) -> Problem:  # fmt: skip
    """Into slots in random order; what lies beside them must stay as it is.

    Args:
        norm: "none", of each "head" by itself, or of "all" heads together.
        in_8_bits: half a step is up to 1 / 254 of a head's largest number: near 0.007 of them all.
    """
    qkv = draw.noise(rows, heads + 2 * kv_heads, head_dim)
    of_query, of_key = ((heads,), (kv_heads,)) if norm == "all" else ((), ())
    norms = None if norm == "none" else (draw.noise(*of_query, head_dim), draw.noise(*of_key, head_dim))
    num_blocks = rows // BLOCK + SPARE_BLOCKS
    slots, positions = draw.order(num_blocks * BLOCK)[:rows], draw.below(8192, rows)
    rotation = Rope(RopeConfig(THETA), head_dim, draw.device).rotation(positions.float()) if turns else None

    def found(query: Tensor, kv: LayerKV) -> tuple[Tensor, ...]:
        return query, *_numbers_of(kv).nan_to_num(0)

    def reference() -> tuple[Tensor, ...]:
        operators = Operators(torch.float32, draw.device, EPS)
        exact = empty_kv(draw.device, num_blocks, kv_heads, head_dim, torch.float32)
        in_float = None if norms is None else (norms[0].float(), norms[1].float())
        return found(operators.rotate_and_store(qkv.float(), in_float, rotation, exact, slots), exact)

    kernels, kv = draw.operators(), empty_kv(draw.device, num_blocks, kv_heads, head_dim, draw.dtype, in_8_bits)
    return Problem(
        lambda: kernels.rotate_and_store(qkv, norms, rotation, kv, slots),
        reference,
        2 * qkv.nbytes + (0 if rotation is None else rotation.nbytes),
        outputs=lambda query: found(query, kv),
        tolerance=TOLERANCES[torch.bfloat16] if in_8_bits else None,
    )


def empty_kv(
    device: torch.device, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, in_8_bits: bool = False
) -> LayerKV:
    """NaN, as a GPU has it; in 8 bits integers whose scales are NaN."""
    shape = (2, num_blocks, BLOCK, kv_heads, head_dim)
    if not in_8_bits:
        both = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))
    room = torch.ones((*shape[:-1], head_dim + SCALE_BYTES), dtype=torch.int8, device=device)
    kv = blockwise(room, is_paired=False)
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    kv.key_scales.fill_(float("nan"))
    kv.value_scales.fill_(float("nan"))
    return kv


def _numbers_of(kv: LayerKV) -> Tensor:
    """What is stored: float32 [2, slots, kv_heads, head_dim]."""
    blocks = torch.arange(kv.both.shape[1], device=kv.both.device)
    found = torch.stack(kv.read(blocks.unsqueeze(1), torch.float32))  # [2, blocks, kv_heads, 16, head_dim]
    return found.transpose(2, 3).flatten(1, 2).float()


@builder
def gate(draw: Draw, rows: int, width: int, activation: str) -> Problem:
    gate_up = 4 * draw.noise(rows, 2 * width)
    kernel, torchs = draw.operators().gated(activation), GATED[activation]
    return Problem(lambda: kernel(gate_up), lambda: (torchs(gate_up.float()),), gate_up.nbytes * 1.5)


@builder
def embed(draw: Draw, rows: int, vocab: int, width: int) -> Problem:
    from gpu.kernels.rows import embed_rows

    table, token_ids = draw.noise(vocab, width), draw.below(vocab, rows)
    num_bytes = 2 * rows * width * draw.dtype.itemsize
    return Problem(lambda: embed_rows(table, token_ids), lambda: (table[token_ids].float(),), num_bytes, tolerance=0.0)


@builder
def decoding_rows(draw: Draw, rows: int, slots: int, width: int) -> Problem:
    """Block tables of a step's rows; the last is padding."""
    blocks = draw.below(1000, slots, width).int()
    inputs, filled = _step_inputs(draw, rows, slots, width), _rows_over(blocks, rows)

    def reference() -> tuple[Tensor, ...]:
        is_used = torch.arange(width, device=draw.device) * BLOCK < inputs.ends[:, None]
        return (torch.where(is_used, blocks[inputs.slots.long()], SCRATCH).float(),)

    num_bytes = 2 * rows * width * blocks.element_size()
    return Problem(lambda: filled.tables_of(inputs, width)[0], reference, num_bytes, tolerance=0.0)


@builder
def prompt_tokens(draw: Draw, tokens: int, slots: int, width: int) -> Problem:
    """What a step's tokens read; the last is padding, every other one what its slot sampled last."""
    blocks = draw.below(1000, slots, width).int()
    inputs, filled = _step_inputs(draw, tokens, slots, width), _rows_over(blocks, tokens)
    slot, position, token_id = (part[:-1].long() for part in inputs.tokens)

    def reference() -> tuple[Tensor, ...]:
        kv_slots = blocks[slot, position // BLOCK].long() * BLOCK + position % BLOCK
        wanted = (torch.where(token_id < 0, slot + LAST_TOKEN, token_id), kv_slots, position)
        return tuple(part.float() for part in wanted)

    def found(read: Any) -> tuple[Tensor, ...]:
        return read.token_ids[:-1], read.kv_slots[:-1], read.positions[:-1]

    num_bytes = inputs.tokens.nbytes + 20 * tokens
    return Problem(lambda: filled.tokens_of(inputs), reference, num_bytes, outputs=found, tolerance=0.0)


def _rows_over(blocks: Tensor, num_tokens: int) -> RowOperators:
    """Slot i has sampled the token LAST_TOKEN + i last."""
    from gpu.kernels.rows import DeviceRows

    last = torch.arange(len(blocks), device=blocks.device) + LAST_TOKEN
    return DeviceRows(DeviceTables(blocks, last, SCRATCH), num_tokens, num_tokens)


def _step_inputs(draw: Draw, rows: int, slots: int, width: int) -> StepInputs:
    """Of rows of a token each, the last of them padding."""
    tokens = torch.stack([draw.below(slots, rows), draw.below(width * BLOCK, rows), draw.below(1000, rows)]).int()
    tokens[2, ::2] = -1
    tokens[:, -1] = -1
    none = tokens.new_empty(0)
    return StepInputs(tokens[0], tokens[1] + 1, none, none, none, tokens)


@builder
def clear(draw: Draw, layers: int, blocks: int, cleared: int, width: int) -> Problem:
    """The content of other blocks stays."""
    cache = draw.noise(layers, 2, blocks, BLOCK, 1, width)
    which = draw.order(blocks)[:cleared].int()
    wanted, rows = cache.clone(), _rows_over(which.new_zeros((1, 1)), 1)
    wanted[:, :, which.long()] = 0
    num_bytes, found = cache.nbytes * cleared / blocks, {"outputs": lambda _: (cache,), "tolerance": 0.0}
    return Problem(lambda: rows.clear_blocks(cache, which), lambda: (wanted,), num_bytes, **found)  # type: ignore[arg-type]


@builder
def scatter(draw: Draw, rows: int, slots: int, width: int) -> Problem:
    """One row is padding."""
    from gpu.kernels.rows import scatter_rows

    table, new, targets = draw.noise(slots, width), draw.noise(rows, width), draw.order(slots)[:rows]
    targets[rows // 2] = -1
    wanted = table.float()
    wanted[targets[targets >= 0]] = new[targets >= 0].float()
    found = {"outputs": lambda _: (table,), "tolerance": 0.0}
    return Problem(lambda: scatter_rows(table, targets, new), lambda: (wanted,), 2 * new.nbytes, **found)  # type: ignore[arg-type]


@builder
def matmul(draw: Draw, matrix: str, form: str, rows: int, bias: bool = True, **size: int) -> Problem:
    """size: out and in; matrix: a word of which one it is."""
    from gpu.kernels.matmul import Matmul, stored_as

    num_out, num_in = size["out"], size["in"]
    weight = stored(draw, form, num_out, num_in)
    x, added = draw.noise(rows, num_in), draw.noise(num_out) if bias else None
    kernel = Matmul(weight, added)
    return Problem(
        lambda: kernel(x),
        lambda: (F.linear(x.float(), _exact(weight), None if added is None else added.float()),),
        stored_as(weight)[1] + x.nbytes + rows * num_out * draw.dtype.itemsize,
        2.0 * rows * num_out * num_in,
    )


@builder
def block_matmul(draw: Draw, form: str, rows: int, tile: str, **size: int) -> Problem:
    """Of a file's blocks. size: out and in; tile: MatmulTile's numbers, "usual" or "torch": what torch multiplies."""
    from gpu.kernels.matmul import DecodedMatmul, Matmul, stored_as
    from gpu.kernels.sizes import MatmulTile

    weight, x = blocks_of(draw, form, size["out"], size["in"]), draw.noise(rows, size["in"])
    chosen = MatmulTile(*map(int, tile.split("x"))) if "x" in tile else None
    kernel: Linear = DecodedMatmul(weight, None) if tile == "torch" else Matmul(weight, None, only_tile=chosen)
    num_bytes = stored_as(weight)[1] + x.nbytes + rows * size["out"] * draw.dtype.itemsize
    reference = lambda: (F.linear(x.float(), _exact(weight)),)  # noqa: E731
    return Problem(lambda: kernel(x), reference, num_bytes, 2.0 * rows * size["out"] * size["in"])


@builder
def decoded_rows(draw: Draw, form: str, rows: int, **size: int) -> Problem:
    """Of a file's blocks: some, as an embedding takes them, and all; to the last bit. size: out and in."""
    from gpu.kernels.block_formats import read_range, read_rows

    weight, chosen = blocks_of(draw, form, size["out"], size["in"]), draw.below(size["out"], rows)
    (part,), whole = weight.parts, draw.noise(size["out"], size["in"])

    def reference() -> tuple[Tensor, Tensor]:
        numbers = _exact(weight).to(draw.dtype)
        return numbers[chosen], numbers

    launch = lambda: (read_rows(part, chosen, draw.dtype), read_range(part, 0, whole))  # noqa: E731
    return Problem(launch, reference, part.packed.nbytes + whole.nbytes, tolerance=0.0)


def blocks_of(draw: Draw, form: str, *shape: int) -> BlockWeight:
    """A matrix, or a stack of them, of a file's blocks: any bytes make one, but for floats."""
    found, (*stack, num_out, num_in) = FORMATS[form], shape
    chunks = *stack, -(-num_out // BLOCK_OUTPUTS), num_in // found.elements
    packed = draw.below(256, *chunks, BLOCK_OUTPUTS * found.size_bytes).to(torch.uint8)
    width, count, _ = found.fields[0]
    if width == 2:  # scales and minima
        halves = draw.exact(*chunks, count * BLOCK_OUTPUTS).mul_(0.01 * num_in**-0.5).half()
        packed[..., : 2 * count * BLOCK_OUTPUTS] = halves.view(torch.uint8)
    else:  # exponents
        packed[..., :BLOCK_OUTPUTS] = packed[..., :BLOCK_OUTPUTS] % 8 + 116
    return BlockWeight(draw.dtype, (PackedBlocks(form, packed, num_out),), stack[0] if stack else None)


def _as_in_a_file(part: PackedBlocks) -> Tensor:
    """Bytes [blocks, bytes of one], output after output: what write_packed has packed."""
    found, (num_chunks, num_blocks, _) = FORMATS[part.format], part.packed.shape
    rows = torch.empty((num_chunks, BLOCK_OUTPUTS, num_blocks, found.size_bytes), dtype=torch.uint8)
    first = 0
    for width, count, place in found.fields:
        end = first + BLOCK_OUTPUTS * width * count
        fields = part.packed[..., first:end].cpu().view(num_chunks, num_blocks, count, BLOCK_OUTPUTS, width)
        is_signed = found.signed is not None and place >= found.signed
        fields = fields ^ 0x80 if is_signed else fields
        rows[..., place : place + width * count] = fields.permute(0, 3, 1, 2, 4).flatten(3)
        first = end
    return rows.flatten(0, 1)[: part.num_out].reshape(-1, found.size_bytes)


def stored(draw: Draw, form: str, *shape: int) -> Weight:
    """A matrix, or a stack of them, of numbers of about 1 / sqrt(inputs).

    Args:
        form: "plain", what quantize() makes, "fp8 by N" and "int4 by N": as checkpoints have it, N inputs that share a
            scale, or the format of a file's blocks.
    """
    if form in FORMATS:
        return blocks_of(draw, form, *shape)
    scheme, _, size = form.partition(" by ")
    *rows, num_in = shape
    if scheme == "int4" and size:  # any numbers make a matrix
        scales, zeros = (draw.exact(*rows, num_in // int(size)) for _ in range(2))
        unit = 0.2 * num_in**-0.5
        values = draw.below(256, *rows, num_in // 2).to(torch.uint8)
        return QuantizedWeight(draw.dtype, values, (unit * (scales.abs() + 0.5)).bfloat16(), (unit * zeros).bfloat16())
    plain = draw.noise(*shape).mul_(num_in**-0.5)
    if not size:
        return plain if form == "plain" else quantize(plain, scheme)
    groups = plain.float().view(*rows, -1, int(size))
    scales = groups.abs().amax(-1) / MAX_FP8
    return QuantizedWeight(plain.dtype, groups.div_(scales.unsqueeze(-1)).to(FP8).flatten(-2), scales)


def _exact(weight: Weight) -> Tensor:
    """Float32."""
    if isinstance(weight, BlockWeight):
        if weight.num_stacked is not None:
            return torch.stack([_exact(weight[place]) for place in range(weight.num_stacked)])
        rows = [dequantise(part.format, _as_in_a_file(part)).view(part.num_out, -1) for part in weight.parts]
        return torch.cat(rows).to(weight.device)
    return dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else floats(weight).float()


@builder
def experts(
    draw: Draw, rows: int, form: str, activation: str = "silu", bias: bool = False, *, experts: int, **size: int
) -> Problem:
    """All choose by the same scores: what the router's rounding decides is not the kernels'.

    Args:
        size: hidden, active, width.
    """
    from gpu.kernels.matmul import GroupedExperts, stored_as

    hidden, active, width = size["hidden"], size["active"], size["width"]
    config = ExpertsConfig(experts, active, width, "qwen3_moe")
    gate_up, down = stored(draw, form, experts, 2 * width, hidden), stored(draw, form, experts, hidden, width)
    biases = [draw.noise(experts, size) if bias else None for size in (2 * width, hidden)]
    x, scores = draw.noise(rows, hidden), draw.exact(rows, experts)
    weights = ExpertWeights(scores[:1], None, gate_up, biases[0], down, biases[1])
    kernel = GroupedExperts(config, weights, GATED[activation], lambda _: scores)

    def make(weight: Weight, bias: Tensor | None) -> Linear:
        return partial(F.linear, weight=_exact(weight), bias=None if bias is None else bias.float())

    num_bytes = (stored_as(gate_up)[1] + stored_as(down)[1]) * min(experts, rows * active) / experts + 2 * x.nbytes
    flops = 6.0 * rows * active * width * hidden
    reference = lambda: (Experts(config, weights, GATED[activation], lambda _: scores, make)(x.float()),)  # noqa: E731
    return Problem(lambda: kernel(x), reference, num_bytes, flops)


@builder
def decode_attention(draw: Draw, sequences: int, context: int, **shape: Any) -> Problem:
    """One new token of each sequence; contexts of several lengths, the longest as given. shape: of _attention."""
    lengths = [max(1, context - 7 * (row % 5)) for row in range(sequences)]
    return _attention(draw, [(length, 1) for length in lengths], **shape)


@builder
def extend_attention(draw: Draw, prompts: int, tokens: int, decodes: int = 0, **shape: Any) -> Problem:
    """Prompts, the last one's second half, in one launch with decodes. shape: of _attention."""
    rows = [(tokens, 1)] * decodes + [(tokens, tokens)] * (prompts - 1) + [(tokens, max(2, tokens // 2))]
    return _attention(draw, rows, **shape)


def _attention(
    draw: Draw,
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    in_8_bits: bool = False,
) -> Problem:
    """What no row may see is NaN.

    Args:
        rows: (context, new tokens), first those that decode.
        window, cap, sinks: see RaggedRows and Scores.
    """
    from gpu.kernels.attention import PagedAttention

    device, counts = draw.device, [-(-end // BLOCK) for end, _ in rows]
    kernels = PagedAttention(None if device.type == "cuda" else 3)
    scores = Scores(cap=cap, sinks=draw.noise(heads) if sinks else None)
    order = draw.order(sum(counts) + 2).tolist()
    kv = empty_kv(device, len(order), kv_heads, head_dim, draw.dtype, in_8_bits)
    tables = torch.full((len(rows), max(counts) + 1), NO_BLOCK, dtype=torch.int32, device=device)
    contexts = []
    for row, ((end, _), count) in enumerate(zip(rows, counts, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(count)], device=device)
        tables[row, :count] = blocks
        slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()[:end]
        kv.write(slots, *draw.noise(2, end, kv_heads, head_dim))
        contexts.append(slots)
    offsets = np.cumsum([0, *(num_new for _, num_new in rows)]).tolist()
    query = draw.noise(offsets[-1], heads, head_dim)
    ragged = RaggedRows(
        tables=tables,
        ends=torch.tensor([end for end, _ in rows], dtype=torch.int32, device=device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        num_decodes=sum(num_new == 1 for _, num_new in rows),
        window=window,
    )

    def reference() -> tuple[Tensor]:
        stored = _numbers_of(kv)
        outs = [
            _textbook(query[first:last].float(), stored[:, slots], window, scores)
            for (first, last), slots in zip(pairwise(offsets), contexts, strict=True)
        ]
        return (torch.cat(outs),)

    num_pairs = sum(min(at, window or at) for end, num_new in rows for at in range(end - num_new + 1, end + 1))
    num_read = sum(min(end, num_new - 1 + (window or end)) for end, num_new in rows)
    kv_bytes = 2 * num_read * kv_heads * kv.both.shape[-1] * kv.both.itemsize
    flops = 4.0 * num_pairs * heads * head_dim
    tolerance = max(TOLERANCES[draw.dtype], OF_16_BITS if in_8_bits else 0.0)
    launch, num_bytes = partial(kernels.attend, query, kv, ragged, scores), kv_bytes + 2 * query.nbytes
    return Problem(launch, reference, num_bytes, flops, tolerance=tolerance)


def _textbook(query: Tensor, context: Tensor, window: int | None, scores: Scores) -> Tensor:
    """The last tokens of a context attend to it: [tokens, heads * head_dim].

    Args:
        query: [tokens, heads, head_dim].
        context: [2, context, kv_heads, head_dim]: keys and values.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_context, num_kv_heads = context.shape[1:3]
    keys, values = context.repeat_interleave(num_heads // num_kv_heads, 2)
    positions = torch.arange(num_context, device=query.device)
    step, outs = max(1, SCORES_AT_ONCE // (num_heads * num_context)), []
    for first in range(0, num_tokens, step):
        part = query[first : first + step]
        found = torch.einsum("thd,chd->htc", part, keys) * head_dim**-0.5
        if scores.cap is not None:
            found = scores.cap * torch.tanh(found / scores.cap)
        own = (num_context - num_tokens + first + torch.arange(len(part), device=query.device))[:, None]
        is_hidden = (positions > own) | (positions <= own - (window or num_context))
        found.masked_fill_(is_hidden, float("-inf"))
        if scores.sinks is not None:
            found = torch.cat([found, scores.sinks.float().view(-1, 1, 1).expand(-1, len(part), 1)], -1)
        outs.append(torch.einsum("htc,chd->thd", found.softmax(-1)[..., :num_context], values).flatten(1))
    return torch.cat(outs)


PROMPT, OUTPUT, STOP_IDS = (1, 2, 3, 3, 7), (4, 5, 5), (2, 9)
# In turn: what requests of a server ask for.
UNPENALISED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 1.0, "logit_bias": ((5, 3.5), (9, -100.0)), "min_tokens": 8},
)
PENALISED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 0.8, "logit_bias": ((4, 2.0),), "top_k": 50, "top_p": 0.95},
)
ASKS = {"greedy": UNPENALISED[:1], "unpenalised": UNPENALISED, "all": UNPENALISED + PENALISED}
LOGPROB_TOLERANCE = 1e-5


@builder
def sample(draw: Draw, rows: int, vocab: int, asks: str) -> Problem:
    """asks: of ASKS."""
    logits, by_torch = 4 * draw.noise(rows, vocab), Sampler(rows, vocab, draw.device)
    kernel, placed, starts = _sampler(draw, rows, vocab, asks, {})
    for start in starts:
        by_torch.start(start)
    slots, positions = np.arange(rows), np.full(rows, len(PROMPT + OUTPUT))
    reference = lambda: (by_torch.sample(logits.float(), slots, positions).token_ids,)  # noqa: E731
    found = {"outputs": lambda _: (kernel.token_ids[:rows],), "tolerance": 0.0}
    return Problem(lambda: kernel.launch(logits, placed), reference, logits.nbytes, **found)  # type: ignore[arg-type]


@builder
def logprobs(draw: Draw, rows: int, vocab: int) -> Problem:
    """Of the sampled tokens and of all others, whatever else is asked for."""
    logits = 4 * draw.noise(rows, vocab)
    kernel, placed, _ = _sampler(draw, rows, vocab, "all", {"num_logprobs": 0})

    def reference() -> tuple[Tensor, Tensor]:
        exact = logits.double().log_softmax(-1)
        return exact.gather(1, kernel.token_ids[:rows].unsqueeze(1)).squeeze(1), exact

    def found(_: Any) -> tuple[Tensor, Tensor]:
        sampled, top, log_total = kernel.logprobs[:rows].unbind(-1)
        return sampled, logits - top.unsqueeze(1) - log_total.unsqueeze(1)

    launch = partial(kernel.launch, logits, placed)
    return Problem(launch, reference, logits.nbytes, outputs=found, tolerance=LOGPROB_TOLERANCE)


def _sampler(
    draw: Draw, rows: int, vocab: int, asks: str, more: dict[str, Any]
) -> tuple[LaunchedSampler, Tensor, list[SequenceStart]]:
    """The kernel with a sequence started in each row, slots and positions on the device, and the starts."""
    from gpu.kernels.sampling import DeviceSampler

    slots, known, starts = SamplingSlots(rows, vocab, draw.device), PROMPT + OUTPUT, list[SequenceStart]()
    for slot in range(rows):
        params = SamplingParams(max_tokens=64, **ASKS[asks][slot % len(ASKS[asks])], **more)
        starts.append(SequenceStart(slot, known, len(PROMPT), params, seed=slot + 1, stop_ids=STOP_IDS))
        slots.start(starts[-1])
    kernel = DeviceSampler(slots)
    kernel.put_started([torch.from_numpy(part.reshape(-1)).to(draw.device) for part in kernel.take_started()])
    placed = torch.stack([torch.arange(rows), torch.full((rows,), len(known))]).to(draw.device, torch.int32)
    return kernel, placed, starts


# The cases.

Sizes = dict[str, Any]
MOST_HEAD_ROWS = 512  # a prompt's chunk has one row that samples
FORMS = ("int8", "fp8", "fp8 by 128", "int4", "int4 by 128")


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape.

    Args:
        builder: of BUILDERS.
        shape: the builder's arguments.
        dtype: of rows and, where they are not quantized, of weights.
    """

    builder: str
    shape: Sizes = field(default_factory=dict)
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.shape.items())
        return f"{self.builder}: {shown}; {self.dtype}"


def grid(builder: str, dtype: str, **axes: Any) -> list[KernelCase]:
    """A case for each combination. An axis is a value or a tuple of values; a dict is several arguments at once."""
    found = []
    for values in product(*(axis if isinstance(axis, tuple) else (axis,) for axis in axes.values())):
        shape: Sizes = {}
        for name, value in zip(axes, values, strict=True):
            shape |= value if isinstance(value, dict) else {name: value}
        found.append(KernelCase(builder, shape, dtype))
    return found


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> Sizes:
    return {"heads": num_heads, "kv_heads": num_kv_heads, "head_dim": head_dim}


EIGHT_B: Sizes = {"hidden": 4096, "heads": _heads(32, 8, 128), "inner": 14_336, "vocab": 128_256}
SMALL: Sizes = {"hidden": 1024, "heads": _heads(16, 8, 128), "inner": 3072, "vocab": 151_936}
TINY: Sizes = {"hidden": 96, "heads": _heads(6, 2, 16), "inner": 80, "vocab": 300}
HEADS = tuple(
    _heads(*sizes)
    for sizes in (
        (32, 8, 64),
        (28, 4, 128),
        (32, 32, 96),
        (32, 8, 80),
        (8, 1, 256),
        (64, 8, 128),
        (8, 8, 128),
        (5, 1, 24),
    )
)
SCORES: tuple[Sizes, ...] = (
    {"window": 128},
    {"window": 4096},  # wider than the context
    {"window": 1},
    {"cap": 30.0},
    {"sinks": True},
    {"window": 128, "sinks": True},
    {"window": 200, "cap": 50.0},
)
TINY_SCORES: tuple[Sizes, ...] = (
    *({"window": 21}, {"window": 1}, {"cap": 3.0}, {"sinks": True}, {"window": 21, "cap": 3.0}),
)
# One token, one block, the first of a second block, the borders of splits
CONTEXTS = tuple(
    {"sequences": num, "context": size} for num, size in ((3, 1), (2, 16), (2, 17), (2, 256), (2, 257), (1, 20_000))
)


def timed_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """Of real models' shapes, what serves every model first: attention, plain matmuls, then what lies between them."""
    if not is_device:
        return _of_model(TINY, (5,), ((2, 40),), ("int8", "fp8 by 32", "int4"), "float32")
    if is_quick:
        return _of_model(SMALL, (1, 64), ((4, 1024),), ("fp8 by 128", "int4"))
    found = _of_model(EIGHT_B, (1, 16, 512, 4096), ((64, 4096), (1, 1024), (512, 1024)))
    found += _of_model(SMALL, (1, 16, 512), ((64, 4096), (1, 1024)))
    found += _of_matrices(EIGHT_B, (1, 16, 512), FORMS)
    return list({case.name: case for case in found}.values())  # some shapes are both models'


def variant_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """What serves most models first. On a CPU in float32: the interpreter's bfloat16 matmuls are wrong."""
    if not is_device:
        usual = TINY["heads"]
        found = _attention_cases("float32", 40, usual, TINY_SCORES)
        found += _attention_cases("float32", 33, (_heads(2, 2, 24), _heads(3, 1, 80)))
        found += grid("decode_attention", "float32", sequences=2, context=1, heads=usual)
        found += _sampling((11,), (300,)) + _between("float32", 3, 40)
        found += _matmuls("float32", (3,), 40, 96, ("plain", "fp8 by 32", "int4 by 32"))
        shape = {"hidden": 64, "experts": 4, "active": 2, "width": 32}
        return found + _experts("float32", (5,), shape, ("int8", "int4"))
    found = _attention_cases("bfloat16", 700, EIGHT_B["heads"], SCORES)
    found += _attention_cases("bfloat16", 700, HEADS[: 2 if is_quick else None])
    found += _sampling((1, 9, 40, 300), (32_000,) if is_quick else (128_256, 201_088, 1000))
    if is_quick:
        return found
    found += grid("decode_attention", "bfloat16", contexts=CONTEXTS, heads=EIGHT_B["heads"])
    found += _attention_cases("bfloat16", 700, _heads(64, 8, 64), SCORES)
    found += _between("bfloat16", 7, 2880)
    found += _matmuls("bfloat16", (1, 3, 16, 17, 300), 1000, 1056, ("plain", "int8", "fp8", "int4"))
    return found + _experts("bfloat16", (1, 40, 700), {"hidden": 1024, "experts": 32, "active": 4, "width": 512})


def other_formats(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """Variants in formats that few models are served in."""
    found: list[KernelCase] = []
    for dtype in () if is_quick or not is_device else ("float16", "float32"):
        found += _attention_cases(dtype, 700, HEADS[:3], ({}, {"window": 128, "sinks": True}, {"cap": 30.0}))
        found += _between(dtype, 7, 2880)
        found += _matmuls(dtype, (1, 16, 300), 1024, 2048, ("plain", "int8", "int4 by 128"))
        found += _experts(dtype, (3, 200), {"hidden": 512, "experts": 8, "active": 2, "width": 256})
    return found


def _of_model(
    model: Sizes,
    rows: tuple[int, ...],
    contexts: tuple[tuple[int, int], ...],
    forms: tuple[str, ...] = (),
    dtype: str = "bfloat16",
) -> list[KernelCase]:
    """
    Args:
        contexts: (sequences, tokens of each): of attention.
        forms: of quantized matrices.
    """
    heads, width, vocab, num = model["heads"], model["hidden"], model["vocab"], 4 if model is TINY else 64
    num_sequences, context = min(contexts)
    found = [case for n, m in contexts for case in grid("decode_attention", dtype, sequences=n, context=m, heads=heads)]
    found += grid("extend_attention", dtype, prompts=1, tokens=context, heads=heads)
    found += grid("extend_attention", dtype, prompts=2, tokens=context, decodes=num_sequences, heads=heads)
    if model is EIGHT_B:
        found += grid("extend_attention", dtype, prompts=2, tokens=8192, decodes=64, heads=heads)
    for num_rows in rows:
        found += _of_matrices(model, (num_rows,), ("plain",), dtype)
        if num_rows <= MOST_HEAD_ROWS:
            found += grid("matmul", dtype, matrix="head", form="plain", rows=num_rows, size={"out": vocab, "in": width})
            found += grid("sample", "float32", rows=num_rows, vocab=vocab, asks=("all", "greedy"))
    for num_rows in rows:
        found += grid("add_norm", dtype, rows=num_rows, width=width)
        found += grid("rotate_and_store", dtype, rows=num_rows, heads=heads, norm=("none", "head"))
        found += grid("gate", dtype, rows=num_rows, width=model["inner"], activation="silu")
        found += grid("embed", dtype, rows=num_rows, vocab=vocab, width=width)
    size = {"experts": 4, "active": 2, "width": 32} if model is TINY else {"experts": 128, "active": 8, "width": 768}
    found += grid("experts", dtype, rows=(2, 4 * num), hidden=min(width, 2048), size=size, form="plain")
    found += grid("decoding_rows", "float32", rows=num, slots=4 * num, width=16 * num)
    found += grid("prompt_tokens", "float32", tokens=8 * num, slots=num, width=16 * num)
    found += grid("scatter", dtype, rows=num, slots=4 * num, width=width)
    cleared = heads["kv_heads"] * heads["head_dim"]
    found += grid("clear", dtype, layers=2, blocks=2 * num, cleared=num // 4, width=cleared)
    return found + _of_matrices(model, rows, forms, dtype)


def _of_matrices(
    model: Sizes, rows: tuple[int, ...], forms: Sequence[str], dtype: str = "bfloat16"
) -> list[KernelCase]:
    """A layer's matmuls; a form whose groups do not divide a matrix's rows leaves that one out."""
    query, kv = (model["heads"][name] * model["heads"]["head_dim"] for name in ("heads", "kv_heads"))
    matrices = {
        "gate_up": (2 * model["inner"], model["hidden"]),
        "down": (model["hidden"], model["inner"]),
        "qkv": (query + 2 * kv, model["hidden"]),
        "output": (model["hidden"], query),
    }
    found = []
    for form, num_rows, (name, (num_out, num_in)) in product(forms, rows, matrices.items()):
        scheme, _, group = form.partition(" by ")
        if num_in % (int(group) if group else 32 if scheme == "int4" else 1) == 0:  # see gpu.quant.can_quantize
            size = {"out": num_out, "in": num_in}
            found += grid("matmul", dtype, matrix=name, form=form, rows=num_rows, size=size)
    return found


def _attention_cases(
    dtype: str, context: int, heads: Sizes | tuple[Sizes, ...], scores: tuple[Sizes, ...] = ({},)
) -> list[KernelCase]:
    """Decodes alone, and prompts and decodes in one launch."""
    found = grid("decode_attention", dtype, sequences=5, context=context, heads=heads, scores=scores)
    return found + grid(
        "extend_attention", dtype, prompts=2, tokens=context // 2, decodes=3, heads=heads, scores=scores
    )


def _sampling(rows: tuple[int, ...], vocabularies: tuple[int, ...]) -> list[KernelCase]:
    """By few rows several programs read one, and by many one does."""
    found = grid("sample", "float32", vocab=vocabularies, rows=rows, asks=("all", "unpenalised"))
    return found + grid("logprobs", "float32", vocab=vocabularies, rows=rows)


def _between(dtype: str, rows: int, width: int) -> list[KernelCase]:
    """Norms, rotations, activations."""
    heads = _heads(6, 2, 40)
    return [
        *grid("add_norm", dtype, rows=rows, width=width, more=({"scale": 0.22}, {"weight": False})),
        *grid("norm", dtype, rows=rows, width=width),
        *grid(
            "rotate_and_store", dtype, rows=rows, heads=heads, more=({"norm": "all"}, {"norm": "none", "turns": False})
        ),
        *grid("gate", dtype, rows=rows, width=width, activation=("gelu_pytorch_tanh", "clamped_swiglu")),
        *grid("embed", dtype, rows=rows, vocab=300, width=width),
    ]


def _matmuls(dtype: str, rows: tuple[int, ...], num_out: int, num_in: int, forms: tuple[str, ...]) -> list[KernelCase]:
    size = {"out": num_out, "in": num_in, "bias": False}
    return grid("matmul", dtype, matrix="any", form=forms, rows=rows, size=size)


def _experts(dtype: str, rows: tuple[int, ...], shape: Sizes, forms: tuple[str, ...] = FORMS) -> list[KernelCase]:
    clamped = {"form": "plain", "activation": "clamped_swiglu", "bias": True}
    return grid("experts", dtype, rows=rows, shape=shape, more=(*({"form": form} for form in forms), clamped))


# Checking and timing.


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's: errors first, by several processes at once, which fills Triton's cache of what is compiled."""
    timed, variants = timed_cases(is_quick, is_device), variant_cases(is_quick, is_device)
    times = [Case(f"time of {case.name}", partial(time_of, case), CASE_LIMIT_S, TIMES) for case in timed]
    return [ceilings_case(), *checks([*timed, *variants]), *times, *checks(other_formats(is_quick, is_device))]


def checks(cases: Sequence[KernelCase]) -> list[Case]:
    by_name = {f"error of {case.name}": case for case in cases}
    return [Case(name, partial(_check, case), CASE_LIMIT_S, ERRORS, is_shared=True) for name, case in by_name.items()]


def _check(case: KernelCase, context: Context) -> Iterator[Row]:
    with torch.inference_mode():
        error, tolerance = _error(_build(case, context, 0), DTYPES[case.dtype])
    if context.is_device:
        torch.cuda.empty_cache()  # other processes use the device, too
    cells: dict[str, Cell] = {"case": case.name, "error": error, "tolerance": tolerance}
    yield Row(ERRORS, cells, OK if error <= tolerance else WRONG)  # NaN is wrong


def time_of(case: KernelCase, context: Context) -> Iterator[Row]:
    """The kernel's time, beside the limit."""
    with torch.inference_mode():
        first, seconds, how = timed(case, context)
        cells: dict[str, Cell] = {"case": case.name, "µs": seconds * 1e6, "GB/s": first.num_bytes / seconds / 1e9}
        cells |= {"TFLOP/s": first.flops / seconds / 1e12, "sent": how}
        target, verdict = target_of("", case.name), ""
        speed = context.speed
        limit_s = max(first.num_bytes / speed.read_bytes_per_s, first.flops / speed.flops)
        cells |= {"limit µs": limit_s * 1e6, "share of limit": limit_s / seconds}
        if target is not None:
            cells["target"] = target.shown
            verdict = target.verdict(limit_s / seconds, limit_s / seconds, context)
    yield Row(TIMES, cells, verdict)


def timed(case: KernelCase, context: Context) -> tuple[Problem, float, str]:
    """One of the problems, and what median_s says of them."""
    first = _build(case, context, 0)
    copies = num_copies(int(first.num_bytes), context.device)
    problems = [first, *(_build(case, context, seed) for seed in range(1, copies))]
    return first, *median_s([problem.launch for problem in problems], context.device)


def _build(case: KernelCase, context: Context, seed: int) -> Problem:
    generator = torch.Generator(context.device).manual_seed(seed)
    return BUILDERS[case.builder](Draw(generator, DTYPES[case.dtype]), **case.shape)


def _error(problem: Problem, dtype: torch.dtype) -> tuple[float, float]:
    """The largest of all outputs', and the tolerance it is held against."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty and its like give NaN
    try:
        found = problem.outputs(problem.launch())
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    tolerance = TOLERANCES[dtype] if problem.tolerance is None else problem.tolerance
    error_of = relative_error if tolerance else share_of_others
    return max(error_of(got, want) for got, want in zip(found, problem.reference(), strict=True)), tolerance


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in float64; infinite where found is not finite and wanted is, or shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    difference, size = (found.double() - wanted.double()).norm().item(), wanted.double().norm().item()
    error = difference / size if size else difference
    return error if error == error else float("inf")


def share_of_others(found: Tensor, wanted: Tensor) -> float:
    """The share of numbers that differ; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return (found.double() != wanted.double()).double().mean().item()
