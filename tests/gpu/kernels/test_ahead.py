"""Kernels are compiled for a device, in the formats and shapes that serve, without one."""

import pytest

from tests.gpu.kernels.ahead import Compiled, assert_fits, compile_ahead
from tests.gpu.kernels.ahead_cases import (
    attention_cases,
    elementwise_cases,
    expert_cases,
    product_cases,
    row_cases,
    sampling_cases,
)

ATTENTION, SAMPLING = attention_cases(), sampling_cases()
CASES = [*ATTENTION, *elementwise_cases(), *product_cases(), *expert_cases(), *row_cases(), *SAMPLING]
# A number or two, used once, may lie aside where registers are so few that more programs share a multiprocessor.
MOST_STACK_BYTES = 16


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_ahead(CASES, tmp_path_factory.mktemp("ahead"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_they_compile_for_a_device_and_keep_their_numbers_in_registers(index: int, compiled: list[Compiled]) -> None:
    assert_fits(compiled[index], MOST_STACK_BYTES if index < len(ATTENTION) else 0)


def test_sampling_rounds_every_operation(compiled: list[Compiled]) -> None:
    for found in compiled[-len(SAMPLING) :]:
        assert (found.num_fused, found.num_near_divisions) == (0, 0)
