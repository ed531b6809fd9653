"""The Unix socket on which NVRx's ft_launcher checks whether this node may join. A shell."""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from pacekeeper.agent.health.external_health import HealthCheckAnswer
from pacekeeper.core.errors import HostError
from pacekeeper.protos import nvhcd_pb2, nvhcd_pb2_grpc

GRACE_S = 0.5
MAX_CONCURRENT_CALLS = 16  # any user of the node may call
MAX_REQUEST_BYTES = 64 << 10  # a request holds arguments of a script
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
    ("grpc.max_metadata_size", 8 << 10),
)


@dataclass(slots=True, kw_only=True)
class _Service(nvhcd_pb2_grpc.HealthCheckServiceServicer):
    ask: Callable[[], HealthCheckAnswer]

    async def RunHealthCheck(
        self, request: nvhcd_pb2.HealthCheckRequest, context: object
    ) -> nvhcd_pb2.HealthCheckResponse:
        """Respond with the node's health; the arguments, for a script, are ignored."""
        answer = self.ask()
        return nvhcd_pb2.HealthCheckResponse(
            success=answer.is_success,
            exit_code=answer.exit_code,
            output=answer.output,
            error=answer.error,
        )


async def serve(path: Path, ask: Callable[[], HealthCheckAnswer]) -> grpc.aio.Server:
    """Start the service on a Unix socket that every user of the node may call.

    Args:
        path: The socket; one left by a killed agent is replaced.
        ask: Returns the current response.

    Raises:
        HostError: The socket cannot be created, or another file has its name.
    """
    remedy = "name another with health_socket in [agent]"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise HostError(f"health socket {path}: another file exists there", remedy=remedy)
        path.unlink(missing_ok=True)  # left by a killed agent
    except OSError as error:
        raise HostError(f"health socket {path}: {error.strerror}", remedy=remedy) from None
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
    nvhcd_pb2_grpc.add_HealthCheckServiceServicer_to_server(_Service(ask=ask), server)
    try:
        server.add_insecure_port(f"unix://{path.absolute()}")
    except RuntimeError:
        raise HostError(f"health socket {path}: cannot be created", remedy=remedy) from None
    await server.start()
    os.chmod(path, 0o666)  # launchers run as other users; the response is not confidential
    return server
