"""Who is calling: the keys file, and from a request's credentials to its tenant and scopes. Thread: loop.

Deny by default: once the configuration names any caller, a request without credentials is refused. Otherwise every
caller is the tenant `local`, and the process listens on this machine only (server/process.py).

A key is shown once, when it is created. The keys file holds its SHA-256, which is enough for 190 random bits. Several
processes may change the file: each change is made under a lock and replaces the file whole.
"""

import fcntl
import logging
import os
import re
import secrets
import string
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec

from core.errors import ErrorKind, ExitCode, ServiceError, StartupError
from core.types import LOWEST_CLASS
from server.gate.jwt import BadToken, JwtVerifier, KeysUnavailable, looks_like_jwt
from server.gate.tenants import LOCAL, LOCAL_NAME, Tenant, certificate_name
from server.values import BadValueError, did_you_mean, readable_fix
from server.wire.messages import ClientCertificate, HttpRequest

logger = logging.getLogger(__name__)

KEY, JWT, CERTIFICATE = WAYS = ("key", "jwt", "certificate")
_WANTED = {
    KEY: "an API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    JWT: "a JWT of the issuer that is trusted here, as 'Authorization: Bearer TOKEN'",
    CERTIFICATE: "a client certificate that names a tenant",
}
KEY_MARK = "sl-"  # lets people and secret scanners recognize our keys
NUM_ID_CHARS = 8
NUM_SECRET_CHARS = 32  # of 62 characters: 190 bits
NUM_ID_DIGITS = 12  # of the digest, which identify a key that is not in the keys file
FILE_MODE = 0o600
MAX_LABEL_CHARS = 64
_CHARACTERS = string.ascii_letters + string.digits
# A key of ours, its prefix apart; or anything else that begins like one
_KEY_LIKE = re.compile(
    rf"({KEY_MARK}[A-Za-z0-9]{{{NUM_ID_CHARS}}})[A-Za-z0-9]{{{NUM_SECRET_CHARS}}}[\w-]*|\b{KEY_MARK}[\w-]+", re.ASCII
)
_PLAIN_SUBJECT = re.compile(r"[A-Za-z0-9_.@|:+/-]{1,64}")
_AGE = re.compile(r"(\d{1,5})\s*(d|h|min)")
_AGE_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "min": timedelta(minutes=1)}


class Scope(StrEnum):
    """What a caller may do."""

    INFERENCE = "inference"  # generate, tokenize, list models, cancel its tenant's requests
    USAGE = "usage"  # read its tenant's usage
    METRICS = "metrics"  # read the server's metrics, of all tenants
    ADMIN = "admin"  # see and control the server, for all tenants; includes metrics


ALL_SCOPES = frozenset(Scope)
COMMON_SCOPES = (Scope.INFERENCE, Scope.USAGE)  # without a key that says otherwise


# The keys file.


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key in the keys file.

    Args:
        prefix: the key's beginning, which identifies it.
        sha256: of the whole key, in hex.
        expires: None: never.
        revoked: when; None: it is not.
    """

    prefix: str
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: str
    created: datetime
    label: str = ""
    scopes: tuple[Scope, ...] = COMMON_SCOPES
    expires: datetime | None = None
    revoked: datetime | None = None

    def public(self, now: datetime) -> "ShownKey":
        told = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "sha256"}
        return ShownKey(**told, state=self.state(now))

    def state(self, now: datetime) -> Literal["valid", "revoked", "expired"]:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"


class ShownKey(msgspec.Struct, frozen=True, kw_only=True):
    """A KeyRecord without the digest, and with its state."""

    prefix: str
    tenant: str
    created: datetime
    label: str
    scopes: tuple[Scope, ...]
    expires: datetime | None
    revoked: datetime | None
    state: Literal["valid", "revoked", "expired"]


class _KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    keys: tuple[KeyRecord, ...]


def mask_keys(text: str) -> str:
    """The text with `***` for whatever looks like a key, except for the prefix that `keys list` shows.

    A text that hides a key by percent-encoding is returned decoded.
    """
    plain = unquote(text)
    return _KEY_LIKE.sub(lambda found: f"{found[1] or KEY_MARK}***", plain) if _KEY_LIKE.search(plain) else text


def expiry_value(text: str, now: datetime) -> datetime:
    """`90d`, `12h`, `30min` from now, or a date, or a date and time; UTC by default. Raises BadValueError."""
    expected = "such as 90d, 12h, 30min, 2030-01-31 or 2030-01-31T12:00:00Z, and in the future"
    when = read_moment(text, now, 1, expected)
    if when <= now:
        raise BadValueError(expected)
    return when.astimezone(UTC).replace(microsecond=0)


def read_moment(text: str, now: datetime, sign: int, expected: str) -> datetime:
    """A date, or an age before now (sign -1) or after it (1). Raises BadValueError, with `expected`."""
    try:
        if (match := _AGE.fullmatch(text.strip())) is not None:
            return now + sign * int(match[1]) * _AGE_UNITS[match[2]]
        when = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError) as error:
        raise BadValueError(expected) from error
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def label_value(text: str) -> str:
    """A key's label. Raises BadValueError."""
    if len(text) > MAX_LABEL_CHARS or not text.isprintable():
        raise BadValueError(f"at most {MAX_LABEL_CHARS} printable characters, in one line")
    return text


def tenant_value(name: str | None, tenants: Iterable[Tenant]) -> str:
    """The name of one of these, or of the only one. Raises BadValueError."""
    known = [tenant.name for tenant in tenants] or [LOCAL_NAME]
    if name not in known and (name is not None or len(known) > 1):
        raise BadValueError(f"one of {', '.join(known)}{did_you_mean(name or '', known)}")
    return name or known[0]


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Raises StartupError: the file is missing, unreadable, or not a keys file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_KeysFile).keys
    except FileNotFoundError as error:
        cause, fix = f"the keys file {path} does not exist", f"steploop keys create --keys-file {path} --tenant NAME"
        raise StartupError(cause, fix) from error
    except OSError as error:
        cause = f"the keys file {path} cannot be read: {error.strerror}"
        raise StartupError(cause, readable_fix(path)) from error
    except msgspec.DecodeError as error:
        fix = "take it from a backup, or move it away and create the keys again: steploop keys create"
        raise StartupError(f"{path} is not a keys file: {error}", fix) from error


def create_key(path: Path, now: datetime, tenant: str, **terms: Any) -> tuple[str, KeyRecord]:
    """Make a key and add its record to the file, which is made if missing. Raises StartupError.

    Args:
        terms: label, scopes and expires of the record.

    Returns: the key, which cannot be shown again, and its record.
    """
    key = KEY_MARK + "".join(secrets.choice(_CHARACTERS) for _ in range(NUM_ID_CHARS + NUM_SECRET_CHARS))
    digest, prefix = sha256(key.encode()).hexdigest(), key[: len(KEY_MARK) + NUM_ID_CHARS]
    record = KeyRecord(prefix=prefix, sha256=digest, tenant=tenant, created=now.replace(microsecond=0), **terms)
    with _locked(path):
        _write(path, (*(read_keys(path) if path.exists() else ()), record))
    return key, record


def revoke_key(path: Path, prefix: str, now: datetime) -> KeyRecord:
    """Mark a key as revoked, by its prefix or the whole key; its record stays. Raises StartupError."""
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
    """No other process changes the file meanwhile. Raises StartupError if the system refuses to write it."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)  # releases the lock
    except OSError as error:
        fix = f"choose a file in a directory that you may write in: --keys-file FILE, now {path}"
        cause = f"the keys file {path} cannot be written: {error.strerror}"
        raise StartupError(cause, fix) from error


def _write(path: Path, keys: tuple[KeyRecord, ...]) -> None:
    """Replace the file whole: readers, and a crash, find the old one or the new one."""
    data = msgspec.json.format(msgspec.json.encode(_KeysFile(1, keys)), indent=1) + b"\n"
    owner = os.stat(path if path.exists() else path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            if os.geteuid() == 0:  # the server that reads it may run as another user
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


# Who may call.


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Args:
        key_id: the prefix of its key, or of the digest of a key that is not in the keys file; or of a JWT, its subject:
            see subject_id. Tenant.key_limits apply to it. None: it sent neither.
        digest: of its key.
        subject: of its JWT; empty: it has none.
        is_background: nobody waits for its answers, so it has the lowest class.
        network: on an open server, the address it came from; of IPv6, the /64.
    """

    tenant: Tenant
    scopes: frozenset[Scope] = ALL_SCOPES
    key_id: str | None = None
    network: str | None = field(default=None, compare=False)
    digest: bytes | None = field(default=None, compare=False, repr=False)
    subject: str | None = None
    is_background: bool = False

    def priority_of(self, asked: int | None) -> int:
        """Request.priority, from the priority in the request, or None."""
        return LOWEST_CLASS if self.is_background else self.tenant.priority_of(asked)

    @property
    def sharing_name(self) -> str:
        """The name under which it shares capacity with others."""
        return self.tenant.name if self.network is None else f"{self.tenant.name} {self.network}"

    def check_scope(self, scope: Scope) -> None:
        """Raises ServiceError (permission)."""
        if scope not in self.scopes and not (scope is Scope.METRICS and Scope.ADMIN in self.scopes):
            has = ", ".join(sorted(self.scopes)) or "none"
            message = f"This needs the right {scope.value!r}; you have: {has}. Ask the operator for a key with it."
            raise ServiceError(ErrorKind.PERMISSION, message, "permission_denied")

    def told(self, error: ServiceError) -> ServiceError:
        """The error as this caller may see it."""
        if error.for_operator is None or Scope.ADMIN not in self.scopes:
            return error
        return ServiceError(error.kind, error.for_operator, error.code, error.param, error.retry_after_s)


LOCAL_CALLER = Caller(LOCAL)


@lru_cache(maxsize=1024)
def _local(network: str | None) -> Caller:
    """LOCAL_CALLER, from there."""
    return replace(LOCAL_CALLER, network=network)


class KeyOrigin(StrEnum):
    """Where a key is configured."""

    ENVIRONMENT = "environment"
    TENANTS = "tenants"  # key_sha256 of [[tenants]]
    FILE = "file"  # the keys file


@dataclass(frozen=True, slots=True)
class KnownKey:
    """
    Args:
        tenant: its name; of a key of the environment, perhaps one that is not configured: LOCAL.
        key_id: see Caller.
        expires_s: unix time; None: never.
    """

    tenant: str
    scopes: frozenset[Scope]
    key_id: str
    origin: KeyOrigin
    expires_s: float | None = None
    is_revoked: bool = False

    def is_expired(self, unix_s: float) -> bool:
        return self.expires_s is not None and self.expires_s <= unix_s


class Stated(NamedTuple):
    """The callers that an invalid configuration still names. A field is None if it is unreadable.

    Args:
        tenants: names in [[tenants]].
        certificates: their names there.
        digests: of valid keys, by the place where they are configured.
    """

    tenants: Set[str] | None
    certificates: Set[tuple[str, str]] | None
    digests: Mapping[KeyOrigin, Set[bytes] | None]


@dataclass(frozen=True, slots=True)
class Directory:
    """All known callers, as one value: a reload replaces it whole.

    Args:
        keys: by SHA-256, so that the time of a lookup reveals nothing about a key.
        certificates: names of tenants, by subjectAltName.
        is_open: no credentials are needed.
    """

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[bytes, KnownKey] = field(default_factory=dict)
    certificates: Mapping[tuple[str, str], str] = field(default_factory=dict)
    is_open: bool = True

    def has_revoked(self, caller: Caller) -> bool:
        """Whether its credentials have been revoked since; a key that has expired since was valid for its request."""
        if caller.digest is not None:
            known = self.keys.get(caller.digest)
            return known is None or known.is_revoked
        return caller.tenant.name not in self.tenants and caller.tenant != LOCAL

    def without(self, stated: Stated) -> "Directory":
        """A directory without callers that are no longer configured; itself if all are."""
        tenants = {name: one for name, one in self.tenants.items() if stated.tenants is None or name in stated.tenants}
        keys: dict[bytes, KnownKey] = {}
        for digest, known in self.keys.items():
            good = stated.digests.get(known.origin)
            if known.tenant in tenants or known.tenant not in self.tenants:
                keys[digest] = replace(known, is_revoked=known.is_revoked or (good is not None and digest not in good))
        certificates = {
            name: one
            for name, one in self.certificates.items()
            if one in tenants and (stated.certificates is None or name in stated.certificates)
        }
        found = replace(self, tenants=tenants, keys=keys, certificates=certificates)
        return self if found == self else found

    def num_valid_keys(self, unix_s: float) -> int:
        return sum(not (key.is_revoked or key.is_expired(unix_s)) for key in self.keys.values())


def make_directory(
    tenants: Sequence[Tenant], api_keys: Iterable[str] = (), records: Sequence[KeyRecord] | None = None
) -> Directory:
    """
    Args:
        api_keys: of the tenant `local`, with all scopes.
        records: of the keys file; None: there is none. Keys of unknown tenants are left out.
    """
    by_name = {tenant.name: tenant for tenant in tenants}
    if not tenants:
        by_name[LOCAL_NAME] = LOCAL
    keys: dict[bytes, KnownKey] = {}

    for key in api_keys:
        digest = sha256(key.encode()).digest()
        keys[digest] = KnownKey(LOCAL_NAME, ALL_SCOPES, digest.hex()[:NUM_ID_DIGITS], KeyOrigin.ENVIRONMENT)
    for tenant in tenants:
        for one in tenant.key_sha256:
            known = KnownKey(tenant.name, frozenset(COMMON_SCOPES), one[:NUM_ID_DIGITS], KeyOrigin.TENANTS)
            keys[bytes.fromhex(one)] = known
    for record in records or ():
        if record.tenant not in by_name:
            logger.warning("the key %s is of a tenant that is not configured: %s", record.prefix, record.tenant)
            continue
        expires_s = None if record.expires is None else record.expires.timestamp()
        granted = record.tenant, frozenset(record.scopes), record.prefix
        keys[bytes.fromhex(record.sha256)] = KnownKey(*granted, KeyOrigin.FILE, expires_s, record.revoked is not None)
    certificates = {certificate_name(text): tenant.name for tenant in tenants for text in tenant.certificates}
    return Directory(by_name, keys, certificates, is_open=not (tenants or keys or records is not None))


# From a request to its caller.


def way_value(text: str) -> str:
    """One of WAYS, or several joined by +. Raises BadValueError."""
    for way in text.split("+"):
        if way not in WAYS:
            raise BadValueError(f"of {', '.join(WAYS)}, or several of them joined by +{did_you_mean(way, WAYS)}")
    return text


class IssuerUnavailable(ServiceError):
    """A JWT cannot be checked now, because the issuer's keys are being fetched or cannot be fetched."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, message, "issuer_unavailable", retry_after_s=retry_after_s)


def subject_id(subject: str) -> str:
    """Caller.key_id of a JWT: its subject, or a digest of a subject that logs cannot show unchanged."""
    if _PLAIN_SUBJECT.fullmatch(subject):
        return f"sub:{subject}"
    return f"sub:sha256:{sha256(subject.encode(errors='replace')).hexdigest()[:NUM_ID_DIGITS]}" if subject else "sub:"


class Authenticator:
    """Identifies the caller of each request.

    Args:
        ways: some of WAYS, in order: the first that a request uses decides. Ways joined by + must be used together,
            and name one tenant.
        unix_clock: seconds.

    Attributes:
        directory: replaced by a reload.
        verifier: of JWTs, also replaced by a reload; None: JWTs are refused.
    """

    def __init__(self, directory: Directory, unix_clock: Callable[[], float], ways: Sequence[str] = WAYS) -> None:
        self.directory = directory
        self.verifier: JwtVerifier | None = None
        self._unix_clock = unix_clock
        self._combinations = [tuple(way.split("+")) for way in ways]

    def identify(
        self, request: HttpRequest, certificate: ClientCertificate | None, network: str | None = None
    ) -> Caller:
        """
        Args:
            network: that the request came from (Peer.network).

        Raises:
            ServiceError: authentication: credentials are missing, unknown or no longer valid; unavailable: they cannot
                be checked now.
        """
        if self.directory.is_open:
            return _local(network)
        for ways in self._combinations:
            callers = [self._caller_by(way, request, certificate) for way in ways]
            present = [caller for caller in callers if caller is not None]
            if len(present) == len(callers):
                return _joined(present)
        raise _refusal(self._what_is_wanted())

    def again(self, tenant: str, digest: bytes | None, key_id: str | None, subject: str | None) -> Caller:
        """The caller of an earlier request, from its stored key and tenant.

        Raises:
            ServiceError: its key is no longer valid, or its tenant no longer exists.
        """
        if self.directory.is_open:
            return LOCAL_CALLER
        if digest is not None:
            return self._by_key(self.directory.keys.get(digest), digest)
        known = self.directory.tenants.get(tenant)
        if known is None:
            raise _refusal("The tenant of this request no longer exists. Ask the operator.")
        return Caller(known, frozenset(COMMON_SCOPES), key_id, subject=subject)

    def _what_is_wanted(self) -> str:
        missing = set() if self.directory.certificates else {CERTIFICATE}
        missing |= set() if self.verifier is not None else {JWT}
        possible = [ways for ways in self._combinations if not missing & set(ways)]
        if possible == [(KEY,)]:
            return "No API key was sent. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        wanted = "; or ".join(" together with ".join(_WANTED[way] for way in ways) for ways in possible)
        return f"The request has no credentials. Send {wanted}."

    def _caller_by(self, way: str, request: HttpRequest, certificate: ClientCertificate | None) -> Caller | None:
        """None: the request does not use this way."""
        if way == CERTIFICATE:
            return None if certificate is None else self._by_certificate(certificate)
        credential = _bearer_or_key(request)
        if credential is None:
            return None
        digest = sha256(credential).digest()
        known = self.directory.keys.get(digest)
        is_jwt = self.verifier is not None and looks_like_jwt(credential)
        if way == JWT:
            return self._by_jwt(self.verifier, credential) if is_jwt and self.verifier is not None else None
        return None if known is None and is_jwt else self._by_key(known, digest)

    def _by_key(self, known: KnownKey | None, digest: bytes) -> Caller:
        if known is None:
            raise _refusal("The API key is not valid. Check it, or ask the operator for one.")
        if known.is_revoked:
            raise _refusal("The API key has been revoked. Ask the operator for another.")
        if known.is_expired(self._unix_clock()):
            raise _refusal("The API key has expired. Ask the operator for another.")
        tenant = self.directory.tenants.get(known.tenant, LOCAL)
        return Caller(tenant, known.scopes, known.key_id, digest=digest)

    def _by_jwt(self, verifier: JwtVerifier, token: bytes) -> Caller:
        try:
            name, subject = verifier.names_of(token)
        except BadToken as error:
            raise _refusal(f"The JWT is not accepted. {error}") from error
        except KeysUnavailable as error:
            message = "The JWT cannot be verified, because the issuer's keys cannot be fetched. Try again soon."
            raise IssuerUnavailable(message, error.retry_after_s) from error
        tenant = self.directory.tenants.get(name)
        if tenant is None:
            raise _refusal("The JWT names an unknown tenant. Ask the operator.")
        return Caller(tenant, frozenset(COMMON_SCOPES), subject_id(subject), subject=subject)

    def _by_certificate(self, certificate: ClientCertificate) -> Caller | None:
        """None: it names no tenant; perhaps only the connection requires it."""
        found = (self.directory.certificates.get(name) for name in certificate.names)
        tenants = dict.fromkeys(name for name in found if name is not None)
        if len(tenants) > 1:
            raise _refusal(
                f"The client certificate names several tenants: {', '.join(tenants)}. Use one certificate per tenant."
            )
        return next((Caller(self.directory.tenants[name], frozenset(COMMON_SCOPES)) for name in tenants), None)


def _joined(callers: Sequence[Caller]) -> Caller:
    """Several credentials together allow only what each of them allows."""
    first = callers[0]
    if any(caller.tenant.name != first.tenant.name for caller in callers):
        raise _refusal("The API key and the client certificate belong to different tenants. Send a matching pair.")
    scopes = frozenset.intersection(*(caller.scopes for caller in callers))
    named = next((caller for caller in callers if caller.key_id is not None), first)
    return replace(named, scopes=scopes)


def _bearer_or_key(request: HttpRequest) -> bytes | None:
    authorization = _only_field(request, b"authorization")
    if authorization is not None and authorization[:7].lower() == b"bearer ":
        return authorization[7:].strip()
    return _only_field(request, b"x-api-key")


def _only_field(request: HttpRequest, name: bytes) -> bytes | None:
    """Raises if there are several that differ: a proxy in front may have checked another one."""
    values = {value for key, value in request.headers if key == name}
    if len(values) > 1:
        raise _refusal(f"The request has several {name.decode()} headers with different values. Send one.")
    return values.pop() if values else None


def _refusal(message: str) -> ServiceError:
    return ServiceError(ErrorKind.AUTHENTICATION, message, "invalid_api_key")
