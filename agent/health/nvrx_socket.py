"""The Unix socket on which NVRx's ft_launcher asks whether this node may join. A shell."""

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
MAX_CONCURRENT_CALLS = 16  # whoever is on the node may ask
MAX_REQUEST_BYTES = 64 << 10  # of a question: arguments of a script
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
        """The arguments are of a script that we do not run: there is one answer."""
        said = self.ask()
        return nvhcd_pb2.HealthCheckResponse(
            success=said.is_success, exit_code=said.exit_code, output=said.output, error=said.error
        )


async def serve(path: Path, ask: Callable[[], HealthCheckAnswer]) -> grpc.aio.Server:
    """Answer on this socket; whoever may write its directory's socket may ask.

    Raises HostError where it can not be had.
    """
    remedy = "name another with health_socket in [agent]"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise HostError(f"health socket {path}: there is another file", remedy=remedy)
        path.unlink(missing_ok=True)  # of an agent that was killed
    except OSError as error:
        raise HostError(f"health socket {path}: {error.strerror}", remedy=remedy) from None
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
    nvhcd_pb2_grpc.add_HealthCheckServiceServicer_to_server(_Service(ask=ask), server)
    try:
        server.add_insecure_port(f"unix://{path.absolute()}")
    except RuntimeError:
        raise HostError(f"health socket {path}: can not be made", remedy=remedy) from None
    await server.start()
    os.chmod(path, 0o666)  # launchers run as users; it tells what the node's condition tells
    return server
