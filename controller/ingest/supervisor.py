"""Supervises the ingest process: starts it, reads its frames, restarts it if it ends or hangs.

After a restart agents reconnect and repeat unacknowledged reports. If the process ends more than
MAX_RESTARTS times within WITHIN_S, the controller ends with an error.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.core.errors import HostError

STARTS_WITHIN_S = 60.0  # on a host that is busy with other things
PING_S = 1.0
ALIVE_WITHIN_S = 20.0
AGAIN_S = 0.2
MAX_RESTARTS, WITHIN_S = 5, 60.0
DRAINS_WITHIN_S = 4.0
UNSENT_BYTES = 64 << 20  # to an ingest process; one that leaves more unread counts as hanging
READ_BYTES = 4 << 20
# Reports of many agents are cheaper to process together: a job's ranks report the same step.
GATHER_S, GATHER_S_PER_STREAM = 0.1, 1e-5
SLACK_BYTES = 1 << 17  # of a frame beyond its report: the caller's identity and token
_log = logging.getLogger(__name__)


class PortTakenError(Exception):
    """The ingest process cannot listen; the text is the system's error or that of a certificate."""


class IngestSupervisor:
    """The ingest process of a controller."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        on_frames: Callable[[Sequence[Frame]], Awaitable[None]],
        on_gone: Callable[[], Awaitable[None]],
        on_restart: Callable[[], None],
    ) -> None:
        """Create the supervisor; nothing is started yet.

        Args:
            settings: See `worker.serve`.
            on_frames: Handles frames; returns when their events are stored. Until then nothing
                more is read.
            on_gone: Called when the process is gone, with all its streams.
            on_restart: Counts restarts.
        """
        self._settings = dict(settings)
        self._on_frames, self._on_gone = on_frames, on_gone
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._alive_s = 0.0
        self._reading_s: float | None = None  # since when a read waits; None: no read waits
        self._draining = asyncio.Event()
        self._is_read: asyncio.Event | None = None  # set at the connection's end; None: not read
        self._num_streams = 0
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    @property
    def address(self) -> str:
        """HOST:PORT that agents connect to."""
        return str(self._settings["listen"])

    def send_frame(self, frame: bytes) -> None:
        """Send a frame; nothing is sent while no ingest process runs."""
        if self._writer is not None:
            self._writer.write(frame)

    async def start(self) -> int:
        """Start the process; return its port. Raises PortTakenError or HostError."""
        try:
            return await self._start()
        except BaseException:  # also when cancelled: nothing else would end it
            await self._end()
            raise

    async def _start(self) -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, _deaf():
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "pacekeeper.controller.ingest.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
            )
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=ours, limit=READ_BYTES // 2
        )
        self._num_streams = 0
        self._frames = ipc.Frames(self._settings["max_report_bytes"] + SLACK_BYTES)
        self.send_frame(ipc.serve(self._settings))
        try:
            async with asyncio.timeout(STARTS_WITHIN_S):
                frames = await self._read()
        except (TimeoutError, ValueError, ConnectionError):
            frames = []
        self._alive_s = time.monotonic()
        if not frames or frames[0][0] != ipc.LISTENS:
            raise HostError(
                "the process that serves agents did not start",
                remedy="its own messages stand above; is the host out of memory or processes?",
            )
        _, _, port, why = frames[0]
        if not port:
            raise PortTakenError(why.decode())
        host, _, _ = self._settings["listen"].rpartition(":")
        self._settings["listen"] = f"{host}:{port}"  # the same one, should it be started again
        if len(frames) > 1:
            await self._on_frames(frames[1:])
        return port

    async def run(self) -> None:
        """Run until drained or cancelled. Raises HostError after too many restarts."""
        while True:
            why = await self._serve()
            if self._draining.is_set():
                return
            await self._end()
            await self._on_gone()
            self._on_restart()
            now_s = time.monotonic()
            if len(self._restarts) == MAX_RESTARTS and now_s - self._restarts[0] < WITHIN_S:
                raise HostError(
                    f"the process that serves agents ended {MAX_RESTARTS + 1} times within "
                    f"{WITHIN_S:.0f} s, at last: {why}",
                    remedy="its own messages stand above; is the host out of memory?",
                )
            self._restarts.append(now_s)
            _log.error("the process that serves agents is started again: %s", why)
            await self._start_again()
            if self._draining.is_set():
                await self._end()
                return

    async def _start_again(self) -> None:
        """Start the process after AGAIN_S, unless it is drained before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await self._draining.wait()
                return
        try:
            await self.start()
        except (HostError, PortTakenError) as error:
            if self._draining.is_set():
                return
            if isinstance(error, HostError):
                raise
            raise HostError(
                f"{self._settings['listen']} was taken while the process that serves agents "
                f"was started again: {error}",
                remedy="end what listens there, then start the controller again",
            ) from error

    async def drain(self) -> None:
        """End all streams with OK, process what arrived before, then end the process."""
        self._draining.set()
        if self._is_read is not None and self._is_read.is_set():
            await self._end()  # it is being started again, and has no streams yet
            return
        self.send_frame(ipc.frame(ipc.DRAIN))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAINS_WITHIN_S):
                if self._process is not None:
                    await self._process.wait()
                if self._is_read is not None:
                    await self._is_read.wait()
        await self._end()

    async def abort(self) -> None:
        """End the process at once; frames that were not read are lost."""
        self._draining.set()
        await self._end()

    async def _serve(self) -> str:
        """Read frames until the connection ends; return the reason."""
        watching = asyncio.create_task(self._watch())
        self._is_read = is_read = asyncio.Event()
        try:
            while frames := await self._read():
                self._reading_s, read_s = None, time.monotonic()
                await self._on_frames(frames)
                await self._gather(read_s)
        except ValueError as error:
            return f"it sent an invalid frame: {error}"
        except ConnectionError:
            pass  # what it had not read is lost with it
        finally:
            watching.cancel()
            is_read.set()
        code = None
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    code = await self._process.wait()
        return "it closed its socket" if code is None else f"it ended with code {code}"

    async def _gather(self, read_s: float) -> None:
        """Wait until reports of many agents have arrived, counted from the last read.

        Time that the previous batch took counts. A drain ends the wait.
        """
        gather_s = min(GATHER_S, GATHER_S_PER_STREAM * self._num_streams)
        left_s = read_s + gather_s - time.monotonic()
        if left_s > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._draining.wait()

    async def _read(self) -> list[Frame]:
        """The next frames for the controller; empty: the connection ended. Raises ValueError."""
        reader = self._reader
        if reader is None:
            return []  # a drain took too long
        self._reading_s = time.monotonic()
        while data := await reader.read(READ_BYTES):
            self._alive_s = time.monotonic()
            frames = []
            for frame in self._frames.feed(data):
                if frame[0] != ipc.ALIVE:
                    frames.append(frame)
                    self._num_streams += (frame[0] == ipc.OPENED) - (frame[0] == ipc.CLOSED)
            if frames:
                return frames
        return []

    async def _watch(self) -> None:
        """Kill an ingest process that hangs, which ends its connection."""
        silent_s = 0.0  # counted in pings: this process may itself have been stopped meanwhile
        while True:
            asked_s = time.monotonic()
            self.send_frame(ipc.frame(ipc.PING))
            await asyncio.sleep(PING_S)
            if self._writer is None:
                return  # a drain took too long
            unsent = self._writer.transport.get_write_buffer_size()
            # While this process handles frames, an answer may wait unread.
            is_silent = self._reading_s is not None and asked_s > max(
                self._alive_s, self._reading_s
            )
            silent_s = silent_s + PING_S if is_silent else 0.0
            if silent_s > ALIVE_WITHIN_S or unsent > UNSENT_BYTES:
                _log.error("the process that serves agents hangs: silent for %.0f s", silent_s)
                self._kill()
                return

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _end(self) -> None:
        """Kill the process if it runs, and close the connection."""
        self._kill()
        if self._process is not None:
            await self._process.wait()
        if self._writer is not None:
            self._writer.close()
        self._process = self._reader = self._writer = None


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Block SIGINT and SIGTERM in a process started in the block, before its first instruction.

    Terminals and service managers signal the whole group, but the controller ends the process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
