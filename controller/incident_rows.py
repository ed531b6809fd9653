"""An incident as a row of the store, and back. Pure."""

import json
import math
from typing import Any

from pacekeeper.controller.json_columns import items, text
from pacekeeper.core.findings import Finding, FindingKind, Incident, Tier


def incident_row(incident: Incident) -> tuple[Any, ...]:
    """The columns of the table `incidents`, in their order."""
    finding = incident.finding
    return (
        incident.incident_id,
        incident.job,
        finding.kind,
        finding.tier,
        finding.rank,
        finding.slowdown,
        finding.onset_step,
        finding.step,
        finding.reason,
        incident.opened_unix_s,
        incident.closed_unix_s,
        incident.closed_step,
        json.dumps(incident.actions),
        finding.cause,
        finding.probe,
        finding.role,
    )


def incident_of(row: tuple[Any, ...]) -> Incident:
    """Raises ValueError or TypeError for what is no such row."""
    return Incident(
        incident_id=row[0],
        job=row[1],
        finding=Finding(
            kind=FindingKind(row[2]),
            tier=Tier(row[3]),
            rank=row[4],
            slowdown=math.nan if row[5] is None else row[5],  # SQLite keeps NaN as NULL
            onset_step=row[6],
            step=row[7],
            reason=row[8],
            cause=row[13],
            probe=row[14],
            role=row[15],
        ),
        opened_unix_s=row[9],
        closed_unix_s=row[10],
        closed_step=row[11],
        actions=tuple(map(text, items(row[12]))),
    )
