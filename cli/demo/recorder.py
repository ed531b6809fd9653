"""Recorder of the demo: steps, incidents and layouts from the status service, and the step logs."""

import json
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pacekeeper.cli.demo.metrics import LoggedIncident, LoggedStep
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.protos import status_pb2, status_pb2_grpc
from pacekeeper.protos.convert import reports


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One complete step as published by the controller; NaN while it is measuring."""

    step: int
    generation: int
    seen_s: float
    tokens_per_s: float
    loss: float | None
    ranks: tuple[int, ...]
    observed_s: tuple[float, ...]
    expected_s: tuple[float, ...]
    slowdown: tuple[float, ...]
    watch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoEvent:
    """One event of the demo, for the terminal and the report."""

    seen_s: float
    step: int
    kind: str  # "fault", "finding", "plan", "lift", "recover", "kill", "regroup"
    text: str


@dataclass(kw_only=True)
class Recorder:
    """Records steps, incidents and layouts of one job in two threads until `close`."""

    address: str
    job: str
    steps: list[StepView] = field(default_factory=list)
    incidents: dict[int, LoggedIncident] = field(default_factory=dict)
    layouts: dict[int, tuple[Layout, str]] = field(default_factory=dict)
    events: list[DemoEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._channel = grpc.insecure_channel(self.address, options=reports.GRPC_OPTIONS_CLIENT)
        self._stub = status_pb2_grpc.StatusServiceStub(self._channel)
        for target in (self._watch_steps, self._watch_incidents):
            threading.Thread(target=self._run_until_closed, args=(target,), daemon=True).start()

    def close(self) -> None:
        """Stop recording; the records stay."""
        self._closing.set()
        self._channel.close()

    def add_event(self, kind: str, text: str) -> None:
        """Append an event at the present step."""
        step = self.steps[-1].step if self.steps else 0
        self.events.append(DemoEvent(seen_s=time.monotonic(), step=step, kind=kind, text=text))

    def _run_until_closed(self, watch: Any) -> None:
        while not self._closing.is_set():
            try:
                watch()
            except (grpc.RpcError, ValueError):  # ValueError: `close` closed the channel
                self._closing.wait(0.2)

    def _watch_steps(self) -> None:
        for message in self._stub.WatchSteps(status_pb2.WatchStepsRequest(job=self.job)):
            num_ranks = len(message.ranks)
            unknown = [math.nan] * num_ranks
            if not self.steps or message.generation != self.steps[-1].generation:
                self._fetch_layout(message.generation)
            with self._lock:
                self.steps.append(
                    StepView(
                        step=message.step,
                        generation=message.generation,
                        seen_s=time.monotonic(),
                        tokens_per_s=message.tokens / max(message.duration_s, 1e-9),
                        loss=message.loss if message.HasField("loss") else None,
                        ranks=tuple(message.ranks),
                        observed_s=tuple(message.observed_s),
                        expected_s=tuple(message.expected_s or unknown),
                        slowdown=tuple(message.slowdown or unknown),
                        watch=message.watch,
                    )
                )

    def _fetch_layout(self, generation: int) -> None:
        request = status_pb2.GetLayoutRequest(job=self.job, generation=generation)
        try:
            answer = self._stub.GetLayout(request, timeout=2.0)
        except grpc.RpcError:
            return
        is_first = not self.layouts
        self.layouts[generation] = (decode_layout(answer.layout_json), answer.reason)
        if not is_first:
            self.add_event("plan", f"generation {generation} applied: {answer.reason}")

    def _watch_incidents(self) -> None:
        for message in self._stub.WatchIncidents(status_pb2.WatchIncidentsRequest(job=self.job)):
            self._record_incident(message.incident)

    def _record_incident(self, incident: Any) -> None:
        now_s = time.monotonic()
        before = self.incidents.get(incident.incident_id)
        is_closed = incident.HasField("closed_unix_s")
        closed_s = None
        if is_closed:
            closed_s = before.closed_s if before is not None and before.closed_s else now_s
        self.incidents[incident.incident_id] = LoggedIncident(
            incident_id=incident.incident_id,
            kind=incident.kind,
            rank=incident.rank if incident.HasField("rank") else None,
            slowdown=incident.slowdown if before is None else before.slowdown,
            last_slowdown=incident.slowdown,
            onset_step=incident.onset_step,
            found_step=incident.found_step,
            found_s=now_s if before is None else before.found_s,
            reason=incident.reason,
            closed_s=closed_s,
            actions=tuple(incident.actions),
        )
        rank = f" rank {incident.rank}" if incident.HasField("rank") else ""
        what = f"#{incident.incident_id} {incident.kind}{rank}"
        if before is None:
            self.add_event("finding", f"{what}: {incident.reason}")
        if is_closed and (before is None or before.closed_s is None):
            self.add_event("recover", f"{what} closed at step {incident.closed_step}")


def read_step_log(path: Path) -> tuple[LoggedStep, ...]:
    """Read the committed steps of a rank's log in order; an incomplete last line is skipped."""
    steps = []
    for line in _json_lines(path):
        if "event" not in line:
            steps.append(
                LoggedStep(
                    step=int(line["step"]),
                    generation=int(line["generation"]),
                    ended_s=float(line["ended_mono_s"]),
                    tokens=int(line["tokens"]),
                    loss=math.nan if line["loss"] is None else float(line["loss"]),
                    is_redone=bool(line.get("is_redone", False)),
                    overrun_s=float(line.get("overrun_s", 0.0)),
                    compute_s=line.get("compute_s"),
                )
            )
    return tuple(steps)


def read_injected_faults(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the log of the fault injector: one entry per change of a rank's fault."""
    return tuple(_json_lines(path))


def _json_lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the rank was killed while writing
            continue
