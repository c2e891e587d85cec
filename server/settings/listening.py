"""Where connections come in, what is ahead of HTTP, who may come. Thread: main, at start; frozen after that."""

from dataclasses import dataclass
from pathlib import Path

from server.listening.clients import FORWARDED, X_FORWARDED_FOR, IpNetwork, network_value, proxy_value
from server.listening.sockets import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_UNIX_MODE,
    Bind,
    bind_value,
    format_unix_mode,
    unix_mode_value,
)
from server.settings.option import Group
from server.values import choice_of, existing_file, text_value

NO_HEADER = "none"

_SERVER = Group("server")


@dataclass(frozen=True)
class ListeningSettings:
    """Where connections come in, what is ahead of HTTP on them, and who may come."""

    host: str = _SERVER.setting(
        "host", DEFAULT_HOST, text_value, "ADDRESS", "address to listen on; 0.0.0.0 or :: for all"
    )
    port: int = _SERVER.count("port", DEFAULT_PORT, (0, 65_535), "0 takes a free one", "PORT")
    binds: tuple[Bind, ...] = _SERVER.setting(
        "bind",
        (),
        bind_value,
        "WHERE",
        "listen there, instead of on the default address or beside the --host and --port given; may be"
        " repeated. HOST:PORT, [IPV6]:PORT, unix:PATH, or systemd:NAME for sockets passed by systemd (which are"
        " served in any case). With proxy: before it, a PROXY protocol v2 header comes first; with plain:, it is"
        " in the clear in spite of --tls-cert",
        is_list=True,
    )
    unix_mode: int = _SERVER.setting(
        "unix-mode",
        DEFAULT_UNIX_MODE,
        unix_mode_value,
        "MODE",
        "permissions of the files of Unix sockets",
        show=format_unix_mode,
    )
    tls_cert: Path | None = _SERVER.setting(
        "tls-cert",
        None,
        existing_file,
        "FILE",
        "PEM certificate with its chain: https instead of http; read again on SIGHUP",
    )
    tls_key: Path | None = _SERVER.setting(
        "tls-key", None, existing_file, "FILE", "PEM key, where it is not in the certificate's file"
    )
    tls_client_ca: Path | None = _SERVER.setting(
        "tls-client-ca",
        None,
        existing_file,
        "FILE",
        "PEM certificates of those who sign clients' certificates, and lists of what they have revoked: clients are"
        " asked for theirs; read again on SIGHUP",
    )
    tls_client_auth: str | None = _SERVER.setting(
        "tls-client-auth",
        None,
        choice_of("optional", "required"),
        "MODE",
        "optional or required: whether clients must show a certificate (default with --tls-client-ca: required)",
    )
    trusted_proxies: tuple[IpNetwork | str, ...] = _SERVER.setting(
        "trusted-proxies",
        (),
        proxy_value,
        "NETWORK",
        "proxies that may say for whom they speak; unix: whoever connects to a Unix socket; may be repeated",
        is_list=True,
    )
    forwarded_header: str = _SERVER.setting(
        "forwarded-header",
        X_FORWARDED_FOR,
        choice_of(X_FORWARDED_FOR, FORWARDED, NO_HEADER),
        "NAME",
        f"in which they say it, the one that they set themselves: {X_FORWARDED_FOR}, {FORWARDED} or {NO_HEADER}",
    )
    h2c_upgrade: bool = _SERVER.switch(
        "h2c-upgrade",
        "let HTTP/1.1 clients upgrade to HTTP/2 in the clear. Not behind a proxy: one that hands the upgrade on no"
        " longer sees what its clients ask for. HTTP/2 by prior knowledge or ALPN needs no switch",
    )
    allow: tuple[IpNetwork, ...] = _SERVER.setting(
        "allow", (), network_value, "NETWORK", "only clients from there are served; may be repeated", is_list=True
    )
    deny: tuple[IpNetwork, ...] = _SERVER.setting(
        "deny",
        (),
        network_value,
        "NETWORK",
        "clients from there are not served, allowed or not; may be repeated",
        is_list=True,
    )
