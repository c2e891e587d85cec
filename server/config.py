"""What the operator can set, as one table: the fields of ServerConfig. Flags, environment and TOML all come from it.

A setting called some-name is the flag --some-name, the variable STEPLOOP_SOME_NAME and the TOML key some_name.
Which of them wins: server/config_sources.py. Thread: main, at start; frozen after that.
"""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Required, TypedDict

from core.config import INTER_TOKEN_TARGET, QUANTIZE_SCHEMES, EngineConfig
from core.errors import ExitCode, StartupError
from server.admission import QueueLimits
from server.auth import WAYS, way_value
from server.binds import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_UNIX_MODE,
    Bind,
    PassedAddress,
    TcpAddress,
    UnixAddress,
    bind_value,
    format_unix_mode,
    unix_mode_value,
)
from server.client_gate import ClientRules
from server.cross_origin import origin_value
from server.deadlines import Deadlines
from server.forwarded import FORWARDED, X_FORWARDED_FOR
from server.jwks import JwksUrl, jwks_source
from server.networks import UNIX, IpNetwork, network_value, proxy_value
from server.tenants import Tenant
from server.values import (
    HubId,
    choice_of,
    count_between,
    duration_between,
    existing_file,
    factor_or_none,
    file_value,
    format_duration,
    format_size,
    model_source,
    secret_value,
    size_between,
    text_value,
    yes_or_no,
)

NO_HEADER = "none"
ENVIRONMENT_PREFIX = "STEPLOOP_"
GiB = 2**30
MiB = 2**20
KiB = 2**10


class Setting(TypedDict, total=False):
    """What a field of ServerConfig says of itself as metadata: Option's arguments of the same names."""

    name: Required[str]
    parse: Required[Callable[[str], Any]]
    metavar: Required[str]
    help: Required[str]
    group: Required[str]
    show: Callable[[Any], str]
    is_list: bool
    is_secret: bool
    is_switch: bool
    in_file: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the table.

    Args:
        field_name: in ServerConfig; its unit is part of it.
        name: what operators write, with dashes.
        parse: from text; raises BadValueError.
        group: its heading in --help.
        show: the default, as the help says it.
        is_list: the flag may be repeated, the variable holds commas, the TOML value is a list.
        is_secret: its value is never printed.
        is_switch: the flag has no value; the variable and the TOML key say true or false.
        in_file: may stand in the TOML file.
    """

    field_name: str
    default: Any
    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    group: str
    show: Callable[[Any], str] = str
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
class ServerConfig:
    """All settings, parsed and in range. None: chosen at start, from the model or by measurement."""

    model: Path | HubId | None = field(
        default=None,
        metadata=Setting(
            name="model",
            parse=model_source,
            metavar="MODEL",
            help="Hugging Face directory (config.json, *.safetensors, tokenizer.json), GGUF file, or"
            " org/name[@revision] to fetch from a hub; without it the embedded demonstration model is served",
            group="model",
        ),
    )
    served_model_name: str | None = field(
        default=None,
        metadata=Setting(
            name="served-model-name",
            parse=text_value,
            metavar="NAME",
            help="the name clients ask for (default: the directory's, file's or hub's name)",
            group="model",
        ),
    )
    chat_template: Path | None = field(
        default=None,
        metadata=Setting(
            name="chat-template",
            parse=existing_file,
            metavar="FILE",
            help="Jinja template, instead of the model's own",
            group="model",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=Setting(
            name="max-model-len",
            parse=count_between(16, 10_000_000),
            metavar="TOKENS",
            help="context of a sequence, prompt and answer together (default: the model's own)",
            group="model",
        ),
    )
    device: str = field(
        default="auto",
        metadata=Setting(
            name="device",
            parse=choice_of("auto", "cpu", "cuda"),
            metavar="NAME",
            help="auto, cpu or cuda",
            group="engine",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=Setting(
            name="dtype",
            parse=choice_of("auto", "bfloat16", "float16", "float32"),
            metavar="TYPE",
            help="of weights and KV cache: auto, bfloat16, float16 or float32",
            group="engine",
        ),
    )
    kv_memory_bytes: int | None = field(
        default=None,
        metadata=Setting(
            name="kv-memory",
            parse=size_between(MiB, 2**44),
            metavar="SIZE",
            help="memory for the KV cache, such as 2GiB (default: from what is free)",
            group="engine",
        ),
    )
    max_batch_tokens: int = field(
        default=512,
        metadata=Setting(
            name="max-batch-tokens",
            parse=count_between(16, 1_000_000),
            metavar="TOKENS",
            help="computed in one step",
            group="engine",
        ),
    )
    max_sequences: int = field(
        default=64,
        metadata=Setting(
            name="max-sequences",
            parse=count_between(1, 65_536),
            metavar="COUNT",
            help="sequences that run at once",
            group="engine",
        ),
    )
    inter_token_target: float = field(
        default=INTER_TOKEN_TARGET,
        metadata=Setting(
            name="inter-token-target",
            parse=factor_or_none(1.05, 1000),
            metavar="FACTOR",
            help="a step with prompts in it takes at most so many times what its running streams alone would: smaller"
            " is smoother, larger has prompts done sooner; 0 for no bound",
            group="engine",
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=Setting(
            name="threads",
            parse=count_between(1, 4096),
            metavar="COUNT",
            help="compute threads on a CPU (default: measured, by the tokens of a step)",
            group="engine",
        ),
    )
    quantize: str | None = field(
        default=None,
        metadata=Setting(
            name="quantize",
            parse=choice_of(*QUANTIZE_SCHEMES),
            metavar="SCHEME",
            help="the layers' matrices to int8 or int4 while they load; embedding and head stay as they are. int4 is"
            " for few sequences at once; steploop doctor --quality says what it costs (default: as the model is)",
            group="engine",
        ),
    )
    quantize_cache_bytes: int = field(
        default=32 * GiB,
        metadata=Setting(
            name="quantize-cache",
            parse=size_between(0, 2**50),
            metavar="SIZE",
            help="what was quantised is kept in ~/.cache/steploop, up to so much, last used longest; 0 keeps nothing",
            group="engine",
            show=format_size,
        ),
    )
    no_prefix_cache: bool = field(
        default=False,
        metadata=Setting(
            name="no-prefix-cache",
            parse=yes_or_no,
            metavar="BOOL",
            help="compute every prompt whole, even where an earlier one began the same",
            group="engine",
            is_switch=True,
        ),
    )
    config_file: Path | None = field(
        default=None,
        metadata=Setting(
            name="config",
            parse=existing_file,
            metavar="FILE",
            help="TOML file with settings",
            group="server",
            in_file=False,
        ),
    )
    host: str = field(
        default=DEFAULT_HOST,
        metadata=Setting(
            name="host",
            parse=text_value,
            metavar="ADDRESS",
            help="address to listen on; 0.0.0.0 or :: for all",
            group="server",
        ),
    )
    port: int = field(
        default=DEFAULT_PORT,
        metadata=Setting(
            name="port", parse=count_between(0, 65_535), metavar="PORT", help="0 takes a free one", group="server"
        ),
    )
    binds: tuple[Bind, ...] = field(
        default=(),
        metadata=Setting(
            name="bind",
            parse=bind_value,
            metavar="WHERE",
            help="listen there, instead of on the default address or beside the --host and --port given; may be"
            " repeated. HOST:PORT, [IPV6]:PORT, unix:PATH, or systemd:NAME for sockets passed by systemd (which are"
            " served in any case). With proxy: before it, a PROXY protocol v2 header comes first; with plain:, it is"
            " in the clear in spite of --tls-cert",
            group="server",
            is_list=True,
        ),
    )
    unix_mode: int = field(
        default=DEFAULT_UNIX_MODE,
        metadata=Setting(
            name="unix-mode",
            parse=unix_mode_value,
            metavar="MODE",
            help="permissions of the files of Unix sockets",
            group="server",
            show=format_unix_mode,
        ),
    )
    tls_cert: Path | None = field(
        default=None,
        metadata=Setting(
            name="tls-cert",
            parse=existing_file,
            metavar="FILE",
            help="PEM certificate with its chain: https instead of http; read again on SIGHUP",
            group="server",
        ),
    )
    tls_key: Path | None = field(
        default=None,
        metadata=Setting(
            name="tls-key",
            parse=existing_file,
            metavar="FILE",
            help="PEM key, where it is not in the certificate's file",
            group="server",
        ),
    )
    tls_client_ca: Path | None = field(
        default=None,
        metadata=Setting(
            name="tls-client-ca",
            parse=existing_file,
            metavar="FILE",
            help="PEM certificates of those who sign clients' certificates: clients are asked for theirs; read again"
            " on SIGHUP",
            group="server",
        ),
    )
    tls_client_auth: str | None = field(
        default=None,
        metadata=Setting(
            name="tls-client-auth",
            parse=choice_of("optional", "required"),
            metavar="MODE",
            help="optional or required: whether clients must show a certificate (default with --tls-client-ca:"
            " required)",
            group="server",
        ),
    )
    trusted_proxies: tuple[IpNetwork | str, ...] = field(
        default=(),
        metadata=Setting(
            name="trusted-proxies",
            parse=proxy_value,
            metavar="NETWORK",
            help="proxies that may say for whom they speak; unix: whoever connects to a Unix socket; may be repeated",
            group="server",
            is_list=True,
        ),
    )
    forwarded_header: str = field(
        default=X_FORWARDED_FOR,
        metadata=Setting(
            name="forwarded-header",
            parse=choice_of(X_FORWARDED_FOR, FORWARDED, NO_HEADER),
            metavar="NAME",
            help=f"in which they say it, the one that they set themselves: {X_FORWARDED_FOR}, {FORWARDED} or"
            f" {NO_HEADER}",
            group="server",
        ),
    )
    allow: tuple[IpNetwork, ...] = field(
        default=(),
        metadata=Setting(
            name="allow",
            parse=network_value,
            metavar="NETWORK",
            help="only clients from there are served; may be repeated",
            group="server",
            is_list=True,
        ),
    )
    deny: tuple[IpNetwork, ...] = field(
        default=(),
        metadata=Setting(
            name="deny",
            parse=network_value,
            metavar="NETWORK",
            help="clients from there are not served, allowed or not; may be repeated",
            group="server",
            is_list=True,
        ),
    )
    api_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=Setting(
            name="api-key",
            parse=secret_value,
            metavar="KEY",
            help="a key that clients must show; may be repeated. Other users of the machine can read flags: prefer"
            " STEPLOOP_API_KEY (several parted by commas)",
            group="server",
            is_list=True,
            is_secret=True,
        ),
    )
    keys_file: Path | None = field(
        default=None,
        metadata=Setting(
            name="keys-file",
            parse=file_value,
            metavar="FILE",
            help="what steploop keys create, list and revoke keep of keys; the server reads it at start and on SIGHUP",
            group="server",
        ),
    )
    auth: tuple[str, ...] = field(
        default=WAYS,
        metadata=Setting(
            name="auth",
            parse=way_value,
            metavar="WAY",
            help="how clients say who they are, in the order in which it is looked at: key, jwt, certificate, or two of"
            " one request as in certificate+key; may be repeated",
            group="server",
            show=", ".join,
            is_list=True,
        ),
    )
    jwks: Path | JwksUrl | None = field(
        default=None,
        metadata=Setting(
            name="jwks",
            parse=jwks_source,
            metavar="SOURCE",
            help="public keys of who issues JWTs, as a JSON Web Key Set: a file, read again on SIGHUP, or an https URL",
            group="server",
        ),
    )
    jwt_issuer: str | None = field(
        default=None,
        metadata=Setting(
            name="jwt-issuer", parse=text_value, metavar="TEXT", help="what iss of a JWT must be", group="server"
        ),
    )
    jwt_audience: str | None = field(
        default=None,
        metadata=Setting(
            name="jwt-audience",
            parse=text_value,
            metavar="TEXT",
            help="what aud of a JWT must be, or have among others",
            group="server",
        ),
    )
    jwt_tenant_claim: str = field(
        default="tenant",
        metadata=Setting(
            name="jwt-tenant-claim",
            parse=text_value,
            metavar="NAME",
            help="the claim of a JWT that names one of [[tenants]]",
            group="server",
        ),
    )
    jwt_leeway_s: float = field(
        default=30.0,
        metadata=Setting(
            name="jwt-leeway",
            parse=duration_between(0, 600),
            metavar="TIME",
            help="that the clocks here and at a JWT's issuer may be apart",
            group="server",
            show=format_duration,
        ),
    )
    insecure: bool = field(
        default=False,
        metadata=Setting(
            name="insecure",
            parse=yes_or_no,
            metavar="BOOL",
            help="serve whoever reaches the port, without tenants, keys or client certificates, on addresses of other"
            " machines too",
            group="server",
            is_switch=True,
        ),
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata=Setting(
            name="cors-origin",
            parse=origin_value,
            metavar="ORIGIN",
            help="pages of this origin, such as https://app.example.com, may ask from a browser; may be repeated; * for"
            " any, which lets every page that a user visits ask where no key is needed (default: none)",
            group="server",
            is_list=True,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=Setting(
            name="log-level",
            parse=choice_of("debug", "info", "warning", "error"),
            metavar="LEVEL",
            help="debug, info, warning or error",
            group="server",
        ),
    )
    log_format: str = field(
        default="text",
        metadata=Setting(
            name="log-format", parse=choice_of("text", "json"), metavar="FORMAT", help="text or json", group="server"
        ),
    )
    max_body_bytes: int = field(
        default=8 * MiB,
        metadata=Setting(
            name="max-body",
            parse=size_between(KiB, GiB),
            metavar="SIZE",
            help="a larger request body gets 413",
            group="limits",
            show=format_size,
        ),
    )
    max_connections: int = field(
        default=1024,
        metadata=Setting(
            name="max-connections",
            parse=count_between(1, 1_000_000),
            metavar="COUNT",
            help="open at once, TLS handshakes included; one more is closed at once",
            group="limits",
        ),
    )
    max_connections_per_address: int | None = field(
        default=None,
        metadata=Setting(
            name="max-connections-per-address",
            parse=count_between(1, 1_000_000),
            metavar="COUNT",
            help="open at once from one client, IPv6 by its /64; behind trusted proxies: requests in progress"
            " (default: seven eighths of --max-connections)",
            group="limits",
        ),
    )
    max_queue: int = field(
        default=1024,
        metadata=Setting(
            name="max-queue",
            parse=count_between(1, 1_000_000),
            metavar="COUNT",
            help="requests that wait or run; more get 503",
            group="limits",
        ),
    )
    max_queue_tokens: int = field(
        default=1_000_000,
        metadata=Setting(
            name="max-queue-tokens",
            parse=count_between(1, 10**12),
            metavar="COUNT",
            help="of prompts that wait for their first token; more get 503",
            group="limits",
        ),
    )
    max_queue_bytes: int = field(
        default=256 * MiB,
        metadata=Setting(
            name="max-queue-bytes",
            parse=size_between(1, 2**50),
            metavar="SIZE",
            help="of bodies of requests that wait or run, those being tokenized among them; more get 503",
            group="limits",
            show=format_size,
        ),
    )
    head_timeout_s: float = field(
        default=10.0,
        metadata=Setting(
            name="head-timeout",
            parse=duration_between(0.1, 3600),
            metavar="TIME",
            help="for a request's head, from its first byte",
            group="limits",
            show=format_duration,
        ),
    )
    body_timeout_s: float = field(
        default=30.0,
        metadata=Setting(
            name="body-timeout",
            parse=duration_between(0.1, 3600),
            metavar="TIME",
            help="for a request's body",
            group="limits",
            show=format_duration,
        ),
    )
    idle_timeout_s: float = field(
        default=75.0,
        metadata=Setting(
            name="idle-timeout",
            parse=duration_between(0.1, 86_400),
            metavar="TIME",
            help="a connection without a request is closed",
            group="limits",
            show=format_duration,
        ),
    )
    stall_timeout_s: float = field(
        default=30.0,
        metadata=Setting(
            name="stall-timeout",
            parse=duration_between(0.1, 3600),
            metavar="TIME",
            help="a reader that takes nothing for so long loses its stream",
            group="limits",
            show=format_duration,
        ),
    )
    ttft_deadline_s: float = field(
        default=120.0,
        metadata=Setting(
            name="ttft-deadline",
            parse=duration_between(0.001, 604_800),
            metavar="TIME",
            help="from a request's head to its first token; then 504. A request that cannot have it by then is refused"
            " at once",
            group="limits",
            show=format_duration,
        ),
    )
    inter_token_deadline_s: float = field(
        default=30.0,
        metadata=Setting(
            name="inter-token-deadline",
            parse=duration_between(0.001, 604_800),
            metavar="TIME",
            help="from one token of an answer to its next, less what a slow reader takes",
            group="limits",
            show=format_duration,
        ),
    )
    total_deadline_s: float = field(
        default=3600.0,
        metadata=Setting(
            name="total-deadline",
            parse=duration_between(0.001, 604_800),
            metavar="TIME",
            help="from a request's head to its answer's end. Requests and tenants may ask for less",
            group="limits",
            show=format_duration,
        ),
    )
    drain_timeout_s: float = field(
        default=60.0,
        metadata=Setting(
            name="drain-timeout",
            parse=duration_between(0, 86_400),
            metavar="TIME",
            help="running requests may finish for so long after SIGTERM",
            group="limits",
            show=format_duration,
        ),
    )

    tenants: tuple[Tenant, ...] = ()
    """[[tenants]] of the TOML file, the only place where they can stand."""

    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    """Fields that were set, each with the flag, the variable, or the key of the file that set it."""

    @property
    def context_origin(self) -> str:
        """Where the length of the context comes from, as the operator wrote it."""
        return "the model's own" if self.max_model_len is None else dict(self.origins).get("max_model_len", "as asked")

    @property
    def client_rules(self) -> ClientRules:
        header = None if self.forwarded_header == NO_HEADER else self.forwarded_header
        others = self.max_connections // 64 * 8  # an eighth is left to them; of a few connections, nothing
        cap = self.max_connections_per_address or self.max_connections - others
        return ClientRules(self.allow, self.deny, self.trusted_proxies, header, cap)

    @property
    def queue_limits(self) -> QueueLimits:
        return QueueLimits(
            max_requests=self.max_queue, max_tokens=self.max_queue_tokens, max_bytes=self.max_queue_bytes
        )

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(
            ttft_s=self.ttft_deadline_s, inter_token_s=self.inter_token_deadline_s, total_s=self.total_deadline_s
        )

    def all_binds(self, has_passed: bool = False) -> tuple[Bind, ...]:
        """What to listen on: the binds, and --host and --port where they are set, or where there is nothing else.

        Args:
            has_passed: sockets were passed to this process.

        Raises:
            StartupError: a bind is for proxies, and none that could reach it is trusted.
        """
        for bind in self.binds:
            if bind.takes_proxy and not any(_can_reach(proxy, bind.address) for proxy in self.trusted_proxies):
                raise StartupError(
                    f"the bind proxy:{bind.address} is for trusted proxies alone, and none that can reach it is named",
                    f"--trusted-proxies {_sample_proxy(bind.address)}",
                    ExitCode.CONFIGURATION,
                )
        is_given = any(name in ("host", "port") for name, _ in self.origins)
        if is_given or not (self.binds or has_passed):
            return (Bind(TcpAddress(self.host, self.port)), *self.binds)
        return self.binds

    def to_engine_config(self) -> EngineConfig:
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            kv_memory_bytes=self.kv_memory_bytes,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            threads=self.threads,
            quantize=self.quantize,
            quantize_cache_bytes=self.quantize_cache_bytes,
            has_prefix_cache=not self.no_prefix_cache,
            inter_token_target=self.inter_token_target or None,
        )


def _can_reach(proxy: IpNetwork | str, address: TcpAddress | UnixAddress | PassedAddress) -> bool:
    """Of a passed socket only its bearer knows whether it is TCP or Unix: whoever is trusted may be meant."""
    return isinstance(address, PassedAddress) or isinstance(address, UnixAddress) == (proxy == UNIX)


def _sample_proxy(address: TcpAddress | UnixAddress | PassedAddress) -> str:
    network = "127.0.0.1, or the network that the proxy is in"
    if isinstance(address, UnixAddress):
        return UNIX
    return f"{UNIX} for a Unix socket; else {network}" if isinstance(address, PassedAddress) else network


def _row(config_field: Field[Any]) -> Option:
    assert config_field.default is not MISSING
    return Option(field_name=config_field.name, default=config_field.default, **config_field.metadata)


OPTIONS: tuple[Option, ...] = tuple(
    _row(config_field) for config_field in fields(ServerConfig) if config_field.metadata
)
