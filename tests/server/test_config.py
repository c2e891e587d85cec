"""The table of settings: where values come from, which ones are refused, and how the refusal helps."""

import dataclasses
from pathlib import Path

import pytest

from core.errors import ExitCode, StartupError
from server.config import OPTIONS, Option, ServerConfig
from server.config_sources import FLAG_AS_KEY, load_config
from tests.server.given_settings import SAMPLES, refusal, toml_flag, typed


def test_without_sources_all_values_are_the_defaults() -> None:
    assert load_config({}, {"PATH": "/bin"}) == ServerConfig()


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = toml_flag(tmp_path, "port = 1\nmax_queue = 1\nmax_sequences = 1\n")
    environ = {"STEPLOOP_PORT": "2", "STEPLOOP_MAX_QUEUE": "2"}
    config = load_config(file | {"port": "3"}, environ)
    assert (config.port, config.max_queue, config.max_sequences, config.max_batch_tokens) == (3, 2, 1, 512)


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = str(toml_flag(tmp_path, 'log_format = "json"')["config_file"])
    assert load_config({}, {"STEPLOOP_CONFIG": path}).log_format == "json"


def test_the_contexts_origin_is_what_the_operator_wrote(tmp_path: Path) -> None:
    file = toml_flag(tmp_path, "max_model_len = 100")
    environ = {"STEPLOOP_MAX_MODEL_LEN": "200"}
    assert load_config({}, {}).context_origin == "the model's own"
    assert load_config(file, {}).context_origin == f"max_model_len in {file['config_file']}"
    assert load_config(file, environ).context_origin == "STEPLOOP_MAX_MODEL_LEN"
    assert load_config(file | {"max_model_len": "300"}, environ).context_origin == "--max-model-len"


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.in_file], ids=lambda option: option.name)
def test_each_option_means_the_same_from_flag_environment_and_file(option: Option, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    sample = SAMPLES.get(option.name, "123")
    assert sample is not None
    text = sample.format(directory=tmp_path, file=template)
    from_flag = load_config({option.field_name: [text] if option.is_list else text}, {})
    from_environment = load_config({}, {option.variable: text})
    from_file = load_config(toml_flag(tmp_path, f'{option.toml_key} = "{text}"'), {})
    assert from_flag == from_environment == dataclasses.replace(from_file, config_file=None)
    assert getattr(from_flag, option.field_name) != option.default


def test_names_follow_one_rule() -> None:
    kv_memory = next(option for option in OPTIONS if option.field_name == "kv_memory_bytes")
    assert (kv_memory.flag, kv_memory.variable, kv_memory.toml_key) == (
        "--kv-memory",
        "STEPLOOP_KV_MEMORY",
        "kv_memory",
    )
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_toml_numbers_need_no_quotes(tmp_path: Path) -> None:
    config = load_config(toml_flag(tmp_path, "port = 9\nhead_timeout = 2.5\nkv_memory = 2097152"), {})
    assert (config.port, config.head_timeout_s, config.kv_memory_bytes) == (9, 2.5, 2**21)


@pytest.mark.parametrize(("text", "is_off"), [("true", True), ("1", True), ("off", False), ("No", False)])
def test_a_switch_takes_the_words_for_yes_and_no(text: str, is_off: bool) -> None:
    config = load_config({}, {"STEPLOOP_NO_PREFIX_CACHE": text})
    assert config.no_prefix_cache is is_off
    assert config.to_engine_config().has_prefix_cache is not is_off


def test_a_switch_in_the_file_is_true_or_false(tmp_path: Path) -> None:
    assert load_config(toml_flag(tmp_path, "no_prefix_cache = true"), {}).no_prefix_cache
    assert not load_config(toml_flag(tmp_path, "no_prefix_cache = false"), {}).no_prefix_cache
    error = refusal(toml_flag(tmp_path, "no_prefix_cache = []"), {})
    assert error.cause.endswith("is a list: it must be true or false")
    error = refusal({}, {"STEPLOOP_NO_PREFIX_CACHE": "maybe"})
    assert error.fix.startswith("--no-prefix-cache, STEPLOOP_NO_PREFIX_CACHE=BOOL or no_prefix_cache in the TOML file")


def test_a_switch_on_the_command_line_takes_no_value() -> None:
    assert typed("serve", "--no-prefix-cache") == {"no_prefix_cache": "true"}
    assert typed("serve") == {}


def test_api_keys_come_as_repeated_flags_commas_or_a_list(tmp_path: Path) -> None:
    keys = ("one", "two")
    assert load_config({"api_keys": ["one", "two"]}, {}).api_keys == keys
    assert load_config({}, {"STEPLOOP_API_KEY": "one,two"}).api_keys == keys
    assert load_config(toml_flag(tmp_path, 'api_key = ["one", "two"]'), {}).api_keys == keys


def test_keys_show_neither_in_the_configuration_nor_in_refusals() -> None:
    assert "hunter2" not in repr(ServerConfig(api_keys=("hunter2",)))
    error = refusal({}, {"STEPLOOP_API_KEY": "hunter2 with spaces"})
    assert "hunter2" not in error.cause + error.fix
    assert "STEPLOOP_API_KEY" in error.cause


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_empty_variable_is_refused_not_taken_for_unset(option: Option) -> None:
    error = refusal({}, {option.variable: ""})
    assert option.variable in error.cause


def test_unknown_variable_names_the_nearest(tmp_path: Path) -> None:
    error = refusal({}, {"STEPLOOP_PROT": "1"})
    assert error.exit_code == ExitCode.CONFIGURATION
    assert "did you mean STEPLOOP_PORT?" in error.cause


@pytest.mark.parametrize(("key", "near"), [("max-queue", "max_queue"), ("kv_mem", "kv_memory"), ("Port", "port")])
def test_unknown_toml_key_names_the_nearest(key: str, near: str, tmp_path: Path) -> None:
    error = refusal(toml_flag(tmp_path, f"{key} = 1"), {})
    assert f"did you mean {near}?" in error.cause


def test_unknown_toml_key_like_no_other_says_where_all_are_listed(tmp_path: Path) -> None:
    error = refusal(toml_flag(tmp_path, "zzzzqq = 1"), {})
    assert error.cause.endswith("steploop.toml: zzzzqq")
    assert "`steploop serve --help-all` lists: max_queue = 8 for --max-queue 8" in error.fix
    assert load_config(toml_flag(tmp_path, FLAG_AS_KEY.partition(" for ")[0]), {}).max_queue == 8


def test_a_toml_table_is_told_to_go_not_taken_for_a_misspelt_key(tmp_path: Path) -> None:
    error = refusal(toml_flag(tmp_path, "[server]\nport = 1"), {})
    assert error.cause.endswith("has a table, [server]")
    assert "remove the line [server]" in error.fix


@pytest.mark.parametrize(
    ("text", "shown", "like"),
    [
        ("port = true", "port in FILE is true", 'port = "x"'),
        ("port = [1]", "port in FILE is a list", 'port = "x"'),
        ("kv_memory = 2026-01-31", "kv_memory in FILE is a date or time", 'kv_memory = "x"'),
        ("log_level = false", "log_level in FILE is false", 'log_level = "x"'),
    ],
)
def test_a_toml_value_of_the_wrong_kind_is_told_as_one_out_of_range_is(
    text: str, shown: str, like: str, tmp_path: Path
) -> None:
    error, alike = refusal(toml_flag(tmp_path, text), {}), refusal(toml_flag(tmp_path, like), {})
    expected = alike.cause.partition(": it must be ")[2]
    assert error.cause == f"{shown.replace('FILE', str(tmp_path / 'steploop.toml'))}: it must be {expected}"
    assert error.fix == alike.fix


def test_a_toml_value_that_would_be_a_name_if_it_had_quotes_is_told_so(tmp_path: Path) -> None:
    assert refusal(toml_flag(tmp_path, "served_model_name = true"), {}).cause.endswith("it must be a text in quotes")
    assert refusal(toml_flag(tmp_path, "api_key = true"), {}).cause.endswith("it must be a list of texts")


@pytest.mark.parametrize("text", ["port = ", "port = true", "port = [1]", "[port]\nx = 1", 'api_key = [1, "b"]'])
def test_a_file_that_says_no_setting_is_refused(text: str, tmp_path: Path) -> None:
    assert refusal(toml_flag(tmp_path, text), {}).exit_code == ExitCode.CONFIGURATION


@pytest.mark.parametrize(
    ("field_name", "text"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "eighty"),
        ("port", "१"),
        ("device", "gpu0"),
        ("dtype", "bf16"),
        ("kv_memory_bytes", "2 gigs"),
        ("kv_memory_bytes", "100"),
        ("kv_memory_bytes", "-2GiB"),
        ("kv_memory_bytes", "1e9"),
        ("max_sequences", "0"),
        ("max_model_len", "9" * 400),
        ("head_timeout_s", "10 years"),
        ("head_timeout_s", "0"),
        ("head_timeout_s", "nan"),
        ("max_body_bytes", "2GiB"),
        ("host", " "),
    ],
)
def test_values_out_of_kind_or_range_are_refused_with_flag_and_value(field_name: str, text: str) -> None:
    error = refusal({field_name: text}, {})
    assert error.exit_code == ExitCode.CONFIGURATION
    assert repr(text) in error.cause
    assert next(option for option in OPTIONS if option.field_name == field_name).flag in error.cause


def test_near_misses_of_choices_and_units_are_named() -> None:
    assert "did you mean bfloat16?" in refusal({"dtype": "bfloat"}, {}).cause
    assert "2GiB?" in refusal({"kv_memory_bytes": "2g"}, {}).cause


def test_the_fix_names_the_ways_that_there_are(tmp_path: Path) -> None:
    assert refusal({"port": "x"}, {}).fix.startswith("--port PORT, STEPLOOP_PORT=PORT or port in the TOML file: ")
    error = refusal({"config_file": str(tmp_path / "none.toml")}, {})
    assert error.fix.startswith("--config FILE or STEPLOOP_CONFIG=FILE: ")


def test_of_a_list_the_value_that_is_wrong_is_told(tmp_path: Path) -> None:
    assert refusal({"binds": ["127.0.0.1:1", "::1:2"]}, {}).cause.startswith("--bind is '::1:2': it must be HOST:PORT")
    assert refusal({}, {"STEPLOOP_DENY": "10.0.0.0/8,10.1.2.3/8"}).fix == "--deny 10.0.0.0/8"
    file = toml_flag(tmp_path, 'trusted_proxies = ["unix", "nobody"]')
    assert "trusted_proxies in" in refusal(file, {}).cause


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("drain_timeout = 60s", 'write that line as drain_timeout = "60s"'),
        ("port = 1\nlog_format = json  # for the collector", 'write that line as log_format = "json"'),
        ("max-queue: 8", "write that line as max_queue = 8"),
        ("port = 1\nport = 2", "port stands there twice: remove one"),
        ("api_key = s3cret", "text in quotes"),
    ],
)
def test_file_that_is_no_toml_is_told_what_to_write(text: str, fix: str, tmp_path: Path) -> None:
    path = tmp_path / "steploop.toml"
    path.write_text(text)
    with pytest.raises(StartupError, match="is not TOML") as raised:
        load_config({"config_file": str(path)}, {})
    assert fix in raised.value.fix
    assert "s3cret" not in str(raised.value)


def test_bare_number_is_taken_as_seconds(tmp_path: Path) -> None:
    path = tmp_path / "steploop.toml"
    path.write_text("drain_timeout = 60\nhead_timeout = 2.5")
    config = load_config({"config_file": str(path)}, {})
    assert (config.drain_timeout_s, config.head_timeout_s) == (60.0, 2.5)
