"""JWTs: which are taken, and every way that has been tried to have a wrong one taken."""

import asyncio
import base64
import contextlib
import hmac
import json
import warnings
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from joserfc import jws, jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from core.errors import ErrorKind, ServiceError, StartupError
from server.callers import Gate
from server.clock import Clock
from server.config import ServerConfig
from server.gate.jwt import (
    FETCHING_S,
    MAX_AGE_S,
    MAX_TOKEN_BYTES,
    REFRESH_S,
    RETRY_S,
    BadToken,
    JwksUrl,
    JwtRules,
    JwtVerifier,
    KeySource,
    KeysUnavailable,
    jwks_source,
    parse_jwks,
)
from server.gate.quota import Ticket
from server.gate.tenants import Limits, Tenant
from server.values import BadValueError
from server.wire.messages import HttpRequest, Peer

NOW_S = 1_900_000_000.0
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
EC = ECKey.generate_key("P-256", {"kid": "ec"})
OKP = OKPKey.generate_key("Ed25519", {"kid": "okp"})
STRANGER = ECKey.generate_key("P-256", {"kid": "ec"})
KEYS = {"RS256": RSA, "ES256": EC, "EdDSA": OKP, "Ed25519": OKP}
CLAIMS = {"iss": "https://issuer.example", "aud": "steploop", "exp": NOW_S + 60, "tenant": "acme"}
RULES = JwtRules("https://issuer.example", "steploop", leeway_s=10)
NEW_JWKS = json.dumps({"keys": [ECKey.generate_key("P-256", {"kid": "new"}).as_dict(private=False)]}).encode()
JWKS = {"keys": [key.as_dict(private=False) for key in (RSA, EC, OKP)]}


@pytest.fixture
def verifier(tmp_path: Path) -> JwtVerifier:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(JWKS))
    return JwtVerifier(RULES, KeySource(path, lambda: 0.0), lambda: NOW_S)


def token(algorithm: str = "ES256", key: Any = None, header: Mapping[str, Any] | None = None, **claims: Any) -> bytes:
    key = key or KEYS[algorithm]
    merged = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jwt.encode({"alg": algorithm, "kid": key.kid} | (header or {}), merged, key, [algorithm]).encode()


def part(value: Any) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")


def signed(header: Mapping[str, Any], claims: Any = CLAIMS) -> bytes:
    """By the right key, whatever the header says."""
    content = part(header) + b"." + part(claims)
    signature = jws.JWSRegistry.algorithms["ES256"].sign(content, EC)
    return content + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_token_of_each_algorithm_names_its_tenant(verifier: JwtVerifier, algorithm: str) -> None:
    assert verifier.names_of(token(algorithm))[0] == "acme"


@pytest.mark.parametrize(
    "claims",
    [{"aud": ["other", "steploop"]}, {"exp": NOW_S - 9}, {"nbf": NOW_S + 9}, {"exp": int(NOW_S) + 1, "iat": 1}],
)
def test_a_token_for_here_and_now_is_taken_within_the_leeway(verifier: JwtVerifier, claims: dict[str, Any]) -> None:
    assert verifier.names_of(token(**claims))[0] == "acme"


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"iss": "https://other.example"}, "another issuer"),
        ({"iss": None}, "another issuer"),
        ({"aud": "other"}, "another audience"),
        ({"aud": ["other"]}, "another audience"),
        ({"aud": "steploop-too"}, "another audience"),
        ({"aud": None}, "another audience"),
        ({"exp": NOW_S - 10}, "expired"),
        ({"exp": None}, "exp must be a number"),
        ({"exp": "never"}, "exp must be a number"),
        ({"exp": True}, "exp must be a number"),
        ({"nbf": NOW_S + 11}, "not valid yet"),
        ({"tenant": None}, "'tenant' names no tenant"),
        ({"tenant": ["acme"]}, "'tenant' names no tenant"),
    ],
)
def test_claims_that_are_not_for_here_and_now_are_refused(
    verifier: JwtVerifier, claims: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadToken, match=why):
        verifier.names_of(token(**claims))


def with_secret(key_id: str, secret: bytes) -> bytes:
    """Signed as with a secret, for who takes the issuer's public key for one."""
    content = part({"alg": "HS256", "kid": key_id}) + b"." + part(CLAIMS)
    return content + b"." + base64.urlsafe_b64encode(hmac.digest(secret, content, "sha256")).rstrip(b"=")


def attacks() -> dict[str, bytes]:
    good = token()
    header, claims, signature = good.split(b".")
    es256 = {"alg": "ES256", "kid": "ec"}
    return {
        "none": part({"alg": "none"}) + b"." + claims + b".",
        "none with a signature": part({"alg": "none", "kid": "ec"}) + b"." + claims + b"." + signature,
        "None in capitals": part({"alg": "NONE", "kid": "ec"}) + b"." + claims + b".",
        "no algorithm": part({"kid": "ec"}) + b"." + claims + b"." + signature,
        "HS256 with the public key": with_secret("ec", EC.as_pem(private=False)),
        "HS256 with the public key of RSA": with_secret("rsa", RSA.as_pem(private=False)),
        "an algorithm that is not offered": token("RS512", RSA, {"kid": "rsa"}),
        "another key of the same id": token("ES256", STRANGER),
        "another kind of key": signed({"alg": "RS256", "kid": "ec"}),
        "an unknown key": signed(es256 | {"kid": "new"}),
        "no key's id among several": signed({"alg": "ES256"}),
        "a key's id that is a list": signed(es256 | {"kid": ["ec"]}),
        "crit": signed(es256 | {"crit": ["exp"], "exp": 1}),
        "crit of b64": signed(es256 | {"crit": ["b64"], "b64": False}),
        "jku": signed(es256 | {"jku": "https://issuer.example/keys"}),
        "jwk": signed(es256 | {"jwk": EC.as_dict(private=False)}),
        "x5u": signed(es256 | {"x5u": "https://issuer.example/chain"}),
        "claims that are a list": signed(es256, [CLAIMS]),
        "another claim, the old signature": header + b"." + part(CLAIMS | {"tenant": "b"}) + b"." + signature,
        "a cut signature": good[:-2],
        "an empty signature": header + b"." + claims + b".",
        "not base64": b"eyJ*." + claims + b"." + signature,
        "not JSON": b"eyJh." + claims + b"." + signature,
        "not UTF-8": b"eyJ\xff." + claims + b"." + signature,
        "a header that is a list": part([es256]) + b"." + claims + b"." + signature,
        "too long": token(padding="x" * MAX_TOKEN_BYTES),
    }


ATTACKS = attacks()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(verifier: JwtVerifier, name: str) -> None:
    with pytest.raises(BadToken):
        verifier.names_of(ATTACKS[name])


def test_a_token_of_the_longest_length_is_taken(verifier: JwtVerifier) -> None:
    padding = ""
    while len(longest := token(padding=padding)) < MAX_TOKEN_BYTES - 2:
        padding += "x" * max(1, (MAX_TOKEN_BYTES - len(longest)) * 3 // 4 - 2)
    assert len(longest) <= MAX_TOKEN_BYTES
    assert verifier.names_of(longest)[0] == "acme"


def test_a_set_keeps_the_keys_that_can_check_signatures() -> None:
    secret = OctKey.generate_key(256, {"kid": "oct"}).as_dict()
    for_encryption = ECKey.generate_key("P-256", {"kid": "enc", "use": "enc"}).as_dict(private=False)
    broken = {"kty": "RSA", "kid": "broken", "n": "?"}
    unknown = [{"kty": "EC", "kid": "new", "crv": "P-1", "x": "AA", "y": "AA"}, {"kty": "OKP", "crv": "Ed1", "x": "AA"}]
    published = [*unknown, *JWKS["keys"], secret, for_encryption, broken, "text"]
    keys = parse_jwks(json.dumps({"keys": published}).encode())
    assert keys.keys() == {"rsa", "ec", "okp"}
    only = parse_jwks(json.dumps({"keys": [EC.as_dict(private=False)]}).encode())
    assert only[None] is only["ec"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"keys": {}}', '{"keys": []}', '{"keys": [{"kty": "oct"}]}'])
def test_a_set_without_a_fit_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_jwks(text.encode())


@pytest.mark.parametrize("text", ["http://issuer.example/keys", "ftp://issuer.example/keys", "/nowhere/jwks.json"])
def test_a_source_is_a_file_or_comes_encrypted(text: str) -> None:
    with pytest.raises(BadValueError):
        jwks_source(text)


# On the gate.


def config_of(tmp_path: Path, **settings: Any) -> ServerConfig:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(JWKS))
    defaults = {"jwks": path, "jwt_issuer": "https://issuer.example", "jwt_audience": "steploop"}
    return ServerConfig(tenants=(Tenant(name="acme"),), **(defaults | settings))


def asked(credential: bytes) -> HttpRequest:
    fields = ((b"authorization", b"Bearer " + credential),)
    return HttpRequest(stream_id=1, method="GET", path="/", query="", headers=fields, has_body=False)


def identify(gate: Gate, credential: bytes) -> str:
    return gate.authenticator.identify(asked(credential), None).tenant.name


CLOCK = Clock(lambda: 0.0, lambda: NOW_S)


def test_tokens_are_taken_beside_keys(tmp_path: Path) -> None:
    gate = Gate(config_of(tmp_path, api_keys=("eyJ.a.key",)), CLOCK)
    assert identify(gate, token()) == "acme"
    assert identify(gate, b"eyJ.a.key") == "local"
    for bad in (token(exp=1), token(tenant="nobody"), b"eyJ.another.key", b"wrong"):
        with pytest.raises(ServiceError) as caught:
            identify(gate, bad)
        assert (caught.value.kind, caught.value.code) == (ErrorKind.AUTHENTICATION, "invalid_api_key")


async def test_who_comes_while_the_keys_cannot_be_had_is_asked_to_come_back(tmp_path: Path) -> None:
    url = JwksUrl("http://127.0.0.1:1/nobody-listens-there")
    gate = Gate(config_of(tmp_path, jwks=url, api_keys=("k",)), CLOCK)
    gate.start()
    with pytest.raises(ServiceError) as caught:
        identify(gate, token())
    assert (caught.value.kind, caught.value.code) == (ErrorKind.UNAVAILABLE, "issuer_unavailable")
    assert caught.value.retry_after_s == FETCHING_S
    for bad in (b"wrong", b"eyJ.e.y", signed({"alg": "none"})):
        with pytest.raises(ServiceError) as caught:
            identify(gate, bad)
        assert caught.value.kind is ErrorKind.AUTHENTICATION
    assert identify(gate, b"k") == "local"


def test_a_reload_reads_the_file_of_keys_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    gate = Gate(config, CLOCK)
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [STRANGER.as_dict(private=False)]}))
    apply = gate.prepare(config)
    assert identify(gate, token()) == "acme"
    apply()
    assert identify(gate, token("ES256", STRANGER)) == "acme"
    with pytest.raises(ServiceError):
        identify(gate, token())
    (tmp_path / "jwks.json").write_text("{}")
    with pytest.raises(StartupError, match=r"jwks.json cannot be used: it has no list of keys"):
        gate.prepare(config)


@pytest.mark.parametrize("name", ["jwt_issuer", "jwt_audience"])
def test_keys_an_issuer_and_an_audience_go_together(tmp_path: Path, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(StartupError, match=f"--jwks needs {flag}"):
        Gate(config_of(tmp_path, **{name: None}), CLOCK)
    with pytest.raises(StartupError, match=f"{flag} needs --jwks"):
        Gate(ServerConfig(api_keys=("k",), **{name: "https://issuer.example"}), CLOCK)


def test_an_issuer_closes_a_server_without_tenants(tmp_path: Path) -> None:
    gate = Gate(ServerConfig(**{**vars_of(config_of(tmp_path)), "tenants": ()}), CLOCK)
    with pytest.raises(ServiceError):
        identify(gate, b"")
    assert identify(gate, token(tenant="local")) == "local"


def vars_of(config: ServerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("jwks", "jwt_issuer", "jwt_audience")}


# From a URL.


class Issuer:
    """Publishes a set of keys on this machine, and counts who asks."""

    def __init__(self) -> None:
        self.body = json.dumps(JWKS).encode()
        self.status = 200
        self.location: str | None = None
        self.num_asked = 0
        issuer = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.num_asked += 1
                if issuer.status == 0:  # no HTTP
                    self.wfile.write(b"220 ready\r\n")
                    return
                self.send_response(issuer.status if self.path == "/keys" else 200)
                if self.path == "/keys" and issuer.location:
                    self.send_header("location", issuer.location)
                self.end_headers()
                self.wfile.write(issuer.body)

            def log_message(self, *args: object) -> None:
                """Nothing on stderr."""

        self._server = HTTPServer(("127.0.0.1", 0), Answer)
        self.url = JwksUrl(f"http://127.0.0.1:{self._server.server_port}/keys")
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.close()


async def wait_fetched(source: KeySource) -> None:
    while source.is_fetching:
        await asyncio.sleep(0)


async def test_the_keys_of_a_url_come_in_the_background_and_are_kept_for_a_day(
    issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    source = KeySource(issuer.url, lambda: now[0])
    with pytest.raises(KeysUnavailable) as unavailable:  # and asks
        source.find("ec")
    assert unavailable.value.retry_after_s == FETCHING_S
    await wait_fetched(source)
    assert source.find("ec") is not None
    now[0] = REFRESH_S - 1
    for _ in range(100):
        source.find("ec")
    assert issuer.num_asked == 1
    issuer.body = NEW_JWKS
    for key_id in ("new", *(f"unknown{i}" for i in range(100))):  # asks, and not again for every stranger
        with pytest.raises(KeysUnavailable) as unavailable:
            source.find(key_id)
        assert unavailable.value.retry_after_s == FETCHING_S
    await wait_fetched(source)
    assert source.find("unknown") is None  # a fetch that is young enough did not have it
    assert issuer.num_asked == 2
    assert source.find("new") is not None
    issuer.status = 500
    now[0] += REFRESH_S
    assert source.find("new") is not None
    await wait_fetched(source)
    assert "the previous ones stay valid" in caplog.text
    now[0] += RETRY_S
    issuer.status = 0
    caplog.clear()
    assert source.find("new") is not None
    await wait_fetched(source)
    assert "the previous ones stay valid" in caplog.text
    assert issuer.num_asked == 4
    now[0] += MAX_AGE_S
    caplog.clear()
    with pytest.raises(KeysUnavailable):
        source.find("new")
    await wait_fetched(source)
    assert "every JWT is refused" in caplog.text
    with pytest.raises(KeysUnavailable) as unavailable:
        source.find("new")
    assert unavailable.value.retry_after_s == RETRY_S


async def test_a_token_of_a_new_key_waits_for_the_fetch_that_brings_it(issuer: Issuer, tmp_path: Path) -> None:
    issuer.body = NEW_JWKS
    peer = Peer()
    now = [0.0]
    gate = Gate(config_of(tmp_path, jwks=issuer.url), Clock(lambda: now[0], lambda: NOW_S))
    gate.start()
    with pytest.raises(ServiceError) as caught:  # the first fetch is waited for, and has another key
        await gate.identify(asked(token()), peer)
    assert caught.value.kind is ErrorKind.AUTHENTICATION
    issuer.body = json.dumps(JWKS).encode()
    with pytest.raises(ServiceError) as caught:  # likewise, at once
        await gate.identify(asked(token()), peer)
    assert (caught.value.kind, issuer.num_asked) == (ErrorKind.AUTHENTICATION, 1)
    now[0] += RETRY_S
    callers = await asyncio.gather(*(gate.identify(asked(token(sub=f"u{i}")), peer) for i in range(20)))
    assert [caller.key_id for caller in callers] == [f"sub:u{i}" for i in range(20)]
    assert issuer.num_asked == 2
    issuer.status, now[0] = 500, now[0] + RETRY_S
    with pytest.raises(ServiceError) as caught:  # whether there is such a key nobody knows
        await gate.identify(asked(signed({"alg": "ES256", "kid": "newer"})), peer)
    assert (caught.value.code, caught.value.retry_after_s) == ("issuer_unavailable", RETRY_S)


def test_subjects_are_bounded_one_by_one(tmp_path: Path) -> None:
    bounded = Tenant(name="acme", key_limits=Limits(concurrent_requests=1))
    gate = Gate(ServerConfig(**{**vars_of(config_of(tmp_path)), "tenants": (bounded,)}), CLOCK)

    def ticket(**claims: Any) -> Ticket:
        return gate.quotas.ticket_for(gate.authenticator.identify(asked(token(**claims)), None))

    ticket(sub="a").enter()
    ticket(sub="b").enter()
    ticket(sub="b\n" * 9).enter()
    ticket().enter()
    for claims in ({"sub": "a"}, {"sub": "b\n" * 9}, {}):
        with pytest.raises(
            ServiceError, match=r"The JWT subject sub:.* has 1 requests in progress, the most that concurrent_requests"
        ):
            ticket(**claims).enter()
    with pytest.raises(ServiceError, match="'sub' must be a string"):
        ticket(sub=["a"])


@pytest.mark.parametrize(("location", "is_followed"), [("/moved", True), ("https://127.0.0.1:1/keys", False)])
async def test_a_redirect_is_followed_where_it_keeps_the_scheme(
    issuer: Issuer, location: str, is_followed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    issuer.location = location
    issuer.status = 302
    source = KeySource(issuer.url, lambda: 0.0)
    source.refresh()
    await wait_fetched(source)
    with contextlib.nullcontext() if is_followed else pytest.raises(KeysUnavailable):
        assert source.find("ec") is not None
    assert ("redirects to https://127.0.0.1:1/keys" in caplog.text) is not is_followed
