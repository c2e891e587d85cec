"""bench.gpu_check on a CPU, on tiny shapes: its parts run, and what is wrong is told and makes it fail.

It is here for the conftest: the kernels are interpreted three times as fast as elsewhere.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_blocks, gpu_check, gpu_deterministic, gpu_http, gpu_kernels, gpu_kv, gpu_model, gpu_run
from bench.gpu_kernels import (
    Draw,
    KernelCase,
    Problem,
    add_norm,
    other_formats,
    relative_error,
    share_of_others,
    timed_cases,
    variant_cases,
)
from bench.gpu_run import (
    BELOW,
    FAILED,
    IDLE,
    LEFT_OUT,
    OK,
    SINGLE_STREAM,
    SKIPPED,
    WRONG,
    Case,
    Context,
    Job,
    Results,
    Row,
    judged,
    last_line,
    run_all,
    run_part,
    target_of,
)
from bench.limits import median_s, num_copies
from bench.results import read_result
from core.types import SamplingParams
from tests import deadly_cases

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEED = {"read_bytes_per_s": 1e10, "flops": 1e12}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(autouse=True)
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def asked(part: str, only: str | None, out: Path | None, limit: float = 3000.0) -> argparse.Namespace:
    return argparse.Namespace(part=part, quick=True, device="cpu", only=only, limit=limit, out=out)


def run_here(part: str, only: str, out: Path) -> tuple[int, list[dict[str, Any]]]:
    """A part in this process: exit code, and the rows of its result file, by column."""
    code = run_part(asked(part, only, out), ["--part", part], is_here=True)
    result = read_result(out / f"gpu-{part}.json")
    tables = [table for table in result.tables if not table.title.startswith("What fails")]
    return code, [dict(zip(table.columns, row, strict=True)) for table in tables for row in table.rows]


def verdicts(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [row["verdict"] for row in rows if row.get("verdict")]


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    return {row["measure"]: row["figure"] for row in rows if row.get("measure")}


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that nobody has measured: the probe has a test of its own."""

    def ceilings(context: Context) -> Iterator[Row]:
        context.state["speed"] = SPEED
        yield Row("Ceilings", {"case": "ceilings"})

    case = Case("ceilings", ceilings, 60.0, "Ceilings")
    for module in (gpu_kernels, gpu_blocks, gpu_kv, gpu_model, gpu_deterministic, gpu_http):
        monkeypatch.setattr(module, "ceilings_case", lambda: case)


@pytest.mark.parametrize(
    "builder",
    [
        "add_norm: rows 5",
        "prompt_tokens",
        "decode_attention: sequences 5, context 40, heads 6, kv_heads 2, head_dim 16, window 21",
        pytest.param("", marks=pytest.mark.slow),
    ],
)
def test_kernels_are_held_against_their_references(builder: str, known_speed: None, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    code, rows = run_here("kernels", builder, tmp_path)
    assert code == 0
    names = {case.name for case in kernel_cases(True, False) if builder in f"error of {case.name}"}
    assert verdicts(rows) == [OK] * len(names) != []
    assert all(row["error"] <= row["tolerance"] for row in rows if row.get("verdict") == OK)
    timed = [row["share of limit"] for row in rows if row.get("µs") is not None]
    assert len(timed) == sum(builder in f"time of {case.name}" for case in timed_cases(True, False))
    assert all(share > 0 for share in timed)
    assert builder in (tmp_path / "gpu-kernels.md").read_text()


def test_rows_and_requests_are_held_against_themselves_alone(known_speed: None, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    from tests.gpu.kernels.interpreted import dots_in_order

    for only, rows in (("matmul plain", 3), ("tiny: company", 1)):
        with dots_in_order():
            code, found = run_here("deterministic", only, tmp_path)
        assert code == 0
        assert verdicts(found) == [OK] * rows


@pytest.mark.parametrize(("only", "rows"), [("block_matmul: form Q6_K", 2), ("form Q4_K, rows 5", 1), ("of Q8_0", 5)])
def test_blocks_are_what_they_stand_for(only: str, rows: int, known_speed: None, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    from tests.gpu.kernels.interpreted import dots_in_order

    with dots_in_order():
        code, found = run_here("blocks", only, tmp_path)
    assert code == 0
    assert verdicts(found) == [OK] * rows
    assert {row.get("share that differs") for row in found} <= {None, 0.0}


@pytest.mark.parametrize(
    ("only", "rows"),
    [
        ("stored", 3),
        ("head_dim 16, norm head", 1),
        ("decode_attention: sequences 5, context 40, heads 6, kv_heads 2, head_dim 16, cap", 1),
        ("agreement", 2),
        ("tiny: decodes", 0),
    ],
)
def test_keys_and_values_in_8_bits_are_what_they_stand_for(
    only: str, rows: int, known_speed: None, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    code, found = run_here("kv", only, tmp_path)
    assert code == 0
    assert verdicts(found) == [OK] * rows
    ratios = [row["figure"] for row in found if str(row.get("measure")).endswith(gpu_run.FASTER_DECODES)]
    assert len(ratios) == (only == "tiny: decodes")


def kernel_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    variants = variant_cases(is_quick, is_device) + other_formats(is_quick, is_device)
    return timed_cases(is_quick, is_device) + variants


def all_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """Of the parts that check kernels."""
    of_blocks = gpu_blocks.error_cases(gpu_blocks.FORMS, is_device) + gpu_blocks.timed_cases(is_quick, is_device)
    return kernel_cases(is_quick, is_device) + of_blocks + gpu_kv.error_cases(is_quick, is_device)


@pytest.mark.parametrize("is_device", [True, False])
def test_each_builder_has_cases_and_their_names_are_their_own(is_device: bool) -> None:
    found = all_cases(False, is_device)
    by_name = {case.name: case for case in found}
    assert all(by_name[case.name] == case for case in found)
    assert {case.builder for case in found} == set(gpu_kernels.BUILDERS)
    for cases in (gpu_kernels.cases(False, is_device), gpu_blocks.cases(False, is_device)):
        assert len({case.name for case in cases}) == len(cases)


def test_every_feature_of_sampling_is_among_what_is_asked() -> None:
    """A field that kernels learn to read is to be tried on the device, too."""
    asked = {name for asks in gpu_kernels.ASKS["all"] for name in asks}
    not_sampled = {"max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "num_logprobs", "num_prompt_logprobs"}
    not_sampled |= {"skip_special_tokens"}
    not_sampled |= {"typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold"}  # torch alone draws these
    not_sampled |= {name for name in SamplingParams.__struct_fields__ if name.startswith("dry_")}  # biases, to kernels
    not_sampled |= {"repeat_last_n"}  # counts
    assert asked == set(SamplingParams.__struct_fields__) - not_sampled


def planted(fault: Callable[[torch.Tensor], object]) -> Callable[..., Problem]:
    """The norm's problem, of whose result one number is spoilt, or never written."""

    def build(draw: Draw, **shape: Any) -> Problem:
        found = add_norm(draw, **shape)

        def launch() -> tuple[torch.Tensor, ...]:
            total, normed = found.launch()
            fault(normed)
            return total, normed

        return Problem(launch, found.reference, found.num_bytes)

    return build


def scale_one(out: torch.Tensor) -> None:
    out[-1, -1] *= 1.01


def leave_unwritten(out: torch.Tensor) -> None:
    out[0] = torch.empty_like(out[0])


def fail(out: torch.Tensor) -> None:
    raise RuntimeError("first\nCUDA error: what the last line says\n")


@pytest.mark.parametrize(("fault", "verdict"), [(scale_one, WRONG), (leave_unwritten, WRONG), (fail, FAILED)])
def test_a_kernel_that_is_wrong_or_raises_is_told_costs_its_own_row_and_fails_the_check(
    fault: Callable[[torch.Tensor], object],
    verdict: str,
    known_speed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    monkeypatch.setitem(gpu_kernels.BUILDERS, "planted", planted(fault))
    cases = [KernelCase(name, {"rows": 2, "width": 24}, "float32") for name in ("planted", "add_norm")]
    monkeypatch.setattr(gpu_kernels, "variant_cases", lambda is_quick, is_device: cases)
    monkeypatch.setattr(gpu_kernels, "timed_cases", lambda is_quick, is_device: [])
    code, rows = run_here("kernels", "", tmp_path)
    assert code == 1
    assert verdicts(rows) == [verdict, OK]
    notes = {row.get("note") for row in rows}
    assert ("RuntimeError: CUDA error: what the last line says" in notes) == (verdict == FAILED)


@pytest.mark.slow
def test_the_command_tells_the_environment_and_writes_it(tmp_path: Path) -> None:
    code = gpu_check.main(["--part", "environment", "--device", "cpu", "--quick", "--out", str(tmp_path)])
    assert code == 0
    result = read_result(tmp_path / "gpu-environment.json")
    assert result.command.startswith("python -m bench.gpu_check --part environment")
    assert json.loads(json.dumps(result.config))["facts"]["device"] == "cpu"
    assert {"Packages", "Device"} <= {table.title for table in result.tables}


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_check.NEEDED, "kernels", ("torch", "no_such_package", "nor_this"))
    assert gpu_check.main(["--part", "kernels", "--device", "cpu"]) == 2
    assert "needs no_such_package, nor_this: not installed" in capsys.readouterr().err


def test_errors_are_relative_to_the_reference_or_count_what_differs() -> None:
    cases = {
        (3.0, 4.0): 0.0,
        (3.0, 9.0): 1.0,
        (float("nan"), 4.0): float("inf"),
        (3.0,): float("inf"),
    }
    for found, error in cases.items():
        assert relative_error(torch.tensor(found), torch.tensor([3.0, 4.0])) == error
    assert relative_error(torch.tensor([0.0, 0.5]), torch.zeros(2)) == 0.5
    assert share_of_others(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])) == 0.25
    assert share_of_others(torch.tensor([1]), torch.tensor([1, 2])) == float("inf")
    assert last_line(ValueError("first\n\n  last ")) == "ValueError: last"
    assert last_line(ValueError()) == "ValueError"


def on_device(name: str, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    return Context(CUDA, False)


def test_a_target_is_judged_on_its_own_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(context: Context, rate: float, limit: float) -> str:
        return judged(context, "a table", "llama-8b", SINGLE_STREAM, rate, limit).verdict

    h200 = on_device("NVIDIA H200", monkeypatch)
    assert [verdict(h200, *asked) for asked in ((239, 280), (240, 280), (260, 310))] == [BELOW, OK, BELOW]
    other = on_device("NVIDIA L4", monkeypatch)
    assert [verdict(other, 17, limit) for limit in (21, 20)] == [BELOW, OK]
    assert judged(other, "a table", "llama-8b", gpu_run.first_token_of(1024), 100.0).verdict == ""
    assert verdict(Context(CPU, False), 1, 100) == ""


def test_targets_are_ends_of_a_range_and_one_that_is_missed_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = on_device("NVIDIA L4", monkeypatch)
    found, most = target_of("llama-8b", gpu_run.FULL_SERVER), target_of("tiny", IDLE)
    assert found is not None
    assert most is not None
    assert [found.verdict(1.0, share, context) for share in (None, 0.79, 0.8)] == [BELOW, BELOW, OK]
    assert [most.verdict(figure, None, context) for figure in (0.05, 0.06)] == [OK, BELOW]
    assert target_of("tiny", SINGLE_STREAM) is None
    results = Results("model", "", None)
    results.add(judged(context, "a table", "tiny", IDLE, 0.06))
    results.show()
    assert f"below target: a table: measure {IDLE}  figure 0.06  target <= 0.05" in capsys.readouterr().out
    rows = [judged(Context(CPU, False), "", "", measure, 4.0, 5.0) for measure in ("x, tokens/s", "x, ms")]
    assert [row.cells["share"] for row in rows] == [0.8, 1.25]


def test_each_target_is_a_figure_that_is_measured() -> None:
    """Of those whose names hold sizes; the others' are shared with who measures them."""
    assert 1024 in gpu_model.FULL.prompts
    assert gpu_run.DECODE_ATTENTION in {case.name for case in timed_cases(False, True)}
    assert (gpu_http.FULL.clients, gpu_http.FULL.prompt, gpu_http.FULL.output) == (512, 128, 1024)
    assert {model for model, _ in gpu_run.TARGETS} == {"", *gpu_model.MODELS}
    assert f"time of {gpu_run.LONG_ATTENTION}" in {case.name for case in gpu_kv.cases(False, True)}
    assert {f"{model}: decodes" for model in gpu_model.MODELS} <= {case.name for case in gpu_kv.cases(False, True)}


def test_inputs_rotate_beyond_a_cache_on_a_device_alone() -> None:
    assert [num_copies(size, CUDA) for size in (1, 2**25, 2**30)] == [32, 8, 1]
    assert num_copies(1, CPU) == 1
    calls: list[int] = []
    seconds, how = median_s([lambda: calls.append(1), lambda: calls.append(2)], CPU)
    assert (how, calls) == ("called", [1, 2])
    assert seconds >= 0


def test_what_is_kept_is_given_back_for_what_comes_next() -> None:
    context, made = Context(CPU, True), list[str]()
    for key in ("a", "a", "b", "a"):
        assert context.once(key, lambda key=key: made.append(key) or key) == key  # type: ignore[misc]
    assert made == ["a", "b", "a"]


@pytest.mark.slow
def test_a_small_model_gives_every_figure_in_the_engine(known_speed: None, tmp_path: Path) -> None:
    code, rows = run_here("model", "tiny", tmp_path)
    assert code == 0
    measured = figures(rows)
    for wanted in ("decode 4 x 32, tokens/s", SINGLE_STREAM, "whole of a step of 8, µs"):
        assert measured[wanted] > 0
    assert measured["steps from cancel to the last news"] == 1
    assert verdicts([row for row in rows if "measure" in row]) == []  # a CPU is held against no target
    same = [row for row in rows if row.get("off the likeliest") is not None]
    assert verdicts(same) == [OK, OK]
    assert {row["answers as the first"] for row in same} == {2}


@pytest.mark.slow
def test_a_family_says_what_transformers_says(known_speed: None, tmp_path: Path) -> None:
    code, rows = run_here("model", "family llama3", tmp_path)
    assert code == 0
    assert OK in verdicts(rows)
    assert set(verdicts(rows)) <= {OK, SKIPPED}
    assert [row["verdict"] for row in rows if row.get("steps") == "of two ranks"] == [OK]


def test_where_answers_part_is_told() -> None:
    answer = [[5, 6, 7], [8, 9, 9]]
    assert gpu_model.difference(answer, answer) == ""
    assert gpu_model.difference([[5, 6, 7], [8, 9, 1]], answer) == "tokens are the same for [3, 2] of 3"
    assert gpu_model.difference([[5, 6]], [[5, 6, 7]]) == "tokens are the same for [2] of 3"


@pytest.mark.slow
def test_the_port_answers_all_that_is_asked(known_speed: None, tmp_path: Path) -> None:
    code, rows = run_here("http", "tiny", tmp_path)
    assert code == 0
    measured = figures(rows)
    for wanted in (
        "http 4 x 48/6, tokens/s",
        "http single stream, tokens/s",
        gpu_run.TAIL_BESIDE_PROMPTS,
        gpu_run.BESIDE_ENGINE,
    ):
        assert measured[wanted] > 0


@pytest.mark.slow
def test_a_case_that_takes_its_process_down_costs_itself_alone(tmp_path: Path) -> None:
    """One dies, one never ends; those behind them run in other processes, with what those before have left."""
    results = Results("deadly", "", tmp_path / "deadly")
    run_all(Job("tests.deadly_cases", "cpu", True), deadly_cases.cases(True, False), results, time.monotonic() + 300)
    told = [(row.cells["case"], row.verdict, row.note) for row in results.rows]
    assert told == [
        ("counts", OK, ""),
        ("dies", FAILED, "its process ended with SIGKILL"),
        ("never ends", FAILED, "given up: it took longer than it may"),
        ("counts again", OK, ""),
    ]
    assert results.rows[-1].cells["seen"] == 2
    told_first = read_result(tmp_path / "deadly.json").tables[1]
    assert told_first.title == "What fails: deadly"
    assert [row[0] for row in told_first.rows] == [FAILED, FAILED]


@pytest.mark.slow
def test_cases_that_time_nothing_run_at_once(tmp_path: Path) -> None:
    """Each waits for the other, so that neither would end alone; who dies beside them costs itself alone."""
    os.mkfifo(tmp_path / "pipe")
    job, results = Job("tests.deadly_cases", "cpu", False), Results("meeting", "", None)
    results.state["pipe"] = str(tmp_path / "pipe")
    run_all(job, deadly_cases.cases(False, False), results, time.monotonic() + 300, 3)
    told = [(row.cells["case"], row.verdict) for row in results.rows]
    assert sorted(told[:-1]) == [("dies", FAILED), ("reads", OK), ("writes", OK)]
    assert told[-1] == ("alone", OK)


def test_what_there_is_no_time_for_is_told_and_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_part(asked("environment", None, tmp_path, limit=0.0), [], is_here=True)
    assert code == 1
    rows = read_result(tmp_path / "gpu-environment.json").tables[1].rows  # what fails
    assert {row[0] for row in rows} == {LEFT_OUT}
    assert "left out: Packages: case packages  the part's time was up" in capsys.readouterr().out


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_part(asked("environment", "no such", None), [], is_here=True) == 2
    assert "no case of --part environment has 'no such'" in capsys.readouterr().err
