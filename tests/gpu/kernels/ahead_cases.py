"""Kernels in the forms that serve, as operators launch them: what test_ahead.py has compiled."""

from itertools import cycle, product
from typing import Any

import torch

from gpu.attention import PLAIN as PLAIN_SCORES
from gpu.attention import Scores
from gpu.kernels.block_formats import LAYOUTS
from gpu.kernels.matmul import BLOCKS, GROUPED, INT4, PLAIN, SCALED, Matrix
from gpu.kernels.operators import ACTIVATIONS
from gpu.kernels.rows import CLEARED_COLUMNS, TOKENS
from gpu.kernels.sampling import MAX_BIASES, MAX_STOP_IDS, SHAPES, Shape
from gpu.kernels.sizes import (
    DECODE_WARPS,
    DECODED_INPUTS,
    DECODED_OUTPUTS,
    MAX_SPLITS,
    SMALL_ROWS,
    KernelShape,
    MatmulTile,
    heads_at_once,
    kernel_shape,
    next_power_of_two,
    row_warps,
)
from tests.gpu.kernels.ahead import Case, pointer

SINKS = Scores(sinks=torch.zeros(1))
CAPPED = Scores(cap=50.0)
# (heads, KV heads, head_dim), format, windowed, scores
HEADS: list[tuple[tuple[int, int, int], torch.dtype, bool, Scores]] = [
    ((32, 8, 128), torch.bfloat16, False, PLAIN_SCORES),  # Llama 3 8B
    ((32, 8, 128), torch.float32, False, PLAIN_SCORES),
    ((28, 4, 128), torch.bfloat16, True, PLAIN_SCORES),  # Qwen 2.5 7B
    ((64, 8, 64), torch.bfloat16, True, SINKS),  # gpt-oss
    ((8, 4, 256), torch.bfloat16, True, CAPPED),  # Gemma 2 2B
    ((32, 32, 80), torch.float16, False, PLAIN_SCORES),  # Phi 2's heads
    ((64, 8, 64), torch.bfloat16, False, SINKS),  # gpt-oss's other layers
    ((4, 1, 256), torch.bfloat16, True, PLAIN_SCORES),  # Gemma 3 1B
    ((16, 16, 256), torch.float16, False, PLAIN_SCORES),  # Gemma 7B's heads
    ((24, 8, 128), torch.bfloat16, False, PLAIN_SCORES),  # Llama 3.2 3B: 3 heads of a key
    ((64, 8, 128), torch.float16, False, PLAIN_SCORES),  # Llama 3 70B: 8
    ((14, 2, 64), torch.bfloat16, False, PLAIN_SCORES),  # Qwen 2.5 0.5B: 7
    ((32, 32, 96), torch.bfloat16, True, PLAIN_SCORES),  # Phi 3 mini
    ((24, 8, 80), torch.bfloat16, True, CAPPED),
    ((64, 1, 64), torch.bfloat16, False, PLAIN_SCORES),  # one key for all: as many heads as a decode's tile has rows
    ((8, 2, 512), torch.bfloat16, False, PLAIN_SCORES),  # the largest heads
    ((8, 4, 256), torch.float32, True, CAPPED),
]
IN_8_BITS = [*HEADS[:2], *HEADS[3:6], HEADS[10], HEADS[15]]  # keys and values: of each size and format
# Bits of a weight, form, and format; None: the rows'
FORMATS = (
    (32, PLAIN, torch.float32),
    (16, PLAIN, None),
    (8, SCALED, torch.int8),
    (8, SCALED, torch.float8_e4m3fn),
    (4, INT4, torch.uint8),
    (8, GROUPED, torch.float8_e4m3fn),
)
SCALES = {SCALED: torch.bfloat16, INT4: torch.bfloat16, GROUPED: torch.float32}  # those of PLAIN are not read
MANY_ROWS = SMALL_ROWS + 1  # for which there are larger tiles
WIDE = ("num_out", "num_in", "row_stride", "x_stride", "out_stride", "split_inputs")  # multiples of 16 in all models
# One of each kind: of few bits and further ones, of bytes, of a table, of floats, all with their own scales.
SOME_BLOCKS = ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4")
ODD_MATMULS = [  # bits, form, format, rows, group
    (bits, form, stored, num_rows, group)
    for bits, form, stored, groups in (
        (16, PLAIN, None, (1,)),
        (8, SCALED, torch.float8_e4m3fn, (1,)),
        (4, INT4, torch.uint8, (32, 64)),
        (8, GROUPED, torch.float8_e4m3fn, (32, 64)),
    )
    for num_rows in (SMALL_ROWS, MANY_ROWS)
    for group in groups
]
ATTENTION_INTEGERS = ("num_rows", "num_decodes", "num_programs", "query_stride", "table_stride", "window")
TABLES = ("tables", "ends", "offsets", "tiles", "num_tiles", "splits", "split_offsets")


def _attention_arguments(dtype: torch.dtype, cached: torch.dtype) -> dict[str, str]:
    """Of all its kernels: types by name."""
    rows = dict.fromkeys(("query", "sinks", "out"), pointer(dtype)) | dict.fromkeys(("keys", "values"), pointer(cached))
    rows |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    parts = dict.fromkeys(("part_outs", "part_tops", "part_totals"), "*fp32")
    tables = dict.fromkeys(TABLES, "*i32")
    return (
        rows
        | parts
        | tables
        | dict.fromkeys(ATTENTION_INTEGERS, "i32")
        | dict.fromkeys(("scale", "factor", "cap"), "fp32")
    )


def attention_cases() -> list[Case]:
    return [
        case
        for in_8_bits, models in ((False, HEADS), (True, IN_8_BITS))
        for heads, dtype, is_windowed, scores in models
        for case in _attention_cases_of(kernel_shape(*heads, dtype, None, in_8_bits), is_windowed, scores)
    ]


def _attention_cases_of(shape: KernelShape, is_windowed: bool, scores: Scores) -> list[Case]:
    constants = shape.constants(is_windowed, scores)
    if scores.sinks is None:
        constants["sinks"] = None
    if not shape.in_8_bits:
        constants |= {"key_scales": None, "value_scales": None}

    def case(kernel: str, constants: dict[str, Any], launch: dict[str, int]) -> Case:
        return Case(
            f"gpu.kernels.{kernel}",
            _attention_arguments(shape.dtype, torch.int8 if shape.in_8_bits else shape.dtype),
            constants,
            **launch,
            multiples_of_16=("query_stride",),
        )

    found = [
        case("attention:decode", constants | shape.decode_constants, shape.launch),
        case("attention:extend_and_decode", constants | shape.extend_constants, shape.launch),
    ]
    if shape.head_dim == 128 and shape.dtype == torch.bfloat16 and not shape.in_8_bits:  # they depend on little
        schedule = shape.schedule_constants | {"HAS_WINDOW": is_windowed}
        found.append(case("attention:merge", shape.merge_constants, {}))
        found.append(case("attention:lay_out_step", schedule, {}))
    return found


def elementwise_cases() -> list[Case]:
    """As operators.py launches them: the widest model, and each form."""
    module = "gpu.kernels.operators"
    cases = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = pointer(dtype)
        norm = dict.fromkeys(("x", "added", "weight", "total", "normed"), rows) | {
            "width": "i32",
            "scale": "fp32",
            "eps": "fp32",
        }
        for width in (64, 8192):
            constants = {"HAS_ADDED": True, "HAS_NORM": True, "BLOCK": width}
            cases.append(Case(f"{module}:add_and_norm", norm, constants, row_warps(width), multiples_of_16=("width",)))
        stored = dict.fromkeys(("qkv", "query", "keys", "values", "query_norm", "key_norm"), rows) | {
            "slots": "*i64",
            "rotation": "*fp32",
            "num_heads": "i32",
            "num_kv_heads": "i32",
            "head_dim": "i32",
            "eps": "fp32",
        }
        for kind, in_8_bits in product((0, 1, 2) if dtype == torch.bfloat16 else (1,), (False, True)):
            constants = {"NORM": kind, "HAS_ROTATION": True, "IN_8_BITS": in_8_bits}
            constants |= {"HEADS": heads_at_once(32, 8, 128, kind == 2), "BLOCK": next_power_of_two(128)}
            cases.append(_storing(stored, constants))
            if kind == 1:  # Gemma 3 1B
                sizes = {"HEADS": 4, "BLOCK": 256, "num_heads": 4, "num_kv_heads": 1}
                cases.append(_storing(stored, constants | sizes))
        gated = {"gate_up": rows, "out": rows, "width": "i32", "slope": "fp32", "limit": "fp32"}
        for number in ACTIVATIONS.values() if dtype == torch.bfloat16 else (0,):  # they compute in float32
            constants = {"ACTIVATION": number, "BLOCK": 1024}
            cases.append(Case(f"{module}:gate", gated, constants, multiples_of_16=("width",)))
    return cases


def _storing(arguments: dict[str, str], constants: dict[str, Any]) -> Case:
    """rotate_and_store. arguments: of a cache in the rows' format."""
    in_8_bits = constants["IN_8_BITS"]
    cached = dict.fromkeys(("keys", "values"), "*i8") if in_8_bits else {}
    scales = dict.fromkeys(("key_scales", "value_scales"))
    options = {"num_warps": 4, "multiples_of_16": ("head_dim",), "enable_fp_fusion": not in_8_bits}
    of_scales = dict.fromkeys(scales, "*fp32")
    constants = constants if in_8_bits else constants | scales
    return Case("gpu.kernels.operators:rotate_and_store", arguments | cached | of_scales, constants, **options)


def _matmul_arguments(rows: torch.dtype, values: torch.dtype, scales: torch.dtype, out: torch.dtype) -> dict[str, str]:
    integers = dict.fromkeys(("num_rows", *WIDE), "i32")
    return {"x": pointer(rows), "weights": pointer(values), "scales": pointer(scales), "zeros": pointer(scales)} | {
        "bias": pointer(rows),
        "out": pointer(out),
        **integers,
    }


def _tile_constants(form: int, tile: MatmulTile, group: int = 128, **others: object) -> dict[str, object]:
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs}
    group = group if form in (INT4, GROUPED) else 1
    stored = {"FORM": form, "GROUP": group, "IS_WHOLE": True, "LAYOUT": None}
    return {**stored, "HAS_BIAS": True, "PRECISION": "ieee", **blocks, **others}


def tile_of(bits: int, form: int, num_rows: int | None, group: int = 128) -> MatmulTile:
    """num_rows: None: any number, as --deterministic has it."""
    none, is_fixed = torch.empty(0), num_rows is None
    width = 1 << 12
    matrix = Matrix(form, none, none, none, num_out=0, num_in=width, num_bits=bits, group=group, is_fixed=is_fixed)
    return matrix.tile(num_rows or 1)


def _odd_matmul(bits: int, form: int, stored: torch.dtype | None, num_rows: int, group: int) -> Case:
    """Without a bias, of bfloat16: inputs that end within a tile where there are no groups, or groups as told."""
    tile, rows = tile_of(bits, form, num_rows, group), torch.bfloat16
    arguments = _matmul_arguments(rows, stored or rows, SCALES.get(form, rows), rows)
    has_groups = form in (INT4, GROUPED)
    constants = _tile_constants(form, tile, group, SPLITS=1, HAS_BIAS=False, IS_WHOLE=has_groups)
    return Case("gpu.kernels.matmul:multiply", arguments, constants, tile.num_warps, tile.num_stages, WIDE)


def matmul_cases() -> list[Case]:
    module, cases = "gpu.kernels.matmul", []
    for dtype in (torch.bfloat16, torch.float16):
        for bits, form, stored in FORMATS:
            if bits == 32 and dtype != torch.bfloat16:
                continue
            rows = torch.float32 if bits == 32 else dtype
            values = stored or dtype
            # float16 differs in its conversions alone; whole rows of few without groups: ODD_MATMULS
            launches = ((SMALL_ROWS, 4), (MANY_ROWS, 1), (None, 4)) if dtype == torch.bfloat16 else ((SMALL_ROWS, 1),)
            for num_rows, splits in launches:
                tile = tile_of(bits, form, num_rows)
                arguments = _matmul_arguments(
                    rows, values, SCALES.get(form, rows), torch.float32 if splits > 1 else rows
                )
                constants = _tile_constants(form, tile, SPLITS=splits)
                cases.append(Case(f"{module}:multiply", arguments, constants, tile.num_warps, tile.num_stages, WIDE))
    cases += [_odd_matmul(*odd) for odd in ODD_MATMULS]
    for name in LAYOUTS:
        for num_rows, splits in (
            ((SMALL_ROWS, 4), (MANY_ROWS, 1), (None, 1)) if name in SOME_BLOCKS[::2] else ((SMALL_ROWS, 1),)
        ):
            tile = tile_of(16, BLOCKS, num_rows)
            out = torch.float32 if splits > 1 else torch.bfloat16
            arguments = _matmul_arguments(torch.bfloat16, torch.int32, torch.int32, out)
            constants = _tile_constants(BLOCKS, tile, SPLITS=splits, LAYOUT=name)
            launch = tile.num_warps, tile.num_stages, WIDE, False
            cases.append(Case(f"{module}:multiply", arguments, constants, *launch))
    arguments = {"indexes": "*i64", "words": "*i32", "out": "*bf16"}
    arguments |= dict.fromkeys(("first", "num_rows", "num_in", "chunk_words"), "i32")
    for name, has_indexes in [*zip(SOME_BLOCKS, cycle((False, True))), (SOME_BLOCKS[0], True)]:
        constants = {"LAYOUT": name, "HAS_INDEXES": has_indexes, "BLOCK_N": DECODED_OUTPUTS, "BLOCK_K": DECODED_INPUTS}
        launch = DECODE_WARPS, 3, ("num_in", "chunk_words"), False
        cases.append(Case("gpu.kernels.block_formats:decode_rows", arguments, constants, *launch))
    added = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16"} | dict.fromkeys(
        ("num_rows", "num_out", "out_stride"), "i32"
    )
    constants = {"HAS_BIAS": True, "SPLITS": MAX_SPLITS, "BLOCK": 1024}
    cases.append(Case(f"{module}:add_splits", added, constants, multiples_of_16=("num_out", "out_stride")))
    return cases


def expert_cases() -> list[Case]:
    """128 experts, of which 8 are active: Qwen3's."""
    module, cases = "gpu.kernels.matmul", []
    stacks = [(*found, None) for found in FORMATS] + [(16, BLOCKS, torch.int32, name) for name in SOME_BLOCKS]
    wide = ("num_out", "num_in", "row_stride", "out_stride")
    for bits, form, stored, layout in stacks:
        has_all = layout in (None, SOME_BLOCKS[0])  # the tiles of BLOCKS are the same for all formats
        rows = torch.float32 if bits == 32 else torch.bfloat16
        values = pointer(stored or rows)
        scales = pointer(SCALES.get(form, rows))
        pointers = {"x": pointer(rows), "weights": values, "scales": scales, "zeros": scales, "bias": pointer(rows)}
        integers = dict.fromkeys((*wide, "num_experts"), "i32")
        for num_rows, share in ((SMALL_ROWS, 8), (MANY_ROWS, 1), (None, 8)) if has_all else ((SMALL_ROWS, 8),):
            tile = tile_of(bits, form, num_rows)
            arguments = pointers | {"out": pointer(rows), "pairs": "*i64", "ends": "*i64"} | integers
            constants = _tile_constants(form, tile, SHARE=share, BLOCK_E=128, LAYOUT=layout)
            launch = tile.num_warps, tile.num_stages, wide, layout is None
            cases.append(Case(f"{module}:multiply_by_expert", arguments, constants, *launch))
    added = {"found": "*bf16", "shares": "*fp32", "out": "*bf16", "width": "i32"}
    cases.append(Case(f"{module}:add_experts", added, {"ACTIVE": 8, "BLOCK": 1024}, multiples_of_16=("width",)))
    return cases


def sampling_cases() -> list[Case]:
    """As rows of any number are read: of float32, which serves, in vocabularies of up to 2 ** 15, 17 and 18 tokens.

    And each kernel in one of the other formats of logits.
    """
    cases = []
    floats = ("factors", "biases", "scratch", "maxima", "values", "logprobs", "found")
    arguments = (
        dict.fromkeys(floats, "*fp32")
        | dict.fromkeys(("slots", "positions", "numbers", "token_ids", "last_tokens"), "*i64")
        | dict.fromkeys(("bias_ids", "stop_ids", "seen", "listed", "tokens_gathered", "found_tokens"), "*i32")
        | dict.fromkeys(("vocab_size", "range_size", "num_splits"), "i32")
        | {"is_finite": "*i8"}
    )
    lists = {"MAX_BIASES": MAX_BIASES, "MAX_STOP_IDS": MAX_STOP_IDS}

    def add(name: str, logits: str, shape: Shape, constants: dict[str, Any], multiples: tuple[str, ...] = ()) -> None:
        types, options = {"logits": logits} | arguments, {"num_warps": shape.num_warps, "enable_fp_fusion": False}
        kernel, constants = f"gpu.kernels.sampling:{name}", constants | {"GROUP": shape.group}
        cases.append(Case(kernel, types, constants, multiples_of_16=multiples, **options))

    multiples = ("vocab_size", "range_size")
    split = SHAPES[0][1]
    for segments in (256, 1024, 2048):  # the most of them in every way to split a row, fewer in one
        for shape in {shape.num_splits: shape for _, shape in SHAPES if segments == 2048 or shape == split}.values():
            alone = {"num_splits": 1} if shape.num_splits == 1 else {}  # 1 is a constant
            add("end_rows", "*fp32", shape, {"SEGMENTS": segments, "SPLITS": shape.num_splits} | alone, multiples)
    add("scan_rows", "*fp32", split, lists, multiples)
    add("scan_rows", "*bf16", split, lists)
    add("end_rows", "*fp16", split, {"SEGMENTS": 2048, "SPLITS": split.num_splits})
    return cases


def row_cases() -> list[Case]:
    """Rows of tables, in formats that serve, and what steps read."""
    module, cases = "gpu.kernels.rows", []
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.int8):
        rows = {"table": pointer(dtype), "out": pointer(dtype), "rows": pointer(dtype), "slots": "*i64", "width": "i32"}
        ids = {"token_ids": "*i64"}
        cases.append(Case(f"{module}:embed", rows | ids, {"BLOCK": 1024}, multiples_of_16=("width",)))
        cases.append(Case(f"{module}:scatter", rows, {"BLOCK": 1024}))
        cleared = {"cache": pointer(dtype), "blocks": "*i32", "num_blocks": "i32", "width": "i32"}
        cases.append(Case(f"{module}:clear", cleared, {"BLOCK": CLEARED_COLUMNS}, multiples_of_16=("width",)))
    numbers = dict.fromkeys(("table", "rows", "slots"), "*i32") | {"width": "i32"}
    for width in (1, 12, 512):  # a table's entries, and what slots ask of sampling; 1 is a constant
        constants: dict[str, Any] = {"BLOCK": next_power_of_two(width)} | ({"width": 1} if width == 1 else {})
        cases.append(Case(f"{module}:scatter", numbers, constants))
    ints = ("step", "slots", "ends", "tables", "row_tables")
    longs = ("last_tokens", "token_ids", "kv_slots", "window_slots")
    types = dict.fromkeys(ints, "*i32") | dict.fromkeys(longs, "*i64") | {"positions": "*fp32"}
    counts = ("num_tokens", "width", "table_stride", "scratch_block", "padding_block", "padding_window")
    types |= dict.fromkeys(counts, "i32")
    for constants in ({}, {"scratch_block": 1}):  # of a cache of one block, on which graphs are tried
        cases.append(Case(f"{module}:lay_out_tables", types, constants | {"BLOCK_TOKENS": 16, "BLOCK": 1024}))
    for has_windows in (False, True):
        tokens = {"HAS_WINDOWS": has_windows, "BLOCK_TOKENS": 16, "BLOCK": TOKENS}
        cases.append(Case(f"{module}:lay_out_tokens", types, tokens))
    return cases
