"""Draws rows by the kernel: what gpu/sampler.py calls. Thread: engine."""

import numpy as np
import torch
from torch import Tensor

from gpu.cpu_kernels.sampling import Arguments, sample_rows, scratch_bytes
from gpu.cpu_kernels.team import Kernel
from gpu.sampler import Feature, IntArray, Number, SamplingSlots


class RowSampler:
    """With as many threads as torch has, and there are rows. Not for two threads at once: the arguments are its own.

    A sampler.SampleRows.
    """

    def __init__(self, asked: SamplingSlots) -> None:
        self._asked = asked
        self._kernel, self._arguments = Kernel(sample_rows), Arguments()
        self._scratch = np.empty(0, dtype=np.uint8)

    def __call__(self, logits: Tensor, slots: IntArray, positions: IntArray) -> tuple[Tensor, Tensor]:
        """See SampleRows."""
        asked = self._asked
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        num_threads = max(1, min(torch.get_num_threads(), num_rows))
        needed = num_threads * scratch_bytes(vocab_size)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.uint8)
        slots, positions = np.ascontiguousarray(slots, np.int64), np.ascontiguousarray(positions, np.int64)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        is_finite = torch.empty(num_rows, dtype=torch.bool)
        told = self._arguments
        told.next_piece, told.next_scratch = 0, 0
        told.logits, told.slots, told.positions = logits.data_ptr(), slots.ctypes.data, positions.ctypes.data
        told.numbers, told.factors = asked.numbers.ctypes.data, asked.factors.ctypes.data
        told.addresses = asked.addresses.ctypes.data
        has_penalties = asked.numbers[slots, Number.FEATURES] & Feature.PENALTIES
        told.seen = asked.write_seen().data_ptr() if has_penalties.any() else 0
        told.token_ids, told.is_finite = token_ids.data_ptr(), is_finite.data_ptr()
        told.scratch, told.num_rows, told.vocab_size = self._scratch.ctypes.data, num_rows, vocab_size
        told.num_slots = len(asked.numbers)
        self._kernel(told, num_threads)
        return token_ids, is_finite
