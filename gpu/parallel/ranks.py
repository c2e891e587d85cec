"""Several processes that compute one model together, each on its device: what they add up and bring together.

A process group of torch.distributed: NCCL between GPUs, gloo between CPUs. They meet in memory that a descriptor names,
so that nobody else can, and talk over the loopback. All ranks make the same calls in the same order; one that is lost
breaks the calls of the others. Thread: engine.
"""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.plan import DeviceError

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
        return torch.cat(parts, 1)[:, :num_columns]


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
