"""Random inputs for each kernel, how it is launched, and what it should give: torch's, in float32.

A new kernel adds a builder here and a row to bench/gpu_kernels.py. Triton's modules are imported where they are used:
whoever lists the problems needs none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from core.config import ExpertsConfig, ModelConfig, RopeConfig
from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.attention import RaggedRows
from gpu.kv_cache import LayerKV
from gpu.layers import GATED, Experts, Rope
from gpu.linear import Linear, make_linear
from gpu.operators import Operators
from gpu.parameters import ExpertWeights
from gpu.quant import FP8, MAX_FP8, QuantizedWeight, Weight, dequantize, quantize
from gpu.rows import DeviceTables, RowOperators, StepInputs
from gpu.sampler import LaunchedSampler, Sampler, SamplingSlots
from gpu.scores import Scores

EPS = 1e-6
THETA = 500_000.0
SPARE_BLOCKS = 16
BLOCK = 16  # tokens

Launch = Callable[[], Any]
Reference = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel on one set of inputs.

    Args:
        launch: what is timed.
        reference: what it is to give, computed by torch in float32.
        num_bytes, flops: that it must at least read and write, and compute.
        outputs: what was launched gave -> the tensors to compare.
        peer: torch's operators for the same, in dtype; None: none is worth a look.
        tolerance: None: the dtype's; 0: to the last bit, and the error is the share of numbers that differ.
    """

    dtype: torch.dtype
    launch: Launch
    reference: Reference
    num_bytes: float
    flops: float = 0.0
    outputs: Callable[[Any], tuple[Tensor, ...]] = lambda out: (out,) if isinstance(out, Tensor) else tuple(out)
    peer: Launch | None = None
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """What a problem's inputs are drawn with: in dtype, unless they are indexes."""

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

    def problem(
        self, launch: Launch, reference: Reference, num_bytes: float, flops: float = 0.0, **more: Any
    ) -> Problem:
        return Problem(self.dtype, launch, reference, num_bytes, flops, **more)


BUILDERS: dict[str, Callable[..., Problem]] = {}
"""By the kernel's name: (draw, the sizes of gpu_kernels.KernelCase.shape) -> the problem."""


def builder(build: Callable[..., Problem]) -> Callable[..., Problem]:
    BUILDERS[build.__name__] = build
    return build


def _kernels(draw: "Draw") -> Operators:
    """TritonOperators; what it computes takes its sizes from what it is given."""
    from gpu.kernels.operators import TritonOperators

    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_position=1 << 17,
        rms_norm_eps=EPS,
        rope=RopeConfig(THETA),
    )
    return TritonOperators(config, draw.dtype, draw.device)


@builder
def add_norm(draw: Draw, rows: int, width: int, scale: float = 1.0, weight: bool = True) -> Problem:
    x, added = (draw.noise(rows, width) for _ in range(2))
    by = draw.noise(width) if weight else None
    kernels, torchs = _kernels(draw), Operators(draw.dtype, x.device, EPS)

    def reference() -> tuple[Tensor, Tensor]:
        total = x.float() + scale * added.float()
        if by is None:
            return total, total
        rounded = total.to(draw.dtype).float()  # what is normed was rounded
        return total, F.rms_norm(rounded, (width,), by.float(), EPS)

    return draw.problem(
        lambda: kernels.add_norm(x, added, scale, by),
        reference,
        (4 if weight else 3) * x.nbytes,
        peer=lambda: torchs.add_norm(x, added, scale, by),
    )


@builder
def norm(draw: Draw, rows: int, width: int) -> Problem:
    x, weight = draw.noise(rows, width), draw.noise(width)
    kernels = _kernels(draw)
    return draw.problem(
        lambda: kernels.norm(x, weight), lambda: (F.rms_norm(x.float(), (width,), weight.float(), EPS),), 2 * x.nbytes
    )


@builder
def rotate_and_store(
    draw: Draw, rows: int, heads: int, kv_heads: int, head_dim: int, norm: str, turns: bool = True
) -> Problem:
    """Into slots in random order; what lies beside them must stay as it is.

    Args:
        norm: "none", of each "head" by itself, or of "all" heads together.
    """
    device = draw.device
    qkv = draw.noise(rows, heads + 2 * kv_heads, head_dim)
    norms: tuple[Tensor, Tensor] | None = None
    if norm != "none":
        of_query, of_key = ((heads,), (kv_heads,)) if norm == "all" else ((), ())
        norms = draw.noise(*of_query, head_dim), draw.noise(*of_key, head_dim)
    num_blocks = rows // BLOCK + SPARE_BLOCKS
    slots = draw.order(num_blocks * BLOCK)[:rows]
    positions = draw.below(8192, rows)
    rotation = Rope(RopeConfig(THETA), head_dim, device).rotation(positions.float()) if turns else None

    def empty_kv(of: torch.dtype) -> LayerKV:
        both = torch.full((2, num_blocks, BLOCK, kv_heads, head_dim), float("nan"), dtype=of, device=device)
        return LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))

    def found(query: Tensor, kv: LayerKV) -> tuple[Tensor, ...]:
        return query, kv.keys.nan_to_num(0), kv.values.nan_to_num(0)

    def reference() -> tuple[Tensor, ...]:
        exact, operators = empty_kv(torch.float32), Operators(torch.float32, device, EPS)
        in_float = None if norms is None else (norms[0].float(), norms[1].float())
        return found(operators.rotate_and_store(qkv.float(), in_float, rotation, exact, slots), exact)

    kernels, torchs, kv, peer_kv = _kernels(draw), Operators(draw.dtype, device, EPS), *map(empty_kv, [draw.dtype] * 2)
    return draw.problem(
        lambda: kernels.rotate_and_store(qkv, norms, rotation, kv, slots),
        reference,
        2 * qkv.nbytes + (0 if rotation is None else rotation.nbytes),
        outputs=lambda query: found(query, kv),
        peer=lambda: torchs.rotate_and_store(qkv, norms, rotation, peer_kv, slots),
    )


@builder
def gate(draw: Draw, rows: int, width: int, activation: str) -> Problem:
    gate_up = 4 * draw.noise(rows, 2 * width)
    kernel, torchs = _kernels(draw).gated(activation), GATED[activation]
    return draw.problem(
        lambda: kernel(gate_up), lambda: (torchs(gate_up.float()),), gate_up.nbytes * 1.5, peer=lambda: torchs(gate_up)
    )


@builder
def embed(draw: Draw, rows: int, vocab: int, width: int) -> Problem:
    from gpu.kernels.rows import embed_rows

    table = draw.noise(vocab, width)
    token_ids = draw.below(vocab, rows)
    return draw.problem(
        lambda: embed_rows(table, token_ids),
        lambda: (table[token_ids].float(),),
        2 * rows * width * draw.dtype.itemsize,
        peer=lambda: F.embedding(token_ids, table),
        tolerance=0.0,
    )


@builder
def decoding_rows(draw: Draw, rows: int, slots: int, width: int) -> Problem:
    """Block tables of a step's rows; the last is padding."""
    blocks = draw.below(1000, slots, width).int()
    inputs, filled = _step_inputs(draw, rows, slots, width), _rows_over(blocks, rows)

    def reference() -> tuple[Tensor, ...]:
        is_used = torch.arange(width, device=draw.device) * BLOCK < inputs.ends[:, None]
        return (torch.where(is_used, blocks[inputs.slots.long()], SCRATCH).float(),)

    return draw.problem(
        lambda: filled.tables_of(inputs, width),
        reference,
        2 * rows * width * blocks.element_size(),
        outputs=lambda _: (filled.tables_of(inputs, width),),
        tolerance=0.0,
    )


@builder
def prompt_tokens(draw: Draw, tokens: int, slots: int, width: int) -> Problem:
    """What a step's tokens read; the last is padding, every other one what its slot sampled last."""
    blocks = draw.below(1000, slots, width).int()
    inputs, filled = _step_inputs(draw, tokens, slots, width), _rows_over(blocks, tokens)
    slot, position, token_id = (part[:-1].long() for part in inputs.tokens)

    def reference() -> tuple[Tensor, ...]:
        places = blocks[slot, position // BLOCK].long() * BLOCK + position % BLOCK
        wanted = (torch.where(token_id < 0, slot + LAST_TOKEN, token_id), places, position)
        return tuple(part.float() for part in wanted)

    def found(_: Any) -> tuple[Tensor, ...]:
        read = filled.tokens_of(inputs)
        return read.token_ids[:-1], read.kv_slots[:-1], read.positions[:-1]

    return draw.problem(
        lambda: filled.tokens_of(inputs),
        reference,
        inputs.tokens.nbytes + 20 * tokens,
        outputs=found,
        tolerance=0.0,
    )


SCRATCH, LAST_TOKEN = 1000, 7


def _rows_over(blocks: Tensor, num_tokens: int) -> RowOperators:
    """Slot i has sampled the token LAST_TOKEN + i last."""
    from gpu.kernels.rows import DeviceRows

    last = torch.arange(len(blocks), device=blocks.device) + LAST_TOKEN
    return DeviceRows(DeviceTables(blocks, last, SCRATCH, SCRATCH + 1), num_tokens, num_tokens)


def _step_inputs(draw: Draw, rows: int, slots: int, width: int) -> StepInputs:
    """Of rows of a token each, the last of them padding."""
    tokens = torch.stack([draw.below(slots, rows), draw.below(width * BLOCK, rows), draw.below(1000, rows)]).int()
    tokens[2, ::2] = -1
    tokens[:, -1] = -1
    none = tokens.new_empty(0)
    return StepInputs(tokens[0], tokens[1] + 1, none, none, none, tokens)


@builder
def clear(draw: Draw, layers: int, blocks: int, cleared: int, width: int) -> Problem:
    """Others' content stays."""
    cache = draw.noise(layers, 2, blocks, BLOCK, 1, width)
    which = draw.order(blocks)[:cleared].int()
    wanted, rows = cache.clone(), _rows_over(which.new_zeros((1, 1)), 1)
    wanted[:, :, which.long()] = 0
    return draw.problem(
        lambda: rows.clear_blocks(cache, which),
        lambda: (wanted,),
        cache.nbytes * cleared / blocks,
        outputs=lambda _: (cache,),
        peer=lambda: cache.index_fill_(2, which.long(), 0),
        tolerance=0.0,
    )


@builder
def scatter(draw: Draw, rows: int, slots: int, width: int) -> Problem:
    """One row is padding."""
    from gpu.kernels.rows import scatter_rows

    table, new = draw.noise(slots, width), draw.noise(rows, width)
    places = draw.order(slots)[:rows]
    places[rows // 2] = -1
    wanted = table.float()
    wanted[places[places >= 0]] = new[places >= 0].float()
    return draw.problem(
        lambda: scatter_rows(table, places, new),
        lambda: (wanted,),
        2 * new.nbytes,
        outputs=lambda _: (table,),
        tolerance=0.0,
    )


@builder
def product(draw: Draw, matrix: str, form: str, rows: int, bias: bool = True, **size: int) -> Problem:
    """size: out and in; matrix: a word of which one it is."""
    from gpu.kernels.matmul import Matmul, stored_as
    from gpu.quant import SlabLinear

    num_out, num_in = size["out"], size["in"]
    weight = stored(draw, form, num_out, num_in)
    x, added = draw.noise(rows, num_in), draw.noise(num_out) if bias else None
    kernel = Matmul(weight, added)
    torchs: Linear = (
        SlabLinear(weight, added) if isinstance(weight, QuantizedWeight) else make_linear(weight, added, None)
    )
    return draw.problem(
        lambda: kernel(x),
        lambda: (F.linear(x.float(), _exact(weight), None if added is None else added.float()),),
        stored_as(weight)[1] + x.nbytes + rows * num_out * draw.dtype.itemsize,
        2.0 * rows * num_out * num_in,
        peer=lambda: torchs(x),
    )


def stored(draw: Draw, form: str, *shape: int) -> Weight:
    """A matrix, or a stack of them, of numbers of about 1 / sqrt(inputs).

    Args:
        form: "plain", what quantize() makes, or "fp8 by N" and "int4 by N": as checkpoints have it, N inputs that
            share a scale.
    """
    scheme, _, size = form.partition(" by ")
    if scheme == "int4" and size:
        return _int4(draw, int(size), *shape)
    plain = draw.noise(*shape).mul_(shape[-1] ** -0.5)
    if form == "plain":
        return plain
    if not size:
        return quantize(plain, scheme)
    groups = plain.float().view(*shape[:-1], -1, int(size))
    scales = groups.abs().amax(-1) / MAX_FP8
    return QuantizedWeight(plain.dtype, groups.div_(scales.unsqueeze(-1)).to(FP8).flatten(-2), scales)


def _int4(draw: Draw, group: int, *shape: int) -> QuantizedWeight:
    """Any numbers are some matrix's."""
    *rows, num_in = shape
    values = draw.below(256, *rows, num_in // 2)
    scales = draw.exact(*rows, num_in // group).abs_() + 0.5
    zeros = draw.exact(*rows, num_in // group)
    size = 0.2 * num_in**-0.5
    return QuantizedWeight(draw.dtype, values.to(torch.uint8), (size * scales).bfloat16(), (size * zeros).bfloat16())


def _exact(weight: Weight) -> Tensor:
    return dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()


@builder
def experts(
    draw: Draw,
    rows: int,
    hidden: int,
    experts: int,
    active: int,
    width: int,
    form: str,
    activation: str = "silu",
    bias: bool = False,
) -> Problem:
    """All choose by the same scores: what the router's rounding decides is not the kernels'."""
    from gpu.kernels.matmul import GroupedExperts, stored_as

    config = ExpertsConfig(experts, active, width, "qwen3_moe")
    gate_up = stored(draw, form, experts, 2 * width, hidden)
    down = stored(draw, form, experts, hidden, width)
    biases = [draw.noise(experts, size) if bias else None for size in (2 * width, hidden)]
    x, scores = draw.noise(rows, hidden), draw.exact(rows, experts)
    weights = ExpertWeights(scores[:1], None, gate_up, biases[0], down, biases[1])
    kernel = GroupedExperts(config, weights, GATED[activation], lambda _: scores)

    def reference() -> tuple[Tensor]:
        def make(weight: Weight, bias: Tensor | None) -> Linear:
            if weight is weights.router:
                return lambda _: scores
            return partial(F.linear, weight=_exact(weight), bias=None if bias is None else bias.float())

        return (Experts(config, weights, GATED[activation], make)(x.float()),)

    num_touched = min(experts, rows * active)
    num_bytes = (stored_as(gate_up)[1] + stored_as(down)[1]) * num_touched / experts
    return draw.problem(lambda: kernel(x), reference, num_bytes + 2 * x.nbytes, 6.0 * rows * active * width * hidden)


NOWHERE = 1 << 20  # a block that nobody has
SCORES_AT_ONCE = 1 << 26


@builder
def decode_attention(draw: Draw, sequences: int, context: int, **shape: Any) -> Problem:
    """One new token of each sequence; contexts of several lengths, the longest as given. shape: of _attention."""
    lengths = [max(1, context - 7 * (place % 5)) for place in range(sequences)]
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
) -> Problem:
    """What nobody may see is not a number.

    Args:
        rows: (context, new tokens), first those that decode.
        window, cap, sinks: see RaggedRows and Scores.
    """
    from gpu.kernels.attention import PagedAttention

    kernels = PagedAttention(None if draw.device.type == "cuda" else 3)
    scores = Scores(cap=cap, sinks=draw.noise(heads) if sinks else None)
    device = draw.device
    counts = [-(-end // BLOCK) for end, _ in rows]
    order = draw.order(sum(counts) + 2).tolist()
    both = torch.full((2, len(order), BLOCK, kv_heads, head_dim), float("nan"), dtype=draw.dtype, device=device)
    tables = torch.full((len(rows), max(counts) + 1), NOWHERE, dtype=torch.int32, device=device)
    contexts = []
    for row, ((end, _), count) in enumerate(zip(rows, counts, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(count)], device=device)
        tables[row, :count] = blocks
        slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()[:end]
        both.flatten(1, 2)[:, slots] = draw.noise(2, end, kv_heads, head_dim)
        contexts.append(slots)
    kv = LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))
    offsets = [0]
    for _, num_new in rows:
        offsets.append(offsets[-1] + num_new)
    query = draw.noise(offsets[-1], heads, head_dim)
    ragged = RaggedRows(
        tables=tables,
        ends=torch.tensor([end for end, _ in rows], dtype=torch.int32, device=device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        num_decodes=sum(num_new == 1 for _, num_new in rows),
        window=window,
    )

    def reference() -> tuple[Tensor]:
        outs = [
            _textbook(query[first:last].float(), both.flatten(1, 2)[:, slots].float(), window, scores)
            for (first, last), slots in zip(pairwise(offsets), contexts, strict=True)
        ]
        return (torch.cat(outs),)

    num_pairs = sum(min(place, window or place) for end, num_new in rows for place in range(end - num_new + 1, end + 1))
    num_read = sum(min(end, num_new - 1 + (window or end)) for end, num_new in rows)
    kv_bytes = 2 * num_read * kv_heads * head_dim * draw.dtype.itemsize
    return draw.problem(
        lambda: kernels.attend(query, kv, ragged, scores),
        reference,
        kv_bytes + 2 * query.nbytes,
        4.0 * num_pairs * heads * head_dim,
    )


def _textbook(query: Tensor, context: Tensor, window: int | None, scores: Scores) -> Tensor:
    """The last tokens of a context attend to it: [tokens, heads * head_dim].

    Args:
        query: [tokens, heads, head_dim].
        context: [2, context, kv_heads, head_dim]: keys and values.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_context, num_kv_heads = context.shape[1:3]
    per_kv = num_heads // num_kv_heads
    keys, values = context.repeat_interleave(per_kv, 2)
    positions = torch.arange(num_context, device=query.device)
    step, outs = max(1, SCORES_AT_ONCE // (num_heads * num_context)), []
    sinks = None if scores.sinks is None else scores.sinks.float().view(-1, 1, 1)
    for first in range(0, num_tokens, step):
        part = query[first : first + step]
        found = torch.einsum("thd,chd->htc", part, keys) * head_dim**-0.5
        if scores.cap is not None:
            found = scores.cap * torch.tanh(found / scores.cap)
        own = num_context - num_tokens + first + torch.arange(len(part), device=query.device)
        is_hidden = positions > own[:, None]
        if window is not None:
            is_hidden |= positions <= own[:, None] - window
        found.masked_fill_(is_hidden, float("-inf"))
        if sinks is not None:
            found = torch.cat([found, sinks.expand(-1, len(part), 1)], -1)
        shares = found.softmax(-1)[..., :num_context]
        outs.append(torch.einsum("htc,chd->thd", shares, values).flatten(1))
    return torch.cat(outs)


PROMPT = (1, 2, 3, 3, 7)
OUTPUT = (4, 5, 5)  # so far
STOP_IDS = (2, 9)
# By turns: what requests of a server ask for.
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
    """
    Args:
        asks: of ASKS.
    """
    from gpu.kernels.sampler import DeviceSampler

    logits, asked = _logits(draw, rows, vocab), SamplingSlots(rows, vocab, draw.device)
    by_torch = Sampler(rows, vocab, draw.device)
    for start in _starts(rows, ASKS[asks], {}):
        asked.start(start)
        by_torch.start(start)
    kernel, slots, positions = DeviceSampler(asked), np.arange(rows), np.full(rows, len(PROMPT + OUTPUT))
    placed = _placed(kernel, rows)
    return draw.problem(
        lambda: kernel.launch(logits, placed),
        lambda: (by_torch.sample(logits.float(), slots, positions).token_ids,),
        logits.nbytes,
        outputs=lambda _: (kernel.token_ids[:rows],),
        tolerance=0.0,
    )


@builder
def logprobs(draw: Draw, rows: int, vocab: int) -> Problem:
    """Of the drawn tokens and of all others, whatever else is asked for."""
    from gpu.kernels.sampler import DeviceSampler

    logits, asked = _logits(draw, rows, vocab), SamplingSlots(rows, vocab, draw.device)
    for start in _starts(rows, ASKS["all"], {"num_logprobs": 0}):
        asked.start(start)
    kernel = DeviceSampler(asked)
    placed = _placed(kernel, rows)

    def reference() -> tuple[Tensor, Tensor]:
        exact = logits.double().log_softmax(-1)
        return exact.gather(1, kernel.token_ids[:rows].unsqueeze(1)).squeeze(1), exact

    def found(_: Any) -> tuple[Tensor, Tensor]:
        drawn, top, log_total = kernel.logprobs[:rows].unbind(-1)
        return drawn, logits - top.unsqueeze(1) - log_total.unsqueeze(1)

    return draw.problem(
        lambda: kernel.launch(logits, placed), reference, logits.nbytes, outputs=found, tolerance=LOGPROB_TOLERANCE
    )


def _placed(kernel: LaunchedSampler, rows: int) -> Tensor:
    """Slots and positions on the device, where what has started is too."""
    device = kernel.token_ids.device
    kernel.put_started([torch.from_numpy(part.reshape(-1)).to(device) for part in kernel.take_started()])
    return torch.stack([torch.arange(rows), torch.full((rows,), len(PROMPT + OUTPUT))]).to(device, torch.int32)


def _logits(draw: Draw, rows: int, vocab: int) -> Tensor:
    return 4 * draw.noise(rows, vocab)


def _starts(rows: int, asks: tuple[dict[str, Any], ...], more: dict[str, Any]) -> list[SequenceStart]:
    known = PROMPT + OUTPUT
    found = []
    for slot in range(rows):
        params = SamplingParams(max_tokens=64, **asks[slot % len(asks)], **more)
        found.append(SequenceStart(slot, known, len(PROMPT), params, seed=slot + 1, stop_ids=STOP_IDS))
    return found
