"""The same bits in any company, for every format that a CPU serves; and a start that is refused where they are not."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from core.config import QUANTIZE_SCHEMES
from core.errors import StartupError
from core.scheduler import Scheduler
from core.types import Request, SamplingParams
from gpu.loading import load_runner
from gpu.model import Model
from gpu.runner import keeps_rounding
from tests.fakes import FakeClock
from tests.gguf_files import write_gguf
from tests.gpu.conftest import ENGINE, no_progress, open_runner
from tests.gpu.test_gguf import model_of
from tests.gpu.test_overlap import EOS, draw_workload
from tests.workload import Workload, WorkloadRun


@pytest.mark.parametrize(
    ("scheme", "dtype", "activations", "kv_dtype"),
    [
        *((scheme, "bfloat16", "auto", "auto") for scheme in QUANTIZE_SCHEMES),
        ("int8", "float32", "auto", "auto"),
        ("int4", "float32", "int8", "int8"),
        (None, "bfloat16", "auto", "int8"),
        (Q.Q8_0, "bfloat16", "auto", "auto"),
        (Q.Q4_0, "float32", "auto", "int8"),
    ],
)
def test_tokens_and_logprobs_do_not_depend_on_what_else_is_computed(
    model_directory: Callable[[str], Path],
    tmp_path: Path,
    scheme: str | Q | None,
    dtype: str,
    activations: str,
    kv_dtype: str,
) -> None:
    """Alone with all the room and no drafts; together in few blocks, in small chunks, with drafts."""
    asked = replace(ENGINE, dtype=dtype, activations=activations, kv_dtype=kv_dtype, deterministic=True)
    if isinstance(scheme, Q):
        file = write_gguf(model_directory("llama2"), tmp_path / "model.gguf", scheme)
        runner = load_runner(file, model_of(file), asked, no_progress)
    else:
        runner = open_runner(model_directory("qwen3"), replace(asked, quantize=scheme))
    together = Workload(draw_workload(random.Random(1)).requests[:6])
    limits = runner.limits
    runner.limits = replace(limits, num_blocks=5, max_batch_tokens=24, timed_rows=())
    crowd = Scheduler(runner.limits, (EOS,), seeds=lambda: 0)
    found = WorkloadRun(together, crowd, runner, FakeClock()).run()
    assert crowd.stats().num_preemptions > 0
    runner.limits = limits
    for _, request in together.requests:
        alone = Scheduler(limits, (EOS,), seeds=lambda: 0, speculates=False, has_prefix_cache=False)
        expected = WorkloadRun(Workload([(0, request)]), alone, runner, FakeClock()).run()
        assert found[request.request_id] == expected[request.request_id]


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_chat_goes_on_with_the_same_bits_whether_its_answer_was_kept_or_not(
    model_directory: Callable[[str], Path], is_deterministic: bool
) -> None:
    """What was sampled is computed token by token, a prompt in tiles: the two round differently."""
    runner = open_runner(model_directory("qwen3"), replace(ENGINE, deterministic=is_deterministic))
    greedy = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, num_logprobs=0)
    first = Request(
        request_id="first",
        prompt_ids=tuple(random.Random(0).choices(range(3, 250), k=150)),
        sampling=greedy,
        arrival_s=0.0,
    )
    kept, empty = (Scheduler(runner.limits, (EOS,), seeds=lambda: 0) for _ in range(2))
    (answered,) = WorkloadRun(Workload([(0, first)]), kept, runner, FakeClock()).run()["first"].endings
    second = Request(
        request_id="second",
        prompt_ids=(*first.prompt_ids, *answered.token_ids, 7, 8, 9),
        sampling=greedy,
        arrival_s=0.0,
    )
    found, alone = (
        WorkloadRun(Workload([(0, second)]), one, runner, FakeClock()).run()["second"].endings for one in (kept, empty)
    )
    num_cached = kept.stats().num_cache_hits
    assert num_cached == (150 // 16 if is_deterministic else 209 // 16) * 16
    assert (found == alone) or not is_deterministic


def test_a_matmul_that_rounds_by_company_is_found(
    model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sociable(x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * (len(x) > 4))

    assert (
        keeps_rounding([(torch.nn.Linear(64, 32).requires_grad_(False), 64)], torch.float32, torch.device("cpu"), ())
        is True
    )
    assert keeps_rounding([(sociable, 64)], torch.float32, torch.device("cpu"), (1,)) is False
    monkeypatch.setattr(Model, "probes", lambda self, size_bytes: [(sociable, 64)])
    with pytest.raises(StartupError, match="--deterministic is not possible"):
        open_runner(model_directory("llama3"), replace(ENGINE, deterministic=True))
