"""What a large layout offer to many agents costs the front: memory, and until all have it.

Real front process; agents are sockets of this process with windows as wide as HTTP/2 has them. They
read nothing at first, while `--offers` offers are made one after the other, each taking over from
the one before; the front's peak is then read. Then READERS of them read until each has whole
messages only, and the others leave.

Prints one line of JSON.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.http2_stream import ACK, DATA, SETTINGS, Stream, frame, opening
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.http2.proxy import ATTACH
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.ingest.runtime_dir import own_folder
from pacekeeper.controller.ingest.supervisor import IngestSupervisor
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.protos import control_pb2

SETTLES_S = 1.0
READERS = 50
READ_BYTES = 1 << 20
HELLO = control_pb2.AttachRequest(hello=control_pb2.Hello(node="n")).SerializeToString()
WELCOME = control_pb2.AttachResponse(welcome=control_pb2.Welcome()).SerializeToString()


class Controller:
    """What of one a front needs: who attaches is welcomed."""

    def __init__(self, folder: str) -> None:
        self.streams = list[int]()
        settings = {
            "listen": "127.0.0.1:0",
            "inner": f"unix:{folder}/nowhere",
            "tls": asdict(TlsConfig()),
            "max_report_bytes": 1 << 20,
            "connection_s": None,
            "reports": {"per_s": 1e9, "at_once": 1 << 30},
        }
        self.door = IngestSupervisor(
            settings,
            on_frames=self._hear,
            on_gone=self._lose,
            on_restart=lambda: None,
            on_handshake_failed=lambda: None,
        )

    async def _hear(self, frames: Sequence[Frame]) -> None:
        opened = [number for kind, number, *_ in frames if kind == ipc.OPENED]
        if opened:
            self.door.say(ipc.encode_send(opened, 0, b"welcome", WELCOME))
            self.streams += opened

    async def _lose(self) -> None:
        raise AssertionError("the front ended")

    def bytes_of(self, what: str) -> int:
        """VmRSS or VmHWM of the front."""
        assert self.door._process is not None, "it was started"
        lines = Path(f"/proc/{self.door._process.pid}/status").read_text().splitlines()
        (kilobytes,) = (text.split()[1] for text in lines if text.startswith(f"{what}:"))
        return int(kilobytes) << 10


async def attached(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a call and its first message."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
    called = opening(ATTACH, address) + frame(SETTINGS, ACK, 0)
    writer.write(called + Stream().send(HELLO))
    return reader, writer


async def read(reader: asyncio.StreamReader, size: int) -> int:
    """Until a message of so many bytes came: bytes of data in all."""
    data, told = bytearray(), 0
    while True:
        data += await reader.read(READ_BYTES)
        at = 0
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if len(data) < end:
                break
            if data[at + 3] == DATA:
                told += end - at - 9
            at = end
        del data[:at]
        if told % (size + 5) == len(WELCOME) + 5 and told > size:
            return told


async def measure(agents: int, offer_bytes: int, offers: int) -> dict[str, Any]:
    with own_folder() as folder:
        controller = Controller(str(folder))
        door = controller.door
        await door.start()
        running = asyncio.create_task(door.run())
        try:
            ends = [await attached(door.address) for _ in range(agents)]
            while len(controller.streams) < agents:
                await asyncio.sleep(0.05)
            await asyncio.sleep(SETTLES_S)
            before = controller.bytes_of("VmRSS")
            for _ in range(offers):
                door.say(ipc.encode_send(controller.streams, 0, b"plan", bytes(offer_bytes)))
                await asyncio.sleep(SETTLES_S)
            grown = controller.bytes_of("VmHWM") - before
            began_s = time.monotonic()
            for _, writer in ends[READERS:]:
                writer.transport.abort()
            readers = [reader for reader, _ in ends[:READERS]]
            told = await asyncio.gather(*(read(reader, offer_bytes) for reader in readers))
            took_s = time.monotonic() - began_s
            for _, writer in ends:
                writer.close()
        finally:
            await door.drain()
            running.cancel()
    return {
        "agents": agents,
        "offer_mb": offer_bytes / 1e6,
        "offers": offers,
        "front_before_mb": round(before / 1e6, 1),
        "front_grew_mb": round(grown / 1e6, 1),
        "readers_have_one_s": round(took_s, 2),
        "told_mb": round(sum(told) / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--offer-mb", type=float, default=20.0)
    parser.add_argument("--offers", type=int, default=3)
    options = parser.parse_args()
    size = int(options.offer_mb * 1e6)
    print(json.dumps(asyncio.run(measure(options.agents, size, options.offers))))
    sys.exit(0)


if __name__ == "__main__":
    main()
