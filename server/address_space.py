"""Recognises failures that `ulimit -v` causes, and tells a fix instead of a traceback. Imports little. Any thread."""

import resource

from core.errors import ExitCode, StartupError

REFUSED_MEMORY = (
    "failed to map segment",
    "cannot allocate memory",
    "Cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "bad_alloc",
)
MIN_ADDRESS_SPACE_BYTES = 1024**3  # torch and the embedded model map 0.7 GB


def check_address_space() -> None:
    """Before torch is imported, which would abort.

    Raises:
        StartupError: ulimit -v leaves too little for it.
    """
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < MIN_ADDRESS_SPACE_BYTES:
        raise _too_little_address_space(limit_bytes, f"torch needs {MIN_ADDRESS_SPACE_BYTES // 1024} KiB")


def as_memory_error(error: BaseException) -> StartupError | None:
    """What ulimit -v has refused, in the words of the loader, torch or the interpreter; None: it was not that."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_refused = isinstance(error, MemoryError) or any(words in str(error) for words in REFUSED_MEMORY)
    if limit_bytes == resource.RLIM_INFINITY or isinstance(error, StartupError) or not is_refused:
        return None
    return _too_little_address_space(limit_bytes, str(error) or type(error).__name__)


def _too_little_address_space(limit_bytes: int, why: str) -> StartupError:
    cause = f"The address space is limited to {limit_bytes // 1024} KiB (ulimit -v), which is too little: {why}"
    fix = "ulimit -v unlimited; to bound the memory, bound what is resident: MemoryMax= of a systemd unit, docker -m"
    return StartupError(cause, fix, ExitCode.MEMORY)
