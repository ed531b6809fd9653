"""A controller on paper for real agent processes, and a node with rings for them to read."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pacekeeper.agent.daemon import Agent
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.core.telemetry.records import Record, StepRecord
from pacekeeper.protos import control_pb2, control_pb2_grpc
from pacekeeper.protos.convert import reports as wire
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.controllers import applied, attachments
from support.ports import free_port

PATIENCE_S = 60.0  # no test waits for longer; none asserts how long something took


class PaperController(control_pb2_grpc.AgentControlServiceServicer):
    """Takes what agents send and says what the test wants. `streams` has one list per stream."""

    def __init__(self) -> None:
        self.port = free_port()  # a client elsewhere must not get it while it is away
        self.term = 0
        self.streams: list[list[NodeReport]] = []
        self.hellos: list[control_pb2.Hello] = []
        self.is_acknowledging = True
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.is_refused: Callable[[NodeReport], bool] = lambda report: False
        self.layouts: dict[bytes, bytes] = {}
        self.num_fetches = 0
        self._outbox: asyncio.Queue[control_pb2.AttachResponse | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serve; on the same port each time."""
        server = grpc.aio.server(options=wire.GRPC_OPTIONS_SERVER)
        control_pb2_grpc.add_AgentControlServiceServicer_to_server(self, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Be away: all streams break."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def say(self, message: control_pb2.AttachResponse) -> None:
        """Send a command on the newest stream."""
        self._outbox.put_nowait(message)

    @property
    def reports(self) -> list[NodeReport]:
        return [report for stream in self.streams for report in stream]

    @property
    def records(self) -> list[Record]:
        return [r for report in self.reports for job in report.jobs for r in job.records]

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records if isinstance(record, StepRecord)]

    async def Attach(
        self,
        request_iterator: AsyncIterator[control_pb2.AttachRequest],
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> AsyncIterator[control_pb2.AttachResponse]:
        """One agent's stream."""
        self.hellos.append((await anext(request_iterator)).hello)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        outbox: asyncio.Queue[control_pb2.AttachResponse | None] = asyncio.Queue()
        self._outbox = outbox
        stream: list[NodeReport] = []
        self.streams.append(stream)
        refused: list[str] = []
        yield control_pb2.AttachResponse(
            welcome=control_pb2.Welcome(protocol_version=wire.PROTOCOL_VERSION), term=self.term
        )

        async def read() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for request in request_iterator:
                    report = wire.report_from_message(request.report)
                    is_refused = self.is_refused(report)
                    if not is_refused:
                        stream.append(report)
                    if self.is_acknowledging or is_refused:  # as the real one does
                        outbox.put_nowait(
                            control_pb2.AttachResponse(
                                acknowledge=control_pb2.Acknowledge(sequence=report.sequence)
                            )
                        )
                    if is_refused:
                        refused.append(f"report {report.sequence} is impossible")
                        break
            outbox.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (message := await outbox.get()) is not None:
                message.term = self.term
                yield message
        finally:
            reader.cancel()
        if refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refused[0])

    async def FetchLayout(
        self,
        request: control_pb2.FetchLayoutRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> control_pb2.FetchLayoutResponse:
        """The layout that has this digest."""
        self.num_fetches += 1
        if request.sha256 not in self.layouts:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such layout")
        return control_pb2.FetchLayoutResponse(layout_json=self.layouts[request.sha256])


async def until(is_true: Callable[[], object], what: str) -> None:
    """Wait until it is true; a failure names what never came."""
    for _ in range(int(PATIENCE_S / 0.02)):
        if is_true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never: {what}")


class Node:
    """One node: a ring directory and an agent process."""

    def __init__(self, directory: Path, controller_port: int) -> None:
        self.rings = directory / "rings"
        self.rings.mkdir(exist_ok=True)
        self.config = directory / "agent.toml"
        self.settings = {
            "controller": f"127.0.0.1:{controller_port}",
            "node": "n0",
            "ring_dir": str(self.rings),
            "metrics_listen": "",
            "poll_interval_s": 0.02,
            "reconnect_max_s": 0.4,
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, **settings: object) -> asyncio.subprocess.Process:
        """Start the agent with these settings in its file."""
        values = {**self.settings, **settings}
        lines = [f"{k} = {v!r}".replace("'", '"') for k, v in values.items()]
        self.config.write_text("\n".join(["[agent]", *lines, ""]))
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pacekeeper.cli.main", "agent", "--config", str(self.config)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
        return self.process

    async def ended(self) -> tuple[int, str]:
        """The agent's exit code and what it said on standard error."""
        assert self.process is not None
        async with asyncio.timeout(PATIENCE_S):
            _, error = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, error.decode()

    async def stop(self) -> tuple[int, str]:
        """SIGTERM, then `ended`."""
        assert self.process is not None
        self.process.terminate()
        return await self.ended()

    async def kill(self) -> None:
        """SIGKILL, where it still runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def ring(self, rank: int = 0, *, pid: int | None = None, job: str = "job") -> Ring:
        """The ring of a rank that attaches now."""
        attachment = Attachment(
            job=job, rank=rank, world_size=4, pid=os.getpid() if pid is None else pid
        )
        return Ring.create(self.rings, attachment)


def rings_of(node: Node, job: str, layout: Layout) -> dict[int, Ring]:
    """Rings of all ranks of `job` on the node, beside their layout file."""
    rings = {a.rank: Ring.create(node.rings, a) for a in attachments(job, layout.ranks)}
    name = shm_ring.layout_file_name(layout.generation)
    (node.rings / job / name).write_bytes(encode_layout(layout))
    for record in applied(layout, step=0):
        rings[record.rank].write(record)
    return rings


def agent_of(directory: Path) -> tuple[Agent, Node]:
    """An agent that is not running and reports each step at once, and its node."""
    node = Node(directory, 1)
    config = AgentConfig(ring_dir=str(node.rings), metrics_listen="", spool_batches=3)
    agent = Agent(config)
    agent.pacer.interval_s = 0.0
    return agent, node


def step(number: int, rank: int = 0) -> StepRecord:
    """A step as small as it can be."""
    return StepRecord(rank=rank, step=number, generation=1, duration_s=0.1, tokens=1)


@contextlib.asynccontextmanager
async def fleet(directory: Path) -> AsyncIterator[tuple[PaperController, Node]]:
    """A controller that answers and a node whose agent is not started yet; both gone afterwards."""
    controller = PaperController()
    await controller.start()
    node = Node(directory, controller.port)
    try:
        yield controller, node
    finally:
        await node.kill()
        await controller.stop()


Body = Callable[[PaperController, Node], Coroutine[Any, Any, None]]


def play(directory: Path, body: Body) -> None:
    """Run `body` with a controller and a node."""

    async def run() -> None:
        async with fleet(directory) as (controller, node):
            await body(controller, node)

    asyncio.run(run())
