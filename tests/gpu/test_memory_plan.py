"""Memory is divided by computed figures, and what does not fit is told with a figure that does."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ModelConfig, RecurrentConfig, RopeConfig
from core.errors import NotEnoughMemory, StartupError
from gpu.attention import MAX_GATHERED_TOKENS
from gpu.cpu_kernels import support
from gpu.device import DeviceChoice
from gpu.memory_plan import (
    FIX_MARGIN,
    GIB,
    MIB,
    OWN_MEMORY_SHARE,
    SHARED_MEMORY_SHARE,
    MemoryPlan,
    activation_size_bytes,
    memory_needed,
    offload_slots,
    plan_memory,
)

# Llama 3.1 8B
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131_072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(500_000.0),
)
BF16 = DeviceChoice(torch.device("cpu"), "", torch.bfloat16, "", 1, "")
CUDA = dataclasses.replace(BF16, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures on every CPU: kernels need less."""
    monkeypatch.setattr(support, "cpu_flags", frozenset)


def plan(free_gib: float, device: DeviceChoice = BF16, **engine: Any) -> MemoryPlan:
    return plan_memory(MODEL, EngineConfig(**{"max_model_len": 8192, **engine}), device, 0, int(free_gib * GIB))


def test_figures_of_a_known_model() -> None:
    made = plan(100)
    assert made.num_parameters == 8_030_261_248
    assert made.weights_bytes == 2 * 8_030_261_248
    assert made.kv_bytes_per_token == 131_072
    assert made.kv_tokens == 16 * made.num_blocks
    assert made.total_bytes == made.weights_bytes + made.activation_bytes + made.kv_bytes < made.free_bytes


@pytest.mark.parametrize(("scheme", "bits"), [("int8", 8.5), ("int4", 4.5)])
def test_quantised_weights_are_counted_as_they_are_stored(scheme: str, bits: float) -> None:
    made = plan(100, quantize=scheme)
    embeddings = 2 * 128_256 * 4096
    layers = made.num_parameters - embeddings
    assert made.weights_bytes == pytest.approx(2 * embeddings + bits / 8 * layers, rel=0.003)
    assert made.checkpoint_bytes == 0


def test_kv_is_no_more_than_all_sequences_can_use() -> None:
    assert plan(500, max_sequences=4).kv_tokens == 4 * 8192


@pytest.mark.parametrize(("device", "share"), [(BF16, SHARED_MEMORY_SHARE), (CUDA, OWN_MEMORY_SHARE)])
def test_kv_takes_a_part_of_what_is_left_and_nearly_all_of_it_on_a_device_of_its_own(
    device: DeviceChoice, share: float
) -> None:
    made = plan(60, device)
    left = made.free_bytes - made.weights_bytes - made.activation_bytes - made.graph_bytes
    assert share * left - 17 * 131_072 < made.kv_bytes <= share * left


def test_one_full_sequence_may_take_more_than_half() -> None:
    least = plan(100, max_sequences=1)
    made = plan((least.weights_bytes + least.activation_bytes + 1.2 * GIB) / GIB, max_sequences=1)
    assert made.kv_tokens == 8192


def test_given_kv_memory_is_used_whole() -> None:
    made = plan(100, kv_memory_bytes=2 * GIB)
    assert made.kv_bytes == 2 * GIB
    assert made.kv_tokens == 2 * GIB // 131_072 - 16


def test_a_context_that_does_not_fit_is_told_with_one_that_does() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        plan(100, max_model_len=32_768, kv_memory_bytes=int(2.1 * GIB))
    assert caught.value.cause == "KV cache: need 4.0 GiB for 32768 tokens, --kv-memory gives 2.1 GiB."
    assert caught.value.fix == "--max-model-len 17100, or --kv-memory 4.01GiB"
    assert plan(100, max_model_len=17_100, kv_memory_bytes=int(2.1 * GIB)).kv_tokens >= 17_100


def test_what_is_short_by_less_than_is_shown_is_told_in_bytes() -> None:
    with pytest.raises(NotEnoughMemory, match=r"--kv-memory gives 4\.0 GiB, 2097152 bytes too few\. Fix"):
        plan(100, max_model_len=32_768, kv_memory_bytes=4 * GIB)


def test_one_message_has_one_unit() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        plan(100, max_model_len=32_768, kv_memory_bytes=64 * MIB)
    assert caught.value.cause == "KV cache: need 4.0 GiB for 32768 tokens, --kv-memory gives 0.062 GiB."
    assert caught.value.fix.endswith("--kv-memory 4.01GiB")
    with pytest.raises(NotEnoughMemory) as caught:
        plan(100, max_model_len=512, kv_memory_bytes=32 * MIB)
    assert caught.value.cause == "KV cache: need 66.0 MiB for 512 tokens, --kv-memory gives 32.0 MiB."
    assert caught.value.fix.endswith("--kv-memory 66MiB")


def test_kv_memory_beyond_what_is_free_is_refused() -> None:
    with pytest.raises(NotEnoughMemory, match=r"--kv-memory asks for 50\.0 GiB"):
        plan(40, kv_memory_bytes=50 * GIB)


def test_host_memory_on_a_cpu_is_taken_from_what_is_free() -> None:
    plain, made = plan(60), plan(60, kv_offload_bytes=8 * GIB)
    assert made.offload_bytes == 8 * GIB
    assert made.total_bytes == made.weights_bytes + made.activation_bytes + made.kv_bytes + 8 * GIB
    assert 4 * GIB - 17 * 131_072 < plain.kv_bytes - made.kv_bytes < 4 * GIB + 17 * 131_072  # half of what is left
    beside = plan(60, CUDA, kv_offload_bytes=8 * GIB)
    assert beside.kv_bytes == plan(60, CUDA).kv_bytes
    assert beside.total_bytes == plan(60, CUDA).total_bytes


def test_on_a_device_what_splits_find_and_graphs_take_is_counted_before_keys_and_values() -> None:
    plain, captured, longer = (
        plan(60, CUDA, **asked) for asked in ({"graphs": "off"}, {}, {"graphs": "lazy", "max_model_len": 32_768})
    )
    num_splits, rows, numbers = 32, 64, 32 * (128 + 2)  # 8,192 tokens in 256 each; heads, and two numbers beside them
    of_slots = 2 * rows * 512 + rows * 128_256  # tables of blocks, and of tokens seen
    decoding = 4 * (rows * num_splits * numbers + of_slots + rows * 128_256)
    on_cpu = plan(60, graphs="on")
    assert plain.activation_bytes == on_cpu.activation_bytes + decoding
    assert on_cpu.graph_bytes == plain.graph_bytes == 0
    assert captured.graph_bytes == longer.graph_bytes > 2 * MIB  # a block of padding at least
    assert captured.total_bytes == captured.weights_bytes + captured.activation_bytes + captured.kv_bytes + (
        captured.graph_bytes
    )
    given = OWN_MEMORY_SHARE * captured.graph_bytes
    assert abs(plain.kv_bytes - captured.kv_bytes - given) < 2 * 2 * MIB


def test_graphs_that_leave_no_room_are_told_before_loading() -> None:
    made = plan(100, CUDA)
    least = (made.weights_bytes + made.activation_bytes + made.graph_bytes) / GIB
    with pytest.raises(NotEnoughMemory, match="Weights and activations need"):
        plan(least, CUDA)
    assert plan(least + 2, CUDA).num_blocks >= 512


def test_host_memory_that_leaves_no_room_for_the_weights_is_told_before_loading() -> None:
    with pytest.raises(NotEnoughMemory, match=r"beside --kv-offload-memory of 30\.0 GiB, 40\.0 GiB free") as caught:
        plan(40, kv_offload_bytes=30 * GIB)
    assert "less --kv-offload-memory" in caught.value.fix


def test_more_host_memory_than_is_free_is_refused_with_what_fits() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        offload_slots(MODEL, EngineConfig(kv_offload_bytes=9 * GIB), torch.bfloat16, 8 * GIB)
    assert caught.value.cause == "--kv-offload-memory asks for 9.0 GiB, 8.0 GiB free."
    assert caught.value.fix == "--kv-offload-memory 4GiB, or less."


def test_weights_that_do_not_fit_are_told_before_loading() -> None:
    with pytest.raises(NotEnoughMemory, match=r"as float32, 20\.0 GiB free.*--dtype bfloat16"):
        plan(20, dataclasses.replace(BF16, dtype=torch.float32))


def test_what_weights_take_while_they_load_is_told_before() -> None:
    """Two slices on their way to a device, and a layer in its own format before it is quantised."""
    device = DeviceChoice(torch.device("cuda"), "", torch.bfloat16, "", 1, "")
    small = dataclasses.replace(MODEL, vocab_size=128, hidden_size=64, num_layers=1)
    asked = EngineConfig(max_model_len=16, max_sequences=1, max_batch_tokens=16)
    with pytest.raises(NotEnoughMemory) as caught:
        plan_memory(small, asked, device, 0, 130 * MIB)
    made = plan_memory(small, asked, BF16, 0, 130 * MIB)
    assert caught.value.cause == (
        f"Weights need {made.weights_bytes / MIB:.1f} MiB as bfloat16, and 128.0 MiB more while they load, "
        "130.0 MiB free."
    )
    assert memory_needed(small, asked, device) == made.weights_bytes + 128 * MIB
    quantized = dataclasses.replace(asked, quantize="int4")
    one_layer_bytes = 2 * 4096 * (2 * 32 * 128 + 2 * 8 * 128 + 3 * 14_336)
    weights_bytes = plan_memory(MODEL, quantized, BF16, 0, 100 * GIB).weights_bytes
    assert memory_needed(MODEL, quantized, BF16) == weights_bytes + one_layer_bytes


def test_where_a_kernel_attends_no_keys_and_values_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for flags in ("avx", "avx2 fma f16c"):
        monkeypatch.setattr(support, "cpu_flags", lambda flags=flags: frozenset(flags.split()))
        monkeypatch.setattr(support, "why_no_numba", lambda: None)
        found.append(plan(100).activation_bytes)
    assert found[0] - found[1] >= MAX_GATHERED_TOKENS * 2 * 2 * 8 * 128  # keys and values in bf16


def test_where_a_kernel_recurs_no_scan_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of Qwen3.5 4B, beside the same without."""
    own = RecurrentConfig("linear_attention", 4, 8192, 32, 16, 128, 128)
    found = []
    for flags, recurrence in itertools.product(("avx", "avx2 fma f16c"), (None, own)):
        monkeypatch.setattr(support, "cpu_flags", lambda flags=flags: frozenset(flags.split()))
        monkeypatch.setattr(support, "why_no_numba", lambda: None)
        model = dataclasses.replace(MODEL, recurrence=recurrence)
        found.append(activation_size_bytes(model, EngineConfig(max_batch_tokens=512), 8192, BF16))
    of_torch, of_kernels = found[1] - found[0], found[3] - found[2]
    assert of_torch > 512 * 4 * 12 * 32 * 256 > 3 * of_kernels > 0


def test_a_step_does_not_take_the_memory_of_all_sequences_at_full_length() -> None:
    """Llama 3.2 1B, whole context, 64 sequences, on a machine of 16 GiB."""
    model = dataclasses.replace(
        MODEL, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_embeddings=True
    )
    made = plan_memory(model, EngineConfig(), BF16, 0, 16 * GIB)
    assert made.max_model_len == 131_072
    assert made.kv_tokens >= 131_072


def refused(free_gib: float, **engine: int) -> str:
    """The fix that is proposed."""
    with pytest.raises(NotEnoughMemory) as caught:
        plan(free_gib, **engine)
    return caught.value.fix


def value_of(word: str) -> int:
    units = {"MiB": MIB, "GiB": GIB}
    return int(float(word[:-3]) * units[word[-3:]]) if word[-3:] in units else int(word)


def options_in(fix: str) -> list[dict[str, int]]:
    """Each alternative of a fix as EngineConfig's fields."""
    names = {"--max-model-len": "max_model_len", "--max-sequences": "max_sequences", "--kv-memory": "kv_memory_bytes"}
    found = []
    for way in fix.split(", or "):
        words = way.split()
        values = [value_of(word) for word in words[1::2]]
        found.append({names[word]: value for word, value in zip(words[::2], values, strict=True)})
    return found


@pytest.mark.parametrize(
    ("free_gib", "engine"),
    [
        (24, {"max_model_len": 131_072}),  # KV of one sequence
        (15.7, {"max_model_len": 131_072, "max_batch_tokens": 1024}),  # activations already
        (15.4, {"max_model_len": 512, "max_sequences": 256}),  # logits of all sequences
        (15.16, {"max_model_len": 8192, "max_sequences": 64}),  # either alone is not enough
        (40, {"kv_memory_bytes": 50 * GIB}),
        (100, {"max_model_len": 32_768, "kv_memory_bytes": GIB}),
        (20, {"max_model_len": 131_072, "kv_memory_bytes": GIB}),
    ],
)
def test_whatever_is_proposed_fits(free_gib: float, engine: dict[str, int]) -> None:
    proposed = options_in(refused(free_gib, **engine))
    assert all(plan(free_gib, **{**engine, **option}).num_blocks > 0 for option in proposed)


def test_the_longest_context_that_fits_is_proposed() -> None:
    """Not one that would fit beside the activations of the length which did not."""
    (option,) = options_in(refused(24, max_model_len=131_072))
    assert option["max_model_len"] % 100 == 0
    with pytest.raises(NotEnoughMemory):
        plan(24 * (1 - FIX_MARGIN), max_model_len=option["max_model_len"] + 100)


@pytest.mark.parametrize("engine", [{"kv_memory_bytes": 50 * GIB}, {"max_model_len": 131_072}])
def test_what_is_proposed_still_fits_when_some_memory_has_gone(engine: dict[str, int]) -> None:
    for option in options_in(refused(24, **engine)):
        assert plan(24 * (1 - FIX_MARGIN), **{**engine, **option}).num_blocks > 0


def test_what_needs_all_that_is_free_is_proposed_where_nothing_less_fits() -> None:
    weights_gib = 2 * 8_030_261_248 / GIB
    free_gib = weights_gib / (1 - FIX_MARGIN / 2)  # with the margin, not even the weights fit
    (option,) = options_in(refused(free_gib, max_model_len=131_072, max_sequences=1, max_batch_tokens=16))
    assert plan(free_gib, max_sequences=1, max_batch_tokens=16, **option).num_blocks > 0


def test_fewer_sequences_are_proposed_where_they_are_what_is_too_many() -> None:
    options = options_in(refused(15.4, max_model_len=512, max_sequences=256))
    (most,) = [option["max_sequences"] for option in options if "max_sequences" in option]
    with pytest.raises(NotEnoughMemory):
        plan(15.4 * (1 - FIX_MARGIN), max_model_len=512, max_sequences=most + 1)


def test_kv_memory_is_left_out_where_only_that_helps() -> None:
    fix = refused(16, kv_memory_bytes=50 * GIB)
    length = int(fix.removeprefix("--max-model-len ").removesuffix(" without --kv-memory"))
    assert plan(16, max_model_len=length).kv_tokens >= length


@pytest.mark.parametrize("length", [0, -1, 131_073])
def test_a_context_beyond_the_models_is_refused(length: int) -> None:
    with pytest.raises(StartupError, match="supports up to 131072"):
        plan(100, max_model_len=length)
