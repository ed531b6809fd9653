"""A command's way to the controller: one channel, deadlines, and errors with a remedy."""

import contextlib
import os
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

DEADLINE_S = 5.0
TOKEN_VARIABLE = "PACEKEEPER_TOKEN"

_AWAY = "start one with `pacekeeper controller`, or name it with --controller"
_UNHEARD = (
    "something is there that ends what is said in the clear: to a controller with TLS, name the "
    "authority in [tls] ca of --config FILE (or of the environment's PACEKEEPER_CONFIG)"
)
_AWAY_TLS = f"{_AWAY}; or it and we are of different authorities (`pacekeeper certs show`)"


class NotFoundError(PacekeeperError):
    """The controller does not know what the command line names."""

    exit_code = ExitCode.USAGE


class OverError(PacekeeperError):
    """What the command line names was answered already, or is over."""

    exit_code = ExitCode.USAGE


@contextmanager
def status_stub(client: ClientConfig) -> Iterator[Any]:
    """The status service of a controller. Raises as `connected` does."""
    from pacekeeper.protos import status_pb2_grpc

    with connected(client) as channel:
        yield status_pb2_grpc.StatusServiceStub(channel)


@contextmanager
def connected(client: ClientConfig) -> Iterator[Any]:
    """A channel to a controller that shows who we are.

    Raises ConfigError or HostError for a token or certificates of no use, and UnreachableError,
    DeniedError, NotFoundError, OverError or PacekeeperError in place of what gRPC raises inside.
    """
    import grpc

    from pacekeeper.protos import tls

    token = _token(client)
    address = _leader(client)
    channel = tls.client_channel(address, client.tls)
    try:
        yield tls.with_token(channel, token)
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or "no reason given"
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise UnreachableError(
                f"no controller at {address}: {details}",
                remedy=_remedy(details, is_tls=client.tls.is_on),
            ) from None
        if code is grpc.StatusCode.NOT_FOUND:
            raise NotFoundError(details) from None
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise OverError(details) from None
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            raise DeniedError(
                f"the controller at {address} refuses: {details}",
                remedy="show it another certificate ([tls]) or token ([client] token_file)",
            ) from None
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise UnreachableError(
                f"{address} answers, but is no controller of this version: {details}",
                remedy="name the controller with --controller",
            ) from None
        raise PacekeeperError(f"the controller at {address} says {code.name}: {details}") from None
    finally:
        channel.close()


def _remedy(details: str, *, is_tls: bool) -> str:
    """By what gRPC says: nobody there, or somebody who does not understand us."""
    if is_tls:
        return _AWAY_TLS
    return _UNHEARD if "Socket closed" in details else _AWAY


def _leader(client: ClientConfig) -> str:
    """Which of the controller's addresses to ask: the only one, or the one that serves.

    Raises UnreachableError where none of several does, and as `tls.check_client`.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pacekeeper.protos import tls

    addresses, serving = split_addresses(client.controller), health_pb2.HealthCheckResponse.SERVING
    if len(addresses) == 1:
        return addresses[0]
    request = health_pb2.HealthCheckRequest(service="")
    answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    with contextlib.ExitStack() as stack:
        # All at once: one that is frozen delays nobody, one that is busy has the usual time.
        for address in addresses:
            to = stack.enter_context(tls.client_channel(address, client.tls))
            health: Any = health_pb2_grpc.HealthStub(to)
            asked = health.Check.future(request, timeout=DEADLINE_S)
            asked.add_done_callback(lambda answer, of=address: answers.put((of, answer)))
        for _ in addresses:
            address, answer = answers.get()
            with contextlib.suppress(grpc.RpcError):
                if answer.result().status == serving:
                    return address
    raise UnreachableError(
        f"none of {client.controller} leads",
        remedy="a takeover takes seconds: try again; or start them with `pacekeeper controller`",
    )


def _token(client: ClientConfig) -> str:
    """The token to show. Raises ConfigError where it would go anywhere in the clear."""
    from pacekeeper.protos import tls

    token = tls.read_token(client.token_file) or os.environ.get(TOKEN_VARIABLE, "").strip()
    is_near = all(is_loopback(address) for address in split_addresses(client.controller))
    if token and not client.tls.is_on and not is_near:
        raise ConfigError(
            f"a token would go to {client.controller} in the clear",
            remedy="name the authority in [tls] ca",
        )
    return token


def ask(call: Callable[..., Any], request: Any) -> Any:
    """One answer within the deadline."""
    return call(request, timeout=DEADLINE_S)
