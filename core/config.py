"""What the engine is asked to be, and what a model is: frozen, validated once, at start."""

from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens per KV block


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the operator asks of the engine; None leaves the choice to measurement at start.

    Args:
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "bfloat16", "float16" or "float32".
        max_model_len: tokens of context per sequence, at most the model's own.
        kv_memory_bytes: for KV blocks.
        max_batch_tokens: computed in one step.
        max_sequences: that run at once.
        threads: compute threads on a CPU.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    threads: int | None = None
