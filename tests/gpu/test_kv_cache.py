"""Content of blocks: copied, cleared and mended whole, others untouched; sizes."""

import math

import pytest
import torch

from core.config import ModelConfig, parse_model_config
from gpu.kv_cache import KVCache, bytes_per_block, bytes_per_token, num_blocks_for, num_blocks_within

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
        made.tensor[:, :, block] = block + 1
    return made


def contents(cache: KVCache) -> list[float]:
    """The one value of each block."""
    per_block = cache.tensor.transpose(0, 2).flatten(1)
    assert (per_block == per_block[:, :1]).all()
    return per_block[:, 0].tolist()


def test_a_new_cache_is_zero_and_has_a_scratch_block() -> None:
    cache = KVCache(CONFIG, 5, torch.bfloat16, torch.device("cpu"))
    assert cache.tensor.shape == (3, 2, 6, 16, 2, 2)
    assert cache.tensor.dtype == torch.bfloat16
    assert not cache.tensor.any()
    assert cache.scratch_block == 5


def test_copied_blocks_are_equal_in_all_layers(cache: KVCache) -> None:
    cache.copy_blocks(torch.tensor([0, 3]), torch.tensor([4, 1]))
    assert contents(cache) == [1, 4, 3, 4, 1, 0]


def test_make_finite_leaves_finite_values_alone(cache: KVCache) -> None:
    cache.tensor[1, 0, 2, 5, 0, 0], cache.tensor[0, 1, 2, 6, 1, 1] = math.nan, -math.inf
    cache.make_finite(torch.tensor([2]))
    assert cache.tensor[1, 0, 2, 5, 0].tolist() == [0, 3]
    assert cache.tensor[0, 1, 2, 6, 1].tolist() == [3, 0]
    assert cache.tensor[:, :, 3].eq(4).all()


def test_layer_views_share_the_caches_memory(cache: KVCache) -> None:
    cache.layers[2].values[3 * 16 + 7] = 9
    assert cache.tensor[2, 1, 3, 7].eq(9).all()
    assert cache.layers[2].both[1, 3, 7].eq(9).all()


def test_sizes_count_keys_and_values_of_all_layers() -> None:
    assert bytes_per_token(CONFIG, torch.bfloat16) == 2 * 3 * 2 * 2 * 2
    assert bytes_per_block(CONFIG, torch.float32) == 16 * 2 * 3 * 2 * 2 * 4


def test_blocks_within_memory_leave_room_for_scratch() -> None:
    block = bytes_per_block(CONFIG, torch.float32)
    assert [num_blocks_within(n * block, CONFIG, torch.float32) for n in (0, 1, 2, 10)] == [0, 0, 1, 9]
    assert num_blocks_within(2 * block - 1, CONFIG, torch.float32) == 0


def test_blocks_for_tokens_round_up() -> None:
    assert [num_blocks_for(n) for n in (1, 16, 17, 32)] == [1, 1, 2, 2]
