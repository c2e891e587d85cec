"""What the operator reads when the server is ready: eight lines at most, from facts alone. Pure. Any thread."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.config import ServerConfig
from server.gate.tenants import LOCAL_NAME
from server.listening.sockets import Bind, ListeningSocket, TcpAddress, UnixAddress
from server.values import format_count, format_size

SURFACES = "/v1/chat/completions /v1/completions /v1/responses /metrics"
WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
SAMPLE_PATH = "/v1/chat/completions"
SAMPLE_QUESTION = "What is a KV cache?"


@dataclass(frozen=True, slots=True)
class BannerFacts:
    """What there is to say.

    Args:
        device_reason: why this device and number format, e.g. "no CUDA device found".
        context_origin: where max_model_len comes from: "the model's own", "STEPLOOP_MAX_MODEL_LEN".
        num_kv_tokens: that the KV cache holds, over all sequences.
        num_host_tokens: that host memory holds of what gives way there; 0: it is forgotten.
        num_api_keys: that are valid now.
        num_tenants: configured; 0 without keys: anyone may ask.
        keys_are_in_environment: they were read from STEPLOOP_API_KEY.
        places: where it listens.
        needs_certificate: only clients with a certificate are served where others could reach it.
        jwt_issuer: whose JWTs are taken; None: there are none.
        is_shut: every request is refused: callers must say who they are, and nothing that they could show is good.
        keys_file: None: there is none.
    """

    version: str
    model_name: str
    num_parameters: int
    dtype: str
    is_demonstration: bool
    device: str
    device_reason: str
    num_kv_tokens: int
    kv_size_bytes: int
    max_model_len: int
    context_origin: str
    num_api_keys: int
    keys_are_in_environment: bool
    places: tuple["Place", ...]
    num_host_tokens: int = 0
    needs_certificate: bool = False
    num_tenants: int = 0
    jwt_issuer: str | None = None
    is_shut: bool = False
    keys_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one socket listens.

    Args:
        address: with the port as bound, never 0.
        has_tls: it is https.
        takes_proxy: only proxies can talk to it.
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


def places_of(sockets: Sequence[ListeningSocket], has_certificate: bool) -> tuple[Place, ...]:
    """Each place once: a name may have several addresses."""
    places = (Place(one.address, has_certificate and not one.bind.is_plain, one.bind.takes_proxy) for one in sockets)
    return tuple(dict.fromkeys(places))


def banner_lines(facts: BannerFacts) -> list[str]:
    """The banner, a label and its facts a line; the last line can be pasted into a shell."""
    model = f"{facts.model_name}, {format_count(facts.num_parameters)} parameters, {facts.dtype}"
    if facts.is_demonstration:
        model += " (demonstration model: a memorised LLM glossary)"
    num_full = facts.num_kv_tokens / facts.max_model_len
    host = f", {facts.num_host_tokens:,} more in host memory" if facts.num_host_tokens else ""
    return [
        f"steploop {facts.version}",
        f"  model    {model}",
        f"  device   {facts.device}: {facts.device_reason}",
        f"  KV       {facts.num_kv_tokens:,} tokens = {num_full:.1f} x {facts.max_model_len:,}"
        f" ({format_size(facts.kv_size_bytes)}){host}",
        f"  context  {facts.max_model_len:,} tokens: {facts.context_origin}",
        f"  auth     {_auth(facts)}",
        f"  URL      {', '.join(map(str, facts.places))}  {SURFACES}",
        f"  try      {_key_command(facts) if facts.is_shut else sample_curl(facts)}",
    ]


def base_url(host: str, port: int, has_tls: bool = False) -> str:
    """Where this machine reaches a server that listens there: wildcard addresses become loopback ones."""
    host = WILDCARD_HOSTS.get(host, host)
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def configured_url(config: ServerConfig) -> str | None:
    """Where this machine would reach a server that has these settings; None: that cannot be told."""
    for bind in config.all_binds():
        match bind:
            case Bind(address=TcpAddress(host, port), takes_proxy=False) if port:
                return base_url(host, port, config.tls_cert is not None and not bind.is_plain)
    return None


def sample_curl(facts: BannerFacts) -> str:
    """A command that gets an answer when pasted; a key is never shown: it is taken from where it came, or left open."""
    question = {"model": facts.model_name, "messages": [{"role": "user", "content": SAMPLE_QUESTION}]}
    place = min(facts.places, key=lambda place: (place.takes_proxy, isinstance(place.address, UnixAddress)))
    own_key = "YOUR_KEY" if facts.num_api_keys else "YOUR_JWT"
    shown_key = "${STEPLOOP_API_KEY%%,*}" if facts.keys_are_in_environment else own_key
    shown = " --cert YOUR_CERTIFICATE --key YOUR_CERTIFICATES_KEY" if facts.needs_certificate and place.has_tls else ""
    key = f' -H "authorization: Bearer {shown_key}"' if facts.num_api_keys or facts.jwt_issuer else ""
    insecure = " --insecure" if place.has_tls else ""  # the certificate is for another name than this machine's own
    body = shlex.quote(json.dumps(question))
    return f"curl{insecure}{shown} {_curl_target(place)} -H 'content-type: application/json'{key} -d {body}"


def _key_command(facts: BannerFacts) -> str:
    path = "YOUR_KEYS_FILE" if facts.keys_file is None else shlex.quote(str(facts.keys_file))
    return f"steploop keys create --keys-file {path} --tenant {'YOUR_TENANT' if facts.num_tenants else LOCAL_NAME}"


def _curl_target(place: Place) -> str:
    if isinstance(place.address, UnixAddress):
        url = base_url("localhost", 443 if place.has_tls else 80, place.has_tls)
        name = place.address.abstract_name
        path = f"--unix-socket {shlex.quote(place.address.path)}"
        option = path if name is None else f"--abstract-unix-socket {shlex.quote(name)}"
        return f"{option} {url}{SAMPLE_PATH}"
    return shlex.quote(base_url(place.address.host, place.address.port, place.has_tls) + SAMPLE_PATH)


def _auth(facts: BannerFacts) -> str:
    if facts.is_shut:
        return "no valid API key exists yet: every request is refused until one is created, and the server reloaded"
    required = []
    if facts.num_tenants:
        required.append(f"{facts.num_tenants} tenant{'s' if facts.num_tenants > 1 else ''}")
    if facts.num_api_keys:
        required.append(f"{facts.num_api_keys} API key{'s' if facts.num_api_keys > 1 else ''}")
    if facts.jwt_issuer is not None:
        required.append(f"JWTs of {facts.jwt_issuer}")
    if facts.needs_certificate:
        required.append("client certificates")
    if required:
        return ", ".join(required[:-1]) + " and " * (len(required) > 1) + required[-1]
    if not is_public(facts.places):
        return "none (only this machine can reach it)"
    return "none: anyone who reaches this port can use it; set STEPLOOP_API_KEY"


def public_addresses(places: Sequence[Place]) -> list[str]:
    """Those that other machines can reach."""
    return [
        str(place.address)
        for place in places
        if isinstance(place.address, TcpAddress) and not is_loopback(place.address.host)
    ]


def is_public(places: Sequence[Place]) -> bool:
    return bool(public_addresses(places))


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
