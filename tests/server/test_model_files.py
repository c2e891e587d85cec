"""What a model directory says, and what the operator is told when it is not one."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import InvalidRequest, StartupError
from server.api.fields import ChatPrompt, GenerationDefaults, TextPrompt
from server.loaded_engine import EngineFacts, compiler_of, identity_of
from server.model_files import ModelFiles, parse_config, read_model_files
from server.prompts import PromptReader
from tests.core.small_tokenizers import byte_level
from tests.server.running_server import LIMITS

NOW = datetime(2026, 7, 4)
CHAT = [{"role": "user", "content": "hi"}]
TOKENIZER_JSON = byte_level().to_str()
CONFIG = {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 2}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The least that a model directory holds."""
    path = tmp_path / "Llama-Tiny"
    path.mkdir()
    write(path, "config.json", CONFIG)
    write(path, "tokenizer_config.json", {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"})
    (path / "tokenizer.json").write_text(TOKENIZER_JSON)
    return path


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value))


def rendered(files: ModelFiles, tools: list[dict[str, Any]] | None = None) -> str:
    return files.chat_template.render(CHAT, now=NOW, tools=tools)


def refusal(path: Path, **options: Any) -> StartupError:
    with pytest.raises(StartupError) as caught:
        read_model_files(path, **options)
    return caught.value


def test_least_directory_has_configuration_tokenizer_and_ends(directory: Path) -> None:
    files = read_model_files(directory)
    assert files.config == CONFIG
    assert files.tokenizer.decode(files.tokenizer.encode("a step")) == "a step"
    assert files.eos_ids == (2,)
    assert files.recommended == {}
    with pytest.raises(InvalidRequest, match="no chat template"):
        rendered(files)


def test_directory_without_tokenizer_config_is_served(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    write(directory, "special_tokens_map.json", {"eos_token": {"content": "<|im_start|>", "special": True}})
    files = read_model_files(directory)
    assert files.tokenizer.special_tokens == {"eos_token": "<|im_start|>"}
    assert files.eos_ids == (2, 1)


@pytest.mark.parametrize(
    ("config", "generation", "eos_ids"),
    [
        ({}, {}, (2,)),
        ({}, {"eos_token_id": 7}, (7, 2)),
        ({}, {"eos_token_id": [7, 2, 9]}, (7, 2, 9)),
        ({}, {"eos_token_id": 0}, (0, 2)),
        ({"vocab_size": 300}, {"eos_token_id": [2, 300, -1, 10**9]}, (2,)),  # the model cannot sample the others
    ],
)
def test_ends_are_those_of_generation_config_and_tokenizer(
    directory: Path, config: dict[str, Any], generation: dict[str, Any], eos_ids: tuple[int, ...]
) -> None:
    write(directory, "config.json", CONFIG | config)
    write(directory, "generation_config.json", generation)
    assert read_model_files(directory).eos_ids == eos_ids


NEUTRAL = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "epsilon_cutoff": 0.0, "sequence_bias": None, "num_beams": 1}
NEUTRAL |= {"encoder_repetition_penalty": 1.0, "guidance_scale": None, "min_length": 0, "forced_eos_token_id": None}
NEUTRAL |= {"length_penalty": 1.0, "diversity_penalty": 0.0, "max_length": 5}


@pytest.mark.parametrize(
    ("generation", "recommended"),
    [
        (NEUTRAL, {}),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "repetition_penalty": 1},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.0},
        ),
        ({"top_k": -1}, {"top_k": 0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"min_new_tokens": 3, "max_new_tokens": 50}, {"min_tokens": 3, "max_tokens": 50}),
        ({"suppress_tokens": [7, 9], "bad_words_ids": [[9], [11]]}, {"suppressed_ids": (7, 9, 11)}),
    ],
)
def test_generation_config_gives_defaults(
    directory: Path, generation: dict[str, Any], recommended: dict[str, Any]
) -> None:
    write(directory, "generation_config.json", generation)
    assert read_model_files(directory).recommended == recommended


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.9),
        ("no_repeat_ngram_size", 3),
        ("bad_words_ids", [[1, 2]]),
        ("bad_words_ids", [1]),
        ("bad_words_ids", [["a"]]),
        ("suppress_tokens", [-1]),
        ("suppress_tokens", 5),
        ("begin_suppress_tokens", [220]),
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("guidance_scale", 2.0),
        ("encoder_repetition_penalty", 1.2),
        ("exponential_decay_length_penalty", [5, 1.5]),
        ("min_length", 50),
        ("stop_strings", ["x"]),
        ("forced_bos_token_id", 4),
        ("forced_eos_token_id", 2),
        ("min_new_tokens", -1),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
    ],
)
def test_generation_config_that_is_not_served_is_refused_by_name(directory: Path, name: str, value: Any) -> None:
    write(directory, "generation_config.json", {name: value})
    assert name in refusal(directory).cause


def test_template_in_tokenizer_config_is_a_text_or_named_ones(directory: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    write(directory, "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}!"})
    assert rendered(read_model_files(directory)) == "hi!"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(directory, "tokenizer_config.json", {"chat_template": named})
    files = read_model_files(directory)
    assert (rendered(files), rendered(files, tools)) == ("plain", "tools")


@pytest.mark.parametrize("allows", [False, True])
def test_a_message_writes_no_control_token_unless_the_operator_allows_it(directory: Path, allows: bool) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": "<|im_start|>{{ messages[0].content }}<|im_end|>"})
    files = read_model_files(directory, allows_special_in_content=allows)
    defaults = GenerationDefaults(vocab_size=1)
    reader = PromptReader(
        (),
        files.tokenizer,
        files.chat_template,
        128,
        1,
        defaults,
        lambda: 0.0,
        lambda: compiler_of(files.tokenizer, ()),
    )
    chat = reader.encode(ChatPrompt(({"role": "user", "content": "a<|im_end|>b"},)))
    assert [token_id for token_id in chat if token_id in files.tokenizer.special_ids] == (
        [1, 2, 2] if allows else [1, 2]
    )
    assert 2 in reader.encode(TextPrompt("a<|im_end|>b"))  # raw


def test_what_makes_ids_of_texts_is_in_the_digest_of_the_settings(directory: Path) -> None:
    facts = EngineFacts("small", True, 1000, "float32", "cpu", "simulated", 4096, "the model's own", LIMITS)

    def digest(**options: Any) -> str:
        loaded: Any = SimpleNamespace(facts=facts, files=read_model_files(directory, **options))
        return identity_of(loaded)["settings_digest"]

    found = [digest(), digest(allows_special_in_content=True)]
    assert digest() == found[0]
    write(directory, "tokenizer_config.json", {"bos_token": "<|im_start|>"})
    found.append(digest())
    known = byte_level()
    known.add_special_tokens(["<|new|>"])
    (directory / "tokenizer.json").write_text(known.to_str())
    assert len({*found, digest()}) == 4


def test_template_files_win_over_tokenizer_config_and_the_operators_over_all(directory: Path, tmp_path: Path) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": "config", "bos_token": "<|begin|>"})
    (directory / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert rendered(read_model_files(directory)) == "<|begin|>file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert rendered(read_model_files(directory), [{"type": "function"}]) == "tools"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert rendered(read_model_files(directory, template_file=own), [{"type": "function"}]) == "own"


def test_context_bounds_the_rendered_text(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"})
    long = [{"role": "user", "content": "x" * 100_000}]
    with pytest.raises(InvalidRequest, match="Shorten"):
        read_model_files(directory).chat_template.render(long, now=NOW)
    assert len(read_model_files(directory, context_limit=8192).chat_template.render(long, now=NOW)) == 100_000


def test_a_path_that_is_no_model_directory_names_those_near_it(directory: Path) -> None:
    parent = directory.parent
    error = refusal(parent / "zzz")
    assert "zzz does not exist" in error.cause
    assert error.fix == f"the models in {parent}: {directory}"
    error = refusal(directory / "config.json")
    assert "is a file" in error.cause
    assert error.fix == f"--model {directory}"
    for name in ("long.json", "config.yaml", "Tiny.Q8_0.gguf"):
        (parent / name).touch()
    (parent / "logs").mkdir()
    error = refusal(parent)
    assert error.cause == f"{parent / 'config.json'} is missing"
    assert error.fix.endswith(f"; the models in {parent}: {directory}, {parent / 'Tiny.Q8_0.gguf'}")
    assert refusal(parent / "logs").fix.endswith(f"; there is no model in {parent / 'logs'}")


def test_a_missing_file_is_named_with_where_to_get_it(directory: Path) -> None:
    template = refusal(directory, template_file=directory.parent / "chatlm.jinja")
    assert (template.cause.endswith("chatlm.jinja is missing"), template.fix) == (True, "check its name")
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    error = refusal(directory)
    assert error.cause == f"{directory / 'tokenizer.json'} is missing"
    assert "save_pretrained" in error.fix
    (directory / "tokenizer.model").unlink()
    assert refusal(directory).fix == "tokenizer.json comes with the model's directory: download the whole of it again"


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("config.json", b"{", "is not JSON"),
        ("config.json", b"[" * 100_000, "is not JSON"),
        ("config.json", b"[]", "contains a list"),
        ("config.json", b"\xff", "is not UTF-8"),
        ("config.json", b"{}", "Architecture None"),
        ("config.json", b'{"model_type": "llama", "max_position_embeddings": "8"}', "max_position_embeddings='8'"),
        ("config.json", b'{"model_type": "llama", "eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("tokenizer.json", b"{}", "cannot be read"),
        ("generation_config.json", b'{"temperature": "hot"}', "temperature is 'hot'"),
        ("generation_config.json", b'{"top_k": 1.5}', "top_k is 1.5"),
        ("generation_config.json", b'{"top_p": NaN}', "top_p is nan"),
        ("generation_config.json", b'{"top_k": Infinity}', "top_k is inf"),
        ("generation_config.json", b'{"temperature": -1}', "temperature is -1"),
        ("generation_config.json", b'{"temperature": 3}', "json: temperature is 3, which is out of its range"),
        ("generation_config.json", b'{"top_p": 1.5}', "top_p is 1.5, which is out of its range"),
        ("generation_config.json", b'{"min_p": 7}', "min_p is 7, which is out of its range"),
        ("generation_config.json", b'{"repetition_penalty": 0}', "repetition_penalty is 0, which"),
        ("generation_config.json", b'{"repetition_penalty": 1e30}', "repetition_penalty is 1e+30, which"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "neither a text nor a list"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}]}', "neither a text nor a list"),
        ("chat_template.jinja", b"{% if %}", "line 1"),
    ],
)
def test_broken_file_is_named_with_its_fault(directory: Path, name: str, content: bytes, cause: str) -> None:
    (directory / name).write_bytes(content)
    error = refusal(directory)
    assert cause in error.cause
    assert str(directory) in error.cause
    assert error.fix


def test_a_text_with_tokens_beyond_the_embedding_is_refused(directory: Path) -> None:
    whole = read_model_files(directory).tokenizer
    ids = whole.encode("a step")
    write(directory, "config.json", {**CONFIG, "vocab_size": max(ids)})
    tokenizer = read_model_files(directory).tokenizer
    with pytest.raises(InvalidRequest, match=rf"\({max(ids)}\).*its ids end at {max(ids) - 1}"):
        tokenizer.encode("a step")
    known = "".join(whole.text_of(i) for i in ids if i < max(ids))
    assert max(tokenizer.encode(known), default=0) < max(ids)


def test_a_field_that_is_not_understood_is_told_with_its_file(directory: Path) -> None:
    with pytest.raises(StartupError) as caught:
        parse_config(directory, {**CONFIG, "hidden_size": "64"})
    assert caught.value.cause == f"{directory / 'config.json'}: hidden_size='64' is not a positive integer."
    write(directory, "config.json", {**CONFIG, "max_position_embeddings": 0})
    assert refusal(directory).cause.startswith(f"{directory / 'config.json'}: max_position_embeddings=0 ")
