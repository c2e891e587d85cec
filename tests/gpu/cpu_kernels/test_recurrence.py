"""The kernels of gated delta nets and state spaces beside torch's operators: the same outputs and states."""

from dataclasses import replace

import pytest
import torch

from core.config import RecurrentConfig
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from gpu.memory_plan import recurs_in_place
from gpu.parameters import RecurrentWeights
from gpu.recurrence import LayerStates, Recurrence, RecurrentRows, Run, States, make_recurrence
from tests.gpu.operator_cases import noise

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.recurrence import KINDS, can_compute

NUM_STATES, TAPS = 12, 4
SHAPES = [(1, 1, 16, 32), (2, 4, 32, 64), (3, 3, 48, 32)]  # key heads, heads, key_dim, value_dim


def config_of(kind: str, key_heads: int, heads: int, key_dim: int, value_dim: int) -> RecurrentConfig:
    channels = 2 * key_heads * key_dim + heads * value_dim
    return RecurrentConfig(kind, TAPS, channels, heads, key_heads, key_dim, value_dim, has_convolution_bias=True)


CONFIGS = [config_of(kind, *shape) for kind in ("linear_attention", "mamba") for shape in SHAPES]
CONFIGS += [replace(CONFIGS[4], **changes) for changes in ({"has_norm": False}, {"is_normed_first": True})]
CONFIGS += [replace(CONFIGS[1], is_tiled=True)]


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv"])
def test_the_plan_of_memory_knows_what_the_kernels_compute(kind: str) -> None:
    found = [config_of(kind, 1, 1, key_dim, value_dim) for key_dim in (8, 16, 128) for value_dim in (16, 32, 64, 96)]
    assert [recurs_in_place(one) for one in found] == [can_compute(one) for one in found]


def nets_of(config: RecurrentConfig) -> tuple[Recurrence, Recurrence]:
    """Torch's and the kernel's."""
    heads, is_mamba = config.num_heads, config.kind == "mamba"
    norm = noise(config.output_size if is_mamba else config.value_dim) if config.has_norm else None
    weights = RecurrentWeights(
        *(noise(TAPS, config.channels), noise(config.channels, seed=5) if is_mamba else None),
        *(noise(heads), noise(heads, seed=1), norm, noise(heads, seed=6) if is_mamba else None),
    )
    return make_recurrence(config, weights), KINDS[config.kind](config, weights)


class Layer(States):
    """One layer's states, of noise."""

    def __init__(self, config: RecurrentConfig) -> None:
        inputs = noise(NUM_STATES, TAPS - 1, config.channels, seed=2).bfloat16()
        self.layers = [LayerStates(inputs, noise(NUM_STATES, *config.memory_shape, seed=3))]


def rows_of(states: States, runs: list[Run], *waves: tuple[list[int], list[int], list[int]]) -> RecurrentRows:
    """waves: tokens, states read, states written."""
    rows = RecurrentRows(states, runs)
    for tokens, reads, writes in waves:
        rows.add_wave(torch.tensor(tokens), tokens, reads, writes)
    return rows


def step_of(states: States) -> RecurrentRows:
    """Two sequences' own tokens, the second's two, and prompts: whole, from within a block, short, and in two runs."""
    runs = [
        Run(3, 53, 0, 0, 1, [(16, 8), (48, 9)]),
        Run(53, 65, 20, 2, 3, [(32, 10)]),
        Run(65, 67, 32, 4, 5, []),
        Run(67, 83, 16, 11, 6, []),
        Run(83, 84, 32, 6, 6, []),
    ]
    return rows_of(states, runs, ([0, 1], [7, 3], [2, 3]), ([2], [3], [3]))


@pytest.fixture(params=[1, 2], autouse=True, ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.cpu_kernels.recurrence.NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_outputs_and_states_are_torchs(config: RecurrentConfig) -> None:
    torchs, kernels = nets_of(config)
    x = noise(84, config.input_size, seed=4).bfloat16()
    want_states, got_states = Layer(config), Layer(config)
    want, got = (net(x, step_of(states), 0) for net, states in ((torchs, want_states), (kernels, got_states)))
    assert torch.allclose(got.float(), want.float(), rtol=2**-6, atol=0.02)
    (want_layer,), (got_layer,) = want_states.layers, got_states.layers
    assert torch.equal(got_layer.inputs, want_layer.inputs)
    assert torch.allclose(got_layer.memory, want_layer.memory, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[4], CONFIGS[-1]], ids=str)
def test_bits_depend_on_neither_chunks_nor_company(config: RecurrentConfig) -> None:
    _, net = nets_of(config)
    x = noise(84, config.input_size, seed=4).bfloat16()
    together = Layer(config)
    crowd = net(x, step_of(together), 0)
    alone = Layer(config)
    parts = [(3, 35, 0, 0, 1), (35, 51, 32, 1, 8), (51, 53, 48, 8, 1)]
    out = torch.cat([net(x[a:b], rows_of(alone, [Run(0, b - a, start, *to, [])]), 0) for a, b, start, *to in parts])
    assert torch.equal(out, crowd[3:53])
    own = net(x[:1], rows_of(alone, [], ([0], [7], [2])), 0)
    assert torch.equal(own, crowd[:1])
    for state in (1, 2):
        assert torch.equal(alone.layers[0].memory[state], together.layers[0].memory[state])
        assert torch.equal(alone.layers[0].inputs[state], together.layers[0].inputs[state])
