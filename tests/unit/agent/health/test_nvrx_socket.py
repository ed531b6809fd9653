"""Whoever is on the node may ask whether it is well, in few words."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pacekeeper.agent.health import nvrx_socket
from pacekeeper.agent.health.external_health import HealthCheckAnswer
from pacekeeper.protos import nvhcd_pb2, nvhcd_pb2_grpc

WELL = HealthCheckAnswer(is_success=True, exit_code=0, output="{}", error="")


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (100, grpc.StatusCode.OK),
        (nvrx_socket.MAX_REQUEST_BYTES + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_question_is_short(tmp_path: Path, size_bytes: int, expected: grpc.StatusCode) -> None:
    async def ask() -> grpc.StatusCode:
        path = tmp_path / "health.sock"
        server = await nvrx_socket.serve(path, lambda: WELL)
        try:
            async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
                stub = nvhcd_pb2_grpc.HealthCheckServiceStub(channel)
                request = nvhcd_pb2.HealthCheckRequest(args=["x" * size_bytes])
                call = stub.RunHealthCheck(request, timeout=60.0)
                code: grpc.StatusCode = await call.code()
                return code
        finally:
            await server.stop(0.0)

    assert asyncio.run(ask()) is expected
