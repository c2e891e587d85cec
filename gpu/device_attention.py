"""Attention on a device that has two kernels for it: which of them serves decodes, and which prompts.

Measured at start on the model's own cache, and kept per device and versions. Triton's rounds a row the same in any
company: another one serves only where it is faster by LEAST_GAIN. Thread: engine (choosing at start).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import TILE_TOKENS, AttentionKernels, RaggedRows
from gpu.device_products import machine_name
from gpu.kv_cache import LayerKV
from gpu.measured_file import measured_file, read_kept, write_kept
from gpu.scores import PLAIN, Scores
from gpu.streams import NEVER_S, Timer, graph_seconds, seconds_or_never

Shape = tuple[int, int, int]

LEAST_GAIN = 1.2
# Rows, their context and their new tokens, each so far as the cache has blocks; on the geometric mean.
MEASURED_DECODES = ((1, 1024, 1), (16, 1024, 1), (64, 512, 1), (4, 8192, 1))
MEASURED_EXTENDS = ((1, 2048, 2048), (4, 512, 512), (1, 8192, 1024))


KERNELS, FLASH = "Triton's kernel", "torch's FlashAttention"


@dataclass(frozen=True, slots=True)
class Attends:
    """Who does, in steps of decodes alone and in others: KERNELS or FLASH."""

    decodes: str = KERNELS
    extends: str = KERNELS

    def __str__(self) -> str:
        return f"decodes by {self.decodes}, prompts by {self.extends}"


class DeviceKernels(AttentionKernels, Protocol):
    """AttentionKernels that keep what splits of a context have found."""

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """Have room for so many rows of such a context, so that it never grows. kv: a layer's."""
        ...


class Alternative(AttentionKernels, Protocol):
    """AttentionKernels that know some steps alone."""

    def can_attend(self, query: Tensor, rows: RaggedRows, scores: Scores) -> bool: ...


class DeviceAttention:
    """AttentionKernels: of several, whichever is chosen for a step's kind.

    Args:
        kernels: serve everywhere.
        flash: torch's FlashAttention, which may serve what it knows; None: it is not here.
        clock: what measures.
    """

    index_dtype = torch.int32
    are_own_tokens_alone = False
    prompt_tile = TILE_TOKENS

    def __init__(self, kernels: DeviceKernels, flash: Alternative | None = None, clock: Timer = graph_seconds) -> None:
        self.kernels = kernels
        self.attends = Attends()
        self._flash = flash
        self._clock = clock

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        chosen = self.attends.decodes if _are_decodes(rows) else self.attends.extends
        if chosen == FLASH and self._flash is not None and self._flash.can_attend(query, rows, scores):
            return self._flash.attend(query, kv, rows, scores)
        return self.kernels.attend(query, kv, rows, scores)

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """See DeviceKernels."""
        self.kernels.reserve(num_decodes, context, num_heads, kv)

    def choose(self, kv: LayerKV, num_heads: int) -> Attends:
        """As measured at an earlier start, or now. kv: a layer's, of any content: it is read alone."""
        path, machine = measured_file("attention.json"), machine_name(kv.keys.device)
        name = heads_name(num_heads, kv.keys.shape[1], kv.keys.shape[2], kv.keys.dtype)
        known = read_kept(path, _checked)
        here = known.setdefault(machine, {})
        if name not in here:
            here[name] = Attends(
                self._fastest(kv, num_heads, MEASURED_DECODES),
                self._fastest(kv, num_heads, MEASURED_EXTENDS),
            )
            write_kept(path, {at: {of: asdict(found) for of, found in kept.items()} for at, kept in known.items()})
        self.attends = here[name]
        return self.attends

    def _fastest(self, kv: LayerKV, num_heads: int, shapes: Sequence[Shape]) -> str:
        """FlashAttention where it is faster by enough."""
        num_tokens = kv.both.shape[1] * BLOCK_SIZE
        fitting = [shape for shape in shapes if shape[0] * shape[1] <= num_tokens]
        is_faster = self._flash is not None and self._gain(self._flash, kv, num_heads, fitting) > LEAST_GAIN
        return FLASH if is_faster else KERNELS

    def _gain(self, flash: Alternative, kv: LayerKV, num_heads: int, shapes: Sequence[Shape]) -> float:
        """How many times as fast as the kernels it is: the geometric mean over what it knows of the shapes.

        One that fails, or knows none, is the slower.
        """
        device, gains = kv.keys.device, []
        for num_rows, context, num_new in shapes:
            rows = _even_rows(num_rows, context, num_new, device)
            query = kv.keys.new_zeros(num_rows * num_new, num_heads, kv.keys.shape[2])
            if not flash.can_attend(query, rows, PLAIN):
                continue
            kernels_s = seconds_or_never(
                self._clock, partial(self.kernels.attend, query, kv, rows, PLAIN), KERNELS, device
            )
            flash_s = seconds_or_never(self._clock, partial(flash.attend, query, kv, rows, PLAIN), FLASH, device)
            if flash_s == NEVER_S:
                return 0.0
            gains.append(kernels_s / flash_s)
        return math.prod(gains) ** (1 / len(gains)) if gains else 0.0


def heads_name(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """Of a model's, as they are kept."""
    return f"{num_heads} / {num_kv_heads} heads of {head_dim}, {str(dtype)[6:]}"


def attention_here(device: torch.device) -> Mapping[str, Attends]:
    """What is known of this device: by heads_name."""
    return read_kept(measured_file("attention.json"), _checked).get(machine_name(device), {})


def _are_decodes(rows: RaggedRows) -> bool:
    return rows.num_decodes == len(rows.ends)


def _even_rows(num_rows: int, context: int, num_new: int, device: torch.device) -> RaggedRows:
    blocks = torch.arange(num_rows * context // BLOCK_SIZE, dtype=torch.int32, device=device)
    return RaggedRows(
        tables=blocks.view(num_rows, -1),
        ends=torch.full((num_rows,), context, dtype=torch.int32, device=device),
        offsets=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_new,
        num_decodes=num_rows if num_new == 1 else 0,
        window=None,
    )


def _checked(found: Any) -> Attends:
    """
    Raises:
        ValueError, TypeError, KeyError: it is not what Attends holds.
    """
    decodes, extends = found["decodes"], found["extends"]
    if not {decodes, extends} <= {KERNELS, FLASH}:
        raise ValueError("none of them")
    return Attends(decodes, extends)
