"""Builds and runs the controller: one inbox, one consumer, one ticker, one store.

The clock enters here. The changes of an event are stored before anything is sent. Events that
arrive meanwhile are processed and stored together, because a disk is slow and a fleet may reconnect
at once. While the store rejects writes the inbox waits: agents keep their reports, and training
continues.
"""

import asyncio
import contextlib
import importlib
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import grpc.aio
import sqlalchemy as sa
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pacekeeper.controller.api.auth.listeners import (
    ListenerSetup,
    listening_line,
    reject_unprotected_listeners,
)
from pacekeeper.controller.api.operator_service import OperatorService
from pacekeeper.controller.api.status_service import StatusService
from pacekeeper.controller.api.web.start import build_web_server
from pacekeeper.controller.app.effects import CommandExecutor, Planner
from pacekeeper.controller.ha.leadership import Leadership, Standalone
from pacekeeper.controller.ingest.agent_service import AgentControl
from pacekeeper.controller.ingest.processes import IngestProcesses
from pacekeeper.controller.ingest.supervisor import PortTakenError
from pacekeeper.controller.machine import machine
from pacekeeper.controller.machine.report_parsing import merge_reports
from pacekeeper.controller.observability.event_loop_lag import run_heartbeat
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.observability.webhook import Webhook
from pacekeeper.controller.state.events import (
    Command,
    Event,
    NodeDetached,
    NodesReported,
    Tick,
)
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.postgres import FencedError
from pacekeeper.controller.storage.restore import open_past
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.store_thread import StoreThread
from pacekeeper.controller.storage.write_batch import WriteBatch, last_of_each, write_all
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import HostError, listen_error
from pacekeeper.predictor.cost.named_regressor import regressor_factory
from pacekeeper.predictor.detector.excursions import Excursions
from pacekeeper.predictor.detector.thresholds import chart_rules
from pacekeeper.protos import (
    control_pb2,
    operator_pb2,
    operator_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from pacekeeper.protos.listening import RIVAL, bind_error, start_server
from pacekeeper.protos.stale_reads import READS


def preload_numerics() -> None:
    """Import what the first fit and the first thresholds need, in a thread.

    Also computes the distribution of healthy residuals, once: nearly a second.
    """
    importlib.import_module("scipy.optimize")
    chart_rules(1e6, Excursions())


MAX_TOGETHER = 256  # events between two looks at everything else
DRAIN_S = 2.0
STORE_RETRY_S = 0.5
MAX_TOLD = 256  # failures remembered, so that each is told once
_log = logging.getLogger(__name__)
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["AgentControlService"].full_name
_SERVICES = (
    status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name,
    operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name,
)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Controller:
    """The controller service of one fleet."""

    def __init__(
        self,
        config: ControllerConfig,
        leadership: Leadership | None = None,
        past: tuple[Store, State] | None = None,
        metrics: ControllerMetrics | None = None,
    ) -> None:
        """Open store, audit log and page.

        Args:
            config: The configuration.
            leadership: The right to command; None: this is the only controller.
            past: The open store and its state; None: it is opened here.
            metrics: Those of the process, which its caller serves; None: its own.

        Raises:
            ConfigError: An unprotected listener, unusable certificates or tokens, or a cost model
                that cannot be imported or fitted.
            HostError: The store or the audit log cannot be opened.
            VersionError: The store has another version.
        """
        reject_unprotected_listeners(config)
        if config.detector.cost_model:
            regressor_factory(config.detector.cost_model)
        self.config = config
        self.leadership = Standalone() if leadership is None else leadership
        unix_offset_s = time.time() - time.monotonic()
        self.store, self.state = past or open_past(config.store, unix_offset_s)
        self.leadership.opened(self.store)
        self._thread = StoreThread(self.leadership.write_within_s, self.store.database.cut)
        self._serves_metrics = metrics is None
        self.metrics = metrics or ControllerMetrics.of(config)
        self.metrics.begin_after(self.state.next_incident_id - 1)
        self.listener_setup = ListenerSetup(config, state=lambda: self.state, metrics=self.metrics)
        self.ingest: IngestProcesses | None = None
        self.agents = AgentControl(
            put=self._put_all,
            on_rejected=self.metrics.rejected.inc,
            on_failure=self._count_failure,
            send_frame=self._send_frame,
            attach_policy=self.listener_setup.interceptor,
            leadership=self.leadership,
            lease_margin_s=config.lease.margin_s,
        )
        self.history = TimelineWriter(store=self.store, config=config.retention)
        self.status = StatusService(
            state=lambda: self.state,
            past_layout=self.store.layout,
            history=self.history,
            ask=self._thread.run,
        )
        self.operator = OperatorService(state=lambda: self.state, put=self._put)
        self.web = build_web_server(
            config,
            state=lambda: self.state,
            put=self._put,
            history=self.history,
            ask=self._thread.run,
            listener_setup=self.listener_setup,
            past_layout=self.store.layout,
        )
        self.planner = Planner(policy=config.policy, put=self._put, on_failure=self._count_failure)
        self._executor = CommandExecutor(
            agents=self.agents,
            metrics=self.metrics,
            status=self.status,
            planner=self.planner,
            listener_setup=self.listener_setup,
            on_failure=self._count_failure,
        )
        self.webhook = Webhook(config, on_end=self.metrics.count_webhook)
        self._health = health.aio.HealthServicer()
        # No more wait than there are callers: each waits until its own event is taken in.
        self._inbox: deque[tuple[Sequence[Event], asyncio.Future[None]]] = deque()
        self._has_come = asyncio.Event()
        self._writes = WriteBatch()
        self._unstored_s: float | None = None  # since when a write waits; None: none does
        self._refused = ""  # why the store rejects writes; empty: it accepts them
        self._is_over = False  # nothing is taken in any more
        self._failures: set[str] = set()  # that were told

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises HostError: a port is taken, or the store fails."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await self.serve(stop)
        _log.info("The controller stopped")

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises as `run` does."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close_store)
            for part in (self.listener_setup, self.planner, self.webhook):
                stack.callback(part.close)
            await asyncio.sleep(0)  # a Ctrl-C from before `run` ends it here, with nothing started
            if stop.is_set():
                return  # over before it began: nobody is told anything
            if self._serves_metrics:
                stack.enter_context(self.metrics.serving(self.config))
            server, api_address = await self._serve_people()
            stack.push_async_callback(server.stop, None)
            ingest = await self._open_ingest(api_address)
            await self._report_health("")
            tasks = [
                asyncio.create_task(part)
                for part in (
                    run_heartbeat(self.metrics.lag),
                    *(self._consume(), self._tick(), ingest.run()),
                    *(self.agents.acknowledge(), self.agents.keep_pace()),
                )
            ]
            stack.push_async_callback(self._drain, server, ingest, tasks)
            if self.web is not None:
                tasks.append(asyncio.create_task(self.web.serve()))
                stack.push_async_callback(self.web.close, tasks[-1])
                _log.info("web=%s", self.web.url)
            with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full
                print(listening_line(ingest.address, api_address), flush=True)
            # The first fit and its thresholds would else stall the inbox for a second.
            threading.Thread(target=preload_numerics, daemon=True).start()
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _serve_people(self) -> tuple[grpc.aio.Server, str]:
        """Start the gRPC server of status, commands and health. Returns it and its HOST:PORT."""
        server = self.listener_setup.server()
        status_pb2_grpc.add_StatusServiceServicer_to_server(self.status, server)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(self.operator, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for name in (READS, *_SERVICES):
            await self._health.set(name, _SERVING)
        for name in ("", _CONTROL):  # until agents are served
            await self._health.set(name, _NOT_SERVING)
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        address = await start_server(
            server, self.config.api_listen, self.config.tls, "--api-listen"
        )
        return server, address

    async def _open_ingest(self, api_address: str) -> IngestProcesses:
        """Start the ingest processes, which serve agents."""
        listen = self.config.listen
        self.ingest = ingest = IngestProcesses(
            self.listener_setup.settings(listen, api_address),
            count=self.config.ingest_processes,
            on_frames=self.agents.handle_frames,
            on_gone=self._lose_agents,
            on_restart=self.metrics.ingest_restarts.inc,
        )
        try:
            await ingest.start()
        except PortTakenError as error:
            why = bind_error(listen) or OSError(str(error) or "gRPC rejects the address")
            raise listen_error(listen, why, option="--listen", rival=RIVAL) from None
        return ingest

    def _send_frame(self, frame: bytes) -> None:
        """Send a frame to the ingest processes, once there are any."""
        if self.ingest is not None:
            self.ingest.send_frame(frame)

    async def _close_store(self) -> None:
        """Write the timelines that wait, and let another controller have the store."""
        try:
            await self._thread.run(self.history.close)
        finally:
            await self._thread.run(self.store.close)
            self._thread.close()

    async def _lose_agents(self, is_lost: Callable[[int], bool]) -> None:
        """Detach the nodes of these streams, which ended with their ingest process."""
        if events := self.agents.drop_streams(is_lost):
            await self._put_all(events)

    async def _drain(
        self, server: grpc.aio.Server, ingest: IngestProcesses, tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        """Shut down: report NOT_SERVING, end streams, process what arrived before, stop.

        A controller that has lost its lease can store nothing, so it waits for nothing.
        """
        await self._health.enter_graceful_shutdown()
        self.status.end_all()
        await (ingest.abort() if self.leadership.term() is None else ingest.drain())
        await server.stop(DRAIN_S)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _put(self, event: Event) -> None:
        await self._put_all((event,))

    async def _put_all(self, events: Sequence[Event]) -> None:
        """Process events; returns once they are stored, which gives back-pressure."""
        if self._is_over:
            events = [event for event in events if not isinstance(event, NodeDetached)]
            if not events:
                return  # all agents leave, since we do
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.append((events, done))
        self._has_come.set()
        await done

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_interval_s)
            self.metrics.set_leading(leads := self.leadership.term() is not None)
            if not leads:
                continue  # whatever time tells is the next leader's to hear
            await self._put(Tick(unix_offset_s=time.time() - time.monotonic()))
            self.metrics.update(self.state)
            self.webhook.on_tick(self.state, time.monotonic())
            sequences = self.agents.sequences
            self.metrics.set_sequences(missed=sequences.missed, repeated=sequences.repeated)
            await self._thread.run(self.history.on_tick, self.state)
            used_bytes, log_bytes = self.history.store_bytes
            self.metrics.set_store_size(used_bytes, log_bytes)

    async def _consume(self) -> None:
        """Process the inbox; the only caller of the state machine, so no lock is needed."""
        while True:
            while not self._inbox:
                self._has_come.clear()
                await self._has_come.wait()
            taken, number = [], 0
            while self._inbox and number < MAX_TOGETHER:
                taken.append(self._inbox.popleft())
                number += len(taken[-1][0])
            try:
                await self._take_whole([event for events, _ in taken for event in events])
            except HostError:
                self._is_over = True
                for _, done in (*taken, *self._inbox):
                    done.cancel()  # not stored, so not acknowledged: who reported keeps it
                raise
            for _, done in taken:
                if not done.done():
                    done.set_result(None)
            await asyncio.sleep(0)  # who was waited for speaks before the next ones

    async def _take_whole(self, events: Sequence[Event]) -> None:
        """Process events; an internal error while storing costs one event only."""
        before = self.state
        try:
            await self._take(events)
        except HostError:
            raise
        except Exception as error:
            if len(events) == 1 or self.state is not before:  # they count by now
                self._count_failure(f"event dropped: {type(events[0]).__name__}", error)
                return
            for event in events:
                await self._take_whole([event])

    async def _take(self, events: Sequence[Event]) -> None:
        """Process events together; the new state is used, and commands run, once it is stored."""
        state, commands = self.state, list[Command]()
        for event in merge_reports(events):
            state = self._advance(state, event, commands)
        commands = last_of_each(commands)
        await self._store(state, commands)
        self.state = state
        for command in commands:
            self._executor.execute(command)
        await self._thread.run(self.history.on_commands, commands)

    def _advance(self, state: State, event: Event, commands: list[Command]) -> State:
        """The state after an event, whose commands are appended; an internal error drops it whole.

        Of reports that were merged only those are dropped that fail by themselves.
        """
        began_s = time.monotonic()
        try:
            after, said = machine.advance(state, event, config=self.config, now_s=began_s)
        except Exception as error:
            if isinstance(event, NodesReported) and len(event.reports) > 1:
                for report in event.reports:
                    state = self._advance(state, NodesReported(reports=(report,)), commands)
            else:
                self._count_failure(f"event dropped: {type(event).__name__}", error)
            return state
        commands += said
        if isinstance(event, NodesReported):
            self.metrics.reports.inc(len(event.reports))
        self.metrics.advance.observe(time.monotonic() - began_s)
        return after

    async def _store(self, state: State, commands: Sequence[Command]) -> None:
        """Store the changes in one transaction; retries while disk or server reject writes.

        Never returns once another controller leads.

        Raises:
            HostError: The store is damaged.
        """
        writes = self._writes.of(state, commands, time.monotonic())
        if not writes:
            return
        unix_s = time.time()
        self._unstored_s = time.monotonic()
        try:
            while True:
                try:
                    await self._thread.run(write_all, self.store, state, writes, unix_s)
                except FencedError:
                    self.leadership.lost()
                    await asyncio.Future()
                except sa.exc.DBAPIError as error:
                    self.store.raise_if_lasting(error)
                    # Full, locked, unreadable or away for now: the world's fault.
                    self.metrics.store_retries.inc()
                    if str(error.orig) != self._refused:
                        self._refused = str(error.orig)
                        _log.error(
                            "The store %s rejects writes, and intake waits: %s",
                            self.store.database.name,
                            self._refused,
                        )
                        await self._report_health(self._refused)
                    await asyncio.sleep(STORE_RETRY_S)
                else:
                    break
        finally:
            self._unstored_s = None
        self._writes.done(state, writes)
        if self._refused:
            self._refused = ""
            _log.info("The store %s accepts writes again", self.store.database.name)
            await self._report_health("")

    def write_waits_s(self) -> float:
        """Seconds since when the oldest write waits for the store, answered or not; 0: none."""
        return 0.0 if self._unstored_s is None else time.monotonic() - self._unstored_s

    async def _report_health(self, refused: str) -> None:
        """Report to health probes whether the store accepts writes."""
        self.metrics.set_store_refusing(refused)
        for name in ("", _CONTROL):
            await self._health.set(name, _NOT_SERVING if refused else _SERVING)

    def _count_failure(self, what: str, error: Exception) -> None:
        """Count an internal error; log it with its traceback the first time."""
        self.metrics.failures.inc()
        if (text := f"{what}: {error!r:.500}") not in self._failures:
            self._failures = {*self._failures, text} if len(self._failures) < MAX_TOLD else {text}
            _log.error("%s", text, exc_info=error)
