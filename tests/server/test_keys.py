"""The keys file: what it keeps, how it is replaced, and what is refused."""

import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from core.errors import StartupError
from server.gate.identity import Scope, create_key, expiry_value, mask_keys, read_keys, revoke_key
from server.values import BadValueError

NOW = datetime(2030, 1, 1, 12, 30, 15, 999, tzinfo=UTC)
TERMS: dict[str, Any] = {"label": "ci", "scopes": (Scope.ADMIN,), "expires": NOW + timedelta(days=1)}


def test_a_key_is_kept_as_its_digest_and_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, record = create_key(path, NOW, "acme", **TERMS)
    assert re.fullmatch(r"sl-[A-Za-z0-9]{40}", key)
    assert record.prefix == key[:11]
    assert record.sha256 == sha256(key.encode()).hexdigest()
    terms = {"label": record.label, "scopes": record.scopes, "expires": record.expires}
    assert (record.tenant, terms) == ("acme", TERMS)
    assert read_keys(path) == (record,)
    assert key[11:] not in path.read_text()


def test_the_file_is_its_owners_alone_and_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for _ in range(2):
        create_key(path, NOW, "acme", **TERMS)
        path.chmod(0o644)
    create_key(path, NOW, "acme", **TERMS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]
    assert len(read_keys(path)) == 3


def test_a_revoked_keys_record_stays_with_the_first_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, record = create_key(path, NOW, "acme", **TERMS)
    _, other = create_key(path, NOW, "acme", **TERMS)
    assert record.expires is not None
    moments = (NOW, record.expires - timedelta(microseconds=1), record.expires)
    assert [record.state(now) for now in moments] == ["valid", "valid", "expired"]
    revoked = revoke_key(path, record.prefix, NOW)
    assert revoke_key(path, key, NOW + timedelta(hours=1)) == revoked  # the whole key will do
    assert revoked.revoked == NOW.replace(microsecond=0)
    assert revoked.state(NOW) == "revoked"
    assert read_keys(path) == (revoked, other)


def test_a_prefix_that_is_no_keys_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    _, record = create_key(path, NOW, "acme", **TERMS)
    for prefix in ("", "sl-", record.prefix[:-1], "sl-00000000"):
        with pytest.raises(StartupError, match="no key has the prefix"):
            revoke_key(path, prefix, NOW)
    assert read_keys(path) == (record,)


def test_those_who_create_keys_at_once_lose_none(tmp_path: Path) -> None:
    path, start = tmp_path / "keys.json", threading.Barrier(4)

    def create_some() -> None:
        start.wait()
        for _ in range(10):
            create_key(path, NOW, "acme", **TERMS)

    with ThreadPoolExecutor(4) as pool:  # each holds the lock by a descriptor of its own, as processes do
        for done in [pool.submit(create_some) for _ in range(4)]:
            done.result()
    assert len({record.prefix for record in read_keys(path)}) == 40


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "not a keys file"),
        ("[]", "not a keys file"),
        ('{"version": 2, "keys": []}', "version"),
        ('{"version": 1, "keys": [{"prefix": "sl-"}]}', "sha256"),
        ('{"version": 1, "keys": [], "more": 1}', "more"),
        (
            '{"version": 1, "keys": [{"prefix": "a", "sha256": "A", "tenant": "b", "created": "2030-01-01"}]}',
            "sha256",
        ),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(tmp_path: Path, content: str, cause: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(StartupError, match=cause):
        read_keys(path)
    with pytest.raises(StartupError, match=cause):
        create_key(path, NOW, "acme", **TERMS)
    assert path.read_text() == content


def test_a_file_that_cannot_be_had_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist") as missing:
        read_keys(tmp_path / "keys.json")
    assert "steploop keys create" in missing.value.fix
    with pytest.raises(StartupError, match="cannot be written: No such file"):
        create_key(tmp_path / "nowhere" / "keys.json", NOW, "acme", **TERMS)


def test_an_expiry_is_an_age_or_a_date() -> None:
    for text, when in {
        "90d": NOW + timedelta(days=90),
        "12 h": NOW + timedelta(hours=12),
        "30min": NOW + timedelta(minutes=30),
        "2031-01-31": datetime(2031, 1, 31, tzinfo=UTC),
        "2031-01-31T12:00:00+02:00": datetime(2031, 1, 31, 10, tzinfo=UTC),
    }.items():
        assert expiry_value(text, NOW) == when.replace(microsecond=0)
    for text in ("", "soon", "0d", "90", "90 days", "2029-12-31", "2030-02-30", "99999999d", "-1d"):
        with pytest.raises(BadValueError):
            expiry_value(text, NOW)


def test_a_key_is_masked_but_for_the_prefix_that_the_list_shows(tmp_path: Path) -> None:
    key, record = create_key(tmp_path / "keys.json", NOW, "acme")
    masked = f"{record.prefix}***"
    assert mask_keys(f"/v1/requests/{key}") == f"/v1/requests/{masked}"
    assert mask_keys(f"/x{key}-more/{key}") == f"/x{masked}/{masked}"
    assert mask_keys(key.replace("s", "%73").replace("-", "%2D")) == masked
    assert mask_keys("/a/sl-own_key-1/b") == "/a/sl-***/b"
    for harmless in ("/v1/models/tsl-1b-chat", "/v1/requests/a%20b", "/v1/sl"):
        assert mask_keys(harmless) == harmless
