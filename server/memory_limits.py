"""Explains memory limits that are too low for torch, which would abort or be killed. Imports little. Any thread."""

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
MIN_ROOM_BYTES = 160 * 1024**2  # importing torch takes 130 MB that the kernel cannot reclaim


def check_address_space() -> None:
    """Call before importing torch, which would abort. Raises StartupError: ulimit -v is too low for torch."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < MIN_ADDRESS_SPACE_BYTES:
        raise _too_little_address_space(limit_bytes, f"torch needs {MIN_ADDRESS_SPACE_BYTES // 1024} KiB")


def check_memory_room(room_bytes: int) -> None:
    """Call before importing torch: the kernel would kill the process without a message.

    Args:
        room_bytes: free on the host and in the control groups.

    Raises:
        StartupError: it is too little for torch.
    """
    if room_bytes < MIN_ROOM_BYTES:
        left = f"{room_bytes // 1024**2} MiB of memory are left for this process"
        cause = f"{left}, and importing torch alone takes {MIN_ROOM_BYTES // 1024**2} MiB"
        fix = "raise the limit of its control group (MemoryMax= of a systemd unit, docker -m), or end other processes"
        raise StartupError(cause, fix, ExitCode.MEMORY)


def as_memory_error(error: BaseException) -> StartupError | None:
    """The error of the loader, torch or the interpreter as one of ulimit -v; None: it has another cause."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_refused = isinstance(error, MemoryError) or any(words in str(error) for words in REFUSED_MEMORY)
    if limit_bytes == resource.RLIM_INFINITY or isinstance(error, StartupError) or not is_refused:
        return None
    return _too_little_address_space(limit_bytes, str(error) or type(error).__name__)


def _too_little_address_space(limit_bytes: int, why: str) -> StartupError:
    cause = f"The address space is limited to {limit_bytes // 1024} KiB (ulimit -v), which is too little: {why}"
    fix = "ulimit -v unlimited; to bound the memory, limit resident memory: MemoryMax= of a systemd unit, docker -m"
    return StartupError(cause, fix, ExitCode.MEMORY)
