"""What torch.cuda does to the current stream when work is captured, without a device."""

from types import TracebackType

import pytest
import torch


class FakeCuda:
    """Stands in for parts of torch.cuda.

    Args:
        lost_after: calls of synchronize that succeed; None: all do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost_after: int | None = None) -> None:
        self.current: object = "default"
        self.num_replays = 0
        self._lost_after = lost_after
        fakes = {
            "synchronize": self.synchronize,
            "current_stream": lambda device=None: self.current,
            "stream": lambda stream: _OnStream(self, stream),
            "Stream": lambda device=None: object(),
            "graph": lambda graph, *args, **options: _Capture(self, args[1] if args else "of torch's own"),
            "CUDAGraph": lambda: self,
            "graph_pool_handle": lambda: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (0, 0),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

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
    """torch.cuda.graph: what ends a capture raises where it was broken, before the stream is given back."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        super().__exit__()
