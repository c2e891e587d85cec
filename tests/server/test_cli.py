"""The command line: what is light, what is refused and how, what reaches the server."""

import json
import logging
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from core.config import QUANTIZE_SCHEMES
from core.errors import ExitCode, NotEnoughMemory
from server import __version__
from server.cli import BROKEN_PIPE, main
from server.commands.versions import FLOORS
from server.config import OPTIONS, ServerConfig
from server.values import format_count, format_size
from tests.certificates import make_certificate, needs_openssl
from tests.core.small_tokenizers import byte_level
from tests.fp8_files import BLOCKS, save_pair
from tests.gguf_files import byte_level_metadata, write_gguf
from tests.server.chat_peer import running_peer
from tests.server.tiny_model import CHATML, HIDDEN, INNER, write_tiny_model

ROOT = Path(__file__).parent.parent.parent
HEAVY = {"torch", "rich", "uvloop", "numpy", "asyncio", "jinja2", "tokenizers", "safetensors", "http.client", "email"}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("STEPLOOP_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_model(path)
    return path


def steploop(*words: str, typed: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it; what is typed comes by a pipe."""
    command, environment = [sys.executable, "-m", "server", *words], {**os.environ, **environ}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, input=typed, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("text", "words", "variable", "is_json"),
    [
        ("", ["--log-format", "json", "--prot", "8000"], "", True),
        ("", ["--log-format=json", "--kv-memory", "lots"], "", True),
        ('log_format = "json"\ndrian_timeout = "60s"\n', ["--config", "steploop.toml"], "", True),
        ('log_format = "json"  # of the unit\ndrain_timeout = 60s\n', ["--config=steploop.toml"], "", True),
        ('log_format = "json"\n', ["--config", "steploop.toml", "--debug", "--port", "http"], "", True),
        ("", ["--prot", "1"], "json", True),
        ("", ["--log-format", "text", "--prot", "1"], "json", False),
    ],
)
def test_refused_settings_are_told_as_json_where_the_log_is_json(
    text: str,
    words: list[str],
    variable: str,
    is_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steploop.toml").write_text(text)
    if variable:
        monkeypatch.setenv("STEPLOOP_LOG_FORMAT", variable)
    assert main(["serve", *words]) in (ExitCode.USAGE, ExitCode.CONFIGURATION)
    told = capsys.readouterr().err
    if not is_json:
        assert told.startswith("error: ")
        return
    assert told.count("\n") == 1
    record = json.loads(told)
    assert record["level"] == "critical"
    assert "error: " in record["message"]
    assert "\nfix: " in record["message"]


def test_other_commands_are_read_by_people_whatever_the_logs_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPLOOP_LOG_FORMAT", "json")
    assert main(["usage"]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("error: ")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"steploop {__version__}\n"


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, set[str]]:
    """The text, and the flags that it lists."""
    with pytest.raises(SystemExit):
        main([*words])
    text = capsys.readouterr().out
    return text, set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


def test_serve_help_lists_what_an_operator_can_be_asked_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    text, listed = help_of("serve", "--help", capsys=capsys)
    assert len(listed) <= 60
    assert listed - {"--estimate", "--debug", "--help-all"} == {one.flag for one in OPTIONS if not one.is_rare}
    assert all(f"{code:>2}  {code.meaning}" in text for code in ExitCode)


def test_help_all_lists_every_setting_and_docs_name_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    _, listed = help_of("serve", "--help-all", capsys=capsys)
    assert listed - {"--estimate", "--debug", "--help-all"} == {one.flag for one in OPTIONS}
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    variables = {name for text in texts for name in re.findall(r"\bSTEPLOOP_[A-Z0-9_]+[A-Z0-9]\b", text)}
    assert variables <= {one.variable for one in OPTIONS}


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        (["chat", "what is it?"], ExitCode.USAGE, "what is it?\nfix: steploop chat -q 'what is it?'\n"),
        (["serve", "a/b.gguf"], ExitCode.USAGE, "a/b.gguf\nfix: steploop serve --model a/b.gguf\n"),
        (["serve", "a/steploop.toml"], ExitCode.USAGE, "\nfix: steploop serve --config a/steploop.toml\n"),
        (["sevre"], ExitCode.USAGE, "unknown command: sevre; did you mean serve?"),
        (["chat", "--url", "http://127.0.0.1:9", "-q", "hi", "--insecure"], ExitCode.USAGE, "--insecure is for https"),
        (["serve", "--prot", "1"], ExitCode.USAGE, "unknown argument: --prot; did you mean --port?"),
        (["serve", "--prot=1"], ExitCode.USAGE, "did you mean --port?"),
        (["serve", "--max-model", "1"], ExitCode.USAGE, "did you mean --max-model-len?"),
        (["serve", "DIR"], ExitCode.USAGE, "unknown argument: DIR"),
        (["serve", "-c", "steploop.toml"], ExitCode.USAGE, "did you mean --config?"),
        (["serve", "--settings", "steploop.toml"], ExitCode.USAGE, "did you mean --config?"),
        (["serve", "--port"], ExitCode.USAGE, "expected one argument"),
        (["bench"], ExitCode.USAGE, "what to measure?"),
        (["chat", "--url", "http://a", "--model", str(ROOT)], ExitCode.USAGE, "two different models"),
        (["chat", "--url", "http://127.0.0.1:9", "-q", " "], ExitCode.USAGE, "the question from -q is empty"),
        (["serve", "--port", "x"], ExitCode.CONFIGURATION, "--port is 'x'"),
        (["serve", "--model", "/nowhere/at/all"], ExitCode.MODEL, "'/nowhere/at/all'"),
        (["serve", "--estimate", "--model", str(ROOT / "tests")], ExitCode.MODEL, "config.json is missing"),
        (["chat", "--url", "http://127.0.0.1:9", "-q", "hi"], ExitCode.UNREACHABLE, "does not answer"),
        (["chat", "--url", "127.0.0.1:9", "-q", "hi"], ExitCode.UNREACHABLE, "http://127.0.0.1:9 does not answer"),
    ],
)
def test_a_refusal_is_one_cause_and_one_fix(
    words: list[str], code: int, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    captured = capsys.readouterr()
    error, fix = captured.err.splitlines()
    assert (error.startswith("error: "), fix.startswith("fix: "), captured.out) == (True, True, "")
    assert cause in captured.err


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--port", "x", "--debug"])
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.splitlines()[-2].startswith("error: --port")


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.USAGE
    assert "serve a model" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["chat", "-q", "hi"], ["models"], ["keys", "list"], ["serve", "--estimate"]])
def test_a_reader_that_leaves_is_no_error(words: list[str], tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    if words[0] == "keys":
        words = [*words, "--keys-file", str(tmp_path / "keys.json")]
        assert main(["keys", "create", *words[2:]]) == ExitCode.OK
    with running_peer() as peer:
        words = [*words, "--url", peer.url] if words[0] == "chat" else words
        command = [sys.executable, "-m", "server", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE)
        os.close(write_end)
        _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (BROKEN_PIPE, b"")


@pytest.mark.parametrize(
    "wrong",
    ["", 'colour = "red"', "upstreams = 7", "[slo]\ncolour = 1", "[prices]\ncolour = 1", "[colour]"],
)
@pytest.mark.parametrize("variable", ["STEPLOOP_LORA", "STEPLOOP_COLOUR"])
def test_keys_and_usage_read_what_they_need_alone(
    wrong: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key can be revoked while the disk with the models is away, or somebody is editing the rest."""
    gone, file = tmp_path / "gone", tmp_path / "steploop.toml"
    settings = (f'{name} = "{gone / name}"' for name in ("models_dir", "model", "lora_dir", "chat_template"))
    entry = f'[[models]]\nname = "one"\npath = "{gone}/one"\nsettings = {{ lora = ["a={gone}/a"] }}'
    file.write_text("\n".join((f'keys_file = "{tmp_path / "keys.json"}"', "port = false", *settings, entry, wrong)))
    monkeypatch.setenv(variable, f"b={gone}/b")
    key = ""
    for words, code in (
        (["keys", "create"], ExitCode.OK),
        (["keys", "revoke"], ExitCode.OK),
        (["usage"], ExitCode.USAGE),  # no ledger is named
        (["serve"], ExitCode.CONFIGURATION),
    ):
        assert main([*words, *([key] if "revoke" in words else []), "--config", str(file)]) == code, words
        key = capsys.readouterr().out.strip()


def test_estimate_prints_the_plan_without_loading(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPLOOP_MAX_MODEL_LEN", "128")
    gguf = write_gguf(model_path, tmp_path / "tiny-f32.gguf", metadata=byte_level_metadata(byte_level(), "qwen2"))
    for path in (model_path, gguf):
        words = ["serve", "--estimate", "--model", str(path), "--device", "cpu", "--dtype", "float32"]
        assert main([*words, "--max-sequences", "4"]) == ExitCode.OK
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"model        {path.stem}, LlamaForCausalLM"
        assert lines[3] == "context      128 tokens: STEPLOOP_MAX_MODEL_LEN"
        assert any(line.endswith("512 tokens = 4.0 x 128") for line in lines)


def test_estimate_counts_8_bit_floats_as_they_are_served(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU they become floats, but where they are asked for."""
    stored, _ = save_pair(model_path, tmp_path, BLOCKS)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (stored / file).write_bytes((model_path / file).read_bytes())
    words = ["serve", "--estimate", "--model", str(stored), "--device", "cpu", "--dtype", "float32"]
    shown = []
    for more in ([], ["--quantize", "fp8"]):
        assert main([*words, *more]) == ExitCode.OK
        lines = capsys.readouterr().out.splitlines()
        shown.append([line.split(maxsplit=1)[1] for line in lines if line.startswith(("parameters", "weights"))])
    num_matrix = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INNER)
    num_rest = 5 * HIDDEN + byte_level().get_vocab_size() * HIDDEN
    kept_bytes = 4 * num_rest + num_matrix + num_matrix // 32 * 4
    assert shown[0] == [f"{format_count(num_matrix + num_rest)}, float32", format_size(4 * (num_matrix + num_rest))]
    assert shown[1] == [f"{format_count(num_matrix + num_rest)}, float32, layers fp8", format_size(kept_bytes)]


def test_estimate_refuses_what_would_not_load(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(model_path, tmp_path / "tiny"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    words = ["serve", "--estimate", "--device", "cpu", "--model"]
    assert main([*words, str(copy)]) == ExitCode.MODEL
    assert "9 tensors are missing: model.layers.2." in capsys.readouterr().err
    assert main([*words, str(model_path), "--kv-memory", "8TiB"]) == ExitCode.MEMORY
    error, fix = capsys.readouterr().err.splitlines()
    assert "8192.0 GiB" in error
    assert "--kv-memory" in fix


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations that the command line arrives at, which are kept instead of served."""
    configs: list[ServerConfig] = []

    def keep(config: ServerConfig, read_config: object) -> ExitCode:
        configs.append(config)
        return ExitCode.ENGINE

    monkeypatch.setattr("server.cli.run_server", keep)
    monkeypatch.setattr("server.observing.logs.configure_logging", lambda level, log_format: logging.NullHandler())
    monkeypatch.setattr("server.observing.logs.log_everything", lambda: None)
    return configs


def test_serve_hands_the_settings_over_and_its_exit_code_back(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPLOOP_MAX_QUEUE", "7")
    assert main(["serve", "--port", "0", "--api-key", "a", "--api-key", "b"]) == ExitCode.ENGINE
    assert served == [ServerConfig(port=0, api_keys=("a", "b"), max_queue=7)]


def test_serve_refuses_below_a_security_floor(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    assert main(["serve"]) == ExitCode.VERSION
    assert served == []
    text = capsys.readouterr().err
    assert all(f"{floor.distribution} is 0.1" in text for floor in FLOORS)


def test_one_question_in_a_pipe_gives_the_answer_of_the_configured_server_alone_on_stdout() -> None:
    with running_peer() as peer:
        settings = {"STEPLOOP_PORT": str(peer.server_address[1]), "STEPLOOP_API_KEY": "secret,other"}
        done = steploop("chat", "-q", "What is a KV cache?", **settings)
    assert (done.returncode, done.stdout) == (0, "KV cache\n")
    assert done.stderr.startswith("3 tokens after a prompt of 7: the first in ")
    assert "\x1b" not in done.stderr
    assert peer.keys == ["Bearer secret"]


@needs_openssl
def test_over_tls_chat_takes_a_certificate_that_was_named_or_any_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with running_peer(context) as peer:
        for words in (["--cacert", str(certificate)], ["--insecure"]):
            assert main(["chat", "--url", peer.url, "-q", "hi", *words]) == ExitCode.OK
            assert capsys.readouterr().out == "KV cache\n"
        assert main(["chat", "--url", peer.url, "-q", "hi"]) == ExitCode.UNREACHABLE
    assert "--cacert FILE" in capsys.readouterr().err


def test_a_named_model_is_served_in_process_whatever_else_is_up(model_path: Path) -> None:
    with running_peer() as peer:
        port = str(peer.server_address[1])
        done = steploop("chat", "-q", "What is a step?", "--model", str(model_path), STEPLOOP_PORT=port)
    assert done.returncode == 0, done.stderr
    assert peer.asked == []
    assert " tokens after a prompt of " in done.stderr.splitlines()[-1]


def test_a_model_that_does_not_load_in_process_is_told_as_serve_would(model_path: Path) -> None:
    done = steploop("chat", "-q", "hi", "--model", str(model_path), "--max-model-len", "9000")
    assert done.returncode == ExitCode.CONFIGURATION
    assert "9000" in done.stderr.splitlines()[-2]
    assert done.stderr.splitlines()[-1].startswith("fix: --max-model-len 256")


def test_ctrl_c_at_the_prompt_leaves_the_server_in_process_alone(model_path: Path) -> None:
    words = [sys.executable, "-m", "server", "chat", "--model", str(model_path)]
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("/help lists the commands" in line for line in lines)
    process.send_signal(signal.SIGINT)
    assert any("/bye leaves" in line for line in lines)
    process.communicate("/bye\n", timeout=300)
    assert process.returncode == 0


def test_the_question_can_come_from_stdin() -> None:
    with running_peer() as peer:
        done = steploop("chat", "--url", peer.url, "-q", "-", typed="from a pipe")
        empty = steploop("chat", "--url", peer.url, "-q", "-")
    assert done.returncode == 0
    assert [asked["messages"][0]["content"] for asked in peer.asked] == ["from a pipe"]
    assert empty.returncode == ExitCode.USAGE
    assert empty.stderr.startswith("error: the question from stdin is empty\nfix: ")


def test_bench_serve_hands_its_flags_to_the_load_generator(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "--help"])
    assert left.value.code == 0
    assert "--concurrency" in capsys.readouterr().out


def test_doctor_says_what_would_be_served_and_exits_as_serve_would(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--device", "cpu", "--port", "0", "--model"]
    assert main([*words, str(tmp_path)]) == ExitCode.MODEL
    text = capsys.readouterr().out
    assert "config.json is missing" in text
    assert text.splitlines()[-1] == "serve would refuse to start"
    assert main([*words, str(model_path)]) == ExitCode.OK
    text = capsys.readouterr().out
    assert all(word in text for word in ("hpack", "memory bandwidth", "tiny-llama, LlamaForCausalLM", "KV cache"))
    assert text.splitlines()[-1] == "serve would start"


def test_doctor_measures_what_quantising_costs(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["doctor", "--model", str(model_path), "--device", "cpu", "--port", "0", "--quality"]
    for more, num_schemes in (([], len(QUANTIZE_SCHEMES)), (["--quantize", "int8", "--quantize-cache", "0"], 1)):
        assert main([*words, *more]) == ExitCode.OK
        text = capsys.readouterr().out
        assert "test text" in text
        assert text.count("same greedy token") == num_schemes


def test_doctor_tells_what_measuring_needs_where_it_is_not_free(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_runner(*_: object) -> None:
        raise NotEnoughMemory("Weights need 4.0 GiB as bfloat16, 2.1 GiB free.", "--quantize int4")

    monkeypatch.setattr("gpu.loading.load_runner", load_runner)
    words = ["doctor", "--model", str(model_path), "--device", "cpu", "--port", "0", "--quality"]
    assert main(words) == ExitCode.OK
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "numbers as floats all else is compared with: Weights need 4.0 GiB as bfloat16, 2.1 GiB free." in text
    assert "--quantize int4" not in text.partition("Quality")[2]


def test_doctor_tells_of_the_machine_though_the_device_asked_for_is_not_there(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--model", str(model_path), "--device", "cuda", "--port", "0"]) == ExitCode.DEVICE
    text = capsys.readouterr().out
    assert text.count("error: ") == 1
    assert "memory bandwidth" in text


def test_a_gguf_file_answers_as_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text('{"do_sample": false}')
    tokenizer = byte_level()
    fields = {
        **byte_level_metadata(tokenizer, "qwen2", eos_token_id=tokenizer.token_to_id("<|im_end|>")),
        "tokenizer.chat_template": CHATML,
        "general.sampling.temp": 0.0,
    }
    file = write_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf", metadata=fields)
    answers = []
    for path in (tmp_path / "tiny", file):
        words = ["chat", "--model", str(path), "--device", "cpu", "--dtype", "float32", "--kv-memory", "4MiB"]
        assert main([*words, "-q", "hi"]) == ExitCode.OK
        answers.append(capsys.readouterr().out)
    assert len(answers[0]) > 100
    assert answers[0] == answers[1]
