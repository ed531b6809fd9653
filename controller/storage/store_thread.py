"""The one thread that uses an open store: neither an fsync nor a server delays the event loop."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call_here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function at once, where no thread is needed."""
    return function(*args, **kwargs)


class StoreThread:
    """Runs functions one after the other, in the order of the calls.

    Args:
        limit_s: Seconds after which `cut` is called for a function that has not returned; 0: never.
        cut: Makes whatever the function waits for fail; called from the event loop.
    """

    def __init__(self, limit_s: float = 0.0, cut: Callable[[], None] = lambda: None) -> None:
        self._limit_s, self._cut = limit_s, cut
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread; what it raises is raised here.

        Cancelled meanwhile, the function runs on, and its limit holds.
        """
        loop = asyncio.get_running_loop()
        done = self._pool.submit(function, *args, **kwargs)
        if self._limit_s:
            timer = loop.call_later(self._limit_s, self._cut)

            def ended(_: "Future[T]") -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(timer.cancel)

            done.add_done_callback(ended)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Return when everything has run."""
        self._pool.shutdown(wait=True)
