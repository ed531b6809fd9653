"""Keeps the node's health current, in a file of the ring directory and for the two external tools.

`pacekeeper healthcheck` reads the file. A shell around `core/incidents/node_health.py` and
`external_health.py`.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pacekeeper.agent.health import external_health
from pacekeeper.agent.rings.directory import write_atomically
from pacekeeper.core.incidents import node_health
from pacekeeper.core.incidents.node_health import NodeHealth
from pacekeeper.core.telemetry.samples import DeviceSample

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class NodeHealthMonitor:
    """Health of one node. Never raises."""

    ring_dir: Path
    node: str
    present: NodeHealth | None = None
    slow: external_health.SlowRanks = field(default_factory=dict)
    _findings: external_health.RecentFindings = field(
        default_factory=external_health.RecentFindings
    )
    _written: NodeHealth | None = None
    _unwritable: str = ""

    def update(
        self,
        devices: tuple[DeviceSample, ...],
        nvml: str,
        suspects: Mapping[str, frozenset[int]],
        now_s: float,
    ) -> None:
        """Evaluate the node and write the file if the result has changed.

        Args:
            devices: The newest samples.
            nvml: "ok", or why samples are missing.
            suspects: By job, the ranks here that a finding of the controller names.
            now_s: Monotonic clock.
        """
        self.slow = self._findings.update(suspects, now_s)
        self.present = node_health.assess_node(
            self.present, devices, nvml=nvml, node=self.node, now_unix_s=time.time()
        )
        if node_health.must_write(self._written, self.present):
            self._write(self.present)

    def launcher_response(self) -> external_health.HealthCheckAnswer:
        """The response to NVRx's launcher."""
        return external_health.health_check_answer(self._known(), self.slow)

    def sentinel_events(self) -> tuple[external_health.HealthEvent, ...]:
        """The events for NVSentinel."""
        return external_health.health_events(self._known(), self.slow)

    def _known(self) -> NodeHealth:
        if self.present is not None:
            return self.present
        why = "the agent has just started"
        return node_health.unknown_health(why, node=self.node, now_unix_s=time.time())

    def _write(self, verdict: NodeHealth) -> None:
        target = self.ring_dir / node_health.FILE_NAME
        problem = ""
        try:
            write_atomically(target, node_health.encode_node_health(verdict))
            self._written = verdict
        except OSError as error:
            problem = error.strerror or str(error)
        if problem and problem != self._unwritable:
            _log.warning(
                "health=%s cannot be written: %s; `pacekeeper healthcheck` reports unknown",
                target,
                problem,
            )
        self._unwritable = problem
