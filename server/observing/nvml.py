"""What NVIDIA's devices are doing, as their driver's library tells it; nothing where there is none. Thread: loop.

Source: the NVML API reference; its functions return 0 for success.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class DeviceState:
    """
    Args:
        utilization: share of the last moments in which something ran, 0 to 1; None: the device does not tell (MIG).
    """

    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float | None


class DeviceMonitor:
    """The machine's devices, by their number in the driver."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[ctypes.c_void_p] = []
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return  # no such devices here
        if library.nvmlInit_v2() == 0:
            self._library = library
            self._handles = self._find()

    def states(self) -> dict[str, DeviceState]:
        """Those that can be asked."""
        found = {str(i): self._state(handle) for i, handle in enumerate(self._handles)}
        return {number: state for number, state in found.items() if state is not None}

    def _find(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
                handles.append(handle)
        return handles

    def _state(self, handle: ctypes.c_void_p) -> DeviceState | None:
        memory, utilization = _Memory(), _Utilization()
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        is_told = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0
        return DeviceState(memory.used, memory.total, utilization.gpu / 100 if is_told else None)
