"""Builds the gate (tenants, keys, quotas) from the configuration, and rebuilds it on SIGHUP. Thread: loop."""

import logging
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from core.errors import StartupError
from server.batches.store import Credential
from server.clock import Clock
from server.config import OPTIONS, ServerConfig
from server.gate.identity import (
    WAYS,
    Authenticator,
    Caller,
    Directory,
    IssuerUnavailable,
    KeyOrigin,
    Stated,
    make_directory,
    read_keys,
)
from server.gate.jwt import KEY_WAIT_S, JwtRules, JwtVerifier, KeySource
from server.gate.quota import S_NS, Moment, Quotas, Used
from server.gate.tenants import Tenant, certificate_name, stated_values
from server.ledger.usage import SAMPLE as PRICES_SAMPLE
from server.wire.messages import HttpRequest, Peer

logger = logging.getLogger(__name__)

MONTH_S = 31 * 86_400
# Fields of ServerConfig that a reload applies, beside the files of certificates and of JWTs' keys
RELOADED = ("tenants", "api_keys", "keys_file")
SILENT = ("origins", "warnings", "models", "own_models", *RELOADED)


class Gate:
    """The known callers and their quotas.

    Args:
        used: what the ledger has of the present day and month.

    Raises:
        StartupError: see jwt_rules and load_directory.
    """

    def __init__(self, config: ServerConfig, clock: Clock, used: Used | None = None) -> None:
        self._config = config
        self._in_force = config  # the last that was reloaded
        self._clock = clock
        self._jwt_rules = jwt_rules(config)
        self.authenticator = Authenticator(load_directory(config), clock.unix, config.auth)
        self._source = None if config.jwks is None else KeySource(config.jwks, clock.monotonic)
        self.authenticator.verifier = self._verifier(self._source)
        self.quotas = Quotas(
            lambda: Moment(round(clock.monotonic() * S_NS), int(clock.unix())), used, config.prices.cost_micro
        )

    def start(self) -> None:
        """Fetch the issuer's keys. The loop runs."""
        if self._source is not None:
            self._source.refresh()

    def _verifier(self, source: KeySource | None) -> JwtVerifier | None:
        """A verifier with the rules of the start: a reload changes the keys alone."""
        if source is None or self._jwt_rules is None:
            return None
        return JwtVerifier(self._jwt_rules, source, self._clock.unix)

    async def identify(self, request: HttpRequest, client: Peer) -> Caller:
        """The caller of a request. If the issuer may have a new key for its JWT, wait for it, KEY_WAIT_S at most.

        Raises:
            ServiceError: see Authenticator.identify.
        """
        identify = self.authenticator.identify
        try:
            return identify(request, client.certificate, client.network)
        except IssuerUnavailable:
            if self._source is None or not await self._source.wait_fetched(KEY_WAIT_S):
                raise
        return identify(request, client.certificate, client.network)

    def identify_again(self, credential: Credential) -> Caller:
        """The caller who made a batch, for one of its lines. Raises ServiceError: see Authenticator.again."""
        digest = None if credential.digest is None else bytes.fromhex(credential.digest)
        caller = self.authenticator.again(credential.tenant, digest, credential.key_id, credential.subject)
        return replace(caller, is_background=True)

    @property
    def directory(self) -> Directory:
        return self.authenticator.directory

    @property
    def jwks_age_s(self) -> float | None:
        return None if self._source is None else self._source.age_s

    @property
    def num_valid_keys(self) -> int:
        return self.directory.num_valid_keys(self._clock.unix())

    @property
    def is_shut(self) -> bool:
        """Callers must authenticate, and no credential is valid."""
        directory = self.directory
        has_credentials = self.num_valid_keys or directory.certificates or self._source is not None
        return not (directory.is_open or has_credentials)

    def check_exposure(self, exposed: Sequence[str]) -> None:
        """
        Args:
            exposed: addresses where other machines reach the server without a certificate.

        Raises:
            StartupError: there are some, callers are not authenticated, and --insecure is not given.
        """
        if not exposed or not self.directory.is_open:
            return
        if not self._config.insecure:
            raise StartupError(
                f"other machines can reach {', '.join(exposed)}, and callers are not authenticated",
                "set STEPLOOP_API_KEY, or --keys-file or [[tenants]] (docs/tenants.md), or --tls-client-ca; or"
                " --insecure, if everyone who can reach it may use it",
            )
        logger.warning("--insecure: anyone who can reach this port can use it")

    def prepare(self, config: ServerConfig) -> Callable[[], None]:
        """Read and check everything that a reload may change, without changing it yet.

        Returns: a function that puts it in force, and cannot fail.

        Raises:
            StartupError: the new configuration is invalid.
        """
        # A new CA or issuer takes effect at the next start, and so does not yet count as authentication
        directory = load_directory(of_callers(config, self._config))
        if directory.is_open and not self.directory.is_open:
            cause = "the new configuration has no tenants and no keys, and would let everyone in"
            raise StartupError(cause, "restart the server if that is what you want")

        source, jwks = self._source, self._config.jwks
        if isinstance(jwks, Path):  # a URL is fetched again; until then its old keys count
            source = KeySource(jwks, self._clock.monotonic)
        verifier = self._verifier(source)

        def apply() -> None:
            self.authenticator.directory, self._in_force = directory, config
            self.authenticator.verifier, self._source = verifier, source
            self.start()
            self.quotas.apply(directory)
            for name in _changed(self._config, config):
                logger.warning("%s has changed, which takes effect at the next start", name)
            logger.info("reloaded: tenants=%d keys=%d", len(config.tenants), len(directory.keys))

        return apply

    @property
    def keys_file(self) -> Path | None:
        return self._in_force.keys_file

    def take_keys(self) -> None:
        """Put the keys file in force as it is now; limits that were changed while serving stay.

        Raises:
            StartupError: it cannot be read.
        """
        assert self.keys_file is not None
        tenants = tuple(self.directory.tenants.values())
        self.authenticator.directory = make_directory(tenants, self._in_force.api_keys, read_keys(self.keys_file))

    def take_tenant(self, tenant: Tenant) -> None:
        """Put a tenant's new limits in force, until the configuration is read again.

        Raises:
            StartupError: see check_budgets.
        """
        check_budgets([tenant], self._config)
        tenants = {**self.directory.tenants, tenant.name: tenant}
        self.authenticator.directory = replace(self.directory, tenants=tenants)
        self.quotas.apply(self.directory)

    def revoke(self) -> None:
        """A reload has failed: revoke what the new files no longer name, as far as they can be read."""
        before = self.directory
        directory = before.without(self._stated())
        if directory is before:
            return
        self.authenticator.directory = directory
        now_s = self._clock.unix()
        num_keys = before.num_valid_keys(now_s) - directory.num_valid_keys(now_s)
        gone = sorted(before.tenants.keys() - directory.tenants.keys())
        logger.warning("revoked despite the failed reload: keys=%d tenants=%s", num_keys, ",".join(gone) or "-")

    def _stated(self) -> Stated:
        config = self._in_force
        good = None
        try:
            if config.keys_file is not None:
                records = read_keys(config.keys_file)
                good = {bytes.fromhex(one.sha256) for one in records if one.revoked is None}
        except StartupError as error:
            logger.error("keys revoked since the last reload stay valid: %s; %s", error.cause, error.fix)
        tables: Any = None
        try:
            if config.config_file is not None:
                tables = tomllib.loads(config.config_file.read_text(encoding="utf-8")).get("tenants")
        except (OSError, ValueError) as error:
            logger.error("tenants removed since the last reload stay valid: %s: %s", config.config_file, error)
        return Stated(
            tenants=stated_values(tables, "name", str),
            certificates=stated_values(tables, "certificates", certificate_name),
            digests={KeyOrigin.TENANTS: stated_values(tables, "key_sha256", bytes.fromhex), KeyOrigin.FILE: good},
        )


def of_callers(config: ServerConfig, others: ServerConfig) -> ServerConfig:
    """One configuration's callers, with the other settings of another."""
    return replace(others, **{name: getattr(config, name) for name in RELOADED})


def jwt_rules(config: ServerConfig) -> JwtRules | None:
    """Raises StartupError: of --jwks, --jwt-issuer and --jwt-audience some are given and some are not."""
    for value, flag in ((config.jwt_issuer, "--jwt-issuer"), (config.jwt_audience, "--jwt-audience")):
        if config.jwks is None and value is not None:
            cause = f"{flag} needs --jwks: without its keys every JWT is refused"
            raise StartupError(cause, "--jwks FILE, or the https URL of the issuer's keys")
        if config.jwks is not None and value is None:
            cause = f"--jwks needs {flag}: without it, tokens for other services could be accepted"
            raise StartupError(cause, f"{flag} TEXT")
    if config.jwt_issuer is None or config.jwt_audience is None:
        return None
    return JwtRules(config.jwt_issuer, config.jwt_audience, config.jwt_tenant_claim, config.jwt_leeway_s)


def load_directory(config: ServerConfig) -> Directory:
    """
    Raises:
        StartupError: the keys file cannot be read; or tenants have certificates, but clients are not asked for any; or
            --auth is given, but no credential is configured.
    """
    if config.tls_client_ca is None and (named := [one.name for one in config.tenants if one.certificates]):
        cause = f"the tenant {named[0]} has certificates, but the server does not request any from clients"
        raise StartupError(cause, "--tls-cert FILE --tls-client-ca FILE")
    check_budgets(config.tenants, config)
    records = None if config.keys_file is None else read_keys(config.keys_file)
    directory = make_directory(config.tenants, config.api_keys, records)
    directory = replace(directory, is_open=directory.is_open and config.jwks is None)
    if directory.is_open and config.auth != WAYS and config.tls_client_ca is None:
        cause = f"--auth {' --auth '.join(config.auth)}, but no credential is configured: everyone would be let in"
        fix = (
            "--keys-file, --jwks, or [[tenants]] with certificates and --tls-client-ca (docs/tenants.md); or no --auth"
        )
        raise StartupError(cause, fix)
    if not (directory.is_open or directory.keys or directory.certificates or config.jwks):
        logger.warning("no tenant has a key or certificate: every request will be refused")
    return directory


def check_budgets(tenants: Sequence[Tenant], config: ServerConfig) -> None:
    """Raises StartupError: a budget of money, and there are no prices; or of a month, and the ledger forgets sooner."""
    for tenant in tenants:
        for limits in (tenant.limits, tenant.key_limits):
            if (limits.money_per_day or limits.money_per_month) and not config.prices.by_model:
                cause = f"the tenant {tenant.name} has a money budget, but no model has a price"
                raise StartupError(cause, PRICES_SAMPLE)
            is_monthly = limits.tokens_per_month or limits.money_per_month
            if is_monthly and config.ledger is not None and config.ledger_keep_s < MONTH_S:
                cause = f"the tenant {tenant.name} has a monthly budget, but --ledger-keep is shorter"
                raise StartupError(cause, "--ledger-keep 31d, or more")


def _changed(old: ServerConfig, new: ServerConfig) -> list[str]:
    """Changed settings that take effect at the next start only."""
    names = (one.name for one in fields(ServerConfig) if one.name not in SILENT)
    shown = {one.field_name: one.name.replace("-", "_") for one in OPTIONS}
    return [shown.get(name, name) for name in names if getattr(old, name) != getattr(new, name)]
