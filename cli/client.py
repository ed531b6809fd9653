"""A command's way to the controller: one channel, deadlines, and errors with a remedy."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pacekeeper.core.config import AgentConfig
from pacekeeper.core.errors import ExitCode, PacekeeperError, UnreachableError
from pacekeeper.core.toml_reader import override

DEADLINE_S = 5.0


class NotFoundError(PacekeeperError):
    """The controller does not know what the command line names."""

    exit_code = ExitCode.USAGE


@contextmanager
def status_stub(address: str) -> Iterator[Any]:
    """The status service at host:port.

    Raises ConfigError for what is no address, and UnreachableError, NotFoundError or
    PacekeeperError in place of what gRPC raises inside.
    """
    override(AgentConfig(), controller=address)
    import grpc

    from pacekeeper.protos import status_pb2_grpc, wire

    channel = grpc.insecure_channel(address, options=wire.GRPC_OPTIONS_CLIENT)
    try:
        yield status_pb2_grpc.StatusServiceStub(channel)
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or "no reason given"
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise UnreachableError(
                f"no controller at {address}: {details}",
                remedy="start one with `pacekeeper controller`, or name it with --controller",
            ) from None
        if code is grpc.StatusCode.NOT_FOUND:
            raise NotFoundError(details) from None
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise UnreachableError(
                f"{address} answers, but is no controller of this version: {details}",
                remedy="name the controller with --controller",
            ) from None
        raise PacekeeperError(f"the controller at {address} says {code.name}: {details}") from None
    finally:
        channel.close()


def ask(call: Callable[..., Any], request: Any) -> Any:
    """One answer within the deadline."""
    return call(request, timeout=DEADLINE_S)


def as_dict(message: Any) -> dict[str, Any]:
    """A message as plain values for JSON: names as in the protos, every field always there.

    What is unset or not a finite number is null; whole numbers stay numbers, also 64-bit ones.
    """
    return {field.name: _plain(message, field) for field in message.DESCRIPTOR.fields}


def _plain(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_repeated(field):
        return [_plain_one(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain_one(field, value)


def _is_repeated(field: Any) -> bool:
    """protobuf 7 took `label` away; 5.29 has no `is_repeated` yet."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _plain_one(field: Any, value: Any) -> Any:
    if field.type == field.TYPE_MESSAGE:
        return as_dict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
