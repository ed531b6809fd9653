"""Wires the agent: one loop polls the rings, one stream sends reports, one thread queries NVML.

Called by `pacekeeper agent`. All shared state is changed in the event loop only.
"""

import asyncio
import logging
import signal
import socket
import time
import uuid
from pathlib import Path

from pacekeeper.agent.health import nvrx_socket
from pacekeeper.agent.health.node_health import NodeHealthMonitor
from pacekeeper.agent.health.nvsentinel_client import NvsentinelClient
from pacekeeper.agent.host.kernel import HostSampler
from pacekeeper.agent.metrics import AgentMetrics
from pacekeeper.agent.nvml.sampler import Sampler
from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.agent.rings.fencing_epoch import FILE_NAME, FencingEpoch
from pacekeeper.agent.rings.ring_batch import RingBatch, find_deaths
from pacekeeper.agent.rings.stack_dump import DumpTarget, take_dump
from pacekeeper.agent.trace_recorder import TraceRecorder
from pacekeeper.agent.uplink.batching import (
    SampleFilter,
    build_report,
    split_batches,
    sum_expert_loads,
)
from pacekeeper.agent.uplink.pacing import ReportPacer
from pacekeeper.agent.uplink.spool import Spool
from pacekeeper.agent.uplink.stream import Uplink
from pacekeeper.core.addresses import split_addresses
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.metrics import unauthenticated_metrics
from pacekeeper.core.config.security import unencrypted_controller
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.core.telemetry.samples import DeviceSample
from pacekeeper.core.telemetry.sign_of_life import RankStack
from pacekeeper.protos import control_pb2, telemetry_pb2, tls
from pacekeeper.protos.convert import reports

FLUSH_TIMEOUT_S = 3.0  # for the last reports at shutdown
METRICS_INTERVAL_S = 1.0  # between two updates of the metrics
IDLE_POLL_S = 0.5  # without rings, only new job directories are looked for
MAX_LISTED_FILES = 16  # unreadable files listed in one report
TLS_REMEDY = "configure certificates ([tls]), or allow it with --insecure"
_log = logging.getLogger(__name__)


class Agent:
    """The daemon of one node."""

    def __init__(self, config: AgentConfig) -> None:
        """Check the configuration and create all parts; nothing is opened yet.

        Raises:
            ConfigError: A connection would be unencrypted, or a certificate or token is not usable.
            HostError: A certificate or token file is missing.
        """
        check_encryption(config)
        tls.check_client(config.tls, config.token_file)
        self.config = config
        rings = Path(config.ring_dir)
        self.collector = RingCollector(
            directory=rings, fencing=FencingEpoch(path=rings / FILE_NAME)
        )
        self.spool: Spool[telemetry_pb2.NodeReport] = Spool(capacity=config.spool_batches)
        self.metrics = AgentMetrics(
            config.node or socket.gethostname(),
            {"tls": config.tls.cert, "metrics": config.metrics.cert},
        )
        self.pacer = ReportPacer()
        self.sampler = Sampler(config.sample_interval_s)
        self.host = HostSampler(interval_s=config.sample_interval_s)
        self.uplink = Uplink(
            addresses=split_addresses(config.controller),
            fencing=self.collector.fencing,
            node=config.node or socket.gethostname(),
            rack=config.rack,
            incarnation=uuid.uuid4().hex,
            spool=self.spool,
            ack_timeout_s=config.ack_timeout_s,
            reconnect_max_s=config.reconnect_max_s,
            on_command=self._execute,
            on_interval=self.pacer.set_interval,
            resync_report=self._resync_report,
            tls=config.tls,
            token_file=config.token_file,
        )
        self.node_health = NodeHealthMonitor(ring_dir=Path(config.ring_dir), node=self.uplink.node)
        self.recorder: TraceRecorder | None = None
        self._sent_samples = SampleFilter()
        self._recorded_samples = SampleFilter()
        self._metrics_updated_s = -METRICS_INTERVAL_S
        self._sequence = 0
        self._num_unencodable = 0
        self._dumps: dict[Path, asyncio.Task[None]] = {}  # under way, by ring
        self._last_reports: dict[
            str, tuple[int, int]
        ] = {}  # by job: sequence of its newest report, drops until then

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            HostError: The ring directory, a port or a socket is not available.
            VersionError: The controller has another protocol version.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self.collector.prepare()
        if self.config.record_dir:
            self.recorder = TraceRecorder.begin(
                Path(self.config.record_dir),
                node=self.uplink.node,
                max_bytes=self.config.record_max_bytes,
            )
        listen = self.config.metrics_listen
        server = self.metrics.serve(listen, self.config.metrics) if listen else None
        if server is not None:
            _log.info("metrics=%s:%d", listen.rpartition(":")[0], server.server_port)
        launchers = self.config.health_socket
        health = (
            await nvrx_socket.serve(Path(launchers), self.node_health.launcher_response)
            if launchers
            else None
        )
        self.sampler.start()
        _log.info(
            "node=%s rings=%s controller=%s",
            self.uplink.node,
            self.config.ring_dir,
            self.config.controller,
        )
        uplink = asyncio.create_task(self.uplink.run())
        tasks = [
            uplink,
            asyncio.create_task(self._poll_forever()),
            asyncio.create_task(stop.wait()),
        ]
        if self.config.sentinel_socket:
            sentinel = NvsentinelClient(
                socket=self.config.sentinel_socket,
                node=self.uplink.node,
                remediates=self.config.sentinel_remediates,
                events=self.node_health.sentinel_events,
            )
            tasks.append(asyncio.create_task(sentinel.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
            await self._flush(uplink)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self._dumps.values(), return_exceptions=True)
            self.sampler.stop()
            self.collector.close()
            if health is not None:
                await health.stop(nvrx_socket.GRACE_S)
            if self.recorder is not None:
                self.recorder.close()
            if server is not None:
                server.close()
        _log.info("stopped waiting=%d", len(self.spool))

    async def _poll_forever(self) -> None:
        while True:
            self._poll()
            poll_s = self.config.poll_interval_s
            await asyncio.sleep(poll_s if self.collector.num_rings else max(poll_s, IDLE_POLL_S))

    def _poll(self) -> None:
        began_s = time.monotonic()
        batches = self.collector.poll(began_s)
        if self.recorder is not None:
            devices = self._recorded_samples.select(self.sampler.latest(began_s)[0])
            self.recorder.write(batches, devices, self.host.latest(began_s))
        pids = self.collector.pids()
        for (job, run_id), dead in find_deaths(batches, pids).items():
            self.collector.notify_deaths(job, dead, run_id)
        self.pacer.add(batches, pids, began_s)
        if self.pacer.is_due(
            began_s,
            is_urgent=self._sent_samples.is_urgent(self.sampler.latest(began_s)[0]),
            is_connected=self.uplink.is_connected,
        ):
            self._queue_pending(began_s)
        self._release_ended_jobs(began_s)
        if began_s - self._metrics_updated_s >= METRICS_INTERVAL_S:
            self._metrics_updated_s = began_s
            self._update_metrics(began_s)
            self.node_health.update(
                *self.sampler.latest(began_s), self.collector.suspects(), began_s
            )
        self.metrics.poll.observe(time.monotonic() - began_s)

    def _queue_pending(self, now_s: float) -> None:
        """Put all pending records, and the devices where they are news, into the spool."""
        devices = self._sent_samples.select(self.sampler.latest(now_s)[0])
        for portion in split_batches(sum_expert_loads(self.pacer.take(now_s))):
            self._queue_report(portion, now_s, devices)
            devices = ()
        self.uplink.wake()

    def _queue_report(
        self,
        batches: tuple[RingBatch, ...],
        now_s: float,
        devices: tuple[DeviceSample, ...] = (),
    ) -> None:
        """Put one report into the spool, encoded, to bound its memory during an outage."""
        self._sequence += 1
        sequence = self._sequence
        try:
            message = self._encode(batches, sequence, now_s, devices)
        except ValueError as error:
            self._num_unencodable += 1
            _log.error("report %d cannot be encoded and is dropped: %s", sequence, error)
            return
        self.spool.put(message, message.ByteSize())
        for batch in batches:
            if not batch.is_empty:
                self._last_reports[batch.job] = (sequence, self.spool.num_dropped)

    def _release_ended_jobs(self, now_s: float) -> None:
        """Close the rings of ended jobs once the controller has acknowledged all their records."""
        for gone in set(self._last_reports) - set(self.collector.pids()):
            del self._last_reports[gone]
        for job in self.collector.ended_jobs(now_s):
            if job in self.pacer.jobs:
                continue
            sequence, num_dropped = self._last_reports.get(job, (0, 0))
            if self.spool.num_dropped != num_dropped:
                # Its last records may be among the dropped ones: send its state again.
                self._queue_report((self.collector.resync_job(job),), now_s)
                self.uplink.wake()
            elif self.spool.settled_sequence >= sequence:
                self.collector.release_job(job)
                self._last_reports.pop(job, None)

    def _encode(
        self,
        batches: tuple[RingBatch, ...],
        sequence: int,
        now_s: float,
        devices: tuple[DeviceSample, ...],
    ) -> telemetry_pb2.NodeReport:
        health = self._health(now_s)
        host = self.host.latest(now_s)
        return reports.report_to_message(
            build_report(batches, devices, health, sequence=sequence, now_s=now_s, host=host)
        )

    def _resync_report(self, sequence: int) -> telemetry_pb2.NodeReport:
        """The report that opens a connection: attachments, layouts, exits and devices."""
        now_s = time.monotonic()
        devices, _ = self.sampler.latest(now_s)
        return self._encode(self.collector.resync(), sequence, now_s, devices)

    def _health(self, now_s: float) -> AgentHealth:
        counts = self.collector.counts
        devices, nvml = self.sampler.latest(now_s)
        files = sorted((self.collector.unreadable | self.collector.unwritable).items())
        listed = [f"{name}: {reason}" for name, reason in files[:MAX_LISTED_FILES]]
        if len(files) > MAX_LISTED_FILES:
            listed.append(f"and {len(files) - MAX_LISTED_FILES} more")
        return AgentHealth(
            nvml=nvml,
            num_devices=sum(not device.is_lost for device in devices),
            records_read=counts.read,
            records_lost=counts.lost,
            records_corrupt=counts.corrupt,
            batches_dropped=self.spool.num_dropped + self._num_unencodable,
            unreadable=tuple(listed),
        )

    def _update_metrics(self, now_s: float) -> None:
        self.metrics.update(
            self._health(now_s),
            rings=self.collector.num_rings,
            spool_batches=len(self.spool),
            spool_bytes=self.spool.num_bytes,
            connected=self.uplink.is_connected,
        )
        self.metrics.update_nvml(
            readings=self.sampler.rounds,
            spent_s=self.sampler.spent_s,
            waiting_s=self.sampler.waiting_s(now_s),
        )
        self.metrics.devices = self.sampler.latest(now_s)[0]
        self.metrics.host = self.host.latest(now_s)

    def _execute(self, message: control_pb2.AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "offer_plan":
                try:
                    offer = reports.offer_from_message(message.offer_plan)
                except ValueError as error:
                    _log.error("offer of a plan ignored: %s", error)
                    return
                self.collector.offer_plan(offer)
            case "notify_deaths":
                notice = message.notify_deaths
                self.collector.notify_deaths(notice.job, frozenset(notice.ranks), notice.run_id)
            case "set_suspects":
                suspects = message.set_suspects
                self.collector.set_suspects(
                    suspects.job, frozenset(suspects.ranks), suspects.run_id
                )
            case "request_probe":
                probe = message.request_probe
                self.collector.request_probe(probe.job, probe.number, probe.run_id)
            case "request_stacks":
                asked = message.request_stacks
                targets = self.collector.dump_targets(
                    asked.job, frozenset(asked.ranks), asked.run_id
                )
                for target in targets:
                    self._begin_dump(asked.job, asked.run_id, target)
            case other:
                _log.warning(
                    "command %s ignored: this agent does not know it; the controller may be newer",
                    other,
                )

    def _begin_dump(self, job: str, run_id: int, target: DumpTarget) -> None:
        """Start a stack dump in a thread, unless one of this ring is under way."""
        if target.ring in self._dumps:
            return

        async def dump() -> None:
            try:
                stack = await asyncio.to_thread(take_dump, target)
                self.collector.add_stack(job, stack, run_id)
                _log.info("job=%s rank=%d stack dump by %s", job, target.rank, stack.source or "-")
            finally:
                del self._dumps[target.ring]

        if self.config.stack_dumps:
            self._dumps[target.ring] = asyncio.create_task(dump())
        else:
            off = RankStack(rank=target.rank, source="", text="[agent] stack_dumps is off")
            self.collector.add_stack(job, off, run_id)

    async def _flush(self, uplink: "asyncio.Task[None]") -> None:
        """Poll the rings once more and send the waiting reports, for at most FLUSH_TIMEOUT_S."""
        self._poll()
        if self.pacer.jobs:
            self._queue_pending(time.monotonic())
        self.uplink.finish()
        _, late = await asyncio.wait({uplink}, timeout=FLUSH_TIMEOUT_S)
        if late:
            _log.warning(
                "the controller did not acknowledge all reports within %g s", FLUSH_TIMEOUT_S
            )


def check_encryption(config: AgentConfig) -> None:
    """Warn about unencrypted connections beyond loopback.

    Raises:
        ConfigError: There is one, and `insecure` is not set.
    """
    for why in unencrypted_connections(config):
        if not config.insecure:
            raise ConfigError(why, remedy=TLS_REMEDY)
        _log.warning("insecure: %s", why)


def unencrypted_connections(config: AgentConfig) -> list[str]:
    """Descriptions of the unencrypted connections beyond loopback.

    Raises:
        ConfigError: A token would be sent on one of them.
    """
    callers = [
        unencrypted_controller(one, config.tls) for one in split_addresses(config.controller)
    ]
    whys = list(callers)
    if config.metrics_listen:
        whys.append(unauthenticated_metrics(config.metrics_listen, config.metrics))
    for why in filter(None, whys):
        if why in callers and config.token_file:
            raise ConfigError(f"{why}: its token would be sent unencrypted", remedy="set [tls] ca")
    return [why for why in whys if why]
