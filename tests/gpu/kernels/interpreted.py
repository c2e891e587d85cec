"""Models computed by Triton's kernels on a CPU, interpreted, as they are on a device: attention and sampling too."""

from core.config import ModelConfig
from gpu.device import DeviceChoice
from gpu.kernels.attention import PagedAttention
from gpu.kernels.operators import TritonOperators
from gpu.kernels.sampling import DeviceSampler
from gpu.operators import Operators

NUM_PROGRAMS = 3  # that decode: each takes several splits


def find_interpreted(config: ModelConfig, choice: DeviceChoice) -> Operators:
    """See gpu.loading.FindOperators."""
    operators = TritonOperators(config, choice.dtype, choice.device, PagedAttention(NUM_PROGRAMS))
    operators.sampler = DeviceSampler
    return operators
