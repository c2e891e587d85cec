"""Which models and devices the kernels know, in words. Imports neither triton nor what computes. Any thread."""

from importlib.util import find_spec

import torch

from core.config import ModelConfig
from gpu.device import DeviceChoice
from gpu.kernels.attention_tiles import max_head_dim, tiles_for

NEEDED_CAPABILITY = (8, 0)  # Ampere: bfloat16, and copies to shared memory beside the arithmetic
FP8_CAPABILITY = (8, 9)  # Ada: before, Triton converts no e4m3
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


def knows_fp8(device: torch.device) -> bool:
    """Whether kernels read 8-bit floats there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def why_not_this_model(config: ModelConfig) -> str | None:
    """What of the model they do not know; None: nothing."""
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        return f"heads of {config.head_dim}: they know even ones of up to {MAX_HEAD_DIM}"
    if config.hidden_size > MAX_HIDDEN_SIZE:
        return f"a width of {config.hidden_size:,}: they know up to {MAX_HIDDEN_SIZE:,}"
    return None


def why_no_attention(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """What speaks against the kernels for attention, where the others serve; None: nothing."""
    if config.head_dim > max_head_dim(dtype):
        return f"heads of {config.head_dim} in {str(dtype)[6:]}: they know up to {max_head_dim(dtype)}"
    per_kv, most = config.num_heads // config.num_kv_heads, tiles_for(config.head_dim, dtype).extend_rows
    if per_kv > most:
        return f"{per_kv} heads share a key: they know up to {most}"
    return None
