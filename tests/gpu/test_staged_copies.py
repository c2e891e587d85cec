"""Copies through two pinned buffers arrive as they were sent, however late a device is; exactly so much is pinned."""

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from core.config_json import parse_model_config
from gpu.checkpoint import open_checkpoint
from gpu.parameters import ModelWeights, Target
from gpu.streams import BUFFER_BYTES, StagedCopies, fill_on, pinned_for_good, staged_bytes
from tests.gpu.conftest import load_whole, no_progress
from tests.gpu.late_streams import LateStreams
from tests.gpu.test_weights import every_tensor
from tests.oracle import read_config

CPU = torch.device("cpu")
BUFFER = 4096


def load(directory: Path, dtype: torch.dtype, streams: LateStreams | None) -> ModelWeights:
    fill = Target.fill if streams is None else StagedCopies(streams, BUFFER).fill
    config = parse_model_config(read_config(directory))
    weights = load_whole(open_checkpoint(directory), config, dtype, CPU, no_progress, fill=fill)
    if streams is not None:
        streams.finish()
    return weights


def staged(streams: LateStreams, tensor: Tensor, **target: object) -> Tensor:
    into = torch.zeros(tensor.shape, dtype=torch.bfloat16)
    StagedCopies(streams, BUFFER).fill(Target(into, **target), tensor)
    return into


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_family_has_the_parameters_that_it_has_without(
    family: str, dtype: torch.dtype, model_directory: Callable[[str], Path]
) -> None:
    streams = LateStreams()
    got = load(model_directory(family), dtype, streams)
    want = load(model_directory(family), dtype, None)
    for one, other in zip(every_tensor(got), every_tensor(want), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    assert streams.current.num_late == streams.side.num_late == 0


def test_each_row_is_copied_once_and_never_more_than_two_buffers_are_held() -> None:
    streams, tensor = LateStreams(), torch.randn(33, 256)  # 4 rows at once
    into = staged(streams, tensor)
    assert streams.side.num_started == 9
    assert streams.current.num_started == 9 + 1  # and what is done to all rows together
    assert streams.pinned_bytes == streams.device_bytes == [BUFFER, BUFFER]
    streams.finish()
    assert torch.equal(into, tensor.bfloat16())


def test_the_host_reads_ahead_of_the_device_by_as_many_slices_as_there_are_buffers() -> None:
    streams = LateStreams()
    staged(streams, torch.randn(33, 256))
    copies_late = (streams.side.num_late + 1) // 2  # but for the first two, each after a wait
    assert copies_late == 2


def test_what_a_row_needs_of_others_is_done_once_all_are_there() -> None:
    streams, tensor = LateStreams(), torch.arange(64.0).unsqueeze(1).expand(64, 256).contiguous()
    into = staged(streams, tensor, head_dim=32, num_reordered=32, offset=1.0)
    streams.finish()
    want = torch.empty(64, 256, dtype=torch.bfloat16)
    Target(want, head_dim=32, num_reordered=32, offset=1.0).fill(tensor)
    assert torch.equal(into, want)


def test_a_row_that_is_larger_than_a_buffer_makes_both_larger() -> None:
    streams, tensor = LateStreams(), torch.randn(5, BUFFER)
    copies = StagedCopies(streams, BUFFER)
    first, last = torch.zeros(4, 4), torch.zeros_like(tensor)
    copies.fill(Target(first), torch.ones(4, 4))
    copies.fill(Target(last), tensor)
    streams.finish()
    assert torch.equal(first, torch.ones(4, 4))
    assert torch.equal(last, tensor)
    assert streams.pinned_bytes == [BUFFER, BUFFER, 4 * BUFFER, 4 * BUFFER]


def test_bytes_are_written_by_the_targets_own_way_a_slice_at_a_time() -> None:
    seen: list[tuple[int, ...]] = []

    def write(into: Tensor, rows: Tensor) -> None:
        seen.append(tuple(rows.shape))
        into.copy_(rows.flip(1))

    streams, tensor = LateStreams(), torch.randint(0, 255, (10, 1000), dtype=torch.uint8)
    into = staged(streams, tensor, write=write)
    streams.finish()
    assert seen == [(4, 1000), (4, 1000), (2, 1000)]
    assert torch.equal(into, tensor.flip(1).bfloat16())


def test_a_cpu_is_filled_from_the_files_themselves() -> None:
    assert fill_on(CPU) is Target.fill
    assert staged_bytes(CPU) == 0
    assert staged_bytes(torch.device("cuda")) == 2 * BUFFER_BYTES


def int32(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_each_step_reads_its_own_integers_however_late_the_device_is() -> None:
    streams, found = LateStreams(), []
    copies = StagedCopies(streams, 32)
    for step in range(7):
        parts = (np.full((2, 2), step, np.int32), int32(), int32(*range(step % 4)))
        copies.send_integers(parts, lambda parts: found.append([part.tolist() for part in parts]))
        assert len(found) <= max(0, step - 1)  # the host waits for no copy but that of two steps ago
    streams.finish()
    assert found == [[[step] * 4, [], list(range(step % 4))] for step in range(7)]
    assert (streams.pinned_bytes, streams.device_bytes) == ([32, 32], [32, 32])  # nothing is allocated on the way
    assert streams.side.num_started == 7


def test_a_step_that_brings_more_is_one_copy_too_and_what_was_enlarged_stays_so() -> None:
    streams, found = LateStreams(), []
    copies = StagedCopies(streams, 8)
    sizes = [1, 9, 2, 3, 16, 8]
    for size in sizes:
        copies.send_integers((np.full(size, size, np.int32),), lambda parts: found.append(parts[0].tolist()))
    streams.finish()
    assert found == [[size] * size for size in sizes]
    assert streams.side.num_started == len(sizes)
    assert streams.pinned_bytes == streams.device_bytes == [8, 8, 64, 64]


class Cudart:
    """Notes what it is asked to pin, and says no where there is more than it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
        self.pinned: list[tuple[int, int, int]] = []
        self._room_bytes = room_bytes
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self.pinned.append((address, size_bytes, flags))
        return 0 if size_bytes <= self._room_bytes else 2

    def check(self, error: int) -> None:
        if error:
            raise RuntimeError("out of memory (2)")


def test_as_much_is_pinned_as_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(monkeypatch, room_bytes=1 << 30)
    size_bytes = 5 * 2**20 + 24  # torch's own allocator makes 8 MiB of it
    memory = pinned_for_good(size_bytes)
    assert cudart.pinned == [(memory.data_ptr(), size_bytes, 0)]
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    assert memory.fill_(7).sum() == 7 * size_bytes


def test_that_it_cannot_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Cudart(monkeypatch, room_bytes=100)
    with pytest.raises(RuntimeError, match="out of memory"):
        pinned_for_good(101)
