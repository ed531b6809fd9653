"""What an agent would meet that ran with these settings."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pacekeeper.cli.doctor.checks import Check, Health
from pacekeeper.cli.doctor.file_checks import (
    Look,
    certificates,
    folder_of,
    port,
    reaches,
    unprotected,
)
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.metrics import MetricsConfig


def looks(config: AgentConfig, ours: str = "") -> Iterator[Look]:
    """In the order people read them. `ours`: see `reaches`."""
    from pacekeeper.agent.daemon import TLS_REMEDY, unencrypted_connections
    from pacekeeper.cli.doctor.command import check_ring_dir
    from pacekeeper.protos import tls

    def way() -> Check | str:
        return unprotected(
            unencrypted_connections(config), is_told=config.insecure, remedy=TLS_REMEDY
        )

    def credentials() -> str:
        tls.check_client(config.tls, config.token_file)
        return "certificate and key fit" if config.tls.cert else "nothing is shown but the token"

    yield "who may listen in", way
    if config.tls.is_on or config.token_file:
        yield "[tls], token_file", credentials
    yield from certificates(
        {
            "[tls] ca": config.tls.ca,
            "[tls] cert": config.tls.cert,
            "[metrics] ca": config.metrics.ca,
            "[metrics] cert": config.metrics.cert,
        }
    )
    yield "ring_dir", lambda: check_ring_dir(Path(config.ring_dir))
    if config.metrics_listen:
        yield "metrics_listen", partial(port, "--metrics-listen", config.metrics_listen)
        yield "[metrics]", partial(metrics, config.metrics)
    if config.record_dir:
        yield "record_dir", partial(folder_of, Path(config.record_dir))
    if config.health_socket:
        yield "health_socket", partial(folder_of, Path(config.health_socket))
    if config.sentinel_socket:
        yield "sentinel_socket", partial(_sentinel, Path(config.sentinel_socket))
    asking = ClientConfig(
        controller=config.controller, token_file=config.token_file, tls=config.tls
    )
    yield "controller", partial(reaches, asking, ours)


def metrics(config: MetricsConfig) -> str:
    """Its files. Raises ConfigError and HostError."""
    from pacekeeper.protos import tls

    if config.cert:
        tls.server_context(config.tls)
    tls.read_token(config.token_file)
    return "with TLS" if config.cert else "in the clear"


def _sentinel(path: Path) -> Check | str:
    """Is NVSentinel's connector there?"""
    if path.is_socket():
        return f"{path}"
    return Check(
        name="",
        health=Health.LIMITED,
        found=f"{path}: no socket is there",
        remedy="start NVSentinel's platform connector: the agent tells it of what comes then",
    )
