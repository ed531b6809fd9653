"""An incident as a row of the store, and back. Pure."""

import json
import math
from dataclasses import astuple
from typing import Any

from pacekeeper.core.incidents.findings import (
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.incidents.rank_failures import RankFailures
from pacekeeper.core.incidents.rank_ranges import count_ranks, merge_ranges
from pacekeeper.core.layout.codec import decode_layout, encode_layout

SMALL = 1 << 32  # steps, ranks and generations are less: so they are told


LARGE = 1 << 62  # numbers that are counted on, and bytes: SQLite holds twice that


def whole(value: Any, below: int = SMALL) -> int:
    """A count. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r:.40} is no whole number below {below}")
    return value


def step_of(value: Any) -> int:
    """A step, -1 before the first complete one. Raises ValueError for anything else."""
    return -1 if value == -1 else whole(value)


def real(value: Any) -> float:
    """A number. Raises ValueError for anything else."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{value!r:.40} is too large a number") from None


def text(value: Any) -> str:
    """A text that can be told. Raises ValueError for anything else."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is no text")
    value.encode()
    return value


def items(column: str) -> list[Any]:
    """Those of a list. Raises ValueError for anything else."""
    try:
        found = json.loads(column)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(found) is not list:
        raise ValueError(f"{column:.40} is no list")
    return found


def pairs(column: str) -> list[tuple[Any, Any]]:
    """Those of a list. Raises ValueError for anything else."""
    found = items(column)
    if not all(type(one) is list and len(one) == 2 for one in found):
        raise ValueError(f"{column:.40} is no list of pairs")
    return [(one, other) for one, other in found]


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
        json.dumps([astuple(one) for one in incident.rank_failures]),
        json.dumps(incident.nodes),
        int(incident.is_persistent),
        json.dumps(finding.normal_signals),
        json.dumps(finding.missing_signals),
    )


def incident_of(row: tuple[Any, ...]) -> Incident:
    """Raises ValueError or TypeError for what is no such row."""
    return Incident(
        incident_id=whole(row[0], LARGE),
        job=text(row[1]),
        finding=Finding(
            kind=FindingKind(row[2]),
            tier=Tier(row[3]),
            rank=None if row[4] is None else whole(row[4]),
            slowdown=math.nan if row[5] is None else real(row[5]),  # SQLite keeps NaN as NULL
            onset_step=whole(row[6]),
            step=whole(row[7]),
            reason=text(row[8]),
            cause=text(row[13]),
            probe=text(row[14]),
            role=text(row[15]),
            normal_signals=tuple(map(text, items(row[19]))),
            missing_signals=tuple(map(text, items(row[20]))),
        ),
        opened_unix_s=real(row[9]),
        closed_unix_s=None if row[10] is None else real(row[10]),
        closed_step=None if row[11] is None else step_of(row[11]),
        actions=tuple(map(text, items(row[12]))),
        rank_failures=tuple(map(_deaths, items(row[16]))),
        nodes=tuple(map(text, items(row[17]))),
        is_persistent=whole(row[18]) != 0,
    )


def _deaths(plain: Any) -> RankFailures:
    """Raises ValueError or TypeError for what is none."""
    ranks, reason, step, unix_s, closed_unix_s, closed_step = plain
    runs = tuple((whole(first), whole(last)) for first, last in ranks)
    if any(first > last for first, last in runs) or merge_ranges(runs) != runs:
        raise ValueError(f"{runs!s:.40} are no runs of ranks")
    if count_ranks(runs) > MOST_RANKS:
        raise ValueError(f"{count_ranks(runs)} ranks of one incident")
    return RankFailures(
        ranks=runs,
        reason=text(reason),
        step=whole(step),
        unix_s=real(unix_s),
        closed_unix_s=None if closed_unix_s is None else real(closed_unix_s),
        closed_step=None if closed_step is None else whole(closed_step),
    )


def proposal_row(proposal: Proposal) -> tuple[Any, ...]:
    """The columns of the table `proposals`, in their order."""
    decision = proposal.decision
    return (
        proposal.proposal_id,
        proposal.job,
        proposal.answer,
        decision.level,
        decision.reason,
        decision.current_step_s,
        decision.planned_step_s,
        decision.fluid_step_s,
        decision.cost_s,
        decision.moved_bytes,
        encode_layout(proposal.plan),
        encode_layout(proposal.base),
        json.dumps(sorted(proposal.slow.items())),
        json.dumps(proposal.incident_ids),
        proposal.made_unix_s,
        proposal.expires_unix_s,
        proposal.operator,
        proposal.note,
    )


def proposal_of(row: tuple[Any, ...]) -> Proposal:
    """Raises ValueError or TypeError for what is no such row."""
    return Proposal(
        proposal_id=whole(row[0], LARGE),
        job=text(row[1]),
        answer=ProposalState(row[2]),
        decision=Decision(
            level=MitigationLevel(row[3]),
            reason=text(row[4]),
            current_step_s=real(row[5]),
            planned_step_s=real(row[6]),
            fluid_step_s=real(row[7]),
            cost_s=real(row[8]),
            moved_bytes=whole(row[9], LARGE),
            layout=decode_layout(row[10]),
        ),
        base=decode_layout(row[11]),
        slow={whole(rank): real(slowdown) for rank, slowdown in pairs(row[12])},
        incident_ids=tuple(whole(one, LARGE) for one in items(row[13])),
        made_unix_s=real(row[14]),
        expires_unix_s=real(row[15]),
        operator=text(row[16]),
        note=text(row[17]),
    )
