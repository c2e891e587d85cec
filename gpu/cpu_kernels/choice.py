"""What a model is computed with: decided at start, without importing numba in vain. Thread: engine."""

from core.config import ModelConfig
from gpu.cpu_kernels.support import why_no_attention, why_no_kernels
from gpu.device import DeviceChoice
from gpu.operators import Operators


def find_operators(config: ModelConfig, choice: DeviceChoice) -> Operators:
    """What the model computes with: the kernels, or torch's operators."""
    if why_no_kernels(config, choice) is not None:
        return Operators(choice.dtype, choice.device, config.rms_norm_eps)
    from gpu.cpu_kernels.operators import KernelOperators

    return KernelOperators(config, has_attention=why_no_attention(config) is None)
