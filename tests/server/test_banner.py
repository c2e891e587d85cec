"""The banner: ten lines, true figures, a command that works when pasted."""

import dataclasses
import json
import shlex
from ipaddress import IPv6Network
from pathlib import Path
from typing import Any

import pytest

from core.plan import RunnerLimits
from server import __version__
from server.banner import DRAFTS, BannerFacts, Endpoint, banner_lines, base_url, configured_url, sample_curl
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
LOCAL, PUBLIC = Endpoint(TcpAddress("127.0.0.1", 8000)), Endpoint(TcpAddress("0.0.0.0", 8000))
PUBLIC_TLS = Endpoint(TcpAddress("0.0.0.0", 8443), has_tls=True)
BEHIND = Endpoint(TcpAddress("::1", 81), has_tls=True, takes_proxy=True)
UNIX = Endpoint(UnixAddress("/run/a b.sock"))
JWTS = ServerConfig(jwt_issuer="https://issuer.example", jwks=Path("keys.json"))
KEY_IN_ENVIRONMENT = ServerConfig(origins=(("api_keys", "STEPLOOP_API_KEY"),))


def facts(*endpoints: Endpoint, engine: EngineFacts = ENGINE, **more: Any) -> BannerFacts:
    return BannerFacts(engine, endpoints=endpoints or (LOCAL,), **{"config": ServerConfig(), **more})


def line(told: BannerFacts, label: str) -> str:
    return next(text for text in banner_lines(told) if text.split()[0] == label)


def test_banner_has_ten_lines_and_each_fact() -> None:
    assert banner_lines(facts())[:9] == [
        f"steploop {__version__}",
        "  model    steploop-demo, 5.1M parameters, bfloat16 (demonstration model: a memorised LLM glossary)",
        "  device   cpu, 2 threads: no CUDA device found",
        "  KV       33,792 tokens = 16.5 x 2,048 (64 MiB)",
        "  context  2,048 tokens: the model's own",
        "  drafts   none: they are verified on a CPU, by one process",
        "  auth     none (only this machine can reach it)",
        "  URL      http://127.0.0.1:8000  /v1/chat/completions /v1/completions /v1/responses"
        " /v1/messages /api/chat /metrics",
        "  page     http://127.0.0.1:8000/dashboard",
    ]
    assert len(banner_lines(facts())) == 10
    limits = dataclasses.replace(ENGINE.limits, num_host_blocks=512)
    own = facts(engine=dataclasses.replace(ENGINE, is_demonstration=False, limits=limits))
    assert "demonstration" not in "".join(banner_lines(own))
    assert line(own, "KV").endswith("(64 MiB), 8,192 more in host memory")


@pytest.mark.parametrize(
    ("config", "has_mtp", "drafts"),
    [
        (ServerConfig(), False, DRAFTS),
        (ServerConfig(), True, f"{DRAFTS}; else the model's own head (MTP)"),
        (ServerConfig(draft=Path("small")), False, f"{DRAFTS}; else the model small"),
        (ServerConfig(speculation="off"), False, "none: --speculation off"),
    ],
)
def test_the_banner_says_what_drafts(config: ServerConfig, has_mtp: bool, drafts: str) -> None:
    limits = dataclasses.replace(ENGINE.limits, max_drafts=32)
    engine = dataclasses.replace(ENGINE, limits=limits, has_mtp=has_mtp)
    assert line(facts(engine=engine, config=config), "drafts") == f"  drafts   {drafts}"
    assert "drafts" not in "".join(banner_lines(facts(engine=dataclasses.replace(engine, tasks=("embed",)))))


@pytest.mark.parametrize(
    ("told", "auth"),
    [
        (facts(BEHIND, UNIX, LOCAL), "none (only this machine can reach it)"),
        (facts(LOCAL, PUBLIC), "none: anyone who reaches this port can use it; set STEPLOOP_API_KEY"),
        (facts(PUBLIC, num_api_keys=2), "2 API keys"),
        (facts(PUBLIC, config=JWTS), "JWTs of https://issuer.example"),
        (facts(PUBLIC_TLS, needs_certificate=True), "client certificates"),
        (facts(PUBLIC_TLS, needs_certificate=True, num_api_keys=1), "1 API key and client certificates"),
    ],
)
def test_the_banner_says_who_may_ask(told: BannerFacts, auth: str) -> None:
    assert line(told, "auth") == f"  auth     {auth}"


@pytest.mark.parametrize(
    ("told", "start", "holds"),
    [
        (facts(num_api_keys=1), "curl http://127.0.0.1:8000/v1/", '"authorization: Bearer YOUR_KEY"'),
        (facts(num_api_keys=1, config=KEY_IN_ENVIRONMENT), "curl", '"authorization: Bearer ${STEPLOOP_API_KEY%%,*}"'),
        (facts(config=JWTS), "curl", '"authorization: Bearer YOUR_JWT"'),
        (facts(config=JWTS, num_api_keys=1), "curl", '"authorization: Bearer YOUR_KEY"'),
        (facts(Endpoint(TcpAddress(), has_tls=True)), "curl --insecure https://127.0.0.1:8000/v1/chat/completions", ""),
        (facts(PUBLIC_TLS, needs_certificate=True), "curl --insecure --cert YOUR_CERTIFICATE --key YOUR_", ""),
        (facts(Endpoint(UnixAddress("\0front"))), "curl --abstract-unix-socket front http://localhost:80/v1/", ""),
        (facts(BEHIND, UNIX), "curl --unix-socket '/run/a b.sock' http://localhost:80/v1/chat/completions ", ""),
        (facts(BEHIND, UNIX, LOCAL), "curl http://127.0.0.1:8000/v1/chat/completions ", ""),
    ],
)
def test_the_command_asks_where_a_client_can_and_shows_no_key(told: BannerFacts, start: str, holds: str) -> None:
    assert sample_curl(told).startswith(start)
    assert holds in sample_curl(told)


@pytest.mark.parametrize("name", ["steploop-demo", 'it\'s "quoted" $HOME `x`', "名前"])
def test_the_command_survives_the_shell_with_model_and_port(name: str) -> None:
    told = facts(Endpoint(TcpAddress(port=18_000)), engine=dataclasses.replace(ENGINE, model_name=name))
    words = shlex.split(sample_curl(told))
    assert words[:2] == ["curl", "http://127.0.0.1:18000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == name
    assert body["messages"] == [{"role": "user", "content": "What is a KV cache?"}]
    assert words[words.index("-H") + 1] == "content-type: application/json"


def test_a_server_that_lets_nobody_in_says_so_and_how_to_create_a_key() -> None:
    shut = facts(is_shut=True, config=ServerConfig(keys_file=Path("/etc/my keys.json")))
    assert "no valid API key exists yet" in line(shut, "auth")
    assert banner_lines(shut)[-1] == "  try      steploop keys create --keys-file '/etc/my keys.json' --tenant local"
    tenants = ServerConfig(tenants=(Tenant(name="a"), Tenant(name="b")))
    with_tenants = banner_lines(facts(is_shut=True, config=tenants))
    assert with_tenants[-1].endswith("--keys-file YOUR_KEYS_FILE --tenant YOUR_TENANT")


def test_urls_are_those_that_this_machine_can_reach() -> None:
    hosts = ("127.0.0.1", "0.0.0.0", "::", "fe80::1", "box.example")
    reached = ("127.0.0.1", "127.0.0.1", "[::1]", "[fe80::1]", "box.example")
    assert [base_url(host, 81) for host in hosts] == [f"http://{host}:81" for host in reached]
    assert "URL      https://[::1]:81 (PROXY), unix:/run/a b.sock  /v1/" in line(facts(BEHIND, UNIX), "URL")
    assert configured_url(ServerConfig()) == "http://127.0.0.1:8000"
    assert configured_url(ServerConfig(port=0)) is None
    proxied, plain = Bind(TcpAddress("::1", 1), takes_proxy=True), Bind(TcpAddress("::1", 2))
    trusted = (IPv6Network("::1"),)
    assert configured_url(ServerConfig(binds=(Bind(UnixAddress("/x")), proxied), trusted_proxies=trusted)) is None
    assert configured_url(ServerConfig(binds=(proxied, plain), trusted_proxies=trusted)) == "http://[::1]:2"
