"""gRPC channel from a command to the controller: leader lookup, deadline, errors with a remedy.

Used by every command that queries or instructs a controller. gRPC status codes become the error
classes of `core.errors`, so that each has its exit code; commands handle no `grpc.RpcError`.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from pacekeeper.core.addresses import is_loopback, split_addresses
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.errors import (
    ConfigError,
    DeniedError,
    ExitCode,
    PacekeeperError,
    UnreachableError,
)
from pacekeeper.core.text import format_s

DEADLINE_S = 5.0
TOKEN_VARIABLE = "PACEKEEPER_TOKEN"

_START_OR_NAME = "start one with `pacekeeper controller`, or give its address with --controller"
_USE_TLS = (
    "the server closes unencrypted connections: if it is a controller with TLS, set [tls] ca in "
    "--config FILE (or in the file named by PACEKEEPER_CONFIG)"
)
_CHECK_AUTHORITY = (
    f"{_START_OR_NAME}; or check with `pacekeeper certs show` that its certificate and yours are "
    "from the same certificate authority"
)


class NotFoundError(PacekeeperError):
    """The job, node, rank, incident or proposal on the command line does not exist."""

    exit_code = ExitCode.USAGE


class AlreadyAnsweredError(PacekeeperError):
    """The proposal on the command line was answered before, expired or became stale."""

    exit_code = ExitCode.USAGE


@contextmanager
def status_stub(client: ClientConfig) -> Iterator[Any]:
    """Open the status service of a controller. Raises as `open_channel`."""
    from pacekeeper.protos import status_pb2_grpc

    with open_channel(client) as channel:
        yield status_pb2_grpc.StatusServiceStub(channel)


@contextmanager
def open_channel(client: ClientConfig) -> Iterator[Any]:
    """Open a channel to the leading controller that authenticates with certificate and token.

    Raises:
        ConfigError, HostError: the token or a certificate is unusable.
        UnreachableError: no controller answers, also within the `with` block.
        DeniedError: the controller denies the request.
        NotFoundError, AlreadyAnsweredError: the request names something unknown or answered.
        PacekeeperError: any other gRPC status.
    """
    import grpc

    from pacekeeper.protos import tls
    from pacekeeper.protos.stale_reads import AgeReader

    token = _read_token(client)
    address = _find_leader(client)
    channel = tls.client_channel(address, client.tls)
    noted: list[str] = []

    def note(age_s: float, leader: str) -> None:
        """Once a command: the answers of a standby are of one age."""
        if not noted:
            noted.append(address)
            last = f"; the last to lead is {leader}" if leader else ""
            text = f"{address} stands by: what it shows is {format_s(age_s)} old{last}"
            print(text, file=sys.stderr)

    try:
        yield grpc.intercept_channel(tls.with_token(channel, token), AgeReader(note))
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or "no details"
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise UnreachableError(
                f"no controller at {address}: {details}",
                remedy=_unreachable_remedy(details, is_tls=client.tls.is_on),
            ) from None
        if code is grpc.StatusCode.NOT_FOUND:
            raise NotFoundError(details) from None
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise AlreadyAnsweredError(details) from None
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            raise DeniedError(
                f"the controller at {address} denied the request: {details}",
                remedy="use another certificate ([tls]) or token ([client] token_file)",
            ) from None
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise UnreachableError(
                f"{address} answers, but serves no commands of this version: {details}",
                remedy="give the controller's api_listen address with --controller",
            ) from None
        raise PacekeeperError(
            f"the controller at {address} returned {code.name}: {details}"
        ) from None
    finally:
        channel.close()


def _unreachable_remedy(details: str, *, is_tls: bool) -> str:
    """Choose the remedy by the details of gRPC: no server, or a server that expects TLS."""
    if is_tls:
        return _CHECK_AUTHORITY
    return _USE_TLS if "Socket closed" in details else _START_OR_NAME


def _find_leader(client: ClientConfig) -> str:
    """Return the only configured address, that of the leader, or of one that answers reads.

    Raises:
        UnreachableError: none of several controllers leads or answers reads.
        ConfigError, HostError: as `tls.check_client`.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pacekeeper.protos import tls
    from pacekeeper.protos.stale_reads import READS

    addresses, serving = split_addresses(client.controller), health_pb2.HealthCheckResponse.SERVING
    if len(addresses) == 1:
        return addresses[0]
    answers: SimpleQueue[tuple[str, str, Any]] = SimpleQueue()
    readable = wrong = ""
    with contextlib.ExitStack() as stack:
        # In parallel: a frozen controller delays no answer, a busy one gets the usual deadline.
        for address in addresses:
            to = stack.enter_context(tls.client_channel(address, client.tls))
            health: Any = health_pb2_grpc.HealthStub(to)
            for service in ("", READS):
                request = health_pb2.HealthCheckRequest(service=service)
                future = health.Check.future(request, timeout=DEADLINE_S)
                future.add_done_callback(
                    lambda answer, of=(address, service): answers.put((*of, answer))
                )
        for _ in range(2 * len(addresses)):
            address, service, answer = answers.get()
            try:
                if answer.result().status == serving:
                    if not service:
                        return address
                    readable = address
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    wrong = f"; {address}: {error.details()}"
    if readable:
        return readable
    raise UnreachableError(
        f"none of the controllers at {client.controller} is the leader, or answers reads{wrong}",
        remedy="a failover takes seconds: retry, or start them with `pacekeeper controller`",
    )


def _read_token(client: ClientConfig) -> str:
    """Read the bearer token.

    Raises:
        ConfigError: the token would be sent beyond loopback without TLS.
    """
    from pacekeeper.protos import tls

    token = tls.read_token(client.token_file) or os.environ.get(TOKEN_VARIABLE, "").strip()
    is_loopback_only = all(is_loopback(address) for address in split_addresses(client.controller))
    if token and not client.tls.is_on and not is_loopback_only:
        raise ConfigError(
            f"the token would be sent to {client.controller} unencrypted",
            remedy="set [tls] ca to the file of the certificate authority",
        )
    return token


def call(call: Callable[..., Any], request: Any) -> Any:
    """Send one request and return its answer within the deadline."""
    return call(request, timeout=DEADLINE_S)
