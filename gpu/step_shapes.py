"""The shapes that steps are padded to, in rows and prompt tokens, so that a few CUDA graphs serve all. Thread: any.

Decodes go by how many they are, in steps small enough that padding costs little beside reading the weights; where
prompts are computed too, both are padded. How far the ladder of prompts goes is arithmetic, not measurement: a graph
saves the host the sending of a dozen kernels a layer, and no more, so it pays as long as the device computes the tokens
of a layer in less time than that takes. The last rung is where both are even: up to there padding is free, and beyond
it the device is never idle. A chunk of a thousand tokens is bound by the device with any model worth a GPU.
"""

from bisect import bisect_left
from dataclasses import dataclass

from core.config import EngineConfig, ModelConfig
from gpu.linear import MOST_FEW_ROWS

MOST_TOKENS = 1024  # of prompts, in a step
# A dozen kernels of a layer, sent one by one, 10 µs each in Python; an H100 or H200 at three quarters of its ceiling.
LAYER_SENDING_S, MULTIPLIED_FLOPS = 120e-6, 600e12
DECODES_BESIDE = (0, 4, 12, 32, 128, 512)  # rows that decode beside chunks; with MOST_PROMPTS, up to 16 draw in 16
MOST_PROMPTS = 4  # whose chunks share a step; of more, as when a rush of short ones begins, the device has enough to do


@dataclass(frozen=True, slots=True)
class StepShape:
    """
    Args:
        num_decodes: rows of one token.
        num_prompts: rows of any number of tokens, num_prompt_tokens in all.
    """

    num_decodes: int
    num_prompts: int = 0
    num_prompt_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens

    def __str__(self) -> str:
        prompts = f"{self.num_prompt_tokens} tokens of prompts beside " if self.num_prompts else ""
        return f"{prompts}{self.num_decodes} rows"

    def serves(self, step: "StepShape") -> bool:
        """Whether a step may be padded to this: nothing of it is computed in other sums for that.

        Products of few rows and of many are cut differently (kernels/matmul.py), those with the head too.
        """
        return (
            step.num_decodes <= self.num_decodes
            and step.num_prompts <= self.num_prompts
            and step.num_prompt_tokens <= self.num_prompt_tokens
            and _are_cut_alike(step.num_tokens, self.num_tokens)
            and _are_cut_alike(step.num_rows, self.num_rows)
        )


def _are_cut_alike(num_rows: int, padded: int) -> bool:
    return (num_rows <= MOST_FEW_ROWS) == (padded <= MOST_FEW_ROWS)


@dataclass(frozen=True, slots=True)
class StepShapes:
    """All that steps are padded to.

    Args:
        decodes: of steps without chunks, ascending; the last holds all rows that there may be.
        chunks: of the others, those of fewer tokens first.
    """

    decodes: tuple[int, ...]
    chunks: tuple[StepShape, ...] = ()

    def of(self, step: StepShape) -> StepShape | None:
        """The least that serves; None: none does."""
        if not step.num_prompts:
            return StepShape(self.decodes[bisect_left(self.decodes, step.num_decodes)])
        return next((shape for shape in self.chunks if shape.serves(step)), None)

    @property
    def largest(self) -> tuple[StepShape, ...]:
        """Of each kind."""
        return (*self.chunks[-1:], StepShape(self.decodes[-1]))

    @property
    def in_order(self) -> tuple[StepShape, ...]:
        """As they are captured: the largest of each kind, in whose memory the others fit, then from the smallest up.

        Where memory ends too early, single streams and small batches have theirs, and the largest has.
        """
        others = [*map(StepShape, self.decodes[:-1]), *self.chunks[:-1]]
        return (*self.largest, *sorted(others, key=lambda shape: shape.num_tokens))


def step_shapes(model: ModelConfig, engine: EngineConfig) -> StepShapes:
    """Those that graphs are captured of."""
    max_rows = max_decodes(engine)
    return StepShapes(decode_sizes(max_rows), chunk_shapes(max_rows, most_chunk_tokens(model, engine)))


def max_decodes(engine: EngineConfig) -> int:
    """Rows of a step, at most."""
    return min(engine.max_sequences, engine.max_batch_tokens)


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows that steps are padded to, ascending; the last one holds them all."""
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows + 1, 16)]
    return (*(size for size in ladder if size < max_rows), max_rows)


def most_chunk_tokens(model: ModelConfig, engine: EngineConfig) -> int:
    """Of prompts, in a step, where the device takes no longer for a layer than the host does to send it."""
    flops = 2 * multiplied_parameters(model)
    return min(int(LAYER_SENDING_S * MULTIPLIED_FLOPS / flops), engine.max_batch_tokens, MOST_TOKENS)


def multiplied_parameters(model: ModelConfig) -> int:
    """Of a layer's matrices, those that a token is multiplied with."""
    width = model.intermediate_size
    if model.experts is not None:
        width = model.experts.num_active * model.experts.intermediate_size
    return model.hidden_size * (2 * model.query_size + 2 * model.kv_size + 3 * width)


def chunk_shapes(max_rows: int, most_tokens: int) -> tuple[StepShape, ...]:
    """Those of fewer tokens first: 16 in all, as products of few rows take, then powers of two beside decodes.

    A power of two of prompts' tokens, as the planner cuts them where tiles end; more than twice as many decodes have
    the next one.

    Args:
        max_rows: of a step: decodes and prompts.
        most_tokens: of prompts, in a step.
    """
    if most_tokens < MOST_FEW_ROWS:
        return ()
    num_prompts = min(MOST_PROMPTS, max(1, max_rows // 2))
    most_decodes = max_rows - num_prompts
    beside = [*(count for count in DECODES_BESIDE if count < most_decodes), most_decodes]
    few = [(count, MOST_FEW_ROWS - count) for count in beside if count + num_prompts <= MOST_FEW_ROWS]
    sizes = [2 << power for power in range(MOST_FEW_ROWS.bit_length() - 1, most_tokens.bit_length() - 1)]
    many = [(count, size) for size in sizes for count in beside if count <= 2 * size]
    shapes = [StepShape(num_decodes, num_prompts, size) for num_decodes, size in [*few, *many]]
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_decodes)))
