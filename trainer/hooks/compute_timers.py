"""Clocks that measure a micro-batch's compute time without waits for other ranks. No torch import.

The hooks call a clock when compute begins, pauses for a collective, resumes and ends. All clocks
return a `ComputeTime`; the attachment states which one a rank uses.
"""

import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, thread_time
from typing import Any, NamedTuple, Protocol, runtime_checkable

SHORT_S = 200e-6  # a gap in which a thread is taken to have computed
# Time off the CPU since the last look at the run queue that needs no new one: a constant and a part
# of the time since the last segment ended, at most MAX_IDLE_S. A look costs 16 us in a cold cache.
IDLE_S, IDLE_PART, MAX_IDLE_S = 10e-6, 1e-3, 10e-3
MAX_LATE = 64  # micro-batches that a device may lag behind its host
SCHEDSTAT = "/proc/thread-self/schedstat"
_Segments = list[tuple[Any, Any, float]]  # events of begin and end, time of the host
_made = tuple.__new__  # skips the Python frame of a named tuple's own constructor
_log = logging.getLogger(__name__)


class ComputeTime(NamedTuple):
    """Compute time of one micro-batch in seconds; None if this clock does not measure a part.

    A named tuple, since one is made per micro-batch at a third of a frozen dataclass's cost.
    """

    compute_s: float
    cpu_s: float | None = None
    run_queue_s: float | None = None  # ready to run, waiting for a core
    stall_s: float | None = None  # wall - CPU - run queue: frozen, stopped, swapped
    wait_s: float | None = None  # paused: inside collectives
    ended_mono_s: float = 0.0
    lag: int = 0  # how many micro-batches before the one that just ended
    more: tuple["ComputeTime", ...] = ()  # later times that became known with it, in order

    @property
    def is_of_previous(self) -> bool:
        """Whether it belongs to an earlier micro-batch than the one that just ended."""
        return self.lag > 0


class SegmentClock(Protocol):
    """Called once per micro-batch in this order: begin, (pause, resume)*, end."""

    def begin(self) -> None:
        """Start timing a micro-batch."""

    def pause(self) -> None:
        """Pause: a wait for other ranks begins."""

    def resume(self) -> None:
        """Resume after a wait for other ranks."""

    def end(self) -> ComputeTime | None:
        """End the micro-batch; return None if its time is not known yet (asynchronous devices)."""


@runtime_checkable
class LateClock(Protocol):
    """A clock that may know times only after `end`."""

    def known(self) -> list[ComputeTime]:
        """Return the times not returned before, oldest first."""


class PipelineClock(SegmentClock, Protocol):
    """A clock shared by several open micro-batches in turn, as in a pipeline stage."""

    def suspend(self) -> Any:
        """Suspend the open micro-batch; return its state."""

    def resume_suspended(self, aside: Any) -> None:
        """Resume a suspended micro-batch; time spent meanwhile is not counted."""

    def time_of(self, aside: Any) -> ComputeTime | None:
        """End a suspended micro-batch, possibly later; return what `end` returns."""


@dataclass(slots=True)
class WallClock:
    """Wall time of the segments: the default if nothing better is known."""

    _began_s: float = 0.0
    _paused_s: float = 0.0
    _compute_s: float = 0.0
    _wait_s: float = 0.0

    def begin(self) -> None:
        self._compute_s = self._wait_s = 0.0
        self._began_s = time.perf_counter()

    def pause(self) -> None:
        self._paused_s = time.perf_counter()
        self._compute_s += self._paused_s - self._began_s

    def resume(self) -> None:
        self._began_s = time.perf_counter()
        self._wait_s += self._began_s - self._paused_s

    def suspend(self) -> Any:
        self.pause()
        return self._compute_s, self._wait_s, monotonic()

    def resume_suspended(self, aside: Any) -> None:
        self._compute_s, self._wait_s, _ = aside
        self._began_s = time.perf_counter()

    def time_of(self, aside: Any) -> ComputeTime | None:
        compute_s, wait_s, ended_s = aside
        return _made(ComputeTime, (compute_s, None, None, None, wait_s, ended_s, 0, ()))

    def end(self) -> ComputeTime | None:
        # `time_of(suspend())` without three frames: a frame costs a microsecond in a cold cache.
        compute_s = self._compute_s + time.perf_counter() - self._began_s
        return _made(ComputeTime, (compute_s, None, None, None, self._wait_s, monotonic(), 0, ()))


_Times = tuple[float, float, float | None]
_NEVER: _Times = (-math.inf, 0.0, None)


@dataclass(slots=True)
class CpuClock:
    """CPU time, run-queue wait and stall of the calling thread.

    `compute_s` is CPU time plus stall: another process on the core is not this rank's slowness, but
    a slower core or a stopped process is. Create and use it in one thread. If the kernel keeps no
    run-queue statistics, `run_queue_s` and `stall_s` are None. A segment that begins less than
    SHORT_S after the previous one costs no system call: the thread is taken to have computed since.
    The statistics are read only after the thread has been off the CPU for IDLE_S: it has waited
    there for no longer.

    Args:
        burn: Called with the CPU seconds of each segment just before it ends (fault injection).
    """

    burn: Callable[[float], None] | None = None
    _schedstat: int = field(default=-1)
    _segments: list[tuple[_Times, _Times]] = field(default_factory=list)  # of the open micro-batch
    _began: _Times = _NEVER  # of the open segment
    _ended: _Times = _NEVER  # of the last one
    _wait_s: float = 0.0
    _idle_s: float = -1.0  # wall - CPU at the last look at the run queue
    _queue_s: float | None = None  # what it showed

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):
            self._schedstat = os.open(SCHEDSTAT, os.O_RDONLY)

    def begin(self) -> None:
        self._segments, self._wait_s = [], 0.0
        self._began = self._read_soon()

    def pause(self) -> None:
        self.suspend()

    def resume(self) -> None:
        self._began = self._read()
        self._wait_s += self._began[0] - self._ended[0]

    def suspend(self) -> Any:
        if self.burn is not None:
            self.burn(thread_time() - self._began[1])
        ended = self._ended = self._read()
        self._segments.append((self._began, ended))
        return self._segments, self._wait_s

    def resume_suspended(self, aside: Any) -> None:
        self._segments, self._wait_s = aside
        self._began = self._read_soon()

    def time_of(self, aside: Any) -> ComputeTime | None:
        segments, wait_s = aside
        wall_s = cpu_s = 0.0
        queue_s: float | None = 0.0
        for began, ended in segments:
            wall_s += ended[0] - began[0]
            cpu_s += max(0.0, ended[1] - began[1])  # less than 0: it slept in a short gap
            if queue_s is not None:
                known = began[2] is not None and ended[2] is not None
                queue_s = queue_s + ended[2] - began[2] if known else None
        stall_s = None if queue_s is None else max(0.0, wall_s - cpu_s - queue_s)
        compute_s, ended_s = cpu_s + (stall_s or 0.0), segments[-1][1][0]
        return _made(ComputeTime, (compute_s, cpu_s, queue_s, stall_s, wait_s, ended_s, 0, ()))

    def end(self) -> ComputeTime | None:
        return self.time_of(self.suspend())

    def _read_soon(self) -> _Times:
        wall_s, cpu_s, queue_s = self._ended
        now_s = monotonic()
        since_s = now_s - wall_s
        return self._read() if since_s > SHORT_S else (now_s, cpu_s + since_s, queue_s)

    def _read(self) -> _Times:
        wall_s, cpu_s = monotonic(), thread_time()
        idle_s = wall_s - cpu_s
        spared_s = min(IDLE_S + IDLE_PART * (wall_s - self._ended[0]), MAX_IDLE_S)
        if idle_s - self._idle_s > spared_s:
            self._look_at_queue(idle_s)
        return wall_s, cpu_s, self._queue_s

    def _look_at_queue(self, idle_s: float) -> None:
        self._idle_s, self._queue_s = idle_s, None
        try:
            # "<on CPU ns> <waiting on a run queue ns> <time slices>"
            on_cpu_ns, waited_ns, _ = map(int, os.pread(self._schedstat, 96, 0).split())
            # A running thread with no time on a CPU: this kernel has the file but does not fill it.
            self._queue_s = waited_ns * 1e-9 if on_cpu_ns > 0 else None
        except (OSError, ValueError):  # `contextlib.suppress` would run three more functions
            return


@dataclass(slots=True)
class DeviceEventClock:
    """Times of device events (CUDA), read after the device has passed them; never synchronises.

    `end()` returns the earlier micro-batches that the device has finished since, oldest first, or
    None. The host may be MAX_LATE micro-batches ahead; older times are lost, counted in `num_lost`
    and logged once.

    Args:
        new_event: Returns an event with `record()`, `query()` and `elapsed_time(other)` in
            milliseconds, such as `lambda: torch.cuda.Event(enable_timing=True)`.
    """

    new_event: Callable[[], Any]
    num_lost: int = 0
    _open: _Segments = field(default_factory=list)
    _began: Any = None
    _ended: deque[tuple[int, _Segments]] = field(default_factory=deque)  # by number
    _number: int = 0  # of the newest micro-batch that ended

    def begin(self) -> None:
        self._open = []
        self._began = self._mark()

    def pause(self) -> None:
        self.suspend()

    def resume(self) -> None:
        self._began = self._mark()

    def suspend(self) -> Any:
        self._open.append((self._began, self._mark(), monotonic()))
        return self._open

    def resume_suspended(self, aside: Any) -> None:
        self._open = aside
        self._began = self._mark()

    def end(self) -> ComputeTime | None:
        return self.time_of(self.suspend())

    def time_of(self, aside: Any) -> ComputeTime | None:
        self._number += 1
        known = self.known()
        self._ended.append((self._number, aside))
        if len(self._ended) > MAX_LATE:
            self._ended.popleft()
            self.num_lost += 1
            if self.num_lost == 1:
                _log.warning("the device is over %d micro-batches behind: times are lost", MAX_LATE)
        return known[0]._replace(more=tuple(known[1:])) if known else None

    def known(self) -> list[ComputeTime]:
        """Return the finished micro-batches that were not returned before, oldest first."""
        found: list[ComputeTime] = []
        while self._ended:
            number, segments = self._ended[0]
            if not segments[-1][1].query():
                break  # nor are later ones: a stream runs in order
            self._ended.popleft()
            spent_ms = sum(began.elapsed_time(ended) for began, ended, _ in segments)
            found.append(
                ComputeTime(
                    compute_s=spent_ms * 1e-3,
                    ended_mono_s=segments[-1][2],
                    lag=self._number - number,
                )
            )
        return found

    def _mark(self) -> Any:
        event = self.new_event()
        event.record()
        return event


class TransferTimer(Protocol):
    """Adds up time and bytes of collectives that all members enter together.

    Clocks of nodes cannot be compared; durations can, if the starts are simultaneous.
    """

    def begin(self) -> Any:
        """Start timing a collective; return what `end` takes."""

    def end(self, began: Any, num_bytes: int) -> None:
        """End a collective that moved so many bytes from and to this rank."""

    def take(self) -> tuple[float | None, int]:
        """Return (seconds, bytes) since the last call; (None, 0) if they are not known."""


@dataclass(slots=True)
class DeviceTransferTimer:
    """Times collectives by device events; never synchronises.

    Args:
        new_event: As of `DeviceEventClock`.
    """

    new_event: Callable[[], Any]
    _spans: list[tuple[Any, Any, int]] = field(default_factory=list)

    def begin(self) -> Any:
        began = self.new_event()
        began.record()
        return began

    def end(self, began: Any, num_bytes: int) -> None:
        ended = self.new_event()
        ended.record()
        self._spans.append((began, ended, num_bytes))

    def take(self) -> tuple[float | None, int]:
        spans, self._spans = self._spans, []
        if not spans or not spans[-1][1].query():
            return None, 0  # the device is not there yet
        spent_ms = sum(began.elapsed_time(ended) for began, ended, _ in spans)
        return spent_ms * 1e-3, sum(num_bytes for _, _, num_bytes in spans)
