"""Supervises the ingest process: starts it, reads from it, restarts it if it dies, hangs or errs.

Agents then come back by themselves with what was not acknowledged. An ingest process that does
not stay ends the controller, with a clear message: nothing hangs, and nobody is served by halves.
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
UNSENT_BYTES = 64 << 20  # what an ingest process that reads nothing may keep waiting here
READ_BYTES = 4 << 20
# What many agents tell is cheaper to take in together: a job's ranks tell of the same step.
GATHER_S, GATHER_S_PER_STREAM = 0.1, 1e-5
SLACK_BYTES = 1 << 17  # of a frame beyond its report: who calls, with which token
_log = logging.getLogger(__name__)


class PortTakenError(Exception):
    """It can not listen; the words are the system's, or those of a bad certificate."""


class IngestSupervisor:
    """The ingest process of a controller. `on_frames` returns when all they bring is stored: until
    then nothing more is read. `on_gone` is called when all its streams are lost.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        on_frames: Callable[[Sequence[Frame]], Awaitable[None]],
        on_gone: Callable[[], Awaitable[None]],
        on_restart: Callable[[], None],
    ) -> None:
        """`settings`: see `worker.serve`."""
        self._settings = dict(settings)
        self._on_frames, self._on_gone = on_frames, on_gone
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._alive_s = 0.0
        self._reading_s: float | None = None  # since when it is listened to; None: not now
        self._draining = asyncio.Event()
        self._is_read: asyncio.Event | None = None  # to the end of the line; None: nobody reads
        self._num_streams = 0
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self._settings["listen"])

    def say(self, frame: bytes) -> None:
        """Put a frame onto the line; nothing while the ingest process is away."""
        if self._writer is not None:
            self._writer.write(frame)

    async def start(self) -> int:
        """The port it listens on. Raises PortTakenError, and HostError where it does not start."""
        try:
            return await self._start()
        except BaseException:  # also one that is cancelled: nobody else would end it
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
        self.say(ipc.serve(self._settings))
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
        """Until drained or cancelled. Raises HostError if the ingest process does not stay."""
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
        """Unless it shall end meanwhile: a drain cuts this short."""
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
        """End all streams in peace, take in what came before, then the process."""
        self._draining.set()
        if self._is_read is not None and self._is_read.is_set():
            await self._end()  # it is being started again, and has no streams yet
            return
        self.say(ipc.frame(ipc.DRAIN))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAINS_WITHIN_S):
                if self._process is not None:
                    await self._process.wait()
                if self._is_read is not None:
                    await self._is_read.wait()
        await self._end()

    async def abort(self) -> None:
        """End the process at once; nothing more of what its agents sent is taken in."""
        self._draining.set()
        await self._end()

    async def _serve(self) -> str:
        """Read until the line ends; why it did."""
        watching = asyncio.create_task(self._watch())
        self._is_read = is_read = asyncio.Event()
        try:
            while frames := await self._read():
                self._reading_s, read_s = None, time.monotonic()
                await self._on_frames(frames)
                await self._gather(read_s)
        except ValueError as error:
            return f"it errs: {error}"
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
        return "it closed the line" if code is None else f"it ended with code {code}"

    async def _gather(self, read_s: float) -> None:
        """Let come what many agents tell, from the last reading on; not while they are sent away.

        What took long to take in is not waited for as well: the line would only fill up.
        """
        gather_s = min(GATHER_S, GATHER_S_PER_STREAM * self._num_streams)
        left_s = read_s + gather_s - time.monotonic()
        if left_s > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._draining.wait()

    async def _read(self) -> list[Frame]:
        """The next frames for the controller; none: the line is over. Raises ValueError."""
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
        """An ingest process that hangs is killed, which ends the line."""
        silent_s = 0.0  # by the looks at it: it may be this process that was stopped meanwhile
        while True:
            asked_s = time.monotonic()
            self.say(ipc.frame(ipc.PING))
            await asyncio.sleep(PING_S)
            if self._writer is None:
                return  # a drain took too long
            unsent = self._writer.transport.get_write_buffer_size()
            # While this side is at its reports an answer may wait for its turn.
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
        """Whatever is left of it."""
        self._kill()
        if self._process is not None:
            await self._process.wait()
        if self._writer is not None:
            self._writer.close()
        self._process = self._reader = self._writer = None


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A process that is started inside is deaf to those signals from its first moment on.

    Terminals and service managers send them to all: it would end before it can say that it is the
    controller who ends it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
