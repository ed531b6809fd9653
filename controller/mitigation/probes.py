"""Before a costly action all ranks are asked for a probe, once; what comes of it stands in the
finding. Pure.

Asked again each second until it is answered, like a plan; ranks run a number once. A finding that
has a word on its probe, whichever, is not asked about again, so that nothing waits for ever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.mitigation.rollout import on_all_recovered
from pacekeeper.controller.mitigation.verification import patience_s
from pacekeeper.controller.state.events import AskProbe, Command, SaveJob, Say
from pacekeeper.controller.state.job_parts import ProbeQuestion
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
from pacekeeper.core.telemetry.records import ProbeRecord
from pacekeeper.predictor.assurance.probe_verdict import ProbeComparison, compare_probe, tier_of
from pacekeeper.predictor.online.state import forget

ASK_EVERY_S = 60.0


def standing_by(job: JobState) -> frozenset[int]:
    """Ranks that end each step without any work."""
    return (
        frozenset() if job.layouts.current is None else frozenset(job.layouts.current.standing_by)
    )


def is_due(job: JobState, slow: Mapping[int, Finding], now_s: float) -> bool:
    """Is it time to probe whether an idle slow rank has recovered?"""
    is_time = now_s - job.detection.stood_by_asked_s >= ASK_EVERY_S
    return is_time and bool(standing_by(job) & slow.keys())


def take_reading(
    job: JobState, finding: Finding, reading: ProbeComparison, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Close the finding of an idle slow rank whose probe is at normal speed."""
    rank = finding.rank
    assert rank is not None, "of a rank's device"
    if tier_of(reading, finding.slowdown) is not Tier.SUSPECTED:
        return job, []
    by_role = {role: forget(kept, {rank}) for role, kept in job.detection.by_role.items()}
    job = replace(
        job,
        detection=replace(
            job.detection, evidence=forget(job.detection.evidence, {rank}), by_role=by_role
        ),
    )
    why = f"rank {rank} stands by and is well again: {reading}"
    job, commands = incidents.close(job, {rank}, FindingKind.DEVICE, unix_s, why)
    if not job.detection.evidence.slow:
        job = on_all_recovered(job)
    return job, [*commands, SaveJob(job=job.name)]


REPEAT_S = 1.0
ANSWER_WITHIN_S, ANSWER_WITHIN_STEPS = 20.0, 4
UNSUPPORTED = "no probe: this trainer can not run one"


def unread(job: JobState) -> frozenset[int]:
    """Slow ranks of which no probe has been read, or given up, since they were found."""
    return frozenset(rank for rank, finding in _slow(job).items() if not finding.probe)


def refuted(job: JobState) -> frozenset[int]:
    """Slow ranks whose probe did not bear the finding out."""
    return frozenset(r for r, finding in _slow(job).items() if finding.tier is Tier.SUSPECTED)


def ask(
    job: JobState, proposed: Proposed, now_s: float, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Ask for the probe that a plan waits for; note on the findings where none can be run."""
    layout, decision = job.layouts.current, proposed.decision
    assert layout is not None, "a decision is made on a layout"
    ranks = layout.ranks
    job = replace(
        job, plan=replace(job.plan, decided_on=None)
    )  # it is decided again when this is settled
    if not _can_all(job, ranks):
        return _settled(job, UNSUPPORTED)
    job, question = _put(job, ranks, now_s, unix_s)
    probing = Probing(decision=decision, probe=question.number)
    probing = transition(proposed, PlanEvent.PROBE_ASKED, probing)
    job = replace(job, plan=replace(job.plan, probing=probing))
    who = format_ranks(decision.unconfirmed)
    text = (
        f"job={job.name} probe={question.number} asked: are ranks {who} slow? ({decision.reason})"
    )
    return job, [Say(text=text), _asked(job, question)]


def record_answers(
    job: JobState, records: Iterable[ProbeRecord], unix_s: float
) -> tuple[JobState, list[Command]]:
    """Answers to the open question; what belongs to none is left."""
    question = job.detection.probe
    if question is None:
        return job, []
    fresh = {r.rank: r for r in records if r.number == question.number and r.rank in question.ranks}
    if not fresh:
        return job, []
    question = replace(question, records={**question.records, **fresh})
    job = replace(job, detection=replace(job.detection, probe=question))
    if len(question.records) < len(question.ranks):
        return job, []
    return _judged(job, question, unix_s)


def update_probe(job: JobState, now_s: float, unix_s: float) -> tuple[JobState, list[Command]]:
    """On a tick: repeat or give up the open probe; start one for slow ranks that are idle."""
    question = job.detection.probe
    if question is None:
        layout = job.layouts.current
        if layout is None or not is_due(job, _slow(job), now_s) or not _can_all(job, layout.ranks):
            return job, []
        job, question = _put(job, layout.ranks, now_s, unix_s)
        return replace(job, detection=replace(job.detection, stood_by_asked_s=now_s)), [
            _asked(job, question)
        ]
    is_same_group = job.layouts.current is not None and job.layouts.current.ranks == question.ranks
    if not is_same_group or set(question.ranks) - set(job.living):
        # Who of them ran it and who did not can not be told: a later decision may ask anew.
        why = "the ranks it was put to are no longer the same"
        text = f"job={job.name} probe={question.number} given up: {why}"
        return _ended(job), [Say(text=text)]
    within_s = patience_s(job, ANSWER_WITHIN_S, ANSWER_WITHIN_STEPS)
    if now_s - question.asked_s > within_s:
        if question.records:
            return _judged(job, question, unix_s)  # of those that told
        return _settled(job, f"no probe: not answered for {within_s:.0f} s")
    if now_s - question.said_s < REPEAT_S:
        return job, []
    return replace(
        job,
        detection=replace(
            job.detection,
            probe=replace(question, said_s=now_s),
        ),
    ), [_asked(job, question)]


def _can_all(job: JobState, ranks: Iterable[int]) -> bool:
    """Are all of them known, with a trainer that can run a probe?"""
    return all(rank in job.ranks and job.ranks[rank].attachment.can_probe for rank in ranks)


def _put(
    job: JobState, ranks: tuple[int, ...], now_s: float, unix_s: float
) -> tuple[JobState, ProbeQuestion]:
    # Unix milliseconds: numbers ascend from one start of the controller to the next.
    number = max(job.detection.newest_probe + 1, round(unix_s * 1e3))
    question = ProbeQuestion(number=number, ranks=ranks, asked_s=now_s, said_s=now_s)
    return replace(
        job, detection=replace(job.detection, probe=question, newest_probe=number)
    ), question


def _judged(
    job: JobState, question: ProbeQuestion, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Record the probe result of each slow rank, compared with ranks without a finding."""
    slow, resting = _slow(job), standing_by(job)
    commands: list[Command] = []
    for rank, finding in slow.items():
        reading = compare_probe(question.records, rank, slow)
        if rank in resting and finding.probe:
            if reading is not None:
                job, said = take_reading(job, finding, reading, unix_s)
                commands += said
            continue
        tier, text = finding.tier, "no probe: it was not told, or there is no peer to compare with"
        if reading is not None:
            tier = tier_of(reading, finding.slowdown)
            text = f"{reading}: {'borne out' if tier is Tier.CONFIRMED else 'not borne out'}"
        job, said = incidents.note_probe(job, rank, tier, text)
        commands += said
    return _ended(job), commands


def _ended(job: JobState) -> JobState:
    """Return the job without an open probe; what waited for it is decided on again."""
    plan = replace(job.plan, probing=None, decided_on=None)
    if job.plan.probing is not None:
        outcome = Withdrawn(cause=WithdrawCause.DECIDED_AGAIN)
        outcome = transition(job.plan.probing, PlanEvent.PROBE_ENDED, outcome)
        plan = replace(plan, last_outcome=outcome)
    return replace(job, detection=replace(job.detection, probe=None), plan=plan)


def _settled(job: JobState, text: str) -> tuple[JobState, list[Command]]:
    """No reading will come: the findings stay what their evidence made them."""
    commands: list[Command] = []
    for rank, finding in _slow(job).items():
        if not finding.probe:
            job, said = incidents.note_probe(job, rank, finding.tier, text)
            commands += said
    return _ended(job), commands


def _slow(job: JobState) -> dict[int, Finding]:
    """The open findings that name a rank's device, by rank."""
    found = (incident.finding for incident in job.open_incidents)
    return {f.rank: f for f in found if f.kind is FindingKind.DEVICE and f.rank is not None}


def _asked(job: JobState, question: ProbeQuestion) -> AskProbe:
    return AskProbe(job=job.name, nodes=job.nodes, number=question.number, run_id=job.run_id)
