"""The ingest processes of a controller, which share one port by SO_REUSEPORT.

The kernel assigns each connection to one of them. Stream numbers are unique across all processes.
The controller sends each frame to all of them, and each ignores streams of the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.ingest.supervisor import IngestSupervisor, PortTakenError
from pacekeeper.protos.listening import bind_error


class IngestProcesses:
    """Supervises a fixed number of ingest processes."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        count: int,
        on_frames: Callable[[Sequence[Frame]], Awaitable[None]],
        on_gone: Callable[[Callable[[int], bool]], Awaitable[None]],
        on_restart: Callable[[], None],
    ) -> None:
        """Create the supervisors; nothing is started yet.

        Args:
            settings: See `worker.serve`; the number of processes is added.
            count: Number of ingest processes.
            on_frames: Handles frames; returns when their events are stored.
            on_gone: Called when an ingest process has ended, with a predicate that is true for the
                numbers of its streams.
            on_restart: Counts restarts.
        """
        self._settings = {**settings, "processes": count}
        self._count = count
        self._on_frames, self._on_gone, self._on_restart = on_frames, on_gone, on_restart
        self._supervisors: list[IngestSupervisor] = []

    @property
    def address(self) -> str:
        """HOST:PORT that agents connect to."""
        return self._supervisors[0].address

    def send_frame(self, frame: bytes) -> None:
        """Send a frame to all ingest processes."""
        for one in self._supervisors:
            one.send_frame(frame)

    async def start(self) -> None:
        """Start all processes.

        Raises:
            PortTakenError: The port is in use.
            HostError: A process did not start.
        """
        if self._count > 1 and (why := bind_error(str(self._settings["listen"]))):
            raise PortTakenError(str(why))  # SO_REUSEPORT would share the port
        for index in range(self._count):
            one = self._supervisor(index)
            self._supervisors.append(one)
            try:
                await one.start()
            except BaseException:
                await asyncio.gather(*(other.drain() for other in self._supervisors[:-1]))
                raise
            self._settings["listen"] = one.address  # with the port that was chosen for port 0

    async def run(self) -> None:
        """Run until drained or cancelled. Raises HostError if a process ends too often."""
        await asyncio.gather(*(one.run() for one in self._supervisors))

    async def drain(self) -> None:
        """End all streams, handle the frames received before, then end the processes."""
        await asyncio.gather(*(one.drain() for one in self._supervisors))

    async def abort(self) -> None:
        """End the processes at once; used when nothing can be stored any more."""
        await asyncio.gather(*(one.abort() for one in self._supervisors))

    def _supervisor(self, index: int) -> IngestSupervisor:
        remainder = (index + 1) % self._count
        return IngestSupervisor(
            {**self._settings, "index": index},
            on_frames=self._on_frames,
            on_gone=lambda: self._on_gone(lambda number: number % self._count == remainder),
            on_restart=self._on_restart,
        )
