"""Converts incidents, proposals, jobs, orders and strikes to rows of the store, and back. Pure.

A row is a mapping from column names to values. Rows are validated when they are read: an invalid
one means a damaged store.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from pacekeeper.controller.state.device_history import Strike
from pacekeeper.controller.state.state import JobRecord, RankRecord, RankStatus
from pacekeeper.core.incidents.findings import (
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.incidents.rank_failures import RankFailures
from pacekeeper.core.incidents.rank_ranges import count_ranks, merge_ranges
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout

SMALL = 1 << 32  # steps, ranks and generations are below it


Row = Mapping[Any, Any]
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
    """A text that can be encoded. Raises ValueError for anything else."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is no text")
    value.encode()
    return value


def items(column: str) -> list[Any]:
    """Decode a JSON list. Raises ValueError for anything else."""
    try:
        found = json.loads(column)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(found) is not list:
        raise ValueError(f"{column:.40} is no list")
    return found


def pairs(column: str) -> list[tuple[Any, Any]]:
    """Decode a JSON list of pairs. Raises ValueError for anything else."""
    found = items(column)
    if not all(type(one) is list and len(one) == 2 for one in found):
        raise ValueError(f"{column:.40} is no list of pairs")
    return [(one, other) for one, other in found]


MOST_RANKS = 1 << 24  # of a job: more are damage, and would be counted for hours


def incident_row(incident: Incident) -> dict[str, Any]:
    """The row of the table `incidents`."""
    finding = incident.finding
    return {
        "incident_id": incident.incident_id,
        "job": incident.job,
        "kind": finding.kind,
        "tier": finding.tier,
        "rank": finding.rank,
        "slowdown": finding.slowdown,
        "onset_step": finding.onset_step,
        "step": finding.step,
        "reason": finding.reason,
        "opened_unix_s": incident.opened_unix_s,
        "closed_unix_s": incident.closed_unix_s,
        "closed_step": incident.closed_step,
        "actions": json.dumps(incident.actions),
        "cause": finding.cause,
        "probe": finding.probe,
        "role": finding.role,
        "rank_failures": json.dumps([astuple(one) for one in incident.rank_failures]),
        "nodes": json.dumps(incident.nodes),
        "is_persistent": int(incident.is_persistent),
        "normal_signals": json.dumps(finding.normal_signals),
        "missing_signals": json.dumps(finding.missing_signals),
    }


def incident_of(row: Row) -> Incident:
    """Raises ValueError or TypeError for what is no such row."""
    slowdown, closed_unix_s = row["slowdown"], row["closed_unix_s"]
    return Incident(
        incident_id=whole(row["incident_id"], LARGE),
        job=text(row["job"]),
        finding=Finding(
            kind=FindingKind(row["kind"]),
            tier=Tier(row["tier"]),
            rank=None if row["rank"] is None else whole(row["rank"]),
            slowdown=math.nan if slowdown is None else real(slowdown),
            onset_step=whole(row["onset_step"]),
            step=whole(row["step"]),
            reason=text(row["reason"]),
            cause=text(row["cause"]),
            probe=text(row["probe"]),
            role=text(row["role"]),
            normal_signals=tuple(map(text, items(row["normal_signals"]))),
            missing_signals=tuple(map(text, items(row["missing_signals"]))),
        ),
        opened_unix_s=real(row["opened_unix_s"]),
        closed_unix_s=None if closed_unix_s is None else real(closed_unix_s),
        closed_step=None if row["closed_step"] is None else step_of(row["closed_step"]),
        actions=tuple(map(text, items(row["actions"]))),
        rank_failures=tuple(map(_failures_of, items(row["rank_failures"]))),
        nodes=tuple(map(text, items(row["nodes"]))),
        is_persistent=whole(row["is_persistent"]) != 0,
    )


def _failures_of(plain: Any) -> RankFailures:
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


def proposal_row(proposal: Proposal) -> dict[str, Any]:
    """The row of the table `proposals`."""
    return {
        "proposal_id": proposal.proposal_id,
        "job": proposal.job,
        "answer": proposal.answer,
        **_prices(proposal.decision),
        "plan": encode_layout(proposal.plan),
        "base": encode_layout(proposal.base),
        "slow": json.dumps(sorted(proposal.slow.items())),
        "incident_ids": json.dumps(proposal.incident_ids),
        "made_unix_s": proposal.made_unix_s,
        "expires_unix_s": proposal.expires_unix_s,
        "operator": proposal.operator,
        "note": proposal.note,
    }


def decision_row(
    decision_id: int, job: str, step: int, decision: Decision, unix_s: float
) -> dict[str, Any]:
    """The row of the table `decisions`."""
    own = {"decision_id": decision_id, "unix_s": unix_s, "job": job, "step": step}
    return {**own, **_prices(decision)}


def _prices(decision: Decision) -> dict[str, Any]:
    names = ("level", "reason", "current_step_s", "planned_step_s", "fluid_step_s")
    return {name: getattr(decision, name) for name in (*names, "cost_s", "moved_bytes")}


def proposal_of(row: Row) -> Proposal:
    """Raises ValueError or TypeError for what is no such row."""
    return Proposal(
        proposal_id=whole(row["proposal_id"], LARGE),
        job=text(row["job"]),
        answer=ProposalState(row["answer"]),
        decision=Decision(
            level=MitigationLevel(row["level"]),
            reason=text(row["reason"]),
            current_step_s=real(row["current_step_s"]),
            planned_step_s=real(row["planned_step_s"]),
            fluid_step_s=real(row["fluid_step_s"]),
            cost_s=real(row["cost_s"]),
            moved_bytes=whole(row["moved_bytes"], LARGE),
            layout=decode_layout(row["plan"]),
        ),
        base=decode_layout(row["base"]),
        slow={whole(rank): real(slowdown) for rank, slowdown in pairs(row["slow"])},
        incident_ids=tuple(whole(one, LARGE) for one in items(row["incident_ids"])),
        made_unix_s=real(row["made_unix_s"]),
        expires_unix_s=real(row["expires_unix_s"]),
        operator=text(row["operator"]),
        note=text(row["note"]),
    )


def job_row(job: JobRecord) -> dict[str, Any]:
    """The row of the table `jobs`."""
    return {
        "name": job.name,
        "newest_generation": job.newest_generation,
        "step": job.step,
        "layout": _encoded(job.layout),
        "layout_reason": job.layout_reason,
        "desired": _encoded(job.desired),
        "baseline": _encoded(job.baseline),
        "ranks": json.dumps([[rank.rank, rank.pid, rank.status] for rank in job.ranks]),
        "run_id": job.run_id,
        "is_provisional": int(job.is_provisional),
    }


def job_of(row: Row) -> JobRecord:
    """Raises ValueError or TypeError for what is no such row."""
    return JobRecord(
        name=text(row["name"]),
        newest_generation=whole(row["newest_generation"]),
        step=step_of(row["step"]),
        layout=_decoded(row["layout"]),
        layout_reason=text(row["layout_reason"]),
        desired=_decoded(row["desired"]),
        baseline=_decoded(row["baseline"]),
        ranks=tuple(
            RankRecord(rank=whole(rank), pid=whole(pid), status=RankStatus(status))
            for rank, pid, status in items(row["ranks"])
        ),
        run_id=whole(row["run_id"], LARGE),
        is_provisional=bool(row["is_provisional"]),
    )


def strike_of(row: Row) -> Strike:
    """Raises ValueError or TypeError for what is no such row."""
    return Strike(
        incident_id=whole(row["incident_id"], LARGE),
        node=text(row["node"]),
        device_uuid=text(row["device_uuid"]),
        job=text(row["job"]),
        kind=FindingKind(row["kind"]),
        slowdown=real(row["slowdown"]),
        unix_s=real(row["unix_s"]),
    )


def order_of(row: Row) -> OperatorOrder:
    """Raises ValueError or TypeError for what is no such row."""
    return OperatorOrder(
        kind=OrderKind(row["kind"]),
        subject=text(row["subject"]),
        operator=text(row["operator"]),
        reason=text(row["reason"]),
        since_unix_s=real(row["since_unix_s"]),
        run_id=whole(row["run_id"], LARGE),
    )


def _encoded(layout: Layout | None) -> bytes | None:
    return None if layout is None else encode_layout(layout)


def _decoded(data: bytes | None) -> Layout | None:
    return None if data is None else decode_layout(data)
