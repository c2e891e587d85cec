"""Rotary position embedding as a configuration asks for it, reduced to what does not depend on a sequence's length.

Here the angle of a token is a function of its position alone: what was computed for it stays right as its sequence
grows. Two kinds of transformers choose their frequencies by the length of the whole sequence, anew at every step;
of these is served what agrees with a fixed choice: "dynamic" is the plain embedding up to max_position_embeddings,
and "longrope" uses its short factors up to original_max_position_embeddings, where the context then ends. Any thread.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config_fields import bad_field, positive_float, positive_int, read_bool, unsupported_field

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Args:
        kind: "default", "linear" (positions divided by factor), "llama3" (low frequencies divided by factor), "yarn"
            (the same with another blend) or "longrope" (each frequency divided by its own factor).
        factor, low_freq_factor, high_freq_factor: of "linear", "llama3" and "yarn".
        original_max_position: tokens of context before it was stretched.
        beta_fast, beta_slow: turns within the original context, above and below which "yarn" keeps and divides.
        is_truncated: whether "yarn" rounds its bounds to whole dimensions.
        factors: of "longrope", one per frequency.
        attention_factor: what the turned q and k are multiplied by, each.
        partial: the part of each head that turns, its first dimensions.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    partial: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.partial)


def parse_rope(
    config: Mapping[str, Any], given: Mapping[str, Any], max_position: int, head_dim: int, is_phi: bool = False
) -> RopeConfig:
    """Understand one rope configuration, in the spelling of transformers 5 or an earlier one.

    Args:
        config: the whole config.json, for what stands beside.
        given: rope_theta and what scales it.
        is_phi: Phi-3 says "su" and "yarn" for what came to be called "longrope".
    Source: transformers 5, modeling_rope_utils.py.
    """
    kind = given.get("rope_type", given.get("type", "default"))
    if is_phi and kind in ("su", "yarn"):
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise unsupported_field("rope_type", kind, ROPE_KINDS)
    theta = positive_float(given, "rope_theta")
    partial = positive_float(given, "partial_rotary_factor", 1.0)
    if partial > 1 or int(head_dim * partial) % 2 or int(head_dim * partial) == 0:
        raise bad_field(f"partial_rotary_factor={partial} of head_dim={head_dim} is not a number of pairs.")
    if kind in ("default", "dynamic"):
        return RopeConfig(theta, partial=partial)
    if kind == "linear":
        return RopeConfig(theta, kind, positive_float(given, "factor"), partial=partial)
    beside = config.get("original_max_position_embeddings")  # Phi-3's place for it; goes first
    merged = given if beside is None else {**given, "original_max_position_embeddings": beside}
    original = positive_int(merged, "original_max_position_embeddings", max_position)
    if kind == "llama3":
        return _llama3(merged, theta, original, partial)
    if kind == "yarn":
        return _yarn(merged, theta, original, partial, max_position)
    return _longrope(merged, theta, original, partial, max_position, head_dim)


def _llama3(given: Mapping[str, Any], theta: float, original: int, partial: float) -> RopeConfig:
    low, high = positive_float(given, "low_freq_factor"), positive_float(given, "high_freq_factor")
    if not low < high:
        raise bad_field(f"rope: low_freq_factor={low} is not below high_freq_factor={high}.")
    return RopeConfig(theta, "llama3", positive_float(given, "factor"), low, high, original, partial=partial)


def _yarn(given: Mapping[str, Any], theta: float, original: int, partial: float, max_position: int) -> RopeConfig:
    """Source: YaRN (arXiv:2309.00071), section 3.4 for the attention factor."""
    factor = positive_float(given, "factor", max_position / original)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        attention_factor = magnitude(positive_float(given, "mscale")) / magnitude(
            positive_float(given, "mscale_all_dim")
        )
    fast, slow = positive_float(given, "beta_fast", 32.0), positive_float(given, "beta_slow", 1.0)
    if fast < slow:
        raise bad_field(f"rope: beta_fast={fast} is below beta_slow={slow}.")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=read_bool(given, "truncate", True),
        attention_factor=positive_float(given, "attention_factor", attention_factor),
        partial=partial,
    )


def _longrope(
    given: Mapping[str, Any], theta: float, original: int, partial: float, max_position: int, head_dim: int
) -> RopeConfig:
    """Source: LongRoPE (arXiv:2402.13753), of which only the short factors are used."""
    factors, num_factors = given.get("short_factor"), int(head_dim * partial) // 2
    if not isinstance(factors, list) or len(factors) != num_factors:
        raise bad_field(f"rope: short_factor is not a list of {num_factors} numbers.")
    short = tuple(positive_float({"short_factor": factor}, "short_factor") for factor in factors)
    factor = positive_float(given, "factor", max_position / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_position=original,
        factors=short,
        attention_factor=positive_float(given, "attention_factor", attention_factor),
        partial=partial,
    )
