"""The table of settings: each field of ServerConfig is a row, from which flags, variables, TOML keys and --help come.

The field some_name (or some_name_s, some_name_bytes: with its unit) is the flag --some-name, the variable
STEPLOOP_SOME_NAME and the TOML key some_name, unless its row names another. server/config_sources.py merges the
sources. Thread: main, at start; frozen after that.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from core.config import INTER_TOKEN_TARGET, QUANTIZE_SCHEMES, EngineConfig
from core.errors import StartupError
from core.tool_formats import ANY_FORMAT, FORMATS, HARMONY
from server.api.fields import POOLINGS, RequestLimits
from server.gate.cross_origin import origin_value
from server.gate.identity import WAYS, way_value
from server.gate.jwt import JwksUrl, jwks_source
from server.gate.tenants import Deadlines, Tenant
from server.ledger.usage import NO_PRICES, Prices
from server.listening.clients import (
    FORWARDED,
    UNIX,
    X_FORWARDED_FOR,
    ClientRules,
    IpNetwork,
    network_value,
    proxy_value,
)
from server.listening.sockets import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_UNIX_MODE,
    Bind,
    PassedAddress,
    PassedSocket,
    TcpAddress,
    UnixAddress,
    bind_value,
    format_unix_mode,
    tcp_address,
    unix_mode_value,
)
from server.observing.slo import NO_PROMISES, SloRules
from server.upstream.settings import ModelSettings, keep_alive_setting
from server.values import (
    BadValueError,
    HubId,
    NamedPath,
    choice_of,
    count_between,
    directory_value,
    duration_between,
    existing_directory,
    existing_file,
    factor_or_none,
    file_value,
    format_duration,
    format_size,
    model_source,
    named_directory,
    otlp_endpoint,
    secret_value,
    size_between,
    text_value,
    yes_or_no,
)
from server.wire.limits import ConnectionLimits, Rate, format_rate, rate_from

ENVIRONMENT_PREFIX = "STEPLOOP_"
KiB, MiB, GiB = 2**10, 2**20, 2**30
DAY_S = 86_400.0
_INHERITED = ("engine", "limits of a request")  # sections of settings that models' own processes have, too
NO_HEADER = "none"

_WIRE, _REQUEST = ConnectionLimits(), RequestLimits()
_LIST_PER_HEAD = _WIRE.http2.list_bytes // _WIRE.head.head_bytes
_PARTS_OF_CONTROL = _WIRE.max_control_bytes // _WIRE.control_bytes
# Real clients need these: nghttp begins with five PRIORITY frames and reads with WINDOW_UPDATEs
_LEAST_SETTINGS = 2  # the client's own, and its acknowledgement of ours
_LEAST_SETTINGS_ENTRIES = 8
_LEAST_EMPTY_FRAMES = 16

# Of vLLM and llama.cpp, with the nearest of ours
_KV_DTYPES_ELSEWHERE = dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "q8_0"), "int8")

AnyAddress = TcpAddress | UnixAddress | PassedAddress
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table.

    Args:
        parse: from text; raises BadValueError.
        section: its heading in --help.
        name: with dashes; by default the field's, without its unit.
        field_name: of ServerConfig, with its unit.
        show: formats the default for --help.
        sets: the field of ConnectionLimits that it sets, such as http2.frames.pings.
        is_rare: only --help-all lists it.
        is_list: the flag may be repeated, the variable holds commas, the TOML value is a list.
        is_secret: its value is never printed.
        is_switch: the flag has no value; the variable and the TOML key say true or false.
        in_file: the TOML file may set it.
    """

    default: Any
    parse: Callable[[str], Any]
    metavar: str
    help: str
    section: str
    name: str = ""
    field_name: str = ""
    show: Callable[[Any], str] = str
    sets: str = ""
    is_rare: bool = False
    is_list: bool = False
    is_secret: bool = False
    is_switch: bool = False
    in_file: bool = True

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.replace("-", "_").upper()

    @property
    def toml_key(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values of an option, in columns of Option."""

    parse: Callable[[str], Any]
    metavar: str
    show: Callable[[Any], str] = str


def _count(low: int, high: int, metavar: str = "COUNT") -> _Kind:
    return _Kind(count_between(low, high), metavar)


def _size(low: int, high: int) -> _Kind:
    """In bytes."""
    return _Kind(size_between(low, high), "SIZE", format_size)


def _duration(low_s: float, high_s: float) -> _Kind:
    """In seconds."""
    return _Kind(duration_between(low_s, high_s), "TIME", format_duration)


def keep_alive_value(text: str) -> float:
    """Seconds; infinite: always."""
    try:
        return keep_alive_setting(text)
    except ValueError as error:
        raise BadValueError("a time such as 10m, 0 (end at once) or -1 (stay)") from error


def _rate(least: int) -> _Kind:
    return _Kind(rate_from(least), "RATE", format_rate)


_FILE, _NEW_FILE = _Kind(existing_file, "FILE"), _Kind(file_value, "FILE")


@dataclass(frozen=True, slots=True)
class _Section:
    """A heading in --help. Calling it makes a field of ServerConfig that is a row of the table, with more columns of
    Option as keywords.
    """

    heading: str
    is_rare: bool = False

    def __call__(self, default: T, kind: _Kind, text: str, **more: Any) -> T:
        columns = {"parse": kind.parse, "metavar": kind.metavar, "show": kind.show, "is_rare": self.is_rare, **more}
        option = Option(default=default, help=text, section=self.heading, **columns)
        return field(default=default, repr=not option.is_secret, metadata={"option": option})

    def switch(self, text: str) -> bool:
        """Off by default."""
        return self(False, _Kind(yes_or_no, "BOOL"), text, is_switch=True)

    def several(self, kind: _Kind, text: str, **more: Any) -> tuple[Any, ...]:
        """Empty by default."""
        return self((), kind, f"{text}; may be repeated", is_list=True, **more)

    def limit(self, sets: str, kind: _Kind, text: str) -> Any:
        """A field of ConnectionLimits, which has the default."""
        return self(_part(_WIRE, sets), kind, text, sets=sets)


def _part(limits: Any, place: str) -> Any:
    for name in place.split("."):
        limits = getattr(limits, name)
    return limits


def _with(limits: T, place: str, value: Any) -> T:
    """The limits with another value at a place such as http2.frames.pings."""
    name, _, rest = place.partition(".")
    return replace(limits, **{name: _with(getattr(limits, name), rest, value) if rest else value})  # type: ignore[type-var]


_MODEL, _RARE_MODEL = _Section("model"), _Section("model", is_rare=True)
_ENGINE, _RARE_ENGINE = _Section("engine"), _Section("engine", is_rare=True)
_SERVER = _Section("server")
_LISTENING, _RARE_LISTENING = _Section("listening"), _Section("listening", is_rare=True)
_ACCESS, _RARE_ACCESS = _Section("access"), _Section("access", is_rare=True)
_LEDGER, _RARE_LEDGER = _Section("ledger"), _Section("ledger", is_rare=True)
_RARE_FILES = _Section("files and batches", is_rare=True)
_LIMITS, _RARE_LIMITS = _Section("limits"), _Section("limits", is_rare=True)
_CONNECTION = _Section("limits of a connection", is_rare=True)
_ONE_REQUEST = _Section("limits of a request", is_rare=True)


@dataclass(frozen=True)
class ServerConfig:
    """All settings, parsed and in range. None: chosen at start, from the model or by measurement."""

    # What is served.

    model: Path | HubId | None = _MODEL(
        None,
        _Kind(model_source, "MODEL"),
        "Hugging Face directory (config.json, *.safetensors, tokenizer.json), GGUF file, or org/name[@revision] to"
        " fetch from a hub (default: the embedded demonstration model)",
    )
    served_model_name: str | None = _MODEL(
        None, _Kind(text_value, "NAME"), "name that clients use (default: the directory's, file's or hub's name)"
    )
    aliases: tuple[str, ...] = _MODEL.several(
        _Kind(text_value, "NAME"), "another name for the model, such as gpt-4o-mini, at the model's price", name="alias"
    )
    loras: tuple[NamedPath, ...] = _MODEL.several(
        _Kind(named_directory, "NAME=PATH"),
        "serve the LoRA adapter in this directory (PEFT's adapter_config.json and adapter_model.safetensors) as a model"
        " of this name",
        name="lora",
    )
    lora_dir: Path | None = _RARE_MODEL(
        None,
        _Kind(existing_directory, "DIR"),
        "let POST /v1/load_lora_adapter load adapters from below this directory (default: none are loaded on request)",
    )
    max_loras: int = _RARE_MODEL(
        8,
        _count(1, 1024),
        "adapters in memory at once, with --lora or --lora-dir; each uses memory for --max-lora-rank",
    )
    max_lora_rank: int = _RARE_MODEL(16, _count(1, 4096, "RANK"), "highest rank of adapters")
    pooling: str | None = _RARE_MODEL(
        None,
        _Kind(choice_of(*POOLINGS), "HOW"),
        "also make embeddings from a chat model's last hidden states: the last token's, or the mean of all tokens"
        " (default: as the model's files say)",
    )
    chat_template: Path | None = _MODEL(None, _FILE, "Jinja chat template, instead of the model's own")
    tool_format: str = _RARE_MODEL(
        ANY_FORMAT,
        _Kind(choice_of(ANY_FORMAT, *FORMATS, HARMONY), "NAME"),
        f"how the model writes tool calls: {ANY_FORMAT} detects it from the chat template; {', '.join(FORMATS)} or"
        f" {HARMONY}",
    )
    max_model_len: int | None = _MODEL(
        None,
        _count(16, 10_000_000, "TOKENS"),
        "context length: tokens of prompt and answer together (default: the model's own)",
    )
    models_dir: Path | None = _MODEL(
        None,
        _Kind(existing_directory, "DIR"),
        "serve each model in this directory, or up to two levels below it, by its name there, instead of the embedded"
        " one; each starts when a request first names it",
    )
    models_memory_bytes: int | None = _RARE_MODEL(
        None,
        _size(KiB, 2**50),
        "total memory of the models that start on request; the least recently used one is stopped to make room"
        " (default: what is free when the first one starts)",
    )
    keep_alive_s: float = _RARE_MODEL(
        300.0,
        _Kind(keep_alive_value, "TIME", lambda value: "-1" if value == float("inf") else format_duration(value)),
        "how long such a model stays loaded after its last request; 0: stop at once; -1: never stop",
    )
    allow_special_in_content: bool = _RARE_MODEL.switch(
        "let messages contain control tokens such as <|im_start|>: their authors can then forge any turn"
    )

    # What computes, and how much at once.

    device: str = _ENGINE(
        "auto", _Kind(choice_of("auto", "cpu", "cuda", gpu="cuda", nvidia="cuda"), "NAME"), "auto, cpu or cuda"
    )
    dtype: str = _ENGINE(
        "auto",
        _Kind(
            choice_of("auto", "bfloat16", "float16", "float32", bf16="bfloat16", fp16="float16", half="float16"), "TYPE"
        ),
        "number format of weights and KV cache: auto, bfloat16, float16 or float32",
    )
    quantize: str | None = _ENGINE(
        None,
        _Kind(choice_of(*QUANTIZE_SCHEMES), "SCHEME"),
        "quantize the layers' weights to int8, fp8 (for GPUs) or int4 while they load, but not the embedding and head."
        " int4 suits few sequences at once. steploop doctor --quality measures the loss of quality",
    )
    activations: str = _ENGINE(
        "auto",
        _Kind(choice_of("auto", "bf16", "int8"), "TYPE"),
        "how a CPU multiplies quantized weights (GGUF, int8, int4): int8 quantizes activations to 8 bits and multiplies"
        " the weights as stored; bf16 dequantizes the weights, a GGUF file's while they load, others at every step;"
        " auto is int8 where the CPU has the instructions. A GPU never quantizes activations: there only a GGUF file"
        " differs, whose weights stay as stored with auto and int8, and are dequantized while they load with bf16",
    )
    kv_memory_bytes: int | None = _ENGINE(
        None, _size(MiB, 2**44), "memory for the KV cache, such as 2GiB (default: chosen from the free memory)"
    )
    kv_dtype: str = _ENGINE(
        "auto",
        _Kind(choice_of("auto", "int8", **_KV_DTYPES_ELSEWHERE), "TYPE"),
        "format of the KV cache: int8, with a scale for each token and head, takes half the memory of bf16 and less"
        " time to read; auto is that of --dtype",
    )
    kv_offload_bytes: int = _ENGINE(
        0,
        _size(0, 2**44),
        "host memory for prefixes that the KV cache evicts, such as 8GiB; they are copied back where that is faster"
        " than recomputing them (default: none)",
        name="kv-offload-memory",
    )
    kv_offload_dir: Path | None = _ENGINE(
        None,
        _Kind(directory_value, "DIR"),
        "directory that keeps the prefixes of --kv-offload-memory across restarts, in files that only their owner can"
        " read; for this server alone (default: none are kept)",
    )
    max_batch_tokens: int = _ENGINE(512, _count(16, 1_000_000, "TOKENS"), "tokens computed in one step")
    max_sequences: int = _ENGINE(64, _count(1, 65_536), "sequences that run at once")
    inter_token_target: float = _ENGINE(
        INTER_TOKEN_TARGET,
        _Kind(factor_or_none(1.05, 1000), "FACTOR"),
        "how much longer prefill may make a decode step: lower streams more smoothly, higher finishes prompts sooner;"
        " 0: no bound",
    )
    tensor_parallel: int = _ENGINE(
        1, _count(1, 64), "GPUs of this machine that share the model, one process each (with --device cpu: processes)"
    )
    threads: int | None = _ENGINE(
        None, _count(1, 4096), "compute threads on a CPU (default: measured, for each size of step)"
    )
    forced_tokens: str = _RARE_ENGINE(
        "on",
        _Kind(choice_of("on", "off"), "MODE"),
        "where a schema or grammar allows only one continuation, append its tokens in one step instead of one per step;"
        " off: the same tokens, one per step",
    )
    speculation: str = _ENGINE(
        "auto",
        _Kind(choice_of("auto", "off"), "MODE"),
        "speculative decoding by prompt lookup, where an answer repeats earlier text: auto uses it where it saves time,"
        " on a CPU. The tokens stay the same",
    )
    draft: Path | HubId | None = _RARE_ENGINE(
        None,
        _Kind(model_source, "MODEL"),
        "draft model for speculative decoding, where prompt lookup finds nothing: a smaller model of the same"
        " vocabulary, as directory, GGUF file or org/name; on a CPU. The tokens stay the same",
    )
    overlap: str = _RARE_ENGINE(
        "auto",
        _Kind(choice_of("auto", "on", "off"), "MODE"),
        "launch the next step before this one's tokens are read: auto does so on a GPU. The tokens stay the same",
    )
    graphs: str = _RARE_ENGINE(
        "auto",
        _Kind(choice_of("auto", "on", "off", "lazy"), "MODE"),
        "launch decode steps as CUDA graphs: auto captures them at start on a GPU; lazy captures each at first use, and"
        " starts sooner. The tokens stay the same",
    )
    deterministic: bool = _RARE_ENGINE.switch(
        "the same request and seed give bit-identical results, whatever else is in the batch: checks the model's"
        " matmuls at start, and on a GPU uses kernels of fixed tiles. Refuses settings that cannot guarantee this"
    )
    no_prefix_cache: bool = _RARE_ENGINE.switch(
        "compute every prompt whole, even if its prefix is the same as an earlier one's"
    )
    kv_offload_dir_bytes: int | None = _RARE_ENGINE(
        None,
        _size(KiB, 2**50),
        "maximum size of the files of --kv-offload-dir (default: as --kv-offload-memory)",
        name="kv-offload-dir-bytes",
    )
    quantize_cache_bytes: int = _RARE_ENGINE(
        32 * GiB,
        _size(0, 2**50),
        "maximum size of the quantized weights that ~/.cache/steploop keeps for later starts; 0 keeps none",
    )

    # The file with the settings, and the logs.

    config_file: Path | None = _SERVER(None, _FILE, "TOML file with settings", name="config", in_file=False)
    log_level: str = _SERVER(
        "info",
        _Kind(choice_of("debug", "info", "warning", "error", loud="debug", verbose="debug", quiet="error"), "LEVEL"),
        "debug, info, warning or error",
    )
    log_format: str = _SERVER("text", _Kind(choice_of("text", "json"), "FORMAT"), "text or json")
    otlp_endpoint: str | None = _SERVER(
        None,
        _Kind(otlp_endpoint, "URL"),
        "send a trace of each generation to this OpenTelemetry collector, by OTLP over HTTP, such as"
        " http://localhost:4318 (needs the extra otel)",
    )

    # Where connections come in, what is ahead of HTTP on them, and who may come.

    host: str = _LISTENING(DEFAULT_HOST, _Kind(text_value, "ADDRESS"), "address to listen on; 0.0.0.0 or :: for all")
    port: int = _LISTENING(DEFAULT_PORT, _count(0, 65_535, "PORT"), "port to listen on; 0 takes a free one")
    binds: tuple[Bind, ...] = _LISTENING.several(
        _Kind(bind_value, "WHERE"),
        "address to listen on, instead of the default one, in addition to any --host and --port: HOST:PORT,"
        " [IPV6]:PORT, unix:PATH, or systemd:NAME for sockets that systemd passes (served in any case). The prefix"
        " proxy: expects a PROXY protocol v2 header first; plain: serves without TLS despite --tls-cert",
        name="bind",
    )
    tls_cert: Path | None = _LISTENING(
        None, _FILE, "serve https with this PEM certificate and its chain; read again on SIGHUP"
    )
    tls_key: Path | None = _LISTENING(None, _FILE, "PEM key of the certificate (default: in the certificate's file)")
    tls_client_ca: Path | None = _LISTENING(
        None,
        _FILE,
        "request client certificates signed by these PEM certificates; the file may hold revocation lists; read again"
        " on SIGHUP",
    )
    tls_client_auth: str | None = _RARE_LISTENING(
        None,
        _Kind(choice_of("optional", "required"), "MODE"),
        "whether clients must show a certificate: optional or required (default with --tls-client-ca: required)",
    )
    trusted_proxies: tuple[IpNetwork | str, ...] = _LISTENING.several(
        _Kind(proxy_value, "NETWORK"),
        "proxies trusted to name the client's address; unix: everyone who connects to a Unix socket",
    )
    forwarded_header: str = _LISTENING(
        X_FORWARDED_FOR,
        _Kind(choice_of(X_FORWARDED_FOR, FORWARDED, NO_HEADER), "NAME"),
        f"header in which those proxies name the client: {X_FORWARDED_FOR}, {FORWARDED} or {NO_HEADER}",
    )
    allow: tuple[IpNetwork, ...] = _LISTENING.several(
        _Kind(network_value, "NETWORK"), "serve only clients from this network"
    )
    deny: tuple[IpNetwork, ...] = _LISTENING.several(
        _Kind(network_value, "NETWORK"), "refuse clients from this network, even if --allow names them"
    )
    unix_mode: int = _RARE_LISTENING(
        DEFAULT_UNIX_MODE, _Kind(unix_mode_value, "MODE", format_unix_mode), "permissions of the files of Unix sockets"
    )
    agent_check: TcpAddress | None = _RARE_LISTENING(
        None,
        _Kind(tcp_address, "HOST:PORT"),
        "answer haproxy's agent-check there, with the share of its weight that this server can take at its current"
        " expected wait",
    )
    kv_events: TcpAddress | None = _RARE_LISTENING(
        None,
        _Kind(tcp_address, "HOST:PORT"),
        "publish KV cache events there, over ZeroMQ in vLLM's format. They contain the token ids of everybody's prompts"
        " and need no authentication: let only the router reach it (needs the extra kv-events)",
    )
    kv_events_replay: TcpAddress | None = _RARE_LISTENING(
        None, _Kind(tcp_address, "HOST:PORT"), "resend missed KV cache events there; protect it likewise"
    )
    h2c_upgrade: bool = _RARE_LISTENING.switch(
        "let HTTP/1.1 clients upgrade to cleartext HTTP/2 (h2c). Do not use it behind a proxy, which would no longer"
        " see the requests. HTTP/2 by prior knowledge or ALPN is always on"
    )

    # How clients say who they are.

    api_keys: tuple[str, ...] = _ACCESS.several(
        _Kind(secret_value, "KEY"),
        "key that clients must send. Other users of the machine can read flags: prefer STEPLOOP_API_KEY (several keys"
        " separated by commas)",
        name="api-key",
        is_secret=True,
    )
    keys_file: Path | None = _ACCESS(
        None, _NEW_FILE, "file of keys, managed by steploop keys; read at start and on SIGHUP"
    )
    auth: tuple[str, ...] = _ACCESS(
        WAYS,
        _Kind(way_value, "WAY", ", ".join),
        "credentials that clients may send, in the order in which they are checked: key, jwt, certificate, or two"
        " required together, as in certificate+key; may be repeated",
        is_list=True,
    )
    jwks: Path | JwksUrl | None = _ACCESS(
        None,
        _Kind(jwks_source, "SOURCE"),
        "public keys of the JWT issuer, as a JSON Web Key Set: a file, read again on SIGHUP, or an https URL",
    )
    jwt_issuer: str | None = _ACCESS(None, _Kind(text_value, "TEXT"), "the iss that a JWT must have")
    jwt_audience: str | None = _ACCESS(None, _Kind(text_value, "TEXT"), "audience that a JWT's aud must contain")
    jwt_tenant_claim: str = _RARE_ACCESS(
        "tenant", _Kind(text_value, "NAME"), "claim of a JWT that names one of [[tenants]]"
    )
    jwt_leeway_s: float = _RARE_ACCESS(
        30.0, _duration(0, 600), "how far the clocks of this machine and the JWT issuer may differ"
    )
    metrics_without_key: bool = _RARE_ACCESS.switch(
        "serve /metrics, with tenants' names and usage, to everybody who reaches the port, for scrapers without a key"
    )
    insecure: bool = _ACCESS.switch(
        "serve everybody who reaches the port, from other machines too, without tenants, keys or client certificates"
    )
    cors_origins: tuple[str, ...] = _ACCESS.several(
        _Kind(origin_value, "ORIGIN"),
        "let pages of this origin, such as https://app.example.com, send requests from a browser; * for any origin,"
        " which without keys serves every page that a user visits",
        name="cors-origin",
    )

    # What is recorded of each request, and for how long.

    ledger: Path | None = _LEDGER(
        None,
        _NEW_FILE,
        "record each request's usage durably: steploop usage shows it, and after a restart the day's quotas continue"
        " from it (default: nothing is recorded)",
    )
    ledger_keep_s: float = _RARE_LEDGER(
        400 * DAY_S, _duration(DAY_S, 36_500 * DAY_S), "delete records of requests that ended longer ago"
    )

    record: Path | None = _LEDGER(
        None,
        _Kind(directory_value, "DIR"),
        "record what is needed to reproduce each answer (its seed, digests of model and settings) in files of this"
        " directory, which only their owner can read; steploop replay runs them again",
    )
    record_bodies: bool = _RARE_LEDGER.switch(
        "also record request bodies and answers' tokens, which a replay needs; they contain what users wrote"
    )
    record_size_bytes: int = _RARE_LEDGER(
        GiB, _size(64 * KiB, 2**50), "maximum size of the files of --record; the oldest are deleted", name="record-size"
    )
    record_keep_s: float = _RARE_LEDGER(
        7 * DAY_S, _duration(60, 36_500 * DAY_S), "delete recorded requests that are older"
    )
    store_responses_s: float | None = _RARE_LEDGER(
        None,
        _duration(60, 3650 * DAY_S),
        "store responses of /v1/responses in the ledger for this long, for previous_response_id and GET and DELETE by"
        " id, unless a request sends store: false (default: none are stored)",
    )
    store_responses_bytes: int = _RARE_LEDGER(
        GiB,
        _size(KiB, 2**50),
        "maximum size of stored responses; beyond it, the oldest of the tenant that has most are deleted",
        name="store-responses-size",
    )

    # Files, and batches of requests.

    files: Path | None = _RARE_FILES(
        None,
        _Kind(directory_value, "DIR"),
        "serve /v1/files and /v1/batches, and keep the files in this directory, used for nothing else (default: they"
        " are not served)",
    )
    max_file_bytes: int = _RARE_FILES(100 * MiB, _size(KiB, 2 * GiB), "size of an uploaded file", name="max-file-size")
    max_files: int = _RARE_FILES(1000, _count(1, 1_000_000), "files of one tenant, batches' output files included")
    max_files_bytes: int = _RARE_FILES(
        2 * GiB, _size(KiB, 2**50), "bytes of one tenant's files; beyond it uploads are refused", name="max-files-size"
    )

    # How much is taken, and for how long.

    max_body_bytes: int = _LIMITS(8 * MiB, _size(KiB, GiB), "size of a request body; a larger one gets 413")
    max_connections: int = _LIMITS(
        1024, _count(1, 1_000_000), "open connections, TLS handshakes included; more are closed at once"
    )
    max_connections_per_address: int | None = _LIMITS(
        None,
        _count(1, 1_000_000),
        "open connections of one client address, or IPv6 /64; behind trusted proxies, its requests in progress"
        " (default: seven eighths of --max-connections)",
    )
    max_queue: int = _LIMITS(1024, _count(1, 1_000_000), "requests that wait or run; more get 503")
    max_queue_tokens: int = _LIMITS(
        1_000_000, _count(1, 10**12), "prompt tokens of requests that wait for their first token; more get 503"
    )
    max_queue_bytes: int = _RARE_LIMITS(
        256 * MiB,
        _size(1, 2**50),
        "total size of the bodies of requests that wait, are tokenized or run; more get 503",
        name="max-queue-bytes",
    )
    ttft_deadline_s: float = _LIMITS(
        120.0,
        _duration(0.001, 604_800),
        "time from a request's head to its first token, then 504; a request that cannot meet it is refused at once",
    )
    inter_token_deadline_s: float = _LIMITS(
        30.0,
        _duration(0.001, 604_800),
        "time from one token of an answer to the next; pauses for a slow reader do not count",
    )
    total_deadline_s: float = _LIMITS(
        3600.0,
        _duration(0.001, 604_800),
        "time from a request's head to the end of its answer; requests and tenants may set less",
    )
    idle_timeout_s: float = _LIMITS.limit(
        "idle_s", _duration(0.1, DAY_S), "time after which a connection without a request is closed"
    )
    stall_timeout_s: float = _LIMITS.limit(
        "stall_s", _duration(0.1, 3600), "time after which a client that reads nothing loses its stream"
    )
    drain_timeout_s: float = _LIMITS(
        60.0, _duration(0, DAY_S), "time that running requests have to finish after SIGTERM"
    )
    head_timeout_s: float = _RARE_LIMITS.limit(
        "head_s", _duration(0.1, 3600), "time for a request's head, from its first byte"
    )
    body_timeout_s: float = _RARE_LIMITS.limit(
        "body_s", _duration(0.1, 3600), "time for a request's body, extended by --min-body-rate"
    )

    # What one connection may take: the table of docs/limits.md.

    handshake_timeout_s: float = _CONNECTION(
        5.0, _duration(0.1, 3600), "time from accepting a connection to the end of its PROXY header and TLS handshake"
    )
    max_request_line_bytes: int = _CONNECTION.limit(
        "head.request_line_bytes", _size(64, MiB), "HTTP/1.1 request line; a longer one gets 414"
    )
    max_head_bytes: int = _CONNECTION.limit(
        "head.head_bytes", _size(KiB, 128 * KiB), "request head, decompressed; a larger one gets 431"
    )
    max_header_fields: int = _CONNECTION.limit(
        "head.num_fields", _count(1, 10_000), "fields of a request head, including cookie crumbs; more get 431"
    )
    min_body_rate: int = _CONNECTION.limit(
        "body_bytes_per_s",
        _size(1, MiB),
        "bytes of a body that extend --body-timeout by a second; slower bodies get 408",
    )
    min_read_rate: int = _CONNECTION.limit(
        "stall_bytes_per_s",
        _size(1, MiB),
        "bytes per second that a client must read, averaged over --stall-timeout, to keep its stream, unless it has"
        " read everything",
    )
    max_unsent_bytes: int = _CONNECTION.limit(
        "unsent_bytes",
        _size(4 * KiB, MiB),
        "unread bytes of a stream at which it pauses, not counting as many in the kernel's buffer",
    )
    max_requests_per_connection: int = _CONNECTION.limit(
        "num_requests", _count(1, 10**9), "HTTP/1.1: requests after which a connection is closed"
    )
    max_streams_per_connection: int = _CONNECTION.limit(
        "num_streams", _count(1, 2**30 - 1), "HTTP/2: streams after which a connection is closed"
    )
    max_concurrent_streams: int = _CONNECTION.limit(
        "http2.num_streams", _count(1, 65_536), "HTTP/2: open streams, as advertised; more are refused"
    )
    max_refused_streams: int = _CONNECTION.limit(
        "http2.num_refused", _count(1, 65_536), "HTTP/2: streams refused in a row; more end the connection"
    )
    max_heads_bytes: int = _CONNECTION.limit(
        "http2.heads_bytes",
        _size(16 * KiB, 64 * MiB),
        "HTTP/2: total size of the heads of open requests, plus 100 bytes per field; more are refused, unless there is"
        " only one",
    )
    max_frame_bytes: int = _CONNECTION.limit(
        "http2.frames.frame_bytes",
        _size(16 * KiB, MiB),
        "HTTP/2: frame size, as advertised; a larger frame ends the connection",
    )
    max_header_block_bytes: int = _CONNECTION.limit(
        "http2.frames.header_block_bytes",
        _size(KiB, 4 * MiB),
        "HTTP/2: request head, compressed; a larger one ends the connection",
    )
    max_continuations: int = _CONNECTION.limit(
        "http2.frames.num_continuations", _count(0, 1024), "HTTP/2: CONTINUATION frames of a head"
    )
    max_resets: Rate = _CONNECTION.limit(
        "http2.frames.resets", _rate(1), "HTTP/2: stream resets by the client or for its errors"
    )
    max_pings: Rate = _CONNECTION.limit("http2.frames.pings", _rate(1), "HTTP/2: PING frames")
    max_settings: Rate = _CONNECTION.limit("http2.frames.settings", _rate(_LEAST_SETTINGS), "HTTP/2: SETTINGS frames")
    max_settings_entries: int = _CONNECTION.limit(
        "http2.frames.num_settings", _count(_LEAST_SETTINGS_ENTRIES, 2730), "HTTP/2: entries of a SETTINGS frame"
    )
    max_empty_frames: int = _CONNECTION.limit(
        "http2.frames.num_overhead_frames",
        _count(_LEAST_EMPTY_FRAMES, 1_000_000),
        "almost empty frames, and HTTP/1.1 chunks, beyond the allowance that content earns",
    )
    max_control_output_bytes: int = _CONNECTION.limit(
        "max_control_bytes",
        _size(64 * KiB, 64 * MiB),
        "HTTP/2: replies to the client's frames that it has not read; from a quarter of this on, the server stops"
        " reading",
    )

    # What one request may ask for.

    max_choices: int = _ONE_REQUEST(_REQUEST.num_choices, _count(1, 1024), "n, answers to one prompt; more get 400")
    max_prompts: int = _ONE_REQUEST(_REQUEST.num_prompts, _count(1, 1024), "prompts of one completion; more get 400")
    max_inputs: int = _ONE_REQUEST(
        _REQUEST.num_inputs, _count(1, 65_536), "texts of one request for embeddings or scores; more get 400"
    )
    max_stops: int = _ONE_REQUEST(_REQUEST.num_stops, _count(0, 256), "stop strings; more get 400")
    max_logit_biases: int = _ONE_REQUEST(
        _REQUEST.num_logit_biases, _count(0, 100_000), "entries of logit_bias; more get 400"
    )
    max_top_logprobs: int = _ONE_REQUEST(
        _REQUEST.num_top_logprobs, _count(0, 128), "top_logprobs, alternatives to a token; more get 400"
    )

    # Tables of the TOML file, the only place where they can stand.

    prices: Prices = NO_PRICES
    """[prices]"""

    tenants: tuple[Tenant, ...] = ()
    """[[tenants]]"""

    slo: SloRules = NO_PROMISES
    """[slo]"""

    models: tuple[ModelSettings, ...] = ()
    """[[models]], and those of models_dir"""

    own_models: tuple["ServerConfig", ...] = field(default=(), repr=False)
    """For each of `models` with a path: the settings of its process."""

    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    """Fields that were set, each with the flag, variable or key of the file that set it."""

    warnings: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What the operator should change before the next release."""

    @property
    def has_engine(self) -> bool:
        """A model is computed in this process: the one that is named, or the embedded one if there are no others."""
        return self.model is not None or not self.models

    @property
    def takes_adapters(self) -> bool:
        return bool(self.loras) or self.lora_dir is not None

    @property
    def context_origin(self) -> str:
        """What set the context length, as the operator wrote it."""
        return "the model's own" if self.max_model_len is None else dict(self.origins).get("max_model_len", "as asked")

    @property
    def client_rules(self) -> ClientRules:
        header = None if self.forwarded_header == NO_HEADER else self.forwarded_header
        others = self.max_connections // 64 * 8  # an eighth stays free for other clients; of a few connections, nothing
        cap = self.max_connections_per_address or self.max_connections - others
        return ClientRules(self.allow, self.deny, self.trusted_proxies, header, cap)

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(
            ttft_s=self.ttft_deadline_s, inter_token_s=self.inter_token_deadline_s, total_s=self.total_deadline_s
        )

    @property
    def request_limits(self) -> RequestLimits:
        return RequestLimits(
            num_choices=self.max_choices,
            num_prompts=self.max_prompts,
            num_inputs=self.max_inputs,
            num_stops=self.max_stops,
            num_logit_biases=self.max_logit_biases,
            num_top_logprobs=self.max_top_logprobs,
        )

    @property
    def connection_limits(self) -> ConnectionLimits:
        limits = _WIRE
        for option in OPTIONS:
            if option.sets:
                limits = _with(limits, option.sets, getattr(self, option.field_name))
        head, http2, frames = limits.head, limits.http2, limits.http2.frames
        # A head that is not too large unpacked is not refused for its packed size.
        frames = replace(frames, header_block_bytes=max(frames.header_block_bytes, head.head_bytes))
        return replace(
            limits,
            head=replace(head, num_small_chunks=frames.num_overhead_frames),
            http2=replace(http2, frames=frames, list_bytes=_LIST_PER_HEAD * head.head_bytes),
            control_bytes=limits.max_control_bytes // _PARTS_OF_CONTROL,
            buffered_body_bytes=max(limits.buffered_body_bytes, self.max_body_bytes),
        )

    def process_of(self, model: ModelSettings, source: Path | HubId, settings: Mapping[str, Any]) -> "ServerConfig":
        """The settings of a model's own process: this server's of the engine, and what the gateway leaves open to it.

        Args:
            settings: of the model's entry, parsed.
        """
        inherited = (option.field_name for option in OPTIONS if option.section in _INHERITED and option.name != "draft")
        own: dict[str, Any] = {name: getattr(self, name) for name in inherited}
        if self.kv_offload_dir is not None:
            own["kv_offload_dir"] = self.kv_offload_dir / quote(model.name, safe="")
        own |= dict.fromkeys(("ttft_deadline_s", "inter_token_deadline_s", "total_deadline_s"), 7 * DAY_S)
        own |= dict.fromkeys(("max_resets", "max_pings", "max_settings"), Rate(10**6, 1e6))
        own |= {"max_queue": 10**6, "max_queue_tokens": 10**12, "max_concurrent_streams": model.max_requests}
        own |= {"max_body_bytes": self.max_body_bytes, "log_format": self.log_format}
        own["log_level"] = "debug" if self.log_level == "debug" else "warning"
        own |= {**settings, "model": source, "served_model_name": model.name}
        return ServerConfig(**own, origins=tuple((name, "its settings") for name in settings))

    def all_binds(self, passed: Sequence[PassedSocket] = ()) -> tuple[Bind, ...]:
        """Where to listen: the binds, and --host and --port if they are set or there is nothing else.

        Args:
            passed: sockets that systemd passed to this process.

        Raises:
            StartupError: a bind is for proxies, and no proxy that could reach it is trusted; or --port and a --bind
                name the same port.
        """
        trusted = {proxy == UNIX for proxy in self.trusted_proxies}
        for bind in self.binds:
            kinds = _kinds(bind.address, passed)
            if bind.takes_proxy and not (trusted and kinds <= trusted):
                cause = (
                    f"--bind proxy:{bind.address} accepts only trusted proxies, but no --trusted-proxies can reach it"
                )
                raise StartupError(cause, f"--trusted-proxies {_sample_proxy(kinds)}")
        is_given = any(name in ("host", "port") for name, _ in self.origins)
        if not is_given and (self.binds or passed):
            return self.binds
        own = TcpAddress(self.host, self.port)
        for bind in self.binds:
            if isinstance(bind.address, TcpAddress) and _overlap(own, bind.address):
                cause = f"--host and --port name {own}, and --bind {bind.address} has the same port"
                raise StartupError(cause, f"remove --port {own.port}, or the --bind")
        return (Bind(own), *self.binds)

    def to_engine_config(self) -> EngineConfig:
        """Raises StartupError: settings contradict one another."""
        for cause, fix in self._contradictions():
            raise StartupError(cause, fix)
        same = {one.name: getattr(self, one.name) for one in fields(EngineConfig) if hasattr(self, one.name)}
        own = {
            "max_loras": self.max_loras if self.takes_adapters else 0,
            "kv_offload_dir": None if self.kv_offload_dir is None else str(self.kv_offload_dir),
            "has_prefix_cache": not self.no_prefix_cache,
            "mtp": self.draft is None,
            "inter_token_target": self.inter_token_target or None,
        }
        return EngineConfig(**same | own)

    def _contradictions(self) -> list[tuple[str, str]]:
        """Settings that exclude each other: causes and fixes."""
        found = []
        if self.no_prefix_cache and self.kv_offload_bytes:
            cause = "--kv-offload-memory keeps what the prefix cache evicts, and --no-prefix-cache turns that cache off"
            found.append((cause, "leave one of them out"))
        if self.record_bodies and self.record is None:
            found.append(("--record-bodies needs --record", "--record DIR"))
        if self.deterministic and self.tensor_parallel > 1:
            cause = "--deterministic needs a single device: several do not sum in a fixed order"
            found.append((cause, "leave one of them out"))
        if self.kv_offload_dir is not None and not self.kv_offload_bytes:
            cause = "--kv-offload-dir stores the contents of --kv-offload-memory, which is 0"
            found.append((cause, "--kv-offload-memory 1GiB, or as much as you want to keep"))
        if len(self.loras) > self.max_loras:
            cause = f"--lora names {len(self.loras)} adapters, more than --max-loras {self.max_loras} allows"
            found.append((cause, f"--max-loras {len(self.loras)}"))
        if self.draft is not None and (self.speculation == "off" or self.tensor_parallel > 1):
            other = "--speculation off" if self.speculation == "off" else f"--tensor-parallel {self.tensor_parallel}"
            found.append((f"--draft has no effect with {other}", "leave one of them out"))
        if self.tensor_parallel > 1:
            asked = f"--tensor-parallel {self.tensor_parallel}"
            if self.graphs in ("on", "lazy"):
                cause = f"--graphs {self.graphs} does not work with {asked}: its steps run without CUDA graphs"
                found.append((cause, "leave --graphs out"))
            if self.takes_adapters:
                found.append((f"LoRA adapters do not work with {asked}", "leave one of them out"))
            if self.kv_offload_bytes:
                cause = f"--kv-offload-memory does not work with {asked}"
                found.append((cause, "leave one of them out"))
        return found


def _overlap(one: TcpAddress, other: TcpAddress) -> bool:
    """Two sockets cannot listen on both."""
    is_wildcard = {one.host, other.host} & {"", "0.0.0.0", "::"} and (":" in one.host) == (":" in other.host)
    return one.port == other.port != 0 and (one.host == other.host or bool(is_wildcard))


def _kinds(address: AnyAddress, passed: Sequence[PassedSocket]) -> set[bool]:
    """True for a Unix socket, False for TCP: systemd may pass sockets of both kinds, or of none, under one name."""
    if isinstance(address, PassedAddress):
        return {one.sock.family == socket.AF_UNIX for one in passed if one.name == address.name}
    return {isinstance(address, UnixAddress)}


def _sample_proxy(are_unix: set[bool]) -> str:
    network = "127.0.0.1, or the network that the proxy is in"
    if are_unix == {True}:
        return UNIX
    return network if are_unix == {False} else f"{UNIX} for a Unix socket; else {network}"


def _row(field_name: str, option: Option) -> Option:
    name = option.name or field_name.removesuffix("_s").removesuffix("_bytes").replace("_", "-")
    return replace(option, name=name, field_name=field_name)


OPTIONS = tuple(_row(one.name, one.metadata["option"]) for one in fields(ServerConfig) if one.metadata)
"""In the order of --help."""
