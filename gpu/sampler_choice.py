"""Which kernel draws tokens for a model, if any: decided at start, without importing numba or triton in vain.

Thread: engine; words any.
"""

from importlib.util import find_spec

import torch

from core.config import ModelConfig
from gpu.cpu_kernels.code_cache import has_room
from gpu.device import DeviceChoice
from gpu.sampler import SamplerChoice

# Importing numba takes 0.7 s of a start: a model of this size takes seconds to load, and its steps tens of ms.
MIN_PARAMETERS = 100_000_000
MIN_CAPABILITY = (8, 0)  # what is compiled for in tests is newer, and older devices are not tried
MAX_DEVICE_VOCABULARY = 1 << 20  # of 8,192 segments' maxima, which one program holds


def find_sampler(config: ModelConfig, choice: DeviceChoice) -> SamplerChoice | None:
    """The kernel of the model's device; None: torch draws."""
    if why_no_sampling_kernel(config, choice) is not None:
        return None
    if choice.device.type == "cuda":
        from gpu.kernels.sampler import DeviceSampler

        return SamplerChoice(DeviceSampler)
    from gpu.cpu_kernels.row_sampler import RowSampler

    return SamplerChoice(RowSampler)


def why_no_sampling_kernel(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """What speaks against it, as a phrase; None: nothing. It knows float32 logits, whatever else computes."""
    if choice.device.type == "cpu":
        if config.num_parameters < MIN_PARAMETERS:
            return "the model is too small to repay loading it"
        if find_spec("numba") is None:
            return "numba is not installed"
        return None if has_room() else "there is no directory that numba could keep compiled code in"
    if choice.device.type != "cuda" or torch.version.hip is not None:
        return f"it is not tested on {choice.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if config.vocab_size > MAX_DEVICE_VOCABULARY:
        return f"a vocabulary of {config.vocab_size:,}: it knows up to {MAX_DEVICE_VOCABULARY:,}"
    if torch.cuda.get_device_capability(choice.device) < MIN_CAPABILITY:
        return "the device is older than compute capability {}.{}".format(*MIN_CAPABILITY)
    return None
