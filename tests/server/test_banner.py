"""The banner: eight lines, true figures, a command that works when pasted."""

import dataclasses
import json
import shlex
from ipaddress import IPv6Network
from pathlib import Path
from typing import Any

import pytest

from core.plan import RunnerLimits
from server import __version__
from server.banner import BannerFacts, Endpoint, banner_lines, base_url, configured_url, sample_curl
from server.config import ServerConfig
from server.gate.tenants import Tenant
from server.listening.sockets import Bind, TcpAddress, UnixAddress
from server.loaded_engine import EngineFacts

ENGINE = EngineFacts(
    model_name="steploop-demo",
    is_demonstration=True,
    num_parameters=5_100_000,
    dtype="bfloat16",
    device="cpu, 2 threads",
    device_reason="no CUDA device found",
    kv_size_bytes=64 * 2**20,
    context_origin="the model's own",
    limits=RunnerLimits(33_792 // 16, 16, max_sequences=64, max_batch_tokens=512, max_model_len=2048, vocab_size=512),
)
FACTS = BannerFacts(ENGINE, ServerConfig(), (Endpoint(TcpAddress("127.0.0.1", 8000)),))
PUBLIC = dataclasses.replace(FACTS, endpoints=(*FACTS.endpoints, Endpoint(TcpAddress("0.0.0.0", 8000))))


def with_engine(**changes: Any) -> BannerFacts:
    return dataclasses.replace(FACTS, engine=dataclasses.replace(ENGINE, **changes))


def line(facts: BannerFacts, label: str) -> str:
    return next(text for text in banner_lines(facts) if text.split()[0] == label)


def test_banner_has_eight_lines_and_each_fact() -> None:
    assert banner_lines(FACTS)[:7] == [
        f"steploop {__version__}",
        "  model    steploop-demo, 5.1M parameters, bfloat16 (demonstration model: a memorised LLM glossary)",
        "  device   cpu, 2 threads: no CUDA device found",
        "  KV       33,792 tokens = 16.5 x 2,048 (64 MiB)",
        "  context  2,048 tokens: the model's own",
        "  auth     none (only this machine can reach it)",
        "  URL      http://127.0.0.1:8000  /v1/chat/completions /v1/completions /v1/responses /metrics",
    ]
    assert len(banner_lines(FACTS)) == 8


def test_banner_tells_of_host_memory_where_there_is_some() -> None:
    facts = with_engine(limits=dataclasses.replace(ENGINE.limits, num_host_blocks=512))
    assert line(facts, "KV").endswith("(64 MiB), 8,192 more in host memory")


def test_only_the_embedded_model_is_called_a_demonstration() -> None:
    assert "demonstration" not in "".join(banner_lines(with_engine(is_demonstration=False)))


def test_an_open_port_without_keys_is_said_plainly() -> None:
    assert "anyone who reaches this port" in line(PUBLIC, "auth")
    assert "2 API keys" in line(dataclasses.replace(PUBLIC, num_api_keys=2), "auth")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:81"),
        ("0.0.0.0", "http://127.0.0.1:81"),
        ("::", "http://[::1]:81"),
        ("fe80::1", "http://[fe80::1]:81"),
        ("box.example", "http://box.example:81"),
    ],
)
def test_url_is_one_that_can_be_reached(host: str, url: str) -> None:
    assert base_url(host, 81) == url


@pytest.mark.parametrize("name", ["steploop-demo", 'it\'s "quoted" $HOME `x`', "名前"])
def test_the_command_survives_the_shell_with_model_and_port(name: str) -> None:
    words = shlex.split(
        sample_curl(dataclasses.replace(with_engine(model_name=name), endpoints=(Endpoint(TcpAddress(port=18_000)),)))
    )
    assert words[:2] == ["curl", "http://127.0.0.1:18000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == name
    assert body["messages"] == [{"role": "user", "content": "What is a KV cache?"}]
    assert words[words.index("-H") + 1] == "content-type: application/json"


def test_with_keys_the_command_takes_the_first_from_the_environment() -> None:
    with_key = dataclasses.replace(FACTS, num_api_keys=1)
    assert '"authorization: Bearer YOUR_KEY"' in sample_curl(with_key)
    in_environment = dataclasses.replace(with_key, config=ServerConfig(origins=(("api_keys", "STEPLOOP_API_KEY"),)))
    assert '"authorization: Bearer ${STEPLOOP_API_KEY%%,*}"' in sample_curl(in_environment)


def test_a_server_that_lets_nobody_in_says_so_and_how_to_create_a_key() -> None:
    shut = dataclasses.replace(FACTS, is_shut=True, config=ServerConfig(keys_file=Path("/etc/my keys.json")))
    assert "no valid API key exists yet" in line(shut, "auth")
    command = banner_lines(shut)[-1]
    assert command == "  try      steploop keys create --keys-file '/etc/my keys.json' --tenant local"
    with_tenants = banner_lines(
        dataclasses.replace(shut, config=ServerConfig(tenants=(Tenant(name="a"), Tenant(name="b"))))
    )
    assert with_tenants[-1].endswith("--keys-file YOUR_KEYS_FILE --tenant YOUR_TENANT")


def test_jwts_are_an_authentication() -> None:
    with_jwts = dataclasses.replace(
        PUBLIC, config=ServerConfig(jwt_issuer="https://issuer.example", jwks=Path("keys.json"))
    )
    assert line(with_jwts, "auth") == "  auth     JWTs of https://issuer.example"
    assert '"authorization: Bearer YOUR_JWT"' in sample_curl(with_jwts)
    assert '"authorization: Bearer YOUR_KEY"' in sample_curl(dataclasses.replace(with_jwts, num_api_keys=1))


def test_tls_is_seen_in_the_url_and_the_command() -> None:
    facts = dataclasses.replace(FACTS, endpoints=(Endpoint(TcpAddress(), has_tls=True),))
    assert line(facts, "URL").split()[1] == "https://127.0.0.1:8000"
    assert sample_curl(facts).startswith("curl --insecure https://127.0.0.1:8000/v1/chat/completions ")


def test_a_socket_without_a_file_is_asked_by_its_name() -> None:
    facts = dataclasses.replace(FACTS, endpoints=(Endpoint(UnixAddress("\0front")),))
    assert sample_curl(facts).startswith("curl --abstract-unix-socket front http://localhost:80/v1/chat/completions ")


def test_every_place_is_shown_and_the_command_takes_one_that_answers_a_client() -> None:
    socket_place = Endpoint(UnixAddress("/run/a b.sock"))
    behind = Endpoint(TcpAddress("::1", 81), has_tls=True, takes_proxy=True)
    facts = dataclasses.replace(FACTS, endpoints=(behind, socket_place))
    assert "URL      https://[::1]:81 (PROXY), unix:/run/a b.sock  /v1/" in line(facts, "URL")
    assert sample_curl(facts).startswith("curl --unix-socket '/run/a b.sock' http://localhost:80/v1/chat/completions ")
    both = dataclasses.replace(facts, endpoints=(*facts.endpoints, *FACTS.endpoints))
    assert sample_curl(both).startswith("curl http://127.0.0.1:8000/v1/chat/completions ")
    assert "only this machine" in line(both, "auth")


def test_the_configured_url_is_of_a_place_where_clients_can_ask() -> None:
    assert configured_url(ServerConfig()) == "http://127.0.0.1:8000"
    assert configured_url(ServerConfig(port=0)) is None
    proxied, plain = Bind(TcpAddress("::1", 1), takes_proxy=True), Bind(TcpAddress("::1", 2))
    trusted = (IPv6Network("::1"),)
    assert configured_url(ServerConfig(binds=(Bind(UnixAddress("/x")), proxied), trusted_proxies=trusted)) is None
    assert configured_url(ServerConfig(binds=(proxied, plain), trusted_proxies=trusted)) == "http://[::1]:2"


def test_client_certificates_are_an_authentication() -> None:
    public = Endpoint(TcpAddress("0.0.0.0", 8443), has_tls=True)
    facts = dataclasses.replace(FACTS, endpoints=(public,), needs_certificate=True)
    assert line(facts, "auth") == "  auth     client certificates"
    assert line(dataclasses.replace(facts, num_api_keys=1), "auth") == "  auth     1 API key and client certificates"
    assert sample_curl(facts).startswith("curl --insecure --cert YOUR_CERTIFICATE --key YOUR_")
