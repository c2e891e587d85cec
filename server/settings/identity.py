"""How clients say who they are. Thread: main, at start; frozen after that."""

from dataclasses import dataclass
from pathlib import Path

from server.gate.cross_origin import origin_value
from server.gate.identity import WAYS, way_value
from server.gate.jwt import JwksUrl, jwks_source
from server.settings.option import Group
from server.values import file_value, secret_value, text_value

_SERVER = Group("server")


@dataclass(frozen=True)
class IdentitySettings:
    """How clients say who they are."""

    api_keys: tuple[str, ...] = _SERVER.setting(
        "api-key",
        (),
        secret_value,
        "KEY",
        "a key that clients must show; may be repeated. Other users of the machine can read flags: prefer"
        " STEPLOOP_API_KEY (several parted by commas)",
        is_list=True,
        is_secret=True,
    )
    keys_file: Path | None = _SERVER.setting(
        "keys-file",
        None,
        file_value,
        "FILE",
        "what steploop keys create, list and revoke keep of keys; the server reads it at start and on SIGHUP",
    )
    auth: tuple[str, ...] = _SERVER.setting(
        "auth",
        WAYS,
        way_value,
        "WAY",
        "how clients say who they are, in the order in which it is looked at: key, jwt, certificate, or two of"
        " one request as in certificate+key; may be repeated",
        show=", ".join,
        is_list=True,
    )
    jwks: Path | JwksUrl | None = _SERVER.setting(
        "jwks",
        None,
        jwks_source,
        "SOURCE",
        "public keys of who issues JWTs, as a JSON Web Key Set: a file, read again on SIGHUP, or an https URL",
    )
    jwt_issuer: str | None = _SERVER.setting("jwt-issuer", None, text_value, "TEXT", "what iss of a JWT must be")
    jwt_audience: str | None = _SERVER.setting(
        "jwt-audience", None, text_value, "TEXT", "what aud of a JWT must be, or have among others"
    )
    jwt_tenant_claim: str = _SERVER.setting(
        "jwt-tenant-claim", "tenant", text_value, "NAME", "the claim of a JWT that names one of [[tenants]]"
    )
    jwt_leeway_s: float = _SERVER.duration(
        "jwt-leeway", 30.0, (0, 600), "that the clocks here and at a JWT's issuer may be apart"
    )
    insecure: bool = _SERVER.switch(
        "insecure",
        "serve whoever reaches the port, without tenants, keys or client certificates, on addresses of other"
        " machines too",
    )
    cors_origins: tuple[str, ...] = _SERVER.setting(
        "cors-origin",
        (),
        origin_value,
        "ORIGIN",
        "pages of this origin, such as https://app.example.com, may ask from a browser; may be repeated; * for"
        " any, which lets every page that a user visits ask where no key is needed (default: none)",
        is_list=True,
    )
