"""The process that ends agents' streams: killed, hanging, lying; and a controller that is busy."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from pacekeeper.controller.ingest import ipc, supervisor
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.ingest.supervisor import IngestSupervisor, PortTakenError
from pacekeeper.controller.ingest.worker import UNSENT_BYTES
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import HostError
from pacekeeper.protos import (
    control_pb2,
    control_pb2_grpc,
    status_pb2,
    telemetry_pb2,
    tls,
)
from support.controllers import (
    HELLO,
    PATIENCE_S,
    ControllerProcess,
    ScriptedAgent,
    children,
    until,
)

LISTENS = ipc.frame(ipc.LISTENS, 0, 7443)
WELCOME = control_pb2.AttachResponse(welcome=control_pb2.Welcome()).SerializeToString()


def test_a_front_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path, "--metrics-listen", "127.0.0.1:0") as controller:
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait()
        pid = controller.process.pid
        (ingest,) = children(pid)
        os.kill(ingest, signal.SIGKILL)
        code, _ = agent.wait_for_end()
        assert code is grpc.StatusCode.UNAVAILABLE
        (again,) = until("it is started again", lambda: [p for p in children(pid) if p != ingest])

        def comes_back() -> ScriptedAgent | None:
            one = ScriptedAgent(controller.address)
            until("it is heard", lambda: one.is_welcome or one.error is not None)
            return one if one.is_welcome else None

        agent = until("the port is open again", comes_back)
        agent.report_and_wait()
        nodes = controller.status.ListNodes(status_pb2.ListNodesRequest()).nodes
        assert [(node.name, node.is_connected) for node in nodes] == [("node-0", True)]
        assert "is started again: it ended with code -9" in controller.log
        assert controller.stop() == 0
        assert not Path(f"/proc/{again}").exists()


def test_a_front_ends_with_its_controller(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        (ingest,) = children(controller.process.pid)
        controller.kill()
        until("it is gone", lambda: not Path(f"/proc/{ingest}").exists())


@dataclass
class Door:
    """An IngestSupervisor whose frames are kept."""

    heard: list[Frame] = field(default_factory=list)
    is_free: asyncio.Event = field(default_factory=asyncio.Event)
    gone: int = 0
    restarts: int = 0

    per_s: float = 1e9
    at_once: int = 1 << 30

    def __post_init__(self) -> None:
        self.is_free.set()
        self.door = IngestSupervisor(
            {
                "listen": "127.0.0.1:0",
                "api_listen": "127.0.0.1:1",
                "tls": asdict(TlsConfig()),
                "max_report_bytes": 1 << 20,
                "connection_s": None,
                "processes": 1,
                "index": 0,
                "reports": {"per_s": self.per_s, "at_once": self.at_once},
            },
            on_frames=self._hear,
            on_gone=self._lose,
            on_restart=self._restart,
        )

    async def _hear(self, frames: Sequence[Frame]) -> None:
        for kind, number, _, _ in frames:
            if kind == ipc.OPENED:
                self.door.send_frame(ipc.encode_send([number], 0, b"welcome", WELCOME))
        self.heard += frames
        await self.is_free.wait()

    async def _lose(self) -> None:
        self.gone += 1

    def _restart(self) -> None:
        self.restarts += 1

    @property
    def sequences(self) -> list[int]:
        return [number for kind, _, number, _ in self.heard if kind == ipc.REPORT]


def play(scene: Callable[[Door], Awaitable[None]], **limits: Any) -> Door:
    """The scene with an ingest process that runs."""

    async def run() -> Door:
        door = Door(**limits)
        await door.door.start()
        running = asyncio.create_task(door.door.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(door)
        finally:
            await door.door.drain()
            running.cancel()
        return door

    return asyncio.run(run())


async def holds(answer: Callable[[], Any]) -> None:
    while not answer():
        await asyncio.sleep(0.02)


def test_while_the_controller_is_busy_reports_stay_with_their_agents(tmp_path: Path) -> None:
    size, count = 1 << 16, 600  # far more than may wait on the way

    async def scene(door: Door) -> None:
        async with tls.aio_channel(door.door.address, TlsConfig()) as channel:
            call: Any = control_pb2_grpc.AgentControlServiceStub(channel).Attach()
            await call.write(control_pb2.AttachRequest(hello=HELLO))
            assert await call.read() is not grpc.aio.EOF
            door.is_free.clear()
            written = 0

            async def send() -> None:
                nonlocal written
                health = telemetry_pb2.AgentHealth(nvml="x" * size)
                for sequence in range(1, count + 1):
                    report = telemetry_pb2.NodeReport(sequence=sequence, health=health)
                    await call.write(control_pb2.AttachRequest(report=report))
                    written = sequence
                await call.done_writing()

            sending = asyncio.create_task(send())
            before = -1
            while before != written or not written:  # until it comes no further
                before = written
                await asyncio.sleep(0.5)
            assert written * size < 3 * UNSENT_BYTES
            door.is_free.set()
            await sending
            await holds(lambda: door.heard[-1][0] == ipc.FINISHED)
            assert door.sequences == list(range(1, count + 1))

    play(scene)


def test_an_agent_that_floods_is_held_back_by_its_bytes_and_starves_no_other() -> None:
    large, times = "x" * (64 << 10), 8  # one counts as so many

    def of(door: Door, parity: int) -> int:
        return sum(1 for one in door.sequences if one % 2 == parity)

    async def scene(door: Door) -> None:
        own = [tls.aio_channel(door.door.address, TlsConfig()) for _ in range(2)]
        async with own[0], own[1]:
            began_s = time.monotonic()
            polite, flooding = await welcomed(own[0]), await welcomed(own[1])
            flood = asyncio.create_task(send(flooding, range(1, 100_000, 2), large))
            await holds(lambda: of(door, 1))
            for count in range(1, 16):
                await send(polite, (2 * count,), "")
                while of(door, 0) < count:
                    await asyncio.sleep(0.02)
            passed_s = time.monotonic() - began_s
            assert not flood.done()
            flood.cancel()
            assert of(door, 1) * times <= 20 + 40.0 * passed_s + times

    play(scene, per_s=40.0, at_once=20)


async def welcomed(channel: grpc.aio.Channel) -> Any:
    """The call of an agent that may report."""
    call: Any = control_pb2_grpc.AgentControlServiceStub(channel).Attach()
    await call.write(control_pb2.AttachRequest(hello=HELLO))
    assert (await call.read()).HasField("welcome")
    return call


async def send(call: Any, numbers: Iterable[int], more: str) -> None:
    """Reports of these numbers, each with so much in it that nobody reads."""
    health = telemetry_pb2.AgentHealth(nvml=more)
    for number in numbers:
        report = telemetry_pb2.NodeReport(sequence=number, health=health)
        await call.write(control_pb2.AttachRequest(report=report))


def test_what_came_before_a_drain_is_taken_in_however_long_the_door_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "GATHER_S", 60.0)
    monkeypatch.setattr(supervisor, "GATHER_S_PER_STREAM", 60.0)

    async def scene() -> Door:
        door = Door()
        await door.door.start()
        running = asyncio.create_task(door.door.run())
        async with tls.aio_channel(door.door.address, TlsConfig()) as channel:
            call: Any = control_pb2_grpc.AgentControlServiceStub(channel).Attach()
            await call.write(control_pb2.AttachRequest(hello=HELLO))
            assert await call.read() is not grpc.aio.EOF
            await door.door.drain()
            async with asyncio.timeout(PATIENCE_S):
                await running
        return door

    door = asyncio.run(scene())
    assert [kind for kind, *_ in door.heard] == [ipc.OPENED, ipc.CLOSED]


def test_what_is_no_report_is_told_and_not_handed_on(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        async with tls.aio_channel(door.door.address, TlsConfig()) as channel:
            attach: Any = channel.stream_stream("/pacekeeper.v1.AgentControlService/Attach")
            for wrong in (b"\xff\xff", control_pb2.AttachRequest(hello=HELLO).SerializeToString()):
                door.heard.clear()
                call = attach()
                await call.write(b"anything")
                await call.read()
                await call.write(wrong)
                await holds(lambda: any(kind == ipc.MALFORMED for kind, *_ in door.heard))
                assert door.sequences == []
                call.cancel()

    play(scene)


def test_a_message_of_a_term_that_may_be_over_is_not_sent() -> None:
    async def scene(door: Door) -> None:
        async with tls.aio_channel(door.door.address, TlsConfig()) as channel:
            call: Any = control_pb2_grpc.AgentControlServiceStub(channel).Attach()
            await call.write(control_pb2.AttachRequest(hello=HELLO))
            assert (await call.read()).HasField("welcome")
            number = door.heard[0][1]
            door.door.send_frame(
                ipc.encode_acknowledge(1, 1, [(number, 5)])
            )  # for the first ms of the host
            door.door.send_frame(ipc.encode_acknowledge(1, 0, [(number, 6)]))
            assert (await call.read()).acknowledge.sequence == 6

    play(scene)


def test_a_large_offer_is_fetched_by_its_digest() -> None:
    layout = bytes(3 << 20)
    plan = control_pb2.OfferPlan(generation=2, layout_json=layout, sha256=b"digest")
    offer = control_pb2.AttachResponse(offer_plan=plan).SerializeToString()

    async def scene(door: Door) -> None:
        async with tls.aio_channel(door.door.address, TlsConfig()) as channel:
            call = await welcomed(channel)
            number = door.heard[0][1]
            door.door.send_frame(ipc.encode_send([number], 0, b"plan", offer))
            offered = (await call.read()).offer_plan
            assert (offered.generation, offered.layout_json) == (2, b"")
            stub: Any = control_pb2_grpc.AgentControlServiceStub(channel)
            request = control_pb2.FetchLayoutRequest(sha256=offered.sha256)
            fetched = await asyncio.gather(*(stub.FetchLayout(request) for _ in range(40)))
            assert all(one.layout_json == layout for one in fetched)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.FetchLayout(control_pb2.FetchLayoutRequest(sha256=b"another"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    play(scene)


def test_a_first_message_that_is_too_large_for_hello_is_not_handed_on() -> None:
    async def scene(door: Door) -> None:
        async with tls.aio_channel(door.door.address, TlsConfig()) as channel:
            call: Any = control_pb2_grpc.AgentControlServiceStub(channel).Attach()
            hello = control_pb2.Hello(product_version="x" * (128 << 10))
            await call.write(control_pb2.AttachRequest(hello=hello))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert door.heard == []

    play(scene)


def test_a_front_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ALIVE_WITHIN_S", 2.0)
    monkeypatch.setattr(supervisor, "PING_S", 0.1)

    async def scene(door: Door) -> None:
        assert door.door._process is not None
        address = door.door.address
        os.kill(door.door._process.pid, signal.SIGSTOP)
        await holds(lambda: door.restarts and door.door._writer is not None)
        assert (door.gone, door.door.address) == (1, address)

    play(scene)


def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bytes, then: bytes = b"") -> None:
    """In place of each ingest process a process that says this."""
    script = tmp_path / "ingest"
    python = os.path.realpath(f"/proc/{os.getpid()}/exe")
    script.write_text(
        f"#!{python}\nimport socket, sys, time\n"
        f"line = socket.socket(fileno=int(sys.argv[-1]))\n"
        f"line.recv(1 << 16)\nline.sendall({says!r})\ntime.sleep(0.1)\nline.sendall({then!r})\n"
    )
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize(
    ("then", "words"), [(b"garbage, and more of it", "no frame"), (b"", "it ended with code 0")]
)
def test_a_front_that_does_not_stay_ends_the_controller(
    then: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.0)
    lying(tmp_path, monkeypatch, LISTENS, then)

    async def scene() -> None:
        door = Door()
        await door.door.start()
        with pytest.raises(HostError, match=f"ended 6 times.*{re.escape(words)}"):
            await door.door.run()
        assert door.gone == 6

    asyncio.run(scene())


def test_a_front_that_can_not_start_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nonsense in (b"", b"garbage, and more of it"):
        lying(tmp_path, monkeypatch, nonsense)
        with pytest.raises(HostError, match="did not start"):
            asyncio.run(Door().door.start())
    lying(tmp_path, monkeypatch, ipc.frame(ipc.LISTENS, 0, 0, b"taken"))
    with pytest.raises(PortTakenError, match="taken"):
        asyncio.run(Door().door.start())
