"""The shapes that steps are padded to, in rows and prompt tokens, so that a few CUDA graphs serve all. Thread: any.

Steps without prompts are padded in their number of rows, finely enough that padding costs little beside reading the
weights; steps with prompts are padded in decodes and in prompt tokens. The largest number of prompt tokens is computed,
not measured: a graph saves the host the launch of a dozen kernels per layer, so it pays as long as the device computes
a layer's tokens faster than the host launches them. Up to there padding is free; beyond it the device is never idle.
With any model worth a GPU, the device takes longer for a chunk of a thousand tokens.
"""

from bisect import bisect_left
from dataclasses import dataclass

from core.config import EngineConfig, ModelConfig
from gpu.linear import MOST_FEW_ROWS

MOST_TOKENS = 1024  # of prompts, in a step
# A dozen kernels per layer, launched from Python at 10 µs each; an H100 or H200 at three quarters of its ceiling.
LAYER_SENDING_S, MULTIPLIED_FLOPS = 120e-6, 600e12
DECODES_BESIDE = (0, 4, 12, 32, 128, 512)  # decodes beside prompts: 12 and MOST_PROMPTS make the 16 few rows
MOST_PROMPTS = 4  # in a step with a graph; with more, as in a rush of short prompts, the device is busy enough


@dataclass(frozen=True, slots=True)
class StepShape:
    """
    Args:
        num_decodes: rows of one token.
        num_prompts: other rows, num_prompt_tokens in all.
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
        """Whether a step may be padded to this shape without changing how its numbers are summed.

        Matmuls with few rows and with many are cut differently (kernels/matmul.py), those with the LM head too.
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
    """
    Args:
        decodes: numbers of rows without prompts, ascending; the last is the most a step can have.
        chunks: shapes with prompts, fewer tokens first.
    """

    decodes: tuple[int, ...]
    chunks: tuple[StepShape, ...] = ()

    def of(self, step: StepShape) -> StepShape | None:
        """The smallest shape that serves the step; None: none does."""
        if step.num_decodes > self.decodes[-1]:  # a preempted sequence's own tokens again, a row each
            return None
        if not step.num_prompts:
            return StepShape(self.decodes[bisect_left(self.decodes, step.num_decodes)])
        return next((shape for shape in self.chunks if shape.serves(step)), None)

    @property
    def largest(self) -> tuple[StepShape, ...]:
        """Of each kind."""
        return (*self.chunks[-1:], StepShape(self.decodes[-1]))

    @property
    def in_order(self) -> tuple[StepShape, ...]:
        """In the order of capture: the largest of each kind, whose memory the others reuse, then the smallest first.

        If memory runs out, single streams, small batches and the largest steps have graphs.
        """
        others = [*map(StepShape, self.decodes[:-1]), *self.chunks[:-1]]
        return (*self.largest, *sorted(others, key=lambda shape: shape.num_tokens))


def step_shapes(model: ModelConfig, engine: EngineConfig) -> StepShapes:
    """The shapes that get graphs."""
    max_rows = max_decodes(engine)
    return StepShapes(decode_sizes(max_rows), chunk_shapes(max_rows, most_chunk_tokens(model, engine)))


def max_decodes(engine: EngineConfig) -> int:
    """The most rows of a step."""
    return min(engine.max_sequences, engine.max_batch_tokens)


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that steps without prompts are padded to, ascending, up to max_rows."""
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows + 1, 16)]
    return (*(size for size in ladder if size < max_rows), max_rows)


def most_chunk_tokens(model: ModelConfig, engine: EngineConfig) -> int:
    """Prompt tokens for which the device takes no longer per layer than the host does to launch it."""
    flops = 2 * multiplied_parameters(model)
    return min(int(LAYER_SENDING_S * MULTIPLIED_FLOPS / flops), engine.max_batch_tokens, MOST_TOKENS)


def multiplied_parameters(model: ModelConfig) -> int:
    """Parameters of a layer's matrices that each token is multiplied by."""
    width = model.intermediate_size
    if model.experts is not None:
        width = model.experts.num_active * model.experts.intermediate_size
    return model.hidden_size * (2 * model.query_size + 2 * model.kv_size + 3 * width)


def chunk_shapes(max_rows: int, most_tokens: int) -> tuple[StepShape, ...]:
    """Shapes with prompts, fewer tokens first: 16 tokens in all, the most of few rows, then powers of two.

    Powers of two, because the planner cuts prompts at tiles; decodes are at most twice the prompt tokens.

    Args:
        max_rows: decodes and prompts of a step.
        most_tokens: prompt tokens of a step.
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
