"""Runs a decode's layers in one parallel region, without Python: their kernels are recorded once. Thread: engine.

Of few rows a kernel takes about as long as Python takes to start it, and as a thread takes to wake. So the kernels that
the model starts for so many rows are noted with their arguments, over buffers that stay where they are; a later step
copies its inputs there, tells attention's kernels its contexts, and has all threads run the kernels one after the
other. Layers that compute anything by torch's operators are not recorded.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpu.cpu_kernels.attention import NO_WINDOW, PagedAttention
from gpu.cpu_kernels.attention import Arguments as AttentionArguments
from gpu.cpu_kernels.compiled import carray, ir, kernel, types
from gpu.cpu_kernels.team import Kernel, integers, runtime_function
from gpu.cpu_kernels.vectors import INT32, INT64, address, call, constant, nothing, operation, pointer, take_next

if TYPE_CHECKING:
    from gpu.model import Batch, ComputeLayers, Rotation

MOST_ROWS = 4  # whose buffers are kept, for each number of rows
SPINS = 4096  # that a thread waits for the others before it sleeps: some 50 us
FUTEX, FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 202, 128, 129  # futex(2), on x86-64
ALLOCATING = {"empty", "empty_like", "new_empty"}  # of torch's functions


class Arguments(ctypes.Structure):
    """Of run_calls."""

    _fields_ = integers(
        "num_arrived",  # 0: how often a thread has ended a call
        "num_done",  # 0: calls that all threads have ended
        "num_asleep",  # 0: threads that wait for that to change
        "calls",  # int64 [calls, 2]: addresses of kernels and their arguments
        "num_calls",
        "count_threads",  # omp_get_num_threads; 0: one
        "system_call",  # syscall(2)
    )


_ARGUMENTS = np.dtype(Arguments)


@operation(nothing, address, address)
def _call_kernel(builder, function, argument):
    kind = ir.FunctionType(ir.VoidType(), [INT64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


@operation(types.int64, address)
def _call_number(builder, function):
    """A function of nothing that returns an int."""
    kind = ir.FunctionType(INT32, [])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), []), INT64)


@operation(types.int64, address)
def _load_acquired(builder, at):
    call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    return builder.load_atomic(builder.inttoptr(at, INT64.as_pointer()), "acquire", 8)


@operation(nothing, address, types.int64)
def _store_released(builder, at, value):
    builder.store_atomic(value, builder.inttoptr(at, INT64.as_pointer()), "release", 8)


@operation(types.int64, address, types.int64)
def _add(builder, at, value):
    """Add in one order with all threads' additions; returns what was there."""
    return builder.atomic_rmw("add", builder.inttoptr(at, INT64.as_pointer()), value, "seq_cst")


@operation(nothing, address, address, types.int64, types.int64)
def _futex(builder, function, at, what, value):
    """Wait while the low half at this address has this value, or wake so many threads that do."""
    kind = ir.FunctionType(INT64, [INT64] * 5)
    given = [constant(FUTEX), at, what, value, constant(0)]
    builder.call(builder.inttoptr(function, kind.as_pointer()), given)


@kernel()
def run_calls(arguments):
    """Run the calls, each by all threads, and the next when all have ended it. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    calls = carray(pointer(args.calls), (args.num_calls, 2), np.int64)
    num_threads = _call_number(args.count_threads) if args.count_threads else 1
    done, asleep = arguments + 8, arguments + 16
    for index in range(args.num_calls):
        _call_kernel(calls[index, 0], calls[index, 1])
        if take_next(arguments) == (index + 1) * num_threads - 1:
            _store_released(calls[index, 1], 0)  # all its pieces are there again, for the next run
            _add(done, 1)
            if _add(asleep, 0):
                _futex(args.system_call, done, FUTEX_WAKE_PRIVATE, num_threads)
            continue
        num_looks = 0
        while _load_acquired(done) <= index:
            num_looks += 1
            if num_looks > SPINS:  # the others wait for a core: to yield ours would cost all that is left of its time
                _add(asleep, 1)
                _futex(args.system_call, done, FUTEX_WAIT_PRIVATE, index)
                _add(asleep, -1)


class _Recording(TorchFunctionMode):
    """Notes the kernels that are started, with their arguments, and keeps the memory that they work on.

    Attributes:
        is_whole: torch has computed nothing itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, ctypes.Structure]] = []
        self.is_whole = True
        self._memory: list[object] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = function(*args, **(kwargs or {})), function.__name__
        if isinstance(found, Tensor | list | tuple):
            self._memory.append(found)
            is_written = name.endswith("_") and not name.endswith("__")
            self.is_whole &= name in ALLOCATING or not (is_written or _computes(found, args))
        self.is_whole &= name != "__setitem__"
        return found

    def __enter__(self) -> "_Recording":
        Kernel.recorded = self.calls
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        Kernel.recorded = None


def _computes(found: Tensor | list[Any] | tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    """Whether a tensor that a function returns is not its first argument's memory."""
    tensors = [one for one in ([found] if isinstance(found, Tensor) else found) if isinstance(one, Tensor)]
    memory = args[0].untyped_storage().data_ptr() if args and isinstance(args[0], Tensor) else None
    return any(one.untyped_storage().data_ptr() != memory for one in tensors)


@dataclass(slots=True, eq=False)
class Recorded:
    """The layers' kernels for one number of rows.

    Args:
        inputs: buffers that they read; out: what they leave.
        recording: keeps the memory.
        attending: attention's arguments, as records side by side, of the layers that see as far.
    """

    inputs: list[Tensor]
    out: Tensor
    recording: _Recording
    attending: list[npt.NDArray[np.void]]
    arguments: Arguments
    table: Tensor  # int64 [calls, 2]


class RecordedLayers:
    """What the layers compute for few decodes. Not for two models: their kernels are its own.

    Args:
        attention: whose kernels are told what their rows are.
    """

    def __init__(self, attention: PagedAttention) -> None:
        self._attention, self._kernel = attention, Kernel(run_calls)
        self._recorded: dict[int, Recorded | None] = {}  # by rows; None: torch computes some of it

    def __call__(self, compute: "ComputeLayers", x: Tensor, rotations: "list[Rotation]", batch: "Batch") -> Tensor:
        """compute(x, rotations, batch): kernels, or Python where it is not recorded."""
        num_rows, is_plain = len(x), batch.asked is None and batch.adapted is None and batch.recurrent is None
        is_plain = is_plain and all(rows.num_decodes == num_rows for rows in batch.attending.values())
        of_windows = {rows.window: rows for rows in batch.attending.values()}
        is_plain = is_plain and all(rows is of_windows[rows.window] for rows in batch.attending.values())
        if num_rows > MOST_ROWS or not is_plain:
            return compute(x, rotations, batch)
        if num_rows not in self._recorded:
            return self._record(compute, x, rotations, batch)
        recorded = self._recorded[num_rows]
        return compute(x, rotations, batch) if recorded is None else self.run(recorded, x, rotations, batch)

    def run(self, recorded: Recorded, x: Tensor, rotations: "list[Rotation]", batch: "Batch") -> Tensor:
        """What was recorded, with a step's own inputs."""
        for buffer, found in zip(recorded.inputs, _tensors(x, rotations, batch), strict=True):
            buffer.copy_(found)
        attending = {rows.window: rows for rows in batch.attending.values()}
        for records in recorded.attending:
            window, *shape = (int(records[0][name]) for name in ("window", "num_kv_heads", "per_kv", "head_dim"))
            rows = attending[None if window == NO_WINDOW else window]
            for name, value in self._attention.aim(rows, (shape[0], shape[1], shape[2])).items():
                records[name] = value
        recorded.arguments.num_arrived = recorded.arguments.num_done = 0
        self._kernel(recorded.arguments, torch.get_num_threads())
        return recorded.out

    def _record(self, compute: "ComputeLayers", x: Tensor, rotations: "list[Rotation]", batch: "Batch") -> Tensor:
        x = x.clone()
        rotations = [replace(one, factors=None if one.factors is None else one.factors.clone()) for one in rotations]
        kept = replace(batch, tokens=batch.tokens.with_own_slots())
        with _Recording() as recording:
            out = compute(x, rotations, kept)
        num_rows, calls = len(x), recording.calls
        self._recorded[num_rows] = None
        if recording.is_whole:
            attending, places = _side_by_side([one for _, one in calls if isinstance(one, AttentionArguments)])
            table = torch.tensor([(kernel, places.get(id(one), ctypes.addressof(one))) for kernel, one in calls])
            arguments = Arguments(
                calls=table.data_ptr(),
                num_calls=len(calls),
                count_threads=runtime_function("omp_get_num_threads"),
                system_call=ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0,
            )
            inputs = _tensors(x, rotations, kept)
            self._recorded[num_rows] = Recorded(inputs, out, recording, attending, arguments, table)
        return out


def _side_by_side(calls: list[AttentionArguments]) -> tuple[list[npt.NDArray[np.void]], dict[int, int]]:
    """Copies as records, an array for each window; and the address of each one's copy, by its id."""
    found, places = list[npt.NDArray[np.void]](), dict[int, int]()
    for window in {one.window for one in calls}:
        alike = [one for one in calls if one.window == window]
        copies = (AttentionArguments * len(alike))(*alike)
        places |= {id(one): ctypes.addressof(copy) for one, copy in zip(alike, copies, strict=True)}
        found.append(np.frombuffer(memoryview(copies).cast("B"), np.dtype(AttentionArguments)))  # keeps the copies
    return found, places


def _tensors(x: Tensor, rotations: "list[Rotation]", batch: "Batch") -> list[Tensor]:
    """What kernels read that is another's in each step."""
    slots = [one for one in (batch.tokens.kv_slots, batch.tokens.window_slots) if one is not None]
    return [x, *slots, *(one.factors for one in rotations if one.factors is not None)]
