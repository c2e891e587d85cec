"""bench.gpu_check --part kv: keys and values in 8 bits (--kv-dtype int8) beside those in the rows' format.

- What is stored, to the last bit what a CPU stores of the same numbers; and attention, beside the textbook's over the
  numbers that the stored ones stand for.
- Attention over long contexts in both formats: times, and how many times as fast 8 bits are.
- A real shape's decodes over long contexts in the engine, the same way.
- The embedded model's predictions of a text: how often the likeliest token is the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from bench.engine import Streams, random_runner
from bench.gpu_kernels import EIGHT_B, HEADS, SCORES, TINY, TINY_SCORES, Draw, KernelCase, checks, empty_kv, grid, timed
from bench.gpu_model import KV_BYTES, config_of, models_of
from bench.gpu_run import FASTER_DECODES, OK, WRONG, Case, Context, Row, ceilings_case, judged
from bench.results import Cell
from core.config import BLOCK_SIZE, EngineConfig
from gpu.loading import load_runner
from gpu.quality import HELD_TEXT, Predictions, held_tokens, predict
from server.engine_loader import DEMO_DIRECTORY
from server.model_files import parse_config, read_model_files

STORED, TIMES, AGREEMENT = "What is stored", "Attention in both formats", "Predictions of the embedded model"
FORMATS = ("auto", "int8")  # of --kv-dtype
LEAST_AGREEMENT = 0.95  # on a CPU 98.9 % of the greedy tokens stay the same
ATTENDED = ((1, 32_768), (8, 32_768), (64, 4096), (64, 32_768))  # sequences, tokens of each
PROMPTS = (2048, 32_768)  # tokens
LONG = (8, 32_768)  # decodes of the engine: sequences, tokens of each
MODEL_LIMIT_S = 300.0


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    found = [ceilings_case(), Case("stored", _same_bits, 90.0, STORED), *checks(error_cases(is_quick, is_device))]
    attended = (ATTENDED[:2] if is_quick else ATTENDED) if is_device else ((2, 40),)
    shapes = [("decode_attention", {"sequences": sequences, "context": context}) for sequences, context in attended]
    prompts = (PROMPTS[:1] if is_quick else PROMPTS) if is_device else ()
    shapes += [("extend_attention", {"prompts": 1, "tokens": num_tokens}) for num_tokens in prompts]
    heads = EIGHT_B["heads"] if is_device else TINY["heads"]
    for builder, shape in shapes:
        case = KernelCase(builder, {**shape, **heads}, "bfloat16" if is_device else "float32")
        found.append(Case(f"time of {case.name}", partial(_times, case), 120.0, TIMES))
    found.append(Case("agreement", _agreement, 120.0, AGREEMENT))
    models = models_of(is_quick, is_device)[::-1]
    return found + [Case(f"{model}: decodes", partial(_decodes, model), MODEL_LIMIT_S, TIMES) for model in models]


def error_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    if not is_device:
        dtype, context, heads, scores = "float32", 40, TINY["heads"], ({}, *TINY_SCORES)
    else:
        dtype, context, heads, scores = "bfloat16", 700, EIGHT_B["heads"], ({}, *SCORES)
    found = grid("decode_attention", dtype, sequences=5, context=context, heads=heads, scores=scores, in_8_bits=True)
    prompts = {"prompts": 2, "tokens": context // 2, "decodes": 3}
    found += grid("extend_attention", dtype, shape=prompts, heads=heads, scores=scores, in_8_bits=True)
    norms = ("none", "head", "all")
    found += grid("rotate_and_store", dtype, rows=7, heads=heads, norm=norms, in_8_bits=True)
    for dtype in ("bfloat16", "float16", "float32") if is_device and not is_quick else ():
        decodes = {"sequences": 5, "context": 700}
        found += grid("decode_attention", dtype, shape=decodes, heads=HEADS, in_8_bits=True)
        found += grid("extend_attention", dtype, shape=prompts, heads=HEADS, in_8_bits=True)
    return list({case.name: case for case in found}.values())


def _same_bits(context: Context) -> Iterator[Row]:
    """Of numbers that are neither normed nor rotated, so that nothing is rounded before."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if context.is_device else (torch.float32,)
    for dtype, (kv_heads, head_dim) in ((dtype, size) for dtype in dtypes for size in ((8, 128), (2, 80), (1, 256))):
        draw = Draw(torch.Generator(context.device).manual_seed(0), dtype)
        num_tokens = context.of_size(20, 2000, 20_000)
        num_blocks = num_tokens // BLOCK_SIZE + 2
        slots, qkv = draw.order(num_blocks * BLOCK_SIZE)[:num_tokens], draw.noise(num_tokens, 3 * kv_heads, head_dim)
        qkv[5:9] *= 0.01
        sizes = (num_blocks, kv_heads, head_dim, dtype)
        found, wanted = (empty_kv(device, *sizes, in_8_bits=True) for device in (context.device, torch.device("cpu")))
        draw.operators().rotate_and_store(qkv, None, None, found, slots)
        wanted.write(slots.cpu(), *qkv[:, kv_heads:].cpu().chunk(2, 1))
        differ = (found.both.cpu() != wanted.both).double().mean().item()
        cells: dict[str, Cell] = {"dtype": str(dtype)[6:], "heads": kv_heads, "of": head_dim, "differ": differ}
        yield Row(STORED, cells, OK if differ == 0 else WRONG)


def _times(case: KernelCase, context: Context) -> Iterator[Row]:
    taken_s = []
    for in_8_bits in (False, True):
        with torch.inference_mode():
            problem, seconds, how = timed(replace(case, shape={**case.shape, "in_8_bits": in_8_bits}), context)
        taken_s.append(seconds)
        limit_s = max(problem.num_bytes / context.speed.read_bytes_per_s, problem.flops / context.speed.flops)
        measure = f"{case.name}, {'int8' if in_8_bits else 'as rows'}, µs"
        yield judged(context, TIMES, "", measure, seconds * 1e6, limit_s * 1e6, how)
        del problem
    yield judged(context, TIMES, "", f"{case.name}: {FASTER_DECODES}", taken_s[0] / taken_s[1])


def _decodes(model: str, context: Context) -> Iterator[Row]:
    """Of the engine, by graphs where it has them."""
    (batch, length), num_steps = (LONG, 32) if context.is_device else ((2, 40), 3)
    sizes = {"max_sequences": batch, "max_model_len": length + 256, "max_batch_tokens": min(8192, length)}
    engine = EngineConfig(device=context.device.type, **sizes)  # type: ignore[arg-type]
    if not context.is_device:
        engine = replace(engine, dtype="float32", kv_memory_bytes=KV_BYTES, threads=1)
    steps_s = []
    for kv_dtype in FORMATS:
        context.drop()
        runner = random_runner(config_of(model), replace(engine, kv_dtype=kv_dtype))
        steps_s.append(Streams(runner).decode_s(batch, length, num_steps)[0])
        shown = f"decode {batch} x {length}, --kv-dtype {kv_dtype}"
        yield judged(context, TIMES, model, f"{shown}: room for tokens", runner.memory.kv_tokens)
        yield judged(context, TIMES, model, f"{shown}, ms", steps_s[-1] * 1e3)
        del runner
    yield judged(context, TIMES, model, FASTER_DECODES, steps_s[0] / steps_s[1])


def _agreement(context: Context) -> Iterator[Row]:
    files = read_model_files(DEMO_DIRECTORY, None)
    config = parse_config(DEMO_DIRECTORY, files.config)
    tokens = held_tokens(files.tokenizer.encode(HELD_TEXT.read_text(encoding="utf-8")), config.max_position)
    tokens = tokens if context.is_device else tokens[:400]
    sizes = {"max_sequences": 1, "max_model_len": len(tokens) + 1, "max_batch_tokens": 32}
    engine = EngineConfig(device=context.device.type, **sizes)  # type: ignore[arg-type]
    if not context.is_device:
        engine = replace(engine, dtype="float32", kv_memory_bytes=KV_BYTES, threads=1)
    plain: Predictions | None = None
    for kv_dtype in FORMATS:
        asked = replace(engine, kv_dtype=kv_dtype)
        found = predict(load_runner(DEMO_DIRECTORY, config, asked, lambda done, total: None), tokens)
        plain = plain or found
        share = found.agreement(plain)
        cells: dict[str, Cell] = {"--kv-dtype": kv_dtype, "tokens": len(tokens), "perplexity": found.perplexity}
        yield Row(AGREEMENT, cells | {"same greedy token": share}, OK if share >= LEAST_AGREEMENT else WRONG)
