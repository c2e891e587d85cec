"""Fake CUDA graphs on a CPU: they do what CUDA's do, and are stricter.

A graph is the list of torch's operators and of Triton's interpreted kernels that the work has called, with the very
tensors and numbers of then: Python does not run again. What any graph has allocated is NaN before each replay. It is
refused what a capture on CUDA refuses or silently gets wrong: results that the host reads, shapes that depend on
numbers, tensors made of the host's numbers, random numbers of torch's own, and memory that nobody keeps.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from gpu.step_graphs import CaptureError, CudaRecorder, Graph, NoRoomForGraph

# The host reads a result by these: on a CPU some of them call no operator.
_READS = {"item", "tolist", "numpy", "data_ptr", "cpu", "cuda", "__array__", "__bool__", "__int__", "__float__"}
_HOST_NUMBERS = {"tensor", "as_tensor", "from_numpy", "asarray", "frombuffer"}
_FORBIDDEN_TAGS = {
    torch.Tag.data_dependent_output: "its result is the host's",
    torch.Tag.dynamic_output_shape: "the shape of its result depends on numbers",
    torch.Tag.nondeterministic_seeded: "a graph would draw the same random numbers again",
}
_NO_NUMBER = -(1 << 30)
NODE_BYTES = 8 * 1024  # that each call takes, as a driver keeps of a kernel


class FakeRecorder:
    """Implements CudaRecorder.

    Args:
        room_bytes: that its graphs may take.
    """

    def __init__(self, room_bytes: float = math.inf) -> None:
        self._room_bytes = room_bytes
        self.graphs: WeakSet[FakeGraph] = WeakSet()  # those that somebody keeps

    def capture(self, work: Callable[[], None]) -> Graph:
        if not self.graphs:
            work()
        recording = _Recording()
        with recording.hears_kernels(), _NoHost(recording), recording:
            work()
        pool_bytes = max((graph.made_bytes for graph in self.graphs), default=0)
        graph = FakeGraph(recording.calls, recording.made, pool_bytes, self.graphs)
        graph.check()
        if sum(other.size_bytes for other in self.graphs) + graph.size_bytes > self._room_bytes:
            raise NoRoomForGraph(f"{graph.size_bytes} bytes more than {self._room_bytes:.0f}")
        self.graphs.add(graph)
        return graph

    def give_back(self) -> None:
        """They have gone with what they had."""


def open_recorder(device: torch.device) -> CudaRecorder:
    """CUDA's where there is a device."""
    return CudaRecorder(device) if device.type == "cuda" else FakeRecorder()


@dataclass(slots=True)
class Call:
    """
    Args:
        args, kwargs: with tensors of our own, on the memory of those that were given.
        results: what it gave, where a replay has to put what it gives then.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]


class FakeGraph:
    """See Graph.

    Args:
        made: what the work has allocated.
        pool_bytes: what graphs before it have allocated, and it may have too.
        graphs: all of the recorder's: what one has allocated may be another's.
    """

    def __init__(self, calls: list[Call], made: list[Tensor], pool_bytes: int, graphs: Collection["FakeGraph"]) -> None:
        self.made_bytes = sum(tensor.nbytes for tensor in made)
        self.size_bytes = max(0, self.made_bytes - pool_bytes) + len(calls) * NODE_BYTES
        self._calls, self._made, self._graphs = calls, made, graphs
        made_storages = {_storage(tensor) for tensor in made}
        self._num_ours: dict[int, int] = {}  # by storage that is others': tensors of ours on it
        for tensor in {id(tensor): tensor for call in calls for tensor in _tensors((call.args, call.kwargs))}.values():
            if _storage(tensor) not in made_storages:
                self._num_ours[_storage(tensor)] = self._num_ours.get(_storage(tensor), 0) + 1

    def check(self) -> None:
        """
        Raises:
            CaptureError: nobody keeps what it reads or writes: on a device it is something else's by now.
        """
        graphs = {self, *self._graphs}
        for storage in self._num_ours:
            num_ours = sum(graph._num_ours.get(storage, 0) for graph in graphs)
            if torch._C._storage_Use_Count(storage) - 1 <= num_ours:  # the storage's own object counts as one
                raise CaptureError("the graph reads or writes memory that nobody keeps")

    def replay(self) -> None:
        """
        Raises:
            CaptureError: see check.
        """
        self.check()
        for graph in self._graphs:
            for tensor in graph._made:
                poison(tensor)
        for call in self._calls:
            found = _tensors(call.function(*call.args, **call.kwargs))
            for kept, new in zip(call.results, found, strict=False):
                kept.copy_(new)


class _Recording(TorchDispatchMode):
    """Notes each operator that is called, and each interpreted kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.made: list[Tensor] = []
        self.is_in_kernel = False
        self._made: set[int] = set()
        self._aliases: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_in_kernel:
            return func(*args, **kwargs)
        for tag, why in _FORBIDDEN_TAGS.items():
            if tag in func.tags and not _is_by_numbers(func, args):
                raise CaptureError(f"{func}: {why}")
        found = func(*args, **kwargs)
        self._note(func, args, kwargs, _tensors(found))
        return found

    def _note(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        if func._schema.is_mutable:
            self._add(func, args, kwargs, [])
            return
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        if results and all(_storage(result) in known for result in results):
            return  # views stay what they are
        self.made += results
        self._made.update(map(_storage, results))
        if not _only_allocates(func):
            self._add(func, args, kwargs, results)

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any, results: list[Tensor]) -> None:
        args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
        self.calls.append(Call(function, args, kwargs, results))

    def _alias(self, tensor: Tensor) -> Tensor:
        """One of our own on memory that is others', so that it can be told whether they still keep it."""
        if _storage(tensor) in self._made:
            return tensor
        place = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in self._aliases:
            self._aliases[place] = tensor.detach()
        return self._aliases[place]

    @contextmanager
    def hears_kernels(self) -> Iterator[None]:
        """What Triton interprets calls no operator that could be replayed: the launch itself is noted."""
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is None:
            yield
            return
        run = interpreter.InterpretedFunction.run

        def noted(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.is_in_kernel = True
            try:
                run(kernel, *args, **kwargs)
            finally:
                self.is_in_kernel = False
            self._add(run, (kernel, *args), kwargs, [])

        interpreter.InterpretedFunction.run = noted
        try:
            yield
        finally:
            interpreter.InterpretedFunction.run = run


class _NoHost(TorchFunctionMode):
    """Refuses what passes between tensors and the host."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._recording.is_in_kernel:
            if name in _READS:
                raise CaptureError(f"{name}: the host reads what is not computed yet")
            if name in _HOST_NUMBERS:
                raise CaptureError(f"{name}: numbers of the host would be copied anew")
        return func(*args, **(kwargs or {}))


def poison(tensor: Tensor) -> None:
    """Fill with what nobody computes."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(max(_NO_NUMBER, torch.iinfo(tensor.dtype).min))


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    """Names it as long as it lives."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _is_by_numbers(func: Any, args: Any) -> bool:
    """Whether it takes rows by their numbers: with a mask of bools the shape would depend on it."""
    return func is torch.ops.aten.index.Tensor and all(
        index is None or index.dtype in (torch.int32, torch.int64) for index in args[1]
    )


def _only_allocates(func: Any) -> bool:
    return str(func).startswith(("aten.empty", "aten.new_empty"))
