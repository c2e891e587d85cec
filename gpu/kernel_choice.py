"""What a model is computed with, on any device: decided at start, and here alone. Thread: engine; descriptions any.

Neither numba nor triton is imported in vain.
"""

from core.config import ModelConfig
from gpu.cpu_kernels import support as cpu
from gpu.device import DeviceChoice
from gpu.kernels import support as cuda
from gpu.operators import Operators


def find_operators(config: ModelConfig, choice: DeviceChoice) -> Operators:
    """What the model computes with: its device's kernels, or torch's operators."""
    if why_no_kernels(config, choice) is not None:
        return Operators(choice.dtype, choice.device, config.rms_norm_eps)
    if choice.device.type == "cuda":
        from gpu.kernels.operators import TritonOperators

        return TritonOperators(config, choice.dtype, choice.device)
    from gpu.cpu_kernels.operators import KernelOperators

    return KernelOperators(config, has_attention=cpu.why_no_attention(config) is None)


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against them, as a phrase; None: nothing."""
    if choice.device.type == "cuda":
        return cuda.why_no_kernels(config, choice)
    return cpu.why_no_kernels(config, choice)


def describe_attention(config: ModelConfig, choice: DeviceChoice) -> str:
    """What attends for rows of one new token, and why it is not the kernel."""
    if choice.device.type == "cuda":
        return "torch's"
    return cpu.describe_attention(config, choice)


def describe_products(config: ModelConfig, choice: DeviceChoice) -> str:
    """What multiplies with the layers' matrices, and computes all that lies between them."""
    if choice.device.type == "cuda":
        why = cuda.why_no_kernels(config, choice)
        return "Triton's kernels or cuBLAS, as measured" if why is None else f"torch's: {why}"
    return cpu.describe_products(config, choice)
