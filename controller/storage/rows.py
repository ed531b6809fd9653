"""An incident as a row of the store, and back. Pure."""

import json
import math
from dataclasses import astuple
from typing import Any

from pacekeeper.controller.storage.json_columns import items, real, text, whole
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.incidents.rank_failures import Deaths
from pacekeeper.core.incidents.rank_ranges import joined, num_ranks

MOST_RANKS = 1 << 24  # of a job: more are damage, and would be counted for hours


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
        json.dumps([astuple(one) for one in incident.deaths]),
        json.dumps(incident.nodes),
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
        deaths=tuple(map(_deaths, items(row[16]))),
        nodes=tuple(map(text, items(row[17]))),
    )


def _deaths(plain: Any) -> Deaths:
    """Raises ValueError or TypeError for what is none."""
    ranks, reason, step, unix_s, closed_unix_s, closed_step = plain
    runs = tuple((whole(first), whole(last)) for first, last in ranks)
    if any(first > last for first, last in runs) or joined(runs) != runs:
        raise ValueError(f"{runs!s:.40} are no runs of ranks")
    if num_ranks(runs) > MOST_RANKS:
        raise ValueError(f"{num_ranks(runs)} ranks of one incident")
    return Deaths(
        ranks=runs,
        reason=text(reason),
        step=whole(step),
        unix_s=real(unix_s),
        closed_unix_s=None if closed_unix_s is None else real(closed_unix_s),
        closed_step=None if closed_step is None else whole(closed_step),
    )
