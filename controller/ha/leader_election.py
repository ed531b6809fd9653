"""Runs one of several controllers that share a PostgreSQL database: standby or leader.

A standby answers reads. A leader opens the store in its term and serves like a single controller.
When its lease is lost it sends nothing more, ends its streams and becomes a standby. A leader that
cannot write resigns, although it renews its lease: another controller may reach the database.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from dataclasses import replace

from pacekeeper.controller.api.auth.listeners import listening_line, reject_unprotected_listeners
from pacekeeper.controller.app.controller import Controller
from pacekeeper.controller.ha.lease import ElectionMember, Timing
from pacekeeper.controller.ha.lease_renewer import LeaseRenewer
from pacekeeper.controller.ha.lease_row import LeaseRow
from pacekeeper.controller.ha.standby_reads import StandbyReads
from pacekeeper.controller.ha.standby_server import standby_servers
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.postgres import (
    MIGRATE_WITHIN_S,
    Fence,
    PostgresDatabase,
    database_url,
)
from pacekeeper.controller.storage.restore import load_state
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.store_thread import StoreThread
from pacekeeper.core.addresses import join_address, split_address
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.text import format_s

LOOK_S = 0.05  # between two looks whether it leads
OPEN_WITHIN_S = 30.0  # all jobs and incidents are read
CLOSE_WITHIN_S = 10.0  # of readers, at the end
_log = logging.getLogger(__name__)


class LeaseLeadership:
    """The right to command agents in one term."""

    def __init__(self, renewer: LeaseRenewer, term: int, member: ElectionMember) -> None:
        self._renewer, self._term, self._member = renewer, term, member
        self.answer_within_s = member.timing.duration_s
        self.write_within_s = member.timing.limit_s
        self.fence = Fence(term=term, run_id=member.run_id, limit_s=member.timing.limit_s)

    @property
    def has_resigned(self) -> bool:
        """Whether it gave up this term although it held the lease."""
        return self._renewer.has_resigned(self._term)

    def opened(self, store: Store) -> None:
        """Do nothing: the fence guards the store."""

    def term(self) -> int | None:
        """The term; None as soon as the lease has lapsed or has another term."""
        return self._term if self._renewer.term() == self._term else None

    def describe_newer_term(self, seen: int) -> str:
        """The message to an agent that has seen a later term; may begin a new term."""
        terms = f"the agent has seen term {seen}, this controller leads in term {self._term}"
        if self._renewer.observe_term(seen):
            return f"{terms}: a later term begins"
        return (
            f"{terms} and ignores the agent's term for now: if this does not change, delete "
            "`controller-term` in the ring directory of that node and restart its agent"
        )

    def lost(self) -> None:
        """Resign: the store belongs to a later term."""
        self.resign("the store belongs to a later term")

    def check_write(self, waits_s: float) -> None:
        """Resign if a write has waited for `waits_s`, and that is as long as a renewal may take."""
        timing = self._member.timing
        if waits_s >= timing.duration_s - timing.margin_s:
            self.resign(f"a write to the store has waited {format_s(waits_s)}")

    def resign(self, why: str) -> None:
        """Release the lease; others take over first."""
        self._renewer.resign(self._term, why)

    def show_alive(self) -> None:
        """Show that the event loop runs."""
        self._renewer.show_alive()


async def run(config: ControllerConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises as `Controller.run`, and ConfigError for the store."""
    reject_unprotected_listeners(config)
    database_url(config.store)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Standby and leader listen on the same ports.
    listen, api_listen = _fixed_port(config.listen), _fixed_port(config.api_listen)
    config = replace(config, listen=listen, api_listen=api_listen)
    member = ElectionMember(
        name=config.lease.member or socket.gethostname(),
        run_id=secrets.token_hex(8),
        address=config.lease.advertise or _reachable(api_listen),
        timing=Timing(
            duration_s=config.lease.duration_s,
            renew_s=config.lease.renew_s,
            margin_s=config.lease.margin_s,
        ),
    )
    renewer = LeaseRenewer(member, LeaseRow(config.store, member.timing.limit_s))
    metrics = ControllerMetrics.of(config)
    with metrics.serving(config):
        renewer.start()
        renewer.set_eligible()
        try:
            await _Election(config, member, renewer, metrics, stop).run()
        finally:
            await asyncio.to_thread(renewer.close)
    _log.info("stopped")


class _Election:
    """Alternates between standby and leader; holds the state that both roles share."""

    def __init__(
        self,
        config: ControllerConfig,
        member: ElectionMember,
        renewer: LeaseRenewer,
        metrics: ControllerMetrics,
        stop: asyncio.Event,
    ) -> None:
        self._config, self._member, self._renewer = config, member, renewer
        self._metrics, self._stop = metrics, stop
        self._last: tuple[State, float] | None = None  # what was known last, and when
        self._closing: set[asyncio.Task[None]] = set()  # readers that lead no takeover

    async def run(self) -> None:
        """Alternate until `stop` is set."""
        while not self._stop.is_set():
            term = await self._stand_by()
            if term is None:
                continue
            leadership = LeaseLeadership(self._renewer, term, self._member)
            try:
                await self._lead(leadership)
            except VersionError as error:
                leadership.resign(f"{error}; this controller stands by until it is restarted")
                continue  # a controller of another version can lead
            # After a failure others take over first.
            pause_s = 2.0 * self._config.lease.duration_s if leadership.has_resigned else 0.0
            self._renewer.set_eligible(after_s=pause_s)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_WITHIN_S)

    async def _stand_by(self) -> int | None:
        """Serve reads until this controller leads.

        Returns:
            Its term; None: the controller is stopping.
        """
        reads = StandbyReads(self._config.store, self._last)
        self._metrics.age_s = reads.age_s
        reading = asyncio.create_task(reads.run())
        try:
            async with standby_servers(self._config, reads, self._metrics, self._leader):
                with contextlib.suppress(OSError):  # stdout is closed, or the disk is full
                    line = listening_line(self._config.listen, self._config.api_listen)
                    print(line, flush=True)
                _log.info("stands by")
                while not self._stop.is_set():
                    if (term := self._renewer.term()) is not None:
                        return term
                    if reading.done():
                        reading.result()
                    await pause(self._stop, LOOK_S)
                return None
        finally:
            reading.cancel()
            self._last = reads.last
            # A takeover does not wait for what is being read.
            closing = asyncio.create_task(reads.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _leader(self) -> str:
        record = self._renewer.record
        return "" if record is None else record.address

    async def _lead(self, leadership: LeaseLeadership) -> None:
        """Serve as the leader while the lease lasts; resign if the store cannot be used.

        Raises:
            DamagedError: The store is damaged, which an operator must resolve.
            VersionError: The store has another version.
        """
        try:
            past = await open_store(self._config.store, leadership, self._stop)
        except DamagedError:
            raise
        except HostError as error:
            leadership.resign(str(error))
            return
        self._metrics.age_s = lambda: 0.0
        controller = Controller(self._config, leadership, past, self._metrics)
        over = asyncio.Event()
        watching = asyncio.create_task(self._watch(leadership, controller, over))
        try:
            await controller.serve(over)
        finally:
            watching.cancel()
            self._metrics.set_leading(False)
            self._last = controller.state, time.monotonic()

    async def _watch(
        self, leadership: LeaseLeadership, controller: Controller, over: asyncio.Event
    ) -> None:
        """Set `over` when the controller stops, or the lease is lost or released."""
        while not self._stop.is_set() and leadership.term() is not None:
            leadership.show_alive()
            leadership.check_write(controller.write_waits_s())
            await pause(self._stop, LOOK_S)
        over.set()


async def open_store(
    url: str, leadership: LeaseLeadership, stop: asyncio.Event
) -> tuple[Store, State]:
    """Open the store in this term and load its state; stop when the term ends.

    A server that does not answer at all within the lease's duration has failed; what takes longer
    is limited by OPEN_WITHIN_S and MIGRATE_WITHIN_S.

    Raises:
        HostError: The server does not answer, or refuses; or the term is over, or `stop` is set.
        VersionError: The tables have another version.
    """
    database = PostgresDatabase(url, leadership.fence)
    thread = StoreThread(leadership.answer_within_s, database.cut)
    watching = asyncio.create_task(_cut_when_over(database, leadership, stop))
    try:
        is_older = await thread.run(database.needs_migration)
        thread.limit_s = MIGRATE_WITHIN_S if is_older else OPEN_WITHIN_S
        await thread.run(database.prepare)
        thread.limit_s = OPEN_WITHIN_S
        store = Store(database)
        return store, await thread.run(load_state, store, time.time() - time.monotonic())
    except BaseException:
        await thread.run(database.close)
        raise
    finally:
        watching.cancel()
        thread.close()


async def _cut_when_over(
    database: PostgresDatabase, leadership: LeaseLeadership, stop: asyncio.Event
) -> None:
    """Cut the database's connection when the term ends or `stop` is set."""
    while not stop.is_set() and leadership.term() is not None:
        leadership.show_alive()
        await pause(stop, LOOK_S)
    while True:
        database.cut()
        await asyncio.sleep(LOOK_S)


async def pause(stop: asyncio.Event, pause_s: float) -> None:
    """Sleep for `pause_s` or until `stop` is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s):
            await stop.wait()


def _fixed_port(listen: str) -> str:
    """The address, with a free port in place of port 0."""
    host, port = split_address(listen, first_port=0)
    if port:
        return listen
    with socket.socket() as probe:
        probe.bind((host, 0))
        return join_address(host, int(probe.getsockname()[1]))


def _reachable(listen: str) -> str:
    """The address, with the host's name in place of all interfaces."""
    host, port = split_address(listen)
    is_any = host in ("0.0.0.0", "::", "*")
    return join_address(socket.gethostname(), port) if is_any else listen
