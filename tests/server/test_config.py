"""The table of settings: where values come from, which ones are refused, and how the refusal helps."""

import dataclasses
from pathlib import Path

import pytest

from core.errors import ExitCode, StartupError
from server.config import OPTIONS, Option, ServerConfig
from server.config_sources import FLAG_AS_KEY, load_config
from tests.server.given_settings import refusal, sample_of, toml_flag, typed


def test_without_sources_all_values_are_the_defaults() -> None:
    assert load_config({}, {"PATH": "/bin"}) == ServerConfig()


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = toml_flag(tmp_path, "port = 1\nmax_queue = 1\nmax_sequences = 1\n")
    environ = {"STEPLOOP_PORT": "2", "STEPLOOP_MAX_QUEUE": "2"}
    config = load_config(file | {"port": "3"}, environ)
    assert (config.port, config.max_queue, config.max_sequences, config.max_batch_tokens) == (3, 2, 1, 512)
    assert load_config({}, {"STEPLOOP_CONFIG": str(file["config_file"])}).max_queue == 1


def test_the_contexts_origin_is_what_the_operator_wrote(tmp_path: Path) -> None:
    file, environ = toml_flag(tmp_path, "max_model_len = 100"), {"STEPLOOP_MAX_MODEL_LEN": "200"}
    assert load_config({}, {}).context_origin == "the model's own"
    assert load_config(file, {}).context_origin == f"max_model_len in {file['config_file']}"
    assert load_config(file, environ).context_origin == "STEPLOOP_MAX_MODEL_LEN"
    assert load_config(file | {"max_model_len": "300"}, environ).context_origin == "--max-model-len"


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.in_file], ids=lambda option: option.name)
def test_each_option_means_the_same_from_flag_environment_and_file(option: Option, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    (tmp_path / "model.gguf").touch()
    text = sample_of(option).format(directory=tmp_path, file=template)
    from_flag = load_config({option.field_name: [text] if option.is_list else text}, {})
    from_environment = load_config({}, {option.variable: text})
    from_file = load_config(toml_flag(tmp_path, f'{option.toml_key} = "{text}"'), {})
    assert from_flag == from_environment == dataclasses.replace(from_file, config_file=None)
    assert getattr(from_flag, option.field_name) != option.default
    assert option.variable in refusal({}, {option.variable: ""}).cause, "an empty variable is not taken for unset"


def test_names_follow_one_rule() -> None:
    option = next(option for option in OPTIONS if option.field_name == "kv_memory_bytes")
    assert (option.flag, option.variable, option.toml_key) == ("--kv-memory", "STEPLOOP_KV_MEMORY", "kv_memory")
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_toml_numbers_need_no_quotes_and_times_are_seconds(tmp_path: Path) -> None:
    config = load_config(toml_flag(tmp_path, "port = 9\nhead_timeout = 2.5\ndrain_timeout = 60"), {})
    assert (config.port, config.head_timeout_s, config.drain_timeout_s) == (9, 2.5, 60.0)


def test_a_switch_is_a_bare_flag_a_word_in_the_environment_and_a_boolean_in_the_file(tmp_path: Path) -> None:
    assert typed("serve", "--no-prefix-cache") == {"no_prefix_cache": "true"}
    assert typed("serve") == {}
    for text, is_off in (("true", True), ("1", True), ("off", False), ("No", False)):
        config = load_config({}, {"STEPLOOP_NO_PREFIX_CACHE": text})
        assert (config.no_prefix_cache, config.to_engine_config().has_prefix_cache) == (is_off, not is_off)
    assert load_config(toml_flag(tmp_path, "no_prefix_cache = true"), {}).no_prefix_cache
    assert not load_config(toml_flag(tmp_path, "no_prefix_cache = false"), {}).no_prefix_cache


def test_api_keys_come_as_repeated_flags_commas_or_a_list(tmp_path: Path) -> None:
    keys = ("one", "two")
    assert load_config({"api_keys": ["one", "two"]}, {}).api_keys == keys
    assert load_config({}, {"STEPLOOP_API_KEY": "one,two"}).api_keys == keys
    assert load_config(toml_flag(tmp_path, 'api_key = ["one", "two"]'), {}).api_keys == keys


def test_keys_show_neither_in_the_configuration_nor_in_refusals(tmp_path: Path) -> None:
    assert "hunter2" not in repr(ServerConfig(api_keys=("hunter2",)))
    for error in (
        refusal({}, {"STEPLOOP_API_KEY": "hunter2 with spaces"}),
        refusal(toml_flag(tmp_path, "api_key = hunter2"), {}),
    ):
        assert "hunter2" not in f"{error.cause} {error.fix} {error}"


FLAGS_REFUSED = {
    "port": ["65536", "-1", "eighty", "१"],
    "device": ["gpu0"],
    "dtype": ["bf16"],
    "kv_memory_bytes": ["2 gigs", "100", "-2GiB", "1e9"],
    "max_sequences": ["0"],
    "max_model_len": ["9" * 400],
    "head_timeout_s": ["10 years", "0", "nan"],
    "max_body_bytes": ["2GiB"],
    "host": [" "],
}


@pytest.mark.parametrize("field_name", FLAGS_REFUSED)
def test_values_out_of_kind_or_range_are_refused_with_flag_and_value(field_name: str) -> None:
    flag = next(option for option in OPTIONS if option.field_name == field_name).flag
    for text in FLAGS_REFUSED[field_name]:
        error = refusal({field_name: text}, {})
        assert error.exit_code == ExitCode.CONFIGURATION
        assert repr(text) in error.cause
        assert flag in error.cause


@pytest.mark.parametrize(
    ("flags", "environ", "cause", "fix"),
    [
        ({}, {"STEPLOOP_PROT": "1"}, "did you mean STEPLOOP_PORT?", "unset STEPLOOP_PROT"),
        ({}, {"STEPLOOP_API_KEY": "a b"}, "STEPLOOP_API_KEY is a value that is not shown", "--api-key KEY"),
        ({}, {"STEPLOOP_DENY": "10.0.0.0/8,10.1.2.3/8"}, "'10.1.2.3/8'", "--deny 10.0.0.0/8"),
        (
            {},
            {"STEPLOOP_NO_PREFIX_CACHE": "maybe"},
            "it must be true or false",
            "--no-prefix-cache, STEPLOOP_NO_PREFIX_CACHE=BOOL or no_prefix_cache in the TOML file",
        ),
        ({"dtype": "bfloat"}, {}, "did you mean bfloat16?", "--dtype bfloat16"),
        ({"speculation": "on"}, {}, "one of auto, off; did you mean auto?", "--speculation auto"),
        ({"kv_dtype": "fp8"}, {}, "one of auto, int8; did you mean int8?", "--kv-dtype int8"),
        ({"kv_dtype": "fp8_e4m3"}, {}, "did you mean int8?", "--kv-dtype int8"),
        ({"forced_tokens": "none"}, {}, "did you mean off?", "--forced-tokens off"),
        ({"kv_memory_bytes": "2g"}, {}, "2GiB?", "--kv-memory SIZE"),
        ({"port": "x"}, {}, "--port is 'x'", "--port PORT, STEPLOOP_PORT=PORT or port in the TOML file: "),
        ({"config_file": "/none.toml"}, {}, "/none.toml", "--config FILE or STEPLOOP_CONFIG=FILE: "),
        ({"binds": ["127.0.0.1:1", "::1:2"]}, {}, "--bind is '::1:2': it must be HOST:PORT", "--bind"),
    ],
)
def test_a_refusal_names_its_source_and_what_to_write(
    flags: dict[str, str | list[str]], environ: dict[str, str], cause: str, fix: str
) -> None:
    error = refusal(flags, environ)
    assert cause in error.cause
    assert fix in error.fix


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("max-queue = 1", "did you mean max_queue?", ""),
        ("kv_mem = 1", "did you mean kv_memory?", ""),
        ("Port = 1", "did you mean port?", ""),
        ("zzzzqq = 1", "FILE: zzzzqq", "`steploop serve --help-all` lists: max_queue = 8 for --max-queue 8"),
        ("[server]\nport = 1", "FILE has a table, [server]", "remove the line [server]"),
        ('trusted_proxies = ["unix", "nobody"]', "trusted_proxies in FILE is 'nobody'", ""),
        # a value of the wrong kind is explained as one out of range
        ("port = true", "port in FILE is true: it must be a whole number from 0 to 65,535", "--port PORT"),
        ("port = [1]", "port in FILE is a list: it must be a whole number", "--port PORT"),
        ("kv_memory = 2026-01-31", "kv_memory in FILE is a date or time: it must be a size", "--kv-memory SIZE"),
        ("log_level = false", "log_level in FILE is false: it must be one of debug", "--log-level LEVEL"),
        ("no_prefix_cache = []", "is a list: it must be true or false", "--no-prefix-cache"),
        ("served_model_name = true", "it must be a text in quotes", ""),
        ("api_key = true", "it must be a list of texts", ""),
        ('api_key = [1, "b"]', "it must be a list of texts", ""),
        # no TOML at all
        ("port = ", "is not TOML", 'port = 8080, kv_memory = "2GiB"'),
        ("drain_timeout = 60s", "is not TOML", 'write that line as drain_timeout = "60s"'),
        ("port = 1\nlog_format = json  # for logs", "is not TOML", 'write that line as log_format = "json"'),
        ("max-queue: 8", "is not TOML", "write that line as max_queue = 8"),
        ("port = 1\nport = 2", "is not TOML", "port is set twice: remove one"),
    ],
)
def test_a_line_of_the_file_that_cannot_be_taken_is_told_what_to_write(
    text: str, cause: str, fix: str, tmp_path: Path
) -> None:
    error = refusal(toml_flag(tmp_path, text), {})
    assert error.exit_code == ExitCode.CONFIGURATION
    assert cause.replace("FILE", str(tmp_path / "steploop.toml")) in error.cause
    assert fix in error.fix


def test_the_sample_of_a_key_can_be_written_so(tmp_path: Path) -> None:
    assert load_config(toml_flag(tmp_path, FLAG_AS_KEY.partition(" for ")[0]), {}).max_queue == 8


@pytest.mark.parametrize("bind", ["127.0.0.1:8123", "0.0.0.0:8123"])
def test_the_same_port_twice_is_told_before_it_is_in_use(bind: str) -> None:
    with pytest.raises(StartupError) as caught:
        load_config({"port": "8123", "binds": [bind]}, {}).all_binds()
    assert caught.value.cause == f"--host and --port name 127.0.0.1:8123, and --bind {bind} has the same port"


@pytest.mark.parametrize(("port", "bind"), [("8123", "127.0.0.1:8124"), ("8123", "[::]:8123"), ("0", "127.0.0.1:0")])
def test_other_ports_are_listened_on_beside_the_first(port: str, bind: str) -> None:
    assert len(load_config({"port": port, "binds": [bind]}, {}).all_binds()) == 2
