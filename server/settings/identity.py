"""How clients say who they are. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field
from pathlib import Path

from server.gate.auth import WAYS, way_value
from server.gate.cross_origin import origin_value
from server.gate.jwks import JwksUrl, jwks_source
from server.settings.option import Setting
from server.values import duration_between, file_value, format_duration, secret_value, text_value, yes_or_no


@dataclass(frozen=True)
class IdentitySettings:
    """How clients say who they are."""

    api_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=Setting(
            name="api-key",
            parse=secret_value,
            metavar="KEY",
            help="a key that clients must show; may be repeated. Other users of the machine can read flags: prefer"
            " STEPLOOP_API_KEY (several parted by commas)",
            group="server",
            is_list=True,
            is_secret=True,
        ),
    )
    keys_file: Path | None = field(
        default=None,
        metadata=Setting(
            name="keys-file",
            parse=file_value,
            metavar="FILE",
            help="what steploop keys create, list and revoke keep of keys; the server reads it at start and on SIGHUP",
            group="server",
        ),
    )
    auth: tuple[str, ...] = field(
        default=WAYS,
        metadata=Setting(
            name="auth",
            parse=way_value,
            metavar="WAY",
            help="how clients say who they are, in the order in which it is looked at: key, jwt, certificate, or two of"
            " one request as in certificate+key; may be repeated",
            group="server",
            show=", ".join,
            is_list=True,
        ),
    )
    jwks: Path | JwksUrl | None = field(
        default=None,
        metadata=Setting(
            name="jwks",
            parse=jwks_source,
            metavar="SOURCE",
            help="public keys of who issues JWTs, as a JSON Web Key Set: a file, read again on SIGHUP, or an https URL",
            group="server",
        ),
    )
    jwt_issuer: str | None = field(
        default=None,
        metadata=Setting(
            name="jwt-issuer", parse=text_value, metavar="TEXT", help="what iss of a JWT must be", group="server"
        ),
    )
    jwt_audience: str | None = field(
        default=None,
        metadata=Setting(
            name="jwt-audience",
            parse=text_value,
            metavar="TEXT",
            help="what aud of a JWT must be, or have among others",
            group="server",
        ),
    )
    jwt_tenant_claim: str = field(
        default="tenant",
        metadata=Setting(
            name="jwt-tenant-claim",
            parse=text_value,
            metavar="NAME",
            help="the claim of a JWT that names one of [[tenants]]",
            group="server",
        ),
    )
    jwt_leeway_s: float = field(
        default=30.0,
        metadata=Setting(
            name="jwt-leeway",
            parse=duration_between(0, 600),
            metavar="TIME",
            help="that the clocks here and at a JWT's issuer may be apart",
            group="server",
            show=format_duration,
        ),
    )
    insecure: bool = field(
        default=False,
        metadata=Setting(
            name="insecure",
            parse=yes_or_no,
            metavar="BOOL",
            help="serve whoever reaches the port, without tenants, keys or client certificates, on addresses of other"
            " machines too",
            group="server",
            is_switch=True,
        ),
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata=Setting(
            name="cors-origin",
            parse=origin_value,
            metavar="ORIGIN",
            help="pages of this origin, such as https://app.example.com, may ask from a browser; may be repeated; * for"
            " any, which lets every page that a user visits ask where no key is needed (default: none)",
            group="server",
            is_list=True,
        ),
    )
