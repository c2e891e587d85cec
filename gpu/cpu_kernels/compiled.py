"""Kernels' code, kept when it was compiled and loaded without numba: numba's import takes 0.7 s and 60 MiB.

The kernels' files take numba's names from here. Where gpu/cache_files.py says that all is compiled, these names do
nothing: what numba would compile stays Python, and a kernel is the address of its code in an object file, which LLVM
links. One that is missing is compiled in another process. Elsewhere the names are numba's. Thread: engine, at start.
"""

import ctypes
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np

from gpu import cache_files

if sys.platform == "linux":
    _PROCESS = ctypes.CDLL(None)
# What kernels call of numba's runtime: arrays' memory behind {count, what ends it and for whom, data, bytes}, 48 bytes.
# Source: numba/core/runtime/nrt.cpp, struct MemInfo.
RUNTIME = """
declare ptr @malloc(i64)
declare void @free(ptr)
define ptr @NRT_Allocate(i64 %size) {
  %found = call ptr @malloc(i64 %size)
  ret ptr %found
}
define void @NRT_Free(ptr %at) {
  call void @free(ptr %at)
  ret void
}
define ptr @NRT_MemInfo_alloc(i64 %size) {
  %found = call ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 16)
  ret ptr %found
}
define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %step = zext i32 %align to i64
  %head = add i64 %step, 48
  %all = add i64 %size, %head
  %info = call ptr @malloc(i64 %all)
  %at = ptrtoint ptr %info to i64
  %end = add i64 %at, %head
  %mask = sub i64 0, %step
  %data = and i64 %end, %mask
  store i64 1, ptr %info
  %ends = getelementptr i8, ptr %info, i64 8
  store ptr null, ptr %ends
  %data_at = getelementptr i8, ptr %info, i64 24
  store i64 %data, ptr %data_at
  %size_at = getelementptr i8, ptr %info, i64 32
  store i64 %size, ptr %size_at
  ret ptr %info
}
define void @NRT_MemInfo_call_dtor(ptr %info) {
  call void @free(ptr %info)
  ret void
}
"""
logger = logging.getLogger(__name__)

FAILURE = "numba_"  # functions that raise a kernel's errors, of which there are none
DIGEST_BYTES = 32  # SHA-256


class _Unneeded(type):
    """The class of names that do nothing: they may be called, subclassed and asked for anything."""

    def __getattr__(cls, name: str) -> Any:
        return Unneeded

    def __call__(cls, *given: object, **named: object) -> Any:
        return Unneeded


class Unneeded(metaclass=_Unneeded):
    pass


class KeptKernel:
    """A kernel that is not compiled in this process.

    Args:
        name: see kernel.
        wanted: what has it compiled: see gpu/cpu_kernels/__main__.py.
    """

    def __init__(self, name: str, wanted: str) -> None:
        self._name, self._wanted = name, wanted

    @cached_property
    def address(self) -> int:
        """
        Raises:
            RuntimeError: it cannot be compiled.
        """
        directory = cache_files.kept_code()
        assert directory is not None
        file = directory / f"{self._name}.o"
        if (code := _read(file)) is None:
            cache_files.compile_missing(self._wanted)
            code = _read(file)
        if code is None:
            raise RuntimeError(f"{file} cannot be read, and compiling the kernel again did not write it.")
        return _linked(code)


compiled: dict[str, Any] = {}
"""This process's own kernels, by their names."""


def kernel(num_numbers: int = 1, variant: str = "") -> Callable[[Callable[..., None]], Any]:
    """Make a function of so many integers or addresses a kernel, whose `address` C can call.

    Args:
        variant: which one, of several that the same function makes.
    """

    def decorate(function: Callable[..., None]) -> Any:
        module = function.__module__.rpartition(".")[2]
        name = ".".join(filter(None, (module, function.__name__, variant)))
        if IS_KEPT:
            return KeptKernel(name, variant or module)
        compiled[name] = found = cfunc(types.void(*[types.int64] * num_numbers), cache=True)(function)
        return found

    return decorate


def keep_compiled(directory: Path) -> None:
    """Write the code of this process's kernels, each behind its hash.

    Raises:
        OSError: it cannot be written.
        RuntimeError: a kernel needs what is not loaded with its code.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, found in compiled.items():
        numba_cache, context = found._cache, found._targetdescr.target_context
        kept = numba_cache._cache_file.load(numba_cache._index_key(found._sig, context.codegen()))
        if kept is None:
            raise OSError(f"numba could not keep {name}")
        (_, _, (code, _)), *_ = kept
        if missing := [symbol for symbol in _undefined(code) if not _can_find(symbol)]:
            raise RuntimeError(f"{name} needs {', '.join(missing)}")
        cache_files.replace_file(directory / f"{name}.o", sha256(code).digest() + code)


def _read(file: Path) -> bytes | None:
    """A kernel's code; None: there is none, or it is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if sha256(code).digest() == digest else None


def _linked(code: bytes) -> int:
    """The address of the kernel that this object file is."""
    llvm, engine = _engine()
    for symbol in filter(lambda one: one.startswith(FAILURE), _undefined(code)):
        llvm.add_symbol(symbol, _address_of("abort"))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    (name,) = (name for name, is_there in _symbols(code) if is_there and name.startswith("cfunc."))
    return int(engine.get_function_address(name))


@cache
def _engine() -> tuple[Any, Any]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm, llvm.create_mcjit_compiler(llvm.parse_assembly(RUNTIME), machine)


def _can_find(symbol: str) -> bool:
    return symbol.startswith(FAILURE) or f"@{symbol}(" in RUNTIME or hasattr(_PROCESS, symbol)


def _address_of(symbol: str) -> int:
    return ctypes.cast(_PROCESS[symbol], ctypes.c_void_p).value or 0


def _undefined(code: bytes) -> list[str]:
    return [name for name, is_there in _symbols(code) if name and not is_there]


def _symbols(code: bytes) -> list[tuple[str, bool]]:
    """An object file's symbols, and whether it has what they name. Source: elf(5)."""
    import llvmlite.binding as llvm

    found = {part.name(): bytes(part.data()) for part in llvm.ObjectFileRef.from_data(code).sections()}
    layout = np.dtype([("name", "<u4"), ("kind", "<u2"), ("section", "<u2"), ("place", "<u8", 2)])
    names = found[b".strtab"]
    return [
        (names[one["name"] : names.index(b"\0", one["name"])].decode(), bool(one["section"]))
        for one in np.frombuffer(found[b".symtab"], layout)
    ]


@cache
def _tell(cause: str) -> None:
    """Once, not for each kernel."""
    logger.warning("compiled kernels cannot be kept (%s): each start compiles them", cause)


@contextmanager
def _or_missing(cache: Any) -> Iterator[None]:
    """numba's guard of the files that it keeps: one that is damaged, or cannot be written, counts as missing."""
    try:
        yield
    except OSError as error:
        _tell(error.strerror)
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, ImportError):
        with suppress(OSError):
            cache.flush()


def _as_it_is(**options: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: function


IS_KEPT = cache_files.kept_code() is not None
if not IS_KEPT:
    from llvmlite import ir
    from numba import carray, cfunc, njit, types
    from numba.core import caching, cgutils
    from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
    from numba.extending import intrinsic, lower_builtin, models, register_model

    caching.Cache._guard_against_spurious_io_errors = _or_missing
else:
    njit, nothing = _as_it_is, cast(Any, Unneeded)
    carray = cgutils = intrinsic = ir = types = nothing
    ConcreteTemplate = infer_global = lower_builtin = models = register_model = signature = nothing

__all__ = [
    "ConcreteTemplate",
    "carray",
    "cgutils",
    "infer_global",
    "intrinsic",
    "ir",
    "keep_compiled",
    "kernel",
    "lower_builtin",
    "models",
    "njit",
    "register_model",
    "signature",
    "types",
]
