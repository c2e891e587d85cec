"""The gate on the simulated server: each route's right, tenants that see nothing of each other, and the reload."""

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from core.errors import StartupError
from core.types import Submit
from server.api.models import ServerCard
from server.app import Route
from server.banner import Endpoint, public_addresses
from server.callers import Gate, load_directory
from server.clock import Clock
from server.config import ServerConfig
from server.config_sources import load_config
from server.gate.identity import Scope
from server.listening.sockets import TcpAddress, UnixAddress
from server.process import warn_of_models
from server.routes import ROUTES
from tests.server.simulated_server import (
    MODEL,
    STREAM,
    answers,
    as_caller,
    chat,
    completion,
    keyed_tenant,
    request,
    serving,
)

ACME = keyed_tenant("acme", "a", tenant_class="batch", share=2, models=(MODEL,))
ALONE = keyed_tenant("alone", "l")
OTHER = keyed_tenant("other", "o", models=("large",))
THIRD = keyed_tenant("third", "t")
CLOCK = Clock(lambda: 0.0, lambda: 0.0)


def all_routes() -> list[tuple[str, str, Route]]:
    routes = ROUTES.items()
    return [(re.sub(r"{\w+}", "x", path), *one) for path, methods in routes for one in methods.items()]


def test_each_route_asks_for_its_right_and_all_but_probes_for_one() -> None:
    with serving(tenants=(ACME,)) as server:
        scopes = {(method, path): route.scope for path, method, route in all_routes()}
        public = {path for (_, path), scope in scopes.items() if scope is None}
        files = {path for _, path in scopes if path == "/" or path.startswith("/dashboard")} - {"/dashboard/live"}
        assert public == {"/health", "/health_generate", "/ping", "/ready", "/openapi.json", "/docs"} | files
        assert {path for (_, path), scope in scopes.items() if scope is Scope.METRICS} == {"/metrics"}
        is_admins = {path: scope is Scope.ADMIN for (_, path), scope in scopes.items()}
        ends = ("_lora_adapter", "/live")
        assert is_admins == {path: path.startswith("/admin/") or path.endswith(ends) for path in is_admins}
        for (method, path), scope in scopes.items():
            expected = 200 if scope is None else 401
            asked = request(method, path, None, "Accept: text/html")
            assert server.ask(asked, method).status == expected, path
            if scope in (Scope.ADMIN, Scope.METRICS):
                answer = server.ask(as_caller(request(method, path), "a"), method)
                assert (answer.status, answer.json["error"]["code"]) == (403, "permission_denied")


def test_what_is_refused_is_not_read() -> None:
    with serving(tenants=(ACME,)) as server:
        transport = server.send(request("POST", "/v1/completions", None, "Content-Length: 50000"))
        assert b" 401 " in transport.received.split(b"\r\n", 1)[0]


def test_a_tenants_name_class_and_cache_domain_go_with_its_requests() -> None:
    with serving(tenants=(ACME, THIRD)) as server:
        server.ask(as_caller(completion(), "a"))
        server.ask(as_caller(completion(), "t"))
        acme, third = (message.request for message in server.posted if isinstance(message, Submit))
        assert (acme.share, third.share) == (2, 1)
        assert (acme.tenant, acme.priority) == ("acme", ACME.priority_of(None))
        assert (third.tenant, third.priority) == ("third", THIRD.priority_of(None))
        assert acme.cache_domain != third.cache_domain


def test_a_prompt_is_cached_for_its_own_tenant_alone() -> None:
    with serving(tenants=(ACME, THIRD)) as server:
        cached = []
        for key in ("a", "t", "a"):
            answer = server.ask(as_caller(completion(prompt=[7] * 40), key))
            cached.append(answer.usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[:2] == [0, 0]
        assert cached[2] > 0


def test_what_tenants_of_one_domain_send_is_cached_for_all_of_them_but_for_what_is_salted() -> None:
    public = [structs.replace(tenant, cache_domain="public") for tenant in (ACME, THIRD)]
    with serving(tenants=(*public, ALONE)) as server:
        cached = []
        for key, salt in (("a", None), ("t", None), ("l", None), ("t", "mine"), ("a", "mine"), ("a", "another")):
            answer = server.ask(as_caller(completion(prompt=[7] * 40, cache_salt=salt), key))
            cached.append(answer.usage["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True, False, False, True, False]


def test_a_tenant_sees_and_uses_the_models_that_it_may() -> None:
    with serving(tenants=(ACME, OTHER)) as server:
        (model,) = server.app.served.reader.cards
        server.app.card = ServerCard(
            model=model,
            model_type="llama",
            architectures=("LlamaForCausalLM",),
            version="1",
            max_sequences=1,
            max_batch_tokens=1,
            num_kv_tokens=1,
        )
        listing = request("GET", "/v1/models")
        assert [model["id"] for model in server.ask(as_caller(listing, "a"), "GET").json["data"]] == [MODEL]
        assert server.ask(as_caller(listing, "o"), "GET").json["data"] == []
        asked: list[tuple[bytes, str]] = [
            (chat(), "POST"),
            (completion(), "POST"),
            (request("POST", "/v1/responses/input_tokens", {"model": MODEL, "input": "a"}), "POST"),
            (request("POST", "/tokenize", {"model": MODEL, "prompt": "a"}), "POST"),
            (request("POST", "/tokenize", {"prompt": "a"}), "POST"),
            (request("POST", "/detokenize", {"model": MODEL, "tokens": [7]}), "POST"),
            (request("POST", "/detokenize", {"tokens": [7]}), "POST"),
            (request("GET", "/model_info"), "GET"),
            (request("GET", "/server_info"), "GET"),
            (request("GET", f"/v1/models/{MODEL}"), "GET"),
        ]
        for data, method in asked:
            assert server.ask(as_caller(data, "a"), method).status == 200
            answer = server.ask(as_caller(data, "o"), method)
            assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
            assert "There is no model" in answer.json["error"]["message"]
            assert "may use none of the models" in answer.json["error"]["message"]


def test_nobody_cancels_another_tenants_request() -> None:
    with serving(tenants=(ACME, THIRD)) as server:
        stream = server.send(as_caller(chat(**STREAM, max_tokens=100), "a"))
        server.step()
        delete = request("DELETE", "/v1/requests/chatcmpl-r1")
        for key, status in (("t", 404), ("a", 200)):
            transport = server.send(as_caller(delete, key))
            assert transport.received.startswith(b"HTTP/1.1 %d" % status)
        server.run()
        assert b"request_cancelled" in stream.received


def test_the_access_line_names_tenant_and_key_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serving(keys=("s3cret",), tenants=(ACME,)) as server:
        server.ask(as_caller(chat(), "a"))
        server.ask(as_caller(chat(), "s3cret"))
        server.ask(as_caller(chat(), "wr0ng"))
    lines = [record.getMessage() for record in caplog.records if record.name == "server.access"]
    assert f"tenant=acme key={ACME.key_sha256[0][:12]}" in lines[0]
    assert f"tenant=local key={sha256(b's3cret').hexdigest()[:12]}" in lines[1]
    assert "tenant" not in lines[2]
    assert "error=invalid_api_key" in lines[2]
    assert not {"s3cret", "wr0ng"} & set(caplog.text.replace("=", " ").split())


# The reload.

KEYS = '{"version": 1, "keys": [%s]}'


def key_of(tenant: str, key: str) -> str:
    record = {"prefix": key, "sha256": sha256(key.encode()).hexdigest(), "tenant": tenant}
    return json.dumps(record | {"created": "2030-01-01T00:00:00Z"})


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., ServerConfig]:
    def write(settings: str = 'tenants = [{name = "acme"}]', keys: str = KEYS % key_of("acme", "one")) -> ServerConfig:
        (tmp_path / "steploop.toml").write_text(f'keys_file = "{tmp_path}/keys.json"\n{settings}')
        (tmp_path / "keys.json").write_text(keys)
        return load_config({"config_file": str(tmp_path / "steploop.toml")}, {})

    return write


def known(gate: Gate) -> set[tuple[str, str | None]]:
    return {(key.tenant, key.key_id) for key in gate.directory.keys.values()}


def test_a_reload_takes_tenants_and_keys_as_they_are_now(write: Callable[..., ServerConfig]) -> None:
    gate = Gate(write(), CLOCK)
    assert known(gate) == {("acme", "one")}
    apply = gate.prepare(
        write('tenants = [{name = "acme"}, {name = "b"}]', KEYS % f"{key_of('b', 'two')}, {key_of('acme', 'three')}")
    )
    assert known(gate) == {("acme", "one")}  # nothing has changed yet
    apply()
    assert known(gate) == {("b", "two"), ("acme", "three")}


def test_a_file_that_is_not_fit_changes_nothing(write: Callable[..., ServerConfig]) -> None:
    gate = Gate(write(), CLOCK)
    before = gate.directory
    with pytest.raises(StartupError, match="not a keys file"):
        gate.prepare(write('tenants = [{name = "b"}]', "{"))
    with pytest.raises(StartupError, match="needs tokens_per_minute"):
        write('tenants = [{name = "b", limits = {burst_tokens = 1}}]')
    with pytest.raises(StartupError, match="would let everyone in"):
        gate.prepare(ServerConfig())
    assert gate.directory is before


def test_an_issuer_that_is_asked_from_the_next_start_on_closes_nothing_until_then(tmp_path: Path) -> None:
    gate = Gate(ServerConfig(), CLOCK)
    (tmp_path / "jwks.json").write_text("{}")
    gate.prepare(ServerConfig(jwks=tmp_path / "jwks.json"))()
    assert gate.directory.is_open


def revoked(record: str) -> str:
    return record[:-1] + ', "revoked": "2030-01-02T00:00:00Z"}'


def is_good(gate: Gate, key: str) -> bool:
    known_key = gate.directory.keys.get(sha256(key.encode()).digest())
    return known_key is not None and not known_key.is_revoked


TWO_KEYS = KEYS % f"{key_of('acme', 'one')}, {key_of('b', 'two')}"
TWO_TENANTS = 'tenants = [{name = "acme"}, {name = "b", key_sha256 = ["%s"]}]' % ("0" * 64)


@pytest.mark.parametrize("typo", ["max_qeue = 7", "max_queue = 'seven'", 'auth = ["nothing"]'])
def test_revocations_of_a_reload_that_is_refused_take_effect(
    write: Callable[..., ServerConfig], caplog: pytest.LogCaptureFixture, typo: str
) -> None:
    gate = Gate(write(TWO_TENANTS, TWO_KEYS), CLOCK)
    with pytest.raises(StartupError):
        write(f"{typo}\n{TWO_TENANTS}", KEYS % f"{revoked(key_of('acme', 'one'))}, {key_of('b', 'two')}")
    gate.revoke()
    assert (is_good(gate, "one"), is_good(gate, "two")) == (False, True)
    assert "revoked despite the failed reload: keys=1 tenants=-" in caplog.text
    with pytest.raises(StartupError):
        write(f'{typo}\ntenants = [{{name = "acme"}}]', KEYS % key_of("b", "two"))
    gate.revoke()
    assert (is_good(gate, "one"), is_good(gate, "two")) == (False, False)
    assert gate.directory.tenants.keys() == {"acme"}
    assert not gate.directory.is_open


def test_keys_and_names_of_tenants_are_revoked_likewise(write: Callable[..., ServerConfig]) -> None:
    first, second = (sha256(key).hexdigest() for key in (b"first", b"second"))
    gate = Gate(write(f'tenants = [{{name = "acme", key_sha256 = ["{first}", "{second}"]}}]'), CLOCK)
    with pytest.raises(StartupError):
        write(f'tenants = [{{name = "acme", key_sha256 = ["{first}"], shar = 2}}]')
    gate.revoke()
    assert [is_good(gate, key) for key in ("first", "second", "one")] == [True, False, True]


@pytest.mark.parametrize(
    "settings", ["tenants = [", "max_qeue = 7", 'tenants = [{nmae = "acme"}]', "tenants = 7\nmax_qeue = 7"]
)
def test_what_cannot_be_read_stays_as_it_was_and_is_told(
    write: Callable[..., ServerConfig], caplog: pytest.LogCaptureFixture, settings: str
) -> None:
    gate = Gate(write(), CLOCK)
    before = gate.directory
    with pytest.raises(StartupError):
        write(settings, "{")
    gate.revoke()
    assert gate.directory is before
    assert "keys revoked since the last reload stay valid" in caplog.text


def test_streams_of_who_is_revoked_end_and_those_of_others_go_on() -> None:
    with serving(tenants=(ACME, THIRD)) as server:
        streams = [server.send(as_caller(completion(**STREAM), key)) for key in "at"]
        for _ in range(5):
            server.step()
        server.gate.prepare(ServerConfig(tenants=(THIRD,)))()
        server.app.end_revoked()
        server.run()
        gone, kept = (answers(bytes(stream.received))[0] for stream in streams)
        assert [event["error"]["code"] for event in gone.events if "error" in event] == ["invalid_api_key"]
        assert kept.finish_reason() == "length"


def test_keys_that_are_no_longer_taken_are_not_counted(write: Callable[..., ServerConfig]) -> None:
    gone = key_of("acme", "gone")[:-1]
    past = f'{gone}, "expires": "1970-01-01T00:00:00Z"}}, {gone}, "revoked": "1969-01-01T00:00:00Z"}}'
    gate = Gate(write(keys=KEYS % past.replace("gone", "expired", 1)), CLOCK)
    assert (gate.num_valid_keys, gate.is_shut) == (0, True)
    gate.prepare(write(keys=KEYS % f"{past}, {key_of('acme', 'one')}"))()
    assert (gate.num_valid_keys, gate.is_shut) == (1, False)
    assert not Gate(ServerConfig(), CLOCK).is_shut
    assert Gate(write("", KEYS % ""), CLOCK).is_shut


def test_a_setting_that_a_reload_cannot_change_is_told(
    write: Callable[..., ServerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gate = Gate(write(), CLOCK)
    gate.prepare(write('max_queue = 7\nmodels_memory = "1GiB"\ntenants = [{name = "b"}]'))()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told[-2:] == [
        f"{one} has changed, which takes effect at the next start" for one in ("models_memory", "max_queue")
    ]
    assert "reloaded: tenants=1 keys=0" in caplog.text


def test_certificates_of_tenants_need_a_ca(write: Callable[..., ServerConfig]) -> None:
    with pytest.raises(
        StartupError, match="the tenant a has certificates, but the server does not request any from clients"
    ):
        load_directory(write('tenants = [{name = "a", certificates = ["DNS:a"]}]'))


def test_tenants_that_nobody_can_prove_to_be_are_told(
    write: Callable[..., ServerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    load_directory(write(keys=KEYS % ""))
    assert "every request will be refused" in caplog.text


@pytest.mark.parametrize("auth", [("certificate",), ("jwt", "key"), ("certificate+key",)])
def test_a_way_to_say_who_one_is_that_nobody_has_does_not_open_the_server(auth: tuple[str, ...]) -> None:
    with pytest.raises(StartupError, match=f"--auth {re.escape(auth[-1])}, .* everyone would be let in") as caught:
        Gate(ServerConfig(auth=auth), CLOCK)
    assert "--tls-client-ca" in caught.value.fix
    Gate(ServerConfig(auth=auth, api_keys=("k",)), CLOCK)
    Gate(ServerConfig(auth=auth, tls_client_ca=Path("ca.pem")), CLOCK)


def test_models_that_are_not_served_are_told(
    write: Callable[..., ServerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    config = write(
        'prices = {"*" = {prompt = 1}, small = {prompt = 1}, smal = {prompt = 1}}\n'
        'tenants = [{name = "a", models = ["small", "large"]}, {name = "b"}]'
    )
    warn_of_models(config, {"small"})
    assert [record.getMessage() for record in caplog.records] == [
        "[prices] has the model 'smal', and the one that is served is small",
        "the tenant a may use the model 'large', and the one that is served is small",
    ]


# The places.

HERE, EVERYWHERE = Endpoint(TcpAddress("127.0.0.1", 1)), Endpoint(TcpAddress("0.0.0.0", 1))


@pytest.mark.parametrize(
    ("places", "settings"),
    [
        ([HERE, Endpoint(UnixAddress("/run/s.sock"))], {}),
        ([HERE, EVERYWHERE], {"api_keys": ("k",)}),
        ([HERE, EVERYWHERE], {"tenants": (ACME,)}),
        ([HERE, EVERYWHERE], {"insecure": True}),
    ],
)
def test_strangers_are_kept_out_by_the_address_or_by_being_asked(
    places: list[Endpoint], settings: dict[str, Any]
) -> None:
    Gate(ServerConfig(**settings), CLOCK).check_exposure(public_addresses(places))


def test_a_server_that_strangers_could_use_does_not_start() -> None:
    with pytest.raises(StartupError, match=r"other machines can reach 0.0.0.0:1, and callers are not auth") as caught:
        Gate(ServerConfig(), CLOCK).check_exposure(public_addresses([HERE, EVERYWHERE]))
    assert "--insecure" in caught.value.fix


def test_an_operator_sees_and_ends_anybodys_request() -> None:
    with serving(tenants=(ACME,), keys=("root",)) as server:
        stream = server.send(as_caller(completion(**STREAM), "a"))
        server.step()
        refused = server.send(as_caller(request("DELETE", "/admin/requests/r1"), "a"))
        ended = server.send(as_caller(request("DELETE", "/admin/requests/r1"), "root"))
        server.run()
        assert [answers(bytes(one.received))[0].status for one in (refused, ended)] == [403, 200]
        events = answers(bytes(stream.received))[0].events
        assert [event["error"]["code"] for event in events if "error" in event] == ["request_cancelled"]
        for path in ("/v1/requests/r1", "/admin/requests/cmpl-r1"):
            assert server.ask(as_caller(request("GET", path), "root"), "GET").json["tenant"] == "acme"
        assert server.ask(as_caller(request("GET", "/v1/requests/r4"), "a"), "GET").status == 404
