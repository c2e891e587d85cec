"""Mamba-2's mixer beside transformers' on a CPU: `python -m bench.mixers`. It needs `pip install transformers`.

One layer of the preset granite4-h-1b with random weights, bf16, from the hidden state to the hidden state, both matmuls
with it. Prompts begin with no state, decodes go on from one. Implementations take turns, and a ratio is of one turn. By
the CPU time of one thread, so that what else the machine does costs little; memory that others use still does.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.kit import Flag, Found, bench
from bench.load import CannotRun
from bench.make_model import GRANITE4_H_1B
from bench.results import Cell, table_of
from bench.speculative import interval
from core.config_json import parse_model_config
from gpu.parameters import RecurrentWeights
from gpu.recurrence import Recurrence, RecurrentRows, Run, States, make_recurrence

CONFIG = parse_model_config(GRANITE4_H_1B)
SECONDS_A_TURN = 0.1


class Mixer:
    """Ours: the layer of transformers, with another recurrence between its matmuls."""

    def __init__(self, theirs: Any, recurrence: Recurrence, num_decodes: int, num_tokens: int) -> None:
        assert CONFIG.recurrence is not None
        self._theirs, self._recurrence = theirs, recurrence
        self._states = States(CONFIG, max(1, num_decodes), 0, torch.bfloat16, torch.device("cpu"))
        self._num_decodes, self._num_tokens = num_decodes, num_tokens

    def __call__(self, x: Tensor) -> Tensor:
        rows = RecurrentRows(self._states, [] if self._num_decodes else [Run(0, self._num_tokens, 0, 2, 1, [])])
        places = list(range(self._num_decodes))
        if places:
            rows.add_wave(slice(0, len(places)), places, [2 * one for one in places], [2 * one + 1 for one in places])
        mixed = self._recurrence(linear(x, self._theirs.in_proj.weight), rows, 0)
        return linear(mixed, self._theirs.out_proj.weight)


def measure(arguments: argparse.Namespace) -> Found:
    try:
        from transformers import DynamicCache, GraniteMoeHybridConfig
        from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

        from gpu.cpu_kernels.recurrence import KINDS
    except ImportError as error:
        raise CannotRun(f"{error.name} is not here", "pip install transformers numba") from error
    assert CONFIG.recurrence is not None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(**{k: v for k, v in GRANITE4_H_1B.items() if k not in ("architectures", "dtype")})
    rows = list[dict[str, Cell]]()
    with torch.inference_mode():
        layer = GraniteMoeHybridMambaLayer(config, 0).bfloat16().eval()
        weights = RecurrentWeights(
            layer.conv1d.weight.float().squeeze(1).T.contiguous(),
            layer.conv1d.bias,
            layer.A_log.float(),
            layer.dt_bias.float(),
            layer.norm.weight.float(),
            layer.D.float(),
        )
        ours = {
            "kernel": KINDS["mamba"](CONFIG.recurrence, weights),
            "torch": make_recurrence(CONFIG.recurrence, weights),
        }
        for num_decodes, num_tokens in ((0, arguments.prompt), *((one, one) for one in arguments.decodes)):
            x = torch.randn(num_tokens, CONFIG.hidden_size).bfloat16()
            turns: dict[str, Callable[[], Tensor]] = {
                name: partial(Mixer(layer, one, num_decodes, num_tokens), x) for name, one in ours.items()
            }
            cache = None
            if num_decodes:
                cache = DynamicCache(config=config)
                layer(torch.randn(num_decodes, 20, CONFIG.hidden_size).bfloat16(), cache_params=cache)
            turns["transformers"] = partial(layer, x.unsqueeze(1 if num_decodes else 0), cache_params=cache)
            rows += _row(f"{num_decodes} decodes" if num_decodes else f"prompt of {num_tokens}", turns, arguments.pairs)
    return Found((table_of("A mixer layer of granite4-h-1b, bf16, one thread, CPU time", rows),), {})


def _row(work: str, turns: dict[str, Callable[[], Tensor]], num_pairs: int) -> list[dict[str, Cell]]:
    first_s = {name: _took_s(turn, 1) for name, turn in turns.items()}  # warms up
    first_s = {name: _took_s(turn, 1) for name, turn in turns.items()}
    counts = {name: max(1, round(SECONDS_A_TURN / took_s)) for name, took_s in first_s.items()}
    took = [{name: _took_s(turn, counts[name]) for name, turn in turns.items()} for _ in range(num_pairs)]
    ratios = [one["transformers"] / one["kernel"] for one in took]
    low, high = interval(ratios)
    each = {f"{name}, ms": statistics.median(one[name] for one in took) * 1e3 for name in turns}
    return [{"work": work, **each, "transformers / kernel": statistics.median(ratios), "from": low, "to": high}]


def _took_s(turn: Callable[[], Tensor], count: int) -> float:
    began_s = time.thread_time()
    for _ in range(count):
        turn()
    return (time.thread_time() - began_s) / count


FLAGS = (
    Flag("--prompt", 512, "tokens", quick=40),
    Flag("--decodes", (1, 8, 32), "rows of a step", quick=(1,), more={"nargs": "+", "type": int}),
    Flag("--pairs", 15, "of turns", quick=2),
)
main = bench("mixers", __doc__, measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
