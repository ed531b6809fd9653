"""How long a rank computed, never counting what it waited for others. No torch import.

A clock is told when a micro-batch's compute begins and ends and when it pauses for a collective.
All clocks give the same value; which one is used is declared in the rank's attachment.
"""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

MAX_LATE = 64  # micro-batches that a device may be behind: more kernels than it queues
SCHEDSTAT = "/proc/thread-self/schedstat"
_Ended = tuple[int, list[tuple[Any, Any]], float]  # number, events of its segments, host's time
_made = tuple.__new__  # of a named tuple: its own constructor is one more frame of Python
_log = logging.getLogger(__name__)


class ComputeTime(NamedTuple):
    """Compute of one micro-batch in seconds; None: this clock can not tell.

    A named tuple and not a frozen dataclass: one is made in every micro-batch, for a third of that.
    """

    compute_s: float
    cpu_s: float | None = None
    run_queue_s: float | None = None  # ready to run, but the core was someone else's
    stall_s: float | None = None  # wall - CPU - run queue: frozen, stopped, swapped
    wait_s: float | None = None  # paused: inside collectives
    ended_mono_s: float = 0.0
    lag: int = 0  # the time of the micro-batch so many before the one that ends now
    more: tuple["ComputeTime", ...] = ()  # later ones that became known with it, in order

    @property
    def is_of_previous(self) -> bool:
        """Is it of another micro-batch than the one that ends now?"""
        return self.lag > 0


class SegmentClock(Protocol):
    """begin, (pause, resume)*, end - in this order, once per micro-batch."""

    def begin(self) -> None:
        """A micro-batch's compute starts."""

    def pause(self) -> None:
        """Just before waiting for others."""

    def resume(self) -> None:
        """Just after waiting for others."""

    def end(self) -> ComputeTime | None:
        """The micro-batch's compute is over. None: not known yet (asynchronous devices)."""


@runtime_checkable
class LateClock(Protocol):
    """A clock that may know the times of micro-batches only after `end`."""

    def known(self) -> list[ComputeTime]:
        """Of the micro-batches not told yet, those that are known; oldest first."""


class PipelineClock(SegmentClock, Protocol):
    """A clock that several open micro-batches take turns with."""

    def set_aside(self) -> object:
        """The open micro-batch waits for its turn: what `take_up` goes on with."""

    def take_up(self, aside: Any) -> None:
        """Go on with a micro-batch; what was spent meanwhile is not its own."""


@dataclass(slots=True)
class WallClock:
    """Wall time of the segments: for foreign trainers on CPU and as a last resort."""

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

    def set_aside(self) -> object:
        self.pause()
        return self._compute_s, self._wait_s

    def take_up(self, aside: Any) -> None:
        self._compute_s, self._wait_s = aside
        self._began_s = time.perf_counter()

    def end(self) -> ComputeTime | None:
        compute_s = self._compute_s + time.perf_counter() - self._began_s
        return _made(
            ComputeTime, (compute_s, None, None, None, self._wait_s, time.monotonic(), 0, ())
        )


class _Reading(NamedTuple):
    wall_s: float
    cpu_s: float
    run_queue_s: float | None


_NEVER = _Reading(0.0, 0.0, None)


@dataclass(slots=True)
class CpuClock:
    """Thread CPU time, run-queue wait and the rest, of the calling thread.

    `compute_s` is CPU time plus stall: a competitor for the core is not the rank's own slowness, a
    slower core or a stopped process is. Make and use it in one thread. `burn` is called with the
    CPU seconds of each segment just before it is read (fault injection). Where the kernel keeps no
    run-queue statistics, `run_queue_s` and `stall_s` are None.
    """

    burn: Callable[[float], None] | None = None
    _schedstat: int = field(default=-1)
    _start: _Reading = _NEVER
    _paused_s: float = 0.0
    _wait_s: float = 0.0
    _wall_s: float = 0.0
    _cpu_s: float = 0.0
    _run_queue_s: float = 0.0
    _knows_run_queue: bool = False  # in every segment of the open micro-batch

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):
            self._schedstat = os.open(SCHEDSTAT, os.O_RDONLY)

    def begin(self) -> None:
        self._wait_s = self._wall_s = self._cpu_s = self._run_queue_s = 0.0
        self._knows_run_queue = self._schedstat >= 0
        self._start = self._read()

    def pause(self) -> None:
        self._close_segment()
        self._paused_s = time.perf_counter()

    def resume(self) -> None:
        self._wait_s += time.perf_counter() - self._paused_s
        self._start = self._read()

    def set_aside(self) -> object:
        self._close_segment()
        spent = self._wait_s, self._wall_s, self._cpu_s, self._run_queue_s
        return *spent, self._knows_run_queue

    def take_up(self, aside: Any) -> None:
        self._wait_s, self._wall_s, self._cpu_s, self._run_queue_s, self._knows_run_queue = aside
        self._start = self._read()

    def end(self) -> ComputeTime | None:
        self._close_segment()
        stall_s = None
        if self._knows_run_queue:
            stall_s = max(0.0, self._wall_s - self._cpu_s - self._run_queue_s)
        return ComputeTime(
            compute_s=self._cpu_s + (stall_s or 0.0),
            cpu_s=self._cpu_s,
            run_queue_s=self._run_queue_s if self._knows_run_queue else None,
            stall_s=stall_s,
            wait_s=self._wait_s,
            ended_mono_s=time.monotonic(),
        )

    def _close_segment(self) -> None:
        if self.burn is not None:
            self.burn(time.thread_time() - self._start.cpu_s)
        now = self._read()
        self._wall_s += now.wall_s - self._start.wall_s
        self._cpu_s += now.cpu_s - self._start.cpu_s
        if now.run_queue_s is not None and self._start.run_queue_s is not None:
            self._run_queue_s += now.run_queue_s - self._start.run_queue_s
        else:
            self._knows_run_queue = False

    def _read(self) -> _Reading:
        return _Reading(time.perf_counter(), time.thread_time(), self._read_run_queue_s())

    def _read_run_queue_s(self) -> float | None:
        if self._schedstat < 0:
            return None
        try:
            # "<on CPU ns> <waiting on a run queue ns> <time slices>"
            on_cpu_ns, waited_ns, _ = map(int, os.pread(self._schedstat, 96, 0).split())
        except (OSError, ValueError):
            return None
        # A running thread that never was on a CPU: this kernel's file is there but not kept.
        return waited_ns * 1e-9 if on_cpu_ns > 0 else None


@dataclass(slots=True)
class DeviceEventClock:
    """Times of device events (CUDA), read when the device is through: it never synchronises.

    `new_event` makes an event with `record()`, `query()` and `elapsed_time(other) -> ms`, such as
    `lambda: torch.cuda.Event(enable_timing=True)`. `end()` gives the earlier micro-batches that the
    device has finished since, oldest first, or None; the host may be MAX_LATE of them ahead, and
    what is older than that is lost: counted in `num_lost`, said once. `burn` is called with the
    event at which a segment began, just before its end is marked (fault injection).
    """

    new_event: Callable[[], Any]
    burn: Callable[[Any], None] | None = None
    num_lost: int = 0
    _open: list[tuple[Any, Any]] = field(default_factory=list)
    _began: Any = None
    _ended: deque[_Ended] = field(default_factory=deque)
    _number: int = 0  # of the newest micro-batch that ended

    def begin(self) -> None:
        self._open = []
        self._began = self._mark()

    def pause(self) -> None:
        self._close_segment()

    def resume(self) -> None:
        self._began = self._mark()

    def set_aside(self) -> object:
        self._close_segment()
        return self._open

    def take_up(self, aside: Any) -> None:
        self._open = aside
        self._began = self._mark()

    def end(self) -> ComputeTime | None:
        self._number += 1
        self._close_segment()
        known = self.known()
        self._ended.append((self._number, self._open, time.monotonic()))
        if len(self._ended) > MAX_LATE:
            self._ended.popleft()
            self.num_lost += 1
            if self.num_lost == 1:
                _log.warning("the device is over %d micro-batches behind: times are lost", MAX_LATE)
        return known[0]._replace(more=tuple(known[1:])) if known else None

    def known(self) -> list[ComputeTime]:
        """Of the micro-batches not told yet, those that the device has finished; oldest first."""
        found: list[ComputeTime] = []
        while self._ended:
            number, segments, ended_s = self._ended[0]
            if not segments[-1][1].query():
                break  # nor are those after it: a stream is worked off in order
            self._ended.popleft()
            spent_ms = sum(began.elapsed_time(ended) for began, ended in segments)
            found.append(
                ComputeTime(
                    compute_s=spent_ms * 1e-3, ended_mono_s=ended_s, lag=self._number - number
                )
            )
        return found

    def _close_segment(self) -> None:
        if self.burn is not None:
            self.burn(self._began)
        self._open.append((self._began, self._mark()))

    def _mark(self) -> Any:
        event = self.new_event()
        event.record()
        return event


@dataclass(slots=True)
class TransferClock:
    """Adds up transfers that nobody waits in: collectives that all members enter together.

    Ends of collectives can not be compared between nodes; own durations can, where the starts are
    the same. `took` is told of each one; `take` gives the sum and begins anew.
    """

    _spent_s: float = 0.0
    _bytes: int = 0

    def took(self, num_bytes: int, began_s: float) -> None:
        """`num_bytes` were sent and received since `began_s` (time.perf_counter)."""
        self._spent_s += self._passed_s(num_bytes, began_s)
        self._bytes += num_bytes

    def take(self) -> tuple[float | None, int]:
        """(seconds, bytes) since the last call; None where nothing was moved."""
        spent_s = self._spent_s if self._bytes else None
        moved = self._bytes
        self._spent_s, self._bytes = 0.0, 0
        return spent_s, moved

    def _passed_s(self, num_bytes: int, began_s: float) -> float:
        return time.perf_counter() - began_s
