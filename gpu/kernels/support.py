"""Which models and devices the kernels know, in words. Imports neither triton nor what computes. Any thread."""

from importlib.util import find_spec

import torch

from core.config import ModelConfig
from gpu.device import DeviceChoice

NEEDED_CAPABILITY = (8, 0)  # Ampere: bfloat16, and copies to shared memory beside the arithmetic
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A row is summed by one program, in its registers.
MAX_HIDDEN_SIZE = 65_536
MAX_HEAD_DIM = 512


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against them, as a phrase; None: nothing."""
    if choice.device.type != "cuda" or choice.dtype not in DTYPES:
        return f"{choice.dtype_name} on {choice.device.type}: they know floats on CUDA"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "this torch is for ROCm, on which they are not tested"
    capability = torch.cuda.get_device_capability(choice.device)
    if capability < NEEDED_CAPABILITY:
        least, found = (".".join(map(str, pair)) for pair in (NEEDED_CAPABILITY, capability))
        return f"compute capability {found}: they need {least}"
    return why_not_this_model(config)


def why_not_this_model(config: ModelConfig) -> str | None:
    """What of the model they do not know; None: nothing."""
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        return f"heads of {config.head_dim}: they know even ones of up to {MAX_HEAD_DIM}"
    if config.hidden_size > MAX_HIDDEN_SIZE:
        return f"a width of {config.hidden_size:,}: they know up to {MAX_HIDDEN_SIZE:,}"
    return None
