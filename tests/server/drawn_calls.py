"""Who asks a simulated server for what, drawn at random: tenants and their limits, requests, and bad ones."""

import random
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from server.gate.tenants import Limits, Tenant
from tests.server.faulty_model import FAILS_ID, RAISES_ID
from tests.server.recording_peers import Call
from tests.server.simulated_server import MODEL

SOMETIMES_KEY = "sometimes"  # of the first tenant, until a reload takes it away, and again after one that brings it
TENANTS = ("acme", "beta", "gamma")
DAY_TOKENS = 10**9
CACHED_DISCOUNT = 50  # per cent


def draw_tenants(rng: random.Random) -> tuple[Tenant, ...]:
    return tuple(_draw_tenant(rng, name) for name in TENANTS)


def _draw_tenant(rng: random.Random, name: str) -> Tenant:
    keys = [name] + [SOMETIMES_KEY] * (name == TENANTS[0] and rng.random() < 0.5)
    return Tenant(
        name=name,
        share=rng.choice((1, 1, 3)),
        tenant_class=rng.choice(("standard", "standard", "batch", "interactive")),
        cache_domain=rng.choice((None, "common")),
        cached_token_discount=CACHED_DISCOUNT,
        limits=Limits(
            tokens_per_day=DAY_TOKENS,
            tokens_per_minute=rng.choice((None, 2_000)),
            requests_per_minute=rng.choice((None, None, 100)),
            concurrent_requests=rng.choice((None, None, 6)),
        ),
        key_sha256=tuple(sha256(key.encode()).hexdigest() for key in keys),
    )


def draw_call(rng: random.Random, bad: float, events: Counter[str]) -> Call:
    """
    Args:
        bad: how likely it is one that cannot succeed; why is counted in the events.
    """
    pick = rng.choice
    prompt = [5, 6, 7, 8] * pick((0, 1, 4)) + [pick((40, 41, 42)) for _ in range(pick((1, 3, 8, 30)))]
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "seed": rng.randrange(1000)}
    fields |= {"max_tokens": rng.randint(1, 40), "n": pick((1, 1, 1, 2, 3)), "ignore_eos": pick((True, False))}
    fields |= {"stop": pick((None, None, "e", ["t", " a"])), "priority": pick((-2, 0, 0, 1))}
    if pick((True, True, False)):
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    key = pick((*TENANTS, *TENANTS, SOMETIMES_KEY))
    call = Call(method="POST", path="/v1/completions", key=key, body=fields)
    if rng.random() < bad:
        events[_spoil(rng, call, fields)] += 1
    if key == SOMETIMES_KEY:
        call.may_be += (401,)
    return call


def _spoil(rng: random.Random, call: Call, fields: dict[str, Any]) -> str:
    """Make a request that cannot succeed; says why."""
    how: dict[str, tuple[Callable[[], None], tuple[int, ...]]] = {
        "prompt that raises": (lambda: fields["prompt"].append(RAISES_ID), (500,)),
        "prompt that fails": (lambda: fields["prompt"].append(FAILS_ID), (500,)),
        "prompt too long": (lambda: fields.update(prompt=[5] * 96), (400,)),
        "unknown model": (lambda: fields.update(model="large"), (404,)),
        "bad field": (lambda: fields.update(max_tokens="many"), (400,)),
        "wrong key": (lambda: setattr(call, "key", "nobody"), (401,)),
        "body that breaks off": (lambda: setattr(call, "is_cut", True), (408,)),
    }
    name = rng.choice(list(how))
    spoil, statuses = how[name]
    spoil()
    call.must_be = statuses
    return name
