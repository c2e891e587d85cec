"""Agents' packages as people have them, against a server whose model plays a part. `make clients` installs them."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.engine_loader import DEMO_DIRECTORY, DEMO_NAME
from tests.e2e.replay import playing, written_calls, written_text
from tests.e2e.server_process import ServerProcess
from tests.server.running_server import run
from tests.server.test_embeddings import STYLE

HERE, INSTALLED = Path(__file__).parent / "clients", Path(sys.prefix) / "clients"
PYTHON = INSTALLED / "bin" / "python"
GUIDELLM, LM_EVAL = (INSTALLED / "evaluators" / "bin" / name for name in ("guidellm", "lm_eval"))
LIMIT_S = 300.0  # for a program that hangs
HAS_AI_SDK = shutil.which("node") is not None and (INSTALLED / "node_modules" / "ai").is_dir()
ANSWER, ADA = "It is 21 °C.", {"name": "Ada", "born": 1815}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (INSTALLED / ".installed").is_file(), reason="needs agents' packages: make clients"),
]


def play(form: str, prompt: str) -> str:
    """A call, then an answer; of a question for a form its fields, by a call where there is a function for it."""
    if "21 degrees" in prompt:
        return written_text(form, ANSWER)
    if "Who was" not in prompt:
        return written_calls(form, [("get_weather", {"city": "Köln", "days": 2})])
    function = re.search(r'"name": "(\w*Person|final_result)"', prompt)
    return written_calls(form, [(function[1], ADA)]) if function else written_text(form, json.dumps(ADA))


def what_comes_of(form: str, *command: str) -> Any:
    """The JSON that the command prints, given the server's URL."""
    found: list[Any] = []

    async def scenario() -> None:
        async with playing(form, lambda prompt: play(form, prompt), pooling=STYLE) as running:
            url = f"http://127.0.0.1:{running.server.listener.port}/v1"
            arguments = [url if one == "URL" else one for one in command]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*arguments, stdout=pipe, stderr=pipe)
            try:
                out, err = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, err.decode()
            found.append(json.loads(out))

    run(scenario)
    return found[0]


CASES = {
    "openai_agents": [[ANSWER, ["tool_call_item", "tool_call_output_item", "message_output_item"]], ADA] * 4,
    "langchain": [[ANSWER, [0, 1, 0, 0]], [ANSWER, [0, 1, 0, 0]], *[ADA] * 6] * 3,
    "instructor": [*[ADA] * 7, [ADA]],
    "pydantic_ai": [ANSWER, ANSWER, *[ADA] * 6] * 2,
    "litellm": [*[[ANSWER, 4]] * 8, ADA],
    "llama_index": [ANSWER, ANSWER, ADA],
    "embeddings": [True, [True, True, STYLE.num_dims], [[1, 1.0]]],
}


@pytest.mark.parametrize("package", CASES)
def test_an_agent_calls_reads_the_result_and_answers(package: str) -> None:
    assert what_comes_of("hermes", str(PYTHON), str(HERE / "agent_packages.py"), package, "URL") == CASES[package]


@pytest.mark.skipif(not HAS_AI_SDK, reason="needs openai for Node: install node and npm, then make clients")
def test_openais_sdk_in_node_streams_calls_and_embeds() -> None:
    called, items = ["get_weather", {"city": "Köln", "days": 2}], ["function_call", "message"]
    found = what_comes_of("hermes", "node", str(HERE / "openai_sdk.mjs"), "URL", str(INSTALLED))
    assert found == [ANSWER, called, ANSWER, items, [STYLE.num_dims] * 2]


@pytest.mark.skipif(not HAS_AI_SDK, reason="needs Vercel's AI SDK: install node and npm, then make clients")
@pytest.mark.parametrize("form", ["hermes", "xml", "mistral"])
def test_vercels_sdk_calls_reads_the_result_and_answers(form: str) -> None:
    steps = ["tool-calls", "stop"]
    found = what_comes_of(form, "node", str(HERE / "ai_sdk.mjs"), "URL", str(INSTALLED))
    assert found == [ANSWER, steps, ANSWER, steps, ADA, ADA]


@pytest.mark.skipif(not GUIDELLM.is_file(), reason="needs guidellm: make clients")
def test_guidellm_measures_each_of_its_requests(demo: ServerProcess, tmp_path: Path) -> None:
    report, asked = tmp_path / "report.json", ("prompt_tokens=32", "output_tokens=8")
    command = [str(GUIDELLM), "run", "--disable-console", "--profile", "kind=synchronous"]
    command += ["--backend", f"kind=openai_http,target={demo.url},model={DEMO_NAME}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={DEMO_DIRECTORY}"]
    command += ["--data", ",".join(("kind=synthetic_text", *asked)), "--constraint", "kind=max_requests,count=5"]
    command += ["--output", f"kind=json,path={report}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S, env=environment)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (requests["errored"], requests["incomplete"]) == ([], [])
    # Where a machine is slow, guidellm ends before its worker's last message has come
    assert 4 <= len(requests["successful"]) <= 5
    assert {one["output_tokens"] for one in requests["successful"]} == {8}


QUESTIONS = [{"question": f"{a} + {a} =", "choices": [f" {2 * a}", f" {2 * a + 1}"], "answer": 0} for a in range(1, 5)]
CHOOSING = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
SAYING = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.skipif(not LM_EVAL.is_file(), reason="needs lm-eval: make clients")
@pytest.mark.parametrize(
    ("kind", "path", "task"),
    [("completions", "completions", CHOOSING), ("chat-completions", "chat/completions", SAYING)],
)
def test_lm_eval_scores_all_of_its_documents(
    demo: ServerProcess, tmp_path: Path, kind: str, path: str, task: str
) -> None:
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    files = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/questions.jsonl}}}}\ntest_split: test"
    )
    (tmp_path / "sums.yaml").write_text(f"task: sums\n{files}\n{task}")
    model = f"model={DEMO_NAME},base_url={demo.url}/v1/{path},tokenizer={DEMO_DIRECTORY},num_concurrent=2"
    command = [str(LM_EVAL), "--model", f"local-{kind}", "--model_args", model, "--tasks", "sums"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    command += ["--apply_chat_template"] if kind.startswith("chat") else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OPENAI_API_KEY": "none"}
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S, env=environment, cwd=tmp_path)
    (samples,) = (tmp_path / "out").rglob("samples_sums_*.jsonl")
    assert len(samples.read_text().splitlines()) == len(QUESTIONS)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert set(json.loads(results.read_text())["results"]) == {"sums"}
