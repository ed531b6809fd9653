"""The agent's process beside other tools on its node: their sockets, their messages."""

import asyncio
import json
import stat
import tempfile
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf import empty_pb2

from pacekeeper.protos import (
    control_pb2,
    nvhcd_pb2,
    nvhcd_pb2_grpc,
    nvsentinel_pb2,
    nvsentinel_pb2_grpc,
)
from support.agents import Node, PaperController, play, step, until


class Connector(nvsentinel_pb2_grpc.PlatformConnectorServicer):
    """NVSentinel's, as far as a monitor sees it; refuses the first call."""

    def __init__(self) -> None:
        self.events: list[nvsentinel_pb2.HealthEvent] = []

    async def HealthEventOccurredV1(
        self,
        request: nvsentinel_pb2.HealthEvents,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> empty_pb2.Empty:
        self.events += request.events
        return empty_pb2.Empty()

    def pace(self) -> list[bool]:
        return [e.isHealthy for e in self.events if e.checkName == "PacekeeperPace"]


async def asked(path: str) -> nvhcd_pb2.HealthCheckResponse:
    """What ft_launcher would hear: its own arguments are sent along."""
    async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
        stub = nvhcd_pb2_grpc.HealthCheckServiceStub(channel)
        request = nvhcd_pb2.HealthCheckRequest(args=["--no-slurm", "--group", "prolog"])
        answer: nvhcd_pb2.HealthCheckResponse = await stub.RunHealthCheck(request, timeout=60)
        return answer


def failed(answer: nvhcd_pb2.HealthCheckResponse) -> list[str]:
    output = json.loads(answer.output)
    assert output["fail_count"] == len(output["failed_checks"])
    assert answer.success == (answer.exit_code == 0) == (output["fail_count"] == 0)
    names: list[str] = output["failed_checks"]
    return names


def tell_suspects(controller: PaperController, *ranks: int) -> None:
    told = control_pb2.SetSuspects(job="job", ranks=ranks)
    controller.say(control_pb2.AttachResponse(set_suspects=told))


def test_a_node_with_a_finding_is_left_out_by_nvrx_and_known_to_nvsentinel(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pk-") as short:  # a socket's name has 108 bytes
        health, sentinel = f"{short}/agent/health.sock", f"{short}/connector.sock"

        async def body(controller: PaperController, node: Node) -> None:
            connector = Connector()
            server = grpc.aio.server()
            nvsentinel_pb2_grpc.add_PlatformConnectorServicer_to_server(connector, server)
            server.add_insecure_port(f"unix://{sentinel}")
            await server.start()
            writer = node.ring()
            await node.start(health_socket=health, sentinel_socket=sentinel)
            writer.write(step(0))
            await until(lambda: controller.steps, "the first step")
            await until(connector.pace, "its state, told at the start")
            assert failed(await asked(health)) == [], "no device answers: nobody is left out"
            assert stat.S_ISSOCK(Path(health).stat().st_mode)

            tell_suspects(controller, 0, 5)
            await until(lambda: connector.pace() == [True, False], "the finding")
            event = connector.events[-1]
            assert (event.nodeName, event.isFatal, *event.errorCode) == ("n0", False, "SlowRank")
            assert [e.entityValue for e in event.entitiesImpacted] == ["job/0"], "its own only"
            assert event.processingStrategy == nvsentinel_pb2.STORE_ONLY
            answer = await asked(health)
            assert failed(answer) == ["SlowRank"] and "ranks 0 of job" in answer.error

            tell_suspects(controller)
            await until(lambda: connector.pace() == [True, False, True], "the clearing event")
            assert failed(await asked(health)) == []
            await server.stop(None)

        play(tmp_path, body)


def test_a_socket_that_can_not_be_had_is_said_and_a_left_over_one_is_replaced(
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory(prefix="pk-") as short:
        path = Path(short) / "health.sock"

        async def body(controller: PaperController, node: Node) -> None:
            path.write_text("not a socket")
            await node.start(health_socket=str(path))
            code, error = await node.ended()
            assert code == 4 and str(path) in error and "health_socket" in error
            path.unlink()
            await node.start(health_socket=str(path))
            await until(path.exists, "the socket")
            await node.kill()
            await node.start(health_socket=str(path))
            for _ in range(600):
                try:
                    assert failed(await asked(str(path))) == []
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)
            raise AssertionError("the new agent never answered on the old one's socket")

        play(tmp_path, body)
