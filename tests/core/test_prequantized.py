"""What config.json says of a prequantized checkpoint is understood, or refused by the name of what is not."""

from typing import Any

import pytest

from core.errors import BadCheckpoint, UnsupportedModel
from core.prequantized import Fp8Config, PackedConfig, Packing, parse_packing

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def parse(**fields: Any) -> Packing | None:
    return parse_packing({"quantization_config": fields})


def compressed(weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    arguments = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": arguments}
    found = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return {**found, **fields}


def test_a_plain_model_has_none() -> None:
    assert parse_packing({}) is parse_packing({"quantization_config": None}) is None


def test_stored_zeros_are_one_less_in_the_first_gptq_format_only() -> None:
    assert parse(**GPTQ) == PackedConfig("gptq", 4, 128, has_order=False, zero_offset=1)
    assert parse(**GPTQ, checkpoint_format="gptq_v2") == PackedConfig("gptq", 4, 128, has_order=False, zero_offset=0)
    assert parse(**GPTQ, format="gptq_v2") == parse(**GPTQ, checkpoint_format="gptq_v2", format="gptq_v2")
    assert parse(**GPTQ, format="gptq_v2") == parse(**GPTQ, checkpoint_format="gptq_v2")
    with pytest.raises(BadCheckpoint, match="gptq and gptq_v2"):
        parse(**GPTQ, checkpoint_format="gptq", format="gptq_v2")
    assert parse(**AWQ) == PackedConfig("awq", 4, 128, has_order=False, zero_offset=0)


def test_packed_integers_of_compressed_tensors_are_read() -> None:
    found = PackedConfig("compressed-tensors", 4, 32, has_order=False, zero_offset=0, has_zeros=False)
    assert parse(**compressed(PACKED, format="pack-quantized")) == found
    assert parse(**compressed({**PACKED, "actorder": "weight"}, format="pack-quantized")) == found
    asymmetric = {**PACKED, "symmetric": False, "actorder": "group", "num_bits": 8, "strategy": "channel"}
    found = PackedConfig("compressed-tensors", 8, None, has_order=True, zero_offset=0, has_zeros=True)
    assert parse(**compressed(asymmetric, format="pack-quantized")) == found


def test_modules_may_be_left_out_by_name() -> None:
    """As in Qwen3.5's GPTQ checkpoints."""
    rules = {"lm_head": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {"bits": 8}, "+:.*mlp.*": {"bits": 4}}
    assert parse(**GPTQ, dynamic=rules) == parse(**GPTQ, dynamic=None) == parse(**GPTQ)
    with pytest.raises(BadCheckpoint, match="dynamic="):
        parse(**GPTQ, dynamic=["-:.*attn.*"])


def test_awqs_older_names_are_read() -> None:
    assert parse(quant_method="awq", w_bit=4, q_group_size=-1) == PackedConfig("awq", 4, None, False, 0)


@pytest.mark.parametrize(
    ("fields", "is_served"),
    [
        (GPTQ, True),
        ({**GPTQ, "group_size": -1}, True),
        ({**GPTQ, "desc_act": True}, False),
        ({**GPTQ, "bits": 8}, False),
        ({**GPTQ, "group_size": 48}, False),
        (AWQ, True),
    ],
)
def test_four_bits_in_groups_of_neighbours_are_served(fields: dict[str, Any], is_served: bool) -> None:
    packed = parse(**fields)
    assert isinstance(packed, PackedConfig)
    assert packed.is_served == is_served


@pytest.mark.parametrize(
    ("fields", "block"),
    [
        (FP8, (128, 128)),
        ({**FP8, "weight_block_size": None}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({**FP8, "scale_fmt": "ue8m0"}, (128, 128)),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, None),
        (compressed({}), None),
        (compressed({"strategy": "tensor"}), None),
        (compressed({"strategy": "block", "block_structure": [128, 64]}), (128, 64)),
        (compressed({"strategy": "block", "block_structure": "128x128"}), (128, 128)),
        (compressed({}, sparsity_config={"format": "dense"}, transform_config={}), None),
    ],
)
def test_what_shares_a_scale_is_known(fields: dict[str, Any], block: tuple[int, int] | None) -> None:
    assert parse(**fields) == Fp8Config(block)
    assert Fp8Config(block).group_size == (block and block[1])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**GPTQ, "bits": 3}, "bits=3"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "dynamic": {"-:.*attn": {}, "+:.*down": {"bits": 8}}}, r"dynamic\['\+:\.\*down'\]=\{'bits': 8\}"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'.* as: 'FP8'"),
        ({**GPTQ, "format": "marlin"}, "quantization_config.format='marlin'"),
        ({**AWQ, "version": "gemv"}, "version='gemv'"),
        ({**AWQ, "format": "gemv"}, "quantization_config.format='gemv'"),
        ({**AWQ, "checkpoint_format": "gemv_fast"}, "checkpoint_format='gemv_fast'"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**AWQ, "bits": 8}, "bits=8"),
        ({**FP8, "fmt": "e5m2"}, r"fmt='e5m2' is not supported. Fix: .*fmt as: 'e4m3'"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({**FP8, "scale_fmt": "e3m4"}, "scale_fmt"),
        (compressed({}, format="int-quantized"), "format='int-quantized'.* as: 'float-quantized', 'pack-quantized'"),
        (compressed({}, format="pack-quantized"), "type='float'"),
        (compressed({**PACKED, "num_bits": 3}, format="pack-quantized"), "num_bits=3"),
        (compressed({**PACKED, "actorder": "other"}, format="pack-quantized"), "actorder='other'"),
        (compressed({}, format="nvfp4-pack-quantized"), "nvfp4"),
        (compressed({}, format="mixed-precision"), "mixed-precision"),
        (compressed({}, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed({}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (compressed({"num_bits": 4}), "num_bits=4"),
        (compressed({"type": "int"}), "type='int'"),
        (compressed({"strategy": "group"}), "strategy='group'"),
        (compressed({"symmetric": False}), "symmetric=False"),
    ],
)
def test_variants_that_are_not_read_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse(**fields)


@pytest.mark.parametrize("given", [{"quant_method": "mxfp8"}, {"quant_method": "bitsandbytes"}, "int4"])
def test_other_methods_are_named(given: object) -> None:
    name = given["quant_method"] if isinstance(given, dict) else given
    with pytest.raises(UnsupportedModel, match=f"quant_method='{name}' is not supported"):
        parse_packing({"quantization_config": given})


@pytest.mark.parametrize("size", [0, -2, 4, "128", None])
def test_a_group_size_that_cannot_be_is_refused(size: object) -> None:
    with pytest.raises(BadCheckpoint, match="group_size"):
        parse(**{**GPTQ, "group_size": size})


def test_groups_that_are_scaled_in_different_ways_are_named() -> None:
    (channels,) = compressed({})["config_groups"].values()
    (blocks,) = compressed({"strategy": "block", "block_structure": [128, 128]})["config_groups"].values()
    with pytest.raises(UnsupportedModel, match=r"config_groups: weights=.*block=None.*as: 'the same in all groups'"):
        parse(**compressed({}, config_groups={"a": channels, "b": blocks}))
    assert parse(**compressed({}, config_groups={"a": channels, "b": channels})) == Fp8Config(None)


@pytest.mark.parametrize(
    "fields",
    [
        *({**FP8, "weight_block_size": size} for size in ([128], [128, 0], [True, 128], "128", 128, ["128", "x"])),
        compressed({"strategy": "block"}),
        compressed({}, config_groups={}),
        compressed({}, config_groups=None),
        compressed({}, config_groups={"group_0": {"weights": None}}),
        compressed({}, config_groups={"group_0": None}),
    ],
)
def test_what_no_one_can_read_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match=r"weight_block_size|config_groups"):
        parse(**fields)
