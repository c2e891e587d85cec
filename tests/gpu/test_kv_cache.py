"""Content of blocks: copied, cleared and mended whole, others untouched; sizes."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from core.config import EngineConfig, LatentConfig, ModelConfig
from core.config_json import parse_model_config
from core.errors import StartupError
from gpu.device import DeviceChoice
from gpu.kv_cache import (
    INT8,
    KVCache,
    bytes_per_block,
    bytes_per_token,
    copy_blocks,
    kv_dtype_of,
    num_blocks_for,
)

CONFIG: ModelConfig = parse_model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 12,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
)


@pytest.fixture
def cache() -> KVCache:
    """Block b holds b + 1 everywhere, scratch 0."""
    made = KVCache(CONFIG, 5, torch.float32, torch.device("cpu"))
    for block in range(5):
        made.tensors[0][:, :, block] = block + 1
    return made


def contents(cache: KVCache) -> list[float]:
    """The one value of each block."""
    per_block = cache.tensors[0].transpose(0, 2).flatten(1)
    assert (per_block == per_block[:, :1]).all()
    return per_block[:, 0].tolist()


def test_a_new_cache_is_zero_and_has_a_scratch_block() -> None:
    cache = KVCache(CONFIG, 5, torch.bfloat16, torch.device("cpu"))
    assert cache.tensors[0].shape == (3, 2, 6, 16, 2, 2)
    assert cache.tensors[0].dtype == torch.bfloat16
    assert not cache.tensors[0].any()
    assert cache.scratch_block == 5


def test_copied_blocks_are_equal_in_all_layers(cache: KVCache) -> None:
    copy_blocks(cache.tensors[0], torch.tensor([0, 3]), torch.tensor([4, 1]))
    assert contents(cache) == [1, 4, 3, 4, 1, 0]


def test_make_finite_leaves_finite_values_alone(cache: KVCache) -> None:
    cache.tensors[0][1, 0, 2, 5, 0, 0], cache.tensors[0][0, 1, 2, 6, 1, 1] = math.nan, -math.inf
    cache.make_finite(torch.tensor([2]))
    assert cache.tensors[0][1, 0, 2, 5, 0].tolist() == [0, 3]
    assert cache.tensors[0][0, 1, 2, 6, 1].tolist() == [3, 0]
    assert cache.tensors[0][:, :, 3].eq(4).all()


def test_layer_views_share_the_caches_memory(cache: KVCache) -> None:
    cache.layers[2].values[3 * 16 + 7] = 9
    assert cache.tensors[0][2, 1, 3, 7].eq(9).all()
    assert cache.layers[2].both[1, 3, 7].eq(9).all()


def test_sizes_count_keys_and_values_of_all_layers() -> None:
    assert bytes_per_token(CONFIG, torch.bfloat16) == 2 * 3 * 2 * 2 * 2
    assert bytes_per_block(CONFIG, torch.float32) == 16 * 2 * 3 * 2 * 2 * 4


def test_blocks_for_tokens_round_up() -> None:
    assert [num_blocks_for(n) for n in (1, 16, 17, 32)] == [1, 1, 2, 2]


@pytest.mark.parametrize("is_paired", [False, True])
def test_8_bits_are_near_the_numbers_and_half_their_bytes(is_paired: bool) -> None:
    cache = KVCache(CONFIG, 5, INT8, torch.device("cpu"), is_paired=is_paired)
    assert bytes_per_block(CONFIG, INT8) == cache.tensors[0][:, :, 0].numel() == 16 * 3 * 2 * 2 * (2 + 4)
    keys, values = torch.randn(2, 40, 2, 2, generator=torch.Generator().manual_seed(0))
    cache.layers[1].write(torch.arange(7, 47), keys, values)
    found = cache.layers[1].read(torch.tensor([[0, 1, 2]]), torch.float32)
    for got, want in zip(found, (keys, values), strict=True):
        error = (got[0].transpose(0, 1)[7:47] - want).abs()
        assert (error <= want.abs().amax(-1, keepdim=True) / 253).all()
    copy_blocks(cache.tensors[0], torch.tensor([0]), torch.tensor([4]))
    copied = cache.layers[1].read(torch.tensor([[4]]), torch.float32)
    assert all(torch.equal(one[:, :, :16], other) for one, other in zip(found, copied, strict=True))
    cache.layers[1].write(torch.tensor([3]), torch.full((1, 2, 2), math.nan), torch.full((1, 2, 2), math.inf))
    assert not any(part.isfinite().all() for part in cache.layers[1].read(torch.tensor([[0]]), torch.float32))
    cache.make_finite(torch.tensor([0]))
    mended = cache.layers[1].read(torch.tensor([[0]]), torch.float32)
    for got, want in zip(mended, found, strict=True):
        assert not got[0, :, 3].any()
        assert torch.equal(got[0, :, 4:], want[0, :, 4:16])


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"head_dim": 3}, "heads of 3"), ({"latent": LatentConfig(8, 0, 4, 4, 4)}, "latent")],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_8_bits_are_refused_by_name(changes: dict[str, Any], device: str, cause: str) -> None:
    choice = DeviceChoice(torch.device(device), "", torch.bfloat16, "", 1, "")
    with pytest.raises(StartupError, match=cause):
        kv_dtype_of(dataclasses.replace(CONFIG, **changes), EngineConfig(kv_dtype="int8"), choice)
    assert kv_dtype_of(CONFIG, EngineConfig(), choice) == torch.bfloat16
    assert kv_dtype_of(CONFIG, EngineConfig(kv_dtype="int8"), choice) == INT8
