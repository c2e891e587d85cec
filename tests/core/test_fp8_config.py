"""An 8-bit checkpoint's description is understood, or refused by the name of what is not."""

from typing import Any

import pytest

from core.errors import BadCheckpoint, UnsupportedModel
from core.prequantized import Fp8Config, parse_fp8, refuse_other_methods

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def parse(**fields: Any) -> Fp8Config | None:
    config = {"quantization_config": fields}
    refuse_other_methods(config)
    return parse_fp8(config)


def compressed(weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    arguments = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": arguments}
    found = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return {**found, **fields}


def test_other_models_have_none() -> None:
    assert parse_fp8({}) is None
    assert parse_fp8({"quantization_config": {"quant_method": "gptq"}}) is None


@pytest.mark.parametrize(
    ("fields", "block"),
    [
        (FP8, (128, 128)),
        ({**FP8, "weight_block_size": None}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({**FP8, "scale_fmt": "ue8m0"}, (128, 128)),
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
        (
            {**FP8, "fmt": "e5m2"},
            r"fmt='e5m2' is not supported. Fix: .*fmt as: 'e4m3'",
        ),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({**FP8, "scale_fmt": "e3m4"}, "scale_fmt"),
        (compressed({}, format="pack-quantized"), "format='pack-quantized'.* as: 'float-quantized'"),
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


def test_groups_that_are_scaled_in_different_ways_are_named() -> None:
    (channels,) = compressed({})["config_groups"].values()
    (blocks,) = compressed({"strategy": "block", "block_structure": [128, 128]})["config_groups"].values()
    with pytest.raises(UnsupportedModel, match="block_structure"):
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
