"""Wires the agent: one loop looks into the rings, one stream reports, one thread asks NVML."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pacekeeper.agent.intake import Intake
from pacekeeper.agent.metrics import AgentMetrics
from pacekeeper.agent.nvml import NoNvml, Nvml, open_nvml
from pacekeeper.agent.spool import Spool
from pacekeeper.agent.uplink import Uplink
from pacekeeper.agent.window import Reading, batch, deaths_in
from pacekeeper.core.config import AgentConfig
from pacekeeper.core.reports import AgentHealth
from pacekeeper.core.topology import DeviceSample
from pacekeeper.protos import control_pb2, wire

IDLE_REPORT_S = 1.0  # a quiet node still reports, so that silence means something
NVML_HUNG_S = 10.0
FLUSH_S = 1.0
_log = logging.getLogger(__name__)


class Agent:
    """The daemon of one node."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.intake = Intake(directory=Path(config.ring_dir))
        self.spool = Spool(capacity=config.spool_batches)
        self.metrics = AgentMetrics()
        self.uplink = Uplink(
            address=config.controller,
            node=config.node or socket.gethostname(),
            life=uuid.uuid4().hex,
            spool=self.spool,
            ack_timeout_s=config.ack_timeout_s,
            reconnect_max_s=config.reconnect_max_s,
            on_command=self._obey,
            on_connected=self._tell_all,
        )
        self._nvml: Nvml | NoNvml = NoNvml(reason="not asked yet")
        self._samples: tuple[DeviceSample, ...] = ()
        self._sampled_s = 0.0
        self._sequence = 0
        self._reported_s = 0.0

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises HostError (directory, port), VersionError."""
        self.intake.prepare()
        server = self.metrics.serve(self.config.metrics_listen) if self._has_metrics else None
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        _log.info(
            "node=%s rings=%s controller=%s",
            self.uplink.node,
            self.config.ring_dir,
            self.config.controller,
        )
        tasks = [
            asyncio.create_task(self.uplink.run()),
            asyncio.create_task(self._look_forever()),
            asyncio.create_task(self._sample_forever()),
            asyncio.create_task(stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
            self._look()
            await self._flush()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            if server is not None:
                server.shutdown()
        _log.info("stopped")

    @property
    def _has_metrics(self) -> bool:
        return bool(self.config.metrics_listen)

    async def _look_forever(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(self.config.poll_interval_s)

    def _look(self) -> None:
        began_s = time.monotonic()
        readings = self.intake.look(began_s)
        for job, dead in deaths_in(readings).items():
            self.intake.notify_deaths(job, dead)
        is_due = began_s - self._reported_s >= IDLE_REPORT_S
        if is_due or any(not reading.is_empty for reading in readings):
            self._report(readings, began_s)
        self.metrics.look.observe(time.monotonic() - began_s)

    def _report(self, readings: tuple[Reading, ...], now_s: float) -> None:
        self._sequence += 1
        self._reported_s = now_s
        health = self._health(now_s)
        self.spool.put(batch(readings, self._samples, health, sequence=self._sequence, now_s=now_s))
        self.uplink.wake()
        self.metrics.update(
            health,
            rings=self.intake.num_rings,
            spooled=len(self.spool),
            connected=self.uplink.is_connected,
        )

    def _health(self, now_s: float) -> AgentHealth:
        counts = self.intake.counts
        match self._nvml:
            case NoNvml(reason=reason):
                nvml = reason
            case Nvml(lost=lost) if lost:
                nvml = "; ".join(lost)
            case _:
                late_s = now_s - self._sampled_s
                nvml = "ok" if late_s < NVML_HUNG_S else f"NVML has not answered for {late_s:.0f} s"
        return AgentHealth(
            nvml=nvml,
            records_read=counts.read,
            records_lost=counts.lost,
            records_corrupt=counts.corrupt,
            batches_dropped=self.spool.num_dropped,
            unreadable=tuple(
                f"{name}: {reason}" for name, reason in sorted(self.intake.unreadable.items())
            ),
        )

    async def _sample_forever(self) -> None:
        """In a thread of its own: a sick driver may hang there without stopping the rest."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="nvml")
        self._nvml = await loop.run_in_executor(thread, open_nvml)
        if isinstance(self._nvml, NoNvml):
            _log.info("nvml=none reason=%r", self._nvml.reason)
            await asyncio.Event().wait()
            return
        while True:
            now_s = time.monotonic()
            self._samples = await loop.run_in_executor(thread, self._nvml.sample, now_s)
            self._sampled_s = now_s
            self.metrics.update_devices(self._samples)
            await asyncio.sleep(self.config.sample_interval_s)

    def _tell_all(self) -> None:
        """A controller that was away may have forgotten: attachments and layouts once more."""
        self._report(self.intake.everything_again(), time.monotonic())

    def _obey(self, message: control_pb2.AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "offer_plan":
                offer = message.offer_plan
                if not wire.offer_is_whole(offer):
                    _log.error("job=%s plan=%d damaged: ignored", offer.job, offer.generation)
                    return
                self.intake.offer_plan(
                    offer.job,
                    offer.generation,
                    offer.base_generation,
                    offer.layout_json,
                    offer.sha256,
                )
            case "notify_deaths":
                notice = message.notify_deaths
                self.intake.notify_deaths(notice.job, frozenset(notice.ranks))
            case other:
                _log.warning("unknown command %s: is the controller newer?", other)

    async def _flush(self) -> None:
        """Give the last reports a moment to leave."""
        give_up_s = time.monotonic() + FLUSH_S
        while len(self.spool) and self.uplink.is_connected and time.monotonic() < give_up_s:
            await asyncio.sleep(0.02)
