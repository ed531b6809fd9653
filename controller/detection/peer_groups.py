"""Peer groups: ranks of one role do the same work and are compared only with each other. Pure.

A job with one role has one detector state, `detection.evidence`. A job with several has one per
role in `detection.by_role`; `detection.evidence` then holds only the slow ranks of all roles, and
no cost model, because one role's model does not predict another's work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np

from pacekeeper.controller.state.state import JobState
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import CoverageState, FindingKind
from pacekeeper.predictor.cost.features import FeatureTable, StepSample, sample_of_work
from pacekeeper.predictor.detector.global_slowdown import GlobalSlowdownChange
from pacekeeper.predictor.detector.roles import update_roles
from pacekeeper.predictor.detector.state import Evidence, Judgement, restore
from pacekeeper.predictor.detector.update import update_evidence

WORST_FIRST = (
    CoverageState.DEGRADED,
    CoverageState.SUSPICIOUS,
    CoverageState.MEASURING,
    CoverageState.HEALTHY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Ranks of one role, ascending, with the detector state of the role."""

    ranks: tuple[int, ...]
    evidence: Evidence


def num_roles(job: JobState) -> int:
    """Return the number of roles of the job's ranks."""
    return len(_roles(job))


def _roles(job: JobState) -> set[str]:
    return {known.attachment.role for known in job.ranks.values()}


def peers(job: JobState, ranks: Sequence[int]) -> list[Peers]:
    """Group ranks by role, in the order of the roles' names."""
    if num_roles(job) < 2:
        return [Peers(ranks=tuple(ranks), evidence=job.detection.evidence)]
    return [
        Peers(ranks=tuple(own), evidence=_evidence_of(job, role))
        for role, own in sorted(_by_role(job, ranks).items())
    ]


def evidence_by_role(job: JobState, roles: Iterable[str]) -> dict[str, Evidence]:
    """Return the detector state of each of these roles."""
    if num_roles(job) < 2:
        return dict.fromkeys(roles, job.detection.evidence)
    return {role: _evidence_of(job, role) for role in roles}


def samples_of(job: JobState, work: FeatureTable) -> dict[str, StepSample]:
    """Split the work of one complete step by role, in the order of the roles' names."""
    roles = _roles(job)
    if len(roles) == 1:
        return {role: sample_of_work(work) for role in roles}
    by_role = _by_role(job, np.unique(work["rank"]).astype(int).tolist())
    return {
        role: sample_of_work(work.only(np.isin(work["rank"], own)))
        for role, own in sorted(by_role.items())
    }


def judge_roles(
    config: DetectorConfig, job: JobState, samples: Mapping[str, StepSample]
) -> tuple[JobState, Judgement]:
    """Judge one complete step role by role.

    Args:
        config: The detector's settings.
        job: The job.
        samples: The step's work by role.

    Returns:
        The job with the new detector states, and one judgement for all roles.
    """
    roles = num_roles(job)
    if roles < 2:
        (sample,) = samples.values()
        evidence, judgement = update_evidence(config, job.detection.evidence, sample)
        return replace(
            job, detection=replace(job.detection, evidence=evidence, by_role={})
        ), judgement
    # Each role has charts of its own; together they keep the job's rate of false alarms.
    config = replace(config, false_alarms_per_job_day=config.false_alarms_per_job_day / roles)
    living = {job.ranks[rank].attachment.role for rank in job.living if rank in job.ranks}
    known = {role: kept for role, kept in job.detection.by_role.items() if role in living}
    died = sorted(job.detection.by_role.keys() - known.keys())
    known |= {role: _evidence_of(job, role) for role in samples}
    by_role, judged = update_roles(config, known, samples)
    slow = {rank: value for kept in by_role.values() for rank, value in kept.slow.items()}
    before = (
        job.detection.evidence.common.slowdown if job.detection.evidence.common is not None else 1.0
    )
    paces = (kept.common.slowdown for kept in by_role.values() if kept.common is not None)
    now = max(paces, default=1.0)
    job = replace(
        job,
        detection=replace(job.detection, evidence=restore(slow, everybody=now), by_role=by_role),
    )
    return job, replace(_merge(judged), common=_common_news(judged, before, now, died))


def _common_news(
    judged: Mapping[str, Judgement], before: float, now: float, died: Sequence[str]
) -> GlobalSlowdownChange:
    """Return the change of the slowdown common to all ranks of the slowest role.

    Args:
        judged: The judgements by role.
        before: The largest common slowdown of a role before the step; 1.0: none.
        now: The same after the step.
        died: Roles that have lost their last rank.
    """
    if before > 1.0:
        return GlobalSlowdownChange(
            is_over=now <= 1.0,
            changed=now if now > 1.0 and now != before else None,
            why=f"all ranks of role {' and '.join(died)} died" if died else "",
        )
    for role, judgement in judged.items():
        found = judgement.common.found
        if found is not None:
            return GlobalSlowdownChange(
                found=replace(found, role=role, reason=f"role {role}: {found.reason}")
            )
    return GlobalSlowdownChange()


def _by_role(job: JobState, ranks: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in dict.fromkeys(ranks):
        found.setdefault(job.ranks[rank].attachment.role, []).append(rank)
    return found


def _evidence_of(job: JobState, role: str) -> Evidence:
    """Return the detector state of one role of several.

    A role without one gets a new state with its ranks that were slow before a restart.
    """
    known = job.detection.by_role.get(role)
    if known is not None:
        return known
    own = {rank for rank, r in job.ranks.items() if r.attachment.role == role}
    together = (
        incident.finding.slowdown
        for incident in job.open_incidents
        if incident.finding.kind is FindingKind.HOST and incident.finding.role == role
    )
    return restore(
        {rank: value for rank, value in job.detection.evidence.slow.items() if rank in own},
        everybody=max(together, default=1.0),
    )


def _merge(judged: Mapping[str, Judgement]) -> Judgement:
    """Merge judgements into one: columns by rank, NaN for roles in warm-up; the worst coverage."""
    parts = list(judged.values())
    ranks = [rank for part in parts for rank in part.ranks]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    is_measuring = not any(part.expected_s for part in parts)

    def column(name: str) -> tuple[float, ...]:
        values = [x for p in parts for x in getattr(p, name) or [nan] * len(p.ranks)]
        return tuple(values[i] for i in order)

    watch = min((part.watch for part in parts), key=WORST_FIRST.index)
    reasons = [f"{r}: {p.reason}" for r, p in judged.items() if p.watch is watch and p.reason]
    return Judgement(
        step=parts[0].step,
        ranks=tuple(ranks[i] for i in order),
        observed_s=column("observed_s"),
        expected_s=() if is_measuring else column("expected_s"),
        slowdown=() if is_measuring else column("slowdown"),
        suspicion=() if is_measuring else column("suspicion"),
        findings=tuple(finding for part in parts for finding in part.findings),
        recovered=tuple(rank for part in parts for rank in part.recovered),
        changed={rank: value for part in parts for rank, value in part.changed.items()},
        watch=watch,
        reason="; ".join(reasons),
    )
