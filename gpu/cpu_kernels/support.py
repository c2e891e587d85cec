"""What the kernels of this folder support, and the CPU's number format by it. Imports no numba. Any thread."""

from dataclasses import replace
from importlib.util import find_spec

import torch

from core.config import EngineConfig, ModelConfig
from gpu.cache_files import can_keep_kernels
from gpu.device import DeviceChoice, choose_device, cpu_flags

NEEDED_FLAGS = {"avx2", "fma", "f16c"}
NO_FLAGS = f"the CPU has not all of {', '.join(sorted(NEEDED_FLAGS))}"
HEAD_DIM_STEP = 32  # numbers of bf16 in a register
# Importing numba takes 0.7 s: a model of this size takes seconds to load, and its steps tens of ms.
MIN_PARAMETERS = 100_000_000


def choose_for(model: ModelConfig | None, engine: EngineConfig) -> DeviceChoice:
    """choose_device, for a model: bf16 on a CPU that has no such instructions, too, where kernels compute all of it.

    They read half of float32's bytes, of weights as of keys and values. One core of a Cascade Lake multiplied 3072 x
    1024 by 1 row in 0.35 ms (float32 by oneDNN: 1.85), by 16 in 1.3 (2.4), by 256 in 24 (15), and 1024 x 3072 in 0.4
    (3.9), 2.2 (3.7) and 23 (59).

    Raises:
        DeviceUnavailable: as choose_device.
    """
    choice = choose_device(engine)
    in_bf16 = replace(choice, dtype=torch.bfloat16, dtype_reason="kernels compute it")
    if model is None:
        return choice
    is_settled = engine.dtype != "auto" or choice.device.type != "cpu" or choice.dtype == torch.bfloat16
    return choice if is_settled or not attends(model, in_bf16) else in_bf16


def attends(config: ModelConfig, choice: DeviceChoice) -> bool:
    """Whether kernels compute the model with its attention, so that nothing is gathered or masked."""
    return why_no_kernels(config, choice) is None and why_no_attention(config) is None


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """Why the kernels cannot serve on this device, as a phrase; None: they can."""
    if choice.device.type != "cpu" or choice.dtype != torch.bfloat16:
        return f"{choice.dtype_name} on {choice.device.type}: the kernels support bfloat16 on a CPU"
    if not has_needed_flags():
        return NO_FLAGS
    if config.num_parameters < MIN_PARAMETERS:
        return "the model is too small to repay loading the kernels"
    return why_no_numba()


def has_needed_flags() -> bool:
    """Whether the CPU has what kernels are made of."""
    return cpu_flags() >= NEEDED_FLAGS


def why_no_numba() -> str | None:
    """Why nothing can be compiled, as a phrase; None: it can."""
    if find_spec("numba") is None:
        return "numba is not installed"
    return None if can_keep_kernels() else "there is no directory that numba could keep compiled code in"


def why_no_attention(config: ModelConfig) -> str | None:
    """Why the attention kernel cannot serve where the others do, as a phrase; None: it can."""
    if config.latent is not None:
        return "the kernel does not support latent attention"
    for kind in config.kinds:
        if kind.head_dim % HEAD_DIM_STEP:
            return f"heads of {kind.head_dim}: the kernel supports multiples of {HEAD_DIM_STEP}"
    if config.attention_cap is not None or config.has_sinks:
        return "the kernel supports neither caps nor sinks"
    return None
