"""A real controller process and agents that are scripts: what comes in and goes out over gRPC."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from pacekeeper.cli.demo.fleet import LISTENING
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.incidents.rank_ranges import iter_ranks, merge_ranges
from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Attachment, Clock, ModelShape
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    RankExitRecord,
    Record,
    StepRecord,
)
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.protos import control_pb2, control_pb2_grpc, status_pb2, status_pb2_grpc
from pacekeeper.protos import tls as secure
from pacekeeper.protos.convert import reports
from support.commands import FRESH, Started

PLAIN = TlsConfig()
PATIENCE_S = 60.0  # for a broken world only
SHAPE = ModelShape(
    num_layers=2,
    num_experts=4,
    experts_per_token=2,
    rows_per_step=32,
    slots_per_rank=4,
    expert_bytes=1 << 20,
    dense_bytes=1 << 20,
)
HELLO = control_pb2.Hello(
    protocol_version=reports.PROTOCOL_VERSION,
    product_version="0",
    node="node-0",
    agent_incarnation="first",
    rack="rack-7",
)


def until(what: str, holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Wait for the world and return the first true answer."""
    give_up_s = time.monotonic() + patience_s
    while not (answer := holds()):
        assert time.monotonic() < give_up_s, f"never: {what}"
        time.sleep(0.02)
    return answer


def children(pid: int) -> list[int]:
    """The processes that a process started and that still run."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class ControllerProcess:
    """`pacekeeper controller` on any free port.

    Args:
        is_fresh: Whether to start it as an operator does.
        environment: Its further variables, if it is fresh.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        listen: str = "127.0.0.1:0",
        api_listen: str = "127.0.0.1:0",
        is_fresh: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        command = ["controller", "--listen", listen, "--api-listen", api_listen]
        command += ["--store", str(folder / "store.sqlite")]
        command += arguments
        with (folder / "controller.log").open("a") as log:
            self.process: subprocess.Popen[str] | Started
            if is_fresh:
                self.process = subprocess.Popen(
                    [*FRESH, *command],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **(environment or {})},
                )
            else:
                self.process = Started(*command, errors=log.fileno())
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        listening = LISTENING.fullmatch(line)
        assert listening is not None, self.log
        self.address, self.api = listening.groups()  # of agents, and of commands
        self.channel = grpc.insecure_channel(self.api)
        self.status: Any = status_pb2_grpc.StatusServiceStub(self.channel)

    @property
    def log(self) -> str:
        return (self.folder / "controller.log").read_text()

    def kill(self) -> int:
        """As the power cut would; the exit code."""
        return self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As systemd would; the exit code."""
        return self._end(signal.SIGTERM)

    def __enter__(self) -> "ControllerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class ScriptedAgent:
    """One stream that says what the test says, and keeps what it hears."""

    def __init__(
        self,
        address: str,
        hello: control_pb2.Hello | None = HELLO,
        tls: TlsConfig = PLAIN,
        token: str = "",
    ) -> None:
        """`hello` None: a stream that says nothing by itself."""
        self._requests: queue.Queue[control_pb2.AttachRequest | None] = queue.Queue()
        self._sequence = 0
        self.heard: list[control_pb2.AttachResponse] = []
        self.error: grpc.RpcError | None = None
        self.channel = secure.client_channel(address, tls)
        if hello is not None:
            self.say(control_pb2.AttachRequest(hello=hello))
        stub: Any = control_pb2_grpc.AgentControlServiceStub(self.channel)
        self._call = stub.Attach(
            iter(self._requests.get, None), metadata=secure.bearer_metadata(token)
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def say(self, request: control_pb2.AttachRequest) -> None:
        self._requests.put(request)

    def report(
        self,
        *jobs: JobReport,
        devices: tuple[DeviceSample, ...] = (),
        host: HostSample | None = None,
    ) -> int:
        """Send one batch, by the clock of its samples where it has any; its sequence."""
        self._sequence += 1
        sampled = (*devices, *(() if host is None else (host,)))
        report = NodeReport(
            sequence=self._sequence,
            sent_mono_s=max((one.sampled_s for one in sampled), default=time.monotonic()),
            jobs=jobs,
            devices=devices,
            host=host,
        )
        self.say(control_pb2.AttachRequest(report=reports.report_to_message(report)))
        return self._sequence

    def report_and_wait(self, *jobs: JobReport) -> None:
        """Send one batch; return when it is acknowledged."""
        sequence = self.report(*jobs)
        until(f"report {sequence} is acknowledged", lambda: self.acknowledged >= sequence)

    @property
    def is_welcome(self) -> bool:
        return any(message.HasField("welcome") for message in list(self.heard))

    @property
    def acknowledged(self) -> int:
        assert self.error is None, self.error
        sequences = [m.acknowledge.sequence for m in list(self.heard) if m.HasField("acknowledge")]
        return max(sequences, default=0)

    def offers(self) -> list[control_pb2.OfferPlan]:
        return [m.offer_plan for m in list(self.heard) if m.HasField("offer_plan")]

    def deaths(self) -> list[tuple[int, ...]]:
        notices = [m.notify_deaths for m in list(self.heard) if m.HasField("notify_deaths")]
        return [tuple(notice.ranks) for notice in notices]

    def wait_for_end(self) -> tuple[grpc.StatusCode, str]:
        """How the controller ended the stream."""
        self._listener.join(PATIENCE_S)
        assert self.error is not None, "the stream ended without an error"
        return self.error.code(), self.error.details() or ""

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self.channel.close()

    def _listen(self) -> None:
        try:
            for message in self._call:
                self.heard.append(message)
        except grpc.RpcError as error:
            self.error = error


class Watching:
    """A watch in the background: everything it was told, and how it ended."""

    def __init__(self, call: Any) -> None:
        self.told: list[Any] = []
        self.error: grpc.RpcError | None = None
        self.call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for message in self.call:
                self.told.append(message)
        except grpc.RpcError as error:
            self.error = error

    def wait_for_end(self) -> grpc.RpcError:
        self._thread.join(PATIENCE_S)
        assert self.error is not None
        return self.error


def attachments(job: str, ranks: Collection[int], *, world_size: int = 4) -> Iterator[Attachment]:
    for rank in ranks:
        yield Attachment(
            job=job,
            rank=rank,
            world_size=world_size,
            pid=1000 + rank,
            clock=Clock.EMULATED,
            model=SHAPE,
        )


def first_layout(world_size: int = 4) -> Layout:
    return even_layout(
        ranks=range(world_size),
        num_layers=SHAPE.num_layers,
        num_experts=SHAPE.num_experts,
        replicas=2,
    )


def attached(job: str, layout: Layout, *, step: int = 0) -> JobReport:
    """All of a job that an agent tells when it attaches: its ranks and the layout they run."""
    return JobReport(
        job=job,
        attached=tuple(attachments(job, layout.ranks)),
        layouts=((layout.generation, encode_layout(layout)),),
        records=applied(layout, step=step),
    )


def applied(layout: Layout, *, step: int) -> tuple[Record, ...]:
    """Every rank of `layout` says that it runs it."""
    return tuple(
        PlanAppliedRecord(
            rank=rank,
            step=step,
            generation=layout.generation,
            previous_generation=max(0, layout.generation - 1),
            duration_s=0.01,
            moved_bytes=0,
            is_regroup=False,
            layout_crc=layout_crc(layout),
        )
        for rank in layout.ranks
    )


def step_records(
    step: int, layout: Layout, slow: Mapping[int, float] | None = None
) -> tuple[Record, ...]:
    """One complete step of all ranks of `layout`: uneven work, an exact clock, `slow` ranks."""
    records: list[Record] = []
    for rank in layout.ranks:
        tokens = 1000 + 37 * ((step * 7 + rank * 3) % 11)
        squares = tokens * (150 + 10 * ((step * 5 + rank) % 7))
        rows = 4 * tokens + 50 * ((step + rank * 5) % 9)
        expected_s = 0.02 + 2e-5 * tokens + 1e-8 * squares + 1e-5 * rows
        jitter = 1.0 + 0.004 * ((step * 13 + rank * 29) % 7 - 3)
        records.append(
            MicroBatchRecord(
                rank=rank,
                step=step,
                micro_batch=0,
                generation=layout.generation,
                compute_s=expected_s * jitter * (slow or {}).get(rank, 1.0),
                tokens=tokens,
                sum_len_squared=squares,
                expert_rows=rows,
                num_active_experts=4,
            )
        )
        for layer in range(SHAPE.num_layers):
            counts = tuple(tokens // 2 for _ in range(SHAPE.num_experts))
            records.append(
                ExpertLoadRecord(
                    rank=rank,
                    step=step,
                    generation=layout.generation,
                    layer=layer,
                    first_expert=0,
                    counts=counts,
                )
            )
    slowest_s = max(r.compute_s for r in records if isinstance(r, MicroBatchRecord))
    for rank in layout.ranks:
        records.append(
            StepRecord(
                rank=rank,
                step=step,
                generation=layout.generation,
                duration_s=slowest_s,
                tokens=4000,
                loss=5.0 - 0.01 * step,
            )
        )
    return tuple(records)


def who_died(incident: status_pb2.Incident) -> list[int]:
    """All ranks that an incident of death is about."""
    runs = merge_ranges((run.first, run.last) for died in incident.deaths for run in died.ranks)
    return list(iter_ranks(runs))


def killed(rank: int, *, number: int = signal.SIGKILL) -> RankExitRecord:
    return RankExitRecord(rank=rank, pid=1000 + rank, exit_code=0, signal=number)
