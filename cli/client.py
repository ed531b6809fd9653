"""A command's way to the controller: one channel, deadlines, and errors with a remedy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pacekeeper.core.errors import PacekeeperError, UnreachableError

DEADLINE_S = 5.0


@contextmanager
def status_stub(address: str) -> Iterator[Any]:
    """The status service at host:port. Raises UnreachableError or PacekeeperError with a reason."""
    import grpc

    from pacekeeper.protos import status_pb2_grpc

    channel = grpc.insecure_channel(address)
    try:
        yield status_pb2_grpc.StatusServiceStub(channel)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise UnreachableError(
                f"no controller at {address}: {details}",
                remedy="start one with `pacekeeper controller`, or name it with --controller",
            ) from None
        raise PacekeeperError(f"the controller at {address} says {code.name}: {details}") from None
    finally:
        channel.close()


def as_dict(message: Any) -> dict[str, Any]:
    """A message as plain values for JSON: field names as in the protos, defaults included."""
    from google.protobuf.json_format import MessageToDict

    result: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return result


def ask(call: Callable[..., Any], request: Any) -> Any:
    """One answer within the deadline."""
    return call(request, timeout=DEADLINE_S)
