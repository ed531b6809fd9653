"""The state that a standby serves: loaded from the database every few seconds.

It is for reads only: a controller that starts to lead loads everything again. While the database
does not answer, the last state is served and its age grows.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.postgres import PostgresDatabase
from pacekeeper.controller.storage.restore import load_state
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.store_thread import AGAIN_S, StoreThread
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.layout.layout import Layout

EVERY_S = 2.0
MAX_LOAD = 0.05  # of a core: a large store is read less often
CALL_WITHIN_S = 10.0
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class StandbyReads:
    """The last loaded state and its store; nothing is opened before `run`.

    Args:
        url: The database.
        last: The last state of this controller, and its time (monotonic seconds); None: none.
    """

    def __init__(self, url: str, last: tuple[State, float] | None = None) -> None:
        self._database = PostgresDatabase(url)
        self._store = Store(self._database)
        self._thread = StoreThread(CALL_WITHIN_S, self._database.cut)
        self._is_prepared = False
        self._last = last
        self._trouble = ""
        self.history = TimelineWriter(store=self._store)

    @property
    def last(self) -> tuple[State, float] | None:
        """The state and when it was loaded (monotonic seconds); None: it never was."""
        return self._last

    def state(self) -> State:
        """The last loaded state; an empty one if there is none."""
        return State() if self._last is None else self._last[0]

    def age_s(self) -> float:
        """Seconds since the state was loaded; infinity: it never was."""
        return float("inf") if self._last is None else time.monotonic() - self._last[1]

    async def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread of the store."""
        return await self._thread.run(function, *args, **kwargs)

    def past_layout(self, job: str, generation: int) -> tuple[Layout, str] | None:
        """As `Store.layout`."""
        return self._store.layout(job, generation)

    async def run(self) -> None:
        """Load the state repeatedly, until cancelled."""
        while True:
            began_s = time.monotonic()
            await self._refresh(began_s)
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(EVERY_S, took_s / MAX_LOAD))

    async def _refresh(self, now_s: float) -> None:
        trouble = ""
        try:
            state = await self.ask(self._read, time.time() - now_s)
        except PacekeeperError as error:
            trouble = str(error)
        else:
            self._last = state, now_s
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("reads: %s", trouble or "the store answers again")

    def _read(self, unix_offset_s: float) -> State:
        if not self._is_prepared:
            self._database.prepare()
            self._is_prepared = True
        state = load_state(self._store, unix_offset_s)
        self.history.forget_stored()
        return state

    async def close(self) -> None:
        """Disconnect; a read in progress fails."""
        closing = asyncio.create_task(self.ask(self._store.close))
        self._database.cut()
        while not (await asyncio.wait([closing], timeout=AGAIN_S))[0]:
            self._database.cut()
        with contextlib.suppress(PacekeeperError):
            closing.result()
        self._thread.close()
