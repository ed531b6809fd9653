"""Wires the controller: one inbox, one consumer, one ticker, one store. The clock enters here."""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from pacekeeper.controller import machine
from pacekeeper.controller.events import (
    Command,
    Event,
    NodeReported,
    NotifyDeaths,
    OfferPlan,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveLayout,
    Say,
    StepSummary,
    Tick,
)
from pacekeeper.controller.metrics import ControllerMetrics
from pacekeeper.controller.server import AgentControl
from pacekeeper.controller.state import State
from pacekeeper.controller.status_service import Status
from pacekeeper.controller.store import Store
from pacekeeper.core.config import ControllerConfig
from pacekeeper.core.errors import HostError
from pacekeeper.protos import (
    control_pb2,
    control_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    wire,
)

INBOX_EVENTS = 4096
DRAIN_S = 2.0
_log = logging.getLogger(__name__)


class Controller:
    """The central service of a fleet."""

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.store = Store.open(Path(config.store))
        self.metrics = ControllerMetrics()
        jobs, incidents, next_id = self.store.load()
        self.state: State = machine.restored(
            jobs,
            incidents,
            next_incident_id=next_id,
            unix_offset_s=time.time() - time.monotonic(),
        )
        self.agents = AgentControl(put=self._put, on_rejected=self.metrics.rejected.inc)
        self.status = Status(state=lambda: self.state, past_layout=self.store.layout)
        self._inbox: asyncio.Queue[tuple[Event, asyncio.Future[None] | None]] = asyncio.Queue(
            INBOX_EVENTS
        )

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises HostError where a port is taken."""
        metrics = None
        if self.config.metrics_listen:
            metrics = self.metrics.serve(self.config.metrics_listen)
        server, port = await self._serve()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        print(f"listening on {self.config.listen.rpartition(':')[0]}:{port}", flush=True)
        # The first fit would else stall the inbox for a second.
        threading.Thread(target=_import_early, daemon=True).start()
        tasks = [asyncio.create_task(self._consume()), asyncio.create_task(self._tick())]
        try:
            waiter = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([*tasks, waiter], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.agents.end_all()
            await server.stop(DRAIN_S)
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if metrics is not None:
                metrics.shutdown()
            self.store.close()
        _log.info("stopped")

    async def _serve(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=wire.GRPC_OPTIONS_SERVER)
        control_pb2_grpc.add_AgentControlServiceServicer_to_server(self.agents, server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(self.status, server)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        names = (
            control_pb2.DESCRIPTOR.services_by_name["AgentControlService"].full_name,
            status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, server)
        try:
            port = server.add_insecure_port(self.config.listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise HostError(
                f"can not listen on {self.config.listen}",
                remedy="is another controller running? choose another --listen HOST:PORT",
            )
        await server.start()
        return server, port

    async def _put(self, event: Event) -> None:
        """Through the machine before the caller goes on: back-pressure, and acks mean stored."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._inbox.put((event, done))
        await done

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_interval_s)
            await self._put(Tick())
            self.metrics.update(self.state)

    async def _consume(self) -> None:
        """The only caller of the machine: no lock needed."""
        while True:
            event, done = await self._inbox.get()
            try:
                self._advance(event)
            except Exception:
                # Our bug: say it loudly, drop this one event, keep serving.
                self.metrics.failures.inc()
                _log.exception("event dropped: %s", type(event).__name__)
            if done is not None and not done.done():
                done.set_result(None)

    def _advance(self, event: Event) -> None:
        began_s = time.monotonic()
        state, commands = machine.advance(self.state, event, config=self.config, now_s=began_s)
        self.state = state
        # Stored before anybody is told.
        lasting = [
            c for c in commands if isinstance(c, SaveIncident | SaveLayout | SaveDecision | SaveJob)
        ]
        if lasting:
            with self.store.transaction():
                for stored in lasting:
                    self._store(stored)
        for command in commands:
            self._obey(command)
        if isinstance(event, NodeReported):
            self.metrics.reports.inc()
        self.metrics.advance.observe(time.monotonic() - began_s)

    def _store(self, command: Command) -> None:
        match command:
            case SaveIncident(incident=incident):
                self.store.save_incident(incident)
            case SaveLayout(job=job, layout=layout, reason=reason):
                self.store.save_layout(job, layout, reason)
            case SaveDecision(job=job, step=step, decision=decision):
                self.store.save_decision(job, step, decision)
            case SaveJob(job=job):
                self.store.save_job(machine.job_record(self.state, job))
            case _:
                raise AssertionError(f"{type(command).__name__} is not stored")

    def _obey(self, command: Command) -> None:
        match command:
            case OfferPlan(job=job, nodes=nodes, layout=layout, base_generation=base):
                offer = wire.offer_to_message(job, layout, base)
                for node in nodes:
                    self.agents.send(node, control_pb2.AttachResponse(offer_plan=offer))
            case NotifyDeaths(job=job, nodes=nodes, ranks=ranks):
                notice = control_pb2.NotifyDeaths(job=job, ranks=list(ranks))
                for node in nodes:
                    self.agents.send(node, control_pb2.AttachResponse(notify_deaths=notice))
            case SaveIncident(incident=incident):
                if incident.closed_unix_s is None and not incident.actions:
                    self.metrics.incidents.labels(incident.finding.kind).inc()
                self.status.publish_incident(incident)
            case StepSummary():
                self.status.publish_step(command)
            case Say(text=text):
                _log.info("%s", text)
            case SaveLayout() | SaveDecision() | SaveJob():
                pass  # stored already


def _import_early() -> None:
    import sklearn.linear_model  # noqa: F401
