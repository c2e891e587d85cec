"""JSON Web Tokens of an issuer that the operator trusts: from the token to the tenant that it names. Thread: loop.

Strict where attacks have been (RFC 8725): only signatures by a public key that we hold, of three algorithms; what a
header says of keys elsewhere, or of what must be understood, is refused.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from server.gate.jwks import KeySource

if TYPE_CHECKING:
    from joserfc.jwk import Key

MAX_TOKEN_BYTES = 8192
ALGORITHMS = {"RS256": "RSA", "ES256": "EC", "EdDSA": "OKP", "Ed25519": "OKP"}
_REFUSED_FIELDS = ("crit", "jku", "jwk", "x5u", "x5c")


class BadToken(Exception):
    """The token is not good; the message says why, fit for its sender."""


@dataclass(frozen=True, slots=True)
class JwtRules:
    """
    Args:
        tenant_claim: whose value is a tenant's name.
        leeway_s: that our clock and the issuer's may be apart.
    """

    issuer: str
    audience: str
    tenant_claim: str = "tenant"
    leeway_s: float = 30.0


def looks_like_jwt(token: bytes) -> bool:
    return token.count(b".") == 2 and token.startswith(b"eyJ")  # {"...


class JwtVerifier:
    """
    Args:
        unix_clock: seconds.
    """

    def __init__(self, rules: JwtRules, source: KeySource, unix_clock: Callable[[], float]) -> None:
        self._rules = rules
        self._source = source
        self._unix_clock = unix_clock

    def tenant_of(self, token: bytes) -> str:
        """The tenant of names_of."""
        return self.names_of(token)[0]

    def names_of(self, token: bytes) -> tuple[str, str]:
        """The tenant that the token's claim names, and its subject; empty: it has none.

        Raises:
            BadToken: it is malformed, not signed by a key of the issuer's, or not meant for here and now.
            KeysUnavailable: its signature cannot be checked.
        """
        if len(token) > MAX_TOKEN_BYTES:
            raise BadToken(f"It has more than {MAX_TOKEN_BYTES} bytes.")
        claims = self._verified_claims(token)
        self._check_claims(claims)
        name = claims.get(self._rules.tenant_claim)
        if not isinstance(name, str):
            raise BadToken(f"Its claim {self._rules.tenant_claim!r} names no tenant.")
        subject = claims.get("sub", "")
        if not isinstance(subject, str):
            raise BadToken("Its claim 'sub' must be a text.")
        return name, subject

    def _verified_claims(self, token: bytes) -> dict[str, Any]:
        from joserfc import jwt
        from joserfc.errors import JoseError

        key, algorithm = self._key_for(token)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # EdDSA has a newer name (RFC 9864), and goes on to be used
                return jwt.decode(token, key, algorithms=[algorithm]).claims
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise BadToken("Its signature is not good.") from error

    def _key_for(self, token: bytes) -> "tuple[Key, str]":
        from joserfc.errors import JoseError
        from joserfc.jws import extract_compact

        try:
            header = extract_compact(token).headers()
        except (JoseError, ValueError, TypeError) as error:
            raise BadToken("It is malformed.") from error
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise BadToken(f"Its algorithm must be one of {', '.join(ALGORITHMS)}.")
        if refused := [name for name in _REFUSED_FIELDS if name in header]:
            raise BadToken(f"Its header must not have {refused[0]}.")
        key = self._source.find(key_id) if key_id is None or isinstance(key_id, str) else None
        if key is None or key.key_type != ALGORITHMS[algorithm]:
            raise BadToken("The issuer has no such key.")
        return key, algorithm

    def _check_claims(self, claims: dict[str, Any]) -> None:
        rules, now_s = self._rules, self._unix_clock()
        audiences = claims.get("aud")
        if claims.get("iss") != rules.issuer:
            raise BadToken("It is of another issuer.")
        if rules.audience not in (audiences if isinstance(audiences, list) else [audiences]):
            raise BadToken("It is for another audience.")
        expires_s, begins_s = claims.get("exp"), claims.get("nbf", 0)
        if not (_is_time(expires_s) and _is_time(begins_s)):
            raise BadToken("It must say when it expires, as a number.")
        if expires_s + rules.leeway_s <= now_s:
            raise BadToken("It has expired.")
        if begins_s - rules.leeway_s > now_s:
            raise BadToken("It is not good yet.")


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
