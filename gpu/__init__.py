"""The engine-thread side: model, KV cache, sampler. It never sees asyncio or HTTP. It runs on CPU as well.

What libraries read of the environment when they are loaded is set here, before torch is; a user's own setting stays.
"""

import ctypes
import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# libgomp: threads that wait in a spin take the core from the event loop. A linear went from 1,902 to 395 µs with the
# cores oversubscribed.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# oneDNN keeps a compiled primitive of half a megabyte for each number of rows that a product has had, 1,024 of them.
if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:  # the older name, which is read too
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")


class _Later(ModuleType):
    """A module that is imported when something of it is asked for, not where it is only named."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":  # that is asked of every module, as by inspect
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


# Half a second of torch's import and 15 MiB. Other builds, which the tests do not run with, may need them elsewhere
PUTS_OFF = version("torch") == "2.13.0+cpu"
if PUTS_OFF and "torch" not in sys.modules:
    for _name in ("torch._meta_registrations", "torch.export", "torch.distributions"):
        sys.modules[_name] = _Later(_name)


def load_library() -> None:
    """Load torch's largest library without the GIL, which an import holds. Any thread, before torch is imported.

    Its initialisers know nothing of Python. A library that cannot be loaded is told by the import.
    """
    found = find_spec("torch")
    if PUTS_OFF and "torch" not in sys.modules and found is not None and found.origin is not None:
        load = ctypes.CDLL(None).dlopen
        load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        load(os.fsencode(Path(found.origin).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOW)


_M_ARENA_MAX = -8  # mallopt(3), malloc.h


def limit_arenas() -> None:
    """Have glibc's malloc serve all threads from one heap: freed primitives leave holes in each. Before any thread."""
    is_set = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not is_set:
        mallopt(_M_ARENA_MAX, 1)
