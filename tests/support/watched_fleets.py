"""A fleet whose rings are read and whose steps are judged in this process: by the agents' readers
and the controller's machine, with nothing but function calls between them."""

import time
from dataclasses import dataclass, field

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.agent.uplink.batching import build_report
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.state.events import (
    Event,
    Log,
    NodeAttached,
    NodeReported,
    RequestProbe,
    Tick,
)
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind
from pacekeeper.core.telemetry.node_report import AgentHealth
from support.fleet import Fleet


@dataclass(kw_only=True)
class WatchedFleet:
    """The agents and the controller of a fleet; `poll` is called again and again.

    Probes that the machine asks for are passed on; it makes no plans. `logs`: what it said.
    """

    fleet: Fleet
    config: ControllerConfig
    collectors: dict[str, RingCollector] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    state: State = field(default_factory=lambda: State(unix_offset_s=1e9))
    _sequence: int = 0

    def __enter__(self) -> "WatchedFleet":
        for node in range(self.fleet.num_nodes):
            collector = RingCollector(directory=self.fleet.ring_dir(node))
            collector.prepare()
            self.collectors[f"node-{node}"] = collector
            attached = NodeAttached(node=f"node-{node}", product_version="1", agent_incarnation="a")
            self._advance(attached)
        return self

    def __exit__(self, *_: object) -> None:
        for collector in self.collectors.values():
            collector.close()

    def poll(self) -> None:
        """Read all rings once, judge what is complete, and let time pass."""
        for node, collector in self.collectors.items():
            now_s = time.monotonic()
            self._sequence += 1
            report = build_report(
                collector.poll(now_s), (), _HEALTH, sequence=self._sequence, now_s=now_s
            )
            self._advance(NodeReported(node=node, agent_incarnation="a", report=report))
        self._advance(Tick())

    @property
    def job(self) -> JobState | None:
        return self.state.jobs.get(self.fleet.config.job)

    @property
    def step(self) -> int:
        """The last step that was judged; -1: none."""
        return -1 if self.job is None else self.job.progress.step

    @property
    def findings(self) -> list[Finding]:
        """All link findings so far."""
        incidents = () if self.job is None else self.job.incidents
        return [one.finding for one in incidents if one.finding.kind is FindingKind.LINK]

    def _advance(self, event: Event) -> None:
        self.state, said = advance(self.state, event, config=self.config, now_s=time.monotonic())
        for command in said:
            if isinstance(command, RequestProbe):
                for collector in self.collectors.values():
                    collector.request_probe(command.job, command.number, command.run_id)
            elif isinstance(command, Log):
                self.logs.append(command.text)


_HEALTH = AgentHealth(
    nvml="ok", num_devices=0, records_read=0, records_lost=0, records_corrupt=0, batches_dropped=0
)
