"""The report: facts, what stands in the way, and the exit code that follows."""

import dataclasses
import io
import socket
import sys
from pathlib import Path

import pytest

from core.errors import DeviceUnavailable, ExitCode, NotEnoughMemory, StartupError
from server.commands.doctor import (
    MachineFacts,
    PlanFacts,
    QualityFacts,
    Section,
    exit_code,
    machine_section,
    plan_lines,
    print_report,
    quality_section,
    serving_section,
    try_bind,
    version_section,
)
from server.commands.hub_cache import NotFetched
from server.listening.sockets import Bind, TcpAddress, bind_value

FREE_PORT = Bind(TcpAddress(port=0))
MACHINE = MachineFacts(
    device="cpu",
    device_reason="no CUDA device was found",
    dtype="bfloat16",
    dtype_reason="the CPU has avx512_bf16",
    threads=1,
    threads_reason="2 physical cores; fewer for steps of few tokens",
    num_cores=2,
    memory_bytes=24 * 2**30,
    free_bytes=20 * 2**30,
    bandwidth_bytes_per_s=42.4e9,
)
PLAN = PlanFacts(
    model_name="steploop-demo",
    architecture="LlamaForCausalLM",
    is_demonstration=True,
    num_parameters=5_100_000,
    dtype="bfloat16",
    device="cpu",
    device_reason="no CUDA device was found",
    weights_bytes=10 * 2**20,
    activation_bytes=20 * 2**20,
    kv_bytes=64 * 2**20,
    num_kv_tokens=33_792,
    max_model_len=2048,
    context_origin="the model's own",
    attention="torch's: the model is too small to repay loading kernels",
    products="torch's: the model is too small to repay loading kernels",
    graphs="none: on cpu there is nothing to gain",
    total_bytes=94 * 2**20,
    free_bytes=20 * 2**30,
)


def raising(error: StartupError) -> PlanFacts:
    raise error


def report(*sections: Section) -> str:
    stream = io.StringIO()
    print_report(sections, stream)
    return stream.getvalue()


def test_plan_adds_up_and_says_where_each_figure_is_from() -> None:
    assert plan_lines(PLAN) == [
        "model        steploop-demo, LlamaForCausalLM (demonstration model)",
        "parameters   5.1M, bfloat16",
        "device       cpu: no CUDA device was found",
        "context      2,048 tokens: the model's own",
        "weights      10 MiB",
        "activations  20 MiB at most",
        "KV cache     64 MiB: 33,792 tokens = 16.5 x 2,048",
        "attention    torch's: the model is too small to repay loading kernels",
        "matmuls      torch's: the model is too small to repay loading kernels",
        "CUDA graphs  none: on cpu there is nothing to gain",
        "in all       94 MiB of 20 GiB free",
    ]


def test_plan_names_the_host_memory_that_is_asked_for() -> None:
    lines = plan_lines(dataclasses.replace(PLAN, offload_bytes=2**30, total_bytes=2**30 + 94 * 2**20))
    assert "host memory  1 GiB for KV blocks that give way" in lines
    assert lines[-1] == "in all       1.1 GiB of 20 GiB free"


def test_plan_names_the_directory_that_outlives_the_process() -> None:
    lines = plan_lines(dataclasses.replace(PLAN, offload_bytes=2**30, offload_dir="/var/cache/kv"))
    assert "KV files     in /var/cache/kv: what lies in host memory, for the next start" in lines


def test_a_model_that_serve_would_fetch_is_no_error() -> None:
    missing = NotFetched("model org/tiny is not in the cache yet", "fetch it first")
    section = serving_section(lambda: raising(missing), [FREE_PORT])
    assert exit_code([section]) == ExitCode.OK
    assert "model org/tiny is not in the cache yet" in report(section)


def test_a_healthy_report_ends_with_yes_and_zero() -> None:
    sections = (version_section(), machine_section(MACHINE), serving_section(lambda: PLAN, [FREE_PORT]))
    assert exit_code(sections) == ExitCode.OK
    text = report(*sections)
    assert "42.4 GB/s read" in text
    assert "\x1b" not in text
    assert text.splitlines()[-1] == "serve would start"


def test_each_error_is_told_with_its_fix_and_the_first_decides_the_code() -> None:
    memory = NotEnoughMemory("KV cache: need 5.0 GiB for 32768 tokens, 2.1 GiB free.", "--max-model-len 13700")
    sections = (
        version_section(lambda name: None if name == "torch" else "99"),
        serving_section(lambda: raising(memory), [FREE_PORT]),
    )
    assert exit_code(sections) == ExitCode.VERSION
    assert exit_code(sections[1:]) == ExitCode.MEMORY
    text = report(*sections)
    assert f"error: torch is not installed\nfix: {sys.executable} -m pip install torch\n" in text
    assert "fix: --max-model-len 13700\n" in text
    assert text.splitlines()[-1] == "serve would refuse to start"


def test_a_floor_that_is_not_held_is_an_error() -> None:
    section = version_section(lambda name: "4.3.0" if name == "h2" else "99")
    assert exit_code([section]) == ExitCode.VERSION


def test_a_device_that_is_not_there_is_an_error_told_once_and_the_machine_is_told_all_the_same() -> None:
    error = DeviceUnavailable("Device cuda: this torch has no CUDA.", "--device cpu")
    machine = machine_section(dataclasses.replace(MACHINE, device_error=error))
    sections = [machine, serving_section(lambda: raising(error), [FREE_PORT])]
    assert exit_code(sections) == ExitCode.DEVICE
    facts = {fact.name: fact.value for fact in machine.facts}
    assert facts["device"] == "none"
    assert facts["memory"] == "24 GiB, 20 GiB free"
    assert facts["memory bandwidth"] == "42.4 GB/s read"
    assert "number format" not in facts
    text = report(*sections)
    assert text.count("error: Device cuda: this torch has no CUDA.\nfix: --device cpu\n") == 1


def test_values_are_shown_as_they_are_not_as_markup() -> None:
    odd = PlanFacts(**{name: getattr(PLAN, name) for name in PLAN.__slots__} | {"model_name": "[red]odd[/red]"})
    assert "[red]odd[/red]" in report(serving_section(lambda: odd, [FREE_PORT]))


def test_a_taken_port_is_told_before_serve_finds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            try_bind(Bind(TcpAddress(port=port)))
    assert caught.value.exit_code == ExitCode.PORT
    assert f"127.0.0.1:{port}" in caught.value.cause


def test_a_host_that_is_not_ours_is_told() -> None:
    with pytest.raises(StartupError) as caught:
        try_bind(Bind(TcpAddress("192.0.2.1", 0)))  # TEST-NET-1, RFC 5737: nobody's
    assert caught.value.exit_code == ExitCode.PORT


def test_each_bind_is_tried_where_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    assert try_bind(bind_value(f"proxy:unix:{path}")) == f"unix:{path} is free"
    assert not path.exists()
    assert try_bind(FREE_PORT) == "127.0.0.1, on a free port"
    assert try_bind(bind_value("systemd:front")) == "systemd:front, as systemd passes it"


def test_threads_measured_before_are_shown() -> None:
    machine = dataclasses.replace(MACHINE, measured_threads=(("896 x 4864, bfloat16", "1; 2 from 8 tokens a step"),))
    facts = [(fact.name.strip(), fact.value) for fact in machine_section(machine).facts]
    assert ("measured", "1; 2 from 8 tokens a step: 896 x 4864, bfloat16") in facts


def test_quality_is_told_against_the_model_as_it_is() -> None:
    plain = QualityFacts(None, "bfloat16", 900, 10.0, 1.0, 100 * 2**20)
    int8 = QualityFacts("int8", "bfloat16", 900, 10.02, 0.993, 50 * 2**20)
    lines = report(quality_section(lambda: [plain, int8]))
    assert "900 tokens" in lines
    assert "perplexity 10.000, weights 100 MiB" in lines
    assert "perplexity 10.020 (x 1.0020), same greedy token 99.3%, weights 50 MiB" in lines


def test_quality_that_cannot_be_measured_says_why() -> None:
    def find() -> list[QualityFacts]:
        raise NotEnoughMemory("Too little.", "a smaller model")

    section = quality_section(find)
    assert exit_code([section]) == ExitCode.MEMORY
    assert "Too little." in report(section)
