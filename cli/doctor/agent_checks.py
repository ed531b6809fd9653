"""Checks of the settings of an agent."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pacekeeper.cli.doctor.checks import Check, Health
from pacekeeper.cli.doctor.file_checks import (
    REACH_TIMEOUT_S,
    NamedCheck,
    certificate_checks,
    check_controller_reachable,
    check_exposure,
    check_listen_address,
    check_writable,
)
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.errors import ConfigError, UnreachableError


def agent_checks(config: AgentConfig, own_address: str = "") -> Iterator[NamedCheck]:
    """Yield the checks of an agent in display order.

    Args:
        config: settings of the agent.
        own_address: see `check_controller_reachable`.
    """
    from pacekeeper.agent.daemon import TLS_REMEDY, unencrypted_connections
    from pacekeeper.cli.doctor.machine_checks import check_ring_dir
    from pacekeeper.protos import tls

    def exposure() -> Check | str:
        return check_exposure(
            unencrypted_connections(config), is_allowed=config.insecure, remedy=TLS_REMEDY
        )

    def credentials() -> str:
        tls.check_client(config.tls, config.token_file)
        return "certificate and key match" if config.tls.cert else "token only"

    yield "encryption", exposure
    if config.tls.is_on or config.token_file:
        yield "[tls], token_file", credentials
    yield from certificate_checks(
        {
            "[tls] ca": config.tls.ca,
            "[tls] cert": config.tls.cert,
            "[metrics] ca": config.metrics.ca,
            "[metrics] cert": config.metrics.cert,
        }
    )
    yield "ring_dir", lambda: check_ring_dir(Path(config.ring_dir))
    if config.metrics_listen:
        yield (
            "metrics_listen",
            partial(check_listen_address, "--metrics-listen", config.metrics_listen),
        )
        yield "[metrics]", partial(check_metrics_files, config.metrics)
    if config.record_dir:
        yield "record_dir", partial(check_writable, Path(config.record_dir))
    if config.health_socket:
        yield "health_socket", partial(check_writable, Path(config.health_socket))
    if config.sentinel_socket:
        yield "sentinel_socket", partial(_sentinel, Path(config.sentinel_socket))
    client = ClientConfig(
        controller=config.controller, token_file=config.token_file, tls=config.tls
    )
    yield "controller", partial(check_controller_reachable, client, own_address, _ask_for_layout)


def check_metrics_files(config: MetricsConfig) -> str:
    """Check certificate and token of a metrics endpoint.

    Raises:
        ConfigError, HostError: a file is invalid or not readable.
    """
    from pacekeeper.protos import tls

    if config.cert:
        tls.server_context(config.tls)
    tls.read_token(config.token_file)
    return "with TLS" if config.cert else "without TLS"


def _ask_for_layout(config: ClientConfig, address: str) -> str:
    """Ask a controller's port for agents for a layout that does not exist.

    Raises:
        ConfigError: the port is the controller's, but not that for agents.
        UnreachableError: no controller answers.
        HostError: as `tls.check_client`.
    """
    import grpc

    from pacekeeper.controller.api.staleness import STANDS_BY
    from pacekeeper.protos import control_pb2, control_pb2_grpc, tls

    with tls.client_channel(address, config.tls) as channel:
        stub: Any = control_pb2_grpc.AgentControlServiceStub(channel)
        try:
            stub.FetchLayout(control_pb2.FetchLayoutRequest(), timeout=REACH_TIMEOUT_S)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or "no details"
        else:
            code, details = grpc.StatusCode.UNKNOWN, "an answer that was not asked for"
    if code is grpc.StatusCode.NOT_FOUND:
        return "takes agents in"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        raise ConfigError(f"{address}: {details}", remedy="set [agent] controller to that address")
    if details.startswith(STANDS_BY):
        return "answers as standby"
    raise UnreachableError(
        f"no controller for agents at {address}: {details}",
        remedy="start one with `pacekeeper controller`, or correct [agent] controller and [tls]",
    )


def _sentinel(path: Path) -> Check | str:
    """Check for the socket of NVSentinel's platform connector."""
    if path.is_socket():
        return f"{path}"
    return Check(
        name="",
        health=Health.LIMITED,
        found=f"{path}: no such socket",
        remedy="start NVSentinel's platform connector; the agent then sends new events",
    )
