"""bench.gpu_check --part blocks: a GGUF file's blocks, as kernels decode and multiply them, in every format.

- Decoded rows, held against gpu/checkpoint.py to the last bit; matmuls and experts against float32.
- Matmuls beside those of the matrix dequantised, by the same tile: the share of numbers that differ is told.
- With --deterministic: a row alone and in company, to the last bit.
- Times of a real model's matrices, beside the limit; and of other tiles than those that serve (gpu/kernels/sizes.py),
  and of torch with what is decoded, for few rows and for many.
- A model of random blocks in the engine beside the same in bf16; and a small file, loaded by the device.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random

import torch

from bench.engine import Streams, random_runner
from bench.gpu_deterministic import check_matmul
from bench.gpu_kernels import (
    TOLERANCES,
    Draw,
    KernelCase,
    blocks_of,
    checks,
    grid,
    relative_error,
    share_of_others,
    stored,
    time_of,
)
from bench.gpu_model import KV_BYTES, MODEL_LIMIT_S, config_of, engine_config, models_of
from bench.gpu_run import OK, SKIPPED, WRONG, Case, Context, Row, ceilings_case
from bench.make_model import draw_tensor
from bench.results import Cell
from core.config import EngineConfig
from core.config_json import parse_model_config
from gpu.blocks import FORMATS, INT4_FORMATS
from gpu.checkpoint import open_checkpoint
from gpu.cpu_kernels.support import choose_for
from gpu.device import apply_threads, free_memory_bytes
from gpu.loading import load_runner, warm_up
from gpu.memory_plan import plan_memory
from gpu.parameters import empty_weights, matrices
from gpu.quant import floats
from gpu.runner import ModelRunner
from gpu.tune import find_operators
from gpu.weights import check_checkpoint

FORMS = tuple(name for name in FORMATS if name not in INT4_FORMATS.values())
FIRST_FORMS = ("Q4_K", "Q6_K", "Q8_0")  # those that most files have
SAME, SPEED, FILE = "Matmuls beside the dequantised matrix's", "A model of blocks in the engine", "A file of blocks"
TIMED = "Kernels: times"
MATRICES = ((28_672, 4096), (4096, 14_336), (6144, 4096))  # Llama 8B's
FEW_TILES = ("usual", "16x64x64x4x4", "16x64x128x4x2", "16x64x128x8x3", "16x128x64x4x3", "16x64x256x8x2")
MANY_TILES = ("usual", "torch", "64x64x128x4x3", "64x64x64x4x4", "64x128x64x8x3", "128x64x64x8x3", "128x128x64x8x3")


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    forms = FIRST_FORMS if is_quick or not is_device else FORMS
    tiles = [(form, size) for form, size in product(forms, ((200, 1280),) if not is_device else ((1000, 2048),))]
    found = [ceilings_case(), *checks(error_cases(forms, is_device))]
    found += [Case(f"bits of {form}", partial(_same, form, size), 90.0, SAME) for form, size in tiles]
    found += [Case(f"company of {form}", partial(check_matmul, form, size), 120.0, SAME) for form, size in tiles]
    found.append(Case("file", _file, 240.0, FILE))
    timed = timed_cases(is_quick, is_device)
    found += [Case(f"time of {case.name}", partial(time_of, case), 90.0, TIMED) for case in timed]
    model = models_of(is_quick, is_device)[0]
    return [
        *found,
        *(Case(f"{model}: {form}", partial(_speed, model, form), MODEL_LIMIT_S, SPEED) for form in FIRST_FORMS),
    ]


def error_cases(forms: tuple[str, ...], is_device: bool) -> list[KernelCase]:
    """Outputs that end within a block of them, inputs whose number no large tile divides."""
    dtype, rows = ("bfloat16", (1, 3, 16, 17, 300)) if is_device else ("float32", (3,))
    size = {"out": 1000, "in": 2304} if is_device else {"out": 70, "in": 256}
    experts = {"hidden": 1024, "experts": 32, "active": 4, "width": 512}
    if not is_device:
        experts = {"hidden": 256, "experts": 3, "active": 2, "width": 256}
    found = grid("decoded_rows", dtype, form=forms, rows=5, size=size)
    found += grid("block_matmul", dtype, form=forms, rows=rows, tile=("usual", "torch"), size=size)
    return found + grid("experts", dtype, rows=(1, 40, 700) if is_device else 5, shape=experts, form=forms)


def timed_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    if not is_device:
        return grid("block_matmul", "float32", form="Q4_K", rows=3, tile="usual", size={"out": 64, "in": 256})
    sizes = tuple({"out": num_out, "in": num_in} for num_out, num_in in MATRICES)
    shown = grid("block_matmul", "bfloat16", form=FIRST_FORMS, rows=(1, 16, 512), tile="usual", size=sizes)
    shown += grid("matmul", "bfloat16", matrix="plain", form="plain", rows=(1, 16, 512), size=sizes, bias=False)
    for form in FIRST_FORMS[: 1 if is_quick else None]:
        shown += grid("block_matmul", "bfloat16", form=form, rows=(1, 16), tile=FEW_TILES[1:], size=sizes[:2])
        shown += grid("block_matmul", "bfloat16", form=form, rows=512, tile=MANY_TILES[1:], size=sizes[:2])
    others = tuple(form for form in FORMS if form not in FIRST_FORMS)
    return (
        shown
        if is_quick
        else shown + grid("block_matmul", "bfloat16", form=others, rows=(1, 512), tile="usual", size=sizes[0])
    )


def _same(form: str, size: tuple[int, int], context: Context) -> Iterator[Row]:
    """By the same tile what is added is the same; compilers may lay out its operands differently, and round so."""
    from gpu.kernels.block_formats import read_range
    from gpu.kernels.matmul import Matmul
    from gpu.kernels.sizes import MatmulTile

    dtype, rows = (torch.bfloat16, (1, 16, 17, 300)) if context.is_device else (torch.float32, (3,))
    draw = Draw(torch.Generator(context.device).manual_seed(0), dtype)
    weight = blocks_of(draw, form, *size)
    (part,), x = weight.parts, draw.noise(rows[-1], size[1])
    numbers = read_range(part, 0, draw.noise(*size))
    for count, tile in product(rows, (MatmulTile(16, 64, 128, 4, 3), MatmulTile(64, 64, 64, 4, 3))):
        multiplied = [Matmul(one, None, only_tile=tile)(x[:count]) for one in (weight, numbers)]
        error = relative_error(*multiplied)
        cells: dict[str, Cell] = {"form": form, "rows": count, "tile": f"{tile.rows} x {tile.outputs} x {tile.inputs}"}
        cells |= {"share that differs": share_of_others(*multiplied), "error": error}
        yield Row(SAME, cells, OK if error <= TOLERANCES[dtype] else WRONG)


def block_runner(model: str, form: str, context: Context) -> ModelRunner:
    """As random_runner, with all of the layers' matrices, embedding and head in blocks."""
    config, engine = parse_model_config(dict(config_of(model))), engine_config(context)
    choice = choose_for(config, engine)
    apply_threads(choice)
    draw = Draw(torch.Generator(choice.device).manual_seed(0), choice.dtype)
    memory = plan_memory(config, engine, choice, 0, free_memory_bytes(choice.device))
    with torch.inference_mode():
        weights, targets = empty_weights(config, choice.dtype, choice.device)
        for name, target in targets.items():
            if target.matrix is None:
                target.fill(draw_tensor(name, target.shape, choice.dtype, choice.device))
        is_tied, ends = weights.lm_head is weights.embedding, (config.vocab_size, config.hidden_size)
        weights.embedding = blocks_of(draw, form, *ends)
        weights.lm_head = weights.embedding if is_tied else blocks_of(draw, form, *ends)
        for layer in weights.layers:
            for owner, name in matrices(layer):
                setattr(owner, name, stored(draw, form, *floats(getattr(owner, name)).shape))
        runner = ModelRunner(config, engine, memory, weights, find_operators(config, choice))
    warm_up(runner)
    runner.open_graphs(lambda done, total: None)
    return runner


def _speed(model: str, form: str, context: Context) -> Iterator[Row]:
    if not context.is_device:
        yield Row(SPEED, {"model": model, "form": form}, SKIPPED, "a CPU has kernels of its own")
        return
    for stored_as in (form, "bfloat16"):
        context.drop()
        made = (
            random_runner(config_of(model), engine_config(context))
            if stored_as == "bfloat16"
            else block_runner(model, form, context)
        )
        allocated, streams = torch.cuda.memory_allocated() / 2**30, Streams(made)
        streams.prefill_s(128)  # compiles
        cells: dict[str, Cell] = {"model": model, "form": stored_as, "GiB allocated": allocated}
        cells["graphs"] = made.captured.num_graphs
        for batch in (1, 16, 64):
            cells[f"tokens/s of {batch} x 128"] = batch / streams.decode_s(batch, 128, 32)[0]
        cells["prompt of 1024, ms"] = 1e3 * min(streams.prefill_s(1024) for _ in range(3))
        yield Row(SPEED, cells)
        del made, streams


def _file(context: Context) -> Iterator[Row]:
    """Tokens of a small file in blocks beside the same as floats: loading, graphs, --deterministic."""
    if find_spec("gguf") is None or find_spec("transformers") is None:
        yield Row(FILE, {"file": "all"}, SKIPPED, "it needs the packages gguf and transformers")
        return
    oracle, files, how = (
        import_module("tests.oracle"),
        import_module("tests.gguf_files"),
        import_module("tests.gpu.test_gguf"),
    )
    prompts = [Random(length).choices(range(3, 300), k=length) for length in (70, 1, 33)]
    for family, kind in (("llama2", "Q4_0"), ("llama2", "Q8_0"), ("mixtral", "Q8_0")):
        with context.poisoned(), tempfile.TemporaryDirectory() as scratch:
            directory = oracle.save_random_model(family, Path(scratch) / family)
            file = files.write_gguf(directory, Path(scratch) / "model.gguf", files.Q[kind])
            config = check_checkpoint(open_checkpoint(file), how.model_of(file))
            answers = {}
            for name, more in (
                ("floats", {"activations": "bf16"}),
                ("blocks", {}),
                ("blocks, no graphs", {"graphs": "off"}),
                ("blocks, --deterministic", {"deterministic": True}),
            ):
                sizes = {"max_sequences": 8, "max_batch_tokens": 64, "kv_memory_bytes": KV_BYTES, "threads": 1}
                engine = EngineConfig(device=context.device.type, dtype="float32", **sizes, **more)  # type: ignore[arg-type]
                runner = load_runner(file, config, engine, lambda done, total: None)
                answers[name] = Streams(runner).answers(prompts, 16)
                cells: dict[str, Cell] = {"file": f"{family} {kind}", "as": name}
                yield Row(FILE, cells, OK if answers[name] == answers["floats"] else WRONG)
                del runner
