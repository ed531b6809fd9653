"""What is fuzzed of the wire besides messages: an agent's first words, frames, rings sealed anew.

Damage behind a checksum is what somebody does who can write the checksum, too.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from pacekeeper.agent.rings.reader import RecordCounts, open_ring
from pacekeeper.controller.api.auth import peer_identity
from pacekeeper.controller.api.auth.attach_policy import AttachPolicy
from pacekeeper.controller.api.auth.rbac import Principal, Role
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.agent_service import AgentControl, report_in
from pacekeeper.controller.ingest.agent_stream import MAX_HELLO_BYTES
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.state.events import (
    Event,
    NodeAttached,
    NodeReported,
    NodesReported,
)
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import VersionError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert import reports as wire

Stated = tuple[type[Exception], ...]
NODES = ("n", "m", "n-3")
MOST_OF_A_FRAME = 1 << 16


def wire_targets() -> dict[str, tuple[Callable[[bytes], object], Stated]]:
    """By name: what runs a case, and the errors it states."""
    return {
        "first-message": (_first_message, ()),
        "ingest-frames": (_frames, (ValueError,)),
        "joined-reports": (_joined_reports, (DecodeError, ValueError)),
        "ring-command-resealed": (_command_resealed, (ValueError,)),
    }


def wire_files() -> dict[str, tuple[Callable[[Path], object], Stated]]:
    """Likewise, of files."""
    return {"ring-resealed": (_ring_resealed, (ValueError, VersionError))}


class _Welcoming(AttachPolicy):
    async def authenticate(self, identity: peer_identity.PeerIdentity) -> Principal:
        return Principal(name="agent", role=Role.AGENT, node="n")


def _first_message(data: bytes) -> object:
    """An agent's first message from the ingest process: answered or refused, never an error."""
    told, heard = list[bytes](), list[Event]()
    failures = list[str]()

    async def put(events: Sequence[Event]) -> None:
        state = State()
        for event in events:
            heard.append(event)
            state, _ = advance(state, event, config=ControllerConfig(), now_s=1.0)

    control = AgentControl(
        put=put,
        on_rejected=lambda: None,
        on_failure=lambda what, error: failures.append(f"{what}: {error!r}"),
        send_frame=told.append,
        attach_policy=_Welcoming(),
    )
    shown = peer_identity.PeerIdentity(peer="ipv4:127.0.0.1:1").to_bytes()
    frame = (ipc.OPENED, 1, 0, ipc.join_header(shown, data[:MAX_HELLO_BYTES]))
    loop = _loop()
    loop.run_until_complete(control.handle_frames([frame]))
    if failures:
        raise RuntimeError(failures[0])
    if len(told) != 1:
        raise RuntimeError(f"{len(told)} answers")
    return heard


def _frames(data: bytes) -> object:
    """The line between controller and ingest process, in pieces; and what is in its frames."""
    frames = ipc.Frames(MOST_OF_A_FRAME)
    found = []
    for at in range(0, len(data), 97):
        found += frames.feed(data[at : at + 97])
    for kind, _, _, held in found:
        if kind == ipc.OPENED:
            shown, _ = ipc.split_header(held)
            peer_identity.decode_peer_identity(shown)
        elif kind == ipc.ACKNOWLEDGE:
            tuple(ipc.decode_acknowledge(held)[2])
        elif kind == ipc.SEND:
            ipc.decode_send(held)
    return found


def _joined_reports(data: bytes) -> object:
    """Reports one behind the other, each with its length, of several nodes at once; twice.

    What the parser lets through must not bring the machine down.
    """
    reports = list[NodeReport]()
    at = 0
    while at + 4 <= len(data) and len(reports) < 6:
        size = int.from_bytes(data[at : at + 4], "little")
        reports.append(report_in(data[at + 4 : at + 4 + size]))
        at += 4 + size
    if not reports:
        raise ValueError("no report")
    told = tuple(
        NodeReported(node=NODES[i % len(NODES)], agent_incarnation="x", report=report)
        for i, report in enumerate(reports)
    )
    state, config = State(), ControllerConfig()
    attached = (NodeAttached(node=n, product_version="0", agent_incarnation="x") for n in NODES)
    events: list[Event] = [*attached, NodesReported(reports=told), told[0]]
    for now_s, event in enumerate(events):
        try:
            state, _ = advance(state, event, config=config, now_s=float(now_s))
        except ValueError as error:
            raise RuntimeError(f"the machine raises {error!r}") from error
    return state


def _command_resealed(data: bytes) -> object:
    """A command slot whose checksum fits; what it says is asked of it."""
    if len(data) < shm_ring.COMMAND_BYTES:
        raise ValueError("too short")
    sequence, crc, *rest = shm_ring._COMMAND.unpack_from(data)
    numbers, parts = rest[:5], rest[5:]
    crc = shm_ring._command_crc(sequence, numbers, *parts)
    return shm_ring.decode_command(shm_ring._COMMAND.pack(sequence, crc, *numbers, *parts))


def _ring_resealed(path: Path) -> object:
    """A ring file in which every slot's sum fits, as the agent opens and reads it."""
    data = bytearray(path.read_bytes()[: shm_ring.FILE_BYTES])
    for at in range(
        shm_ring.SLOTS_OFFSET, len(data) - shm_ring.SLOT_BYTES + 1, shm_ring.SLOT_BYTES
    ):
        slot = data[at : at + shm_ring.SLOT_BYTES]
        if any(slot[: shm_ring.SEQUENCE.size]):
            sequence, payload = slot[: shm_ring.SEQUENCE.size], slot[shm_ring.SEQUENCE.size + 4 :]
            total = shm_ring.slot_checksum(bytes(sequence), bytes(payload))
            data[at : at + shm_ring.SLOT_BYTES] = sequence + shm_ring.SLOT_REST.pack(
                total, bytes(payload)
            )
    path.write_bytes(data.ljust(shm_ring.FILE_BYTES, b"\0"))
    return read_ring(path)


def read_ring(path: Path) -> object:
    """A ring's file as the agent opens it and reads it to its end."""
    named = path.with_name(shm_ring.ring_file_name(0))
    path.replace(named)
    reader = open_ring(named, "moe", 1.0)
    try:
        return reader.read_remaining(RecordCounts())
    finally:
        reader.close()


_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]


def wire_seeds(
    reports: tuple[bytes, ...], ring_file: bytes, command: bytes
) -> dict[str, tuple[bytes, ...]]:
    """Valid inputs: `reports` are AttachRequests, some with a Hello."""
    hello = control_pb2.Hello(
        protocol_version=wire.PROTOCOL_VERSION, product_version="0", node="n",
        agent_incarnation="x", rack="r-1",
    )  # fmt: skip
    plain = [data for data in reports if _is_report(data)]
    joined = b"".join(len(data).to_bytes(4, "little") + data for data in plain * 2)
    shown = peer_identity.PeerIdentity(
        peer="ipv4:10.0.0.1:7", authorization=("Bearer x",), has_certificate=True,
        uris=("spiffe://pacekeeper/node/n",), names=("n.example",),
    )  # fmt: skip
    head = ipc.join_header(shown.to_bytes(), b"hello")
    frames = (
        ipc.frame(ipc.LISTENS, number=7), ipc.frame(ipc.OPENED, 1, 0, head),
        ipc.frame(ipc.REPORT, 1, 2, b"x"), ipc.frame(ipc.CLOSED, 1),
        ipc.encode_acknowledge(7, 8, [(1, 2), (3, 4)]),
        ipc.encode_send([1, 3], 5, b"moe/plan", b"y"), ipc.frame(ipc.PING),
    )  # fmt: skip
    return {
        "first-message": (control_pb2.AttachRequest(hello=hello).SerializeToString(), *plain),
        "ingest-frames": (b"".join(frames), *frames),
        "joined-reports": (joined,),
        "ring-command-resealed": (command,),
        "ring-resealed": (ring_file,),
    }


def _is_report(data: bytes) -> bool:
    return bool(control_pb2.AttachRequest.FromString(data).HasField("report"))
