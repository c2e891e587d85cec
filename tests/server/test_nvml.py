"""Devices as a driver's library tells of them: a library of ours in its place, compiled or not there at all."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from server.observing import metrics
from server.observing.metrics import DeviceMonitor, DeviceState

SOURCE = """
#include <stddef.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
static int devices[3];
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **device) { *device = devices + i; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 100; memory->free = 60; memory->used = 40;
    return device == devices + 2 ? 999 : 0;
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    rates->gpu = 75; rates->memory = 1;
    return device == devices + 1 ? 3 : 0;  /* NVML_ERROR_NOT_SUPPORTED */
}
"""


def compiled(directory: Path, init: int) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    directory.mkdir(exist_ok=True)
    source, library = directory / "nvml.c", directory / "libnvml.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", f"-DINIT={init}", "-o", library, source], check=True)
    return str(library)


def test_devices_tell_their_memory_and_where_they_can_their_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_NVML", compiled(tmp_path, 0))
    assert DeviceMonitor().states() == {"0": DeviceState(40, 100, 0.75), "1": DeviceState(40, 100, None)}
    for broken in (compiled(tmp_path / "broken", 999), "libnvidia-ml-that-is-not-there.so.1"):
        monkeypatch.setattr(metrics, "_NVML", broken)
        assert DeviceMonitor().states() == {}


@pytest.mark.gpu
def test_the_devices_of_this_machine_are_told() -> None:
    assert ctypes.CDLL(metrics._NVML)
    states = DeviceMonitor().states()
    assert states
    assert all(0 < state.memory_used_bytes <= state.memory_total_bytes for state in states.values())
