"""What the operator can set: the tables of server/settings, as one. Flags, environment and TOML all come from them.

A setting called some-name is the flag --some-name, the variable STEPLOOP_SOME_NAME and the TOML key some_name.
Which of them wins: server/config_sources.py. Thread: main, at start; frozen after that.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.config import EngineConfig
from core.errors import ExitCode, StartupError
from server.gate.deadlines import Deadlines
from server.gate.tenants import Tenant
from server.ledger.usage import NO_PRICES, Prices
from server.listening.clients import UNIX, ClientRules
from server.listening.sockets import Bind, PassedAddress, PassedSocket, TcpAddress, UnixAddress
from server.observing.slo import NO_PROMISES, SloRules
from server.settings.engine import EngineSettings
from server.settings.identity import IdentitySettings
from server.settings.ledger import LedgerSettings
from server.settings.limits import LimitSettings
from server.settings.listening import NO_HEADER, ListeningSettings
from server.settings.model import ModelSettings
from server.settings.option import Option, rows_of
from server.settings.process import ProcessSettings
from server.settings.requests import RequestSettings
from server.settings.wire import WireSettings

AnyAddress = TcpAddress | UnixAddress | PassedAddress


@dataclass(frozen=True)
class ServerConfig(
    ModelSettings,
    EngineSettings,
    ProcessSettings,
    ListeningSettings,
    IdentitySettings,
    LedgerSettings,
    LimitSettings,
    WireSettings,
    RequestSettings,
):
    """All settings, parsed and in range. None: chosen at start, from the model or by measurement."""

    prices: Prices = NO_PRICES
    """[prices] of the TOML file, the only place where they can stand."""

    tenants: tuple[Tenant, ...] = ()
    """[[tenants]] of the TOML file, the only place where they can stand."""

    slo: SloRules = NO_PROMISES
    """[slo] of the TOML file, likewise."""

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
    def deadlines(self) -> Deadlines:
        return Deadlines(
            ttft_s=self.ttft_deadline_s, inter_token_s=self.inter_token_deadline_s, total_s=self.total_deadline_s
        )

    def all_binds(self, passed: Sequence[PassedSocket] = ()) -> tuple[Bind, ...]:
        """What to listen on: the binds, and --host and --port where they are set, or where there is nothing else.

        Args:
            passed: sockets that were passed to this process.

        Raises:
            StartupError: a bind is for proxies, and none that could reach it is trusted.
        """
        for bind in self.binds:
            if bind.takes_proxy and not self._has_proxies_for(bind.address, passed):
                raise StartupError(
                    f"the bind proxy:{bind.address} is for trusted proxies alone, and none that can reach it is named",
                    f"--trusted-proxies {_sample_proxy(_kinds(bind.address, passed))}",
                    ExitCode.CONFIGURATION,
                )
        is_given = any(name in ("host", "port") for name, _ in self.origins)
        if is_given or not (self.binds or passed):
            return (Bind(TcpAddress(self.host, self.port)), *self.binds)
        return self.binds

    def _has_proxies_for(self, address: AnyAddress, passed: Sequence[PassedSocket]) -> bool:
        trusted = {proxy == UNIX for proxy in self.trusted_proxies}
        return bool(trusted) and _kinds(address, passed) <= trusted

    def to_engine_config(self) -> EngineConfig:
        """
        Raises:
            StartupError: settings that say nothing together.
        """
        if self.no_prefix_cache and self.kv_offload_bytes:
            cause = "--kv-offload-memory holds what the prefix cache has found, and --no-prefix-cache turns that off"
            raise StartupError(cause, "leave one of them out", ExitCode.CONFIGURATION)
        if self.kv_offload_dir is not None and not self.kv_offload_bytes:
            cause = "--kv-offload-dir keeps what lies in --kv-offload-memory, and there is none"
            raise StartupError(cause, "--kv-offload-memory 1GiB, or as much as is to be kept", ExitCode.CONFIGURATION)
        if self.tensor_parallel > 1:
            self._check_parallel()
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            kv_memory_bytes=self.kv_memory_bytes,
            kv_offload_bytes=self.kv_offload_bytes,
            kv_offload_dir=None if self.kv_offload_dir is None else str(self.kv_offload_dir),
            kv_offload_dir_bytes=self.kv_offload_dir_bytes,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            threads=self.threads,
            quantize=self.quantize,
            quantize_cache_bytes=self.quantize_cache_bytes,
            has_prefix_cache=not self.no_prefix_cache,
            inter_token_target=self.inter_token_target or None,
            overlap=_mode("overlap", self.overlap, "no-overlap", "off" if self.no_overlap else None),
            graphs=_mode("graphs", self.graphs, "lazy-graphs", "lazy" if self.lazy_graphs else None),
            tensor_parallel=self.tensor_parallel,
        )

    def _check_parallel(self) -> None:
        """
        Raises:
            StartupError: a setting that several ranks do not have.
        """
        asked = f"--tensor-parallel {self.tensor_parallel}"
        if self.overlap == "on":
            cause = f"--overlap on and {asked}: each rank gets a step's tokens with the next plan, not before"
            raise StartupError(cause, "leave --overlap out", ExitCode.CONFIGURATION)
        if self.graphs in ("on", "lazy") or self.lazy_graphs:
            cause = f"--graphs {self.graphs if self.graphs != 'auto' else 'lazy'} and {asked}: ranks send steps without"
            raise StartupError(cause, "leave --graphs and --lazy-graphs out", ExitCode.CONFIGURATION)
        if self.kv_offload_bytes:
            cause = f"--kv-offload-memory and {asked}: the ranks keep no keys and values on the host"
            raise StartupError(cause, "leave one of them out", ExitCode.CONFIGURATION)


def _mode(name: str, mode: str, switch: str, switched: str | None) -> str:
    """What a setting and a switch that stands for one of its values say together; "auto" is no word against it.

    Raises:
        StartupError: they contradict each other.
    """
    if switched is None or mode == switched:
        return mode
    if mode != "auto":
        raise StartupError(f"--{name} {mode} and --{switch} say two things", "leave one out", ExitCode.CONFIGURATION)
    return switched


def _kinds(address: AnyAddress, passed: Sequence[PassedSocket]) -> set[bool]:
    """Whether it is a Unix socket; sockets that are passed under one name may be of both kinds, or not be there yet."""
    if isinstance(address, PassedAddress):
        return {one.sock.family == socket.AF_UNIX for one in passed if one.name == address.name}
    return {isinstance(address, UnixAddress)}


def _sample_proxy(are_unix: set[bool]) -> str:
    network = "127.0.0.1, or the network that the proxy is in"
    if are_unix == {True}:
        return UNIX
    return network if are_unix == {False} else f"{UNIX} for a Unix socket; else {network}"


OPTIONS: tuple[Option, ...] = tuple(row for table in ServerConfig.__bases__ for row in rows_of(table))
"""In the order of --help."""
