"""API keys and the file that keeps what is known of them: never the keys themselves. Any thread.

A key is shown once, when it is made. The file holds its SHA-256: a key is 190 bits of chance, so nothing slower is
needed. Several processes may write the file: each change is made under a lock, on what is there then, and replaces it
whole.
"""

import fcntl
import os
import re
import secrets
import string
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import msgspec

from core.errors import ExitCode, StartupError
from server.values import BadValueError, did_you_mean, readable_fix

KEY_MARK = "sl-"  # ours at first sight, for people and for those who search repositories for secrets
NUM_ID_CHARS = 8
NUM_SECRET_CHARS = 32  # of 62 characters: 190 bits
FILE_MODE = 0o600
_CHARACTERS = string.ascii_letters + string.digits
# Those that we make, with the prefix that may be shown; and whatever else begins as they do
_KEY_LIKE = re.compile(
    rf"({KEY_MARK}[A-Za-z0-9]{{{NUM_ID_CHARS}}})[A-Za-z0-9]{{{NUM_SECRET_CHARS}}}[\w-]*|\b{KEY_MARK}[\w-]+", re.ASCII
)
AGE = re.compile(r"(\d{1,5})\s*(d|h|min)")
AGE_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "min": timedelta(minutes=1)}


class Scope(StrEnum):
    """What a key may do."""

    INFERENCE = "inference"  # generate, tokenize, list models, cancel its tenant's requests
    USAGE = "usage"  # read its tenant's usage
    METRICS = "metrics"  # read what the server counts, of all tenants together and apart
    ADMIN = "admin"  # see and steer the server, for all tenants; metrics included


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of a key.

    Args:
        prefix: the key's beginning: its name.
        sha256: of the whole key, in hex.
        revoked: when; None: it holds.
        expires: None: never.
    """

    prefix: str
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: str
    created: datetime
    label: str = ""
    scopes: tuple[Scope, ...] = (Scope.INFERENCE, Scope.USAGE)
    expires: datetime | None = None
    revoked: datetime | None = None

    def state(self, now: datetime) -> str:
        """valid, expired or revoked."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"


class _KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    keys: tuple[KeyRecord, ...]


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """What a new key is to be."""

    tenant: str
    label: str = ""
    scopes: tuple[Scope, ...] = (Scope.INFERENCE, Scope.USAGE)
    expires: datetime | None = None


def mask_keys(text: str) -> str:
    """With `***` in place of what looks like a key, but for the prefix that `keys list` shows of ours.

    Percent-encoding hides no key: a text that has one in it is taken decoded.
    """
    plain = unquote(text)
    return _KEY_LIKE.sub(lambda found: f"{found[1] or KEY_MARK}***", plain) if _KEY_LIKE.search(plain) else text


def expiry_value(text: str, now: datetime) -> datetime:
    """`90d`, `12h`, `30min` from now, or a date, or a date and time; UTC where no zone is said.

    Raises:
        BadValueError: it is none, or has passed.
    """
    expected = "such as 90d, 12h, 30min, 2030-01-31 or 2030-01-31T12:00:00Z, and in the future"
    try:
        if (match := AGE.fullmatch(text.strip())) is not None:
            when = now + int(match[1]) * AGE_UNITS[match[2]]
        else:
            when = datetime.fromisoformat(text.strip())
            when = when if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise BadValueError(expected) from error
    if when <= now:
        raise BadValueError(expected)
    return when.astimezone(UTC).replace(microsecond=0)


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """
    Raises:
        StartupError: the file is not there, cannot be read, or is not one of ours.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_KeysFile).keys
    except FileNotFoundError as error:
        fix = f"steploop keys create --keys-file {path} --tenant NAME"
        raise StartupError(f"the keys file {path} does not exist", fix, ExitCode.CONFIGURATION) from error
    except OSError as error:
        cause = f"the keys file {path} cannot be read: {error.strerror}"
        raise StartupError(cause, readable_fix(path), ExitCode.CONFIGURATION) from error
    except msgspec.DecodeError as error:
        fix = "take it from a backup, or move it away and create the keys again: steploop keys create"
        raise StartupError(f"{path} is no keys file: {error}", fix, ExitCode.CONFIGURATION) from error


def create_key(path: Path, terms: KeyTerms, now: datetime) -> tuple[str, KeyRecord]:
    """Make a key and keep its record; a file that is not there is made.

    Returns: the key, which nobody can show again, and its record.

    Raises:
        StartupError: the file is not ours to read or write.
    """
    key = KEY_MARK + "".join(secrets.choice(_CHARACTERS) for _ in range(NUM_ID_CHARS + NUM_SECRET_CHARS))
    record = KeyRecord(
        prefix=key[: len(KEY_MARK) + NUM_ID_CHARS],
        sha256=sha256(key.encode()).hexdigest(),
        tenant=terms.tenant,
        created=now.replace(microsecond=0),
        label=terms.label,
        scopes=terms.scopes,
        expires=terms.expires,
    )
    with _locked(path):
        _write(path, (*(read_keys(path) if path.exists() else ()), record))
    return key, record


def revoke_key(path: Path, prefix: str, now: datetime) -> KeyRecord:
    """Mark the key of that prefix, or of the whole key's; its record stays, for those who read logs.

    Raises:
        StartupError: there is no such key, or the file is not ours to read or write.
    """
    wanted = prefix[: len(KEY_MARK) + NUM_ID_CHARS]
    with _locked(path):
        keys = read_keys(path)
        found = next((record for record in keys if record.prefix == wanted), None)
        if found is None:
            cause = f"no key has the prefix {wanted}{did_you_mean(wanted, [record.prefix for record in keys])}"
            raise StartupError(cause, f"steploop keys list --keys-file {path}", ExitCode.USAGE)
        revoked = msgspec.structs.replace(found, revoked=found.revoked or now.replace(microsecond=0))
        _write(path, tuple(revoked if one is found else one for one in keys))
    return revoked


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While no other process changes the file. What the system refuses of that is told as StartupError."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)  # and with it the lock
    except OSError as error:
        fix = f"choose a file in a directory that you may write in: --keys-file FILE, now {path}"
        cause = f"the keys file {path} cannot be written: {error.strerror}"
        raise StartupError(cause, fix, ExitCode.CONFIGURATION) from error


def _write(path: Path, keys: tuple[KeyRecord, ...]) -> None:
    """Replace the file whole: a reader sees the old one or the new one, and a crash leaves one of them."""
    data = msgspec.json.format(msgspec.json.encode(_KeysFile(1, keys)), indent=1) + b"\n"
    owner = os.stat(path if path.exists() else path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            if os.geteuid() == 0:  # the server that is to read it may run as another user
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
