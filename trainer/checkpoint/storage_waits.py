"""Nobody waits for storage without a word, nor for ever. No torch.

A call to a file system that hangs can not be ended, only left: it gets a thread of its own.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TypeVar

SAY_AFTER_S = 10.0  # then at twice the time, and so on
T = TypeVar("T")
_log = logging.getLogger(__name__)


def wait_aloud(wait: Callable[[float], bool], what: str, timeout_s: float) -> bool:
    """Call `wait(seconds)` until it says that what it waits for is there, or `timeout_s` are over.

    False: they are over. `what` is told with the time that went by.
    """
    began_s = time.monotonic()
    pause_s, waited_s = SAY_AFTER_S, 0.0
    while True:
        if wait(max(0.0, min(pause_s, timeout_s - waited_s))):
            return True
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            return False
        _log.warning("still waits for %s, %.0f s so far", what, waited_s)
        pause_s = waited_s


def answered(
    action: Callable[[], T],
    what: str,
    patience_s: float,
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """What `action` returns or raises. Raises TimeoutError where it does not end for `patience_s`
    in which `progress` says the same.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(action())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="storage").start()
    while True:
        before = progress()
        if wait_aloud(partial(_is_done, result), what, patience_s):
            return result.result()
        if progress() == before:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer for {patience_s:.0f} s")


def _is_done(result: "Future[T]", timeout_s: float) -> bool:
    wait_for([result], timeout_s)
    return result.done()
