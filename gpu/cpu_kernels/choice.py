"""Whether a model is served with these kernels: decided at start, without importing numba in vain. Thread: engine."""

from importlib.util import find_spec

import torch

from core.config import ModelConfig
from gpu.attention import DecodeKernel
from gpu.device import DeviceChoice, cpu_flags

NEEDED_FLAG = "avx512_bf16"
HEAD_DIM_STEP = 32  # numbers of bf16 in a register
# Importing numba takes 0.7 s of a start: a model of this size takes seconds to load, and its steps tens of ms.
MIN_PARAMETERS = 100_000_000


def find_decode_kernel(config: ModelConfig, choice: DeviceChoice) -> DecodeKernel | None:
    """The kernel that attends for rows of one new token; None where torch's operators shall."""
    if why_no_kernels(config, choice) is not None:
        return None
    from gpu.cpu_kernels.paged_decode import PagedDecode

    return PagedDecode()


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against them, as a phrase; None: nothing."""
    if choice.device.type != "cpu" or choice.dtype != torch.bfloat16:
        return f"{choice.dtype_name} on {choice.device.type}: they know bfloat16 on a CPU"
    if NEEDED_FLAG not in cpu_flags():
        return f"the CPU has no {NEEDED_FLAG}"
    if config.head_dim % HEAD_DIM_STEP or config.attention_cap is not None or config.has_sinks:
        return "the model's attention is not one that they know"
    if config.num_parameters < MIN_PARAMETERS:
        return "the model is too small to repay loading them"
    if find_spec("numba") is None:
        return "numba is not installed"
    return None
