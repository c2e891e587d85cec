"""What each check of the gate costs the event loop: `python -m bench.gate`.

One thread, no network, no model: the server's own objects, called as the app calls them. A check is run in turns of
TURN_S with the others, so that what disturbs the machine meets them all alike; the fastest turn of each is shown, in
microseconds a call.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import orjson
from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey

from bench.kit import Flag, Found, run_bench
from bench.results import Table
from core.errors import ServiceError
from core.outlook import Outlook
from core.types import EngineStats, Request, SamplingParams, Usage
from server.gate.admission import Admission, Contender, Place, QueueLimits
from server.gate.identity import Authenticator, Caller, make_directory
from server.gate.jwt import JwtRules, JwtVerifier, KeySource
from server.gate.quota import S_NS, Moment, Quotas
from server.gate.tenants import Limits, Tenant
from server.gate.text_rules import RuleBook, TextRule, TextScreen
from server.wire.messages import ClientCertificate, Headers, HttpRequest

NUM_KEYS = 10_000
TURN_S = 0.05
PLENTY = 10**9
NUM_TENANTS = 16
NUM_WAITING = 256
NUM_PHRASES = 16
PROMPT_CHARS = 4_000
EVERY_LIMIT = Limits(
    requests_per_minute=PLENTY, tokens_per_minute=PLENTY, tokens_per_day=PLENTY, concurrent_requests=PLENTY
)
NO_LIMITS = QueueLimits(max_requests=PLENTY, max_tokens=PLENTY, max_bytes=PLENTY)
STATS = EngineStats(
    outlook=Outlook(
        step_cost_s=(5e-3, 1e-4, 0.0, 0.0, 0.0),  # steps of 5 ms, 0.1 ms a token
        max_sequences=64,
        max_batch_tokens=2_048,
        num_kv_tokens=2**20,
        inter_token_target=0.05,
        tokens_left=128,
        first_left=1,
    )
)
RULES = (
    *(TextRule(phrase=f"project nightingale {i}", ignore_case=True) for i in range(NUM_PHRASES)),
    TextRule(pattern=r"sk-[A-Za-z0-9]{20,}"),
)
REQUEST = Request(request_id="r", prompt_ids=(7,) * 100, sampling=SamplingParams(max_tokens=200), arrival_s=0.0)

Check = Callable[[], object]


def now() -> Moment:
    return Moment(time.monotonic_ns(), int(time.time()))


def request(*fields: tuple[bytes, bytes]) -> HttpRequest:
    """As common clients send it: their key stands behind seven other fields."""
    others: Headers = tuple((b"field-%d" % i, b"value") for i in range(7))
    return HttpRequest(stream_id=1, method="POST", path="/", query="", headers=(*others, *fields), has_body=True)


def refused(authenticator: Authenticator, asked: HttpRequest) -> None:
    try:
        authenticator.identify(asked, None)
    except ServiceError:
        return
    raise AssertionError("nobody has that key")


def identity_checks(directory: Path) -> dict[str, Check]:
    """Who asks, in each way."""
    keys = tuple(f"sl-{number:040}" for number in range(NUM_KEYS))
    tenant = Tenant(name="acme", certificates=("DNS:acme.example",))
    authenticator = Authenticator(make_directory([tenant], keys), time.time)
    known = request((b"authorization", b"Bearer " + keys[NUM_KEYS // 2].encode()))
    unknown = request((b"authorization", b"Bearer " + b"sl-" + b"x" * 40))
    certificate = ClientCertificate("CN=acme", (("DNS", "acme.example"),))
    checks: dict[str, Check] = {
        f"one of {NUM_KEYS:,} keys": lambda: authenticator.identify(known, None),
        f"none of {NUM_KEYS:,} keys": lambda: refused(authenticator, unknown),
        "a client certificate": lambda: authenticator.identify(request(), certificate),
    }
    signing: dict[str, RSAKey | ECKey | OKPKey] = {
        "RS256": RSAKey.generate_key(2048, {"kid": "rsa"}),
        "ES256": ECKey.generate_key("P-256", {"kid": "ec"}),
        "Ed25519": OKPKey.generate_key("Ed25519", {"kid": "okp"}),
    }
    path = directory / "jwks.json"
    path.write_bytes(orjson.dumps({"keys": [key.as_dict(private=False) for key in signing.values()]}))
    verifier = JwtVerifier(JwtRules("issuer", "steploop"), KeySource(path, time.monotonic), time.time)
    claims = {"iss": "issuer", "aud": "steploop", "exp": int(time.time()) + 3600, "tenant": "acme"}
    for algorithm, key in signing.items():
        token = jwt.encode({"alg": algorithm, "kid": key.kid}, claims, key, [algorithm]).encode()
        checks[f"a JWT, {algorithm}"] = partial(verifier.names_of, token)
    return checks


def quota_checks() -> dict[str, Check]:
    """A request's whole way, and a stream's next 256 tokens."""

    def way(caller: Caller) -> Check:
        quotas = Quotas(now)

        def go() -> None:
            ticket = quotas.ticket_for(caller)
            ticket.enter()
            ticket.reserve([REQUEST])
            ticket.settle(Usage(100, 50))
            ticket.leave()

        return go

    bounded = Caller(Tenant(name="acme", limits=EVERY_LIMIT, key_limits=EVERY_LIMIT), key_id="sl-1")
    topped_up = Quotas(lambda: Moment(time.monotonic_ns() * S_NS, 0)).ticket_for(bounded)
    topped_up.reserve([REQUEST])
    return {
        "a request without limits": way(Caller(Tenant(name="acme"), key_id="sl-1")),
        "a request, all limits of tenant and key": way(bounded),
        "a top-up by 256 tokens": lambda: topped_up.top_up(256),
    }


def admission_checks() -> dict[str, Check]:
    """From the parsed head to the end of the answer, with others before it in the queue."""

    def way(num_waiting: int) -> Check:
        admission = Admission(NO_LIMITS, lambda: STATS, time.monotonic)

        def admit(tenant: str) -> Place:
            place = admission.enter(tenant, 1_000)
            place.admit([msgspec.structs.replace(REQUEST, tenant=tenant)], float("inf"), time.monotonic())
            return place

        for i in range(num_waiting):
            admit(f"tenant {i % NUM_TENANTS}")

        def go() -> None:
            admission.check_in_time(Contender(0, "acme", 1, is_due=True), PLENTY)
            admission.check("acme", 1_000)
            place = admit("acme")
            place.on_first_token(0, time.monotonic())
            place.on_choice_end()
            place.leave(time.monotonic())

        return go

    behind = f"admission, behind {NUM_WAITING} of {NUM_TENANTS} tenants"
    return {"admission, an idle server": way(0), behind: way(NUM_WAITING)}


def text_rule_checks() -> dict[str, Check]:
    """What comes by is like any text: now and then something may be the beginning of a phrase."""
    book, prompt, words = (
        RuleBook(RULES),
        "What does a project plan say? " * (PROMPT_CHARS // 30),
        [" project", " plan"],
    )
    screen = TextScreen(book.on_answer)

    def say() -> None:
        for word in words * 5:
            screen.push(word)

    named = f"{NUM_PHRASES} phrases and a pattern"
    return {
        f"{named} in {PROMPT_CHARS:,} characters": lambda: book.check_prompt((prompt,), "prompt"),
        f"{named} in 10 tokens' text": say,
    }


def measure(checks: dict[str, Check], num_turns: int) -> dict[str, float]:
    """Microseconds a call, of the fastest turn."""
    best = dict.fromkeys(checks, float("inf"))
    for _ in range(num_turns):
        for name, check in checks.items():
            num_calls, start_s = 0, time.perf_counter()
            while (elapsed_s := time.perf_counter() - start_s) < TURN_S:
                for _ in range(10):
                    check()
                num_calls += 10
            best[name] = min(best[name], elapsed_s / num_calls * 1e6)
    return best


def _measure(arguments: argparse.Namespace) -> Found:
    with TemporaryDirectory() as directory:
        checks = identity_checks(Path(directory)) | quota_checks() | admission_checks() | text_rule_checks()
        found = measure(checks, arguments.turns)
    rows = tuple((name, round(us, 1)) for name, us in found.items())
    table = Table("Event loop, us a call, by the gate's check", ("check", "us"), rows)
    return Found([table], {"turns": arguments.turns})


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("gate", __doc__, _measure, (Flag("--turns", 20, "of each check", 1),), argv)


if __name__ == "__main__":
    sys.exit(main())
