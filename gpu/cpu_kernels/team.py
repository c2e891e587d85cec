"""Runs a compiled kernel on torch's own compute threads, without the GIL. Thread: engine.

There is one pool of threads, not two: torch's OpenMP runtime is asked for a parallel region, as torch's own operators
do. Where it cannot be found, one thread computes.

A kernel takes one address, that of a ctypes.Structure that all threads share. In the kernel it is a numpy record:
`carray(pointer(address), 1, np.dtype(Structure))[0]`. Its first field counts the pieces of work taken.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

Start = Callable[[int, int, int, int], None]


def integers(*names: str) -> tuple[tuple[str, type], ...]:
    """Fields of 64 bits of a kernel's arguments: numbers, and addresses of first elements; 0 unless they are set."""
    return tuple((name, ctypes.c_int64) for name in names)


class Kernel:
    """
    Args:
        compiled: numba's cfunc of int64 to nothing, which divides the work among the threads that call it.

    Attributes:
        recorded: where all kernels that are started are noted, with copies of their arguments; None: nowhere.
    """

    recorded: ClassVar[list[tuple[int, ctypes.Structure]] | None] = None

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # keeps the code
        self._address: int = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._address)
        self._start = _find_start()

    def __call__(self, arguments: ctypes.Structure, num_threads: int) -> None:
        """Returns when every thread has returned."""
        address = ctypes.addressof(arguments)
        if self.recorded is not None:
            self.recorded.append((self._address, type(arguments).from_buffer_copy(arguments)))
        if num_threads == 1 or self._start is None:
            self._call(address)
        else:
            self._start(self._address, address, num_threads, 0)


@cache
def _find_start() -> Start | None:
    """GOMP_parallel(function, argument, num_threads, flags): libgomp's ABI."""
    runtime = _runtime()
    if runtime is None:
        return None
    start: Any = runtime.GOMP_parallel
    start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    start.restype = None
    return start  # type: ignore[no-any-return]


def runtime_function(name: str) -> int:
    """Address of a function of torch's OpenMP runtime; 0: there is no runtime."""
    runtime = _runtime()
    return 0 if runtime is None else ctypes.cast(runtime[name], ctypes.c_void_p).value or 0


@cache
def _runtime() -> ctypes.CDLL | None:
    """The one that torch has loaded."""
    libraries = (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")
    return next((ctypes.CDLL(str(path)) for path in sorted(libraries)), None)
