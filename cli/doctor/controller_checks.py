"""What a controller would meet that ran with these settings."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pacekeeper.cli.doctor.agent_checks import metrics
from pacekeeper.cli.doctor.checks import Check, Health
from pacekeeper.cli.doctor.file_checks import Look, certificates, folder_of, port, unprotected
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import ConfigError, UnreachableError


def looks(config: ControllerConfig) -> Iterator[Look]:
    """In the order people read them."""
    yield "who may come in", partial(_open, config)
    if config.tls.is_on:
        yield "[tls]", partial(_pair, config)
    yield from certificates(
        {
            "[tls] ca": config.tls.ca,
            "[tls] cert": config.tls.cert,
            "[metrics] ca": config.metrics.ca,
            "[metrics] cert": config.metrics.cert,
            "[lease] ca": config.lease.ca,
            "[lease] cert": config.lease.cert,
            "[webhook] ca": config.webhook.ca,
        }
    )
    if config.access.tokens:
        yield "[access] tokens", partial(_tokens, config)
    yield "store", partial(_store, config)
    audit = config.access.audit or f"{config.store}.audit.jsonl"
    yield "[access] audit", partial(folder_of, Path(audit))
    yield "addresses", partial(_addresses, config)
    yield "listen", partial(port, "--listen", config.listen)
    if config.metrics_listen:
        yield "metrics_listen", partial(port, "--metrics-listen", config.metrics_listen)
        yield "[metrics]", partial(metrics, config.metrics)
    if config.web:
        yield "web", partial(port, "--web", config.web)
        yield "web page", partial(_page, config)
    if config.webhook.is_on:
        yield "[webhook]", partial(_webhook, config)
    if config.lease.url:
        yield "[lease]", partial(_lease, config)


def _open(config: ControllerConfig) -> Check | str:
    from pacekeeper.controller.api.auth.listeners import OPEN_REMEDY, unprotected_listeners

    return unprotected(unprotected_listeners(config), is_told=config.insecure, remedy=OPEN_REMEDY)


def _pair(config: ControllerConfig) -> str:
    from pacekeeper.protos import tls

    tls.ServerContexts(config.tls)
    return "certificate and key fit"


def _tokens(config: ControllerConfig) -> Check | str:
    from pacekeeper.controller.api.auth.tokens import read_tokens

    path = Path(config.access.tokens)
    if known := len(read_tokens(path)):
        return f"{path}: {known} tokens"
    return Check(
        name="",
        health=Health.LIMITED,
        found=f"{path}: no token, so nobody comes in by one",
        remedy="`pacekeeper tokens add`",
    )


def _store(config: ControllerConfig) -> str:
    from pacekeeper.controller.storage import sqlite_file

    return sqlite_file.look(Path(config.store))


def _addresses(config: ControllerConfig) -> str:
    """Each its own. Raises ConfigError where two are the same."""
    named = {
        "listen": config.listen, "metrics_listen": config.metrics_listen, "web": config.web
    }  # fmt: skip
    used: dict[str, str] = {}
    for setting, address in named.items():
        if not address or address.endswith(":0"):
            continue
        if address in used:
            raise ConfigError(
                f"{used[address]}, {setting}: both are {address}", remedy="give each its own port"
            )
        used[address] = setting
    return ", ".join(used) or "any free ports"


def _page(config: ControllerConfig) -> str:
    from pacekeeper.controller.api.web.start import check_web_access

    check_web_access(config)
    if config.tls.cert:
        from pacekeeper.controller.api.web.start import web_tls_context

        web_tls_context(config.tls)
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401

    return "https" if config.tls.cert else "http"


def _webhook(config: ControllerConfig) -> str:
    """Its URL, secret and authority; nobody is told anything."""
    from pacekeeper.controller.observability.webhook import Webhook

    Webhook(config, on_end=lambda is_taken, count: None).close()
    return f"{config.webhook.format}, {'signed' if config.webhook.secret_file else 'not signed'}"


def _lease(config: ControllerConfig) -> str:
    """Does its store answer? Raises ConfigError, and UnreachableError where it does not."""
    from pacekeeper.controller.ha.backends import open_lease_store
    from pacekeeper.controller.ha.http_client import AwayError

    store = open_lease_store(config.lease)
    try:
        record, _ = store.read()
    except AwayError as error:
        raise UnreachableError(
            f"{config.lease.url}: {error}",
            remedy="start it, or name where it is: without it no controller leads",
        ) from None
    if record is None or not record.address:
        return f"{config.lease.url} answers; nobody leads"
    return f"{config.lease.url} answers; last led by {record.address} in term {record.term}"
