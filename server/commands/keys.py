"""`steploop keys create|list|revoke`: manages the keys file. Thread: main."""

import argparse
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from core.errors import ExitCode, StartupError
from server.commands.command_line import given_value
from server.config import ServerConfig
from server.gate.identity import (
    COMMON_SCOPES,
    KeyRecord,
    Scope,
    create_key,
    expiry_value,
    label_value,
    read_keys,
    revoke_key,
    tenant_value,
)
from server.values import BadValueError, did_you_mean

RELOAD = "A running server applies this on SIGHUP: systemctl reload steploop, or kill -HUP and its process id."


def run(arguments: argparse.Namespace, config: ServerConfig) -> ExitCode:
    {"create": create, "list": print_keys, "revoke": revoke}[arguments.action](arguments, config, datetime.now(UTC))
    return ExitCode.OK


def create(arguments: argparse.Namespace, config: ServerConfig, now: datetime) -> None:
    """Create a key: stdout gets the key alone, stderr everything else.

    Raises:
        StartupError: an argument is invalid, or the file is not a keys file.
    """
    tenant, scopes = _tenant(arguments.tenant, config), _scopes(arguments.scope or list(COMMON_SCOPES))
    label, expires = given_value("--label", arguments.label, label_value, "ci"), None
    if arguments.expires is not None:
        expires = given_value("--expires", arguments.expires, partial(expiry_value, now=now), "90d")
    path = _keys_file(config)
    key, record = create_key(path, now, tenant, label=label, scopes=scopes, expires=expires)
    expiry = "never expires" if record.expires is None else f"expires {_shown(record.expires)}"
    _say(f"A key of {record.tenant} for {', '.join(record.scopes)}, which {expiry}. It is shown only now:")
    print(key, flush=True)
    _say(f"Kept in {path} as {record.prefix}. {RELOAD}")


def print_keys(arguments: argparse.Namespace, config: ServerConfig, now: datetime) -> None:
    """List the file's keys, the oldest first."""
    records = read_keys(_keys_file(config))
    if arguments.json:
        listed = [record.public(now) for record in records]
        print(msgspec.json.format(msgspec.json.encode(listed)).decode())
        return
    head = ("PREFIX", "TENANT", "STATE", "SCOPES", "CREATED", "EXPIRES", "LABEL")
    rows = [head, *(_row(record, now) for record in records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def revoke(arguments: argparse.Namespace, config: ServerConfig, now: datetime) -> None:
    """Raises StartupError: there is no such key."""
    record = revoke_key(_keys_file(config), arguments.prefix, now)
    _say(f"{record.prefix} of {record.tenant} is revoked. {RELOAD}")


def _keys_file(config: ServerConfig) -> Path:
    if config.keys_file is None:
        fix = "--keys-file FILE, STEPLOOP_KEYS_FILE=FILE or keys_file in the TOML file that --config names"
        raise StartupError("no keys file is named", fix, ExitCode.USAGE)
    return config.keys_file


def _tenant(name: str | None, config: ServerConfig) -> str:
    try:
        return tenant_value(name, config.tenants)
    except BadValueError as error:
        cause = "the configuration has several tenants: choose one by --tenant"
        if name is not None:
            cause = f"the configuration has no tenant {name!r}"
        where = f"--tenant, {error.expected}" if config.tenants else "--config FILE, the one with [[tenants]]"
        raise StartupError(cause, where, ExitCode.USAGE) from error


def _scopes(words: Iterable[str]) -> tuple[Scope, ...]:
    known = [scope.value for scope in Scope]
    for word in words:
        if word not in known:
            cause = f"unknown right {word!r}{did_you_mean(word, known)}"
            raise StartupError(cause, f"--scope {', --scope '.join(known)}", ExitCode.USAGE)
    return tuple(dict.fromkeys(map(Scope, words)))


def _row(record: KeyRecord, now: datetime) -> tuple[str, ...]:
    expires = "never" if record.expires is None else _shown(record.expires)
    scopes = ",".join(record.scopes)
    return record.prefix, record.tenant, record.state(now), scopes, _shown(record.created), expires, record.label


def _shown(when: datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%MZ")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
