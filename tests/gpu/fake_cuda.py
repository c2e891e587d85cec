"""What torch.cuda does to the current stream and to its allocator when work is captured, without a device."""

from collections import Counter
from types import TracebackType

import pytest
import torch


class FakeCuda:
    """Stands in for parts of torch.cuda.

    Args:
        lost_after: calls of synchronize that succeed; None: all do.

    recorded: pools that are captured to; uses: of each pool, by graphs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost_after: int | None = None) -> None:
        self.current: object = "default"
        self.num_replays = 0
        self.recorded: set[object] = set()
        self.uses: Counter[object] = Counter()
        self._lost_after = lost_after
        fakes = {
            "synchronize": self.synchronize,
            "current_stream": lambda device=None: self.current,
            "stream": lambda stream: _OnStream(self, stream),
            "Stream": lambda device=None: object(),
            "current_device": lambda: 0,
            "graph": lambda graph, pool, stream, **options: _Capture(self, stream or "of torch's own", pool),
            "CUDAGraph": lambda: self,
            "graph_pool_handle": object,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (0, 0),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.end(pool))
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: self.uses.subtract([pool]))

    def end(self, pool: object) -> None:
        """c10's endAllocateToPool."""
        if pool not in self.recorded:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recorded.remove(pool)

    def synchronize(self, device: torch.device | None = None) -> None:
        if self._lost_after is not None:
            self._lost_after -= 1
            if self._lost_after < 0:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def replay(self) -> None:
        self.num_replays += 1


class _OnStream:
    def __init__(self, cuda: FakeCuda, stream: object) -> None:
        self._cuda, self._stream = cuda, stream

    def __enter__(self) -> None:
        self._before, self._cuda.current = self._cuda.current, self._stream

    def __exit__(self, *args: object) -> None:
        self._cuda.current = self._before


class _Capture(_OnStream):
    """torch.cuda.graph: what ends a capture raises where it was broken, before all else that it is to do."""

    def __init__(self, cuda: FakeCuda, stream: object, pool: object) -> None:
        super().__init__(cuda, stream)
        self._pool = pool

    def __enter__(self) -> None:
        super().__enter__()
        if self._cuda.uses[self._pool] == 0 and self._pool in self._cuda.uses:
            raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
        self._cuda.uses[self._pool] += 1
        self._cuda.recorded.add(self._pool)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, torch.OutOfMemoryError):  # which has broken nothing
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        self._cuda.end(self._pool)
        super().__exit__()
