"""The one thread that uses an open store: neither an fsync nor a server delays the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call_here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function at once, where no thread is needed."""
    return function(*args, **kwargs)


@contextlib.contextmanager
def deadline(limit_s: float, cut: Callable[[], None]) -> Iterator[None]:
    """Call `cut` from another thread if the block has not ended within `limit_s`; 0: never."""
    if not limit_s:
        yield
        return
    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class StoreThread:
    """Runs functions one after the other, in the order of the calls.

    Args:
        limit_s: Seconds that one function may take before `cut` is called; 0: any. The time that
            it waits for others does not count.
        cut: Makes whatever the function waits for fail; called from another thread.
    """

    def __init__(self, limit_s: float = 0.0, cut: Callable[[], None] = lambda: None) -> None:
        self._limit_s, self._cut = limit_s, cut
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread; what it raises is raised here.

        Cancelled meanwhile, the function runs on, and its limit holds.
        """

        def limited() -> T:
            with deadline(self._limit_s, self._cut):
                return function(*args, **kwargs)

        return await asyncio.wrap_future(self._pool.submit(limited))

    def close(self) -> None:
        """Return when everything has run."""
        self._pool.shutdown(wait=True)
