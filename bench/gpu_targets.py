"""What the GPU is to reach, as data: shares of the limits of the same run, and figures for an H200 (141 GB, 4.8 TB/s).

A figure of another device is shown beside its limit, and judged by its share alone. On a CPU nothing is judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench.gpu_parts import BELOW, OK, Context, Row
from bench.results import Cell

H200 = "H200"


@dataclass(frozen=True, slots=True)
class Target:
    """
    Args:
        least, most: the figure is to be in between; None: that end is open.
        least_share: of the limit.
        is_for_h200: least and most mean something there alone.
    """

    least: float | None = None
    most: float | None = None
    least_share: float | None = None
    is_for_h200: bool = False

    @property
    def shown(self) -> str:
        ends = [f">= {self.least:g}"] if self.least is not None else []
        ends += [f"<= {self.most:g}"] if self.most is not None else []
        if ends and self.is_for_h200:
            ends[-1] += f" on an {H200}"
        return " and ".join(ends + ([f"share >= {self.least_share:g}"] if self.least_share is not None else []))

    def is_met(self, figure: float, share: float | None, device: str) -> bool | None:
        """None: nothing of it means something on this device."""
        found = []
        if self.least_share is not None:
            found.append(share is not None and share >= self.least_share)
        if not self.is_for_h200 or H200 in device:
            found += [figure >= self.least] if self.least is not None else []
            found += [figure <= self.most] if self.most is not None else []
        return all(found) if found else None


SINGLE_STREAM = "single stream, tokens/s"
TAIL_BESIDE_PROMPTS = "inter-token p99 / median beside arriving prompts"
IDLE = "device idle between decode steps, share"
FULL_SERVER = "http, as many clients as have room x 128/1024, tokens/s"
BESIDE_ENGINE = "http / the engine alone, tokens/s of both"
CANCEL_STEPS = "steps from cancel to the last news"
DECODE_ATTENTION = "decode_attention: sequences 64, context 4096, heads 32, kv_heads 8, head_dim 128; bfloat16"


def first_token_of(num_tokens: int) -> str:
    return f"time to first token of {num_tokens}, ms"


# (preset, measure) -> its target; preset "": of every model, and of kernels
TARGETS: Mapping[tuple[str, str], Target] = {
    ("llama-8b", SINGLE_STREAM): Target(least=240, least_share=0.85, is_for_h200=True),
    ("qwen3-0.6b", SINGLE_STREAM): Target(least=1190, is_for_h200=True),
    ("llama-8b", first_token_of(1024)): Target(most=24, is_for_h200=True),
    ("", TAIL_BESIDE_PROMPTS): Target(most=2),
    ("", f"http {TAIL_BESIDE_PROMPTS}"): Target(most=2),
    ("", IDLE): Target(most=0.05),
    ("llama-8b", FULL_SERVER): Target(least_share=0.80),
    ("", BESIDE_ENGINE): Target(least=0.98),
    ("", CANCEL_STEPS): Target(most=1),
    ("", DECODE_ATTENTION): Target(least_share=0.85),
}


def target_of(preset: str, measure: str) -> Target | None:
    return TARGETS.get((preset, measure), TARGETS.get(("", measure)))


def judged(
    context: Context, table: str, model: str, measure: str, figure: float, limit: float | None = None, note: str = ""
) -> Row:
    """A figure's row, beside its limit, its share of that, and its target.

    Args:
        measure: ends with its unit where it has one; of what is given per second the share is figure / limit, of times
            limit / figure.
        limit: that the device's ceilings allow.
    """
    target, share = target_of(model, measure), _share(measure, figure, limit)
    cells: dict[str, Cell] = {"measure": measure, "figure": figure, "limit": limit, "share": share}
    cells["target"] = "" if target is None else target.shown
    is_met = target.is_met(figure, share, device_name(context)) if target is not None and context.is_device else None
    return Row(table, cells, "" if is_met is None else OK if is_met else BELOW, note)


def device_name(context: Context) -> str:
    return torch.cuda.get_device_name(context.device) if context.is_device else "cpu"


def _share(measure: str, figure: float, limit: float | None) -> float | None:
    if limit is None or not figure:
        return None
    return figure / limit if measure.endswith("/s") else limit / figure
