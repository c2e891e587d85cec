"""The table of settings: where values come from, which ones are refused, and how the refusal helps."""

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from core.config import EngineConfig
from core.errors import ExitCode, StartupError
from server.commands.command_line import build_parsers, flags_given
from server.config import OPTIONS, ServerConfig
from server.config_sources import FLAG_AS_KEY, load_config
from server.listening.socket_activation import PassedSocket
from server.process import listener_config
from server.settings.limits import LimitSettings
from server.settings.option import Option, rows_of
from server.settings.requests import RequestSettings
from server.settings.wire import WireSettings
from server.values import HubId
from server.wire.connection_limits import ConnectionLimits


def toml_flag(tmp_path: Path, text: str) -> dict[str, str | list[str]]:
    path = tmp_path / "steploop.toml"
    path.write_text(text)
    return {"config_file": str(path)}


def refusal(flags: dict[str, str | list[str]], environ: dict[str, str]) -> StartupError:
    with pytest.raises(StartupError) as caught:
        load_config(flags, environ)
    return caught.value


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


SAMPLES = {
    "auth": "certificate+key",
    "insecure": "true",
    "jwks": "https://issuer.example/keys",
    "config": None,  # names the file itself
    "model": "{directory}",
    "served-model-name": "tiny",
    "chat-template": "{file}",
    "device": "cpu",
    "dtype": "float32",
    "kv-memory": "2GiB",
    "kv-offload-dir-bytes": "2GiB",
    "host": "::1",
    "bind": "[::1]:0",
    "unix-mode": "600",
    "tls-cert": "{file}",
    "tls-key": "{file}",
    "tls-client-ca": "{file}",
    "tls-client-auth": "optional",
    "trusted-proxies": "unix",
    "forwarded-header": "forwarded",
    "allow": "10.0.0.0/8",
    "deny": "2001:db8::/32",
    "api-key": "secret",
    "ledger-keep": "90d",
    "log-level": "debug",
    "log-format": "json",
    "otlp-endpoint": "http://collector:4318/v1/traces",
    "max-body": "1MiB",
    "head-timeout": "500ms",
    "body-timeout": "5s",
    "idle-timeout": "2min",
    "stall-timeout": "1.5s",
    "drain-timeout": "1h",
    "quantize": "int8",
    "cors-origin": "https://app.example.com",
    "no-prefix-cache": "true",
    "inter-token-target": "2.5",
    "overlap": "on",
    "tensor-parallel": "2",
    "no-overlap": "true",
    "graphs": "off",
    "lazy-graphs": "true",
    "handshake-timeout": "1s",
    "max-head": "8KiB",
    "max-unsent": "8KiB",
    "max-frame": "32KiB",
    "max-header-block": "20KiB",
    "max-control-output": "2MiB",
    "max-resets": "20+2.5/s",
    "max-pings": "20+0/s",
    "max-settings": "1+1/s",
    "max-top-logprobs": "5",
}


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


def test_what_a_connection_may_take_is_by_default_what_the_protocols_default_to() -> None:
    assert ServerConfig().connection_limits == ConnectionLimits()


@pytest.mark.parametrize("option", rows_of(WireSettings), ids=lambda option: option.name)
def test_each_limit_of_a_connection_changes_something(option: Option) -> None:
    text = SAMPLES.get(option.name, "123")
    assert text is not None
    config = listener_config(load_config({option.field_name: text}, {}), None, ())
    assert config != listener_config(ServerConfig(), None, ())


def test_a_head_that_is_not_too_large_fits_however_it_is_packed() -> None:
    limits = load_config({"max_head_bytes": "100KiB"}, {}).connection_limits
    assert limits.http2.frames.header_block_bytes >= limits.head.head_bytes
    assert limits.http2.list_bytes > limits.head.head_bytes


@pytest.mark.parametrize("text", ["", "200", "200/s", "0+1/s", "200+20", "-1+1/s", "1+1e3/s", "1+1/min", "1.5+1/s"])
def test_a_rate_is_a_burst_and_a_rate(text: str) -> None:
    message = str(refusal({"max_resets": text}, {}))
    assert "200+20/s: 200 at once, and 20 more each second" in message


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


@pytest.mark.parametrize(("value", "factor"), [("2", 2.0), ("1.25", 1.25), ("0", None)])
def test_inter_token_target_of_0_is_no_bound(value: str, factor: float | None, tmp_path: Path) -> None:
    config = load_config(toml_flag(tmp_path, f"inter_token_target = {value}"), {})
    assert config.to_engine_config().inter_token_target == factor


def test_a_switch_on_the_command_line_takes_no_value() -> None:
    parser, _ = build_parsers()
    assert flags_given(parser.parse_args(["serve", "--no-prefix-cache"])) == {"no_prefix_cache": "true"}
    assert flags_given(parser.parse_args(["serve"])) == {}


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
    assert "`steploop serve --help` lists: max_queue = 8 for --max-queue 8" in error.fix
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


def test_a_missing_model_names_what_lies_near(tmp_path: Path) -> None:
    (tmp_path / "Llama-3.2-1B").mkdir()
    error = refusal({"model": str(tmp_path / "llama-3.2-1b")}, {})
    assert error.fix.startswith("--model MODEL, ")  # an empty directory cannot be served
    (tmp_path / "Llama-3.2-1B" / "config.json").touch()
    error = refusal({"model": str(tmp_path / "llama-3.2-1b")}, {})
    assert error.exit_code == ExitCode.MODEL
    assert str(tmp_path / "Llama-3.2-1B") in error.cause
    assert error.fix == f"--model {tmp_path / 'Llama-3.2-1B'}"


def test_a_missing_model_with_nothing_like_it_names_the_models_where_it_would_be(tmp_path: Path) -> None:
    (tmp_path / "unlike").mkdir()
    (tmp_path / "notes.gguf.txt").touch()
    missing = str(tmp_path / "nope")
    assert refusal({"model": missing}, {}).cause.endswith(f"; there is no model in {tmp_path}")
    models = [tmp_path / f"Llama-{i}" for i in range(7)]
    for model in models:
        model.mkdir()
        (model / "config.json").touch()
    listed = ", ".join(map(str, models[:5]))
    assert refusal({"model": missing}, {}).cause.endswith(f"; the models in {tmp_path}: {listed} and 2 more")


def test_a_path_missing_early_names_where_it_stops_being_true(tmp_path: Path) -> None:
    (tmp_path / "unlike").mkdir()
    cause = refusal({"model": str(tmp_path / "models" / "deep" / "er")}, {}).cause
    assert f"{tmp_path} exists, {tmp_path / 'models'} does not" in cause


def test_a_file_for_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    error = refusal({"model": str(tmp_path / "config.json")}, {})
    assert "this is a file" in error.cause
    assert error.fix == f"--model {tmp_path}"
    (tmp_path / "config.json").rename(tmp_path / "notes.txt")
    assert refusal({"model": str(tmp_path / "notes.txt")}, {}).fix.startswith("--model MODEL, ")


def test_the_fix_names_the_ways_that_there_are(tmp_path: Path) -> None:
    assert refusal({"port": "x"}, {}).fix.startswith("--port PORT, STEPLOOP_PORT=PORT or port in the TOML file: ")
    error = refusal({"config_file": str(tmp_path / "none.toml")}, {})
    assert error.fix.startswith("--config FILE or STEPLOOP_CONFIG=FILE: ")


def test_engine_config_carries_what_the_operator_asked() -> None:
    flags: dict[str, str | list[str]] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": "1024",
        "kv_memory_bytes": "64MiB",
        "max_batch_tokens": "256",
        "max_sequences": "8",
        "threads": "2",
        "quantize": "int4",
        "quantize_cache_bytes": "1GiB",
        "kv_offload_bytes": "8GiB",
        "kv_offload_dir": "/var/cache/kv",
        "kv_offload_dir_bytes": "9GiB",
    }
    assert load_config({"tensor_parallel": "2"}, {}).to_engine_config().tensor_parallel == 2
    want = EngineConfig(
        *("cpu", "float32", 1024, 64 * 2**20, 256, 8, 2, "int4", 2**30),
        kv_offload_bytes=2**33,
        kv_offload_dir="/var/cache/kv",
        kv_offload_dir_bytes=9 * 2**30,
    )
    assert load_config(flags, {}).to_engine_config() == want


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ({"kv_offload_dir": "/var/cache/kv"}, "--kv-offload-memory 1GiB"),
        ({"kv_offload_bytes": "1GiB", "no_prefix_cache": "true"}, "leave one of them out"),
    ],
)
def test_offload_that_could_hold_nothing_is_refused(flags: dict[str, str | list[str]], fix: str) -> None:
    with pytest.raises(StartupError) as refused:
        load_config(flags, {}).to_engine_config()
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({"overlap": "on"}, "--overlap on and --tensor-parallel 2: each rank gets"),
        ({"graphs": "on"}, "--graphs on and --tensor-parallel 2: ranks send steps without"),
        ({"lazy_graphs": "true"}, "--graphs lazy and --tensor-parallel 2: ranks send steps without"),
        ({"kv_offload_bytes": "1GiB"}, "--kv-offload-memory and --tensor-parallel 2: the ranks keep no"),
    ],
)
def test_what_several_ranks_do_not_have_is_refused(flags: dict[str, str | list[str]], cause: str) -> None:
    with pytest.raises(StartupError) as refused:
        load_config(flags | {"tensor_parallel": "2"}, {}).to_engine_config()
    assert refused.value.cause.startswith(cause)
    assert refused.value.exit_code == ExitCode.CONFIGURATION
    load_config(flags | {"tensor_parallel": "1"}, {}).to_engine_config()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], ("auto", "auto")),
        (["--no-overlap"], ("off", "auto")),
        (["--lazy-graphs"], ("auto", "lazy")),
        (["--overlap", "on", "--graphs", "lazy"], ("on", "lazy")),
        (["--graphs", "lazy", "--lazy-graphs", "--overlap", "off", "--no-overlap"], ("off", "lazy")),
    ],
)
def test_switches_stand_for_a_mode(given: list[str], wanted: tuple[str, str]) -> None:
    parser, _ = build_parsers()
    engine = load_config(flags_given(parser.parse_args(["serve", *given])), {}).to_engine_config()
    assert (engine.overlap, engine.graphs) == wanted


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({"overlap": "on", "no_overlap": "true"}, "--overlap on and --no-overlap say two things"),
        ({"graphs": "off", "lazy_graphs": "true"}, "--graphs off and --lazy-graphs say two things"),
    ],
)
def test_a_switch_against_its_mode_is_refused(flags: dict[str, str | list[str]], cause: str) -> None:
    with pytest.raises(StartupError, match=cause):
        load_config(flags, {}).to_engine_config()


def test_model_is_a_directory_a_gguf_file_or_a_hubs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").touch()
    (tmp_path / "tiny.gguf").touch()
    assert load_config({"model": "models/tiny"}, {}).model == Path("models/tiny")
    assert load_config({"model": "tiny.gguf"}, {}).model == Path("tiny.gguf")
    assert load_config({"model": "Qwen/Qwen3-0.6B"}, {}).model == HubId("Qwen/Qwen3-0.6B")
    assert load_config({"model": "Qwen/Qwen3-0.6B@refs/pr/1"}, {}).model == HubId("Qwen/Qwen3-0.6B", "refs/pr/1")
    for text in ("models/tinny", "tiny", "org/tiny.gguf", "./org/tiny", "org/..", "org/a@../b", "a/b/c", "org/a--b"):
        assert refusal({"model": text}, {}).exit_code == ExitCode.MODEL
    assert "models/tiny" in refusal({"model": "models/tinny"}, {}).cause
    assert "tiny.gguf" in refusal({"model": "tyni.gguf"}, {}).cause


def test_of_a_list_the_value_that_is_wrong_is_told(tmp_path: Path) -> None:
    assert refusal({"binds": ["127.0.0.1:1", "::1:2"]}, {}).cause.startswith("--bind is '::1:2': it must be HOST:PORT")
    assert refusal({}, {"STEPLOOP_DENY": "10.0.0.0/8,10.1.2.3/8"}).fix == "--deny 10.0.0.0/8"
    file = toml_flag(tmp_path, 'trusted_proxies = ["unix", "nobody"]')
    assert "trusted_proxies in" in refusal(file, {}).cause


def addresses(config: ServerConfig, passed: Sequence[PassedSocket] = ()) -> list[str]:
    return [str(bind.address) for bind in config.all_binds(passed)]


@contextlib.contextmanager
def passed_sockets(*families: int) -> Iterator[list[PassedSocket]]:
    """As systemd would pass them under one name."""
    with contextlib.ExitStack() as stack:
        yield [PassedSocket(stack.enter_context(socket.socket(family)), "front") for family in families]


def test_binds_stand_instead_of_the_default_and_beside_what_is_given() -> None:
    two = {"binds": ["127.0.0.1:1", "unix:/a"]}
    assert addresses(load_config({}, {})) == ["127.0.0.1:8000"]
    assert addresses(load_config(two, {})) == ["127.0.0.1:1", "unix:/a"]
    assert addresses(load_config(two | {"port": "2"}, {})) == ["127.0.0.1:2", "127.0.0.1:1", "unix:/a"]
    assert addresses(load_config(two, {"STEPLOOP_HOST": "::1"})) == ["[::1]:8000", "127.0.0.1:1", "unix:/a"]
    with passed_sockets(socket.AF_INET) as passed:
        assert addresses(load_config({}, {}), passed) == []
        assert addresses(load_config({"port": "2"}, {}), passed) == ["127.0.0.1:2"]


@pytest.mark.parametrize(
    ("bind", "trusted", "is_refused"),
    [
        ("proxy:127.0.0.1:1", (), True),
        ("proxy:127.0.0.1:1", ("unix",), True),
        ("proxy:unix:/a", ("127.0.0.1",), True),
        ("proxy:127.0.0.1:1", ("127.0.0.1",), False),
        ("proxy:unix:/a", ("unix",), False),
        ("proxy:systemd:front", (), True),
        ("proxy:systemd:front", ("unix",), False),
        ("proxy:systemd:front", ("127.0.0.1",), False),
        ("127.0.0.1:1", (), False),
    ],
)
def test_a_bind_for_proxies_needs_one_that_is_trusted(bind: str, trusted: tuple[str, ...], is_refused: bool) -> None:
    flags: dict[str, str | list[str]] = {"binds": [bind]}
    config = load_config(flags | ({"trusted_proxies": list(trusted)} if trusted else {}), {})
    if not is_refused:
        assert addresses(config) == [bind.removeprefix("proxy:")]
        return
    with pytest.raises(StartupError, match="for trusted proxies alone") as caught:
        config.all_binds()
    assert caught.value.fix.startswith("--trusted-proxies ")


@pytest.mark.parametrize(
    ("families", "trusted", "fix"),
    [
        ((socket.AF_UNIX,), ["127.0.0.1"], "--trusted-proxies unix"),
        ((socket.AF_UNIX,), ["unix"], None),
        ((socket.AF_INET,), ["unix"], "--trusted-proxies 127.0.0.1, or the network that the proxy is in"),
        ((socket.AF_INET,), ["127.0.0.1"], None),
        ((socket.AF_UNIX, socket.AF_INET), ["127.0.0.1"], "--trusted-proxies unix for a Unix socket; else 127.0.0.1"),
        ((socket.AF_UNIX, socket.AF_INET), ["127.0.0.1", "unix"], None),
    ],
)
def test_a_passed_socket_for_proxies_needs_one_that_can_reach_it(
    families: tuple[int, ...], trusted: list[str], fix: str | None
) -> None:
    config = load_config({"binds": ["proxy:systemd:front"], "trusted_proxies": trusted}, {})
    with passed_sockets(*families) as passed:
        if fix is None:
            assert addresses(config, passed) == ["systemd:front"]
            return
        with pytest.raises(StartupError, match="none that can reach it is named") as caught:
            config.all_binds(passed)
        assert caught.value.fix.startswith(fix)


def test_nobody_takes_all_connections_alone_unless_they_are_few() -> None:
    caps = {number: ServerConfig(max_connections=number).client_rules.max_per_address for number in (8, 64, 1024)}
    assert caps == {8: 8, 64: 56, 1024: 896}
    assert ServerConfig(max_connections_per_address=5).client_rules.max_per_address == 5
    assert ServerConfig(forwarded_header="none").client_rules.forwarded_header is None


def test_limits_are_documented_with_their_defaults() -> None:
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| ")]
    documented = {
        flag.strip(" `"): default.strip()
        for _, flags, defaults, _ in rows[1:]
        for flag, default in zip(flags.split(";"), defaults.split(";"), strict=True)
    }
    by_flag = {option.flag: option for option in OPTIONS if option.group.startswith("limits")}
    tables = (WireSettings, RequestSettings, LimitSettings)
    assert {option.flag for table in tables for option in rows_of(table)} <= documented.keys()
    for flag, default in documented.items():
        option = by_flag[flag]
        assert option.default is None or option.show(option.default) == default
