"""Credentials: which are taken, in which field, whose they are, and what a refusal says."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest

from core.errors import ErrorKind, ServiceError
from server.gate.identity import ALL_SCOPES, Authenticator, Caller, KeyRecord, Scope, make_directory
from server.gate.tenants import Tenant
from server.wire.messages import ClientCertificate, Headers, HttpRequest

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ACME = Tenant(name="acme", certificates=("DNS:acme.example", "uri:spiffe://example/acme"))
OTHER = Tenant(name="other", certificates=("DNS:other.example",))


def request(*headers: tuple[bytes, bytes]) -> HttpRequest:
    fields: Headers = headers
    return HttpRequest(stream_id=1, method="GET", path="/", query="", headers=fields, has_body=False)


def bearer(key: str) -> HttpRequest:
    return request((b"authorization", b"Bearer " + key.encode()))


def certificate(*names: tuple[str, str]) -> ClientCertificate:
    return ClientCertificate("CN=someone", names)


def with_keys(*keys: str) -> Authenticator:
    return Authenticator(make_directory((), keys), NOW.timestamp)


def record(key: str, tenant: str = "acme", **fields: object) -> KeyRecord:
    digest = sha256(key.encode()).hexdigest()
    return KeyRecord(prefix=key[:11], sha256=digest, tenant=tenant, created=NOW, **fields)  # type: ignore[arg-type]


def with_tenants(*records: KeyRecord, ways: tuple[str, ...] = ("key", "certificate")) -> Authenticator:
    return Authenticator(make_directory((ACME, OTHER), (), records), NOW.timestamp, ways)


def refusal(authenticator: Authenticator, asked: HttpRequest, shown: ClientCertificate | None = None) -> str:
    with pytest.raises(ServiceError) as caught:
        authenticator.identify(asked, shown)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.AUTHENTICATION, "invalid_api_key")
    return caught.value.message


def test_without_keys_everyone_is_local_and_may_do_all() -> None:
    for asked in (request(), bearer("whatever")):
        caller = with_keys().identify(asked, None)
        assert (caller.tenant.name, caller.scopes) == ("local", ALL_SCOPES)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", "Bearer zwölf".encode())],
        [(b"authorization", "bEARER   zwölf ".encode())],
        [(b"authorization", "Bearer zwölf".encode())] * 2,
        [(b"x-api-key", "zwölf".encode())],
        [(b"x-api-key", "zwölf".encode())] * 2,
    ],
)
def test_any_of_the_keys_is_taken_in_either_header(headers: list[tuple[bytes, bytes]]) -> None:
    authenticator, key_id = with_keys("one", "zwölf"), sha256("zwölf".encode()).hexdigest()[:12]
    caller = authenticator.identify(request(*headers), None)
    assert (caller.tenant.name, caller.scopes, caller.key_id) == ("local", ALL_SCOPES, key_id)
    assert "zwölf" not in repr(authenticator.directory)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Bearer"),),
        ((b"authorization", b"Bearer on"),),
        ((b"authorization", b"Bearer one two"),),
        ((b"authorization", b"Basic one"),),
        ((b"authorization", b"one"),),
        ((b"x-api-key", b"ONE"),),
        ((b"x-api-key", b""),),
        ((b"authorization", b"Bearer wrong"), (b"x-api-key", b"one")),
        ((b"authorization", b"Bearer one"), (b"authorization", b"Bearer wrong")),
        ((b"x-api-key", b"one"), (b"x-api-key", b"ONE")),
    ],
)
def test_everything_else_is_refused_without_repeating_it(headers: Headers) -> None:
    words = refusal(with_keys("one", "two"), request(*headers)).split()
    assert not {"on", "two", "ONE", "wrong"} & set(words)


def test_a_key_of_the_file_names_its_tenant_and_its_rights() -> None:
    authenticator = with_tenants(record("sl-aaaaaaaaXX"), record("sl-bbbbbbbbXX", "other", scopes=(Scope.ADMIN,)))
    assert authenticator.identify(bearer("sl-aaaaaaaaXX"), None) == Caller(
        ACME, frozenset({Scope.INFERENCE, Scope.USAGE}), "sl-aaaaaaaa"
    )
    assert authenticator.identify(bearer("sl-bbbbbbbbXX"), None) == Caller(
        OTHER, frozenset({Scope.ADMIN}), "sl-bbbbbbbb"
    )


def test_a_digest_in_the_tenants_table_is_a_key_too() -> None:
    tenant = Tenant(name="acme", key_sha256=(sha256(b"deployed").hexdigest(),))
    caller = Authenticator(make_directory((tenant,)), NOW.timestamp).identify(bearer("deployed"), None)
    assert (caller.tenant, caller.key_id) == (tenant, sha256(b"deployed").hexdigest()[:12])
    assert Scope.ADMIN not in caller.scopes


def test_where_somebody_is_named_who_shows_nothing_is_refused() -> None:
    assert "no credentials" in refusal(Authenticator(make_directory((ACME,)), NOW.timestamp), request())
    assert "No API key" in refusal(Authenticator(make_directory((), (), ()), NOW.timestamp), request())


def test_a_key_is_good_until_it_is_revoked_or_the_second_it_expires_in() -> None:
    assert "revoked" in refusal(with_tenants(record("gone", revoked=NOW)), bearer("gone"))
    soon = record("soon", expires=NOW + timedelta(seconds=1))
    with_tenants(soon).identify(bearer("soon"), None)
    assert "expired" in refusal(with_tenants(record("now", expires=NOW)), bearer("now"))


def test_a_key_whose_tenant_is_not_configured_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    authenticator = with_tenants(record("sl-aaaaaaaaXX", "nobody"))
    assert "is not valid" in refusal(authenticator, bearer("sl-aaaaaaaaXX"))
    assert "sl-aaaaaaaa is of a tenant that is not configured: nobody" in caplog.text


@pytest.mark.parametrize("name", [("DNS", "acme.example"), ("URI", "spiffe://example/acme")], ids=lambda name: name[0])
def test_a_certificates_name_names_a_tenant(name: tuple[str, str]) -> None:
    shown = certificate(("DNS", "unknown.example"), name)
    caller = with_tenants().identify(request(), shown)
    assert (caller.tenant, caller.key_id) == (ACME, None)
    assert Scope.ADMIN not in caller.scopes


def test_certificates_that_name_nobody_or_several_are_refused() -> None:
    authenticator = with_tenants()
    assert "no credentials" in refusal(authenticator, request(), certificate(("DNS", "unknown.example")))
    assert "no credentials" in refusal(authenticator, request(), certificate(("email", "acme.example")))
    both = certificate(("DNS", "acme.example"), ("DNS", "other.example"))
    assert "several tenants: acme, other" in refusal(authenticator, request(), both)


def test_the_first_way_that_a_request_uses_decides() -> None:
    shown = certificate(("DNS", "other.example"))
    keys_first = with_tenants(record("key"))
    assert keys_first.identify(bearer("key"), shown).tenant == ACME
    assert "is not valid" in refusal(keys_first, bearer("wrong"), shown)
    certificates_first = with_tenants(record("key"), ways=("certificate", "key"))
    assert certificates_first.identify(bearer("wrong"), shown).tenant == OTHER


def test_a_way_that_is_not_configured_counts_for_nothing() -> None:
    only_keys = with_tenants(record("key"), ways=("key",))
    assert "No API key" in refusal(only_keys, request(), certificate(("DNS", "acme.example")))
    only_certificates = with_tenants(record("key"), ways=("certificate",))
    assert "a client certificate" in refusal(only_certificates, bearer("key"))


def test_joined_ways_are_needed_together_and_allow_what_both_do() -> None:
    rights = (Scope.INFERENCE, Scope.ADMIN)
    authenticator = with_tenants(record("sl-aaaaaaaaXX", scopes=rights), ways=("certificate+key",))
    shown = certificate(("DNS", "acme.example"))
    caller = authenticator.identify(bearer("sl-aaaaaaaaXX"), shown)
    assert caller == Caller(ACME, frozenset({Scope.INFERENCE}), "sl-aaaaaaaa")
    assert "together with" in refusal(authenticator, bearer("sl-aaaaaaaaXX"))
    assert "together with" in refusal(authenticator, request(), shown)
    assert "different tenants" in refusal(authenticator, bearer("sl-aaaaaaaaXX"), certificate(("DNS", "other.example")))


def test_what_a_caller_may_not_do_says_what_it_may() -> None:
    with pytest.raises(ServiceError) as caught:
        Caller(ACME, frozenset({Scope.USAGE})).check_scope(Scope.INFERENCE)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.PERMISSION, "permission_denied")
    assert "'inference'; you have: usage" in caught.value.message


def test_right_to_metrics_comes_with_admin_and_brings_nothing_else() -> None:
    Caller(ACME, frozenset({Scope.METRICS})).check_scope(Scope.METRICS)
    Caller(ACME, frozenset({Scope.ADMIN})).check_scope(Scope.METRICS)
    for scope in set(Scope) - {Scope.METRICS}:
        with pytest.raises(ServiceError, match="needs the right"):
            Caller(ACME, frozenset({Scope.METRICS})).check_scope(scope)
