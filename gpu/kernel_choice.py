"""What a model is computed with, on any device: decided at start, and here alone. Thread: engine; descriptions any.

Neither numba nor triton is imported in vain.
"""

import logging

from core.config import EngineConfig, ModelConfig
from gpu.cpu_kernels import support as cpu
from gpu.device import DeviceChoice
from gpu.device_attention import Attends, DeviceAttention, attention_here, heads_name
from gpu.kernels import support as cuda
from gpu.operators import Operators
from gpu.sampler_choice import find_sampler
from gpu.step_graphs import CudaRecorder, GraphRecorder
from gpu.step_shapes import step_shapes
from gpu.varlen_attention import find_attention

logger = logging.getLogger(__name__)


def find_operators(config: ModelConfig, choice: DeviceChoice) -> Operators:
    """What the model computes with: its device's kernels, or torch's operators."""
    found = _operators(config, choice)
    found.sampler = find_sampler(config, choice)  # compiles or loads a kernel
    return found


def _operators(config: ModelConfig, choice: DeviceChoice) -> Operators:
    if why_no_kernels(config, choice) is not None:
        return Operators(choice.dtype, choice.device, config.rms_norm_eps)
    if choice.device.type == "cuda":
        from gpu.kernels.operators import TritonOperators

        return TritonOperators(config, choice.dtype, choice.device, _device_attention(config, choice))
    from gpu.cpu_kernels.operators import KernelOperators

    return KernelOperators(config, has_attention=cpu.why_no_attention(config) is None)


def find_recorder(engine: EngineConfig, choice: DeviceChoice, operators: Operators) -> GraphRecorder | None:
    """What captures steps; None: they are sent by Python."""
    if engine.graphs == "off" or (engine.graphs == "auto" and choice.device.type != "cuda"):
        return None
    if operators.has_device_rows and operators.ranks is None:
        return CudaRecorder(choice.device)
    if engine.graphs != "auto":
        logger.warning("no CUDA graphs: the model is not computed by kernels that read their rows on the device")
    return None


def _device_attention(config: ModelConfig, choice: DeviceChoice) -> DeviceAttention | None:
    if cuda.why_no_attention(config, choice.dtype) is not None:
        return None
    from gpu.kernels.paged_attention import PagedAttention

    is_plain = config.attention_cap is None and not config.has_sinks
    return DeviceAttention(PagedAttention(), find_attention() if is_plain else None)


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against them, as a phrase; None: nothing."""
    if choice.device.type == "cuda":
        return cuda.why_no_kernels(config, choice)
    return cpu.why_no_kernels(config, choice)


def describe_attention(config: ModelConfig, choice: DeviceChoice) -> str:
    """What attends, and why it is not the kernels."""
    if choice.device.type == "cuda":
        why = why_no_kernels(config, choice) or cuda.why_no_attention(config, choice.dtype)
        if why is not None:
            return f"torch's: {why}"
        heads = heads_name(config.num_heads, config.num_kv_heads, config.head_dim, choice.dtype)
        return str(attention_here(choice.device).get(heads, Attends()))
    return cpu.describe_attention(config, choice)


def describe_graphs(config: ModelConfig, choice: DeviceChoice, engine: EngineConfig) -> str:
    """What steps are sent by."""
    why = "asked for" if engine.graphs == "off" else why_no_graphs(config, choice)
    if why is not None:
        return f"none: {why}"
    when = "as they are needed" if engine.graphs == "lazy" else "at start"
    shapes = step_shapes(config, engine)
    most = (
        f", {len(shapes.chunks)} of prompts up to {shapes.chunks[-1].num_prompt_tokens} tokens" if shapes.chunks else ""
    )
    return f"{len(shapes.decodes)} sizes of decodes{most}, captured {when}"


def why_no_graphs(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against them, as a phrase; None: nothing."""
    if choice.device.type != "cuda":
        return f"on {choice.device.type} there is nothing to gain"
    return why_no_kernels(config, choice) or cuda.why_no_attention(config, choice.dtype)


def describe_products(config: ModelConfig, choice: DeviceChoice) -> str:
    """What multiplies with the layers' matrices, and computes all that lies between them."""
    if choice.device.type == "cuda":
        why = cuda.why_no_kernels(config, choice)
        return "Triton's kernels or cuBLAS, as measured" if why is None else f"torch's: {why}"
    return cpu.describe_products(config, choice)
