"""Waiting for others that may be dead or frozen: limits, deadlines, and threads that may be left.

Calls of torch that connect ranks or ask a store cannot be interrupted. They run in a thread of
their own; who waits for it may stop waiting. Nothing here knows torch, sockets or groups.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

STOPPED_S = 1.0  # a tick that is so late means that this process itself was stopped
T = TypeVar("T")
Task = tuple[Callable[[], None], threading.Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLimits:
    """How long a rank waits for others, in seconds.

    Attributes:
        tick_s: Between two questions whether a member is dead.
        timeout_s: For a member that does not answer in a collective, counted since the collective
            before; at least three quarters of it since this one.
        arrive_s: For all members to come; None: `timeout_s`.
        answer_s: For one answer of the store.
        connect_s: For members to connect when all have come; usually milliseconds.
    """

    tick_s: float
    timeout_s: float
    arrive_s: float | None = None
    answer_s: float = 5.0
    connect_s: float = 10.0


class Deadline:
    """The end of a wait for others; time in which this process was stopped does not count.

    Args:
        limit_s: Length of the wait.
        tick_s: `has_passed` is called at least so often.
        clock: Seconds that never go back.
    """

    def __init__(
        self, limit_s: float, tick_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s, self._tick_s, self._clock = limit_s, tick_s, clock
        self.restart()

    def restart(self) -> None:
        """Begin anew: the others gave a sign of life. May be called from another thread."""
        now_s = self._clock()
        self._due_s = now_s + self._tick_s + STOPPED_S
        self._end_s = now_s + self._limit_s

    def has_passed(self) -> bool:
        """Whether the others were silent for the whole limit."""
        now_s = self._clock()
        self._end_s += max(0.0, now_s - self._due_s)
        self._due_s = now_s + self._tick_s + STOPPED_S
        return now_s > self._end_s


def run_leavable(
    call: Callable[[Callable[[], bool]], T],
    *,
    watch: Callable[[], None],
    tick_s: float,
    discard: Callable[[T], None] = lambda _: None,
    name: str = "leavable",
) -> T:
    """Run `call` in a daemon thread and return its result, or raise what it raised.

    Args:
        call: Given a function that tells it whether nobody waits for it any more.
        watch: Called every `tick_s` by the waiting thread; what it raises ends the wait, and the
            thread is left behind.
        tick_s: Seconds between two calls of `watch`.
        discard: Receives, in the thread, a result for which nobody waits any more.
        name: Of the thread.
    """
    answers: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
    lock = threading.Lock()
    is_left = False

    def run() -> None:
        answer: tuple[T] | BaseException
        try:
            answer = (call(lambda: is_left),)
        except BaseException as error:
            answer = error
        with lock:
            if not is_left:
                answers.put(answer)
                return
        if isinstance(answer, tuple):
            discard(answer[0])

    threading.Thread(target=run, daemon=True, name=name).start()
    try:
        while True:
            try:
                found = answers.get(timeout=tick_s)
                break
            except Empty:
                watch()
    except BaseException:
        with lock:
            is_left = True
        if not answers.empty() and isinstance(late := answers.get(), tuple):
            discard(late[0])
        raise
    try:
        if isinstance(found, BaseException):
            raise found
        return found[0]
    finally:
        del found  # else this frame and the error keep each other


class BackgroundWorker:
    """Used by one thread. A daemon's: what hangs holds up no end; it ends with its owner."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._last: threading.Event | None = None  # set when all that was begun is over
        weakref.finalize(self, self._queue.put, None)

    @property
    def is_busy(self) -> bool:
        """Is anything that was begun not over yet?"""
        return self._last is not None and not self._last.is_set()

    def begin(self, do: Callable[[], None]) -> None:
        """Do this after what was begun before; what it raises goes to `threading.excepthook`."""
        if self._last is None:
            threading.Thread(
                target=_work, args=(self._queue,), daemon=True, name=self._name
            ).start()
        self._last = threading.Event()
        self._queue.put((do, self._last))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all that was begun is over; False where that takes longer."""
        return self._last is None or self._last.wait(timeout_s)


def _work(queue: "SimpleQueue[Task | None]") -> None:
    while (task := queue.get()) is not None:
        try:
            task[0]()
        except BaseException:
            told = threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            threading.excepthook(told)
            del told
        over = task[1]
        del task  # and what it holds: a copy of the state
        over.set()
