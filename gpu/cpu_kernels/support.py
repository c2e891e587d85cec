"""Which models and machines the kernels know, in words. Imports neither numba nor what computes. Any thread."""

import ctypes
from functools import cache
from importlib.util import find_spec

import torch

from core.config import ModelConfig
from gpu.cpu_kernels.code_cache import has_room
from gpu.device import DeviceChoice, cpu_flags
from gpu.linear import keeps_rows

NEEDED_FLAG = "avx512_bf16"
TILE_FLAG = "amx_bf16"
# Linux, arch/x86/include/uapi/asm/prctl.h; the tiles' contents are state component 18 (Intel's manual, volume 1, 13.1)
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
HEAD_DIM_STEP = 32  # numbers of bf16 in a register
# Importing numba takes 0.7 s of a start: a model of this size takes seconds to load, and its steps tens of ms.
MIN_PARAMETERS = 100_000_000


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against them, as a phrase; None: nothing."""
    if choice.device.type != "cpu" or choice.dtype != torch.bfloat16:
        return f"{choice.dtype_name} on {choice.device.type}: they know bfloat16 on a CPU"
    if NEEDED_FLAG not in cpu_flags():
        return f"the CPU has no {NEEDED_FLAG}"
    if has_tiles() and not may_use_tiles():
        return "the system does not let this process use AMX"  # what is cached of them was compiled for it
    if config.num_parameters < MIN_PARAMETERS:
        return "the model is too small to repay loading them"
    if find_spec("numba") is None:
        return "numba is not installed"
    if not has_room():
        return "there is no directory that numba could keep compiled code in"
    return None


def has_tiles() -> bool:
    """Whether the CPU multiplies tiles of bf16 (AMX)."""
    return TILE_FLAG in cpu_flags()


@cache
def may_use_tiles() -> bool:
    """Whether it has, and the system keeps them for this process, as it is asked to here (Linux, x86/xstate.rst)."""
    return has_tiles() and ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0


def why_no_attention(config: ModelConfig) -> str | None:
    """What speaks against the kernel for attention, where the others serve; None: nothing."""
    if config.head_dim % HEAD_DIM_STEP:
        return f"heads of {config.head_dim}: it knows multiples of {HEAD_DIM_STEP}"
    if config.attention_cap is not None or config.has_sinks:
        return "it knows neither caps nor sinks"
    return None


def describe_attention(config: ModelConfig, choice: DeviceChoice) -> str:
    """What attends for rows of one new token, and why it is not the kernel."""
    why = why_no_kernels(config, choice) or why_no_attention(config)
    by = ", by AMX" if has_tiles() else ""
    return f"numba's kernel over block tables{by}" if why is None else f"torch's: {why}"


def describe_products(config: ModelConfig, choice: DeviceChoice) -> str:
    """What multiplies with the matrices, and why."""
    why = why_no_kernels(config, choice)
    if why is not None:
        return f"torch's: {why}"
    if keeps_rows():
        return "numba's kernel or oneDNN, as measured"
    return "numba's kernel, by AMX: oneDNN's rounds a row otherwise in other company"
