"""A thread that does beside the training what it is given, one after the other.

One for all, not one for each: to start a thread is to wait until it runs, and it then has the
interpreter for as long as five milliseconds before whoever started it goes on.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Task = tuple[Callable[[], None], threading.Event]


class Beside:
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
