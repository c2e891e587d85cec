"""What the host sends up once a step arrives as it was, however late a device copies and reads it."""

import numpy as np
import torch

from gpu.uploads import Uploads
from tests.gpu.late_streams import LateStreams


def int32(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_each_step_reads_its_own_however_late_the_device_is() -> None:
    streams, found = LateStreams(), []
    uploads = Uploads(streams, room=8)

    def use(parts: list[torch.Tensor]) -> None:
        found.append([part.tolist() for part in parts])

    for step in range(7):
        uploads.send((np.full((2, 2), step, np.int32), int32(), int32(*range(step % 4))), use)
    streams.finish()
    assert found == [[[step] * 4, [], list(range(step % 4))] for step in range(7)]


def test_nothing_is_allocated_on_the_way_and_a_step_is_one_copy() -> None:
    streams = LateStreams()
    uploads = Uploads(streams, room=8)
    for _ in range(5):
        uploads.send((int32(1, 2), int32(3)), lambda parts: None)
    streams.finish()
    assert (streams.pinned_bytes, streams.device_bytes) == ([32, 32], [32, 32])
    assert streams.side.num_started == 5


def test_the_host_waits_for_no_copy_but_that_of_two_steps_ago() -> None:
    streams, found = LateStreams(), []
    uploads = Uploads(streams, room=4)
    for _ in range(2):
        uploads.send((int32(1),), lambda parts: found.append(parts[0].tolist()))
    assert found == []
    assert streams.side.num_late > 0


def test_a_step_that_brings_more_is_one_copy_too_and_what_was_enlarged_stays_so() -> None:
    streams, found = LateStreams(), []
    uploads = Uploads(streams, room=2)
    sizes = [1, 9, 2, 3, 16, 8]
    for size in sizes:
        uploads.send((np.full(size, size, np.int32),), lambda parts: found.append(parts[0].tolist()))
    streams.finish()
    assert found == [[size] * size for size in sizes]
    assert streams.side.num_started == len(sizes)
    assert streams.pinned_bytes == streams.device_bytes == [8, 8, 64, 64]
