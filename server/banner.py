"""What the operator reads when the server is ready: eight lines at most, from facts alone. Pure. Any thread."""

import json
import shlex
from dataclasses import dataclass

from server.values import format_count, format_size

SURFACES = "/v1/chat/completions /v1/completions /v1/responses /metrics"
WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
SAMPLE_QUESTION = "What is a KV cache?"


@dataclass(frozen=True, slots=True)
class BannerFacts:
    """What there is to say.

    Args:
        device_reason: why this device and number format, e.g. "no CUDA device found".
        context_origin: where max_model_len comes from: "the model's own", "STEPLOOP_MAX_MODEL_LEN".
        num_kv_tokens: that the KV cache holds, over all sequences.
        num_api_keys: 0: anyone may ask.
        keys_are_in_environment: they were read from STEPLOOP_API_KEY.
        port: as bound, never 0.
        has_tls: it is https.
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
    host: str
    port: int
    has_tls: bool = False


def banner_lines(facts: BannerFacts) -> list[str]:
    """The banner, a label and its facts a line; the last line can be pasted into a shell."""
    model = f"{facts.model_name}, {format_count(facts.num_parameters)} parameters, {facts.dtype}"
    if facts.is_demonstration:
        model += " (demonstration model: a memorised LLM glossary)"
    num_full = facts.num_kv_tokens / facts.max_model_len
    return [
        f"steploop {facts.version}",
        f"  model    {model}",
        f"  device   {facts.device}: {facts.device_reason}",
        f"  KV       {facts.num_kv_tokens:,} tokens = {num_full:.1f} x {facts.max_model_len:,}"
        f" ({format_size(facts.kv_size_bytes)})",
        f"  context  {facts.max_model_len:,} tokens: {facts.context_origin}",
        f"  auth     {_auth(facts)}",
        f"  URL      {base_url(facts.host, facts.port, facts.has_tls)}  {SURFACES}",
        f"  try      {sample_curl(facts)}",
    ]


def base_url(host: str, port: int, has_tls: bool = False) -> str:
    """Where this machine reaches a server that listens there: wildcard addresses become loopback ones."""
    host = WILDCARD_HOSTS.get(host, host)
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def sample_curl(facts: BannerFacts) -> str:
    """A command that gets an answer when pasted; a key is never shown: it is taken from where it came, or left open."""
    question = {"model": facts.model_name, "messages": [{"role": "user", "content": SAMPLE_QUESTION}]}
    url = shlex.quote(base_url(facts.host, facts.port, facts.has_tls) + "/v1/chat/completions")
    shown_key = "${STEPLOOP_API_KEY%%,*}" if facts.keys_are_in_environment else "YOUR_KEY"
    key = f' -H "authorization: Bearer {shown_key}"' if facts.num_api_keys else ""
    insecure = " --insecure" if facts.has_tls else ""  # the certificate is for another name than this machine's own
    return f"curl{insecure} {url} -H 'content-type: application/json'{key} -d {shlex.quote(json.dumps(question))}"


def _auth(facts: BannerFacts) -> str:
    if facts.num_api_keys:
        return f"{facts.num_api_keys} API key{'s' if facts.num_api_keys > 1 else ''}"
    if is_loopback(facts.host):
        return "none (only this machine can reach it)"
    return "none: anyone who reaches this port can use it; set STEPLOOP_API_KEY"


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
