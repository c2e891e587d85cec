"""A Llama for training: the plain equations, parameters named as Hugging Face's `LlamaForCausalLM` names them.

Owns the parameters. No cache and no batching of requests: serving is the engine's work.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Up to this length the plain product beats the CPU's fused kernel, whose backward pass took 57 ms against 13 ms at
# [160, 4, 40, 64] in bfloat16 on two cores, and 99 against 24 at [60, 4, 110, 64].
SHORT = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; head_dim is width / num_heads."""

    vocab_size: int = 1024
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_width: int = 1280
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.group = shape.num_heads // shape.num_kv_heads
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = rotate(self._heads(self.q_proj(x)), cos, sin)  # [batch, heads, length, head_dim]
        k = rotate(self._heads(self.k_proj(x)), cos, sin).repeat_interleave(self.group, 1)
        v = self._heads(self.v_proj(x)).repeat_interleave(self.group, 1)
        y = attend(q, k, v).transpose(1, 2).reshape(batch, length, width)
        projected: Tensor = self.o_proj(y)
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # [batch, heads, length, head_dim]


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.down_proj = nn.Linear(shape.ffn_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)


class Llama(nn.Module):
    """The whole model; its output projection is the embedding (tied)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self._initialise(torch.Generator().manual_seed(seed))
        inv_freq = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context), inv_freq).repeat(1, 2)  # [context, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _initialise(self, rng: torch.Generator) -> None:
        residual_scale = 1 / math.sqrt(2 * self.shape.num_layers)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                    weight.normal_(0.0, 0.02 * (residual_scale if writes_residual else 1), generator=rng)

    def hidden(self, ids: Tensor) -> Tensor:
        """Final states [batch, length, width] of ids [batch, length], padded on the right if at all."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x: Tensor = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            cos, sin = cos.bfloat16(), sin.bfloat16()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)  # [..., vocab_size]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [batch, heads, length, head_dim]."""
    length = q.shape[2]
    if length > SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # [batch, heads, length, length]
    future = torch.full((length, length), -1e4, dtype=scores.dtype).triu(1)
    mixed: Tensor = (scores + future).softmax(-1) @ v
    return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x [..., length, head_dim] by its position; cos and sin are [length, head_dim].

    Source: RoFormer (arXiv:2104.09864), section 3.4.2, halves paired as Hugging Face stores them.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
