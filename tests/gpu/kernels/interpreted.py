"""Models computed by Triton's kernels on a CPU, interpreted, as they are on a device: attention and sampling too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

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


def _dot_in_order(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
    """The interpreter's tl.dot, of [rows, inputs] by [inputs, outputs]: one input after the other.

    Its own asks numpy, whose BLAS adds in an order that depends on the CPU, on the tile and on a row's place in it.
    """
    from triton.runtime.interpreter import TensorHandle

    left, right, sums = a.data.astype(total.data.dtype), b.data.astype(total.data.dtype), total.data.copy()
    for place in range(left.shape[-1]):
        sums += left[..., place, None] * right[..., place, None, :]
    return TensorHandle(sums, total.dtype.scalar)


@contextmanager
def dots_in_order() -> Iterator[None]:
    """The interpreter's tl.dot gives the same bits on every CPU, whatever a row's company."""
    from triton.runtime.interpreter import InterpreterBuilder

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_dot", _dot_in_order)
        yield
