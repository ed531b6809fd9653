"""Probes: short measurements of all ranks, before a costly plan or to locate a slow link. Pure.

The request is repeated each second until all ranks answer; a rank runs each probe number once. The
result is recorded in the findings of the slow ranks. A finding with a result, also a missing one,
is not probed again for plans, so that no plan waits for ever. Called by `machine.py` on decisions
and ticks, and by `reports.py` with the records.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pacekeeper.controller.detection import incidents, link_verdicts
from pacekeeper.controller.mitigation.rollout import on_all_recovered
from pacekeeper.controller.mitigation.verification import timeout_s
from pacekeeper.controller.state.events import Command, Log, RequestProbe, SaveJob
from pacekeeper.controller.state.job_parts import OpenProbe
from pacekeeper.controller.state.plan_phase import (
    PlanEvent,
    Probing,
    Proposed,
    WithdrawCause,
    Withdrawn,
    transition,
)
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.telemetry.pair_probe import next_number
from pacekeeper.core.telemetry.records import PairRecord, ProbeRecord
from pacekeeper.core.text import format_s
from pacekeeper.predictor.assurance.probe_verdict import ProbeComparison, compare_probe, tier_of
from pacekeeper.predictor.detector.state import forget

ASK_EVERY_S = 60.0


def standby_ranks(job: JobState) -> frozenset[int]:
    """Return the standby ranks, which end each step without any work."""
    return (
        frozenset() if job.layouts.current is None else frozenset(job.layouts.current.standing_by)
    )


def is_due(job: JobState, slow: Mapping[int, Finding], now_s: float) -> bool:
    """Whether a slow standby rank should be probed again for recovery."""
    is_time = now_s - job.detection.stood_by_asked_s >= ASK_EVERY_S
    return is_time and bool(standby_ranks(job) & slow.keys())


def close_recovered(
    job: JobState, finding: Finding, reading: ProbeComparison, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Close the finding of a slow standby rank whose probe is at normal speed."""
    rank = finding.rank
    assert rank is not None, "a device finding names a rank"
    if tier_of(reading, finding.slowdown) is not Tier.SUSPECTED:
        return job, []
    by_role = {role: forget(kept, {rank}) for role, kept in job.detection.by_role.items()}
    job = replace(
        job,
        detection=replace(
            job.detection, evidence=forget(job.detection.evidence, {rank}), by_role=by_role
        ),
    )
    why = f"standby rank {rank} is at normal speed again: {reading}"
    job, commands = incidents.close(job, {rank}, FindingKind.DEVICE, unix_s, why)
    if not job.detection.evidence.slow:
        job = on_all_recovered(job)
    return job, [*commands, SaveJob(job=job.name)]


REPEAT_S = 1.0
ANSWER_WITHIN_S, ANSWER_WITHIN_STEPS = 20.0, 4
UNSUPPORTED = "no probe: the trainer does not support probes"


def unprobed(job: JobState) -> frozenset[int]:
    """Return the slow ranks whose finding has no probe result yet."""
    return frozenset(rank for rank, finding in _slow_findings(job).items() if not finding.probe)


def refuted(job: JobState) -> frozenset[int]:
    """Return the slow ranks whose probe did not confirm the finding."""
    return frozenset(
        r for r, finding in _slow_findings(job).items() if finding.tier is Tier.SUSPECTED
    )


def request_probe(
    job: JobState, proposed: Proposed, now_s: float, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Request the probe that a plan waits for; record on the findings where none can be run."""
    layout, decision = job.layouts.current, proposed.decision
    assert layout is not None, "a decision is made on a layout"
    ranks = layout.ranks
    job = replace(
        job, plan=replace(job.plan, decided_on=None)
    )  # it is decided again when this is settled
    if not _support_probes(job, ranks):
        return _end_without_result(job, UNSUPPORTED)
    job, question = _open_probe(job, ranks, now_s, unix_s)
    probing = Probing(decision=decision, probe=question.number)
    probing = transition(proposed, PlanEvent.PROBE_ASKED, probing)
    job = replace(job, plan=replace(job.plan, probing=probing))
    ranks_text = format_ranks(decision.unconfirmed)
    text = (
        f"job={job.name} probe={question.number} requested to confirm that ranks {ranks_text} are"
        f" slow ({decision.reason})"
    )
    return job, [Log(text=text), _request(job, question)]


def record_answers(
    job: JobState, records: Iterable[ProbeRecord], pairs: Iterable[PairRecord], unix_s: float
) -> tuple[JobState, list[Command]]:
    """Record answers to the open probe, and judge it once all are there; others are ignored."""
    question = job.detection.probe
    if question is None:
        return job, []
    met = {
        (one.rank, one.peer): one
        for one in pairs
        if one.number == question.number and {one.rank, one.peer} <= set(question.ranks)
    }
    if met:
        question = replace(question, pairs={**question.pairs, **met})
        job = replace(job, detection=replace(job.detection, probe=question))
    fresh = {r.rank: r for r in records if r.number == question.number and r.rank in question.ranks}
    if not fresh:
        return job, []
    question = replace(question, records={**question.records, **fresh})
    job = replace(job, detection=replace(job.detection, probe=question))
    if len(question.records) < len(question.ranks):
        return job, []
    return _judge(job, question, unix_s)


def update_probe(job: JobState, now_s: float, unix_s: float) -> tuple[JobState, list[Command]]:
    """On a tick: repeat or give up the open probe; start one for slow ranks that are idle."""
    question = job.detection.probe
    if question is None:
        layout = job.layouts.current
        if layout is None or not _support_probes(job, layout.ranks):
            return job, []
        if link_verdicts.is_probe_due(job, now_s):
            job = link_verdicts.note_request(job, now_s)
            job, question = _open_probe(job, layout.ranks, now_s, unix_s, pairwise=True)
            return job, [_request(job, question)]
        if not is_due(job, _slow_findings(job), now_s):
            return job, []
        job, question = _open_probe(job, layout.ranks, now_s, unix_s)
        return replace(job, detection=replace(job.detection, stood_by_asked_s=now_s)), [
            _request(job, question)
        ]
    is_same_group = job.layouts.current is not None and job.layouts.current.ranks == question.ranks
    if not is_same_group or set(question.ranks) - set(job.living):
        # It is unknown which ranks ran it: a later decision may request another probe.
        why = "the job runs on other ranks now"
        text = f"job={job.name} probe={question.number} given up: {why}"
        return _end_probe(job), [Log(text=text)]
    within_s = timeout_s(job, ANSWER_WITHIN_S, ANSWER_WITHIN_STEPS)
    if now_s - question.asked_s > within_s:
        if question.records:
            return _judge(job, question, unix_s)  # by the ranks that answered
        return _end_without_result(job, f"no probe: not answered for {format_s(within_s)}")
    if now_s - question.said_s < REPEAT_S:
        return job, []
    return replace(
        job,
        detection=replace(
            job.detection,
            probe=replace(question, said_s=now_s),
        ),
    ), [_request(job, question)]


def _support_probes(job: JobState, ranks: Iterable[int]) -> bool:
    """Whether all ranks are attached with a trainer that supports probes."""
    return all(rank in job.ranks and job.ranks[rank].attachment.can_probe for rank in ranks)


def _open_probe(
    job: JobState,
    ranks: tuple[int, ...],
    now_s: float,
    unix_s: float,
    *,
    pairwise: bool = False,
) -> tuple[JobState, OpenProbe]:
    number = next_number(job.detection.newest_probe, unix_s=unix_s, pairwise=pairwise)
    question = OpenProbe(number=number, ranks=ranks, asked_s=now_s, said_s=now_s)
    return replace(
        job, detection=replace(job.detection, probe=question, newest_probe=number)
    ), question


def _judge(job: JobState, question: OpenProbe, unix_s: float) -> tuple[JobState, list[Command]]:
    """Record the probe result of each slow rank, compared with ranks without a finding."""
    slow, resting = _slow_findings(job), standby_ranks(job)
    commands: list[Command] = []
    for rank, finding in slow.items():
        reading = compare_probe(question.records, rank, slow)
        if rank in resting and finding.probe:
            if reading is not None:
                job, said = close_recovered(job, finding, reading, unix_s)
                commands += said
            continue
        tier, text = finding.tier, "no probe: no answer, or no peer to compare with"
        if reading is not None:
            tier = tier_of(reading, finding.slowdown)
            text = f"{reading}: {'confirmed' if tier is Tier.CONFIRMED else 'not confirmed'}"
        job, said = incidents.note_probe(job, rank, tier, text)
        commands += said
    job, said = link_verdicts.apply_pairs(job, question)
    return _end_probe(job), [*commands, *said]


def _end_probe(job: JobState) -> JobState:
    """Return the job without an open probe; the plan that waited for it is decided on again."""
    plan = replace(job.plan, probing=None, decided_on=None)
    if job.plan.probing is not None:
        outcome = Withdrawn(cause=WithdrawCause.DECIDED_AGAIN)
        outcome = transition(job.plan.probing, PlanEvent.PROBE_ENDED, outcome)
        plan = replace(plan, last_outcome=outcome)
    return replace(job, detection=replace(job.detection, probe=None), plan=plan)


def _end_without_result(job: JobState, text: str) -> tuple[JobState, list[Command]]:
    """End the open probe without a result: the findings keep their tiers."""
    commands: list[Command] = []
    for rank, finding in _slow_findings(job).items():
        if not finding.probe:
            job, said = incidents.note_probe(job, rank, finding.tier, text)
            commands += said
    if job.detection.probe is not None:
        job, said = link_verdicts.apply_pairs(job, job.detection.probe)
        commands += said
    return _end_probe(job), commands


def _slow_findings(job: JobState) -> dict[int, Finding]:
    """Return the open findings of devices, by rank."""
    found = (incident.finding for incident in job.open_incidents)
    return {f.rank: f for f in found if f.kind is FindingKind.DEVICE and f.rank is not None}


def _request(job: JobState, question: OpenProbe) -> RequestProbe:
    return RequestProbe(job=job.name, nodes=job.nodes, number=question.number, run_id=job.run_id)
