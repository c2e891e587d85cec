"""What the kernels are written with."""

import numba
import numpy as np

from gpu.cpu_kernels.vectors import keep


def test_an_array_that_is_kept_is_not_freed_while_its_address_is_used() -> None:
    """Without keep, numba frees it after its last use: the next of its size lies there."""

    @numba.njit
    def lies_elsewhere(size: int) -> bool:
        array = np.empty(size, dtype=np.uint8)
        address = array.ctypes.data
        is_elsewhere = True
        for _ in range(4):
            other = np.empty(size, dtype=np.uint8)
            is_elsewhere = is_elsewhere and other.ctypes.data != address
            other[0] = 1
        keep(array)
        return is_elsewhere

    assert all(lies_elsewhere(size) for size in (64, 1000, 30_000, 1_000_000))
