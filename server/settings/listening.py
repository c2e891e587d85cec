"""Where connections come in, what is ahead of HTTP, who may come. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field
from pathlib import Path

from server.listening.binds import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_UNIX_MODE,
    Bind,
    bind_value,
    format_unix_mode,
    unix_mode_value,
)
from server.listening.forwarded import FORWARDED, X_FORWARDED_FOR
from server.listening.networks import IpNetwork, network_value, proxy_value
from server.settings.option import Setting
from server.values import choice_of, count_between, existing_file, text_value

NO_HEADER = "none"


@dataclass(frozen=True)
class ListeningSettings:
    """Where connections come in, what is ahead of HTTP on them, and who may come."""

    host: str = field(
        default=DEFAULT_HOST,
        metadata=Setting(
            name="host",
            parse=text_value,
            metavar="ADDRESS",
            help="address to listen on; 0.0.0.0 or :: for all",
            group="server",
        ),
    )
    port: int = field(
        default=DEFAULT_PORT,
        metadata=Setting(
            name="port", parse=count_between(0, 65_535), metavar="PORT", help="0 takes a free one", group="server"
        ),
    )
    binds: tuple[Bind, ...] = field(
        default=(),
        metadata=Setting(
            name="bind",
            parse=bind_value,
            metavar="WHERE",
            help="listen there, instead of on the default address or beside the --host and --port given; may be"
            " repeated. HOST:PORT, [IPV6]:PORT, unix:PATH, or systemd:NAME for sockets passed by systemd (which are"
            " served in any case). With proxy: before it, a PROXY protocol v2 header comes first; with plain:, it is"
            " in the clear in spite of --tls-cert",
            group="server",
            is_list=True,
        ),
    )
    unix_mode: int = field(
        default=DEFAULT_UNIX_MODE,
        metadata=Setting(
            name="unix-mode",
            parse=unix_mode_value,
            metavar="MODE",
            help="permissions of the files of Unix sockets",
            group="server",
            show=format_unix_mode,
        ),
    )
    tls_cert: Path | None = field(
        default=None,
        metadata=Setting(
            name="tls-cert",
            parse=existing_file,
            metavar="FILE",
            help="PEM certificate with its chain: https instead of http; read again on SIGHUP",
            group="server",
        ),
    )
    tls_key: Path | None = field(
        default=None,
        metadata=Setting(
            name="tls-key",
            parse=existing_file,
            metavar="FILE",
            help="PEM key, where it is not in the certificate's file",
            group="server",
        ),
    )
    tls_client_ca: Path | None = field(
        default=None,
        metadata=Setting(
            name="tls-client-ca",
            parse=existing_file,
            metavar="FILE",
            help="PEM certificates of those who sign clients' certificates: clients are asked for theirs; read again"
            " on SIGHUP",
            group="server",
        ),
    )
    tls_client_auth: str | None = field(
        default=None,
        metadata=Setting(
            name="tls-client-auth",
            parse=choice_of("optional", "required"),
            metavar="MODE",
            help="optional or required: whether clients must show a certificate (default with --tls-client-ca:"
            " required)",
            group="server",
        ),
    )
    trusted_proxies: tuple[IpNetwork | str, ...] = field(
        default=(),
        metadata=Setting(
            name="trusted-proxies",
            parse=proxy_value,
            metavar="NETWORK",
            help="proxies that may say for whom they speak; unix: whoever connects to a Unix socket; may be repeated",
            group="server",
            is_list=True,
        ),
    )
    forwarded_header: str = field(
        default=X_FORWARDED_FOR,
        metadata=Setting(
            name="forwarded-header",
            parse=choice_of(X_FORWARDED_FOR, FORWARDED, NO_HEADER),
            metavar="NAME",
            help=f"in which they say it, the one that they set themselves: {X_FORWARDED_FOR}, {FORWARDED} or"
            f" {NO_HEADER}",
            group="server",
        ),
    )
    allow: tuple[IpNetwork, ...] = field(
        default=(),
        metadata=Setting(
            name="allow",
            parse=network_value,
            metavar="NETWORK",
            help="only clients from there are served; may be repeated",
            group="server",
            is_list=True,
        ),
    )
    deny: tuple[IpNetwork, ...] = field(
        default=(),
        metadata=Setting(
            name="deny",
            parse=network_value,
            metavar="NETWORK",
            help="clients from there are not served, allowed or not; may be repeated",
            group="server",
            is_list=True,
        ),
    )
