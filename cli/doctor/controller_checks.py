"""Checks of the settings of a controller."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pacekeeper.cli.doctor.agent_checks import check_metrics_files
from pacekeeper.cli.doctor.checks import Check, Health
from pacekeeper.cli.doctor.file_checks import (
    NamedCheck,
    certificate_checks,
    check_exposure,
    check_listen_address,
    check_writable,
)
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import ConfigError, UnreachableError


def controller_checks(config: ControllerConfig) -> Iterator[NamedCheck]:
    """Yield the checks of a controller in display order."""
    yield "access control", partial(_check_exposure, config)
    if config.tls.is_on:
        yield "[tls]", partial(_check_key_pair, config)
    yield from certificate_checks(
        {
            "[tls] ca": config.tls.ca,
            "[tls] cert": config.tls.cert,
            "[metrics] ca": config.metrics.ca,
            "[metrics] cert": config.metrics.cert,
            "[webhook] ca": config.webhook.ca,
        }
    )
    if config.access.tokens:
        yield "[access] tokens", partial(_check_tokens, config)
    yield "store", partial(_check_store, config)
    yield "[access] audit", lambda: check_writable(Path(config.audit_path))
    yield "addresses", partial(_check_addresses, config)
    yield "listen", partial(check_listen_address, "--listen", config.listen)
    yield "api_listen", partial(check_listen_address, "--api-listen", config.api_listen)
    if config.metrics_listen:
        yield (
            "metrics_listen",
            partial(check_listen_address, "--metrics-listen", config.metrics_listen),
        )
        yield "[metrics]", partial(check_metrics_files, config.metrics)
    if config.web:
        yield "web", partial(check_listen_address, "--web", config.web)
        yield "web page", partial(_check_web_page, config)
    if config.webhook.is_on:
        yield "[webhook]", partial(_check_webhook, config)


def _check_exposure(config: ControllerConfig) -> Check | str:
    from pacekeeper.controller.api.auth.listeners import OPEN_REMEDY, unprotected_listeners

    return check_exposure(
        unprotected_listeners(config), is_allowed=config.insecure, remedy=OPEN_REMEDY
    )


def _check_key_pair(config: ControllerConfig) -> str:
    from pacekeeper.protos import tls

    tls.ServerContexts(config.tls)
    return "certificate and key match"


def _check_tokens(config: ControllerConfig) -> Check | str:
    from pacekeeper.controller.api.auth.tokens import read_tokens

    path = Path(config.access.tokens)
    if known := len(read_tokens(path)):
        return f"{path}: {known} tokens"
    return Check(
        name="",
        health=Health.LIMITED,
        found=f"{path}: no tokens",
        remedy="add one with `pacekeeper tokens add`",
    )


def _check_store(config: ControllerConfig) -> str:
    """Look at the file, or ask the database who leads; neither is changed.

    Raises:
        UnreachableError: the database does not answer.
        ConfigError, HostError, VersionError: the store cannot be used.
    """
    from pacekeeper.controller.storage import sqlite_file
    from pacekeeper.controller.storage.store import sqlite_path

    path = sqlite_path(config.store)
    if path is not None:
        return sqlite_file.look(path)
    from pacekeeper.controller.ha.lease_renewer import AwayError
    from pacekeeper.controller.ha.lease_row import LeaseRow, NoTablesError
    from pacekeeper.controller.storage.postgres import database_url

    name = database_url(config.store).set(drivername="postgresql").render_as_string()
    row = LeaseRow(config.store, config.lease.duration_s, makes_tables=False)
    try:
        record = row.read()
    except NoTablesError:
        return f"{name} answers; the first controller makes its tables"
    except AwayError as error:
        raise UnreachableError(
            f"{name}: {error}",
            remedy="start PostgreSQL or correct store: without it no controller becomes leader",
        ) from None
    finally:
        row.close()
    if record is None or not record.address:
        return f"{name} answers; no leader"
    return f"{name} answers; last leader {record.address} in term {record.term}"


def _check_addresses(config: ControllerConfig) -> str:
    """Check that all listen addresses differ.

    Raises:
        ConfigError: two are the same.
    """
    named = {
        "listen": config.listen,
        "api_listen": config.api_listen,
        "metrics_listen": config.metrics_listen,
        "web": config.web,
    }
    used: dict[str, str] = {}
    for setting, address in named.items():
        if not address or address.endswith(":0"):
            continue
        if address in used:
            raise ConfigError(
                f"{used[address]} and {setting} are both {address}", remedy="give each its own port"
            )
        used[address] = setting
    return ", ".join(used) or "any free ports"


def _check_web_page(config: ControllerConfig) -> str:
    from pacekeeper.controller.api.web.start import check_web_access

    check_web_access(config)
    if config.tls.cert:
        from pacekeeper.controller.api.web.start import web_tls_context

        web_tls_context(config.tls)
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401

    return "https" if config.tls.cert else "http"


def _check_webhook(config: ControllerConfig) -> str:
    """Check URL, secret and authority of the webhook; nothing is sent."""
    from pacekeeper.controller.observability.webhook import Webhook

    Webhook(config, on_end=lambda is_taken, count: None).close()
    return f"{config.webhook.format}, {'signed' if config.webhook.secret_file else 'not signed'}"
