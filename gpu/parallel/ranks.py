"""Tensor parallelism: how a model is split among ranks, and what the ranks sum and gather. Thread: engine.

Each rank has some of the attention heads, with their keys and values, and part of the intermediate dimension of every
MLP and expert; the outputs of attention and MLPs are summed over the ranks. Where there are fewer KV heads than ranks,
ranks that share one have a copy each. The LM head's rows are split, because a decode step reads all of them; the
embedding is not, because a step reads few rows, and splitting it would cost one more sum. Norms and routers are
replicated; only norms over all heads (OLMo 2) are split. Prequantized matrices are split like others, between groups
that share a scale. Source: Megatron-LM (arXiv:1909.08053), section 3.

The ranks are a process group of torch.distributed: NCCL between GPUs, gloo between CPUs. They meet in an anonymous file
that only their processes can reach, and talk over the loopback. All make the same calls in the same order; a lost rank
breaks the others' calls.
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
from gpu.parameters import ALL_STACKED, HEAD, MXFP4_BLOCK
from gpu.quant import LEAST_GROUP, prequantized_group

# For one call of a rank that hangs: longer than one of them may be busy compiling a kernel for the first time. A lost
# rank is noticed earlier, by its closed connections.
CALL_TIMEOUT = timedelta(minutes=10)


class Ranks:
    """This process's membership in the group.

    Args:
        device: this rank's.
        meeting: descriptor of a file in memory, the same for all, empty at first.

    Raises:
        DeviceError: the group cannot be formed.
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
        """The sum over all ranks, for all of them; overwrites x."""
        x = x.contiguous()
        with _lost_ranks():
            dist.all_reduce(x)
        return x

    def share(self, x: Tensor) -> None:
        """Copy the first rank's x to all, in place."""
        with _lost_ranks():
            dist.broadcast(x, 0)

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """All ranks' columns side by side, for the first rank; the others get zeros.

        Args:
            x: [rows, columns]; the last rank may have fewer columns.
            num_columns: in all.
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
    """Whether this process belongs to a group."""
    return dist.is_initialized()


def close() -> None:
    """Leave the group: its threads would abort the interpreter's own exit."""
    if is_member():
        dist.destroy_process_group()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """torch.distributed raises RuntimeError for every connection that is lost or cannot be made."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"a rank is lost: {error}") from error


# Added once, on the first rank.
_ADDED_TO_SUMS = ("self_attn.o_proj.bias", "mlp.down_proj.bias", "mlp.experts.down_proj_bias")
_OF_KV_HEADS = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_norm.weight")
MAX_RANKS = 64

Span = tuple[int, int]
"""(first, how many)"""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Args:
        whole: check_shards has accepted it.
    """

    whole: ModelConfig
    rank: int
    num_ranks: int

    @property
    def config(self) -> ModelConfig:
        return part_of(self.whole, self.num_ranks)

    @property
    def head_rows(self) -> slice:
        """Of the LM head: the same number for each rank but the last, which may have fewer."""
        num_rows = head_rows_of(self.whole, self.num_ranks)
        return slice(self.rank * num_rows, min((self.rank + 1) * num_rows, self.whole.vocab_size))

    def cut(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's part of a checkpoint's tensor, a view if it is contiguous there.

        Args:
            shape: the part's.
        """
        if self.rank and name.endswith(_ADDED_TO_SUMS):
            return torch.zeros(shape, dtype=tensor.dtype)
        for dim, (num_whole, num_part) in enumerate(zip(tensor.shape, shape, strict=True)):
            if num_whole != num_part:
                pieces = [tensor.narrow(dim, *span) for span in self._spans(name, num_part)]
                return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return tensor

    def _spans(self, name: str, num_part: int) -> list[Span]:
        """This rank's spans of the dimension that is split."""
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
        if name.endswith(".experts.gate_up_proj") and whole.experts is not None and whole.experts.layout in ALL_STACKED:
            width, first = whole.experts.intermediate_size, self.rank * num_part // 2
            return [(first, num_part // 2), (width + first, num_part // 2)]
        if name == HEAD:
            return [(self.head_rows.start, num_part)]
        return [(self.rank * num_part, num_part)]

    @property
    def _first_kv_head(self) -> int:
        return self.rank * self.whole.num_kv_heads // self.num_ranks


def part_of(whole: ModelConfig, num_ranks: int) -> ModelConfig:
    """A rank's part as a model of its own."""
    experts = whole.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // num_ranks,
            shared_size=experts.shared_size // num_ranks,
        )
    return replace(
        whole,
        num_heads=whole.num_heads // num_ranks,
        num_kv_heads=max(1, whole.num_kv_heads // num_ranks),
        intermediate_size=max(1, whole.intermediate_size // num_ranks),
        experts=experts,
    )


def head_rows_of(whole: ModelConfig, num_ranks: int) -> int:
    """Most rows of the LM head that a rank has."""
    return -(-whole.vocab_size // num_ranks)


def check_shards(whole: ModelConfig, num_ranks: int, is_prequantized: bool) -> None:
    """
    Args:
        is_prequantized: matrices are served prequantized; see gpu.weights.prequantized_scheme.

    Raises:
        StartupError: the model cannot be split so.
    """
    why = next(_obstacles(whole, num_ranks, is_prequantized), None)
    if why is not None:
        counts = range(1, MAX_RANKS + 1)
        others = [str(count) for count in counts if next(_obstacles(whole, count, is_prequantized), None) is None]
        raise StartupError(f"--tensor-parallel {num_ranks}: {why}.", f"--tensor-parallel {', or '.join(others)}.")


def _obstacles(whole: ModelConfig, num_ranks: int, is_prequantized: bool) -> Iterator[str]:
    """What cannot be split, in words.

    A rank's part of a prequantized row must be whole groups that share a scale, or parts of groups that kernels accept.
    """
    if whole.recurrence is not None and num_ranks > 1:
        yield "its recurrent layers are not split"
    if (whole.inputs is not None or len(whole.kinds) > 1) and num_ranks > 1:
        yield "layers that differ in their sizes, or have inputs of their own, are not split"
    if whole.num_heads % num_ranks:
        yield f"{whole.num_heads} heads do not split into {num_ranks} parts"
    if whole.num_kv_heads % num_ranks and num_ranks % whole.num_kv_heads:
        yield f"{whole.num_kv_heads} KV heads neither split into {num_ranks} parts nor share {num_ranks} ranks evenly"
    split_inputs = [whole.attended_size]  # of matrices whose rows are split
    if any(not whole.layer(index).is_sparse for index in range(whole.num_layers)):
        split_inputs.append(whole.intermediate_size)
        if whole.intermediate_size % num_ranks:
            yield f"an MLP of {whole.intermediate_size} does not split into {num_ranks} parts"
    if whole.experts is not None:
        width = whole.experts.intermediate_size
        split_inputs.append(width)
        if width % num_ranks:
            yield f"experts of {width} do not split into {num_ranks} parts"
        if whole.experts.shared_size:
            split_inputs.append(whole.experts.shared_size)
            if whole.experts.shared_size % num_ranks:
                yield f"a shared expert of {whole.experts.shared_size} does not split into {num_ranks} parts"
        if whole.experts.is_mxfp4 and width % num_ranks == 0 and width // num_ranks % MXFP4_BLOCK:
            yield f"experts of {width} do not split into {num_ranks} parts of whole blocks of {MXFP4_BLOCK} (mxfp4)"
    if is_prequantized:
        assert whole.packing is not None
        size = whole.packing.group_size
        for width in split_inputs:
            if prequantized_group(size, width) is not None and prequantized_group(size, width // num_ranks) is None:
                parts = f"{num_ranks} parts of whole groups of {LEAST_GROUP}"
                yield f"rows of {width} whose scales are shared by {size} do not split into {parts}"


def norm_heads(qkv: Tensor, weights: tuple[Tensor, Tensor], eps: float, ranks: Ranks) -> None:
    """RMSNorm in float32 over all ranks' queries and keys, in place, with one sum of their squares.

    All ranks have equally many heads; replicated KV heads all count equally often, which leaves the mean as it is.

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
