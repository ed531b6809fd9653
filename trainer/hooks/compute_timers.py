"""Clocks that measure a micro-batch's compute time without waits for other ranks. No torch import.

The hooks call a clock when compute begins, pauses for a collective, resumes and ends. All clocks
return a `ComputeTime`; the attachment states which one a rank uses.
"""

import contextlib
import functools
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

    def suspend(self, is_over: bool = False) -> Any:
        """Suspend the open micro-batch; return its state. `is_over`: it is not resumed."""

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

    def suspend(self, is_over: bool = False) -> Any:
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


_Look = bytes | None  # the kernel's statistics of the thread, as read; None: there are none
# Wall time, CPU time, and the looks at the run queue before and after a segment.
_CpuSegment = tuple[float, float, _Look, _Look]


@dataclass(slots=True)
class CpuClock:
    """CPU time, run-queue wait and stall of the calling thread.

    `compute_s` is CPU time plus stall: another process on the core is not this rank's slowness, but
    a slower core or a stopped process is. Create and use it in one thread. If the kernel keeps no
    run-queue statistics, `run_queue_s` and `stall_s` are None. A segment that begins less than
    SHORT_S after the previous one costs no system call: the thread is taken to have computed since.
    The statistics are read only after the thread has been off the CPU for IDLE_S: it has waited
    there for no longer. At a suspension they are not read: if the thread computes until the
    micro-batch is resumed, both are one segment. If not, they are read then, and waits there since
    the segment began are taken for the segment's as far as it was off the CPU.

    Args:
        burn: Called with the CPU seconds of each segment just before it ends (fault injection).
    """

    burn: Callable[[float], None] | None = None
    _schedstat: int = field(default=-1)
    _segments: list[_CpuSegment] = field(default_factory=list)  # of the open micro-batch
    _unread: list[_CpuSegment] | None = None  # whose last segment was suspended without a look
    _wait_s: float = 0.0
    _began_s: float = 0.0  # of the newest segment, as are the next
    _began_cpu_s: float = 0.0
    _before: _Look = None
    _ended_s: float = -math.inf  # of the last one that ended
    _ended_cpu_s: float = 0.0
    _idle_s: float = -1.0  # wall - CPU at the last look at the run queue
    _look: _Look = None

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):
            self._schedstat = os.open(SCHEDSTAT, os.O_RDONLY)

    def begin(self) -> None:
        self._segments, self._wait_s = [], 0.0
        self._start(SHORT_S)

    def pause(self) -> None:
        self.suspend(is_over=True)

    def resume(self) -> None:
        ended_s = self._ended_s
        self._start(-1.0)
        self._wait_s += self._began_s - ended_s

    def suspend(self, is_over: bool = False) -> Any:
        if self.burn is not None:
            self.burn(thread_time() - self._began_cpu_s)
        now_s, cpu_s = monotonic(), thread_time()
        if is_over:
            self._look_after(now_s - cpu_s, now_s - self._ended_s)
        else:
            self._unread = self._segments
        self._segments.append(
            (now_s - self._began_s, cpu_s - self._began_cpu_s, self._before, self._look)
        )
        self._ended_s, self._ended_cpu_s = now_s, cpu_s
        return self._segments, self._wait_s, now_s

    def resume_suspended(self, aside: Any) -> None:
        self._segments, self._wait_s, _ = aside
        self._start(SHORT_S)

    def time_of(self, aside: Any) -> ComputeTime | None:
        segments, wait_s, ended_s = aside
        if self._unread is segments:
            self._look_after(self._ended_s - self._ended_cpu_s, 0.0)
        total_s = cpu_s = 0.0
        queue_s: float | None = 0.0
        for wall_s, on_cpu_s, before, after in segments:
            total_s += wall_s
            on_cpu_s = max(0.0, on_cpu_s)  # less than 0: it slept in a short gap
            cpu_s += on_cpu_s
            before_s, after_s = _waited_s(before), _waited_s(after)
            if queue_s is None or before_s is None or after_s is None:
                queue_s = None
            else:
                queue_s += min(after_s - before_s, max(0.0, wall_s - on_cpu_s))
        stall_s = None if queue_s is None else max(0.0, total_s - cpu_s - queue_s)
        compute_s = cpu_s + (stall_s or 0.0)
        return _made(ComputeTime, (compute_s, cpu_s, queue_s, stall_s, wait_s, ended_s, 0, ()))

    def end(self) -> ComputeTime | None:
        return self.time_of(self.suspend(is_over=True))

    def _start(self, short_s: float) -> None:
        """Start a segment; after a gap of up to `short_s` the thread has computed in it."""
        now_s = monotonic()
        gap_s = now_s - self._ended_s
        gap_cpu_s = gap_s if gap_s <= short_s else thread_time() - self._ended_cpu_s
        unread = self._unread
        if (
            unread is self._segments
            and gap_s - gap_cpu_s <= IDLE_S + IDLE_PART * gap_s
            and self.burn is None
        ):
            # The last segment goes on, as if it had begun later by the gap.
            unread.pop()
            self._unread = None
            self._began_s += gap_s
            self._began_cpu_s += gap_cpu_s
            return
        since_s = gap_s if unread is None else now_s - self._began_s
        self._began_s, self._began_cpu_s = now_s, self._ended_cpu_s + gap_cpu_s
        if gap_s > short_s or unread is not None:
            self._look_after(now_s - self._began_cpu_s, since_s)
        self._before = self._look

    def _look_after(self, idle_s: float, since_s: float) -> None:
        """Look at the run queue, unless the thread was on the CPU in all of `since_s`. The look is
        that of a segment that waits for one, too.
        """
        fresh_s = idle_s - self._idle_s
        if fresh_s > IDLE_S + IDLE_PART * since_s or fresh_s > MAX_IDLE_S:
            self._idle_s = idle_s
            try:
                self._look = os.pread(self._schedstat, 96, 0)  # understood in `time_of`
            except OSError:
                self._look = None
        if self._unread is not None:
            self._unread[-1] = (*self._unread[-1][:3], self._look)
            self._unread = None


@functools.lru_cache(maxsize=8)
def _waited_s(look: _Look) -> float | None:
    """Return the time on a run queue in "<on CPU ns> <waiting on a run queue ns> <time slices>"."""
    try:
        on_cpu_ns, waited_ns, _ = map(int, (look or b"").split())
    except ValueError:
        return None
    # A running thread with no time on a CPU: this kernel has the file but does not fill it.
    return waited_ns * 1e-9 if on_cpu_ns > 0 else None


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

    def suspend(self, is_over: bool = False) -> Any:
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
