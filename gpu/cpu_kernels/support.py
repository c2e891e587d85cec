"""Which models and machines the kernels know, in words. Imports neither numba nor what computes. Any thread."""

from importlib.util import find_spec

import torch

from core.config import ModelConfig
from gpu.device import DeviceChoice, cpu_flags

NEEDED_FLAG = "avx512_bf16"
HEAD_DIM_STEP = 32  # numbers of bf16 in a register
# Importing numba takes 0.7 s of a start: a model of this size takes seconds to load, and its steps tens of ms.
MIN_PARAMETERS = 100_000_000


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against them, as a phrase; None: nothing."""
    if choice.device.type != "cpu" or choice.dtype != torch.bfloat16:
        return f"{choice.dtype_name} on {choice.device.type}: they know bfloat16 on a CPU"
    if NEEDED_FLAG not in cpu_flags():
        return f"the CPU has no {NEEDED_FLAG}"
    if config.num_parameters < MIN_PARAMETERS:
        return "the model is too small to repay loading them"
    if find_spec("numba") is None:
        return "numba is not installed"
    return None


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
    return "numba's kernel over block tables" if why is None else f"torch's: {why}"
