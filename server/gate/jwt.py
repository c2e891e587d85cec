"""JSON Web Tokens of a trusted issuer: its keys, and which tenant a token names. Thread: loop.

Strict where attacks have been (RFC 8725): only signatures by a public key that we hold, of three algorithms; a header
that points to other keys, or lists extensions that must be understood, is refused.

The keys come from a file or a URL. A URL is fetched on another thread: at start, when the keys have grown old, and when
a token names a key that is unknown. While the fetch fails, the old keys stay valid for MAX_AGE_S; without any, callers
are told to come back.
"""

import logging
import urllib.parse
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import orjson

from core.errors import StartupError
from server.values import BadValueError, existing_file

if TYPE_CHECKING:
    import asyncio

    from joserfc.jwk import Key

logger = logging.getLogger(__name__)

MAX_TOKEN_BYTES = 8192
ALGORITHMS = {"RS256": "RSA", "ES256": "EC", "EdDSA": "OKP", "Ed25519": "OKP"}  # with their keys' types
_KEY_TYPES = ("RSA", "EC", "OKP")  # never oct: with a shared secret, whoever checks tokens could sign them
_REFUSED_FIELDS = ("crit", "jku", "jwk", "x5u", "x5c")
REFRESH_S = 300.0
RETRY_S = 10.0  # between attempts, whatever caused them: a stranger's key ids must not make us ask more often
KEY_WAIT_S = 2.0  # that a request may wait for a fetch
FETCHING_S = 1.0  # what a fetch usually takes at most
MAX_AGE_S = 86_400.0
FETCH_TIMEOUT_S = 5.0
MAX_JWKS_BYTES = 1024 * 1024
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class BadToken(Exception):
    """The token is not valid; the message tells its sender why."""


class KeysUnavailable(Exception):
    """The issuer's keys were never fetched, or too long ago."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class JwksUrl(str):
    """Where an issuer publishes its keys."""

    __slots__ = ()


def jwks_source(text: str) -> Path | JwksUrl:
    """An existing file, or a URL: https, or http on this machine. Raises BadValueError."""
    if "://" not in text:
        return existing_file(text)
    parts = urllib.parse.urlsplit(text)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise BadValueError("a file or an https URL")
    return JwksUrl(text)


def parse_jwks(data: bytes) -> "Mapping[str | None, Key]":
    """The signing keys by id; None: a single key, which a token need not name.

    Raises:
        ValueError: it is not a JSON Web Key Set, or has no usable key.
    """
    from joserfc.errors import JoseError
    from joserfc.jwk import import_key

    document = orjson.loads(data)
    found = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise ValueError("it has no list of keys")
    keys: dict[str | None, Key] = {}
    for one in found:
        if not isinstance(one, dict) or one.get("kty") not in _KEY_TYPES or one.get("use", "sig") != "sig":
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about names and sizes, which the issuer chooses
                keys[one.get("kid")] = import_key(one)
        except (JoseError, ValueError, TypeError, KeyError) as error:  # KeyError: an unknown curve
            logger.warning("a key of the JWKS cannot be used: %s: %s", one.get("kid"), error)
    if len(keys) > 1:
        keys.pop(None, None)
    if not keys:
        raise ValueError("it has no key that can check signatures")
    if len(keys) == 1:
        keys[None] = next(iter(keys.values()))
    return keys


class KeySource:
    """The issuer's keys. Raises StartupError if they are in a file that is not usable.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, source: Path | JwksUrl, clock: Callable[[], float]) -> None:
        self._keys: Mapping[str | None, Key] = {} if isinstance(source, JwksUrl) else _read_file(source)
        self._fetching: asyncio.Future[bytes] | None = None
        self._has_failed = False  # the last fetch
        self._source = source
        self._clock = clock
        self._fetched_s: float | None = None
        self._tried_s: float | None = None

    def find(self, key_id: str | None) -> "Key | None":
        """The key of that id; None: the issuer had none RETRY_S ago or later.

        Raises:
            KeysUnavailable: which keys are valid is not known, or whether the issuer has a new one of that id.
        """
        key = self._keys.get(key_id)
        if not isinstance(self._source, JwksUrl):
            return key
        age_s = MAX_AGE_S if self.age_s is None else self.age_s
        if key is None or age_s >= REFRESH_S:
            self.refresh()
        if age_s >= MAX_AGE_S or (key is None and (self.is_fetching or self._has_failed)):
            raise KeysUnavailable(FETCHING_S if self.is_fetching else self._next_try_s())
        return key

    @property
    def age_s(self) -> float | None:
        """Since a URL's keys were fetched; None: they never were, or come from a file."""
        return None if self._fetched_s is None else self._clock() - self._fetched_s

    @property
    def is_fetching(self) -> bool:
        return self._fetching is not None

    async def wait_fetched(self, most_s: float) -> bool:
        """Whether the running fetch has ended by then; False also if none is running."""
        import asyncio

        if self._fetching is None:
            return False
        done, _ = await asyncio.wait([self._fetching], timeout=most_s)
        return bool(done)

    def refresh(self) -> None:
        """Start to fetch the URL's keys, unless that was tried within RETRY_S."""
        now_s = self._clock()
        if not isinstance(self._source, JwksUrl) or (self._tried_s is not None and now_s - self._tried_s < RETRY_S):
            return
        import asyncio  # 50 ms, which --help need not pay: the table of settings imports this module

        self._tried_s = now_s
        self._fetching = asyncio.get_running_loop().run_in_executor(None, _fetch, self._source)
        self._fetching.add_done_callback(self._on_fetched)

    def _next_try_s(self) -> float:
        return RETRY_S if self._tried_s is None else max(FETCHING_S, self._tried_s + RETRY_S - self._clock())

    def _on_fetched(self, fetched: "asyncio.Future[bytes]") -> None:
        self._fetching = None
        self._has_failed = True
        if fetched.cancelled():
            return
        try:
            self._keys = parse_jwks(fetched.result())
        except (OSError, ValueError) as error:
            is_usable = self.age_s is not None and self.age_s < MAX_AGE_S
            what = "the previous ones stay valid" if is_usable else "every JWT is refused"
            logger.error("the keys of %s cannot be fetched, %s: %s", self._source, what, error)
            return
        self._has_failed = False
        self._fetched_s = self._clock()


def _fetch(url: str) -> bytes:
    """Thread: any but the loop's."""
    import http.client
    import urllib.error
    import urllib.request

    class SameScheme(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
            if urllib.parse.urlsplit(newurl).scheme != req.type:
                told = f"it redirects to {newurl}: keys must not come unencrypted"
                raise urllib.error.HTTPError(newurl, code, told, headers, fp)
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    try:
        with urllib.request.build_opener(SameScheme).open(url, timeout=FETCH_TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_JWKS_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:  # closes its connection
            raise ValueError(str(error)) from None
    except http.client.HTTPException as error:
        raise ValueError(f"the server does not speak HTTP: {error!r}") from error
    if len(data) > MAX_JWKS_BYTES:
        raise ValueError(f"they are more than {MAX_JWKS_BYTES} bytes")
    return data


def _read_file(path: Path) -> "Mapping[str | None, Key]":
    try:
        return parse_jwks(path.read_bytes())
    except (OSError, ValueError) as error:
        fix = "--jwks with the issuer's JSON Web Key Set, RFC 7517"
        raise StartupError(f"{path} cannot be used: {error}", fix) from error


@dataclass(frozen=True, slots=True)
class JwtRules:
    """
    Args:
        tenant_claim: its value is a tenant's name.
        leeway_s: how far the issuer's clock may be off.
    """

    issuer: str
    audience: str
    tenant_claim: str = "tenant"
    leeway_s: float = 30.0


def looks_like_jwt(token: bytes) -> bool:
    return token.count(b".") == 2 and token.startswith(b"eyJ")  # {"...


class JwtVerifier:
    """Checks tokens by the rules, the issuer's keys and the time, in unix seconds."""

    def __init__(self, rules: JwtRules, source: KeySource, unix_clock: Callable[[], float]) -> None:
        self._rules = rules
        self._source = source
        self._unix_clock = unix_clock

    def names_of(self, token: bytes) -> tuple[str, str]:
        """The tenant that the token's claim names, and its subject; empty: it has none.

        Raises:
            BadToken: it is malformed, not signed by the issuer, or not meant for this server and time.
            KeysUnavailable: its signature cannot be checked.
        """
        if len(token) > MAX_TOKEN_BYTES:
            raise BadToken(f"It is longer than {MAX_TOKEN_BYTES} bytes.")
        claims = self._verified_claims(token)
        self._check_claims(claims)
        name, subject = claims.get(self._rules.tenant_claim), claims.get("sub", "")
        if not isinstance(name, str):
            raise BadToken(f"Its claim {self._rules.tenant_claim!r} names no tenant.")
        if not isinstance(subject, str):
            raise BadToken("Its claim 'sub' must be a string.")
        return name, subject

    def _verified_claims(self, token: bytes) -> dict[str, Any]:
        from joserfc import jwt
        from joserfc.errors import JoseError

        key, algorithm = self._key_for(token)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # EdDSA has a newer name (RFC 9864), but remains in use
                return jwt.decode(token, key, algorithms=[algorithm]).claims
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise BadToken("Its signature is invalid.") from error

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
            raise BadToken("The issuer has no key of its kid and algorithm.")
        return key, algorithm

    def _check_claims(self, claims: dict[str, Any]) -> None:
        rules, now_s = self._rules, self._unix_clock()
        audiences = claims.get("aud")
        if claims.get("iss") != rules.issuer:
            raise BadToken("It has another issuer (iss).")
        if rules.audience not in (audiences if isinstance(audiences, list) else [audiences]):
            raise BadToken("It has another audience (aud).")
        expires_s, begins_s = claims.get("exp"), claims.get("nbf", 0)
        if not (_is_time(expires_s) and _is_time(begins_s)):
            raise BadToken("Its exp must be a number, and so must its nbf if it has one.")
        if expires_s + rules.leeway_s <= now_s:
            raise BadToken("It has expired.")
        if begins_s - rules.leeway_s > now_s:
            raise BadToken("It is not valid yet (nbf).")


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
