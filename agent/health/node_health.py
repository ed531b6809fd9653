"""What this node is good for, kept current: in a file beside the rings, and for who asks.

The file is for `pacekeeper healthcheck`. A shell around `core/incidents/node_health.py` and
`peer_messages.py`.
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
    """Of one node. `look` comes first; never raises."""

    ring_dir: Path
    node: str
    present: NodeHealth | None = None
    slow: external_health.SlowRanks = field(default_factory=dict)
    _findings: external_health.RecentFindings = field(
        default_factory=external_health.RecentFindings
    )
    _written: NodeHealth | None = None
    _unwritable: str = ""

    def look(
        self,
        devices: tuple[DeviceSample, ...],
        nvml: str,
        suspects: Mapping[str, frozenset[int]],
        now_s: float,
    ) -> None:
        """Judge anew. `suspects`: by job, the ranks here that a finding of the controller names."""
        self.slow = self._findings.take(suspects, now_s)
        self.present = node_health.assess_node(
            self.present, devices, nvml=nvml, node=self.node, now_unix_s=time.time()
        )
        if node_health.must_write(self._written, self.present):
            self._write(self.present)

    def answer(self) -> external_health.HealthCheckAnswer:
        """For NVRx's launcher."""
        return external_health.health_check_answer(self._known(), self.slow)

    def events(self) -> tuple[external_health.HealthEvent, ...]:
        """For NVSentinel."""
        return external_health.health_events(self._known(), self.slow)

    def _known(self) -> NodeHealth:
        if self.present is not None:
            return self.present
        why = "the agent has just begun"
        return node_health.unknown_health(why, node=self.node, now_unix_s=time.time())

    def _write(self, verdict: NodeHealth) -> None:
        target = self.ring_dir / node_health.FILE_NAME
        said = ""
        try:
            write_atomically(target, node_health.encode_node_health(verdict))
            self._written = verdict
        except OSError as error:
            said = error.strerror or str(error)
        if said and said != self._unwritable:
            _log.warning("verdict=%s: %s; `pacekeeper healthcheck` knows nothing", target, said)
        self._unwritable = said
