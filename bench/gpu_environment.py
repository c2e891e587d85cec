"""bench.gpu_check --part environment: versions, the device, and its ceilings, which every part measures first."""

import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from bench.device_limits import device_limit_table, measure_device_limits, speed_of
from bench.gpu_check import ALWAYS, NEEDED, missing_packages
from bench.gpu_parts import OK, SKIPPED, Case, Context, Row
from bench.results import Cell

CEILINGS_LIMIT_S = 120.0
GIB = 1024**3


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    return [ceilings_case(), Case("versions", _versions, 60.0, "Versions"), Case("parts", _parts, 30.0, "Parts")]


def ceilings_case() -> Case:
    """Measures what all shares of a run refer to, and tells which device it is."""
    return Case("ceilings", _ceilings, CEILINGS_LIMIT_S, "Ceilings")


def _ceilings(context: Context) -> Iterator[Row]:
    context.state["facts"] = device_facts(context.device)
    yield Row("Device", {name: str(value) for name, value in context.state["facts"].items()})
    dtype = torch.bfloat16 if context.is_device else torch.float32
    limits = measure_device_limits(context.device, dtype, context.is_quick or not context.is_device)
    speed = speed_of(limits)
    context.state["speed"] = {"read_bytes_per_s": speed.read_bytes_per_s, "flops": speed.flops}
    table = device_limit_table(limits)
    for line in table.rows:
        yield Row(table.title, dict(zip(table.columns, line, strict=True)))


def device_facts(device: torch.device) -> dict[str, Cell]:
    """What a figure depends on beside the code, and bench.results.MachineFacts do not tell."""
    facts: dict[str, Cell] = {"device": "cpu", "torch": str(torch.__version__), "python": platform.python_version()}
    facts["triton"] = _version("triton")
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    facts |= {
        "device": properties.name,
        "memory GiB": round(properties.total_memory / GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "level-2 cache MiB": getattr(properties, "L2_cache_size", 0) // 1024**2,
        "compute capability": f"{properties.major}.{properties.minor}",
        "CUDA of torch": torch.version.cuda,
        "driver": _asked_of_driver("driver_version"),
        "clock MHz": _asked_of_driver("clocks.sm"),
        "power limit W": _asked_of_driver("power.limit"),
    }
    return facts


def _asked_of_driver(field: str) -> str:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown version" if find_spec(package) else "not installed"


def _versions(context: Context) -> Iterator[Row]:
    names = dict.fromkeys(name for part in NEEDED for name in (*ALWAYS, *NEEDED[part]))
    for name in names:
        found = _version(name)
        yield Row("Versions", {"package": name, "version": found}, OK if find_spec(name) else SKIPPED)


def _parts(context: Context) -> Iterator[Row]:
    """What can be run on this machine."""
    for part in NEEDED:
        missing = missing_packages(part)
        note = f"needs {', '.join(missing)}" if missing else ""
        yield Row("Parts", {"part": part}, SKIPPED if missing else OK, note)
