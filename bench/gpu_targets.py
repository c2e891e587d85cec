"""What the GPU is to reach, as data: shares of the limits of the same run, and figures for an H200 (141 GB, 4.8 TB/s).

A figure of another device is shown beside its limit, and judged by its share alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """
    Args:
        least, most: the figure is to be in between; None: that end is open.
        is_for_h200: it means something there alone.
    """

    least: float | None = None
    most: float | None = None
    is_for_h200: bool = False

    @property
    def shown(self) -> str:
        ends = [f">= {self.least:g}"] if self.least is not None else []
        return " and ".join(ends + ([f"<= {self.most:g}"] if self.most is not None else []))

    def is_met(self, figure: float) -> bool:
        return (self.least is None or figure >= self.least) and (self.most is None or figure <= self.most)


# (preset, measure) -> its target; preset "": of every model
TARGETS: dict[tuple[str, str], Target] = {
    ("llama-8b", "single stream, share of limit"): Target(least=0.85),
    ("llama-8b", "single stream, tokens/s"): Target(least=240, is_for_h200=True),
    ("qwen3-0.6b", "single stream, tokens/s"): Target(least=1190, is_for_h200=True),
    ("llama-8b", "time to first token of 1024, ms"): Target(most=24, is_for_h200=True),
    ("", "inter-token p99 / median beside arriving prompts"): Target(most=2),
    ("", "device idle between decode steps, share"): Target(most=0.05),
    ("llama-8b", "http 512 x 128/1024, share of limit"): Target(least=0.80),
    ("", "http beside the engine alone, share"): Target(least=0.98),
    ("", "steps from cancel to the last news"): Target(most=1),
}


def target_of(preset: str, measure: str) -> Target | None:
    return TARGETS.get((preset, measure), TARGETS.get(("", measure)))
