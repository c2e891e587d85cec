"""What kernels' operators are held against torch's on: a small model's configuration, and a layer's inputs."""

import torch

from core.config import ModelConfig, RopeConfig
from gpu.kv_cache import LayerKV
from gpu.layers import Rope

EPS = 1e-6
CONFIG = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_position=512,
    rms_norm_eps=EPS,
    rope=RopeConfig(10_000.0),
)
NORMS = (None, "head", "all", "head float32")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def kv_of(both: torch.Tensor) -> LayerKV:
    """both: keys and values, [2, blocks, 16, kv_heads, head_dim]."""
    return LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))


def norms_of(
    kind: str | None, num_heads: int, num_kv_heads: int, head_dim: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Weights of queries' and keys' norms. kind: of NORMS; like: whose format and device they have."""
    if kind is None:
        return None
    shapes = ((num_heads,), (num_kv_heads,)) if kind == "all" else ((), ())
    queries, keys = (noise(*shape, head_dim, seed=index).to(like) for index, shape in enumerate(shapes))
    return (queries.float(), keys.float()) if kind == "head float32" else (queries, keys)


def rotation_of(rotary: float | None, num_tokens: int, head_dim: int, device: torch.device) -> torch.Tensor | None:
    """rotary: the share of a head that is turned."""
    if rotary is None:
        return None
    rope = Rope(RopeConfig(10_000.0, partial=rotary), head_dim, device)
    return rope.rotation(torch.arange(num_tokens, device=device).float() * 7)
