"""The one thread that uses an open store: neither an fsync nor a server delays the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

AGAIN_S = 0.05  # between two cuts of what goes on
P = ParamSpec("P")
T = TypeVar("T")


async def call_here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function at once, where no thread is needed."""
    return function(*args, **kwargs)


@contextlib.contextmanager
def deadline(limit_s: float, cut: Callable[[], None]) -> Iterator[None]:
    """Call `cut` from another thread once the block has taken `limit_s`, until it ends; 0: never.

    It is called again and again, since the block may get its connection only then.
    """
    if not limit_s:
        yield
        return
    is_over = threading.Event()

    def enforce() -> None:
        is_over.wait(limit_s)
        while not is_over.is_set():
            cut()
            is_over.wait(AGAIN_S)

    threading.Thread(target=enforce, name="deadline", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class StoreThread:
    """Runs functions one after the other, in the order of the calls.

    Args:
        limit_s: Seconds that one function may take before `cut` is called; 0: any. The time that
            it waits for others does not count. May be set between two calls.
        cut: Makes whatever the function waits for fail; called from another thread.
    """

    def __init__(self, limit_s: float = 0.0, cut: Callable[[], None] = lambda: None) -> None:
        self.limit_s, self._cut = limit_s, cut
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread; what it raises is raised here.

        Cancelled meanwhile, the function runs on, and its limit holds.
        """

        limit_s = self.limit_s

        def limited() -> T:
            with deadline(limit_s, self._cut):
                return function(*args, **kwargs)

        return await asyncio.wrap_future(self._pool.submit(limited))

    def close(self) -> None:
        """Return when everything has run."""
        self._pool.shutdown(wait=True)
