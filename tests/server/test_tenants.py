"""[[tenants]]: what it may say, and how a mistake is told."""

from pathlib import Path

import pytest

from core.errors import StartupError
from server.config_sources import load_config
from server.gate.tenants import LOCAL, Limits, Tenant

DIGEST = "0" * 64


def tenants_of(tmp_path: Path, text: str) -> tuple[Tenant, ...]:
    path = tmp_path / "steploop.toml"
    path.write_text(text)
    return load_config({"config_file": str(path)}, {}).tenants


def refusal(tmp_path: Path, text: str) -> StartupError:
    with pytest.raises(StartupError) as caught:
        tenants_of(tmp_path, text)
    return caught.value


def test_a_table_says_all_there_is_to_a_tenant(tmp_path: Path) -> None:
    text = f"""
    port = 8080
    [[tenants]]
    name = "acme"
    class = "interactive"
    share = 3
    models = ["small"]
    cache_domain = "acme-and-friends"
    cached_token_discount = 50
    certificates = ["DNS:acme.example"]
    key_sha256 = ["{DIGEST}"]
    limits = {{ requests_per_minute = 60, burst_requests = 10, tokens_per_day = 1_000_000 }}
    [tenants.key_limits]
    concurrent_requests = 2
    [[tenants]]
    name = "other"
    """
    acme, other = tenants_of(tmp_path, text)
    assert acme == Tenant(
        name="acme",
        limits=Limits(requests_per_minute=60, burst_requests=10, tokens_per_day=1_000_000),
        key_limits=Limits(concurrent_requests=2),
        tenant_class="interactive",
        share=3,
        models=("small",),
        cache_domain="acme-and-friends",
        cached_token_discount=50,
        certificates=("DNS:acme.example",),
        key_sha256=(DIGEST,),
    )
    assert other == Tenant(name="other")
    assert (
        acme.priority_of(None) > other.priority_of(None) > Tenant(name="files", tenant_class="batch").priority_of(None)
    )


def test_cache_domains_are_shared_by_those_who_name_the_same_alone() -> None:
    alone, named, friend = Tenant(name="a"), Tenant(name="b", cache_domain="a"), Tenant(name="c", cache_domain="a")
    assert named.cache_salt_domain == friend.cache_salt_domain != alone.cache_salt_domain


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[tenants]\nname = "a"', ["is not a list of tables"]),
        ("[[tenants]]", ["number 1", "`name`"]),
        ('[[tenants]]\nname = "a b"', ["number 1, 'a b',", "$.name"]),
        ('[[tenants]]\nname = "a"\nport = 8080', ["unknown field `port`", "key_limits", "stand above"]),
        ('[[tenants]]\nname = "a"\nclass = "gold"', ["class is 'gold'", "interactive"]),
        ('[[tenants]]\nname = "a"\nshare = 0', ["$.share"]),
        ('[[tenants]]\nname = "a"\nlimits = {rpm = 1}', ["unknown field `rpm`", "requests_per_minute"]),
        ('[[tenants]]\nname = "a"\nlimits = {tokens_per_day = 0}', ["$.limits.tokens_per_day"]),
        ('[[tenants]]\nname = "a"\nlimits = {tokens_per_day = "many"}', ["$.limits.tokens_per_day"]),
        ('[[tenants]]\nname = "a"\ndeadlines = {ttft = 9}', ["unknown field `ttft`", "ttft_ms, inter_token_ms"]),
        ('[[tenants]]\nname = "a"\ndeadlines = {ttft_ms = 0}', ["$.deadlines.ttft_ms"]),
        ('[[tenants]]\nname = "a"\nlimits = {burst_tokens = 9}', ["burst_tokens also needs tokens_per_minute"]),
        ('[[tenants]]\nname = "a"\nkey_sha256 = ["secret"]', ["$.key_sha256"]),
        ('[[tenants]]\nname = "a"\ncertificates = ["a.example"]', ["'a.example' in certificates must be DNS:"]),
        ('[[tenants]]\nname = "a"\n[[tenants]]\nname = "a"', ["two tenants named a"]),
        (
            '[[tenants]]\nname = "a"\ncertificates = ["DNS:x"]\n[[tenants]]\nname = "b"\ncertificates = ["dns:x"]',
            ["two tenants with the certificate DNS:x"],
        ),
        (f'[[tenants]]\nname = "a"\nkey_sha256 = ["{DIGEST}", "{DIGEST}"]', ["a duplicate key"]),
        ('[tenant]\nname = "a"', ["a table, [tenant]", "only [[tenants]]"]),
    ],
)
def test_a_mistake_names_the_tenant_the_field_and_what_there_is(tmp_path: Path, text: str, words: list[str]) -> None:
    error = refusal(tmp_path, text)
    told = f"{error.cause} {error.fix}"
    assert str(tmp_path) in told
    for word in words:
        assert word in told


def test_a_tenants_class_is_the_most_that_its_requests_get() -> None:
    batch = Tenant(name="files", tenant_class="batch")
    assert [batch.priority_of(asked) for asked in (None, 4, -1, -3)] == [-1, -1, -1, -3]


def test_without_tenants_a_request_gets_the_class_it_asks_for() -> None:
    assert [LOCAL.priority_of(asked) for asked in (None, 4, -4)] == [0, 4, -4]
