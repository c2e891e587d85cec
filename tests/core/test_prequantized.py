"""A quantised checkpoint's description is understood, or refused by the name of what is not."""

from typing import Any

import pytest

from core.errors import BadCheckpoint, UnsupportedModel
from core.prequantized import PackedConfig, parse_packed, refuse_other_methods

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def parse(**fields: Any) -> PackedConfig | None:
    return parse_packed({"quantization_config": fields})


def test_a_plain_model_has_none() -> None:
    assert parse_packed({}) is None
    refuse_other_methods({"quantization_config": None})


def test_stored_zeros_are_one_less_in_the_first_gptq_format_only() -> None:
    assert parse(**GPTQ) == PackedConfig("gptq", 4, 128, has_order=False, zero_offset=1)
    assert parse(**GPTQ, checkpoint_format="gptq_v2") == PackedConfig("gptq", 4, 128, has_order=False, zero_offset=0)
    assert parse(**GPTQ, format="gptq_v2") == parse(**GPTQ, checkpoint_format="gptq_v2", format="gptq_v2")
    assert parse(**GPTQ, format="gptq_v2") == parse(**GPTQ, checkpoint_format="gptq_v2")
    with pytest.raises(BadCheckpoint, match="gptq and gptq_v2"):
        parse(**GPTQ, checkpoint_format="gptq", format="gptq_v2")
    assert parse(**AWQ) == PackedConfig("awq", 4, 128, has_order=False, zero_offset=0)


def test_awqs_older_names_are_read() -> None:
    assert parse(quant_method="awq", w_bit=4, q_group_size=-1) == PackedConfig("awq", 4, None, False, 0)


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        (GPTQ, True),
        ({**GPTQ, "group_size": -1}, True),
        ({**GPTQ, "desc_act": True}, False),
        ({**GPTQ, "bits": 8}, False),
        ({**GPTQ, "group_size": 48}, False),
        (AWQ, True),
    ],
)
def test_four_bits_in_groups_of_neighbours_are_kept(fields: dict[str, Any], is_kept: bool) -> None:
    packed = parse(**fields)
    assert packed is not None
    assert packed.is_kept == is_kept


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**GPTQ, "bits": 3}, "bits=3"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "dynamic": {"-:.*down": {}}}, "dynamic"),
        ({**GPTQ, "format": "marlin"}, "quantization_config.format='marlin'"),
        ({**AWQ, "version": "gemv"}, "version='gemv'"),
        ({**AWQ, "format": "gemv"}, "quantization_config.format='gemv'"),
        ({**AWQ, "checkpoint_format": "gemv_fast"}, "checkpoint_format='gemv_fast'"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**AWQ, "bits": 8}, "bits=8"),
    ],
)
def test_variants_that_are_not_read_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse(**fields)


@pytest.mark.parametrize("given", [{"quant_method": "mxfp8"}, {"quant_method": "bitsandbytes"}, "int4"])
def test_other_methods_are_named(given: object) -> None:
    name = given["quant_method"] if isinstance(given, dict) else given
    with pytest.raises(UnsupportedModel, match=f"quant_method='{name}' is not supported"):
        refuse_other_methods({"quantization_config": given})


@pytest.mark.parametrize("size", [0, -2, 4, "128", None])
def test_a_group_size_that_cannot_be_is_refused(size: object) -> None:
    with pytest.raises(BadCheckpoint, match="group_size"):
        parse(**{**GPTQ, "group_size": size})
