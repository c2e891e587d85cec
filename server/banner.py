"""The banner: up to eleven lines that the operator reads when the server is ready. Any thread."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server import __version__
from server.config import ServerConfig
from server.gate.tenants import LOCAL_NAME
from server.listening.sockets import Bind, ListeningSocket, TcpAddress, UnixAddress
from server.values import format_count, format_size

if TYPE_CHECKING:
    from server.loaded_engine import EngineFacts

SURFACES = "/v1/chat/completions /v1/completions /v1/responses /v1/messages /api/chat /metrics"
WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
SAMPLE_QUESTION = "What is a KV cache?"
# By the first of a model's tasks
SAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": SAMPLE_QUESTION}]}),
    "embed": ("/v1/embeddings", {"input": SAMPLE_QUESTION}),
    "score": ("/v1/rerank", {"query": SAMPLE_QUESTION, "documents": ["It keeps keys and values.", "It is a song."]}),
}


@dataclass(frozen=True, slots=True)
class BannerFacts:
    """
    Args:
        engine: None: every model is answered for by upstreams.
        relayed: names of models that upstreams answer for, each with how many there are; 0: on demand, here.
        num_api_keys: that are valid now.
        is_shut: every request is refused, since a credential is required and none is valid yet.
        needs_certificate: see Server.
    """

    engine: "EngineFacts | None"
    config: ServerConfig
    endpoints: tuple["Endpoint", ...]
    relayed: tuple[tuple[str, int], ...] = ()
    num_api_keys: int = 0
    is_shut: bool = False
    needs_certificate: bool = False

    @property
    def model_name(self) -> str:
        """For an example."""
        return self.relayed[0][0] if self.engine is None else self.engine.model_name

    @property
    def jwt_issuer(self) -> str | None:
        """The issuer of accepted JWTs."""
        return self.config.jwt_issuer if self.config.jwks is not None else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one socket listens.

    Args:
        address: with the port as bound, never 0.
        takes_proxy: it expects the PROXY protocol.
    """

    address: TcpAddress | UnixAddress
    has_tls: bool = False
    takes_proxy: bool = False

    def __str__(self) -> str:
        if isinstance(self.address, UnixAddress):
            notes = ["TLS"] * self.has_tls
            text = str(self.address)
        else:
            notes = []
            text = base_url(self.address.host, self.address.port, self.has_tls)
        notes += ["PROXY"] * self.takes_proxy
        return f"{text} ({', '.join(notes)})" if notes else text


def endpoints_of(sockets: Sequence[ListeningSocket], has_certificate: bool) -> tuple[Endpoint, ...]:
    """Without duplicates: a host name may have several addresses."""
    endpoints = (
        Endpoint(one.address, has_certificate and not one.bind.is_plain, one.bind.takes_proxy) for one in sockets
    )
    return tuple(dict.fromkeys(endpoints))


DRAFTS = "text that an answer repeats, of itself, its prompt, its prediction or recent answers"


def banner_lines(facts: BannerFacts) -> list[str]:
    """The last line is a command for a shell."""
    relayed = [f"{name}: {num} upstream{'s' if num > 1 else ''}" if num else name for name, num in facts.relayed]
    return [
        f"steploop {__version__}",
        *([] if facts.engine is None else _engine_lines(facts.engine, facts.config)),
        *([f"  relayed  {', '.join(relayed)}"] if relayed else []),
        f"  auth     {_auth(facts)}",
        f"  URL      {', '.join(map(str, facts.endpoints))}  {SURFACES}",
        *_page_lines(facts.endpoints),
        f"  try      {_key_command(facts.config) if facts.is_shut else sample_curl(facts)}",
    ]


def _page_lines(endpoints: Sequence[Endpoint]) -> list[str]:
    """Where a browser on this machine finds the dashboard."""
    reached = [one for one in endpoints if isinstance(one.address, TcpAddress) and not one.takes_proxy]
    return [f"  page     {one}/dashboard" for one in reached[:1]]


def drafts_of(config: ServerConfig, has_mtp: bool, can_verify: bool) -> str:
    """What guesses the next tokens, or why nothing does."""
    if config.speculation == "off":
        return "none: --speculation off"
    if not can_verify:
        return "none: they are verified on a CPU, by one process"
    if config.draft is not None:
        return f"{DRAFTS}; else the model {config.draft}"
    return f"{DRAFTS}; else the model's own head (MTP)" if has_mtp else DRAFTS


def _engine_lines(engine: "EngineFacts", config: ServerConfig) -> list[str]:
    limits = engine.limits
    model = f"{engine.model_name}, {format_count(engine.num_parameters)} parameters, {engine.dtype}"
    if engine.tasks != ("generate",):
        model += f": {', '.join(engine.tasks)}"
    if engine.is_demonstration:
        model += " (demonstration model: a memorised LLM glossary)"
    num_tokens, num_host_tokens = limits.num_blocks * limits.block_size, limits.num_host_blocks * limits.block_size
    num_full = num_tokens / limits.max_model_len
    host = f", {num_host_tokens:,} more in host memory" if num_host_tokens else ""
    if limits.num_window_blocks is not None:
        host += f", {limits.num_window_blocks * limits.block_size:,} in layers with windows"
    kv = (
        f"{num_tokens:,} tokens = {num_full:.1f} x {limits.max_model_len:,} ({format_size(engine.kv_size_bytes)}){host}"
    )
    drafts = drafts_of(config, engine.has_mtp, limits.max_drafts > 0)
    return [
        f"  model    {model}",
        f"  device   {engine.device}: {engine.device_reason}",
        *([f"  KV       {kv}"] if engine.kv_size_bytes else []),
        f"  context  {limits.max_model_len:,} tokens: {engine.context_origin}",
        *([f"  drafts   {drafts}"] if "generate" in engine.tasks else []),
    ]


def base_url(host: str, port: int, has_tls: bool = False) -> str:
    """The URL for clients on this machine: wildcard addresses become loopback addresses."""
    host = WILDCARD_HOSTS.get(host, host)
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def configured_url(config: ServerConfig) -> str | None:
    """The URL, for clients on this machine, of a server with these settings; None: unknown."""
    for bind in config.all_binds():
        match bind:
            case Bind(address=TcpAddress(host, port), takes_proxy=False) if port:
                return base_url(host, port, config.tls_cert is not None and not bind.is_plain)
    return None


def sample_curl(facts: BannerFacts) -> str:
    """A command that asks the server. It never shows a key: the environment variable or a placeholder stands for it."""
    tasks = ("generate",) if facts.engine is None else facts.engine.tasks
    path, question = SAMPLES[tasks[0]]
    question = {"model": facts.model_name} | question
    endpoint = min(
        facts.endpoints, key=lambda endpoint: (endpoint.takes_proxy, isinstance(endpoint.address, UnixAddress))
    )
    own_key = "YOUR_KEY" if facts.num_api_keys else "YOUR_JWT"
    is_in_environment = dict(facts.config.origins).get("api_keys") == "STEPLOOP_API_KEY"
    shown_key = "${STEPLOOP_API_KEY%%,*}" if is_in_environment else own_key
    shown = (
        " --cert YOUR_CERTIFICATE --key YOUR_CERTIFICATES_KEY" if facts.needs_certificate and endpoint.has_tls else ""
    )
    key = f' -H "authorization: Bearer {shown_key}"' if facts.num_api_keys or facts.jwt_issuer else ""
    insecure = " --insecure" if endpoint.has_tls else ""  # the certificate is for the public name
    body = shlex.quote(json.dumps(question))
    return f"curl{insecure}{shown} {_curl_target(endpoint, path)} -H 'content-type: application/json'{key} -d {body}"


def _key_command(config: ServerConfig) -> str:
    path = "YOUR_KEYS_FILE" if config.keys_file is None else shlex.quote(str(config.keys_file))
    return f"steploop keys create --keys-file {path} --tenant {'YOUR_TENANT' if config.tenants else LOCAL_NAME}"


def _curl_target(endpoint: Endpoint, sample_path: str) -> str:
    if isinstance(endpoint.address, UnixAddress):
        url = base_url("localhost", 443 if endpoint.has_tls else 80, endpoint.has_tls)
        name = endpoint.address.abstract_name
        path = f"--unix-socket {shlex.quote(endpoint.address.path)}"
        option = path if name is None else f"--abstract-unix-socket {shlex.quote(name)}"
        return f"{option} {url}{sample_path}"
    return shlex.quote(base_url(endpoint.address.host, endpoint.address.port, endpoint.has_tls) + sample_path)


def _auth(facts: BannerFacts) -> str:
    if facts.is_shut:
        return "no valid API key exists yet: every request is refused until one is created, and the server reloaded"
    required = []
    if num_tenants := len(facts.config.tenants):
        required.append(f"{num_tenants} tenant{'s' if num_tenants > 1 else ''}")
    if facts.num_api_keys:
        required.append(f"{facts.num_api_keys} API key{'s' if facts.num_api_keys > 1 else ''}")
    if facts.jwt_issuer is not None:
        required.append(f"JWTs of {facts.jwt_issuer}")
    if facts.needs_certificate:
        required.append("client certificates")
    if required:
        return ", ".join(required[:-1]) + " and " * (len(required) > 1) + required[-1]
    if not is_public(facts.endpoints):
        return "none (only this machine can reach it)"
    return "none: anyone who reaches this port can use it; set STEPLOOP_API_KEY"


def public_addresses(endpoints: Sequence[Endpoint]) -> list[str]:
    """Addresses that other machines can reach."""
    return [
        str(endpoint.address)
        for endpoint in endpoints
        if isinstance(endpoint.address, TcpAddress) and not is_loopback(endpoint.address.host)
    ]


def is_public(endpoints: Sequence[Endpoint]) -> bool:
    return bool(public_addresses(endpoints))


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
