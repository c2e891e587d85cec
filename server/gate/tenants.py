"""Tenants: the limits, deadlines and rights of each, from [[tenants]] of the TOML file. Frozen; any thread."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from core.context_policy import Policy
from core.errors import ErrorKind, ServiceError, StartupError
from server.gate.text_rules import TextRule, check_rules

LOCAL_NAME = "local"  # the only tenant where none are configured
CLASSES = {"interactive": 1, "standard": 0, "batch": -1}  # class -> Request.priority: higher goes first
SAMPLE = '[[tenants]] with name = "acme" and, below it, limits = { tokens_per_minute = 100_000 }'
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
# The kinds of subjectAltName that can name a tenant, as they are written here and as ssl has them
_NAME_KINDS = {"DNS": "DNS", "URI": "URI", "EMAIL": "email", "IP": "IP Address"}

T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Money = Annotated[float, msgspec.Meta(ge=1e-6, le=10**9)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Milliseconds = Annotated[float, msgspec.Meta(ge=1, le=MAX_DEADLINE_MS)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """None: unlimited.

    Args:
        burst_requests, burst_tokens: the most at once after a quiet time; None: those of a minute.
        tokens_per_day, tokens_per_month: of a calendar day and month, UTC.
        money_per_day, money_per_month: likewise, in the currency of [prices].
    """

    requests_per_minute: _Count | None = None
    burst_requests: _Count | None = None
    tokens_per_minute: _Count | None = None
    burst_tokens: _Count | None = None
    tokens_per_day: _Count | None = None
    tokens_per_month: _Count | None = None
    money_per_day: _Money | None = None
    money_per_month: _Money | None = None
    concurrent_requests: _Count | None = None

    def __post_init__(self) -> None:
        for burst, rate in (("burst_requests", "requests_per_minute"), ("burst_tokens", "tokens_per_minute")):
            if getattr(self, burst) is not None and getattr(self, rate) is None:
                raise ValueError(f"{burst} also needs {rate}")


class DeadlineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant's deadlines; None: the server's."""

    ttft_ms: _Milliseconds | None = None
    inter_token_ms: _Milliseconds | None = None
    total_ms: _Milliseconds | None = None


_SERVERS = DeadlineTable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a request may take, in seconds; infinite: unlimited. Generation enforces them.

    Args:
        ttft_s, total_s: from the request's head to the first token, and to the end.
        inter_token_s: from one token of an answer to the next, without pauses for a slow reader.
        asked: names of those that the request itself sets.
    """

    ttft_s: float = math.inf
    inter_token_s: float = math.inf
    total_s: float = math.inf
    asked: frozenset[str] = frozenset()

    def replaced_by(self, table: DeadlineTable) -> "Deadlines":
        """With a tenant's own in place of the server's."""
        if table == _SERVERS:
            return self
        own = {f"{name}_s": getattr(table, f"{name}_ms") for name in ("ttft", "inter_token", "total")}
        return Deadlines(**{name: getattr(self, name) if ms is None else ms / 1e3 for name, ms in own.items()})

    def narrowed_by(self, asked: "Deadlines") -> "Deadlines":
        """The shorter of each: its own, and the request's."""
        if asked is ANY_TIME:
            return self
        names = ("ttft_s", "inter_token_s", "total_s")
        shorter = frozenset(name for name in names if math.inf > getattr(asked, name) <= getattr(self, name))
        return Deadlines(asked=shorter, **{name: min(getattr(self, name), getattr(asked, name)) for name in names})

    def left_after(self, used_s: float) -> dict[str, int]:
        """As a request sets them, once some of the time has been used."""
        left_s = {
            "ttft_ms": self.ttft_s - used_s,
            "inter_token_ms": self.inter_token_s,
            "total_ms": self.total_s - used_s,
        }
        return {name: max(1, round(1e3 * one)) for name, one in left_s.items() if one < math.inf}

    def exceeded(self, name: str, is_callers_fault: bool = False) -> ServiceError:
        """The error for a request that has passed the deadline of this name."""
        what = {
            "total_s": f"The answer was not complete after {self.total_s:g} s",
            "ttft_s": f"No token came within {self.ttft_s:g} s",
            "inter_token_s": f"The next token did not come within {self.inter_token_s:g} s",
        }[name]
        message = f"{what}, the request's deadline. Allow more time, request less, or try when the server is less busy."
        error_type = ServiceError if is_callers_fault or name in self.asked else OwnDeadlineExceeded
        return error_type(ErrorKind.DEADLINE_EXCEEDED, message, "deadline_exceeded")


ANY_TIME = Deadlines()


class OwnDeadlineExceeded(ServiceError):
    """Whether the server missed its operator's deadline, not one that the client set."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"tenant_class": "class"}):
    """One tenant.

    Args:
        limits: of all its requests together.
        key_limits: of each of its keys, besides the tenant's.
        tenant_class: of CLASSES.
        share: of engine time, relative to the other tenants of its class: 2 gets twice what 1 gets.
        deadlines: of its requests, in place of the server's.
        text_rules: what its prompts and answers must not contain.
        models: that it may use; None: all.
        context_policy: what is removed from prompts that do not fit, unless a request sets it.
        cache_domain: tenants of one domain share cached prefixes; None: shared with no other tenant.
        cached_token_discount: percent of a cached prompt token that does not count against the limits.
        certificates: names in client certificates that identify this tenant: "DNS:router.example".
        key_sha256: of keys that are not in the keys file, in hex.
    """

    name: _Name
    limits: Limits = Limits()
    key_limits: Limits = Limits()
    tenant_class: str = "standard"
    share: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    deadlines: DeadlineTable = DeadlineTable()
    text_rules: tuple[TextRule, ...] = ()
    models: tuple[str, ...] | None = None
    context_policy: Policy = Policy.ERROR
    cache_domain: _Name | None = None
    cached_token_discount: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    certificates: tuple[str, ...] = ()
    key_sha256: tuple[_Digest, ...] = ()

    def __post_init__(self) -> None:
        if self.tenant_class not in CLASSES:
            raise ValueError(f"class is {self.tenant_class!r}, but must be one of {', '.join(CLASSES)}")
        for text in self.certificates:
            certificate_name(text)

    def priority_of(self, asked: int | None) -> int:
        """Request.priority, from the priority in the request, or None: at most the tenant's class.

        Where no tenants are configured, clients choose freely.
        """
        own = CLASSES[self.tenant_class]
        if asked is None:
            return own
        return asked if self.name == LOCAL_NAME else min(asked, own)

    @property
    def cache_salt_domain(self) -> str:
        """Request.cache_domain: a tenant's own never equals another's, whatever domains are named."""
        return f"tenant:{self.name}" if self.cache_domain is None else f"domain:{self.cache_domain}"


LOCAL = Tenant(name=LOCAL_NAME)


def certificate_name(text: str) -> tuple[str, str]:
    """A name of a certificate, as ClientCertificate.names has it. Raises ValueError."""
    kind, colon, value = text.partition(":")
    if not colon or not value or kind.upper() not in _NAME_KINDS:
        raise ValueError(f"{text!r} in certificates must be DNS:, URI:, email: or IP: followed by a name")
    return _NAME_KINDS[kind.upper()], value


def parse_tenants(tables: Any, path: Path) -> tuple[Tenant, ...]:
    """[[tenants]] of the TOML file at `path`. Raises StartupError, which names the tenant and the field."""
    if not isinstance(tables, list):
        raise StartupError(f"tenants in {path} is not a list of tables", SAMPLE)
    tenants = tuple(_parse_tenant(table, i, path) for i, table in enumerate(tables, 1))
    _refuse_duplicates([tenant.name for tenant in tenants], "two tenants named", path)
    names = [certificate_name(text) for tenant in tenants for text in tenant.certificates]
    _refuse_duplicates([f"{kind}:{value}" for kind, value in names], "two tenants with the certificate", path)
    _refuse_duplicates([digest for tenant in tenants for digest in tenant.key_sha256], "a duplicate key,", path)
    return tenants


def _parse_tenant(table: Any, number: int, path: Path) -> Tenant:
    try:
        tenant = msgspec.convert(table, Tenant)
    except msgspec.ValidationError as error:
        name = table.get("name") if isinstance(table, Mapping) else None
        cause = f"[[tenants]] number {number}{f', {name!r},' if isinstance(name, str) else ''} in {path}: {error}"
        raise StartupError(cause, _fix(str(error))) from error
    check_rules(tenant.text_rules, f"[[tenants]] number {number}, {tenant.name!r}, in {path}")
    return tenant


def _fix(error: str) -> str:
    """What to write instead: msgspec names the path of an unknown field, but not the known ones."""
    if "unknown field" not in error:
        return f"correct it, as in: {SAMPLE}"
    place = error.rpartition("`$")[2]
    kinds = {"limits": Limits, "deadlines": DeadlineTable, "text_rules": TextRule}
    kind = next((kind for name, kind in kinds.items() if name in place), Tenant)
    above = "; the server's own settings stand above the first [[tenants]]" if kind is Tenant else ""
    return f"known: {', '.join(kind.__struct_encode_fields__)}{above}"


def _refuse_duplicates(values: Sequence[str], what: str, path: Path) -> None:
    for value in values:
        if values.count(value) > 1:
            raise StartupError(f"{path} has {what} {value}", "remove one of them")


def stated_values(tables: Any, field: str, read: Callable[[str], T]) -> frozenset[T] | None:
    """The values of a field in [[tenants]] that are otherwise invalid; None: unknown, or there are none.

    A table without a name may be meant for any tenant: then nothing is known.

    Args:
        read: raises ValueError for a value that identifies nothing.
    """
    if not isinstance(tables, list) or not tables:
        return None
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in tables):
        return None
    stated = [one.get(field, []) for one in tables]
    texts = [text for one in stated for text in (one if isinstance(one, list) else [one])]
    if not all(isinstance(text, str) for text in texts):
        return None
    found = set()
    for text in texts:
        with contextlib.suppress(ValueError):
            found.add(read(text))
    return frozenset(found)
