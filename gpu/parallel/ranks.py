"""Tensor parallelism: which part of a model each rank has, and what the ranks add up and gather. Thread: engine.

Each rank has some of the heads, with their keys and values, and some of the numbers between an MLP's matrices, of every
expert. What leaves attention and MLPs are parts of a sum over the ranks. Fewer KV heads than ranks: those that share
one have a copy each. The head's rows are split, because a decode step reads all of them; the embedding is not, because
a step reads few, and splitting it would cost one more sum. Norms and routers are every rank's, and computed alike; only
norms that run over all heads (OLMo 2) have a part on each rank. Matrices that are served quantized, as the checkpoint
has them, are split like others, at borders of what shares a scale. Source: Megatron-LM (arXiv:1909.08053), section 3.

The ranks are a process group of torch.distributed: NCCL between GPUs, gloo between CPUs. They meet in memory that a
descriptor names, so that nobody else can, and talk over the loopback. All make the same calls in the same order; one
that is lost breaks the calls of the others.
"""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.config import ModelConfig
from core.errors import StartupError
from core.plan import DeviceError
from gpu.parameters import HEAD, MXFP4_BLOCK
from gpu.quant import LEAST_GROUP, prequantized_group

# For one call. A rank that is lost is noticed by its closed connections; this is for one that hangs, and must be more
# than what compiling a kernel for the first time keeps one of them from it.
CALL_TIMEOUT = timedelta(minutes=10)


class Ranks:
    """This process among them.

    Args:
        device: this rank's.
        meeting: descriptor of a file in memory, the same for all, empty at first.

    Raises:
        DeviceError: they have not met.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device, meeting: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        is_cuda = device.type == "cuda"
        os.environ["NCCL_SOCKET_IFNAME" if is_cuda else "GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(f"/proc/self/fd/{meeting}", num_ranks)  # type: ignore[attr-defined]
        with _lost_ranks():
            dist.init_process_group(
                "nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=num_ranks, timeout=CALL_TIMEOUT
            )
        atexit.register(close)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, for all of them; x is gone."""
        x = x.contiguous()
        with _lost_ranks():
            dist.all_reduce(x)
        return x

    def share(self, x: Tensor) -> None:
        """Give all ranks what the first one has of x, in place."""
        with _lost_ranks():
            dist.broadcast(x, 0)

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """What all ranks have side by side, for the first; the others get zeros of that shape.

        Args:
            x: [rows, columns], all ranks' the same columns but the last's, which may have fewer.
            num_columns: of all.
        Returns:
            [rows, num_columns]
        """
        width = -(-num_columns // self.num_ranks)
        part = F.pad(x, (0, width - x.shape[1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)] if self.rank == 0 else None
        with _lost_ranks():
            dist.gather(part, parts)
        if parts is None:
            return x.new_zeros(()).expand(len(x), num_columns)
        return torch.cat(parts, 1)[:, :num_columns].contiguous()


def is_member() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_initialized()


def close() -> None:
    """Leave the group: its threads would abort the interpreter's own end."""
    if is_member():
        dist.destroy_process_group()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """What torch.distributed raises is all of one kind: a connection is gone, or did not come about."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"a rank is lost: {error}") from error


# Added once, not once a rank: to what the first one computes.
_ADDED_TO_SUMS = ("self_attn.o_proj.bias", "mlp.down_proj.bias", "mlp.experts.down_proj_bias")
_OF_KV_HEADS = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_norm.weight")
MAX_RANKS = 64

Span = tuple[int, int]
"""(first, how many)"""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part.

    Args:
        whole: a model that check_shards has let pass.
    """

    whole: ModelConfig
    rank: int
    num_ranks: int

    @property
    def config(self) -> ModelConfig:
        return part_of(self.whole, self.num_ranks)

    @property
    def head_rows(self) -> slice:
        """Of the head: as many for each rank, but the last, which may have fewer."""
        num_rows = head_rows_of(self.whole, self.num_ranks)
        return slice(self.rank * num_rows, min((self.rank + 1) * num_rows, self.whole.vocab_size))

    def cut(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's part of a tensor of the checkpoint, a view where it lies in one piece.

        Args:
            shape: of the part.
        """
        if self.rank and name.endswith(_ADDED_TO_SUMS):
            return torch.zeros(shape, dtype=tensor.dtype)
        for dim, (num_whole, num_part) in enumerate(zip(tensor.shape, shape, strict=True)):
            if num_whole != num_part:
                pieces = [tensor.narrow(dim, *span) for span in self._spans(name, num_part)]
                return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return tensor

    def _spans(self, name: str, num_part: int) -> list[Span]:
        """Of the dimension that is split, what is this rank's."""
        whole, part = self.whole, self.config
        query, first_key = (self.rank * part.query_size, part.query_size), self._first_kv_head * part.head_dim
        if "self_attn.qkv_proj." in name:
            return [
                query,
                (whole.query_size + first_key, part.kv_size),
                (whole.query_size + whole.kv_size + first_key, part.kv_size),
            ]
        if name.endswith(_OF_KV_HEADS):
            return [(first_key, part.kv_size)]
        if "mlp.gate_up_proj." in name:
            first = self.rank * part.intermediate_size
            return [(first, part.intermediate_size), (whole.intermediate_size + first, part.intermediate_size)]
        if name == HEAD:
            return [(self.head_rows.start, num_part)]
        return [(self.rank * num_part, num_part)]

    @property
    def _first_kv_head(self) -> int:
        return self.rank * self.whole.num_kv_heads // self.num_ranks


def part_of(whole: ModelConfig, num_ranks: int) -> ModelConfig:
    """What one of so many ranks computes, as a model of its own."""
    experts = whole.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // num_ranks)
    return replace(
        whole,
        num_heads=whole.num_heads // num_ranks,
        num_kv_heads=max(1, whole.num_kv_heads // num_ranks),
        intermediate_size=max(1, whole.intermediate_size // num_ranks),
        experts=experts,
    )


def head_rows_of(whole: ModelConfig, num_ranks: int) -> int:
    """Rows of the head that a rank has, at most."""
    return -(-whole.vocab_size // num_ranks)


def check_shards(whole: ModelConfig, num_ranks: int, is_kept_packed: bool) -> None:
    """
    Args:
        is_kept_packed: see gpu.weights.prequantized_scheme.

    Raises:
        StartupError: so many ranks cannot share the model.
    """
    why = _why_not(whole, num_ranks, is_kept_packed)
    if why is not None:
        others = [str(count) for count in range(1, MAX_RANKS + 1) if _why_not(whole, count, is_kept_packed) is None]
        raise _refused(num_ranks, why, ", or ".join(others))


def _why_not(whole: ModelConfig, num_ranks: int, is_kept_packed: bool) -> str | None:
    """What cannot be split; None: nothing."""
    return _why_not_even(whole, num_ranks) or (_why_not_grouped(whole, num_ranks) if is_kept_packed else None)


def _why_not_grouped(whole: ModelConfig, num_ranks: int) -> str | None:
    """A rank's part of a row of inputs is to be whole groups that share a scale, or parts of them that kernels take."""
    assert whole.packing is not None
    stored = whole.packing.group_size
    for width in _split_widths(whole):
        if prequantized_group(stored, width) is not None and prequantized_group(stored, width // num_ranks) is None:
            return (
                f"rows of {width} whose scales are shared by {stored} do not split into {num_ranks} parts of whole "
                f"groups of {LEAST_GROUP}"
            )
    return None


def _split_widths(whole: ModelConfig) -> list[int]:
    """Inputs of the matrices whose rows are split."""
    mlps = [whole.intermediate_size] if _has_dense(whole) else []
    return [whole.query_size, *mlps, *([] if whole.experts is None else [whole.experts.intermediate_size])]


def _has_dense(whole: ModelConfig) -> bool:
    return any(not whole.layer(index).is_sparse for index in range(whole.num_layers))


def _why_not_even(whole: ModelConfig, num_ranks: int) -> str | None:
    if whole.num_heads % num_ranks:
        return f"{whole.num_heads} heads do not split into {num_ranks} parts"
    if whole.num_kv_heads % num_ranks and num_ranks % whole.num_kv_heads:
        return f"{whole.num_kv_heads} KV heads neither split into {num_ranks} parts nor is each for as many ranks"
    if _has_dense(whole) and whole.intermediate_size % num_ranks:
        return f"an MLP of {whole.intermediate_size} does not split into {num_ranks} parts"
    if whole.experts is None:
        return None
    width = whole.experts.intermediate_size
    if width % num_ranks:
        return f"experts of {width} do not split into {num_ranks} parts"
    if whole.experts.is_mxfp4 and width // num_ranks % MXFP4_BLOCK:
        return f"experts of {width} do not split into {num_ranks} parts of whole blocks of {MXFP4_BLOCK} (mxfp4)"
    return None


def _refused(num_ranks: int, why: str, fix: str) -> StartupError:
    return StartupError(f"--tensor-parallel {num_ranks}: {why}.", f"--tensor-parallel {fix}.")


def norm_heads(qkv: Tensor, weights: tuple[Tensor, Tensor], eps: float, ranks: Ranks) -> None:
    """RMSNorm in float32 of this rank's queries and keys, in place: the ranks add up their squares, in one sum.

    All ranks have as many heads; KV heads of which several have a copy count as often each, which leaves the mean.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        weights: [heads, head_dim] and [kv_heads, head_dim].
    """
    num_heads, num_kv_heads = len(weights[0]), len(weights[1])
    parts = qkv[:, : num_heads + num_kv_heads].split_with_sizes([num_heads, num_kv_heads], 1)
    squares = torch.stack([part.float().square().mean((1, 2)) for part in parts])  # [2, tokens]
    factors = ranks.sum(squares).div_(ranks.num_ranks).add_(eps).rsqrt_()
    for part, weight, factor in zip(parts, weights, factors, strict=True):
        part.copy_(part.float().mul_(factor.view(-1, 1, 1)).mul_(weight.float()))
